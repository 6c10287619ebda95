/* Host side of attention over the KV cache: argument checks, the choice of kernel and splits,
 * launch. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/kv4/attention.cuh"
#include "kernels/cuda/kv4/plan.h"
#include "kernels/cuda/kv4/view.h"

#include <limits.h>
#include <stdio.h>

/* Upper bound of the kernels' static shared memory. */
enum { STATIC_BYTES = 256 };

struct kv_instance {
    enum qtool_kv_format format;
    size_t dim, heads; /* head_dim; query heads per thread block */
    int warps, stages, stage_bytes;
    int other_bytes; /* of shared memory, besides the stages */
    void (*kernel)(kv_args);
};

#define INSTANCE(format, F, hq, depth)                                                             \
    {                                                                                              \
        format, F::DIM, 4 * hq, F::warps(hq), depth, kv_stage<F>::BYTES,                           \
            F::FIRST + (F::GRID ? kv_queries<F, hq>::BYTES : 0), kv_attention_kernel<F, hq, depth> \
    }
#define INT4(dim, depth)                                                                           \
    INSTANCE(QTOOL_KV_INT4, kv_int4<dim>, 1, depth),                                               \
        INSTANCE(QTOOL_KV_INT4, kv_int4<dim>, 2, depth),                                           \
        INSTANCE(QTOOL_KV_INT4, kv_int4<dim>, 4, depth)
#define F16(dim, depth)                                                                            \
    INSTANCE(QTOOL_KV_F16, kv_f16<dim>, 2, depth), INSTANCE(QTOOL_KV_F16, kv_f16<dim>, 4, depth)

static const kv_instance instances[] = {INT4(64, 3),  INT4(64, 4),
                                        INT4(128, 2), INSTANCE(QTOOL_KV_INT4, kv_int4<128>, 4, 3),
                                        F16(64, 3),   F16(128, 3)};
#undef F16
#undef INT4
#undef INSTANCE

/* Dynamic shared memory of a kernel: the pipelines, or the partial results that replace them. */
static size_t smem_bytes(const kv_instance *in)
{
    size_t pipelines = (size_t)in->warps * in->stages * in->stage_bytes + in->other_bytes;
    size_t partial = (size_t)in->warps * in->heads * (in->dim + 4) * 4;
    return pipelines > partial ? pipelines : partial;
}

/* Returns true if `a` suits a group of query heads better than `b`. Best is the smallest tile that
 * holds the whole group, else the largest tile; then the deepest pipeline (deep) or the
 * shallowest. */
static bool better(const kv_instance *a, const kv_instance *b, size_t group, bool deep)
{
    if (a->heads != b->heads)
        return b->heads < group ? a->heads > b->heads : a->heads >= group && a->heads < b->heads;
    return deep ? a->stages > b->stages : a->stages < b->stages;
}

/* Returns the best kernel, or NULL if none fits in shared memory. */
static const kv_instance *instance_of(const struct qtool_kv_cache *c, size_t group, bool deep,
                                      size_t smem_limit)
{
    const kv_instance *best = NULL;
    for (const kv_instance &i : instances)
        if (i.format == c->format && i.dim == c->head_dim &&
            smem_bytes(&i) + STATIC_BYTES <= smem_limit && (!best || better(&i, best, group, deep)))
            best = &i;
    return best;
}

static int refuse(struct qtool_kv_plan *p, int status, const char *reason)
{
    snprintf(p->reason, sizeof p->reason, "%s", reason);
    return status;
}

enum { MAX_TOKENS = 1 << 30 }; /* per sequence */

/* Returns why the options and the cache are not supported, or NULL if they are. */
static const char *fault_of(const struct qtool_kv_options *o, const struct qtool_kv_cache *c)
{
    const char *bad = qt_kv_cache_fault(c);
    if (bad)
        return bad;
    if (o->heads == 0 || o->heads % c->heads)
        return "the number of query heads must be a multiple of the number of KV heads";
    if ((unsigned)o->dtype > QTOOL_BF16)
        return "q and out must be FP16 or BF16";
    if (!(o->scale > 0 && o->scale < INFINITY))
        return "scale must be positive and finite";
    if (o->batch == 0 || o->batch > 65535 || o->max_length == 0 || o->max_length > MAX_TOKENS)
        return "batch must be 1 to 65535 and max_length 1 to 2^30";
    if (c->heads * c->page_tokens > INT_MAX ||
        (!c->table && c->heads * c->page_tokens > UINT_MAX / o->batch))
        return "the cache must have fewer than 2^32 rows";
    if (!c->table && o->max_length > c->page_tokens)
        return "max_length is larger than page_tokens of a cache without a page table";
    if (c->table && o->batch > 1 && (o->max_length - 1) / c->page_tokens >= c->table_pitch)
        return "max_length needs more pages than table_pitch";
    return NULL;
}

