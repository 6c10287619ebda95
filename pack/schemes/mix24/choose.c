/*
 * Choices of mix24 before there are any codes: which groups get 4 bits, in which slots groups are
 * stored, which weights are outliers. Costs assume a separate scale for each row.
 */
#include "pack/schemes/mix24/fit.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = QT_FRAG_ROWS, MAX_G = 16 };

/* The largest min-max scale of a strip's groups and the largest outlier, for weights before
 * division by 2^scale_exp2. */
struct extent {
    float scale, outlier;
};

struct chooser {
    const struct qt_packed *p;
    struct qt_mix24 m;
    struct qt_mix24_recipe recipe;
    const struct qt_mix24_fitops *ops;
    const struct qt_matrix *w;
    float *root;            /* [k] square root of the cost of a squared error of the channel */
    double *strips;         /* [strips][groups] sensitivities */
    double *sens;           /* [groups] sums of the sensitivities */
    bool *is_four;          /* [groups] */
    float *score;           /* [n][k] error reduction by an outlier; 0 for other weights */
    float *rows;            /* [threads][16][k] */
    struct extent *extents; /* [strips] */
};

/* ---- one group ------------------------------------------------------------------------------ */

/* A group's problem with its storage. */
struct part {
    struct qt_mix24_problem p;
    float t[MAX_G * ROWS], v[MAX_G * MAX_G];
    uint8_t channel[MAX_G];
    uint16_t outlier_rows[MAX_G];
};

/* rows[count][k] of the matrix; missing rows are 0. */
static void part_new(struct part *x, const struct chooser *c, const float *rows, size_t count,
                     size_t group)
{
    size_t first = group * c->m.g, n = qt_min_size(c->m.g, c->m.k - first);
    memset(x, 0, sizeof *x);
    x->p = (struct qt_mix24_problem){
        .n = n,
        .bits = 2,
        .halves = c->m.units.halves,
        .search = c->recipe.search,
        .channel = x->channel,
        .t = x->t,
        .outlier_rows = x->outlier_rows,
        .v = x->v,
        .stride = MAX_G,
    };
    for (size_t j = 0; j < n; j++) {
        x->v[j * MAX_G + j] = c->root[first + j];
        for (size_t r = 0; r < count; r++)
            x->t[j * ROWS + r] = rows[r * c->m.k + first + j];
    }
}

static float *rows_of(const struct chooser *c, size_t strip, int thread, size_t *count)
{
    float *rows = c->rows + (size_t)thread * ROWS * c->m.k;
    *count = qt_min_size(ROWS, c->m.n - strip * ROWS);
    qt_matrix_rows(rows, c->w, strip * ROWS, *count, -c->p->scale_exp2);
    return rows;
}

/* ---- sensitivity ---------------------------------------------------------------------------- */

static double sum(const float x[ROWS])
{
    double s = 0;
    for (int r = 0; r < ROWS; r++)
        s += (double)x[r];
    return s;
}

/* Sensitivity: the cost of 2 bits minus that of 4 bits, or the cost of 2 bits. */
static int sens_strip(void *ctx, size_t strip, int thread, struct qt_err *err)
{
    struct chooser *c = ctx;
    size_t count;
    const float *rows = rows_of(c, strip, thread, &count);
    (void)err;
    for (size_t group = 0; group < c->m.groups; group++) {
        struct part x;
        float two[ROWS], four[ROWS] = {0};
        part_new(&x, c, rows, count, group);
        c->ops->cost(two, &x.p);
        x.p.bits = 4;
        if (c->recipe.sens == QT_MIX24_SENS_GAIN)
            c->ops->cost(four, &x.p);
        c->strips[strip * c->m.groups + group] = sum(two) - sum(four);
    }
    return QT_OK;
}

struct rank {
    bool first;
    double key;
    size_t index;
};

/* Marked groups first, then larger keys; ties by index. */
static int by_rank(const void *a, const void *b)
{
    const struct rank *x = a, *y = b;
    if (x->first != y->first)
        return x->first ? -1 : 1;
    if (x->key != y->key)
        return x->key < y->key ? 1 : -1;
    return (x->index > y->index) - (x->index < y->index);
}

static int by_index(const void *a, const void *b)
{
    const struct rank *x = a, *y = b;
    return (x->index > y->index) - (x->index < y->index);
}

