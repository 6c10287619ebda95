/* Host side of attention over the cache: checks, the split of sequences, launches. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/kv4/attention.cuh"
#include "kernels/cuda/kv4/view.h"
#include "kernels/include/qtool_kv4.h"

#include <limits.h>
#include <stdio.h>

/* Of shared memory beside smem_bytes. */
enum { STATIC_BYTES = 256 };

struct kv_instance {
    enum qtool_kv_format format;
    size_t dim, heads; /* of a block */
    int warps, slots, slot_bytes;
    void (*kernel)(kv_args);
};

#define INSTANCE(format, F, hq, depth)                                                             \
    {                                                                                              \
        format, F::DIM, 4 * hq, F::warps(hq), depth, kv_slot<F>::BYTES,                            \
            kv_attention_kernel<F, hq, depth>                                                      \
    }
#define INT4(dim, depth)                                                                           \
    INSTANCE(QTOOL_KV_INT4, kv_int4<dim>, 1, depth),                                               \
        INSTANCE(QTOOL_KV_INT4, kv_int4<dim>, 2, depth),                                           \
        INSTANCE(QTOOL_KV_INT4, kv_int4<dim>, 4, depth)
#define F16(dim, depth)                                                                            \
    INSTANCE(QTOOL_KV_F16, kv_f16<dim>, 2, depth), INSTANCE(QTOOL_KV_F16, kv_f16<dim>, 4, depth)

static const kv_instance instances[] = {INT4(64, 3),  INT4(64, 4), INT4(128, 2),
                                        INT4(128, 3), F16(64, 3),  F16(128, 3)};
#undef F16
#undef INT4
#undef INSTANCE

/* The ring; in the end the warps' sums lie in the same place. */
static size_t smem_bytes(const kv_instance *in)
{
    size_t ring = (size_t)in->warps * in->slots * in->slot_bytes;
    size_t sums = (size_t)in->warps * in->heads * (in->dim + 4) * 4;
    return ring > sums ? ring : sums;
}

/* Whether a suits a group of query heads better than b: with all of it in a block and as little
 * beside it as can be, then with a deep ring or not. */
static bool better(const kv_instance *a, const kv_instance *b, size_t group, bool deep)
{
    if (a->heads != b->heads)
        return b->heads < group ? a->heads > b->heads : a->heads >= group && a->heads < b->heads;
    return deep ? a->slots > b->slots : a->slots < b->slots;
}

/* NULL: shared memory is too small for any. */
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

enum { MOST_TOKENS = 1 << 30 }; /* of a sequence */

/* Why there is no attention with such options over a cache, or NULL. */
static const char *fault_of(const struct qtool_kv_options *o, const struct qtool_kv_cache *c)
{
    const char *bad = qt_kv_cache_fault(c);
    if (bad)
        return bad;
    if (o->heads == 0 || o->heads % c->heads)
        return "query heads are no multiple of the cache's";
    if ((unsigned)o->dtype > QTOOL_BF16)
        return "q and out must be FP16 or BF16";
    if (!(o->scale > 0 && o->scale < INFINITY))
        return "scale is not positive";
    if (o->batch == 0 || o->batch > 65535 || o->max_length == 0 || o->max_length > MOST_TOKENS)
        return "batch or length out of range";
    if (c->heads * c->page_tokens > INT_MAX ||
        (!c->table && c->heads * c->page_tokens > UINT_MAX / o->batch))
        return "the cache has 2^32 rows or more";
    if (!c->table && o->max_length > c->page_tokens)
        return "sequences are longer than the cache";
    if (c->table && o->batch > 1 && (o->max_length - 1) / c->page_tokens >= c->table_pitch)
        return "sequences are longer than their part of the table";
    return NULL;
}

static int allow_smem(struct qtool_kv_plan *p, const kv_instance *in)
{
    return qt_allow_smem((const void *)in->kernel, smem_bytes(in), p->reason);
}

/* Of a device and the kernel of a plan, what splits depend on. */
struct kv_site {
    size_t items; /* sequences x KV heads x tiles of query heads */
    size_t sms, resident;
};

/* Of sums that are waited for, and not counted: they lie in the workspace's zeros. */
enum { MOST_WAITED = QTOOL_WORKSPACE_ZEROED };

static size_t sums_bytes(const struct qtool_kv_plan *p, const struct qtool_kv_cache *c,
                         size_t splits)
{
    const size_t row = (c->head_dim + 4) * sizeof(float);
    return splits > 1 ? p->options.batch * p->options.heads * splits * row : 0;
}

/*
 * The split that should take least, in microseconds of an H200, but for what is the same for all: a
 * block takes alone_us for 128 tokens, or as long as its share of the memory does, of which the
 * multiprocessor with the most blocks has the least; blocks beside each other start and end more
 * slowly, and those that find no room later; splits are to be added. Each number is from sweeps
 * over 1 to 64 sequences of 1024 to 32768 tokens. Sets p->split_tokens.
 */
