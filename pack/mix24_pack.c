/* Groups of mix24 <-> packed bytes, and what stored bytes must satisfy before they are used. */
#include "pack/mix24.h"

#include <string.h>

enum { HALF_ROWS = 8 };

/* ---- codes ---------------------------------------------------------------------------------- */

/* The words that hold the codes of one channel in the 8 rows of a half strip: word of row r at
 * first[r * stride]. */
struct column {
    uint32_t *first;
    size_t stride;
    unsigned shift;
};

static struct column column_at(const struct qt_mix24 *m, size_t strip, size_t slot, size_t c,
                               unsigned half)
{
    enum { LANES_PER_ROW = 4 };
    struct qt_mix24_place at =
        qt_mix24_place(m->slots, (unsigned)m->g, (uint32_t)slot, HALF_ROWS * half, (unsigned)c);
    if (at.in_b)
        return (struct column){m->b + (strip * m->b_words + at.word) * QT_FRAG_LANES + at.lane,
                               LANES_PER_ROW, at.shift};
    size_t unit = strip * m->units + at.word / QT_MIX24_A_WORDS;
    return (struct column){m->a + (unit * QT_FRAG_LANES + at.lane) * QT_MIX24_A_WORDS +
                               at.word % QT_MIX24_A_WORDS,
                           LANES_PER_ROW * QT_MIX24_A_WORDS, at.shift};
}

static void pack_codes(const struct qt_mix24 *m, size_t strip, size_t slot,
                       const struct qt_mix24_group *group)
{
    for (size_t c = 0; c < m->g; c++)
        for (unsigned half = 0; half < 2; half++) {
            struct column col = column_at(m, strip, slot, c, half);
            for (size_t r = 0; r < HALF_ROWS; r++)
                col.first[r * col.stride] |= (uint32_t)group->code[c][HALF_ROWS * half + r]
                                             << col.shift;
        }
}

static void unpack_codes(struct qt_mix24_group *group, const struct qt_mix24 *m, size_t strip,
                         size_t slot)
{
    uint32_t mask = (1u << qt_mix24_bits(m, slot)) - 1;
    for (size_t c = 0; c < m->g; c++)
        for (unsigned half = 0; half < 2; half++) {
            struct column col = column_at(m, strip, slot, c, half);
            for (size_t r = 0; r < HALF_ROWS; r++)
                group->code[c][HALF_ROWS * half + r] =
                    (uint8_t)(col.first[r * col.stride] >> col.shift & mask);
        }
}

/* ---- parameters ----------------------------------------------------------------------------- */

/* Where q and zero of a slot are: in the words word[16], stored in the order of the lanes. */
struct fields {
    uint16_t *word;
    unsigned q_shift, q_bits, zero_shift, zero_bits;
};

static struct fields fields_at(const struct qt_mix24 *m, size_t strip, size_t slot)
{
    if (qt_mix24_bits(m, slot) == 4) {
        size_t j = qt_mix24_four(m->slots, (uint32_t)slot);
        unsigned shift = 8 * (unsigned)(j % QT_MIX24_META4);
        return (struct fields){m->meta4 + (strip * m->pairs + j / QT_MIX24_META4) * QT_FRAG_ROWS,
                               shift, 4, shift + 4, 4};
    }
    size_t j = qt_mix24_two(m->slots, (uint32_t)slot);
    unsigned f = (unsigned)(j % QT_MIX24_META);
    return (struct fields){m->meta + (strip * m->triples + j / QT_MIX24_META) * QT_FRAG_ROWS,
                           qt_mix24_q_shift(f), qt_mix24_q_bits(f), qt_mix24_zero_shift(f), 2};
}

static unsigned take(uint16_t word, unsigned shift, unsigned bits)
{
    return word >> shift & ((1u << bits) - 1);
}

