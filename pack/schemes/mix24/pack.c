/* Sizes of mix24, groups <-> packed bytes, and checks of stored bytes before they are used. */
#include "pack/schemes/mix24/mix24.h"

#include <math.h>
#include <string.h>

enum { HALF_ROWS = 8, BLOCKS = 2, CHUNKS = QT_MIX24_UNIT / QT_MIX24_CHUNK };

/* ---- sizes and sections --------------------------------------------------------------------- */

/* Number of outliers, which is exact. At most one in 16 weights of 2-bit groups is an outlier. */
static size_t outlier_count(const struct qt_mix24 *m, double share)
{
    size_t in_fours = (size_t)m->units.fours * QT_MIX24_UNIT;
    size_t in_twos = m->k > in_fours ? m->k - in_fours : 0;
    double wanted = floor(share * (double)m->n * (double)m->k);
    double most = floor((double)m->n * (double)in_twos / 16);
    return (size_t)fmin(wanted, most);
}

static void *section_data(const struct qt_packed *p, const char *name)
{
    const struct qt_section *s = qt_packed_section(p, name);
    return s ? s->data : NULL;
}

void qt_mix24_open(struct qt_mix24 *out, const struct qt_packed *p)
{
    const struct qt_spec *spec = &p->spec;
    *out = (struct qt_mix24){.n = p->n, .k = p->k, .g = (size_t)qt_spec_value(spec, "g")};
    out->strips = qt_ceil_div(p->n, QT_FRAG_ROWS);
    out->groups = qt_ceil_div(p->k, out->g);
    out->units.units = (uint32_t)qt_ceil_div(p->k, QT_MIX24_UNIT);
    out->units.fours = (uint32_t)lround(qt_spec_value(spec, "four") * out->units.units);
    out->units.parts = (uint32_t)(16 / out->g);
    out->units.halves = QT_FRAG_ROWS / (uint32_t)qt_spec_value(spec, "g2");
    out->slots = out->units.units * (QT_MIX24_UNIT / out->g);
    out->strip_bytes = qt_mix24_record(&out->units, out->units.units);
    out->panels = qt_ceil_div((size_t)out->units.units * QT_MIX24_UNIT, QT_MIX24_PANEL);
    out->outliers = outlier_count(out, qt_spec_value(spec, "outliers"));
    out->stream = section_data(p, "stream");
    out->perm = section_data(p, "perm");
    out->csr_ptr = section_data(p, "csr_ptr");
    out->csr_col = section_data(p, "csr_col");
    out->csr_val = section_data(p, "csr_val");
}

size_t qt_mix24_scratch_bytes(const struct qt_packed *p)
{
    struct qt_mix24 m;
    qt_mix24_open(&m, p);
    return 2 * m.slots * sizeof(struct qt_mix24_group);
}

unsigned qt_mix24_bits(const struct qt_mix24 *m, size_t slot)
{
    return qt_mix24_is_four(&m->units, (uint32_t)(slot / (QT_MIX24_UNIT / m->g))) ? 4 : 2;
}

/* ---- position of a slot --------------------------------------------------------------------- */

/* Position of a slot in a strip: its codes, from column `col` of the unit on, and its parameters,
 * by 64-column block and t (layout_mix24.h). */
struct place {
    uint32_t *codes;
    uint16_t *q;
    unsigned char *z; /* U16 in a 4-bit unit */
    uint16_t *u;      /* halves are 2 * 4 elements apart */
    unsigned col, block, t;
    bool four;
};

