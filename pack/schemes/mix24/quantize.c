/* Quantizes all groups of a matrix: under a Hessian by qt_solve, or strip by strip without. Section
 * perm and the structure of the CSR matrix are set already (choose.c). */
#include "pack/schemes/mix24/fit.h"

#include <stdlib.h>
#include <string.h>

extern const struct qt_mix24_fitops qt_mix24_fit_generic, qt_mix24_fit_avx2, qt_mix24_fit_avx512;

const struct qt_mix24_fitops *qt_mix24_fitops_best(void)
{
    const char *isa = qt_rowops_best()->isa;
#ifdef __x86_64__
    if (strcmp(isa, "avx512") == 0)
        return &qt_mix24_fit_avx512;
    if (strcmp(isa, "avx2") == 0)
        return &qt_mix24_fit_avx2;
#endif
    (void)isa;
    return &qt_mix24_fit_generic;
}

enum { ROWS = QT_FRAG_ROWS, MAX_G = 16, R = QT_PANEL_ROWS };

/* ---- outliers ------------------------------------------------------------------------------- */

/* Sets bit r of outlier_rows[channel] for every outlier in row r of the strip: outlier_rows[k]. */
static void mark_outliers(uint16_t *outlier_rows, const struct qt_mix24 *m, size_t strip)
{
    size_t count = qt_min_size(ROWS, m->n - strip * ROWS);
    memset(outlier_rows, 0, m->k * sizeof *outlier_rows);
    for (size_t panel = 0; m->csr_ptr && panel < m->panels; panel++)
        for (size_t r = 0; r < count; r++) {
            size_t first, end;
            qt_mix24_row(&first, &end, m, panel, strip * ROWS + r);
            for (size_t i = first; i < end; i++)
                outlier_rows[qt_mix24_channel(m, panel * QT_MIX24_PANEL + m->csr_col[i])] |=
                    (uint16_t)(1u << r);
        }
}

/* Stores the value of the outlier at (row, packed column); returns the stored value. */
static float store_outlier(const struct qt_mix24 *m, size_t row, size_t col, float value)
{
    uint16_t local = (uint16_t)(col % QT_MIX24_PANEL), bits = qt_f32_to_f16(value);
    size_t low, high;
    qt_mix24_row(&low, &high, m, col / QT_MIX24_PANEL, row);
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (m->csr_col[middle] <= local)
            low = middle;
        else
            high = middle;
    }
    if ((bits & 0x7fff) >= 0x7c00)
        bits = (uint16_t)((bits & 0x8000) | 0x7bff);
    m->csr_val[low] = bits;
    return qt_f16_to_f32(bits);
}

/* ---- one group of one strip ----------------------------------------------------------------- */

/* A group's problem with its storage. */
struct part {
    struct qt_mix24_problem p;
    float t[MAX_G * ROWS], q[MAX_G * ROWS];
    uint8_t channel[MAX_G];
    uint16_t outlier_rows[MAX_G];
};

static void part_new(struct part *x, const struct qt_mix24 *m, bool search, size_t slot, size_t n)
{
    memset(x, 0, sizeof *x);
    x->p = (struct qt_mix24_problem){
        .n = n,
        .bits = qt_mix24_bits(m, slot),
        .halves = m->units.halves,
        .search = search,
        .channel = x->channel,
        .t = x->t,
        .outlier_rows = x->outlier_rows,
    };
}

/* Missing channels of a short group get the code of zero. */
static void clear_missing(struct qt_mix24_group *group, size_t n)
{
    for (size_t c = n; c < MAX_G; c++)
        memcpy(group->code[c], group->zero, ROWS);
}

/* Clears the rows beyond the matrix. */
static void finish_group(struct qt_mix24_group *group, size_t rows)
{
    for (size_t r = rows; r < ROWS; r++) {
        group->q[r] = group->zero[r] = 0;
        for (size_t c = 0; c < MAX_G; c++)
            group->code[c][r] = 0;
    }
}

/* ---- without a Hessian ---------------------------------------------------------------------- */

