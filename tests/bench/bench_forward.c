/*
 * Speed of the CPU forward pass, as a share of what one large sgemm reaches on the same threads in
 * the same run: a decoder block of the TinyLlama-1.1B shape, and the whole of tiny-llama
 * (QT_SHARED) with embedding, head and score. FLOPs are the useful ones: linear layers and the
 * causal half of attention.
 */
#include "calib/calib.h"
#include "kernels/kernels.h"
#include "tests/bench/bench.h"

#include <cblas.h>

/* Many short rounds, the best of which counts: on a shared machine some are undisturbed. */
enum { SEQLEN = 512, WINDOWS = 8, ROUNDS = 10 };

/* FLOP/s of OpenBLAS itself on n x n x n with all threads: the yardstick. */
static double sgemm_rate(int n)
{
    size_t count = (size_t)n * (size_t)n;
    float *a = bench_random(count, 1), *b = bench_random(count, 1), *c = bench_random(count, 1);
    double best = INFINITY;
    openblas_set_num_threads(qt_threads());
    for (int i = 0; i < ROUNDS; i++) {
        double t = bench_wall_seconds();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, n, n, 1, a, n, b, n, 0, c, n);
        best = fmin(best, bench_wall_seconds() - t);
    }
    openblas_set_num_threads(1);
    qt_free(a);
    qt_free(b);
    qt_free(c);
    return 2.0 * n * n * n / best;
}

/* Useful FLOPs of one block over m tokens. */
static double block_flops(const struct qt_model *model, size_t m)
{
    const struct qt_model_info *info = qt_model_info(model);
    const struct qt_linear *l;
    size_t n = qt_model_linears(&l, model, 0);
    double flops = 2.0 * (double)m * (double)(info->heads * info->head_dim) * (SEQLEN + 1);
    for (size_t i = 0; i < n; i++)
        flops += 2.0 * (double)m * (double)l[i].n * (double)l[i].k;
    return flops;
}

static void report(const char *what, double flops, double seconds, double yardstick)
{
    printf("%-44s %7.1f GFLOP/s  %5.1f %% of sgemm\n", what, flops / seconds * 1e-9,
           100 * flops / seconds / yardstick);
    fflush(stdout);
}

/* ---- one block of random weights ------------------------------------------------------------ */

#define LAYER "model.layers.0."
static const struct {
    const char *name;
    size_t n, k;
} tensors[] = {
    {"model.embed_tokens.weight", 16, 2048},
    {"model.norm.weight", 2048, 0},
    {LAYER "input_layernorm.weight", 2048, 0},
    {LAYER "self_attn.q_proj.weight", 2048, 2048},
    {LAYER "self_attn.k_proj.weight", 256, 2048},
    {LAYER "self_attn.v_proj.weight", 256, 2048},
    {LAYER "self_attn.o_proj.weight", 2048, 2048},
    {LAYER "post_attention_layernorm.weight", 2048, 0},
    {LAYER "mlp.gate_proj.weight", 5632, 2048},
    {LAYER "mlp.up_proj.weight", 5632, 2048},
    {LAYER "mlp.down_proj.weight", 2048, 5632},
};
enum { TENSORS = sizeof tensors / sizeof *tensors };

static const char config[] =
    "{\"model_type\": \"llama\", \"hidden_size\": 2048, \"intermediate_size\": 5632,"
    " \"num_hidden_layers\": 1, \"num_attention_heads\": 32, \"num_key_value_heads\": 4,"
    " \"vocab_size\": 16, \"max_position_embeddings\": 2048, \"tie_word_embeddings\": true}";

static size_t find(const char *name)
{
    size_t i = 0;
    while (i < TENSORS && strcmp(tensors[i].name, name) != 0)
        i++;
    return i;
}

static bool random_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    size_t i = find(name);
    (void)ctx;
    if (i == TENSORS)
        return false;
    shape[0] = tensors[i].n;
    shape[1] = tensors[i].k;
    *ndim = tensors[i].k ? 2 : 1;
    return true;
}

static int random_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    size_t i = find(name), n = tensors[i].n * (tensors[i].k ? tensors[i].k : 1);
    float *x = bench_random(n, 0.03f);
    (void)ctx;
    (void)err;
    memcpy(dst, x, n * sizeof *x);
    qt_free(x);
    return QT_OK;
}

static void bench_block(struct qt_backend *be, double yardstick)
{
    enum { M = 4 * SEQLEN };
    char dir[] = "/tmp/bench_forward_XXXXXX", path[64];
    struct qt_weights w = {.dir = dir, .shape = random_shape, .load = random_load};
    struct qt_model *model;
    struct qt_layer *block;
    struct qt_err err;
    float *hidden = bench_random((size_t)M * 2048, 1);
    double best = INFINITY;
    if (!mkdtemp(dir))
        exit(1);
    snprintf(path, sizeof path, "%s/config.json", dir);
    bench_must(qt_file_write(path, config, sizeof config - 1, &err), &err);
    bench_must(qt_model_open(&model, &w, &err), &err);
    bench_must(qt_dir_remove(dir, &err), &err);
    bench_must(qt_layer_open(&block, model, 0, &w, be, &err), &err);
    for (int i = 0; i < ROUNDS; i++) {
        double t = bench_wall_seconds();
        bench_must(qt_layer_run(block, hidden, M, SEQLEN, NULL, &err), &err);
        best = fmin(best, bench_wall_seconds() - t);
    }
    report("block 2048/5632, 4 x 512 tokens", block_flops(model, M), best, yardstick);
    qt_layer_close(block);
    qt_model_close(model);
    qt_free(hidden);
}

