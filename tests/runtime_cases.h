/* The fused runtime against struct qt_decoder on the CPU, for a simulated and a real GPU. */
#ifndef QT_TESTS_RUNTIME_CASES_H
#define QT_TESTS_RUNTIME_CASES_H

#include "kernels/kernels.h"
#include "verify/verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* A model, run by both. */
struct runtime_case {
    struct qt_gpu *gpu;
    struct qt_backend *cpu;
    const char *path;     /* a checkpoint or a container */
    size_t prompt, steps; /* tokens */
    bool eager, kv4, plain;
    double error;         /* result: largest difference of logits, relative to their range */
    size_t agree, tokens; /* result: number of equal choices, and of choices */
    uint32_t crc;         /* result: CRC-32 of all logits of the runtime */
};

struct runtime_source {
    struct qt_ckpt *ckpt;
    struct qt_container *container;
    struct qt_weights weights;
    struct qt_model *model;
};

static inline int runtime_source_open(struct runtime_source *s, const char *path,
                                      struct qt_err *err)
{
    int rc;
    *s = (struct runtime_source){0};
    if (qt_container_probe(path)) {
        QT_TRY(qt_container_open(&s->container, path, err));
        s->weights = qt_weights_of_container(s->container);
    } else {
        QT_TRY(qt_ckpt_open(&s->ckpt, path, err));
        s->weights = qt_weights_of_ckpt(s->ckpt);
    }
    QT_TRY(qt_model_open(&s->model, &s->weights, err));
done:
    return rc;
}

static inline void runtime_source_close(struct runtime_source *s)
{
    qt_model_close(s->model);
    qt_container_close(s->container);
    qt_ckpt_close(s->ckpt);
}

/* data: NULL, or calibration data. */
static inline int runtime_quantize(const char *out, const char *from, const char *scheme,
                                   const struct qt_rule *rules, size_t n,
                                   const struct qt_calibration *data, struct qt_err *err)
{
    const struct qt_quantize_options opt = {
        .plan = {.scheme = scheme, .rules = rules, .nrules = n, .calibrated = data != NULL},
        .calibration = data,
        .out_dir = out};
    struct qt_quantize_report report;
    struct qt_ckpt *ckpt;
    int rc;
    QT_TRY(qt_ckpt_open(&ckpt, from, err));
    rc = qt_quantize(&report, ckpt, &opt, err);
    if (rc == QT_OK)
        json_decref(report.document);
    qt_ckpt_close(ckpt);
done:
    return rc;
}

/* Mixtures of tests/golden/models by families with different routers, with and without a shared
 * expert and biases of experts. Only their containers run. A token whose scores are close may go to
 * another expert than on the CPU, which does not happen with the tokens of these tests. */
static const struct {
    const char *model, *scheme;
} runtime_mixtures[] = {{"mixtral", "nf4:g=32"},   {"qwen2_moe", "nf4:g=32"},
                        {"qwen3_moe", "nf3:g=32"}, {"olmoe", "lut4:g=32"},
                        {"glm4_moe", "int4:g=32"}, {"gpt_oss_moe", "nf4:g=32"}};
enum { RUNTIME_MIXTURES = sizeof runtime_mixtures / sizeof *runtime_mixtures };

enum { RUNTIME_SEQUENCES = 3 };

/* Compares logits[n]; the greedy choices differ only where the reference's are close. */
static inline void runtime_compare(struct runtime_case *c, const float *want, const float *got,
                                   size_t n)
{
    float low = INFINITY, high = -INFINITY, worst = 0;
    size_t a = 0, b = 0;
    for (size_t i = 0; i < n; i++) {
        low = fminf(low, want[i]);
        high = fmaxf(high, want[i]);
        const float d = fabsf(want[i] - got[i]);
        worst = d > worst || isnan(d) ? d : worst;
        a = want[i] > want[a] ? i : a;
        b = got[i] > got[b] ? i : b;
    }
    const double error = (double)worst / (double)(high - low);
    c->error = error > c->error || isnan(error) ? error : c->error;
    c->agree += a == b;
    c->tokens++;
}

/* Runs both on the same tokens: those that the reference chooses. The sequences have different
 * prompts. */
