/* bench: times the fused GPU kernels. */
#include "cli/bench.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

enum { MAX_PROMPT = 1 << 20 };

/* Values of --compute. */
static const char *const computes[] = {"own", "8.0", "8.6", "8.9", NULL};
static const int compute_numbers[] = {0, 80, 86, 89};

/* ---- results -------------------------------------------------------------------------------- */

static const char *row_name(const struct bench_request *r, const struct qt_bench_row *row)
{
    return row->spec ? r->names[row->spec - r->specs] : "cublas-f16";
}

static double row_gbs(const struct qt_bench_row *row)
{
    return (double)row->bytes / row->us / 1e3;
}

static double row_tflops(const struct qt_bench_row *row)
{
    return 2e-6 * (double)row->shape->n * (double)row->shape->k * (double)row->m / row->us;
}

/* Writes the configuration of a w4ax kernel. */
static void text_w4ax(char buf[TEXT_SIZE], const struct qtool_w4ax_config *c)
{
    const struct qtool_tile_config *tile = &c->tile;
    const struct qtool_skinny_config *skinny = &c->skinny;
    if (c->kernel == QTOOL_W4AX_TILE)
        snprintf(buf, TEXT_SIZE, "tile t%d w%d s%d", 8 * tile->token_tiles, tile->warps,
                 (int)tile->schedule);
    else if (c->kernel == QTOOL_W4AX_SKINNY)
        snprintf(buf, TEXT_SIZE, "skinny t%d s%d w%d k%d c%d d%d", 8 * skinny->token_tiles,
                 skinny->strips, skinny->warps, skinny->warps_k, skinny->strips_cta, skinny->depth);
    else
        snprintf(buf, TEXT_SIZE, "stream t%d s%d w%d u%d", c->stream.tokens, c->stream.strips,
                 c->stream.warps, c->stream.cta_units);
}

/* Writes the configuration of a kernel of qtool_kernels.h. */
static void text_matmul(char buf[TEXT_SIZE], const struct qtool_matmul_config *c)
{
    static const char format[] = "%s t%d s%d w%d/%d c%d x%d";
    switch (c->path) {
    case QTOOL_MATMUL_TILE:
        snprintf(buf, TEXT_SIZE, "tile t%d w%d x%d", c->tile.token_tiles, c->tile.warps,
                 (int)c->tile.schedule);
        break;
    case QTOOL_MATMUL_MMA_TILE:
        snprintf(buf, TEXT_SIZE, "mma tile t%d c%d x%d", c->mma_tile.token_tiles,
                 c->mma_tile.strips_cta, c->mma_tile.splits);
        break;
    case QTOOL_MATMUL_DENSE:
        snprintf(buf, TEXT_SIZE, "dequantize + cublas");
        break;
    case QTOOL_MATMUL_SKINNY:
        snprintf(buf, TEXT_SIZE, format, "skinny", c->skinny.token_tiles, c->skinny.strips,
                 c->skinny.warps, c->skinny.warps_k, c->skinny.strips_cta, 1);
        break;
    case QTOOL_MATMUL_VECTOR:
        snprintf(buf, TEXT_SIZE, format, "vector", 1, c->vector.strips, c->vector.warps,
                 c->vector.warps_k, c->vector.strips_cta, 1);
        break;
    case QTOOL_MATMUL_STREAM:
        snprintf(buf, TEXT_SIZE, format, "stream", c->stream.token_tiles, c->stream.strips,
                 c->stream.warps, c->stream.warps_k, c->stream.strips_cta, c->stream.splits);
        break;
    case QTOOL_MATMUL_RING:
        snprintf(buf, TEXT_SIZE, format, "stream", c->ring.token_tiles, c->ring.strips,
                 c->ring.warps, c->ring.warps_k, c->ring.strips_cta, c->ring.cluster);
        break;
    }
}