/* ---- slots ---------------------------------------------------------------------------------- */

/* With local=1: true for the most sensitive group of each four neighbors. */
static bool leads_neighbours(const struct chooser *c, size_t group)
{
    enum { NEIGHBOURS = 4 };
    size_t first = group - group % NEIGHBOURS;
    size_t end = qt_min_size(first + NEIGHBOURS, c->m.groups);
    bool leads = c->recipe.local;
    for (size_t i = first; i < end && leads; i++)
        leads = i == group || c->sens[i] < c->sens[group] ||
                (c->sens[i] == c->sens[group] && i > group);
    return leads;
}

/* Puts the most sensitive groups into the 4-bit slots and the others into the 2-bit slots, each in
 * storage order. */
static int choose_slots(struct chooser *c, struct qt_err *err)
{
    const struct qt_mix24 *m = &c->m;
    struct rank *rank = NULL;
    size_t fours = m->units.fours * (QT_MIX24_UNIT / m->g), at[2];
    int rc = qt_array_new(&rank, m->groups, sizeof *rank, err);
    if (rc < 0)
        return rc;
    fours = qt_min_size(fours, m->groups);
    for (size_t i = 0; i < m->groups; i++)
        rank[i] = (struct rank){leads_neighbours(c, i), c->sens[i], i};
    qsort(rank, m->groups, sizeof *rank, by_rank);
    qsort(rank, fours, sizeof *rank, by_index);
    qsort(rank + fours, m->groups - fours, sizeof *rank, by_index);
    for (size_t i = 0; i < fours; i++)
        c->is_four[rank[i].index] = true;
    at[0] = 0, at[1] = fours;
    const size_t end[2] = {fours, m->groups};
    for (size_t slot = 0; slot < m->slots; slot++) {
        int kind = qt_mix24_bits(m, slot) == 2;
        m->perm[slot] = QT_MIX24_NO_GROUP;
        if (at[kind] < end[kind])
            m->perm[slot] = (uint16_t)rank[at[kind]++].index;
    }
    qt_free(rank);
    return QT_OK;
}

static int choose_fours(struct chooser *c, struct qt_err *err)
{
    int rc = qt_parallel(c->m.strips, sens_strip, c, err);
    if (rc < 0)
        return rc;
    for (size_t strip = 0; strip < c->m.strips; strip++)
        for (size_t group = 0; group < c->m.groups; group++)
            c->sens[group] += c->strips[strip * c->m.groups + group];
    return choose_slots(c, err);
}

/* ---- outliers ------------------------------------------------------------------------------- */

/* Scores the largest and the smallest weight of a 2-bit group in each row by how much the cost of
 * the others falls without it. */
static void score_gain(struct chooser *c, struct part *x, size_t strip, size_t count, size_t group)
{
    float all[ROWS];
    c->ops->cost(all, &x->p);
    for (int end = 0; end < 2; end++) {
        size_t extreme[ROWS];
        float rest[ROWS];
        memset(x->outlier_rows, 0, sizeof x->outlier_rows);
        for (size_t r = 0; r < count; r++) {
            size_t best = 0;
            for (size_t j = 1; j < x->p.n; j++) {
                float t = x->t[j * ROWS + r], top = x->t[best * ROWS + r];
                if (end ? t < top : t > top)
                    best = j;
            }
            extreme[r] = best;
            x->outlier_rows[best] |= (uint16_t)(1u << r);
        }
        c->ops->cost(rest, &x->p);
        for (size_t r = 0; r < count; r++) {
            float gain = all[r] - rest[r];
            c->score[(strip * ROWS + r) * c->m.k + group * c->m.g + extreme[r]] =
                gain > 0 ? gain : 0;
        }
    }
}

static int score_strip(void *ctx, size_t strip, int thread, struct qt_err *err)
{
    struct chooser *c = ctx;
    size_t count;
    const float *rows = rows_of(c, strip, thread, &count);
    (void)err;
    for (size_t group = 0; group < c->m.groups; group++) {
        struct part x;
        size_t first = group * c->m.g;
        if (c->is_four[group])
            continue;
        part_new(&x, c, rows, count, group);
        if (!c->recipe.outliers_by_abs)
            score_gain(c, &x, strip, count, group);
        for (size_t j = 0; c->recipe.outliers_by_abs && j < x.p.n; j++)
            for (size_t r = 0; r < count; r++)
                c->score[(strip * ROWS + r) * c->m.k + first + j] = fabsf(x.t[j * ROWS + r]);
    }
    return QT_OK;
}