static void pack_parameters(const struct qt_mix24 *m, size_t strip, size_t slot,
                            const struct qt_mix24_group *group)
{
    struct fields at = fields_at(m, strip, slot);
    size_t index = strip * m->slots.slots + slot;
    for (unsigned r = 0; r < QT_FRAG_ROWS; r++)
        at.word[qt_frag_scale_slot(r)] |=
            (uint16_t)(group->q[r] << at.q_shift | group->zero[r] << at.zero_shift);
    for (size_t h = 0; h < m->halves; h++) {
        m->s2[index * m->halves + h] = group->s2[h];
        m->z2[index / QT_MIX24_Z2_SLOTS * m->halves + h] |=
            (uint16_t)(group->z2[h] << 4 * (slot % QT_MIX24_Z2_SLOTS));
    }
}

static void unpack_parameters(struct qt_mix24_group *group, const struct qt_mix24 *m, size_t strip,
                              size_t slot)
{
    struct fields at = fields_at(m, strip, slot);
    size_t index = strip * m->slots.slots + slot;
    for (unsigned r = 0; r < QT_FRAG_ROWS; r++) {
        uint16_t word = at.word[qt_frag_scale_slot(r)];
        group->q[r] = (uint8_t)take(word, at.q_shift, at.q_bits);
        group->zero[r] = (uint8_t)take(word, at.zero_shift, at.zero_bits);
    }
    for (size_t half = 0; half < 2; half++) {
        size_t h = half % m->halves; /* one value for both halves, or two */
        group->s2[half] = m->s2[index * m->halves + h];
        group->z2[half] = (uint8_t)take(m->z2[index / QT_MIX24_Z2_SLOTS * m->halves + h],
                                        4 * (unsigned)(slot % QT_MIX24_Z2_SLOTS), 4);
    }
}

/* ---- strips --------------------------------------------------------------------------------- */

/* The sections that have a part per strip. */
enum { STRIP_PARTS = 6 };
struct part {
    void *data;
    size_t bytes; /* of one strip */
};

static void parts_of(struct part part[STRIP_PARTS], const struct qt_mix24 *m)
{
    size_t slots = m->slots.slots;
    part[0] = (struct part){m->a, m->units * QT_FRAG_LANES * QT_MIX24_A_WORDS * sizeof *m->a};
    part[1] = (struct part){m->b, m->b_words * QT_FRAG_LANES * sizeof *m->b};
    part[2] = (struct part){m->meta, m->triples * QT_FRAG_ROWS * sizeof *m->meta};
    part[3] = (struct part){m->meta4, m->pairs * QT_FRAG_ROWS * sizeof *m->meta4};
    part[4] = (struct part){m->s2, slots * m->halves * sizeof *m->s2};
    part[5] = (struct part){m->z2, slots / QT_MIX24_Z2_SLOTS * m->halves * sizeof *m->z2};
}

void qt_mix24_pack(const struct qt_mix24 *m, size_t strip, const struct qt_mix24_group *groups)
{
    struct part part[STRIP_PARTS];
    parts_of(part, m);
    for (int i = 0; i < STRIP_PARTS; i++)
        if (part[i].bytes)
            memset((unsigned char *)part[i].data + strip * part[i].bytes, 0, part[i].bytes);
    for (size_t slot = 0; slot < m->slots.slots; slot++) {
        pack_codes(m, strip, slot, &groups[slot]);
        pack_parameters(m, strip, slot, &groups[slot]);
    }
}

static void unpack_group(struct qt_mix24_group *group, const struct qt_mix24 *m, size_t strip,
                         size_t slot)
{
    unpack_codes(group, m, strip, slot);
    unpack_parameters(group, m, strip, slot);
}

void qt_mix24_unpack(struct qt_mix24_group *groups, const struct qt_mix24 *m, size_t strip)
{
    for (size_t slot = 0; slot < m->slots.slots; slot++)
        unpack_group(&groups[slot], m, strip, slot);
}

/* ---- checks --------------------------------------------------------------------------------- */