static const char *row_config(char buf[TEXT_SIZE], const struct qt_bench_row *row)
{
    buf[0] = '\0';
    if (row->spec && !row->why[0] && row->w4ax.kernel != QTOOL_W4AX_ANY)
        text_w4ax(buf, &row->w4ax);
    else if (row->spec && !row->why[0])
        text_matmul(buf, &row->config);
    return buf;
}

/* Formats value; "" if it was not measured. */
static const char *number(char buf[TEXT_SIZE], const char *format, double value)
{
    buf[0] = '\0';
    if (isfinite(value))
        snprintf(buf, TEXT_SIZE, format, value);
    return buf;
}

static void add_table_row(struct table *t, const struct bench_request *r,
                          const struct qt_bench_row *row)
{
    char shape[TEXT_SIZE], floor[TEXT_SIZE], share[TEXT_SIZE], with[TEXT_SIZE], speed[TEXT_SIZE];
    char config[TEXT_SIZE];
    text_shape(shape, 2, (const size_t[]){row->shape->n, row->shape->k});
    if (row->why[0]) {
        table_row(t, "%s\t%s\t%zu\t\t\t\t\t\t\t\trefused: %s", shape, row_name(r, row), row->m,
                  row->why);
        return;
    }
    table_row(t, "%s\t%s\t%zu\t%.2f\t%.0f\t%s\t%s\t%s\t%.1f\t%s\t%s", shape, row_name(r, row),
              row->m, row->us, row_gbs(row), number(floor, "%.2f", row->floor_us),
              number(share, "%.1f", 100 * row->floor_us / row->us),
              number(with, "%.2f", row->total_us), row_tflops(row),
              number(speed, "%.2f", row->cublas_us / row->us), row_config(config, row));
}

static const char *cache_name(const struct qt_bench_cache_row *row)
{
    return row->format == QTOOL_KV_F16 ? "kv-f16" : row->paged ? "kv4 paged" : "kv4";
}

static double cache_gbs(const struct qt_bench_cache_row *row)
{
    return (double)row->bytes / row->us / 1e3;
}

static void add_cache_row(struct table *t, const struct qt_bench_cache_row *row)
{
    char shape[TEXT_SIZE], speed[TEXT_SIZE];
    text_shape(shape, 3,
               (const size_t[]){row->shape->heads, row->shape->kv_heads, row->shape->head_dim});
    if (row->why[0])
        table_row(t, "%s\t%s\t%zu\t%zu\t\t\t\t\t\trefused: %s", shape, cache_name(row), row->batch,
                  row->length, row->why);
    else
        table_row(t, "%s\t%s\t%zu\t%zu\t%.2f\t%.0f\t%.2f\t%.1f\t%s\tsplit %zu", shape,
                  cache_name(row), row->batch, row->length, row->us, cache_gbs(row), row->floor_us,
                  100 * row->floor_us / row->us, number(speed, "%.2f", row->f16_us / row->us),
                  row->split_tokens);
}

static int print_caches(const struct qt_bench_report *report, struct qt_err *err)
{
    struct table t = {.align = "llrrrrrrrl"};
    if (report->count)
        putchar('\n');
    table_row(&t, "SHAPE\tCACHE\tM\tLENGTH\tUS\tGB/S\tFLOOR\t%%FLOOR\tX FP16\tCONFIG");
    for (size_t i = 0; i < report->ncaches; i++)
        add_cache_row(&t, &report->caches[i]);
    return table_print(&t, err);
}

static int print_rows(const struct qt_bench_report *report, const struct bench_request *r,
                      struct qt_err *err)
{
    struct table t = {.align = "llrrrrrrrrl"};
    table_row(&t, "SHAPE\tSCHEME\tM\tUS\tGB/S\tFLOOR\t%%FLOOR\t+ACT US\tTFLOP/S\tX CUBLAS\tCONFIG");
    for (size_t i = 0; i < report->count; i++)
        add_table_row(&t, r, &report->rows[i]);
    return table_print(&t, err);
}