void qt_mix24_quantize(const struct qt_packed *p, const struct qt_strip *strip, const float *w,
                       const float *importance)
{
    struct qt_mix24 m;
    struct qt_mix24_group *groups = strip->scratch;
    const struct qt_mix24_fitops *ops = qt_mix24_fitops_best();
    const bool search = qt_mix24_recipe(&p->spec).search;
    float v[MAX_G * MAX_G];
    qt_mix24_open(&m, p);
    uint16_t *outlier_rows = (uint16_t *)(void *)(groups + m.slots);
    memset(groups, 0, m.slots * sizeof *groups);
    mark_outliers(outlier_rows, &m, strip->index);
    for (size_t slot = 0; slot < m.slots; slot++) {
        struct part x;
        if (m.perm[slot] == QT_MIX24_NO_GROUP)
            continue;
        size_t first = m.perm[slot] * m.g, n = qt_min_size(m.g, m.k - first);
        part_new(&x, &m, search, slot, n);
        x.p.v = v;
        x.p.stride = MAX_G;
        for (size_t j = 0; j < n; j++) {
            v[j * MAX_G + j] = importance ? sqrtf(importance[first + j]) : 1;
            x.channel[j] = (uint8_t)j;
            x.outlier_rows[j] = outlier_rows[first + j];
            for (size_t r = 0; r < strip->rows; r++)
                x.t[j * ROWS + r] = w[r * m.k + first + j];
        }
        ops->fit(&groups[slot], x.q, &x.p);
        clear_missing(&groups[slot], n);
        finish_group(&groups[slot], strip->rows);
        for (size_t j = 0; j < n; j++)
            for (size_t r = 0; r < strip->rows; r++)
                if (x.outlier_rows[j] >> r & 1)
                    store_outlier(&m, strip->index * ROWS + r, slot * m.g + j, x.t[j * ROWS + r]);
    }
    qt_mix24_pack(qt_mix24_strip(&m, strip->index), &m, groups);
}

/* ---- under a Hessian ------------------------------------------------------------------------ */

/* Scales and ranges of one group in one panel. The columns of a group are rounded one after the
 * other, so one group per panel is cached. */
struct rows_cache {
    size_t group; /* SIZE_MAX: none */
    float scale[R], inverse[R], low[R], high[R];
    float zero[R];
};

struct solver {
    struct qt_mix24 m;
    bool search;
    const struct qt_mix24_fitops *ops;
    struct qt_mix24_group *groups; /* [strips][slots] */
    uint16_t *outlier_rows;        /* [strips][k] */
    uint16_t *slot_of;             /* [groups] */
    struct rows_cache *cache;      /* [panels of rows] */
};

static size_t packed_column(const struct solver *s, size_t channel)
{
    return s->slot_of[channel / s->m.g] * s->m.g + channel % s->m.g;
}

static struct qt_mix24_group *group_at(const struct solver *s, size_t row, size_t group)
{
    return &s->groups[row / ROWS * s->m.slots + s->slot_of[group]];
}

/* Fits or refits a group in all strips of a panel. */
static void fit_panel(struct solver *s, const struct qt_column_group *g, const float *t, float *q,
                      size_t row0, size_t rows)
{
    struct part x;
    part_new(&x, &s->m, q ? g->round < QT_MIX24_SEARCHES : s->search, s->slot_of[g->index], g->n);
    x.p.coupled = true;
    x.p.v = g->v;
    x.p.stride = g->stride;
    for (size_t j = 0; j < qt_min_size(g->n, MAX_G); j++)
        x.channel[j] = (uint8_t)(g->col[j] - g->index * s->m.g);
    for (size_t r = 0; r < rows; r += ROWS) {
        struct qt_mix24_group *group = group_at(s, row0 + r, g->index);
        for (size_t j = 0; j < g->n; j++) {
            x.outlier_rows[j] = s->outlier_rows[(row0 + r) / ROWS * s->m.k + g->col[j]];
            memcpy(x.t + j * ROWS, t + j * R + r, ROWS * sizeof *t);
            if (q)
                memcpy(x.q + j * ROWS, q + j * R + r, ROWS * sizeof *q);
        }
        if (q)
            s->ops->refit(group, x.q, &x.p);
        else
            s->ops->fit(group, x.q, &x.p);
        clear_missing(group, g->n);
        for (size_t j = 0; j < g->n && q; j++)
            for (size_t i = 0; i < ROWS && r + i < rows; i++)
                q[j * R + r + i] =
                    x.outlier_rows[j] >> i & 1
                        ? store_outlier(&s->m, row0 + r + i, packed_column(s, g->col[j]),
                                        x.q[j * ROWS + i])
                        : x.q[j * ROWS + i];
    }
    s->cache[row0 / R].group = SIZE_MAX;
}

