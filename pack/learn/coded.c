/*
 * Matrices whose codes stay in backend memory: the backend decodes them for a forward pass, sums
 * the gradients of their scales and tunes them, so that neither weights nor parameters pass the
 * host.
 */
#include "pack/learn/learn.h"

struct learn_coded {
    struct qt_coded at;
    size_t groups, per_strip;          /* scales of a row; parameters of a strip */
    void *value, *code, *scale, *zero; /* what `at` points to; zero may be NULL */
    float *host;                       /* [n][groups], host memory: scales or their parameters */
    /* If the matrix learns: backend memory, as in struct learn_params, but [n][groups]. */
    float *param[LEARN_STATES], *grad;
    bool ahead; /* they are later than params */
};

/* ---- memory --------------------------------------------------------------------------------- */

static bool is_coded(struct qt_code_info *info, const struct learn_matrix *m, size_t layers)
{
    const struct qt_learnable *learnable = m->packed.spec.scheme->learnable;
    return m->layer < layers && learnable && learnable->scale_at &&
           qt_packed_code_info(info, &m->packed);
}

/* Cannot overflow: at most a few times the bytes of the matrix. */
static size_t bytes_of(const struct qt_code_info *info, const struct learn_matrix *m)
{
    const size_t scales = m->packed.n * info->groups, arrays = m->learns ? LEARN_STATES + 2 : 1;
    return m->packed.n * m->packed.k + scales * (arrays * sizeof(float) + 1);
}

static void close_matrix(struct learn_matrix *m, struct qt_backend *be)
{
    struct learn_coded *c = m->coded;
    if (!c)
        return;
    be->free(be, c->value);
    be->free(be, c->code);
    be->free(be, c->scale);
    be->free(be, c->zero);
    be->free(be, c->grad);
    for (size_t i = 0; i < LEARN_STATES; i++)
        be->free(be, c->param[i]);
    qt_free(c->host);
    qt_free(c);
    m->coded = NULL;
}

void learn_coded_close(struct qt_learner *l)
{
    for (size_t i = 0; l->matrices && i < l->nmatrices; i++)
        close_matrix(&l->matrices[i], l->be);
}

static int open_matrix(struct learn_matrix *m, const struct qt_code_info *info,
                       struct qt_backend *be, struct qt_err *err)
{
    const size_t n = m->packed.n, k = m->packed.k, scales = n * info->groups;
    struct learn_coded *c;
    int rc;
    QT_TRY(qt_array_new(&c, 1, sizeof *c, err));
    m->coded = c;
    c->groups = info->groups;
    c->per_strip = m->packed.spec.scheme->learnable->count(&m->packed);
    QT_TRY(be->alloc(be, &c->value, sizeof info->value, err));
    QT_TRY(be->alloc(be, &c->code, n * k, err));
    QT_TRY(be->alloc(be, &c->scale, scales * sizeof(float), err));
    if (info->asymmetric)
        QT_TRY(be->alloc(be, &c->zero, scales, err));
    for (size_t i = 0; m->learns && i < LEARN_STATES; i++)
        QT_TRY(qt_backend_floats(&c->param[i], be, n, info->groups, err));
    if (m->learns)
        QT_TRY(qt_backend_floats(&c->grad, be, n, info->groups, err));
    QT_TRY(qt_array_new(&c->host, scales, sizeof *c->host, err));
    c->at = (struct qt_coded){.n = n,
                              .k = k,
                              .group = info->group,
                              .value = c->value,
                              .code = c->code,
                              .scale = c->scale,
                              .zero = c->zero};
    m->new_codes = m->new_scales = true;
done:
    return rc;
}

/* ---- strips --------------------------------------------------------------------------------- */

/* A parallel loop over the strips of a matrix. */
struct strips {
    const struct learn_matrix *m;
    float *param;             /* of the matrix, in host memory */
    struct qt_code_rows rows; /* of the whole matrix */
    unsigned char *scratch;   /* per thread: the scheme's scratch, values and units */
    size_t values_at, stride; /* offset of values; bytes per thread */
};

static int strips_open(struct strips *s, const struct learn_matrix *m, struct qt_err *err)
{
    *s = (struct strips){.m = m};
    s->values_at = qt_round_up(qt_packed_scratch_bytes(&m->packed), 64);
    s->stride = s->values_at + qt_round_up(2 * m->coded->per_strip * sizeof(float), 64);
    return qt_array_new(&s->scratch, (size_t)qt_threads(), s->stride, err);
}