static inline int runtime_run(struct runtime_case *c, struct qt_err *err)
{
    const size_t n = RUNTIME_SEQUENCES, capacity = c->prompt + c->steps;
    const struct qt_runtime_options opt = {.sequences = n,
                                           .capacity = capacity,
                                           .prompt = c->prompt,
                                           .kv4 = c->kv4,
                                           .eager = c->eager,
                                           .plain = c->plain};
    struct runtime_source s;
    struct qt_decoder *decoder = NULL;
    struct qt_runtime *rt = NULL;
    uint32_t *ids = NULL, next[RUNTIME_SEQUENCES], chosen[RUNTIME_SEQUENCES];
    float *want = NULL, *got = NULL;
    struct qt_err full = {0};
    int rc;
    c->error = 0;
    c->agree = c->tokens = 0;
    c->crc = 0;
    QT_TRY(runtime_source_open(&s, c->path, err));
    const size_t vocab = qt_model_info(s.model)->vocab;
    QT_TRY(qt_array_new(&ids, n * c->prompt, sizeof *ids, err));
    QT_TRY(qt_array_new(&want, n * vocab, sizeof *want, err));
    QT_TRY(qt_array_new(&got, n * vocab, sizeof *got, err));
    for (size_t i = 0; i < n * c->prompt; i++)
        ids[i] = (uint32_t)(i * 7919 % 1013 * 31 % vocab);
    QT_TRY(qt_runtime_open(&rt, c->gpu, s.model, &s.weights, s.container, &opt, err));
    QT_TRY(qt_decoder_open(&decoder, s.model, &s.weights, c->cpu, n, capacity, NULL, err));
    QT_TRY(qt_decoder_run(decoder, want, ids, c->prompt, err));
    QT_TRY(qt_runtime_prompt(rt, ids, c->prompt, NULL, err));
    for (size_t step = 0;; step++) {
        QT_TRY(qt_runtime_read(rt, chosen, got, err));
        for (size_t i = 0; i < n; i++) {
            const float *l = want + i * vocab;
            next[i] = 0;
            for (size_t j = 1; j < vocab; j++)
                next[i] = l[j] > l[next[i]] ? (uint32_t)j : next[i];
            runtime_compare(c, l, got + i * vocab, vocab);
        }
        c->crc = qt_crc32(c->crc, got, n * vocab * sizeof *got);
        if (step == c->steps)
            break;
        QT_TRY(qt_runtime_put(rt, next, err));
        QT_TRY(qt_runtime_step(rt, err));
        QT_TRY(qt_decoder_run(decoder, want, next, 1, err));
    }
    if (qt_runtime_step(rt, &full) != QT_E_USAGE)
        rc = qt_fail(err, QT_E_INTERNAL, NULL, NULL, "a full cache took another token");
done:
    qt_runtime_close(rt);
    qt_decoder_close(decoder);
    runtime_source_close(&s);
    qt_free(ids);
    qt_free(want);
    qt_free(got);
    return rc;
}

/* *crc = that of all logits of the first of `sequences` sequences with batch_invariant. */
static inline int runtime_first(uint32_t *crc, const struct runtime_case *c, size_t sequences,
                                struct qt_err *err)
{
    const size_t capacity = c->prompt + c->steps;
    const struct qt_runtime_options opt = {.sequences = sequences,
                                           .capacity = capacity,
                                           .prompt = c->prompt,
                                           .kv4 = c->kv4,
                                           .batch_invariant = true};
    struct runtime_source s;
    struct qt_runtime *rt = NULL;
    uint32_t *ids = NULL, *next = NULL;
    float *got = NULL;
    int rc;
    *crc = 0;
    QT_TRY(runtime_source_open(&s, c->path, err));
    const size_t vocab = qt_model_info(s.model)->vocab;
    QT_TRY(qt_array_new(&ids, sequences * c->prompt, sizeof *ids, err));
    QT_TRY(qt_array_new(&next, sequences, sizeof *next, err));
    QT_TRY(qt_array_new(&got, sequences * vocab, sizeof *got, err));
    for (size_t i = 0; i < sequences * c->prompt; i++)
        ids[i] = (uint32_t)(i * 7919 % 1013 * 31 % vocab);
    QT_TRY(qt_runtime_open(&rt, c->gpu, s.model, &s.weights, s.container, &opt, err));
    QT_TRY(qt_runtime_prompt(rt, ids, c->prompt, NULL, err));
    for (size_t step = 0;; step++) {
        QT_TRY(qt_runtime_read(rt, next, got, err));
        *crc = qt_crc32(*crc, got, vocab * sizeof *got);
        if (step == c->steps)
            break;
        QT_TRY(qt_runtime_step(rt, err));
    }
done:
    qt_runtime_close(rt);
    runtime_source_close(&s);
    qt_free(ids);
    qt_free(next);
    qt_free(got);
    return rc;
}

#endif
