/* verify --model: the fused runtime against the decoder of the CPU, on the same tokens. */
#include "verify/verify.h"

#include <math.h>
#include <stdio.h>

enum { PROMPT = 16, CHECKED = 64 };

/* Compares one choice; *next = the reference's. */
static void compare(struct qt_model_check *out, uint32_t *next, const float *want, const float *got,
                    size_t n)
{
    float low = INFINITY, high = -INFINITY;
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)want[i] - (double)got[i]);
        low = fminf(low, want[i]);
        high = fmaxf(high, want[i]);
        worst = d > worst || isnan(d) ? d : worst;
    }
    const uint32_t a = qt_most_probable(want, n), b = qt_most_probable(got, n);
    const double range = (double)(high - low), error = worst / range;
    const double gap = (double)(want[a] - want[b]) / range;
    *next = a;
    out->error = error > out->error || isnan(error) ? error : out->error;
    out->gap = gap > out->gap ? gap : out->gap;
    out->equal += a == b;
    if (!(error <= QT_MODEL_ERROR) && out->faults++ == 0)
        snprintf(out->fault, sizeof out->fault,
                 "token %zu: a logit differs by %.4g of the range of the logits", out->tokens,
                 error);
    out->tokens++;
}

int qt_verify_model(struct qt_model_check *out, const struct qt_container *c, struct qt_gpu *gpu,
                    struct qt_backend *cpu, const struct qt_log *log, struct qt_err *err)
{
    struct qt_weights w = qt_weights_of_container(c);
    struct qt_runtime_options opt = {.sequences = 1, .prompt = PROMPT, .log = log};
    struct qt_model *model = NULL;
    struct qt_decoder *decoder = NULL;
    struct qt_runtime *rt = NULL;
    float *want = NULL, *got = NULL;
    uint32_t ids[PROMPT], next, chosen;
    int rc;
    *out = (struct qt_model_check){.tokens = 0};
    if (w.fake_quant.input)
        QT_TRY(
            qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                    "w4ax: a value that FP16 rounds to another 4-bit code changes logits by more "
                    "than the limit; eval --runtime fused measures the divergence"));
    QT_TRY(qt_model_open(&model, &w, err));
    const struct qt_model_info *info = qt_model_info(model);
    opt.capacity = qt_min_size(PROMPT + CHECKED, info->max_positions);
    opt.prompt = qt_min_size(PROMPT, opt.capacity);
    for (size_t i = 0; i < PROMPT; i++) {
        uint64_t state = i;
        ids[i] = (uint32_t)(qt_splitmix64(&state) % info->vocab);
    }
    QT_TRY(qt_array_new(&want, info->vocab, sizeof *want, err));
    QT_TRY(qt_array_new(&got, info->vocab, sizeof *got, err));
    QT_TRY(qt_runtime_open(&rt, gpu, model, &w, c, &opt, err));
    QT_TRY(qt_decoder_open(&decoder, model, &w, cpu, 1, opt.capacity, log, err));
    QT_TRY(qt_runtime_prompt(rt, ids, opt.prompt, NULL, err));
    QT_TRY(qt_decoder_run(decoder, want, ids, opt.prompt, err));
    for (size_t at = opt.prompt;; at++) {
        QT_TRY(qt_runtime_read(rt, &chosen, got, err));
        compare(out, &next, want, got, info->vocab);
        qt_log_progress(log, "model", (double)out->tokens, CHECKED);
        if (at == opt.capacity)
            break;
        QT_TRY(qt_runtime_put(rt, &next, err));
        QT_TRY(qt_runtime_step(rt, err));
        QT_TRY(qt_decoder_run(decoder, want, &next, 1, err));
    }
done:
    qt_runtime_close(rt);
    qt_decoder_close(decoder);
    qt_model_close(model);
    qt_free(want);
    qt_free(got);
    return rc;
}
