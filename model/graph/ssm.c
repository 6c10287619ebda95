/*
 * State space model (Mamba-2, arXiv 2405.21060): linear attention whose state decays by a step that
 * depends on the token.
 *
 *   x -- SSM_IN -+- values, input and output vectors -- CONV -- act -+
 *                +- step inputs -------------------------------------+- state space -- * (SSM_NORM)
 *                +- gates -- silu ------------------------------------------------------+
 *
 * and then SSM_OUT. SSM_NORM may be absent, or in front of the gates; it normalizes the channels of
 * each group apart. Falcon-H1 adds the output of attention.
 */
#include "model/graph/layer.h"

static size_t scratch_floats(const struct config *cfg)
{
    return 4 * ssm_values(cfg) + 3 * ssm_mixed(cfg) + 2 * cfg->ssm.heads;
}

struct arrays {
    float *all;               /* [m][outputs of SSM_IN]; later the channels of a group */
    float *gates, *y;         /* [m][values] */
    float *mixed, *convolved; /* [m][values | input vectors | output vectors] */
    float *steps;             /* [m][heads] */
    float *section;           /* [m][largest section of the outputs] */
};

static struct arrays arrays_of(const struct layer_run *r)
{
    const struct config *cfg = &r->layer->model->cfg;
    const size_t values = r->m * ssm_values(cfg), mixed = r->m * ssm_mixed(cfg);
    const size_t heads = r->m * cfg->ssm.heads;
    struct arrays a;
    a.all = r->layer->work.scratch;
    a.gates = a.all + values + mixed + heads;
    a.y = a.gates + values;
    a.mixed = a.y + values;
    a.convolved = a.mixed + mixed;
    a.steps = a.convolved + mixed;
    a.section = a.steps + heads;
    return a;
}

/* Splits the outputs of SSM_IN, times their factors, into gates, mixed and steps. */
static int split(const struct arrays *a, const struct layer_run *r, struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    const size_t values = ssm_values(cfg), vectors = cfg->ssm.groups * cfg->ssm.state;
    const size_t mixed = ssm_mixed(cfg), heads = cfg->ssm.heads;
    const struct {
        float *to;
        size_t ld, width;
    } sections[] = {{a->gates, values, values},
                    {a->mixed, mixed, values},
                    {a->mixed + values, mixed, vectors},
                    {a->mixed + values + vectors, mixed, vectors},
                    {a->steps, heads, heads}};
    struct qt_backend *be = r->layer->be;
    const float *from = a->all;
    int rc = QT_OK;
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        const size_t n = sections[i].width, ld = values + mixed + heads;
        const float factor = cfg->ssm.factors[i];
        if (factor == 1) {
            QT_TRY(be->copy_columns(be, sections[i].to, sections[i].ld, from, ld, n, r->m, err));
        } else {
            QT_TRY(be->copy_columns(be, a->section, n, from, ld, n, r->m, err));
            QT_TRY(be->scale(be, a->section, factor, r->m * n, err));
            QT_TRY(
                be->copy_columns(be, sections[i].to, sections[i].ld, a->section, n, n, r->m, err));
        }
        from += n;
    }
done:
    return rc;
}

/* SSM_NORM of y, whose groups are normalized one after the other. */
static int norm(const struct arrays *a, const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    struct qt_backend *be = l->be;
    const struct config *cfg = &l->model->cfg;
    const float *weight = l->parts[ROLE_SSM_NORM].weight;
    const size_t values = ssm_values(cfg), n = values / cfg->ssm.groups;
    int rc = QT_OK;
    if (cfg->ssm.groups == 1)
        return layer_apply_norm(r, ROLE_SSM_NORM, a->y, a->y, r->m, err);
    for (size_t at = 0; weight && at < values; at += n) {
        QT_TRY(be->copy_columns(be, a->all, n, a->y + at, values, n, r->m, err));
        QT_TRY(
            be->norm(be, a->all, a->all, weight + at, NULL, QT_NORM_RMS, cfg->eps, r->m, n, err));
        QT_TRY(be->copy_columns(be, a->y + at, values, a->all, n, n, r->m, err));
    }
done:
    return rc;
}