/* Sets what is padding to what it must be. */
static void clear_padding(struct qt_mix24_group *groups, const struct qt_mix24 *m, size_t rows)
{
    for (size_t slot = 0; slot < m->slots.slots; slot++) {
        struct qt_mix24_group *group = &groups[slot];
        size_t first = m->perm[slot] * m->g;
        if (first >= m->k) {
            memset(group, 0, sizeof *group);
            continue;
        }
        for (size_t r = rows; r < QT_FRAG_ROWS; r++)
            group->q[r] = group->zero[r] = 0;
        for (size_t c = 0; c < m->g; c++)
            for (size_t r = 0; r < QT_FRAG_ROWS; r++)
                if (r >= rows || first + c >= m->k)
                    group->code[c][r] = group->zero[r];
    }
}

bool qt_mix24_repack_equal(const struct qt_packed *p, const struct qt_strip *strip)
{
    struct qt_mix24 m, copy;
    struct part here[STRIP_PARTS], there[STRIP_PARTS];
    qt_mix24_open(&m, p);
    copy = m;
    struct qt_mix24_group *groups = strip->scratch;
    unsigned char *at = (unsigned char *)(groups + m.slots.slots);
    parts_of(here, &m);
    /* Packed, a group takes less than half of struct qt_mix24_group: it fits the scratch. */
    copy.a = (uint32_t *)(void *)at;
    copy.b = (uint32_t *)(void *)(at += here[0].bytes);
    copy.meta = (uint16_t *)(void *)(at += here[1].bytes);
    copy.meta4 = (uint16_t *)(void *)(at += here[2].bytes);
    copy.s2 = (uint16_t *)(void *)(at += here[3].bytes);
    copy.z2 = (uint16_t *)(void *)(at + here[4].bytes);
    parts_of(there, &copy);
    qt_mix24_unpack(groups, &m, strip->index);
    clear_padding(groups, &m, strip->rows);
    qt_mix24_pack(&copy, 0, groups);
    for (int i = 0; i < STRIP_PARTS; i++)
        if (here[i].bytes && memcmp((unsigned char *)here[i].data + strip->index * here[i].bytes,
                                    there[i].data, here[i].bytes) != 0)
            return false;
    return true;
}

#define FAIL(...) qt_fail(err, QT_E_INPUT, NULL, NULL, __VA_ARGS__)

/* slot_of[group] of a permutation: each group once, with local=1 in its own block. */
static int check_perm(uint16_t *slot_of, const struct qt_mix24 *m, bool local, struct qt_err *err)
{
    enum { NEIGHBOURS = 4 };
    unsigned char *seen = NULL;
    size_t slots = m->slots.slots;
    int rc = qt_array_new(&seen, slots, 1, err);
    for (size_t slot = 0; rc == QT_OK && slot < slots; slot++) {
        size_t group = m->perm[slot];
        if (group >= slots)
            rc = FAIL("perm: slot %zu has group %zu of %zu", slot, group, slots);
        else if (seen[group])
            rc = FAIL("perm: group %zu is in two slots", group);
        else if (local && group / NEIGHBOURS != slot / NEIGHBOURS)
            rc = FAIL("perm: group %zu is in slot %zu, which local=1 does not allow", group, slot);
        else
            seen[group] = 1, slot_of[group] = (uint16_t)slot;
    }
    qt_free(seen);
    return rc;
}

static int check_scales(const struct qt_mix24 *m, size_t strip, size_t slot, struct qt_err *err)
{
    struct qt_mix24_group group;
    size_t rows = qt_min_size(QT_FRAG_ROWS, m->n - strip * QT_FRAG_ROWS);
    bool padding = m->perm[slot] >= m->groups;
    unpack_parameters(&group, m, strip, slot);
    for (size_t half = 0; half < 2; half++) {
        if (padding && (group.s2[half] || group.z2[half]))
            return FAIL("slot %zu of strip %zu is padding but has a scale", slot, strip);
        if (!padding && (group.s2[half] == 0 || group.s2[half] >= 0x7c00))
            return FAIL("s2: of slot %zu, strip %zu, is not positive and finite", slot, strip);
    }
    for (size_t r = 0; r < rows && !padding; r++)
        if (group.q[r] + group.z2[r / HALF_ROWS] == 0)
            return FAIL("metadata word of row %zu, slot %zu: scale code 0 with z2 = 0",
                        strip * QT_FRAG_ROWS + r, slot);
    return QT_OK;
}