static struct place place_of(unsigned char *strip, const struct qt_mix24 *m, size_t slot)
{
    const size_t per_unit = QT_MIX24_UNIT / m->g;
    uint32_t unit = (uint32_t)(slot / per_unit);
    unsigned char *record = strip + qt_mix24_record(&m->units, unit);
    struct place at = {.four = qt_mix24_is_four(&m->units, unit)};
    size_t chunk = slot % per_unit / m->units.parts, part = slot % m->units.parts;
    unsigned char *params = record + (at.four ? QT_MIX24_FOUR_CODES : QT_MIX24_TWO_CODES) +
                            part * qt_mix24_param_bytes(&m->units, at.four);
    at.codes = (uint32_t *)(void *)record;
    at.q = (uint16_t *)(void *)params;
    at.z = params + QT_MIX24_Q_BYTES;
    at.u = (uint16_t *)(void *)(at.z + (at.four ? 2 : 1) * QT_MIX24_LANES);
    at.col = (unsigned)(chunk * QT_MIX24_CHUNK + part * HALF_ROWS);
    at.block = (unsigned)(chunk / (CHUNKS / BLOCKS));
    at.t = (unsigned)(chunk % (CHUNKS / BLOCKS));
    return at;
}

static unsigned lane_of(const struct place *at, unsigned row)
{
    return 4 * (row % HALF_ROWS) + at->t;
}

static uint16_t *u_of(const struct place *at, size_t half)
{
    return &at->u[half * (QT_MIX24_U_BYTES / sizeof *at->u) + BLOCKS * at->t + at->block];
}

/* ---- packing -------------------------------------------------------------------------------- */

static uint32_t rotate_left(uint32_t x, unsigned by)
{
    return x << by | x >> (32 - by) % 32;
}

static void pack_group(const struct place *at, const struct qt_mix24 *m,
                       const struct qt_mix24_group *group)
{
    for (unsigned c = 0; c < m->g; c++)
        for (unsigned first = 0; first < QT_FRAG_ROWS; first += HALF_ROWS) {
            struct qt_mix24_place p = qt_mix24_place(at->four, first, at->col + c);
            for (unsigned r = 0; r < HALF_ROWS; r++)
                at->codes[p.word + r * QT_MIX24_ROW_WORDS] |=
                    rotate_left(group->code[c][first + r], p.bit);
        }
    for (unsigned r = 0; r < QT_FRAG_ROWS; r++) {
        unsigned lane = lane_of(at, r), z_bit = qt_mix24_z_bit(at->four, r, at->block);
        at->q[lane] |= (uint16_t)(group->q[r] << qt_mix24_q_bit(r, at->block));
        if (at->four)
            ((uint16_t *)(void *)at->z)[lane] |= (uint16_t)(group->zero[r] << z_bit);
        else
            at->z[lane] |= (unsigned char)(group->zero[r] << z_bit);
    }
    for (size_t half = 0; half < m->units.halves; half++)
        *u_of(at, half) = (uint16_t)(group->s2[half] | group->z2[half]);
}

void qt_mix24_pack(unsigned char *strip, const struct qt_mix24 *m,
                   const struct qt_mix24_group *groups)
{
    memset(strip, 0, m->strip_bytes);
    for (size_t slot = 0; slot < m->slots; slot++) {
        struct place at = place_of(strip, m, slot);
        pack_group(&at, m, &groups[slot]);
    }
}

/* ---- unpacking ------------------------------------------------------------------------------ */

/* Unpacks q, zero-points, s2 and z2. Reserved bits of u are ignored. */
static void unpack_parameters(struct qt_mix24_group *group, const struct place *at,
                              const struct qt_mix24 *m)
{
    for (unsigned r = 0; r < QT_FRAG_ROWS; r++) {
        unsigned lane = lane_of(at, r);
        unsigned zeros = at->four ? ((uint16_t *)(void *)at->z)[lane] : at->z[lane];
        group->q[r] = at->q[lane] >> qt_mix24_q_bit(r, at->block) & 15;
        group->zero[r] =
            (uint8_t)(zeros >> qt_mix24_z_bit(at->four, r, at->block) & (at->four ? 15 : 3));
    }
    for (size_t half = 0; half < 2; half++) {
        uint16_t u = *u_of(at, half % m->units.halves); /* one for both halves, or two */
        group->s2[half] = u & QT_MIX24_S2_MASK;
        group->z2[half] = u & 15;
    }
}