static void strips_close(struct strips *s)
{
    qt_free(s->scratch);
    qt_free(s->rows.code);
    qt_free(s->rows.scale);
    qt_free(s->rows.zero);
}

static int each_strip(struct strips *s,
                      int (*fn)(void *ctx, size_t item, int thread, struct qt_err *err),
                      struct qt_err *err)
{
    return qt_parallel(qt_ceil_div(s->m->packed.n, QT_FRAG_ROWS), fn, s, err);
}

static size_t strip_rows(const struct strips *s, size_t item)
{
    return qt_min_size(QT_FRAG_ROWS, s->m->packed.n - item * QT_FRAG_ROWS);
}

static int codes_of_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct strips *s = ctx;
    const size_t row = item * QT_FRAG_ROWS, at = row * s->m->coded->groups;
    struct qt_code_rows rows = {s->rows.code + row * s->m->packed.k, s->rows.scale + at,
                                s->rows.zero + at};
    (void)err;
    qt_packed_codes(&rows, &s->m->packed, row, strip_rows(s, item),
                    s->scratch + (size_t)thread * s->stride);
    return QT_OK;
}

static int scales_of_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct strips *s = ctx;
    const struct qt_packed *p = &s->m->packed;
    const struct qt_learnable *learnable = p->spec.scheme->learnable;
    const size_t groups = s->m->coded->groups;
    unsigned char *scratch = s->scratch + (size_t)thread * s->stride;
    float *value = (float *)(void *)(scratch + s->values_at);
    struct qt_strip strip = {item, strip_rows(s, item), scratch};
    (void)err;
    learnable->get(value, value + s->m->coded->per_strip, p, &strip);
    for (size_t r = 0; r < strip.rows; r++)
        for (size_t g = 0; g < groups; g++)
            s->m->coded->host[(item * QT_FRAG_ROWS + r) * groups + g] =
                ldexpf(value[learnable->scale_at(r, g)], p->scale_exp2);
    return QT_OK;
}

/* Returns the place in s->param of the scale of a group. */
static float *param_at(const struct strips *s, size_t row, size_t group)
{
    return s->param + row / QT_FRAG_ROWS * s->m->per_strip +
           s->m->packed.spec.scheme->learnable->scale_at(row % QT_FRAG_ROWS, group);
}

static void params_of_row(void *ctx, size_t row)
{
    const struct strips *s = ctx;
    const struct learn_coded *c = s->m->coded;
    for (size_t g = 0; g < c->groups; g++)
        c->host[row * c->groups + g] = *param_at(s, row, g);
}

static void row_to_params(void *ctx, size_t row)
{
    const struct strips *s = ctx;
    const struct learn_coded *c = s->m->coded;
    for (size_t g = 0; g < c->groups; g++)
        *param_at(s, row, g) = c->host[row * c->groups + g];
}

/* ---- parameters ----------------------------------------------------------------------------- */

size_t learn_coded_scales(const struct learn_matrix *m)
{
    return m->packed.n * m->coded->groups;
}

const struct qt_coded *learn_coded_of(const struct learn_matrix *m)
{
    return &m->coded->at;
}

static int store_params(struct qt_learner *l, const struct learn_matrix *m, struct qt_err *err)
{
    const struct learn_coded *c = m->coded;
    float *from[LEARN_STATES];
    int rc = QT_OK;
    learn_params_state(from, &l->params);
    for (size_t i = 0; m->learns && i < LEARN_STATES && rc == QT_OK; i++) {
        struct strips s = {.m = m, .param = from[i] + m->first};
        qt_parallel_for(m->packed.n, params_of_row, &s);
        rc = l->be->upload(l->be, c->param[i], c->host, learn_coded_scales(m) * sizeof *c->host,
                           err);
    }
    return rc;
}

int learn_coded_fetch(struct qt_learner *l, struct learn_matrix *m, struct qt_err *err)
{
    struct learn_coded *c = m->coded;
    float *to[LEARN_STATES];
    int rc = QT_OK;
    learn_params_state(to, &l->params);
    for (size_t i = 0; c->ahead && i < LEARN_STATES; i++) {
        struct strips s = {.m = m, .param = to[i] + m->first};
        QT_TRY(l->be->download(l->be, c->host, c->param[i], learn_coded_scales(m) * sizeof *c->host,
                               err));
        qt_parallel_for(m->packed.n, row_to_params, &s);
    }
    c->ahead = false;
done:
    return rc;
}

