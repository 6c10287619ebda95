#include "pack/learn/learn.h"

#include <stdlib.h>

static const char magic[8] = "qtlearn3";

/* Adam. beta2 is lower than the usual 0.999 because training has only some hundred steps. */
static const double beta1 = 0.9, beta2 = 0.99, eps = 1e-12;

/* ---- memory --------------------------------------------------------------------------------- */

static size_t strip_count(const struct learn_matrix *m)
{
    return qt_ceil_div(m->packed.n, QT_FRAG_ROWS);
}

static const struct qt_learnable *learnable(const struct learn_matrix *m)
{
    return m->packed.spec.scheme->learnable;
}

/* Assigns parameter indices to matrices and norms. */
static int assign_indices(struct qt_learner *l, struct qt_err *err)
{
    size_t count = 0, im = 0, in = 0;
    for (size_t layer = 0; layer <= l->info.layers; layer++) {
        l->layer_first[layer] = count;
        for (; im < l->nmatrices && l->matrices[im].layer == layer; im++) {
            struct learn_matrix *m = &l->matrices[im];
            if (!m->learns)
                continue;
            m->first = count;
            m->per_strip = learnable(m)->count(&m->packed);
            /* Cannot overflow: parameters are fewer than the bytes of the matrix. */
            count += strip_count(m) * m->per_strip;
        }
        for (; in < l->nnorms && l->norms[in].layer == layer; in++) {
            l->norms[in].first = count;
            count += l->run->plan.items[l->norms[in].item].tensor->count;
        }
    }
    l->layer_first[l->info.layers + 1] = count;
    l->params.count = count;
    if (count > SIZE_MAX / 64)
        return qt_no_memory(err, NULL);
    return QT_OK;
}

int learn_params_new(struct qt_learner *l, struct qt_err *err)
{
    struct learn_params *p = &l->params;
    float **arrays[] = {&p->start, &p->unit, &p->delta, &p->m, &p->v, &p->best, &p->grad};
    int rc = assign_indices(l, err);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays && rc == QT_OK; i++)
        rc = qt_array_new(arrays[i], p->count, sizeof(float), err);
    return rc;
}

void learn_params_free(struct learn_params *p)
{
    float *const arrays[] = {p->start, p->unit, p->delta, p->m, p->v, p->best, p->grad};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        qt_free(arrays[i]);
}

/* ---- matrices ------------------------------------------------------------------------------- */

/* A parallel loop over the strips of a matrix. */
struct strips {
    struct qt_learner *l;
    const struct learn_matrix *m;
    const struct qt_matrix *source; /* mode=ste */
    const float *dw;                /* of strips from `first` on */
    size_t first;
    unsigned char *scratch; /* per thread: the scheme's scratch, rows [16][k], values */
    size_t rows_at, stride; /* offset of rows; bytes per thread */
};

static int strips_open(struct strips *s, struct qt_learner *l, const struct learn_matrix *m,
                       struct qt_err *err)
{
    const struct qt_packed *p = &m->packed;
    size_t rows = QT_FRAG_ROWS * p->k * sizeof(float), values = m->per_strip * sizeof(float);
    *s = (struct strips){.l = l, .m = m};
    s->rows_at = qt_round_up(p->spec.scheme->scratch_bytes(p), 64);
    s->stride = s->rows_at + qt_round_up(rows, 64) + qt_round_up(values, 64);
    return qt_array_new(&s->scratch, (size_t)qt_threads(), s->stride, err);
}

static struct qt_strip strip_at(const struct strips *s, size_t item, int thread, float **rows,
                                float **values)
{
    const struct qt_packed *p = &s->m->packed;
    unsigned char *scratch = s->scratch + (size_t)thread * s->stride;
    *rows = (float *)(void *)(scratch + s->rows_at);
    *values = *rows + qt_round_up(QT_FRAG_ROWS * p->k, 16);
    return (struct qt_strip){
        .index = item,
        .rows = qt_min_size(QT_FRAG_ROWS, p->n - item * QT_FRAG_ROWS),
        .scratch = scratch,
    };
}

static int get_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct strips *s = ctx;
    const struct learn_params *params = &s->l->params;
    size_t at = s->m->first + item * s->m->per_strip;
    float *rows, *values;
    struct qt_strip strip = strip_at(s, item, thread, &rows, &values);
    (void)err;
    learnable(s->m)->get(params->start + at, params->unit + at, &s->m->packed, &strip);
    return QT_OK;
}