static void begin(void *ctx, const struct qt_column_group *group, const float *t, size_t row0,
                  size_t rows)
{
    fit_panel(ctx, group, t, NULL, row0, rows);
}

static void refit(void *ctx, const struct qt_column_group *group, const float *t, float *q,
                  size_t row0, size_t rows)
{
    fit_panel(ctx, group, t, q, row0, rows);
}

static const struct rows_cache *cache_for(struct solver *s, size_t group, size_t row0, size_t rows)
{
    struct rows_cache *cache = &s->cache[row0 / R];
    if (cache->group == group)
        return cache;
    cache->group = group;
    const float top = qt_mix24_bits(&s->m, s->slot_of[group]) == 4 ? 15 : 3;
    for (size_t r = 0; r < rows; r++) {
        const struct qt_mix24_group *g = group_at(s, row0 + r, group);
        cache->scale[r] = qt_mix24_scale(g, r % ROWS);
        cache->inverse[r] = 1 / cache->scale[r];
        cache->zero[r] = g->zero[r % ROWS];
        cache->low[r] = -cache->zero[r];
        cache->high[r] = top - cache->zero[r];
    }
    return cache;
}

static void round_column(void *ctx, size_t col, const float *x, float *q, float *unit, size_t row0,
                         size_t rows)
{
    struct solver *s = ctx;
    size_t group = col / s->m.g, c = col % s->m.g;
    const struct rows_cache *cache = cache_for(s, group, row0, rows);
    for (size_t r = 0; r < rows; r++) {
        float y = x[r] * cache->inverse[r];
        y = y < cache->low[r] ? cache->low[r] : y > cache->high[r] ? cache->high[r] : y;
        unit[r] = (y + 12582912.0f) - 12582912.0f; /* to the nearest integer, ties to even */
        q[r] = qt_mix24_value(cache->zero[r] + unit[r], cache->zero[r], cache->scale[r]);
    }
    for (size_t r = 0; r < rows; r += ROWS) {
        uint8_t *code = group_at(s, row0 + r, group)->code[c];
        uint16_t outlier_rows = s->outlier_rows[(row0 + r) / ROWS * s->m.k + col];
        for (size_t i = 0; i < ROWS && r + i < rows; i++) {
            code[i] = (uint8_t)(cache->zero[r + i] + unit[r + i]);
            if (outlier_rows >> i & 1) {
                code[i] = (uint8_t)cache->zero[r + i];
                q[r + i] = store_outlier(&s->m, row0 + r + i, packed_column(s, col), x[r + i]);
            }
        }
    }
}

static void store_strip(void *ctx, size_t strip)
{
    struct solver *s = ctx;
    struct qt_mix24_group *groups = s->groups + strip * s->m.slots;
    for (size_t slot = 0; slot < s->m.slots; slot++)
        finish_group(&groups[slot], qt_min_size(ROWS, s->m.n - strip * ROWS));
    qt_mix24_pack(qt_mix24_strip(&s->m, strip), &s->m, groups);
}

/* *out: the slot of each group. */
static int slots_new(uint16_t **out, const struct qt_mix24 *m, struct qt_err *err)
{
    int rc = qt_array_new(out, m->groups, sizeof **out, err);
    for (size_t slot = 0; slot < m->slots && rc == QT_OK; slot++)
        if (m->perm[slot] != QT_MIX24_NO_GROUP)
            (*out)[m->perm[slot]] = (uint16_t)slot;
    return rc;
}