static int check_pointers(const struct qt_mix24 *m, struct qt_err *err)
{
    size_t count = m->panels * (m->n + 1);
    if (m->csr_ptr[0] != 0)
        return FAIL("csr_ptr: the first is %u, not 0", m->csr_ptr[0]);
    for (size_t i = 1; i < count; i++)
        if (m->csr_ptr[i] < m->csr_ptr[i - 1])
            return FAIL("csr_ptr: entry %zu is less than the one before it", i);
    for (size_t panel = 1; panel < m->panels; panel++)
        if (m->csr_ptr[panel * (m->n + 1)] != m->csr_ptr[panel * (m->n + 1) - 1])
            return FAIL("csr_ptr: panel %zu does not begin where the one before it ends", panel);
    if (m->csr_ptr[count - 1] != m->outliers)
        return FAIL("csr_ptr: the last is %u of %zu entries", m->csr_ptr[count - 1], m->outliers);
    return QT_OK;
}

/* An outlier's code must decode to 0, as kernels add to it. */
static int check_entry(const struct qt_mix24 *m, const uint16_t *slot_of, size_t i, size_t row,
                       size_t col, struct qt_err *err)
{
    struct qt_mix24_group group;
    size_t strip = row / QT_FRAG_ROWS, r = row % QT_FRAG_ROWS;
    if (col >= m->k)
        return FAIL("csr_col: entry %zu is column %zu of %zu", i, col, m->k);
    size_t slot = slot_of[col / m->g];
    if (qt_mix24_bits(m, slot) != 2)
        return FAIL("csr_col: entry %zu, column %zu, is in a 4-bit group", i, col);
    if ((m->csr_val[i] & 0x7c00) == 0x7c00)
        return FAIL("csr_val: entry %zu is not finite", i);
    unpack_group(&group, m, strip, slot);
    if (group.code[col % m->g][r] != group.zero[r])
        return FAIL("the code of outlier %zu (row %zu, column %zu) is not zero", i, row, col);
    return QT_OK;
}

static int check_csr(const struct qt_mix24 *m, const uint16_t *slot_of, struct qt_err *err)
{
    int rc = check_pointers(m, err);
    for (size_t panel = 0; panel < m->panels; panel++)
        for (size_t row = 0; row < m->n && rc == QT_OK; row++) {
            size_t first, end;
            qt_mix24_row(&first, &end, m, panel, row);
            for (size_t i = first; i < end && rc == QT_OK; i++) {
                if (i > first && m->csr_col[i] <= m->csr_col[i - 1])
                    return FAIL("csr_col: entry %zu is out of order in row %zu", i, row);
                rc = check_entry(m, slot_of, i, row, panel * QT_MIX24_PANEL + m->csr_col[i], err);
            }
        }
    return rc;
}

int qt_mix24_check_values(const struct qt_packed *p, struct qt_err *err)
{
    struct qt_mix24 m;
    uint16_t *slot_of = NULL;
    int rc = QT_OK;
    qt_mix24_open(&m, p);
    QT_TRY(qt_array_new(&slot_of, m.slots.slots, sizeof *slot_of, err));
    QT_TRY(check_perm(slot_of, &m, qt_mix24_recipe(&p->spec).local, err));
    for (size_t strip = 0; strip < m.strips; strip++)
        for (size_t slot = 0; slot < m.slots.slots; slot++)
            QT_TRY(check_scales(&m, strip, slot, err));
    if (m.csr_ptr)
        QT_TRY(check_csr(&m, slot_of, err));
done:
    qt_free(slot_of);
    return rc;
}