static int allow_smem(struct qtool_kv_plan *p, const kv_instance *in)
{
    return qt_allow_smem((const void *)in->kernel, smem_bytes(in), p->reason);
}

/* What choose_split knows of a device and a kernel. */
struct kv_site {
    size_t items;         /* sequences x KV heads x tiles of query heads */
    size_t sms, resident; /* resident: thread blocks per SM */
};

/* Up to this size, partial results are in the zeroed part of the workspace and are polled; larger
 * ones are behind it and use an arrival counter. */
enum { MAX_POLLED = QTOOL_WORKSPACE_ZEROED };

/* Returns the bytes of the partial results of all splits. */
static size_t partial_bytes(const struct qtool_kv_plan *p, const struct qtool_kv_cache *c,
                            size_t splits)
{
    const size_t row = (c->head_dim + 4) * sizeof(float);
    return splits > 1 ? p->options.batch * p->options.heads * splits * row : 0;
}

/*
 * Sets p->split_tokens to the split with the lowest predicted time on an H200. The model, in
 * microseconds and without terms that are the same for all splits: per 128 tokens, a thread block
 * takes alone_us, or share_us for each thread block of the busiest SM if bound by memory bandwidth;
 * resident thread blocks slow down each other's start and end; further waves start later; the
 * combine step takes time per split. The constants are fitted to sweeps over 1 to 64 sequences of
 * 1024 to 32768 tokens.
 */
static void choose_split(struct qtool_kv_plan *p, const struct qtool_kv_cache *c,
                         const kv_instance *in, const kv_site *s)
{
    const double row_bytes = (double)c->head_dim * (c->format == QTOOL_KV_INT4 ? 1.1875 : 4);
    const double alone_us = (.3 + row_bytes / 660) * (in->heads > 8 ? 1.7 : 1);
    const double share_us = 128 * row_bytes / 33e3;
    const size_t length = p->options.max_length;
    double best_us = INFINITY;
    for (size_t n = 1; n <= MAX_SPLITS; n++) {
        size_t tokens = ((length + n - 1) / n + SPLIT_UNIT - 1) / SPLIT_UNIT * SPLIT_UNIT;
        size_t splits = (length + tokens - 1) / tokens;
        double per_sm = (double)((s->items * splits + s->sms - 1) / s->sms);
        double us = (double)(tokens / SPLIT_UNIT) * fmax(alone_us, per_sm * share_us) +
                    .3 * per_sm + 3 * ceil(per_sm / (double)s->resident);
        if (splits > 1)
            us += .09 * (double)splits + (splits > SUMS_AT_ONCE ? .15 : 0) +
                  (partial_bytes(p, c, splits) > MAX_POLLED ? .7 : 0);
        if (us < best_us) {
            best_us = us;
            p->split_tokens = tokens;
        }
    }
}