/* Reorders f as the recipe says. */
static int order_new(struct qt_factor *out, const struct qt_mix24 *m, const uint16_t *slot_of,
                     enum qt_mix24_order order, const struct qt_factor *f, struct qt_err *err)
{
    struct qt_factor_options opt = {.storage_order = order == QT_MIX24_NATURAL};
    uint8_t *class = NULL;
    int rc = qt_array_new(&class, m->groups, 1, err);
    if (rc < 0)
        return rc;
    for (size_t group = 0; group < m->groups && order == QT_MIX24_2BIT_FIRST; group++)
        class[group] = qt_mix24_bits(m, slot_of[group]) == 4;
    opt.class = class;
    rc = qt_factor_reorder(out, f, &opt, err);
    qt_free(class);
    return rc;
}

/* Strip by strip, with the diagonal of H as importance, which is the cost of errors that are not
 * compensated. */
struct weighing {
    struct qt_packed *p;
    const float *w;
    float *importance;
    unsigned char *scratch; /* per thread */
    size_t scratch_stride;
};

static int weigh_strip(void *ctx, size_t strip, int thread, struct qt_err *err)
{
    struct weighing *x = ctx;
    struct qt_strip s = {strip, qt_min_size(ROWS, x->p->n - strip * ROWS),
                         x->scratch + (size_t)thread * x->scratch_stride};
    (void)err;
    qt_mix24_quantize(x->p, &s, x->w + strip * ROWS * x->p->k, x->importance);
    return QT_OK;
}

static int solve_without_compensation(struct qt_solve_report *out, struct qt_packed *p,
                                      const float *w, const struct qt_factor *f, struct qt_err *err)
{
    struct weighing x = {.p = p, .w = w};
    struct qt_packed plain = *p; /* the same data at the scale of w */
    float *q = NULL;
    int rc = QT_OK;
    plain.scale_exp2 = 0;
    x.scratch_stride = qt_round_up(qt_mix24_scratch_bytes(p), 64);
    QT_TRY(qt_array_new(&x.importance, p->k, sizeof *x.importance, err));
    QT_TRY(qt_array_new(&x.scratch, (size_t)qt_threads(), x.scratch_stride, err));
    QT_TRY(qt_array_new(&q, p->n, p->k * sizeof *q, err));
    for (size_t i = 0; i < p->k; i++)
        x.importance[f->order[i]] = f->diagonal[i];
    QT_TRY(qt_parallel(qt_ceil_div(p->n, ROWS), weigh_strip, &x, err));
    QT_TRY(qt_packed_decode(q, &plain, 0, p->n, err));
    QT_TRY(qt_solve_error(&out->after_compensation, f, w, q, p->n, err));
    out->after_descent = out->after_compensation;
done:
    qt_free(x.importance);
    qt_free(x.scratch);
    qt_free(q);
    return rc;
}

int qt_mix24_solve(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                   const struct qt_factor *f, const struct qt_solve_options *opt,
                   struct qt_err *err)
{
    struct solver s = {.ops = qt_mix24_fitops_best()};
    const struct qt_mix24_recipe recipe = qt_mix24_recipe(&p->spec);
    struct qt_rounder rounder = {.ctx = &s, .begin = begin, .round = round_column, .refit = refit};
    struct qt_factor ordered = {0};
    size_t panels = qt_ceil_div(p->n, R);
    int rc = QT_OK;
    if (recipe.order == QT_MIX24_NO_COMPENSATION)
        return solve_without_compensation(out, p, w, f, err);
    qt_mix24_open(&s.m, p);
    s.search = recipe.search;
    QT_TRY(qt_array_new(&s.groups, s.m.strips, s.m.slots * sizeof *s.groups, err));
    QT_TRY(qt_array_new(&s.outlier_rows, s.m.strips, s.m.k * sizeof *s.outlier_rows, err));
    QT_TRY(slots_new(&s.slot_of, &s.m, err));
    QT_TRY(qt_array_new(&s.cache, panels, sizeof *s.cache, err));
    for (size_t i = 0; i < panels; i++)
        s.cache[i].group = SIZE_MAX;
    for (size_t strip = 0; strip < s.m.strips; strip++)
        mark_outliers(s.outlier_rows + strip * s.m.k, &s.m, strip);
    QT_TRY(order_new(&ordered, &s.m, s.slot_of, recipe.order, f, err));
    QT_TRY(qt_solve(out, &ordered, w, p->n, &rounder, opt, err));
    qt_parallel_for(s.m.strips, store_strip, &s);
done:
    qt_factor_free(&ordered);
    qt_free(s.groups);
    qt_free(s.outlier_rows);
    qt_free(s.slot_of);
    qt_free(s.cache);
    return rc;
}