static void unpack_group(struct qt_mix24_group *group, const struct place *at,
                         const struct qt_mix24 *m)
{
    const uint32_t mask = at->four ? 15 : 3;
    for (unsigned c = 0; c < m->g; c++)
        for (unsigned first = 0; first < QT_FRAG_ROWS; first += HALF_ROWS) {
            struct qt_mix24_place p = qt_mix24_place(at->four, first, at->col + c);
            for (unsigned r = 0; r < HALF_ROWS; r++)
                group->code[c][first + r] =
                    (uint8_t)(rotate_left(at->codes[p.word + r * QT_MIX24_ROW_WORDS],
                                          (32 - p.bit) % 32) &
                              mask);
        }
    unpack_parameters(group, at, m);
}

/* For reading only: nothing is written to the strip. */
static struct place place_in(const unsigned char *strip, const struct qt_mix24 *m, size_t slot)
{
    return place_of((unsigned char *)(uintptr_t)strip, m, slot);
}

void qt_mix24_unpack(struct qt_mix24_group *groups, const struct qt_mix24 *m,
                     const unsigned char *strip)
{
    for (size_t slot = 0; slot < m->slots; slot++) {
        struct place at = place_in(strip, m, slot);
        unpack_group(&groups[slot], &at, m);
    }
}

/* ---- checks --------------------------------------------------------------------------------- */

/* Sets all padding to the required values. */
static void clear_padding(struct qt_mix24_group *groups, const struct qt_mix24 *m, size_t rows)
{
    for (size_t slot = 0; slot < m->slots; slot++) {
        struct qt_mix24_group *group = &groups[slot];
        if (m->perm[slot] == QT_MIX24_NO_GROUP) {
            memset(group, 0, sizeof *group);
            continue;
        }
        for (size_t r = rows; r < QT_FRAG_ROWS; r++)
            group->q[r] = group->zero[r] = 0;
        for (size_t c = 0; c < m->g; c++)
            for (size_t r = 0; r < QT_FRAG_ROWS; r++)
                if (r >= rows || m->perm[slot] * m->g + c >= m->k)
                    group->code[c][r] = group->zero[r];
    }
}

bool qt_mix24_repack_equal(const struct qt_packed *p, const struct qt_strip *strip)
{
    struct qt_mix24 m;
    qt_mix24_open(&m, p);
    struct qt_mix24_group *groups = strip->scratch;
    /* A packed group is smaller than struct qt_mix24_group, so the copy fits. */
    unsigned char *copy = (unsigned char *)(groups + m.slots);
    copy += (16 - (uintptr_t)copy % 16) % 16;
    qt_mix24_unpack(groups, &m, qt_mix24_strip(&m, strip->index));
    clear_padding(groups, &m, strip->rows);
    qt_mix24_pack(copy, &m, groups);
    return memcmp(qt_mix24_strip(&m, strip->index), copy, m.strip_bytes) == 0;
}

#define FAIL(...) qt_fail(err, QT_E_INPUT, NULL, NULL, __VA_ARGS__)

/* Each group must be in exactly one slot. */
static int check_perm(const struct qt_mix24 *m, struct qt_err *err)
{
    unsigned char *seen = NULL;
    size_t count = 0;
    int rc = qt_array_new(&seen, m->groups, 1, err);
    for (size_t slot = 0; rc == QT_OK && slot < m->slots; slot++) {
        size_t group = m->perm[slot];
        if (group == QT_MIX24_NO_GROUP)
            continue;
        if (group >= m->groups)
            rc = FAIL("perm: slot %zu has group %zu of %zu", slot, group, m->groups);
        else if (seen[group])
            rc = FAIL("perm: group %zu is in two slots", group);
        else
            seen[group] = 1, count++;
    }
    if (rc == QT_OK && count != m->groups)
        rc = FAIL("perm: %zu of %zu groups are in no slot", m->groups - count, m->groups);
    qt_free(seen);
    return rc;
}