static int print_report(const struct qt_bench_report *report, const struct bench_request *r,
                        const struct bench_options *o, const struct qt_gpu *gpu, struct qt_err *err)
{
    int rc = QT_OK;
    printf("%s, %d SMs, %s, %s\n", gpu->name, gpu->sms, gpu->cuda, gpu->cublas);
    printf("copy %.0f GB/s (read + written), read %.0f GB/s\n", report->copy_gbs, report->read_gbs);
    printf("%s, %s launches%s; weights cold in L2, CUDA graphs, medians; floor: cold read of the "
           "same bytes, plain launches\n",
           o->dtype == QTOOL_BF16 ? "BF16" : "FP16", o->dependent ? "dependent" : "plain",
           o->invariant ? ", batch-invariant" : "");
    if (o->compute)
        printf("fused kernels chosen for compute capability %s\n", computes[o->compute]);
    putchar('\n');
    if (report->count)
        QT_TRY(print_rows(report, r, err));
    if (report->ncaches)
        QT_TRY(print_caches(report, err));
    if (report->nmoe)
        QT_TRY(bench_moe_print(report, r, err));
done:
    return rc;
}

static json_t *row_doc(struct cli *cli, const struct bench_request *r,
                       const struct qt_bench_row *row)
{
    json_t *o = json_object();
    char config[TEXT_SIZE];
    doc_set(cli, o, "scheme", doc_text(row_name(r, row)));
    doc_set(cli, o, "shape_name", doc_text(row->shape->name));
    doc_set(cli, o, "n", doc_size(row->shape->n));
    doc_set(cli, o, "k", doc_size(row->shape->k));
    doc_set(cli, o, "m", doc_size(row->m));
    doc_set(cli, o, "refused", doc_text(row->why[0] ? row->why : NULL));
    doc_set(cli, o, "bytes", doc_size(row->bytes));
    doc_set(cli, o, "us", doc_real(row->us));
    doc_set(cli, o, "gb_per_s", doc_real(row_gbs(row)));
    doc_set(cli, o, "floor_us", doc_real(row->floor_us));
    doc_set(cli, o, "floor_share", doc_real(row->floor_us / row->us));
    doc_set(cli, o, "with_activations_us", doc_real(row->total_us));
    doc_set(cli, o, "tflop_per_s", doc_real(row_tflops(row)));
    doc_set(cli, o, "cublas_speedup", doc_real(row->cublas_us / row->us));
    doc_set(cli, o, "config", doc_text(row_config(config, row)));
    return o;
}

static json_t *cache_doc(struct cli *cli, const struct qt_bench_cache_row *row)
{
    json_t *o = json_object();
    doc_set(cli, o, "format", doc_text(row->format == QTOOL_KV_F16 ? "FP16" : "INT4"));
    doc_set(cli, o, "paged", json_boolean(row->paged));
    doc_set(cli, o, "shape_name", doc_text(row->shape->name));
    doc_set(cli, o, "heads", doc_size(row->shape->heads));
    doc_set(cli, o, "kv_heads", doc_size(row->shape->kv_heads));
    doc_set(cli, o, "head_dim", doc_size(row->shape->head_dim));
    doc_set(cli, o, "m", doc_size(row->batch));
    doc_set(cli, o, "length", doc_size(row->length));
    doc_set(cli, o, "refused", doc_text(row->why[0] ? row->why : NULL));
    doc_set(cli, o, "bytes", doc_size(row->bytes));
    doc_set(cli, o, "us", doc_real(row->us));
    doc_set(cli, o, "gb_per_s", doc_real(cache_gbs(row)));
    doc_set(cli, o, "floor_us", doc_real(row->floor_us));
    doc_set(cli, o, "floor_share", doc_real(row->floor_us / row->us));
    doc_set(cli, o, "f16_speedup", doc_real(row->f16_us / row->us));
    doc_set(cli, o, "split_tokens", doc_size(row->split_tokens));
    return o;
}