/* ---- on a backend --------------------------------------------------------------------------- */

bool qt_mix24_rounds_on(const struct qt_packed *p)
{
    const struct qt_mix24_recipe recipe = qt_mix24_recipe(&p->spec);
    return recipe.search && recipe.order != QT_MIX24_NO_COMPENSATION;
}

/* A backend reads `bits` and the places of the outliers, and fills `q` and `outlier`. */
struct backend_job {
    struct qt_mix24 m;
    struct qt_round_mix24 mix24;
    uint16_t *slot_of; /* [groups] */
    uint8_t *bits;     /* [groups] */
    uint8_t *q;        /* [groups][stride] */
    uint32_t *row, *col;
    float *outlier;
    struct qt_factor ordered; /* with the columns in the order of the job */
};

/* Lists the outliers in the order of the CSR matrix. */
static void list_outliers(const struct backend_job *s)
{
    const struct qt_mix24 *m = &s->m;
    for (size_t panel = 0; m->csr_ptr && panel < m->panels; panel++)
        for (size_t r = 0; r < m->n; r++) {
            size_t first, end;
            qt_mix24_row(&first, &end, m, panel, r);
            for (size_t i = first; i < end; i++) {
                s->row[i] = (uint32_t)r;
                s->col[i] = (uint32_t)qt_mix24_channel(m, panel * QT_MIX24_PANEL + m->csr_col[i]);
            }
        }
}

static int backend_job_new(struct backend_job *s, struct qt_packed *p, struct qt_err *err)
{
    struct qt_mix24 *m = &s->m;
    int rc;
    qt_mix24_open(m, p);
    const size_t outliers = m->csr_ptr ? m->outliers : 0;
    QT_TRY(slots_new(&s->slot_of, m, err));
    QT_TRY(qt_codes_new(&p->codes, p, err));
    QT_TRY(qt_array_new(&p->codes->shared, m->strips, 2 * m->groups * sizeof(uint16_t), err));
    QT_TRY(qt_array_new(&s->bits, m->groups, 1, err));
    QT_TRY(qt_array_new(&s->q, m->groups, p->codes->stride, err));
    QT_TRY(qt_array_new(&s->row, outliers, sizeof *s->row, err));
    QT_TRY(qt_array_new(&s->col, outliers, sizeof *s->col, err));
    QT_TRY(qt_array_new(&s->outlier, outliers, sizeof *s->outlier, err));
    for (size_t group = 0; group < m->groups; group++)
        s->bits[group] = (uint8_t)qt_mix24_bits(m, s->slot_of[group]);
    list_outliers(s);
    s->mix24 = (struct qt_round_mix24){.bits = s->bits,
                                       .halves = (int)m->units.halves,
                                       .searches = QT_MIX24_SEARCHES,
                                       .outliers = outliers,
                                       .outlier_row = s->row,
                                       .outlier_col = s->col,
                                       .outlier = s->outlier,
                                       .q = s->q,
                                       .u = p->codes->shared};
done:
    return rc;
}