static int put_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct strips *s = ctx;
    const struct learn_params *params = &s->l->params;
    const struct qt_packed *p = &s->m->packed;
    size_t at = s->m->first + item * s->m->per_strip;
    float *rows, *values;
    struct qt_strip strip = strip_at(s, item, thread, &rows, &values);
    (void)err;
    for (size_t i = 0; i < s->m->per_strip; i++)
        values[i] = params->start[at + i] + params->unit[at + i] * params->delta[at + i];
    learnable(s->m)->put(p, &strip, values);
    if (s->source) {
        qt_matrix_rows(rows, s->source, item * QT_FRAG_ROWS, strip.rows, -p->scale_exp2);
        learnable(s->m)->recode(p, &strip, rows);
    }
    return QT_OK;
}

static int grad_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct strips *s = ctx;
    const size_t index = s->first + item;
    float *rows, *values, *grad = s->l->params.grad + s->m->first + index * s->m->per_strip;
    struct qt_strip strip = strip_at(s, index, thread, &rows, &values);
    (void)err;
    learnable(s->m)->grad(values, &s->m->packed, &strip,
                          s->dw + item * QT_FRAG_ROWS * s->m->packed.k);
    for (size_t i = 0; i < s->m->per_strip; i++)
        grad[i] += values[i];
    return QT_OK;
}

static int apply_matrix(struct qt_learner *l, struct learn_matrix *m, struct qt_err *err)
{
    const struct qt_tensor *t = l->run->plan.items[m->item].tensor;
    struct strips s = {0};
    struct qt_blob blob = {0};
    struct qt_matrix w;
    int rc;
    if (m->coded)
        QT_TRY(learn_coded_fetch(l, m, err));
    QT_TRY(strips_open(&s, l, m, err));
    if (l->opt.mode == QT_LEARN_STE) {
        QT_TRY(qt_ckpt_read(&blob, l->run->ckpt, t, err));
        w = (struct qt_matrix){blob.data, t->dtype, t->shape[0], t->shape[1], t->file, t->name};
        s.source = &w;
    }
    m->new_scales = true;
    m->new_codes |= s.source != NULL;
    QT_TRY(qt_parallel(strip_count(m), put_strip, &s, err));
done:
    qt_blob_free(&blob);
    qt_free(s.scratch);
    return rc;
}

static bool learns_in(const struct learn_matrix *m, size_t first, size_t end)
{
    return m->learns && m->first >= first && m->first < end;
}

int learn_params_apply(struct qt_learner *l, size_t first, size_t end, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++)
        if (learns_in(&l->matrices[i], first, end))
            rc = apply_matrix(l, &l->matrices[i], err);
    return rc;
}

int learn_params_grad(struct qt_learner *l, const struct learn_matrix *m, const float *dw,
                      size_t first, size_t end, struct qt_err *err)
{
    struct strips s;
    int rc = strips_open(&s, l, m, err);
    s.dw = dw;
    s.first = first;
    if (rc == QT_OK)
        rc = qt_parallel(end - first, grad_strip, &s, err);
    qt_free(s.scratch);
    return rc;
}

/* ---- norms ---------------------------------------------------------------------------------- */

static int read_norm(struct qt_learner *l, const struct learn_norm *norm, struct qt_err *err)
{
    const struct qt_tensor *t = l->run->plan.items[norm->item].tensor;
    struct learn_params *p = &l->params;
    double square = 0, one = l->info.norms_plus_1 ? 1 : 0;
    int rc = l->source.load(l->source.ctx, t->name, p->start + norm->first, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < t->count; i++)
        square += pow((double)p->start[norm->first + i] + one, 2);
    for (size_t i = 0; i < t->count; i++)
        p->unit[norm->first + i] = (float)sqrt(square / (double)t->count);
    return QT_OK;
}