/* Finds the count-th largest of score[n] (all >= 0), and how many are larger. Radix selection with
 * 16 bits at a time: nonnegative floats compare like their bits. */
static int threshold(uint32_t *out, size_t *above, const float *score, size_t n, size_t count,
                     struct qt_err *err)
{
    enum { BINS = 65536 };
    size_t *bins = NULL;
    uint32_t prefix = 0;
    int rc = qt_array_new(&bins, BINS, sizeof *bins, err);
    *above = 0;
    for (int half = 0; rc == QT_OK && half < 2; half++) {
        size_t bin = BINS;
        memset(bins, 0, BINS * sizeof *bins);
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = qt_f32_bits(score[i]);
            if (half == 0)
                bins[bits >> 16]++;
            else if (bits >> 16 == prefix)
                bins[bits & 0xffff]++;
        }
        while (bin > 1 && *above + bins[bin - 1] < count)
            *above += bins[--bin];
        prefix = prefix << 16 | (uint32_t)(bin - 1);
    }
    *out = prefix;
    qt_free(bins);
    return rc;
}

/* Appends the columns of a row's marked weights in one panel at CSR entry `at`; returns the next
 * entry. */
static size_t row_outliers(const struct chooser *c, size_t panel, size_t row, size_t at)
{
    size_t first = panel * QT_MIX24_PANEL;
    size_t end = qt_min_size(first + QT_MIX24_PANEL, c->m.slots * c->m.g);
    for (size_t col = first; col < end; col++) {
        size_t channel = qt_mix24_channel(&c->m, col);
        if (channel < c->m.k && c->score[row * c->m.k + channel] > 0)
            c->m.csr_col[at++] = (uint16_t)(col - first);
    }
    return at;
}

/* Marks the m.outliers largest scores, ties by index, and writes rows and columns of the CSR
 * matrix. If too few weights have a gain, the first weights of 2-bit groups fill up the count. */
static int choose_outliers(struct chooser *c, struct qt_err *err)
{
    const struct qt_mix24 *m = &c->m;
    uint32_t limit;
    size_t above, at = 0, ties;
    int rc = QT_OK;
    QT_TRY(qt_array_new(&c->score, m->n, m->k * sizeof *c->score, err));
    QT_TRY(qt_parallel(m->strips, score_strip, c, err));
    QT_TRY(threshold(&limit, &above, c->score, m->n * m->k, m->outliers, err));
    ties = m->outliers - above;
    for (size_t i = 0; i < m->n * m->k; i++) {
        uint32_t bits = qt_f32_bits(c->score[i]);
        bool tie = bits == limit && ties > 0 && !c->is_four[i % m->k / m->g];
        ties -= tie;
        c->score[i] = bits > limit || tie;
    }
    for (size_t panel = 0; panel < m->panels; panel++) {
        uint32_t *ptr = m->csr_ptr + panel * (m->n + 1);
        for (size_t row = 0; row < m->n; row++) {
            ptr[row] = (uint32_t)at;
            at = row_outliers(c, panel, row, at);
        }
        ptr[m->n] = (uint32_t)at;
    }
done:
    return rc;
}

/* ---- the exponent --------------------------------------------------------------------------- */

static struct extent row_extent(const struct chooser *c, const float *w, const float *marks)
{
    struct extent x = {0};
    for (size_t group = 0; group < c->m.groups; group++) {
        size_t first = group * c->m.g, end = qt_min_size(first + c->m.g, c->m.k);
        float low = 0, high = 0;
        for (size_t i = first; i < end; i++) {
            if (marks && marks[i] > 0) {
                x.outlier = fmaxf(x.outlier, fabsf(w[i]));
                continue;
            }
            low = fminf(low, w[i]);
            high = fmaxf(high, w[i]);
        }
        x.scale = fmaxf(x.scale, (high - low) / (c->is_four[group] ? 15 : 3));
    }
    return x;
}