/* ---- tiny-llama ----------------------------------------------------------------------------- */

struct eval {
    struct qt_model *model;
    struct qt_weights weights;
    struct qt_backend *be;
    uint32_t *ids;
    size_t m;
    float *hidden, *logits;
    struct qt_score scores[SEQLEN];
    double nll;
};

/* Opening the blocks included, as `qtool eval` does it; kld: score against itself as reference. */
static void run_eval(struct eval *e, bool kld)
{
    const struct qt_model_info *info = qt_model_info(e->model);
    struct qt_err err;
    struct qt_embed_head *ends;
    struct qt_layer *block;
    bench_must(qt_embed_head_open(&ends, e->model, &e->weights, e->be, &err), &err);
    bench_must(qt_embed_tokens(ends, e->hidden, e->ids, e->m, SEQLEN, &err), &err);
    for (size_t i = 0; i < info->layers; i++) {
        bench_must(qt_layer_open(&block, e->model, i, &e->weights, e->be, &err), &err);
        bench_must(qt_layer_run(block, e->hidden, e->m, SEQLEN, NULL, &err), &err);
        qt_layer_close(block);
    }
    e->nll = 0;
    for (size_t at = 0; at < e->m; at += SEQLEN) {
        bench_must(qt_head_logits(ends, e->logits, e->hidden + at * info->hidden, SEQLEN, &err),
                   &err);
        bench_must(e->be->score(e->be, e->scores, e->logits, kld ? e->logits : NULL,
                                e->ids + at + 1, info->logit_softcap, SEQLEN - 1, info->vocab,
                                &err),
                   &err);
        for (size_t i = 0; i < SEQLEN - 1; i++)
            e->nll += e->scores[i].nll;
    }
    qt_embed_head_close(ends);
}

static void time_eval(struct eval *e, bool kld, double yardstick)
{
    const struct qt_model_info *info = qt_model_info(e->model);
    double best = INFINITY, flops = block_flops(e->model, e->m) * (double)info->layers +
                                    2.0 * (double)e->m * (double)(info->vocab * info->hidden);
    for (int i = 0; i < ROUNDS; i++) {
        double t = bench_wall_seconds();
        run_eval(e, kld);
        best = fmin(best, bench_wall_seconds() - t);
    }
    report(kld ? "tiny-llama, 8 x 512 tokens, score with KL" : "tiny-llama, 8 x 512 tokens, score",
           flops, best, yardstick);
}

static void bench_tiny(struct qt_backend *be, double yardstick)
{
    const char *shared = getenv("QT_SHARED") ? getenv("QT_SHARED") : "../shared";
    char dir[512], path[600];
    struct eval e = {.be = be, .m = WINDOWS * SEQLEN};
    struct qt_ckpt *ckpt;
    struct qt_err err;
    size_t n;
    snprintf(dir, sizeof dir, "%s/checkpoints/tiny-llama", shared);
    if (!qt_path_is_dir(dir)) {
        printf("SKIP: %s is not there (QT_SHARED)\n", dir);
        return;
    }
    snprintf(path, sizeof path, "%s/innocents.u16", dir);
    bench_must(qt_ckpt_open(&ckpt, dir, &err), &err);
    e.weights = qt_weights_of_ckpt(ckpt);
    bench_must(qt_model_open(&e.model, &e.weights, &err), &err);
    bench_must(qt_token_ids_read(&e.ids, &n, path, qt_model_info(e.model)->vocab, &err), &err);
    e.hidden = bench_random(e.m * qt_model_info(e.model)->hidden, 1);
    e.logits = bench_random(SEQLEN * qt_model_info(e.model)->vocab, 1);
    time_eval(&e, false, yardstick);
    time_eval(&e, true, yardstick);
    printf("perplexity of these windows: %.4f\n", exp(e.nll / (WINDOWS * (SEQLEN - 1))));
    qt_free(e.hidden);
    qt_free(e.logits);
    qt_free(e.ids);
    qt_model_close(e.model);
    qt_ckpt_close(ckpt);
}

int main(void)
{
    struct qt_backend *be;
    struct qt_err err;
    bench_must(qt_backend_cpu_open(&be, &err), &err);
    double yardstick = sgemm_rate(3072);
    printf("%-44s %7.1f GFLOP/s  (%d threads)\n", "OpenBLAS sgemm 3072^3", yardstick * 1e-9,
           qt_threads());
    bench_block(be, yardstick);
    bench_tiny(be, yardstick);
    be->close(be);
    return 0;
}