int learn_norm_stored(void **bytes, float *w, const struct qt_learner *l,
                      const struct learn_norm *norm, struct qt_err *err)
{
    const struct qt_tensor *t = l->run->plan.items[norm->item].tensor;
    const struct learn_params *p = &l->params;
    int rc = qt_array_new(bytes, t->nbytes, 1, err);
    for (size_t i = 0; rc == QT_OK && i < t->count; i++) {
        size_t at = norm->first + i;
        float v = p->start[at] + p->unit[at] * p->delta[at];
        uint16_t half = t->dtype == QT_F16 ? qt_f32_to_f16(v) : qt_f32_to_bf16(v);
        if (t->dtype == QT_F32)
            ((float *)*bytes)[i] = v;
        else if (t->dtype == QT_F64)
            ((double *)*bytes)[i] = (double)v;
        else
            ((uint16_t *)*bytes)[i] = half;
    }
    if (rc == QT_OK)
        qt_to_f32(w, *bytes, t->dtype, t->count);
    return rc;
}

/* ---- all parameters ------------------------------------------------------------------------- */

int learn_params_read(struct qt_learner *l, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++) {
        struct strips s;
        if (!l->matrices[i].learns)
            continue;
        rc = strips_open(&s, l, &l->matrices[i], err);
        if (rc == QT_OK)
            rc = qt_parallel(strip_count(s.m), get_strip, &s, err);
        qt_free(s.scratch);
    }
    for (size_t i = 0; i < l->nnorms && rc == QT_OK; i++)
        rc = read_norm(l, &l->norms[i], err);
    return rc;
}

/* Sets [*at, result) to the parameters of a matrix or a norm, i < nmatrices + nnorms, that are in
 * [first, end) and change in host memory; nothing if there are none. */
static size_t host_range(size_t *at, const struct qt_learner *l, size_t i, size_t first, size_t end)
{
    const struct learn_matrix *m = &l->matrices[i];
    const struct learn_norm *norm = &l->norms[i - l->nmatrices];
    *at = 0;
    if (i < l->nmatrices) {
        if (m->coded || !learns_in(m, first, end))
            return 0;
        *at = m->first;
        return m->first + strip_count(m) * m->per_strip;
    }
    if (norm->first < first || norm->first >= end)
        return 0;
    *at = norm->first;
    return norm->first + l->run->plan.items[norm->item].tensor->count;
}

void learn_params_clear(struct qt_learner *l, size_t first, size_t end)
{
    size_t at;
    for (size_t i = 0; i < l->nmatrices + l->nnorms; i++) {
        const size_t to = host_range(&at, l, i, first, end);
        memset(l->params.grad + at, 0, (to - at) * sizeof *l->params.grad);
    }
}

bool learn_params_finite(const struct qt_learner *l, size_t first, size_t end)
{
    size_t at;
    for (size_t i = 0; i < l->nmatrices + l->nnorms; i++) {
        const size_t to = host_range(&at, l, i, first, end);
        if (qt_find_nonfinite(l->params.grad + at, to - at) < to - at)
            return false;
    }
    return true;
}

int learn_params_fetch(struct qt_learner *l, size_t first, size_t end, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++)
        if (l->matrices[i].coded && learns_in(&l->matrices[i], first, end))
            rc = learn_coded_fetch(l, &l->matrices[i], err);
    return rc;
}

int learn_params_keep(struct qt_learner *l, size_t first, size_t end, struct qt_err *err)
{
    size_t at;
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices + l->nnorms; i++) {
        const size_t to = host_range(&at, l, i, first, end);
        memcpy(l->params.best + at, l->params.delta + at, (to - at) * sizeof(float));
    }
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++)
        if (l->matrices[i].coded && learns_in(&l->matrices[i], first, end))
            rc = learn_coded_keep(l, &l->matrices[i], err);
    return rc;
}

/* A step of Adam on the parameters [first, end). */
struct adam {
    struct learn_params *p;
    size_t first, end;
    struct qt_adam step;
};
enum { ADAM_ITEM = 1 << 14 };

static void adam_item(void *ctx, size_t item)
{
    const struct adam *a = ctx;
    const struct qt_adam *s = &a->step;
    struct learn_params *p = a->p;
    const size_t from = a->first + item * ADAM_ITEM, end = qt_min_size(from + ADAM_ITEM, a->end);
    for (size_t i = from; i < end; i++) {
        double g = (double)p->grad[i] * (double)p->unit[i];
        double m = s->beta1 * (double)p->m[i] + (1 - s->beta1) * g;
        double v = s->beta2 * (double)p->v[i] + (1 - s->beta2) * g * g;
        p->m[i] = (float)m;
        p->v[i] = (float)v;
        p->delta[i] -= (float)(s->lr * (m / s->fix1) / (sqrt(v / s->fix2) + s->eps));
    }
}