int learn_coded_keep(struct qt_learner *l, struct learn_matrix *m, struct qt_err *err)
{
    struct learn_coded *c = m->coded;
    c->ahead = true;
    return l->be->copy(l->be, c->param[LEARN_BEST], c->param[LEARN_DELTA],
                       learn_coded_scales(m) * sizeof(float), err);
}

int learn_coded_grad(struct qt_learner *l, const struct learn_matrix *m, const float *dscale,
                     struct qt_err *err)
{
    return l->be->copy(l->be, m->coded->grad, dscale, learn_coded_scales(m) * sizeof(float), err);
}

int learn_coded_step(struct qt_learner *l, struct learn_matrix *m, const struct qt_adam *step,
                     struct qt_err *err)
{
    struct learn_coded *c = m->coded;
    const struct qt_tuned t = {.count = learn_coded_scales(m),
                               .exp2 = m->packed.scale_exp2,
                               .start = c->param[LEARN_START],
                               .unit = c->param[LEARN_UNIT],
                               .grad = c->grad,
                               .delta = c->param[LEARN_DELTA],
                               .m = c->param[LEARN_M],
                               .v = c->param[LEARN_V],
                               .scale = c->scale};
    c->ahead = true;
    return l->be->tune(l->be, &t, step, err);
}

/* ---- decoding ------------------------------------------------------------------------------- */

static int upload_codes(struct strips *s, struct qt_backend *be, struct qt_err *err)
{
    const struct learn_coded *c = s->m->coded;
    const size_t n = s->m->packed.n, k = s->m->packed.k;
    struct qt_code_info info;
    int rc;
    qt_packed_code_info(&info, &s->m->packed);
    QT_TRY(qt_array_new(&s->rows.code, n, k, err));
    QT_TRY(qt_array_new(&s->rows.scale, n, c->groups * sizeof *s->rows.scale, err));
    QT_TRY(qt_array_new(&s->rows.zero, n, c->groups, err));
    QT_TRY(each_strip(s, codes_of_strip, err));
    QT_TRY(be->upload(be, c->value, info.value, sizeof info.value, err));
    QT_TRY(be->upload(be, c->code, s->rows.code, n * k, err));
    if (c->zero)
        QT_TRY(be->upload(be, c->zero, s->rows.zero, n * c->groups, err));
done:
    return rc;
}

static int renew(struct qt_learner *l, struct learn_matrix *m, struct qt_err *err)
{
    const size_t scales = m->packed.n * m->coded->groups;
    struct strips s;
    int rc;
    QT_TRY(strips_open(&s, m, err));
    if (m->new_codes)
        QT_TRY(upload_codes(&s, l->be, err));
    QT_TRY(each_strip(&s, scales_of_strip, err));
    QT_TRY(l->be->upload(l->be, m->coded->scale, m->coded->host, scales * sizeof(float), err));
    m->new_codes = m->new_scales = false;
done:
    strips_close(&s);
    return rc;
}

int learn_coded_decode(float *w, struct qt_learner *l, struct learn_matrix *m, struct qt_err *err)
{
    int rc = QT_OK;
    if (m->new_codes || m->new_scales)
        QT_TRY(renew(l, m, err));
    QT_TRY(l->be->decode(l->be, w, &m->coded->at, err));
done:
    return rc;
}

/* ---- all matrices --------------------------------------------------------------------------- */

int learn_coded_open(struct qt_learner *l, struct qt_err *err)
{
    struct qt_backend *be = l->be;
    struct qt_code_info info;
    size_t bytes = 0;
    int rc = QT_OK;
    if (!be->decode)
        return QT_OK;
    for (size_t i = 0; i < l->nmatrices; i++)
        if (is_coded(&info, &l->matrices[i], l->info.layers))
            bytes += bytes_of(&info, &l->matrices[i]);
    if (be->room && bytes > be->room(be) / 2) /* the layers need memory, too */
        return QT_OK;
    for (size_t i = 0; i < l->nmatrices; i++)
        if (is_coded(&info, &l->matrices[i], l->info.layers)) {
            QT_TRY(open_matrix(&l->matrices[i], &info, be, err));
            QT_TRY(store_params(l, &l->matrices[i], err));
            l->ncoded++;
        }
done:
    return rc;
}