static void choose_split(struct qtool_kv_plan *p, const struct qtool_kv_cache *c,
                         const kv_instance *in, const kv_site *s)
{
    const double row_bytes = (double)c->head_dim * (c->format == QTOOL_KV_INT4 ? 1 : 4) + 4;
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
                  (sums_bytes(p, c, splits) > MOST_WAITED ? .7 : 0);
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
    p->cache_heads = c->heads;
    if ((rc = qt_device_facts(&device, opt->device, p->reason)) != QTOOL_OK)
        return rc;
    const size_t group = opt->heads / c->heads, smem_limit = (size_t)device.smem_limit;
    const kv_instance *in = instance_of(c, group, true, smem_limit);
    if (!in)
        return refuse(p, QTOOL_UNSUPPORTED, "not enough shared memory");
    size_t tiles = (group + in->heads - 1) / in->heads, items = opt->batch * c->heads * tiles;
    if (c->heads * tiles > 65535 || items > QTOOL_WORKSPACE_ZEROED / sizeof(unsigned))
        return refuse(p, QTOOL_UNSUPPORTED, "too many heads and sequences");
    if ((rc = allow_smem(p, in)) != QTOOL_OK)
        return rc;
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, in->kernel, in->warps * 32,
                                                      smem_bytes(in)) != cudaSuccess)
        return refuse(p, QTOOL_FAILED, cudaGetErrorString(cudaGetLastError()));
    if (per_sm == 0)
        return refuse(p, QTOOL_UNSUPPORTED, "not enough registers");
    p->dependent = opt->dependent_launch && device.cc == 90;
    const kv_site site = {items, (size_t)device.sms, (size_t)per_sm};
    p->split_tokens = split_tokens;
    if (!split_tokens)
        choose_split(p, c, in, &site);
    p->splits = (opt->max_length - 1) / p->split_tokens + 1;
    if (p->split_tokens % SPLIT_UNIT || p->split_tokens > MOST_TOKENS || p->splits > MAX_SPLITS)
        return refuse(p, QTOOL_UNSUPPORTED,
                      "split_tokens: no multiple of 128, above 2^30, or over 256 splits");
    /* 16 sequences of 32768 tokens, us: 153 with 67 KB under way in a multiprocessor, 131 with 34,
     * 135 with 134. 8 warps bring 34 with a shallow ring, 4 or 16 have to take a deep one. */
    const size_t blocks = (items * p->splits + (size_t)device.sms - 1) / (size_t)device.sms;
    const size_t together = (blocks < (size_t)per_sm ? blocks : (size_t)per_sm) * (size_t)in->warps;
    in = instance_of(c, group, together != 8, smem_limit);
    p->kernel = (int)(in - instances);
    const size_t sums = sums_bytes(p, c, p->splits);
    p->in_zeros = sums <= MOST_WAITED;
    p->workspace_bytes = QTOOL_WORKSPACE_ZEROED + (p->in_zeros ? 0 : sums);
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
    const kv_instance *in = &instances[p->kernel];
    kv_args a = {};
    if (!p->splits || fault_of(o, c) || in->format != c->format || in->dim != c->head_dim ||
        c->heads != p->cache_heads) /* not what was planned for */
        return QTOOL_UNSUPPORTED;
    if (!q || !out || !length || (size_t)q % 16 || (size_t)out % 16 || (size_t)workspace % 256 ||
        (p->splits > 1 && !workspace))
        return QTOOL_UNSUPPORTED;
    a.cache = qt_kv_view(c);
    a.q = q;
    a.out = out;
    a.length = length;
    a.arrivals = p->in_zeros ? NULL : (unsigned *)workspace;
    a.partial = (float *)((char *)workspace + (p->in_zeros ? 0 : QTOOL_WORKSPACE_ZEROED));
    a.heads = (int)o->heads;
    a.group = (int)(o->heads / c->heads);
    a.tiles = (a.group + (int)in->heads - 1) / (int)in->heads;
    a.split_tokens = (int)p->split_tokens;
    a.max_length = (int)o->max_length;
    a.scale_log2 = o->scale * 1.4426950408889634f;
    a.bf16 = o->dtype == QTOOL_BF16;
    a.dependent = p->dependent;
    struct qt_kernel_launch launch = {};
    launch.kernel = (const void *)in->kernel;
    launch.grid =
        dim3((unsigned)p->splits, (unsigned)(a.tiles * (int)c->heads), (unsigned)o->batch);
    launch.threads = in->warps * 32;
    launch.smem = smem_bytes(in);
    launch.dependent = p->dependent != 0;
    return qt_launch_kernel(&launch, &a, stream);
}