static void fill_doc(struct cli *cli, const struct qt_bench_report *report,
                     const struct bench_request *r, const struct bench_options *o,
                     const struct qt_gpu *gpu)
{
    json_t *rows = json_array(), *caches = json_array();
    for (size_t i = 0; i < report->count; i++)
        doc_append(cli, rows, row_doc(cli, r, &report->rows[i]));
    for (size_t i = 0; i < report->ncaches; i++)
        doc_append(cli, caches, cache_doc(cli, &report->caches[i]));
    doc_set(cli, cli->doc, "gpu", doc_gpu(cli, gpu));
    doc_set(cli, cli->doc, "dtype", doc_text(o->dtype == QTOOL_BF16 ? "BF16" : "FP16"));
    doc_set(cli, cli->doc, "dependent_launches", json_boolean(o->dependent));
    doc_set(cli, cli->doc, "batch_invariant", json_boolean(o->invariant));
    doc_set(cli, cli->doc, "compute", doc_text(computes[o->compute]));
    doc_set(cli, cli->doc, "copy_gb_per_s", doc_real(report->copy_gbs));
    doc_set(cli, cli->doc, "read_gb_per_s", doc_real(report->read_gbs));
    doc_set(cli, cli->doc, "rows", rows);
    doc_set(cli, cli->doc, "caches", caches);
    doc_set(cli, cli->doc, "moe", bench_moe_doc(cli, report, r));
}

/* ---- the command ---------------------------------------------------------------------------- */

static int measure(struct cli *cli, const struct bench_request *r, const struct bench_options *o,
                   struct qt_gpu *gpu, struct qt_err *err)
{
    const struct qt_bench_options opt = {
        .specs = r->specs,
        .shapes = r->shapes,
        .caches = r->caches,
        .moe = r->moe,
        .m = r->m,
        .lengths = r->lengths,
        .nspecs = r->nspecs,
        .nshapes = r->nshapes,
        .ncaches = r->ncaches,
        .nmoe = r->nmoe,
        .nm = r->nm,
        .nlengths = r->nlengths,
        .matmul = {.dtype = (enum qtool_dtype)o->dtype,
                   .device = gpu->device,
                   .dependent_launch = o->dependent,
                   .batch_invariant = o->invariant,
                   .compute = compute_numbers[o->compute]},
        .log = &cli->log,
    };
    struct qt_bench_report report = {0};
    int rc;
    QT_TRY(qt_bench(&report, gpu, &opt, err));
    ui_clear(&cli->ui);
    if (cli->doc)
        fill_doc(cli, &report, r, o, gpu);
    else
        QT_TRY(print_report(&report, r, o, gpu, err));
done:
    qt_bench_free(&report);
    return rc;
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct bench_options *o = options;
    struct bench_request request = {0};
    struct qt_gpu *gpu = NULL;
    int rc;
    (void)args;
    QT_TRY(bench_request_parse(&request, o, err));
    if (device_number(o->common.device) < 0)
        QT_TRY(qt_fail(err, QT_E_USAGE, NULL, NULL, "bench needs a GPU: use --device cuda[:N]"));
    if (o->whole.path)
        QT_TRY(bench_model(cli, o, &request, err));
    else {
        QT_TRY(qt_gpu_open(&gpu, device_number(o->common.device), err));
        QT_TRY(measure(cli, &request, o, gpu, err));
    }
done:
    if (gpu)
        gpu->close(gpu);
    bench_request_free(&request);
    return rc;
}

static const struct bench_options defaults = {
    .common = {.device = "cuda"},
    .m = bench_default_m,
    .whole = {.batch = "1,4,16,64", .prompt = 512, .tokens = 128}};

static const char *const dtypes[] = {"f16", "bf16", NULL};

