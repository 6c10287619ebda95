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
    const struct qt_copy *on; /* where costs are computed; NULL: on the host */
    float *root;              /* [k] square root of the cost of a squared error of the channel */
    double *strips;           /* [strips][groups] sensitivities */
    double *sens;             /* [groups] sums of the sensitivities */
    bool *is_four;            /* [groups] */
    float *score;             /* [n][k] error reduction by an outlier; 0 for other weights */
    float *rows;              /* [threads][16][k] */
    struct extent *extents;   /* [strips] */
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

static int sens_on_host(struct chooser *c, struct qt_err *err)
{
    int rc = qt_parallel(c->m.strips, sens_strip, c, err);
    for (size_t strip = 0; strip < c->m.strips && rc == QT_OK; strip++)
        for (size_t group = 0; group < c->m.groups; group++)
            c->sens[group] += c->strips[strip * c->m.groups + group];
    return rc;
}

/* Costs of a backend, with the present importance. */
static struct qt_mix24_costs costs_on_backend(const struct chooser *c, const float *importance)
{
    return (struct qt_mix24_costs){.n = c->m.n,
                                   .k = c->m.k,
                                   .group = c->m.g,
                                   .w = c->on->w,
                                   .exp2 = -c->p->scale_exp2,
                                   .importance = importance};
}

/* [k] the costs of squared errors. */
static int importance_new(float **out, const struct chooser *c, struct qt_err *err)
{
    int rc = qt_array_new(out, c->m.k, sizeof **out, err);
    for (size_t i = 0; i < c->m.k && rc == QT_OK; i++)
        (*out)[i] = c->root[i] * c->root[i];
    return rc;
}

static int sens_on_backend(struct chooser *c, struct qt_err *err)
{
    float *importance = NULL;
    double *four = NULL;
    int rc;
    QT_TRY(importance_new(&importance, c, err));
    QT_TRY(qt_array_new(&four, c->m.groups, sizeof *four, err));
    struct qt_mix24_costs costs = costs_on_backend(c, importance);
    costs.two = c->sens;
    costs.four = four;
    QT_TRY(c->on->be->mix24_costs(c->on->be, &costs, err));
    for (size_t group = 0; group < c->m.groups; group++)
        c->sens[group] -= c->recipe.sens == QT_MIX24_SENS_GAIN ? four[group] : 0;
done:
    qt_free(importance);
    qt_free(four);
    return rc;
}