/* Checks u: no reserved bits; a scale if, and only if, the slot has a group. */
static int check_second_order(const struct qt_mix24 *m, const struct place *at, size_t strip,
                              size_t slot, struct qt_err *err)
{
    const bool padding = m->perm[slot] == QT_MIX24_NO_GROUP;
    const unsigned step = at->four ? QT_MIX24_S2_COARSE : QT_MIX24_S2_FINE;
    for (size_t half = 0; half < m->units.halves; half++) {
        unsigned u = *u_of(at, half), s2 = u & QT_MIX24_S2_MASK;
        if (u & ~(QT_MIX24_S2_MASK | 15u))
            return FAIL("slot %zu of strip %zu: reserved bits are set", slot, strip);
        if (padding ? u != 0 : s2 == 0 || s2 >= 0x7c00)
            return FAIL("slot %zu of strip %zu: %s", slot, strip,
                        padding ? "padding has a scale" : "s2 is not positive and finite");
        if (s2 % step)
            return FAIL("slot %zu of strip %zu: s2 has more than two significant bits", slot,
                        strip);
    }
    return QT_OK;
}

static int check_scales(const struct qt_mix24 *m, size_t strip, size_t slot, struct qt_err *err)
{
    struct qt_mix24_group group;
    struct place at = place_in(qt_mix24_strip(m, strip), m, slot);
    size_t rows = qt_min_size(QT_FRAG_ROWS, m->n - strip * QT_FRAG_ROWS);
    int rc = check_second_order(m, &at, strip, slot, err);
    if (rc < 0 || m->perm[slot] == QT_MIX24_NO_GROUP)
        return rc;
    unpack_parameters(&group, &at, m);
    for (size_t r = 0; r < rows; r++) {
        float s = qt_mix24_scale(&group, r);
        if (s == 0)
            return FAIL("row %zu, slot %zu: scale code 0 with z2 = 0", strip * QT_FRAG_ROWS + r,
                        slot);
        if (s > QT_MIX24_SIGMA_MAX * QT_MIX24_S2_UNIT)
            return FAIL("row %zu, slot %zu: the scale is beyond FP16", strip * QT_FRAG_ROWS + r,
                        slot);
    }
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

/* The code of an outlier must decode to 0, because kernels add the outlier to it. */
static int check_entry(const struct qt_mix24 *m, size_t i, size_t row, size_t col,
                       struct qt_err *err)
{
    struct qt_mix24_group group;
    size_t slot = col / m->g, r = row % QT_FRAG_ROWS;
    if (slot >= m->slots || qt_mix24_channel(m, col) >= m->k)
        return FAIL("csr_col: entry %zu, column %zu, has no weight", i, col);
    if (qt_mix24_bits(m, slot) != 2)
        return FAIL("csr_col: entry %zu, column %zu, is in a 4-bit group", i, col);
    if ((m->csr_val[i] & 0x7c00) == 0x7c00)
        return FAIL("csr_val: entry %zu is not finite", i);
    struct place at = place_in(qt_mix24_strip(m, row / QT_FRAG_ROWS), m, slot);
    unpack_group(&group, &at, m);
    if (group.code[col % m->g][r] != group.zero[r])
        return FAIL("the code of outlier %zu (row %zu, column %zu) is not zero", i, row, col);
    return QT_OK;
}

static int check_csr(const struct qt_mix24 *m, struct qt_err *err)
{
    int rc = check_pointers(m, err);
    for (size_t panel = 0; panel < m->panels; panel++)
        for (size_t row = 0; row < m->n && rc == QT_OK; row++) {
            size_t first, end;
            qt_mix24_row(&first, &end, m, panel, row);
            for (size_t i = first; i < end && rc == QT_OK; i++) {
                if (i > first && m->csr_col[i] <= m->csr_col[i - 1])
                    return FAIL("csr_col: entry %zu is out of order in row %zu", i, row);
                rc = check_entry(m, i, row, panel * QT_MIX24_PANEL + m->csr_col[i], err);
            }
        }
    return rc;
}

int qt_mix24_check_values(const struct qt_packed *p, struct qt_err *err)
{
    struct qt_mix24 m;
    qt_mix24_open(&m, p);
    int rc = check_perm(&m, err);
    for (size_t strip = 0; strip < m.strips && rc == QT_OK; strip++)
        for (size_t slot = 0; slot < m.slots && rc == QT_OK; slot++)
            rc = check_scales(&m, strip, slot, err);
    if (m.csr_ptr && rc == QT_OK)
        rc = check_csr(&m, err);
    return rc;
}
