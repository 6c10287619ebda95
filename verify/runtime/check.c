/*
 * verify --model: the fused runtime against the decoder of the CPU, on the same tokens.
 *
 * Where activations are quantized, a difference of 1e-4 moves some of them to the next code, and
 * logits differ as much as by two independent roundings; no bound for a single logit would find a
 * fault. So the CPU also runs with linear inputs that are rounded to FP16 first, as they are on the
 * GPU, and the runtime may differ from the reference a few times as much as that.
 */
#include "verify/verify.h"

#include <math.h>
#include <stdio.h>

enum { PROMPT = 16, CHECKED = 64 };

struct model_check {
    struct qt_model_check *out;
    const struct qt_container *container;
    struct qt_weights w;
    struct qt_model *model;
    struct qt_backend *cpu;
    const struct qt_log *log;
    size_t vocab, prompt, capacity;     /* tokens */
    uint32_t ids[PROMPT + CHECKED + 1]; /* the prompt, then the choices of the reference */
    float *want;                        /* the reference's logits of every choice */
    double squares[2]; /* sums over the choices, see add_squares: of the runtime, and of rounding */
};

static double range_of(const float *logits, size_t n)
{
    float low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        low = fminf(low, logits[i]);
        high = fmaxf(high, logits[i]);
    }
    return (double)(high - low);
}

/* Compares one choice; *next = the reference's. limited: a large error of a logit is a fault. */
static void compare(struct qt_model_check *out, uint32_t *next, const float *want, const float *got,
                    size_t n, bool limited)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)want[i] - (double)got[i]);
        worst = d > worst || isnan(d) ? d : worst;
    }
    const uint32_t a = qt_most_probable(want, n), b = qt_most_probable(got, n);
    const double range = range_of(want, n), error = worst / range;
    const double gap = (double)(want[a] - want[b]) / range;
    *next = a;
    out->error = error > out->error || isnan(error) ? error : out->error;
    out->gap = gap > out->gap ? gap : out->gap;
    out->equal += a == b;
    if (limited && !(error <= QT_MODEL_ERROR) && out->faults++ == 0)
        snprintf(out->fault, sizeof out->fault,
                 "token %zu: a logit differs by %.4g of the range of the logits", out->tokens,
                 error);
    out->tokens++;
}

/* *sum += the mean squared difference of logits, relative to the square of their range. */
static void add_squares(double *sum, const float *want, const float *got, size_t n)
{
    const double range = range_of(want, n);
    for (size_t i = 0; i < n; i++) {
        const double d = ((double)want[i] - (double)got[i]) / range;
        *sum += d * d / (double)n;
    }
}

static int run_both(struct model_check *c, struct qt_gpu *gpu, struct qt_err *err)
{
    const struct qt_runtime_options opt = {
        .sequences = 1, .prompt = c->prompt, .capacity = c->capacity, .log = c->log};
    const bool rounds = c->w.fake_quant.input != NULL;
    struct qt_decoder *decoder = NULL;
    struct qt_runtime *rt = NULL;
    uint32_t chosen, *next;
    float *got = NULL;
    int rc;
    QT_TRY(qt_array_new(&got, c->vocab, sizeof *got, err));
    QT_TRY(qt_runtime_open(&rt, gpu, c->model, &c->w, c->container, &opt, err));
    QT_TRY(qt_decoder_open(&decoder, c->model, &c->w, c->cpu, 1, c->capacity, c->log, err));
    QT_TRY(qt_runtime_prompt(rt, c->ids, c->prompt, NULL, err));
    QT_TRY(qt_decoder_run(decoder, c->want, c->ids, c->prompt, err));
    for (size_t at = c->prompt;; at++) {
        float *want = c->want + (at - c->prompt) * c->vocab;
        QT_TRY(qt_runtime_read(rt, &chosen, got, err));
        next = &c->ids[at];
        compare(c->out, next, want, got, c->vocab, !rounds);
        add_squares(&c->squares[0], want, got, c->vocab);
        qt_log_progress(c->log, "model", (double)c->out->tokens, CHECKED);
        if (at == c->capacity)
            break;
        QT_TRY(qt_runtime_put(rt, next, err));
        QT_TRY(qt_runtime_step(rt, err));
        QT_TRY(qt_decoder_run(decoder, want + c->vocab, next, 1, err));
    }
done:
    qt_runtime_close(rt);
    qt_decoder_close(decoder);
    qt_free(got);
    return rc;
}