static const struct opt opts[] = {
    {.name = "scheme",
     .kind = OPT_LIST,
     .offset = offsetof(struct bench_options, scheme),
     .metavar = "S",
     .help = "scheme, for example nf4:g=64 or w4ax:scales=int, or kv4 for attention over a 4-bit "
             "KV cache (default int4, nf4, nf3, nf2, fp6, fp5)"},
    {.name = "shape",
     .kind = OPT_LIST,
     .offset = offsetof(struct bench_options, shape),
     .metavar = "SHAPE",
     .help = "NxK (output x input features); llama3-8b or llama3-70b (all their linears); one of "
             "their linears: llama3-8b:qkv, :o, :gate+up or :down; for kv4 HEADSxKV_HEADSxDIM or "
             "llama3-8b:attention (default llama3-8b:o, llama3-70b:o and llama3-70b:gate+up; for "
             "kv4 llama3-8b:attention)"},
    {.name = "moe",
     .kind = OPT_LIST,
     .offset = offsetof(struct bench_options, moe),
     .metavar = "LAYER",
     .help = "a layer of experts instead of single products: EXPERTS,TOPK,HIDDEN,INTERMEDIATE, or "
             "qwen3-30b, mixtral, deepseek-v3, glm-4.5-air"},
    {.name = "m",
     .kind = OPT_STRING,
     .offset = offsetof(struct bench_options, m),
     .metavar = "LIST",
     .help = "numbers of tokens, separated by commas (default 1,16,64,256); for kv4 numbers of "
             "sequences with one new token each"},
    {.name = "length",
     .kind = OPT_STRING,
     .offset = offsetof(struct bench_options, length),
     .metavar = "LIST",
     .help = "kv4: cached tokens of a sequence, separated by commas (default 2048,8192,32768)"},
    {.name = "dtype",
     .kind = OPT_CHOICE,
     .offset = offsetof(struct bench_options, dtype),
     .choices = dtypes,
     .metavar = "TYPE",
     .help = "type of activations and outputs: f16 (the default) or bf16"},
    {.name = "dependent",
     .kind = OPT_FLAG,
     .offset = offsetof(struct bench_options, dependent),
     .help = "programmatic dependent launches: a kernel starts to load weights, or the cache, "
             "while the previous kernel ends"},
    {.name = "invariant",
     .kind = OPT_FLAG,
     .offset = offsetof(struct bench_options, invariant),
     .help = "batch-invariant products: a token's result does not depend on other tokens"},
    {.name = "compute",
     .kind = OPT_CHOICE,
     .offset = offsetof(struct bench_options, compute),
     .choices = computes,
     .metavar = "CC",
     .help =
         "8.0, 8.6 or 8.9: run the kernels for that compute capability, with its shared memory "
         "size, on a newer GPU (the driver compiles them first). own (the default): the kernels "
         "for this GPU. Not for mix24, w4ax and kv4"},
    {.name = "model",
     .kind = OPT_STRING,
     .offset = offsetof(struct bench_options, whole.path),
     .metavar = "PATH",
     .help =
         "measure a whole model: a checkpoint or container, or a shape with random weights: 8b and "
         "70b of Llama 3, qwen3-30b (experts)"},
    {.name = "batch",
     .kind = OPT_STRING,
     .offset = offsetof(struct bench_options, whole.batch),
     .metavar = "LIST",
     .help = "--model: numbers of sequences (default 1,4,16,64)"},
    {.name = "head",
     .kind = OPT_STRING,
     .offset = offsetof(struct bench_options, whole.head),
     .metavar = "SCHEME",
     .help = "--model with random weights: scheme of the head, except in FP16 rows (default: "
             "FP16)"},
    {.name = "prompt",
     .kind = OPT_SIZE,
     .offset = offsetof(struct bench_options, whole.prompt),
     .metavar = "N",
     .min = 1,
     .max = MAX_PROMPT,
     .help = "--model: tokens of each prompt (default 512)"},
    {.name = "tokens",
     .kind = OPT_SIZE,
     .offset = offsetof(struct bench_options, whole.tokens),
     .metavar = "N",
     .min = 1,
     .max = MAX_PROMPT,
     .help = "--model: tokens to generate in each sequence (default 128)"},
    {.name = "kv",
     .kind = OPT_SIZE,
     .offset = offsetof(struct bench_options, whole.kv),
     .metavar = "4",
     .min = 4,
     .max = 4,
     .help = "--model: 4-bit KV cache, except in FP16 rows"},
    {.name = "price",
     .kind = OPT_REAL,
     .offset = offsetof(struct bench_options, whole.price),
     .metavar = "D",
     .max = 1e6,
     .help = "--model: dollars per hour of the GPU, for the cost of a million tokens"},
    {0},
};

