/*
 * Choices of mix24 before there are any codes: which groups get 4 bits, in which slots groups are
 * stored, and the exponent. Costs assume a separate scale for each row.
 */
#include "pack/schemes/mix24/chooser.h"

#include <stdlib.h>
#include <string.h>

/* ---- one group ------------------------------------------------------------------------------ */

void qt_mix24_part(struct qt_mix24_part *x, const struct qt_mix24_chooser *c, const float *rows,
                   size_t count, size_t group)
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

float *qt_mix24_rows_of(const struct qt_mix24_chooser *c, size_t strip, int thread, size_t *count)
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
    struct qt_mix24_chooser *c = ctx;
    size_t count;
    const float *rows = qt_mix24_rows_of(c, strip, thread, &count);
    (void)err;
    for (size_t group = 0; group < c->m.groups; group++) {
        struct qt_mix24_part x;
        float two[ROWS], four[ROWS] = {0};
        qt_mix24_part(&x, c, rows, count, group);
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
static bool leads_neighbours(const struct qt_mix24_chooser *c, size_t group)
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
static int choose_slots(struct qt_mix24_chooser *c, struct qt_err *err)
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

static int sens_on_host(struct qt_mix24_chooser *c, struct qt_err *err)
{
    int rc = qt_parallel(c->m.strips, sens_strip, c, err);
    for (size_t strip = 0; strip < c->m.strips && rc == QT_OK; strip++)
        for (size_t group = 0; group < c->m.groups; group++)
            c->sens[group] += c->strips[strip * c->m.groups + group];
    return rc;
}

struct qt_mix24_costs qt_mix24_costs_on(const struct qt_mix24_chooser *c, const float *importance)
{
    return (struct qt_mix24_costs){.n = c->m.n,
                                   .k = c->m.k,
                                   .group = c->m.g,
                                   .w = c->on->w,
                                   .exp2 = -c->p->scale_exp2,
                                   .importance = importance};
}

int qt_mix24_importance_new(float **out, const struct qt_mix24_chooser *c, struct qt_err *err)
{
    int rc = qt_array_new(out, c->m.k, sizeof **out, err);
    for (size_t i = 0; i < c->m.k && rc == QT_OK; i++)
        (*out)[i] = c->root[i] * c->root[i];
    return rc;
}

static int sens_on_backend(struct qt_mix24_chooser *c, struct qt_err *err)
{
    float *importance = NULL;
    double *four = NULL;
    int rc;
    QT_TRY(qt_mix24_importance_new(&importance, c, err));
    QT_TRY(qt_array_new(&four, c->m.groups, sizeof *four, err));
    struct qt_mix24_costs costs = qt_mix24_costs_on(c, importance);
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

static int choose_fours(struct qt_mix24_chooser *c, struct qt_err *err)
{
    int rc = c->on ? sens_on_backend(c, err) : sens_on_host(c, err);
    return rc < 0 ? rc : choose_slots(c, err);
}

/* ---- the exponent --------------------------------------------------------------------------- */

/* marks: of the row, or NULL. */
static struct qt_mix24_range row_extent(const struct qt_mix24_chooser *c, const float *w,
                                        const uint16_t *marks)
{
    struct qt_mix24_range x = {0};
    for (size_t group = 0; group < c->m.groups; group++) {
        size_t first = group * c->m.g, end = qt_min_size(first + c->m.g, c->m.k);
        float low = 0, high = 0;
        for (size_t i = first; i < end; i++) {
            if (marks && marks[group] >> (i - first) & 1) {
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
    struct qt_mix24_chooser *c = ctx;
    size_t count;
    const float *rows = qt_mix24_rows_of(c, strip, thread, &count);
    (void)err;
    for (size_t r = 0; r < count; r++) {
        const uint16_t *marks = c->marks ? c->marks + (strip * ROWS + r) * c->m.groups : NULL;
        struct qt_mix24_range x = row_extent(c, rows + r * c->m.k, marks);
        c->extents[strip].scale = fmaxf(c->extents[strip].scale, x.scale);
        c->extents[strip].outlier = fmaxf(c->extents[strip].outlier, x.outlier);
    }
    return QT_OK;
}

static int extent_on_host(struct qt_mix24_range *out, struct qt_mix24_chooser *c,
                          struct qt_err *err)
{
    int rc;
    QT_TRY(qt_array_new(&c->extents, c->m.strips, sizeof *c->extents, err));
    QT_TRY(qt_parallel(c->m.strips, extent_strip, c, err));
    for (size_t strip = 0; strip < c->m.strips; strip++) {
        out->scale = fmaxf(out->scale, c->extents[strip].scale);
        out->outlier = fmaxf(out->outlier, c->extents[strip].outlier);
    }
done:
    return rc;
}

static int extent_on_backend(struct qt_mix24_range *out, const struct qt_mix24_chooser *c,
                             struct qt_err *err)
{
    struct qt_mix24_extent job = {.n = c->m.n,
                                  .k = c->m.k,
                                  .group = c->m.g,
                                  .w = c->on->w,
                                  .exp2 = -c->p->scale_exp2,
                                  .outliers = c->marks};
    uint8_t *bits = NULL;
    int rc;
    QT_TRY(qt_array_new(&bits, c->m.groups, 1, err));
    for (size_t group = 0; group < c->m.groups; group++)
        bits[group] = c->is_four[group] ? 4 : 2;
    job.bits = bits;
    QT_TRY(c->on->be->mix24_extent(c->on->be, &job, err));
    *out = (struct qt_mix24_range){job.scale, job.outlier};
done:
    qt_free(bits);
    return rc;
}

/*
 * Chooses scale_exp2 so that the largest min-max (q + z2) * s2 is in [24576, 49152). Search and
 * error compensation need the room up to 65504, the limit of FP16. Outliers must be finite, too.
 */
static int choose_exponent(struct qt_packed *p, struct qt_mix24_chooser *c, struct qt_err *err)
{
    const float scale_goal = 49152 * QT_MIX24_S2_UNIT, outlier_goal = 32768;
    struct qt_mix24_range all = {0};
    int for_scales, for_outliers;
    int rc = c->on ? extent_on_backend(&all, c, err) : extent_on_host(&all, c, err);
    if (rc < 0)
        return rc;
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
static void set_costs(struct qt_mix24_chooser *c, const float *importance, bool squared)
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
    return (m.outliers ? m.n * (m.k * sizeof(float) + m.groups * sizeof(uint16_t)) : 0) +
           m.strips * m.groups * sizeof(double) +
           (size_t)qt_threads() * (ROWS * m.k * sizeof(float) + DIGITS * sizeof(size_t));
}

/* Copies the weights to the host; they are the caller's. */
static int fetch_weights(struct qt_matrix *out, const struct qt_mix24_chooser *c,
                         struct qt_err *err)
{
    const size_t count = c->m.n * c->m.k;
    float *w = NULL;
    int rc;
    QT_TRY(qt_array_new(&w, count, sizeof *w, err));
    out->data = w;
    QT_TRY(c->on->be->download(c->on->be, w, c->on->w, count * sizeof *w, err));
done:
    return rc;
}

int qt_mix24_prepare(struct qt_packed *p, const struct qt_matrix *w, const struct qt_copy *on,
                     const float *importance, struct qt_err *err)
{
    struct qt_matrix fetched = *w;
    struct qt_mix24_chooser c = {.p = p, .w = &fetched, .on = on, .ops = qt_mix24_fitops_best()};
    int rc = QT_OK;
    qt_mix24_open(&c.m, p);
    c.recipe = qt_mix24_recipe(&p->spec);
    if (on && c.recipe.outliers_by_abs)
        QT_TRY(fetch_weights(&fetched, &c, err));
    QT_TRY(qt_array_new(&c.root, p->k, sizeof *c.root, err));
    QT_TRY(qt_array_new(&c.strips, c.m.strips, c.m.groups * sizeof *c.strips, err));
    QT_TRY(qt_array_new(&c.sens, c.m.groups, sizeof *c.sens, err));
    QT_TRY(qt_array_new(&c.is_four, c.m.groups, sizeof *c.is_four, err));
    QT_TRY(qt_array_new(&c.rows, (size_t)qt_threads() * ROWS, p->k * sizeof *c.rows, err));
    set_costs(&c, importance, c.recipe.sens == QT_MIX24_SENS_PAPER);
    QT_TRY(choose_fours(&c, err));
    set_costs(&c, importance, false);
    if (c.m.csr_ptr)
        QT_TRY(qt_mix24_choose_outliers(&c, err));
    QT_TRY(choose_exponent(p, &c, err));
done:
    qt_free(c.extents);
    qt_free(c.root);
    qt_free(c.strips);
    qt_free(c.sens);
    qt_free(c.is_four);
    qt_free(c.score);
    qt_free(c.channel);
    qt_free(c.marks);
    qt_free(c.rows);
    if (on)
        qt_free((void *)(uintptr_t)fetched.data);
    return rc;
}