static int plan(struct qtool_kv_plan *p, const struct qtool_kv_cache *c,
                const struct qtool_kv_options *opt, size_t split_tokens)
{
    int rc, per_sm = 0;
    struct qt_device device;
    *p = {};
    p->options = *opt;
    const char *fault = fault_of(opt, c);
    if (fault)
        return refuse(p, QTOOL_UNSUPPORTED, fault);
    struct qt_kv_state *state = qt_kv_state(p);
    *state = {};
    state->cache_heads = c->heads;
    if ((rc = qt_query_device(&device, opt->device, p->reason)) != QTOOL_OK)
        return rc;
    const size_t group = opt->heads / c->heads, smem_limit = (size_t)device.smem_limit;
    const kv_instance *in = instance_of(c, group, true, smem_limit);
    if (!in)
        return refuse(p, QTOOL_UNSUPPORTED, "the GPU has too little shared memory for the kernel");
    size_t tiles = (group + in->heads - 1) / in->heads, items = opt->batch * c->heads * tiles;
    if (c->heads * tiles > 65535 || items > QTOOL_WORKSPACE_ZEROED / sizeof(unsigned))
        return refuse(p, QTOOL_UNSUPPORTED, "too many heads and sequences for one launch");
    if ((rc = allow_smem(p, in)) != QTOOL_OK)
        return rc;
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, in->kernel, in->warps * 32,
                                                      smem_bytes(in)) != cudaSuccess)
        return refuse(p, QTOOL_FAILED, cudaGetErrorString(cudaGetLastError()));
    if (per_sm == 0)
        return refuse(p, QTOOL_UNSUPPORTED, "the GPU has too few registers for the kernel");
    state->dependent = opt->dependent_launch && device.cc == 90;
    const kv_site site = {items, (size_t)device.sms, (size_t)per_sm};
    p->split_tokens = split_tokens;
    if (!split_tokens)
        choose_split(p, c, in, &site);
    p->splits = (opt->max_length - 1) / p->split_tokens + 1;
    if (p->split_tokens % SPLIT_UNIT || p->split_tokens > MAX_TOKENS || p->splits > MAX_SPLITS)
        return refuse(p, QTOOL_UNSUPPORTED,
                      "split_tokens must be a multiple of 128, at most 2^30, and give at most 256 "
                      "splits");
    /* Eight resident warps are faster with the shallow pipeline than with the deep one, four or
     * sixteen slower (docs/experiments, E121). Heads of 128 channels: two thread blocks of eight
     * warps fit on an SM with the shallow pipeline only, and this pair is as fast as one with the
     * deep pipeline (E242). */
    const size_t blocks = (items * p->splits + (size_t)device.sms - 1) / (size_t)device.sms;
    const size_t warps = (blocks < (size_t)per_sm ? blocks : (size_t)per_sm) * (size_t)in->warps;
    in = instance_of(c, group, warps != 8, smem_limit);
    state->kernel = (int)(in - instances);
    const size_t partial = partial_bytes(p, c, p->splits);
    state->polled = partial <= MAX_POLLED;
    p->workspace_bytes = QTOOL_WORKSPACE_ZEROED + (state->polled ? 0 : partial);
    return allow_smem(p, in);
}

int qtool_kv_attention_plan(struct qtool_kv_plan *p, const struct qtool_kv_cache *c,
                            const struct qtool_kv_options *opt, size_t split_tokens)
{
    int rc = plan(p, c, opt, split_tokens);
    if (rc != QTOOL_OK)
        p->splits = 0;
    return rc;
}

int qtool_kv_attention_run(const struct qtool_kv_plan *p, const struct qtool_kv_cache *c, void *out,
                           const void *q, const int *length, void *workspace, void *stream)
{
    const struct qtool_kv_options *o = &p->options;
    const struct qt_kv_state *state = qt_kv_state_const(p);
    const kv_instance *in = &instances[state->kernel];
    kv_args a = {};
    if (!p->splits || fault_of(o, c) || in->format != c->format || in->dim != c->head_dim ||
        c->heads != state->cache_heads) /* not the cache that was planned for */
        return QTOOL_UNSUPPORTED;
    if (!q || !out || !length || (size_t)q % 16 || (size_t)out % 16 || (size_t)workspace % 256 ||
        (p->splits > 1 && !workspace))
        return QTOOL_UNSUPPORTED;
    a.cache = qt_kv_view(c);
    a.q = q;
    a.out = out;
    a.length = length;
    a.arrivals = state->polled ? NULL : (unsigned *)workspace;
    a.partial = (float *)((char *)workspace + (state->polled ? 0 : QTOOL_WORKSPACE_ZEROED));
    a.heads = (int)o->heads;
    a.group = (int)(o->heads / c->heads);
    a.tiles = (a.group + (int)in->heads - 1) / (int)in->heads;
    a.split_tokens = (int)p->split_tokens;
    a.max_length = (int)o->max_length;
    a.scale_log2 = o->scale * 1.4426950408889634f;
    a.bf16 = o->dtype == QTOOL_BF16;
    a.dependent = state->dependent;
    struct qt_kernel_launch launch = {};
    launch.kernel = (const void *)in->kernel;
    launch.grid =
        dim3((unsigned)p->splits, (unsigned)(a.tiles * (int)c->heads), (unsigned)o->batch);
    launch.threads = in->warps * 32;
    launch.smem = smem_bytes(in);
    launch.dependent = state->dependent != 0;
    return qt_launch_kernel(&launch, &a, stream);
}