static int extent_strip(void *ctx, size_t strip, int thread, struct qt_err *err)
{
    struct chooser *c = ctx;
    size_t count;
    const float *rows = rows_of(c, strip, thread, &count);
    (void)err;
    for (size_t r = 0; r < count; r++) {
        const float *marks = c->score ? c->score + (strip * ROWS + r) * c->m.k : NULL;
        struct extent x = row_extent(c, rows + r * c->m.k, marks);
        c->extents[strip].scale = fmaxf(c->extents[strip].scale, x.scale);
        c->extents[strip].outlier = fmaxf(c->extents[strip].outlier, x.outlier);
    }
    return QT_OK;
}

/*
 * Chooses scale_exp2 so that the largest min-max (q + z2) * s2 is in [24576, 49152). Search and
 * error compensation need the room up to 65504, the limit of FP16. Outliers must be finite, too.
 */
static int choose_exponent(struct qt_packed *p, struct chooser *c, struct qt_err *err)
{
    const float scale_goal = 49152 * QT_MIX24_S2_UNIT, outlier_goal = 32768;
    struct extent all = {0};
    int for_scales, for_outliers;
    int rc = qt_parallel(c->m.strips, extent_strip, c, err);
    if (rc < 0)
        return rc;
    for (size_t strip = 0; strip < c->m.strips; strip++) {
        all.scale = fmaxf(all.scale, c->extents[strip].scale);
        all.outlier = fmaxf(all.outlier, c->extents[strip].outlier);
    }
    frexpf(all.scale / scale_goal, &for_scales);
    frexpf(all.outlier / outlier_goal, &for_outliers);
    if (all.scale == 0 && all.outlier == 0)
        p->scale_exp2 = 0;
    else if (all.scale == 0 || (all.outlier > 0 && for_outliers > for_scales))
        p->scale_exp2 += for_outliers;
    else
        p->scale_exp2 += for_scales;
    return QT_OK;
}

/* ---- prepare -------------------------------------------------------------------------------- */

/* squared: equation 9 of the paper divides by the square of [H^-1]_jj, whose inverse is the
 * cost. */
static void set_costs(struct chooser *c, const float *importance, bool squared)
{
    for (size_t j = 0; j < c->m.k; j++) {
        float h = importance ? importance[j] : 1;
        c->root[j] = squared ? h : sqrtf(h);
    }
}

size_t qt_mix24_prepare_bytes(const struct qt_packed *p)
{
    struct qt_mix24 m;
    qt_mix24_open(&m, p);
    return (m.outliers ? m.n * m.k * sizeof(float) : 0) + m.strips * m.groups * sizeof(double) +
           (size_t)qt_threads() * ROWS * m.k * sizeof(float);
}

int qt_mix24_prepare(struct qt_packed *p, const struct qt_matrix *w, const float *importance,
                     struct qt_err *err)
{
    struct chooser c = {.p = p, .w = w, .ops = qt_mix24_fitops_best()};
    int rc = QT_OK;
    qt_mix24_open(&c.m, p);
    c.recipe = qt_mix24_recipe(&p->spec);
    QT_TRY(qt_array_new(&c.root, p->k, sizeof *c.root, err));
    QT_TRY(qt_array_new(&c.strips, c.m.strips, c.m.groups * sizeof *c.strips, err));
    QT_TRY(qt_array_new(&c.sens, c.m.groups, sizeof *c.sens, err));
    QT_TRY(qt_array_new(&c.extents, c.m.strips, sizeof *c.extents, err));
    QT_TRY(qt_array_new(&c.is_four, c.m.groups, sizeof *c.is_four, err));
    QT_TRY(qt_array_new(&c.rows, (size_t)qt_threads() * ROWS, p->k * sizeof *c.rows, err));
    set_costs(&c, importance, c.recipe.sens == QT_MIX24_SENS_PAPER);
    QT_TRY(choose_fours(&c, err));
    set_costs(&c, importance, false);
    if (c.m.csr_ptr)
        QT_TRY(choose_outliers(&c, err));
    QT_TRY(choose_exponent(p, &c, err));
done:
    qt_free(c.extents);
    qt_free(c.root);
    qt_free(c.strips);
    qt_free(c.sens);
    qt_free(c.is_four);
    qt_free(c.score);
    qt_free(c.rows);
    return rc;
}