static int choose_fours(struct chooser *c, struct qt_err *err)
{
    int rc = c->on ? sens_on_backend(c, err) : sens_on_host(c, err);
    return rc < 0 ? rc : choose_slots(c, err);
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

enum { BINS = 65536 };

/* Radix selection among the scores with 16 bits at a time: nonnegative floats compare like their
 * bits. */
struct selection {
    const struct chooser *c;
    bool is_second;  /* half of the bits */
    uint32_t prefix; /* first half of the limit */
    size_t *bins;    /* [threads][BINS] */
};

static int count_bins(void *ctx, size_t strip, int thread, struct qt_err *err)
{
    const struct selection *s = ctx;
    const struct qt_mix24 *m = &s->c->m;
    const size_t first = strip * ROWS * m->k,
                 end = first + qt_min_size(ROWS, m->n - strip * ROWS) * m->k;
    size_t *bins = s->bins + (size_t)thread * BINS;
    (void)err;
    for (size_t i = first; i < end; i++) {
        const uint32_t bits = qt_f32_bits(s->c->score[i]);
        if (!s->is_second)
            bins[bits >> 16]++;
        else if (bits >> 16 == s->prefix)
            bins[bits & 0xffff]++;
    }
    return QT_OK;
}

/* Finds the m.outliers-th largest score, and how many are larger. */
static int threshold(uint32_t *limit, size_t *above, const struct chooser *c, struct qt_err *err)
{
    const size_t threads = (size_t)qt_threads();
    struct selection s = {.c = c};
    int rc;
    *above = 0;
    QT_TRY(qt_array_new(&s.bins, threads, BINS * sizeof *s.bins, err));
    for (int half = 0; half < 2; half++) {
        size_t bin = BINS;
        s.is_second = half;
        memset(s.bins, 0, threads * BINS * sizeof *s.bins);
        QT_TRY(qt_parallel(c->m.strips, count_bins, &s, err));
        for (size_t i = BINS; i < threads * BINS; i++)
            s.bins[i % BINS] += s.bins[i];
        while (bin > 1 && *above + s.bins[bin - 1] < c->m.outliers)
            *above += s.bins[--bin];
        s.prefix = s.prefix << 16 | (uint32_t)(bin - 1);
    }
    *limit = s.prefix;
done:
    qt_free(s.bins);
    return rc;
}

/* The weights with scores above `limit`, and the first ones of 2-bit groups that are equal to it. */
struct marking {
    struct chooser *c;
    uint32_t limit;
    size_t *ties;        /* [n] per row: those that are equal, then those of them to mark */
    uint32_t *per_panel; /* [n] columns of the panel that is being written */
    size_t panel;
};

static void count_ties(void *ctx, size_t row)
{
    const struct marking *x = ctx;
    const struct chooser *c = x->c;
    for (size_t i = 0; i < c->m.k; i++)
        x->ties[row] +=
            qt_f32_bits(c->score[row * c->m.k + i]) == x->limit && !c->is_four[i / c->m.g];
}

static void mark_row(void *ctx, size_t row)
{
    const struct marking *x = ctx;
    const struct chooser *c = x->c;
    size_t ties = x->ties[row];
    for (size_t i = 0; i < c->m.k; i++) {
        float *score = &c->score[row * c->m.k + i];
        const uint32_t bits = qt_f32_bits(*score);
        const bool tie = bits == x->limit && ties > 0 && !c->is_four[i / c->m.g];
        ties -= tie;
        *score = bits > x->limit || tie;
    }
}

/* Counts the marked weights of a row in a panel, or writes their columns to `to`. */
static uint32_t row_outliers(uint16_t *to, const struct marking *x, size_t row)
{
    const struct qt_mix24 *m = &x->c->m;
    const size_t per = QT_MIX24_PANEL / m->g, first = x->panel * per,
                 end = qt_min_size(first + per, m->slots);
    const float *marks = x->c->score + row * m->k;
    uint32_t count = 0;
    for (size_t slot = first; slot < end; slot++) {
        const size_t channel = m->perm[slot] * m->g;
        if (m->perm[slot] == QT_MIX24_NO_GROUP || x->c->is_four[m->perm[slot]])
            continue;
        for (size_t j = 0; j < qt_min_size(m->g, m->k - channel); j++)
            if (marks[channel + j] > 0) {
                if (to)
                    to[count] = (uint16_t)((slot - first) * m->g + j);
                count++;
            }
    }
    return count;
}

static void count_row(void *ctx, size_t row)
{
    const struct marking *x = ctx;
    x->per_panel[row] = row_outliers(NULL, x, row);
}

static void write_row(void *ctx, size_t row)
{
    const struct marking *x = ctx;
    const struct qt_mix24 *m = &x->c->m;
    row_outliers(m->csr_col + m->csr_ptr[x->panel * (m->n + 1) + row], x, row);
}

/* Gains of a backend: [n][groups][2]. */
struct gains {
    struct chooser *c;
    float *gain;
    uint8_t *channel;
};

static void score_row(void *ctx, size_t row)
{
    const struct gains *x = ctx;
    const struct qt_mix24 *m = &x->c->m;
    for (size_t i = 0; i < 2 * m->groups; i++) {
        const size_t group = i / 2, at = row * 2 * m->groups + i;
        if (!x->c->is_four[group])
            x->c->score[row * m->k + group * m->g + x->channel[at]] = x->gain[at];
    }
}

static int score_on_backend(struct chooser *c, struct qt_err *err)
{
    struct gains x = {.c = c};
    float *importance = NULL;
    int rc;
    QT_TRY(importance_new(&importance, c, err));
    QT_TRY(qt_array_new(&x.gain, c->m.n, 2 * c->m.groups * sizeof *x.gain, err));
    QT_TRY(qt_array_new(&x.channel, c->m.n, 2 * c->m.groups, err));
    struct qt_mix24_costs costs = costs_on_backend(c, importance);
    costs.gain = x.gain;
    costs.channel = x.channel;
    QT_TRY(c->on->be->mix24_costs(c->on->be, &costs, err));
    qt_parallel_for(c->m.n, score_row, &x);
done:
    qt_free(importance);
    qt_free(x.gain);
    qt_free(x.channel);
    return rc;
}

static int score_all(struct chooser *c, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_array_new(&c->score, c->m.n, c->m.k * sizeof *c->score, err));
    QT_TRY(c->on && !c->recipe.outliers_by_abs ? score_on_backend(c, err)
                                               : qt_parallel(c->m.strips, score_strip, c, err));
done:
    return rc;
}

/* Marks the m.outliers largest scores, ties by index, and writes rows and columns of the CSR
 * matrix. If too few weights have a gain, the first weights of 2-bit groups fill up the count. */
static int choose_outliers(struct chooser *c, struct qt_err *err)
{
    const struct qt_mix24 *m = &c->m;
    struct marking x = {.c = c};
    size_t above, left, at = 0;
    int rc;
    QT_TRY(score_all(c, err));
    QT_TRY(qt_array_new(&x.ties, m->n, sizeof *x.ties, err));
    QT_TRY(qt_array_new(&x.per_panel, m->n, sizeof *x.per_panel, err));
    QT_TRY(threshold(&x.limit, &above, c, err));
    qt_parallel_for(m->n, count_ties, &x);
    left = m->outliers - above;
    for (size_t row = 0; row < m->n; row++) {
        x.ties[row] = qt_min_size(x.ties[row], left);
        left -= x.ties[row];
    }
    qt_parallel_for(m->n, mark_row, &x);
    for (x.panel = 0; x.panel < m->panels; x.panel++) {
        uint32_t *ptr = m->csr_ptr + x.panel * (m->n + 1);
        qt_parallel_for(m->n, count_row, &x);
        for (size_t row = 0; row < m->n; row++) {
            ptr[row] = (uint32_t)at;
            at += x.per_panel[row];
        }
        ptr[m->n] = (uint32_t)at;
        qt_parallel_for(m->n, write_row, &x);
    }
done:
    qt_free(x.ties);
    qt_free(x.per_panel);
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
           (size_t)qt_threads() * (ROWS * m.k * sizeof(float) + BINS * sizeof(size_t));
}

int qt_mix24_prepare(struct qt_packed *p, const struct qt_matrix *w, const struct qt_copy *on,
                     const float *importance, struct qt_err *err)
{
    struct chooser c = {.p = p, .w = w, .ops = qt_mix24_fitops_best()};
    int rc = QT_OK;
    qt_mix24_open(&c.m, p);
    c.recipe = qt_mix24_recipe(&p->spec);
    if (c.recipe.search)
        c.on = on;
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