/* The scheme rounds the columns in an order of its own. */
static int order_job(struct backend_job *s, const struct qt_packed *p, const struct qt_factor *f,
                     struct qt_round *job, struct qt_err *err)
{
    const enum qt_mix24_order order = qt_mix24_recipe(&p->spec).order;
    const int rc = order_new(&s->ordered, &s->m, s->slot_of, order, f, err);
    job->h = s->ordered.backend_h;
    job->v = s->ordered.backend_v;
    job->order = s->ordered.order;
    job->group_at = s->ordered.group;
    return rc;
}

int qt_mix24_round_begin(void **state, struct qt_packed *p, const struct qt_factor *f,
                         struct qt_round *job, struct qt_err *err)
{
    struct backend_job *s;
    int rc;
    QT_TRY(qt_array_new(&s, 1, sizeof *s, err));
    *state = s;
    QT_TRY(backend_job_new(s, p, err));
    if (f)
        QT_TRY(order_job(s, p, f, job, err));
    job->group = s->m.g;
    job->mix24 = &s->mix24;
    job->stride = p->codes->stride;
    job->code = p->codes->code;
    job->zero = p->codes->zero;
done:
    return rc;
}

void qt_mix24_round_end(void *state, struct qt_packed *p, bool done)
{
    struct backend_job *s = state;
    if (!s)
        return;
    for (size_t i = 0; done && i < s->m.groups * p->codes->stride; i++)
        p->codes->scale[i] = s->q[i];
    for (size_t i = 0; done && i < s->mix24.outliers; i++)
        s->m.csr_val[i] = qt_f32_to_f16(s->outlier[i]);
    qt_factor_free(&s->ordered);
    qt_free(s->slot_of);
    qt_free(s->bits);
    qt_free(s->q);
    qt_free(s->row);
    qt_free(s->col);
    qt_free(s->outlier);
    qt_free(s);
}

struct packing {
    struct qt_mix24 m;
    const struct qt_codes *codes;
    unsigned char *scratch; /* per thread */
    size_t stride;
};

static void unshare(struct qt_mix24_group *group, const uint16_t *u)
{
    for (int half = 0; half < 2; half++) {
        group->s2[half] = u[half] & QT_MIX24_S2_MASK;
        group->z2[half] = u[half] & 15;
    }
}

static int pack_strip(void *ctx, size_t strip, int thread, struct qt_err *err)
{
    const struct packing *s = ctx;
    const struct qt_mix24 *m = &s->m;
    const size_t stride = s->codes->stride, row0 = strip * ROWS;
    struct qt_mix24_group *groups = (void *)(s->scratch + (size_t)thread * s->stride);
    (void)err;
    memset(groups, 0, m->slots * sizeof *groups);
    for (size_t slot = 0; slot < m->slots; slot++) {
        const size_t index = m->perm[slot], first = index * m->g;
        struct qt_mix24_group *group = &groups[slot];
        if (index == QT_MIX24_NO_GROUP)
            continue;
        unshare(group, s->codes->shared + (strip * m->groups + index) * 2);
        const size_t n = qt_min_size(m->g, m->k - first);
        for (size_t r = 0; r < ROWS; r++) {
            group->q[r] = (uint8_t)s->codes->scale[index * stride + row0 + r];
            group->zero[r] = s->codes->zero[index * stride + row0 + r];
        }
        for (size_t c = 0; c < n; c++)
            memcpy(group->code[c], s->codes->code + (first + c) * stride + row0, ROWS);
        clear_missing(group, n);
        finish_group(group, qt_min_size(ROWS, m->n - row0));
    }
    qt_mix24_pack(qt_mix24_strip(m, strip), m, groups);
    return QT_OK;
}

int qt_mix24_pack_codes(struct qt_packed *p, const struct qt_codes *codes, struct qt_err *err)
{
    struct packing s = {.codes = codes};
    int rc;
    qt_mix24_open(&s.m, p);
    s.stride = qt_round_up(s.m.slots * sizeof(struct qt_mix24_group), 64);
    QT_TRY(qt_array_new(&s.scratch, (size_t)qt_threads(), s.stride, err));
    QT_TRY(qt_parallel(s.m.strips, pack_strip, &s, err));
done:
    qt_free(s.scratch);
    return rc;
}