/* ---- rounded inputs ------------------------------------------------------------------------- */

/* Callback `input` of struct qt_fake_quant: rounds to FP16, then calls that of ctx, another one. */
static int half_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                      const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err)
{
    const struct qt_fake_quant *then = ctx;
    float *values = NULL, *rounded = NULL;
    const size_t bytes = m * k * sizeof *values;
    int rc;
    QT_TRY(qt_array_new(&values, m * k, sizeof *values, err));
    QT_TRY(be->alloc(be, &rounded, bytes, err));
    QT_TRY(be->download(be, values, x, bytes, err));
    for (size_t i = 0; i < m * k; i++)
        values[i] = qt_f16_to_f32(qt_f32_to_f16(values[i]));
    QT_TRY(be->upload(be, rounded, values, bytes, err));
    QT_TRY(then->input(then->ctx, be, y, rounded, linear, m, k, err));
done:
    be->free(be, rounded);
    qt_free(values);
    return rc;
}

static int run_rounded(struct model_check *c, struct qt_err *err)
{
    struct qt_fake_quant then = c->w.fake_quant;
    struct qt_weights w = c->w;
    struct qt_decoder *decoder = NULL;
    float *got = NULL;
    int rc;
    w.fake_quant.ctx = &then;
    w.fake_quant.input = half_input;
    QT_TRY(qt_array_new(&got, c->vocab, sizeof *got, err));
    QT_TRY(qt_decoder_open(&decoder, c->model, &w, c->cpu, 1, c->capacity, c->log, err));
    QT_TRY(qt_decoder_run(decoder, got, c->ids, c->prompt, err));
    for (size_t at = c->prompt;; at++) {
        add_squares(&c->squares[1], c->want + (at - c->prompt) * c->vocab, got, c->vocab);
        qt_log_progress(c->log, "rounded", (double)(at - c->prompt + 1), CHECKED);
        if (at == c->capacity)
            break;
        QT_TRY(qt_decoder_run(decoder, got, &c->ids[at], 1, err));
    }
done:
    qt_decoder_close(decoder);
    qt_free(got);
    return rc;
}

static void judge_rms(struct qt_model_check *out, const double squares[2])
{
    out->rms = sqrt(squares[0] / (double)out->tokens);
    out->rms_rounded = sqrt(squares[1] / (double)out->tokens);
    const double most = QT_MODEL_ROUNDED * fmax(out->rms_rounded, QT_MODEL_RMS);
    if (out->rms <= most)
        return;
    out->faults = 1;
    snprintf(out->fault, sizeof out->fault,
             "the RMS difference of the logits is %.4g of their range; on the CPU, inputs rounded "
             "to FP16 cause %.4g",
             out->rms, out->rms_rounded);
}

int qt_verify_model(struct qt_model_check *out, const struct qt_container *c, struct qt_gpu *gpu,
                    struct qt_backend *cpu, const struct qt_log *log, struct qt_err *err)
{
    struct model_check check = {
        .out = out, .container = c, .w = qt_weights_of_container(c), .cpu = cpu, .log = log};
    int rc;
    *out = (struct qt_model_check){.tokens = 0};
    QT_TRY(qt_model_open(&check.model, &check.w, err));
    const struct qt_model_info *info = qt_model_info(check.model);
    check.vocab = info->vocab;
    check.capacity = qt_min_size(PROMPT + CHECKED, info->max_positions);
    check.prompt = qt_min_size(PROMPT, check.capacity);
    for (size_t i = 0; i < PROMPT; i++) {
        uint64_t state = i;
        check.ids[i] = (uint32_t)(qt_splitmix64(&state) % check.vocab);
    }
    QT_TRY(qt_array_new(&check.want, (CHECKED + 1) * check.vocab, sizeof *check.want, err));
    QT_TRY(run_both(&check, gpu, err));
    if (check.w.fake_quant.input) {
        QT_TRY(run_rounded(&check, err));
        judge_rms(out, check.squares);
    }
done:
    qt_model_close(check.model);
    qt_free(check.want);
    return rc;
}
