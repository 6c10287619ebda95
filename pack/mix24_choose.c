/*
 * What mix24 decides before there are any codes: which groups get 4 bits, in which slots groups
 * are stored, which weights are outliers. Costs are those of each row with a scale of its own.
 */
#include "pack/mix24_fit.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = QT_FRAG_ROWS, MAX_G = 16 };

struct chooser {
    const struct qt_packed *p;
    struct qt_mix24 m;
    struct qt_mix24_recipe recipe;
    const struct qt_mix24_fitops *ops;
    const struct qt_matrix *w;
    float *root;    /* [k] square root of what a squared error of the channel costs */
    double *strips; /* [strips][groups] sensitivities */
    double *sens;   /* [groups] their sums */
    bool *is_four;  /* [groups] */
    float *score;   /* [n][k] gain of an outlier; 0 where there is none */
    float *rows;    /* [threads][16][k] */
};

/* ---- one group ------------------------------------------------------------------------------ */

/* A group's problem with its storage. */
struct part {
    struct qt_mix24_problem p;
    float t[MAX_G * ROWS], v[MAX_G * MAX_G];
    uint8_t channel[MAX_G];
    uint16_t apart[MAX_G];
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
        .halves = c->m.halves,
        .search = c->recipe.search,
        .channel = x->channel,
        .t = x->t,
        .apart = x->apart,
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

/* What 2 bits cost beyond 4; or what they cost. */
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
    double key;
    size_t index;
};

/* Larger first, ties by index. */
static int by_rank(const void *a, const void *b)
{
    const struct rank *x = a, *y = b;
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

/* Groups rank[count], the most sensitive first: the leading ones go to the slots of the 4-bit
 * groups, the next to those of 4-bit scale codes; storage order within each. */
static void assign(uint16_t *perm, const struct qt_mix24 *m, struct rank *rank, size_t first,
                   size_t count)
{
    size_t left[3] = {0}, at[3];
    for (size_t slot = first; slot < first + count; slot++)
        left[qt_mix24_bits(m, slot) == 4 ? 0 : qt_mix24_q_max(m, slot) == 15 ? 1 : 2]++;
    qsort(rank, count, sizeof *rank, by_rank);
    at[0] = 0;
    for (int kind = 1; kind < 3; kind++)
        at[kind] = at[kind - 1] + left[kind - 1];
    for (int kind = 0; kind < 3; kind++)
        qsort(rank + at[kind], left[kind], sizeof *rank, by_index);
    for (size_t slot = first; slot < first + count; slot++) {
        int kind = qt_mix24_bits(m, slot) == 4 ? 0 : qt_mix24_q_max(m, slot) == 15 ? 1 : 2;
        perm[slot] = (uint16_t)rank[at[kind]++].index;
    }
}

/* Padding groups are the least sensitive. */
static int choose_slots(struct chooser *c, struct qt_err *err)
{
    enum { NEIGHBOURS = 4 };
    size_t slots = c->m.slots.slots, block = c->recipe.local ? NEIGHBOURS : slots;
    struct rank *rank = NULL;
    int rc = qt_array_new(&rank, slots, sizeof *rank, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < slots; i++)
        rank[i] = (struct rank){i < c->m.groups ? c->sens[i] : -INFINITY, i};
    for (size_t first = 0; first < slots; first += block)
        assign(c->m.perm, &c->m, rank + first, first, block);
    for (size_t slot = 0; slot < slots; slot++)
        if (c->m.perm[slot] < c->m.groups)
            c->is_four[c->m.perm[slot]] = qt_mix24_bits(&c->m, slot) == 4;
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

/* Scores a 2-bit group's largest and smallest weight in each row by what the rest costs less
 * without it. */
static void score_gain(struct chooser *c, struct part *x, size_t strip, size_t count, size_t group)
{
    float all[ROWS];
    c->ops->cost(all, &x->p);
    for (int end = 0; end < 2; end++) {
        size_t extreme[ROWS];
        float rest[ROWS];
        memset(x->apart, 0, sizeof x->apart);
        for (size_t r = 0; r < count; r++) {
            size_t best = 0;
            for (size_t j = 1; j < x->p.n; j++) {
                float t = x->t[j * ROWS + r], top = x->t[best * ROWS + r];
                if (end ? t < top : t > top)
                    best = j;
            }
            extreme[r] = best;
            x->apart[best] |= (uint16_t)(1u << r);
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

/* The count-th largest of score[n] (all >= 0), and how many are larger: 16 bits at a time, as such
 * floats are in the order of their bits. */
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

/* Marks the m.outliers largest scores, ties by index, and writes rows and columns of the CSR. Where
 * too few gain anything, the first weights of 2-bit groups fill up. */
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
        size_t first = panel * QT_MIX24_PANEL, end = qt_min_size(first + QT_MIX24_PANEL, m->k);
        uint32_t *ptr = m->csr_ptr + panel * (m->n + 1);
        for (size_t row = 0; row < m->n; row++) {
            ptr[row] = (uint32_t)at;
            for (size_t col = first; col < end; col++)
                if (c->score[row * m->k + col] > 0)
                    m->csr_col[at++] = (uint16_t)(col - first);
        }
        ptr[m->n] = (uint32_t)at;
    }
done:
    return rc;
}

/* ---- all of it ------------------------------------------------------------------------------ */

/* Equation 9 of the paper divides by the square of [H^-1]_jj, for which cost is the inverse. */
static void set_costs(struct chooser *c, const float *importance, bool squared)
{
    for (size_t j = 0; j < c->m.k; j++) {
        float h = importance ? importance[j] : 1;
        c->root[j] = squared ? h : sqrtf(h);
    }
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
    QT_TRY(qt_array_new(&c.is_four, c.m.groups, sizeof *c.is_four, err));
    QT_TRY(qt_array_new(&c.rows, (size_t)qt_threads() * ROWS, p->k * sizeof *c.rows, err));
    set_costs(&c, importance, c.recipe.sens == QT_MIX24_SENS_PAPER);
    QT_TRY(choose_fours(&c, err));
    set_costs(&c, importance, false);
    if (c.m.csr_ptr)
        QT_TRY(choose_outliers(&c, err));
done:
    qt_free(c.root);
    qt_free(c.strips);
    qt_free(c.sens);
    qt_free(c.is_four);
    qt_free(c.score);
    qt_free(c.rows);
    return rc;
}