/* The mixer behind the call of layer_input for x. */
static int run_from_input(bool *stop, float *out, const float *x, const struct layer_run *r,
                          struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    struct qt_backend *be = l->be;
    const struct config *cfg = &l->model->cfg;
    const struct arrays a = arrays_of(r);
    const struct qt_state_space model = {.seqlen = r->seqlen,
                                         .heads = cfg->ssm.heads,
                                         .groups = cfg->ssm.groups,
                                         .dim = cfg->ssm.dim,
                                         .state = cfg->ssm.state,
                                         .a_log = l->parts[ROLE_A_LOG].weight,
                                         .dt_bias = l->parts[ROLE_DT_BIAS].weight,
                                         .d = l->parts[ROLE_SSM_D].weight,
                                         .step_min = cfg->ssm.step_min,
                                         .step_max = cfg->ssm.step_max,
                                         .states = r->cache ? r->cache->state : NULL};
    const float *y = a.y;
    int rc;
    QT_TRY(layer_linear(r, ROLE_SSM_IN, a.all, x, err));
    QT_TRY(split(&a, r, err));
    QT_TRY(cache_convolve(a.convolved, a.mixed, ROLE_CONV, r, err));
    QT_TRY(
        be->activate(be, a.convolved, a.convolved, NULL, cfg->ssm.act, r->m * ssm_mixed(cfg), err));
    QT_TRY(be->state_space(be, a.y, a.convolved, a.steps, r->m, &model, err));
    if (cfg->ssm.norm_first)
        QT_TRY(norm(&a, r, err));
    QT_TRY(be->activate(be, a.y, a.gates, a.y, QT_ACT_SILU, r->m * ssm_values(cfg), err));
    if (!cfg->ssm.norm_first)
        QT_TRY(norm(&a, r, err));
    QT_TRY(layer_input(&y, stop, r, ROLE_SSM_OUT, err));
    if (!*stop)
        QT_TRY(layer_linear(r, ROLE_SSM_OUT, out, y, err));
done:
    return rc;
}

static int run(bool *stop, float *out, const float *x, const struct layer_run *r,
               struct qt_err *err)
{
    int rc = layer_input(&x, stop, r, ROLE_SSM_IN, err);
    return rc == QT_OK && !*stop ? run_from_input(stop, out, x, r, err) : rc;
}

/* ---- beside attention ----------------------------------------------------------------------- */

static size_t larger_scratch(const struct config *cfg)
{
    return qt_max_size(scratch_floats(cfg), mixer_attention.scratch_floats(cfg));
}

static size_t scratch_floats_of_both(const struct config *cfg)
{
    return larger_scratch(cfg) + cfg->info.hidden;
}

static int run_both(bool *stop, float *out, const float *x, const struct layer_run *r,
                    struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const struct config *cfg = &l->model->cfg;
    float *attended = l->work.scratch + r->m * larger_scratch(cfg);
    const bool ssm_only = r->stop == layer_linear_of(l->def, ROLE_SSM_OUT)->input;
    int rc;
    QT_TRY(layer_input(&x, stop, r, ROLE_Q, err));
    if (!*stop && !ssm_only)
        QT_TRY(attention_run(stop, attended, x, r, err));
    if (!*stop)
        QT_TRY(run_from_input(stop, out, x, r, err));
    if (!*stop)
        QT_TRY(l->be->add(l->be, out, attended, r->m * cfg->info.hidden, err));
done:
    return rc;
}

const struct mixer mixer_ssm = {scratch_floats, run};
const struct mixer mixer_ssm_attention = {scratch_floats_of_both, run_both};