int learn_params_step(struct qt_learner *l, size_t first, size_t end, size_t t, double lr,
                      struct qt_err *err)
{
    struct adam a = {.p = &l->params,
                     .step = {.beta1 = beta1,
                              .beta2 = beta2,
                              .eps = eps,
                              .fix1 = 1 - pow(beta1, (double)t),
                              .fix2 = 1 - pow(beta2, (double)t),
                              .lr = lr}};
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices + l->nnorms; i++) {
        a.end = host_range(&a.first, l, i, first, end);
        qt_parallel_for(qt_ceil_div(a.end - a.first, ADAM_ITEM), adam_item, &a);
    }
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++) {
        struct learn_matrix *m = &l->matrices[i];
        if (!learns_in(m, first, end))
            continue;
        if (m->coded)
            rc = learn_coded_step(l, m, &a.step, err);
        if (rc == QT_OK && (!m->coded || l->opt.mode == QT_LEARN_STE))
            rc = apply_matrix(l, m, err);
    }
    return rc;
}

/* ---- progress ------------------------------------------------------------------------------- */

void learn_params_state(float *arrays[LEARN_STATES], const struct learn_params *p)
{
    float *const list[LEARN_STATES] = {
        [LEARN_START] = p->start, [LEARN_UNIT] = p->unit, [LEARN_DELTA] = p->delta,
        [LEARN_M] = p->m,         [LEARN_V] = p->v,       [LEARN_BEST] = p->best};
    memcpy(arrays, list, sizeof list);
}

int learn_params_save(struct qt_learner *l, struct qt_err *err)
{
    size_t array = l->params.count * sizeof(float), curve = l->at.points * sizeof *l->points;
    size_t size = sizeof l->at + LEARN_STATES * array + curve;
    float *arrays[LEARN_STATES];
    unsigned char *data = NULL, *to;
    int rc;
    QT_TRY(learn_params_fetch(l, 0, l->params.count, err));
    QT_TRY(qt_array_new(&data, size, 1, err));
    memcpy(l->at.magic, magic, sizeof magic);
    l->at.params = l->params.count;
    memcpy(data, &l->at, sizeof l->at);
    to = data + sizeof l->at;
    learn_params_state(arrays, &l->params);
    for (size_t i = 0; i < LEARN_STATES; i++, to += array)
        memcpy(to, arrays[i], array);
    memcpy(to, l->points, curve);
    rc = qt_writer_save(l->run->writer, QT_PROGRESS_LEARNING, data, size, err);
    l->saved_at = qt_clock();
done:
    qt_free(data);
    return qt_comm_meet(l->run->opt->comm, rc, err);
}

int learn_params_load(bool *found, struct qt_learner *l, struct qt_err *err)
{
    size_t array = l->params.count * sizeof(float), size;
    struct learn_progress at;
    float *arrays[LEARN_STATES];
    unsigned char *data;
    int rc;
    *found = false;
    QT_TRY(qt_writer_load(&data, &size, l->run->writer, QT_PROGRESS_LEARNING, err));
    if (!data)
        return QT_OK;
    if (size >= sizeof at)
        memcpy(&at, data, sizeof at);
    if (size < sizeof at + LEARN_STATES * array || memcmp(at.magic, magic, sizeof magic) != 0 ||
        at.params != l->params.count || at.layer > l->info.layers ||
        at.points > (size - sizeof at - LEARN_STATES * array) / sizeof *l->points ||
        size != sizeof at + LEARN_STATES * array + at.points * sizeof *l->points) {
        rc = qt_fail(err, QT_E_RESUME, l->run->opt->out_dir, NULL,
                     "cannot resume: the saved learning progress does not belong to this run");
        goto done;
    }
    QT_TRY(qt_array_grow(&l->points, &l->points_capacity, at.points + 1, sizeof *l->points, err));
    l->at = at;
    learn_params_state(arrays, &l->params);
    for (size_t i = 0; i < LEARN_STATES; i++)
        memcpy(arrays[i], data + sizeof at + i * array, array);
    memcpy(l->points, data + sizeof at + LEARN_STATES * array, at.points * sizeof *l->points);
    *found = true;
done:
    qt_free(data);
    return rc;
}