static const struct opt_positional positionals[] = {{0}};

const struct command cmd_bench = {
    .name = "bench",
    .summary = "measure the speed of the fused GPU kernels",
    .description =
        "Times the fused matrix products on random weights, packed by the scheme's own quantizer. "
        "Each launch uses another copy of the weights; together the copies are 5 times as large as "
        "the L2 cache, so that weights are read from memory. The launches are captured in a CUDA "
        "graph. Times are medians.\n\n"
        "The same run measures the read floor (a cold read of exactly the packed bytes), cuBLAS "
        "in FP16 if it is installed (it is loaded at run time), and the copy and read bandwidth "
        "of the GPU. US: microseconds. GB/S: packed bytes / time. FLOOR: read floor in "
        "microseconds. %FLOOR: floor / time. X CUBLAS: speed-up over cuBLAS, where kernel and "
        "cuBLAS are timed alternately; the rows of cublas-f16 are cuBLAS timed alone.\n\n"
        "w4ax: US is the time of the product alone (activations already quantized); +ACT US is "
        "the time of activation quantization plus product. One channel block (128 channels) in "
        "five has 8-bit activations.\n\n"
        "kv4: attention of one query token per sequence over an FP16 cache, a 4-bit cache (keys "
        "quantized per channel and 64 tokens), and a paged 4-bit cache (pages of 64 tokens, in "
        "random order). X FP16: speed-up over the FP16 cache.\n\n"
        "--moe: a layer of gated experts, from the sort of the tokens to the weighted sum. Every "
        "token chooses different experts at random. READ: experts that are read, MB: their packed "
        "bytes, whose cold read is the FLOOR. X CUBLAS: speed-up over the products of the same "
        "routing by cuBLAS, the faster of one product per expert (loop) and products padded to the "
        "largest number of tokens (batch), without sort, activation and sum.\n\n"
        "--model runs a whole decoder on the fused kernels, first in FP16 (cuBLAS), then as the "
        "container or with each --scheme: prompts of --prompt random tokens, then --tokens decode "
        "steps by a CUDA graph. Prompts of up to 8192 tokens run together; further sequences get "
        "copies of their caches. PREFILL and DECODE: tokens per second of all sequences that run "
        "together. MS: milliseconds of a decode step. W and J/TOKEN: of the board while decoding. "
        "$/M: of a million generated tokens. The shares of a step come from timing the kernels of "
        "each kind without the others; SUM MS is the sum of these times. HEADS: bias, norm, rotary "
        "embedding, and the append to the cache.",
    .examples = "  qtool bench\n"
                "  qtool bench --scheme nf4:g=64 --scheme fp6 --shape llama3-8b --m 1,8 --json\n"
                "  qtool bench --scheme w4ax --scheme w4ax:scales=row --m 1,128,1024\n"
                "  qtool bench --moe qwen3-30b --scheme int4 --m 1,16,256\n"
                "  qtool bench --scheme kv4 --shape 32x8x128 --m 1,8 --length 8192\n"
                "  qtool bench --model 8b --scheme int4 --scheme nf4 --batch 1,16 --price 4\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .gpu = true,
    .run = run,
};
