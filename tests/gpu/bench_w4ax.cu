/*
 * For kernel authors: times configurations of the w4ax kernels, packed activations, and the
 * quantizer alone, together with cuBLAS FP16 and the read floor. Weights are cold in the L2
 * (timing.cuh). `qtool bench` measures the planned configurations.
 *
 * usage: bench_w4ax [-s NxK[,NxK]] [-m M[,M]] [-g block,int,row] [-t [-a]] [-p] [-q [-r]]
 *   -t tries many configurations and prints the best, -a all; -p packed activations for the stream
 *   kernel; -q the quantizer; -q -r the quantizer with rotated channel blocks
 */
#include "kernels/include/qtool_w4ax.h"
#include "tests/gpu/tile_tokens.h"
#include "tests/gpu/timing.cuh"

#include <cublas_v2.h>
#include <string>

static const char *const scale_names[] = {"block", "int", "row"};

static struct timing timer;
static void *x, *y, *workspace;
static const size_t workspace_bytes = 256 << 20, x_bytes = (size_t)4096 * 32768 * 2;
static bool packed_wanted, tuning, rotated;
static size_t shown = 4; /* configurations printed by -t */

static std::vector<std::string> split(const char *text)
{
    std::vector<std::string> out;
    for (const char *at = text; *at;) {
        size_t n = strcspn(at, ",");
        out.push_back(std::string(at, n));
        at += n + (at[n] == ',');
    }
    return out;
}

/* Makes block words: one channel block in five has 8 bits. */
static uint32_t *make_blocks(size_t k, int packed, size_t *token_bytes)
{
    size_t count = (k + 127) / 128;
    std::vector<uint8_t> bits(count);
    std::vector<uint32_t> words(count);
    for (size_t i = 0; i < count; i++)
        bits[i] = i % 5 ? 4 : 8;
    *token_bytes = qtool_w4ax_blocks(words.data(), bits.data(), count, packed);
    uint32_t *d = (uint32_t *)gpu_alloc(count * 4);
    CHECK(cudaMemcpy(d, words.data(), count * 4, cudaMemcpyHostToDevice));
    return d;
}

/* ---- products ------------------------------------------------------------------------------- */

struct copies {
    char *base;
    size_t bytes;
    int count;
    double floor_us;
    std::vector<struct qtool_w4ax_weight> weight;
};

static void copies_new(struct copies *c, enum qtool_w4ax_scales scales, size_t n, size_t k,
                       const uint32_t *blocks)
{
    size_t strips = (n + 15) / 16, kblocks = (k + 127) / 128, plane = strips * kblocks * 1024;
    size_t scale = scales == QTOOL_W4AX_BLOCK ? strips * kblocks * 32 : strips * kblocks * 16;
    c->bytes = (plane + scale + strips * 32) / 256 * 256 + 256;
    c->count = copies_of(timer, c->bytes);
    c->base = (char *)gpu_alloc(c->bytes * (size_t)c->count);
    fill_bits(c->base, c->bytes * (size_t)c->count, 1);
    c->floor_us = read_floor(timer, c->base, c->bytes, c->count);
    for (int i = 0; i < c->count; i++) {
        struct qtool_w4ax_weight w = {};
        char *at = c->base + (size_t)i * c->bytes;
        fill_half((__half *)(at + plane + scale), strips * 16, 3, 0.01f, 0.02f);
        if (scales == QTOOL_W4AX_BLOCK)
            fill_half((__half *)(at + plane), scale / 2, 3, 0.01f, 0.02f);
        else
            CHECK(cudaMemset(at + plane, 7, scale));
        w.scales = scales;
        w.n = n;
        w.k = k;
        w.plane = at;
        w.scale = at + plane;
        w.row_scale = at + plane + scale;
        w.blocks = blocks;
        c->weight.push_back(w);
    }
    CHECK(cudaDeviceSynchronize());
}

static double time_plan(const struct qtool_w4ax_plan *p, const struct copies *c,
                        const struct qtool_w4ax_acts *acts)
{
    if (p->workspace_bytes > workspace_bytes)
        return 1e30;
    return time_us(timer, c->count, [&](int i) {
        if (qtool_w4ax_run(p, &c->weight[(size_t)i], acts, y, workspace, timer.stream) != QTOOL_OK)
            CHECK(cudaErrorUnknown);
    });
}

static void report(const struct qtool_w4ax_plan *p, double us, const struct copies *data,
                   double blas, const char *mark)
{
    const struct qtool_w4ax_config *c = &p->config;
    char config[120];
    if (c->kernel == QTOOL_W4AX_STREAM)
        snprintf(config, sizeof config, "stream t%d s%d w%d u%d", c->stream.tokens,
                 c->stream.strips, c->stream.warps, c->stream.cta_units);
    else if (c->kernel == QTOOL_W4AX_TILE)
        snprintf(config, sizeof config, "tile t%d w%d x%d", 8 * c->tile.token_tiles, c->tile.warps,
                 (int)c->tile.schedule);
    else
        snprintf(config, sizeof config, "skinny t%d s%d w%d k%d c%d d%d", 8 * c->skinny.token_tiles,
                 c->skinny.strips, c->skinny.warps, c->skinny.warps_k, c->skinny.strips_cta,
                 c->skinny.depth);
    printf("%s%s%s\t%zu\t%zu\t%zu\t%.2f\t%.2f\t%.0f\t%.2f\t%.0f\t%s\n", scale_names[p->scales],
           p->options.packed ? " packed" : "", mark, p->n, p->k, p->m, us, data->floor_us,
           100 * data->floor_us / us, blas / us,
           2e-6 * (double)p->m * (double)p->n * (double)p->k / us, config);
    fflush(stdout);
}

struct tried {
    double us;
    struct qtool_w4ax_plan plan;
};

/* Tries units per thread block: equal shares, or whole row groups. */
static void try_units(std::vector<tried> *all, struct qtool_w4ax_plan p, const struct copies *c,
                      const struct qtool_w4ax_acts *acts, size_t group_rows)
{
    size_t kblocks = (p.k + 127) / 128, groups = (p.n + group_rows - 1) / group_rows;
    std::vector<size_t> units;
    for (size_t per_sm = 1; per_sm <= 2; per_sm++)
        units.push_back((groups * kblocks + (size_t)timer.sms * per_sm - 1) /
                        ((size_t)timer.sms * per_sm));
    for (size_t parts = 1; parts <= 4; parts++)
        units.push_back((kblocks + parts - 1) / parts);
    units.push_back((groups + (size_t)timer.sms - 1) / (size_t)timer.sms * kblocks);
    for (size_t u : units) {
        p.config.stream.cta_units = (int)u;
        if (u * (size_t)timer.sms * 4 >= groups * kblocks && qtool_w4ax_plan_check(&p) == QTOOL_OK)
            all->push_back({time_plan(&p, c, acts), p});
    }
}

/* Tries skinny kernels: all numbers of warps and tiles, up to three depths. */
static void try_skinny(std::vector<tried> *all, struct qtool_w4ax_plan p, const struct copies *c,
                       const struct qtool_w4ax_acts *acts)
{
    const int cta = (int)(((p.n + 15) / 16 + (size_t)timer.sms - 1) / (size_t)timer.sms);
    struct qtool_skinny_config *f = &p.config.skinny;
    p.config = {};
    p.config.kernel = QTOOL_W4AX_SKINNY;
    f->token_tiles = (int)(p.m + 7) / 8;
    for (f->strips = 1; f->strips <= 2; f->strips *= 2)
        for (f->warps_k = 2; f->warps_k <= 16; f->warps_k *= 2)
            for (int rows = 1; rows * f->warps_k <= 14 && (rows - 1) * f->strips < cta; rows++) {
                const int tiles = (cta + rows * f->strips - 1) / (rows * f->strips);
                int found = 0;
                f->warps = rows * f->warps_k;
                f->strips_cta = (cta + tiles - 1) / tiles * tiles;
                for (f->depth = 16; f->depth >= 2 && found < 3; f->depth--)
                    if (qtool_w4ax_plan_check(&p) == QTOOL_OK) {
                        all->push_back({time_plan(&p, c, acts), p});
                        f->depth -= f->depth / 4;
                        found++;
                    }
            }
}

static void tune(struct qtool_w4ax_plan p, const struct copies *c,
                 const struct qtool_w4ax_acts *acts, double blas)
{
    std::vector<tried> all;
    int keep = timer.replays;
    timer.replays = 3;
    for (int tokens : tile_tokens)
        for (int i = 0; i < 4 * 3 && !p.options.packed; i++) {
            p.config = {};
            p.config.kernel = QTOOL_W4AX_TILE;
            p.config.tile.token_tiles = tokens / 8;
            p.config.tile.warps = 8 + 4 * (i % 3);
            p.config.tile.schedule = (enum qtool_tile_schedule)(QTOOL_TILE_WHOLE + i / 3);
            if (p.m * 2 > (size_t)tokens && qtool_w4ax_plan_check(&p) == QTOOL_OK)
                all.push_back({time_plan(&p, c, acts), p});
        }
    if (p.m <= 32)
        try_skinny(&all, p, c, acts);
    if (p.m <= 32) {
        p.config = {};
        p.config.kernel = QTOOL_W4AX_STREAM;
        p.config.stream.tokens = p.m <= 8 ? 8 : p.m <= 16 ? 16 : 32;
        for (int strips = 2; strips <= 4; strips *= 2)
            for (int warps = 4; warps <= 8; warps *= 2) {
                p.config.stream.strips = strips;
                p.config.stream.warps = warps;
                try_units(&all, p, c, acts, (size_t)strips * 16);
            }
    }
    timer.replays = keep;
    std::sort(all.begin(), all.end(), [](const tried &a, const tried &b) { return a.us < b.us; });
    for (size_t i = 0; i < all.size() && i < shown; i++)
        report(&all[i].plan, all[i].us, c, blas, "*");
}

static double cublas_time(cublasHandle_t handle, size_t n, size_t k, size_t m)
{
    size_t bytes = n * k * 2;
    int count = copies_of(timer, bytes);
    char *w = (char *)gpu_alloc(bytes * (size_t)count);
    fill_half((__half *)w, n * k * (size_t)count, 7, -0.02f, 0.02f);
    float one = 1, zero = 0;
    double us = time_us(timer, count, [&](int i) {
        cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, (int)n, (int)m, (int)k, &one,
                     w + (size_t)i * bytes, CUDA_R_16F, (int)k, x, CUDA_R_16F, (int)k, &zero, y,
                     CUDA_R_16F, (int)n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    });
    CHECK(cudaFree(w));
    return us;
}

static void bench_products(size_t n, size_t k, const std::vector<std::string> &ms,
                           const std::string &grains, cublasHandle_t handle)
{
    std::vector<double> blas;
    for (const std::string &m : ms)
        blas.push_back(cublas_time(handle, n, k, strtoull(m.c_str(), NULL, 10)));
    for (size_t j = 0; j < ms.size(); j++)
        printf("cublas fp16\t%zu\t%zu\t%s\t%.2f\n", n, k, ms[j].c_str(), blas[j]);
    for (int g = 0; g < 3; g++) {
        if (grains.find(scale_names[g]) == std::string::npos)
            continue;
        struct copies c;
        size_t token_bytes;
        uint32_t *wide = make_blocks(k, 0, &token_bytes), *packed = make_blocks(k, 1, &token_bytes);
        copies_new(&c, (enum qtool_w4ax_scales)g, n, k, wide);
        size_t j = 0;
        for (const std::string &text : ms) {
            struct qtool_w4ax_plan plan;
            struct qtool_w4ax_options opt = {};
            size_t m = strtoull(text.c_str(), NULL, 10);
            opt.packed = packed_wanted && g == 0 && m <= 32;
            for (struct qtool_w4ax_weight &w : c.weight)
                w.blocks = opt.packed ? packed : wide;
            size_t scales_at = m * ((k + 127) / 128) * 128;
            struct qtool_w4ax_acts acts = {x, (float *)((char *)x + scales_at), (int *)x};
            CHECK(cudaMemset(acts.scale, 0x3c, m * ((k + 127) / 128 + 4) * 4));
            if (qtool_w4ax_plan(&plan, &c.weight[0], m, &opt) != QTOOL_OK) {
                printf("%s\n", plan.reason);
                continue;
            }
            report(&plan, time_plan(&plan, &c, &acts), &c, blas[j], "");
            if (tuning)
                tune(plan, &c, &acts, blas[j]);
            fill_half((__half *)x, x_bytes / 2, 5, -1, 1);
            j++;
        }
        CHECK(cudaFree(c.base));
        CHECK(cudaFree(wide));
        CHECK(cudaFree(packed));
    }
}

/* ---- quantizer ------------------------------------------------------------------------------ */

static __global__ void move_kernel(const uint4 *from, size_t in, uint4 *to, size_t out)
{
    size_t stride = (size_t)gridDim.x * blockDim.x,
           at = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    uint4 v = {};
    for (size_t i = at; i < in; i += stride) {
        uint4 w = __ldcs(from + i);
        v.x ^= w.x, v.y += w.y, v.z ^= w.z, v.w += w.w;
        if (i < out)
            to[i] = v;
    }
}

static void bench_quantize(size_t k, size_t m)
{
    size_t token_bytes, in_bytes = m * k * 2;
    const size_t out_bytes = (m * k + m * (k / 128) * 4 + 4096) / 128 * 128; /* codes: 128 bytes */
    char *base = (char *)gpu_alloc((size_t)4 << 30);
    int copies = copies_of(timer, in_bytes + out_bytes);
    if ((in_bytes + out_bytes) * (size_t)copies > (size_t)4 << 30)
        return;
    std::vector<uint32_t> perm(k);
    for (size_t i = 0; i < k; i++) {
        size_t j = gpu_hash(i) % (i + 1);
        perm[i] = perm[j];
        perm[j] = (uint32_t)i;
    }
    uint32_t *device_perm = (uint32_t *)gpu_alloc(k * 4);
    CHECK(cudaMemcpy(device_perm, perm.data(), k * 4, cudaMemcpyHostToDevice));
    void *weight = gpu_alloc(k * 2), *sums = gpu_alloc(m * 4);
    fill_half((__half *)weight, k, 3, 0.5f, 1);
    for (int i = 0; i < copies; i++)
        fill_half((__half *)(base + (in_bytes + out_bytes) * (size_t)i), m * k, (uint64_t)i, -1, 1);
    for (int packed = 0; packed < 2; packed++) {
        uint32_t *blocks = make_blocks(k, packed, &token_bytes);
        double floor_us = 1e30;
        for (int per_sm = 1; per_sm <= 8; per_sm *= 2)
            floor_us = std::min(floor_us, time_us(timer, copies, [&](int c) {
                                    char *at = base + (in_bytes + out_bytes) * (size_t)c;
                                    move_kernel<<<timer.sms * per_sm, 512, 0, timer.stream>>>(
                                        (uint4 *)at, in_bytes / 16, (uint4 *)(at + in_bytes),
                                        (m * token_bytes + m * (k / 128) * 4) / 16);
                                }));
        for (int what = 0; what < (packed ? 4 : 6); what++) {
            static const char *const names[] = {"plain",        "rms",     "rms gather",
                                                "layer gather", "rms int", "rms gather int"};
            struct qtool_w4ax_input in = {what > 3 ? QTOOL_W4AX_INT : QTOOL_W4AX_BLOCK,
                                          k,
                                          blocks,
                                          what > 1 && what != 4 ? device_perm : NULL,
                                          1,
                                          1,
                                          packed,
                                          rotated ? QTOOL_W4AX_HADAMARD : QTOOL_W4AX_NO_ROTATION};
            struct qtool_w4ax_norm norm = {what == 3 ? QTOOL_W4AX_LAYER_NORM
                                           : what    ? QTOOL_W4AX_RMS_NORM
                                                     : QTOOL_W4AX_NO_NORM,
                                           1e-5f, weight, what == 3 ? weight : NULL};
            double us = time_us(timer, copies, [&](int c) {
                char *at = base + (in_bytes + out_bytes) * (size_t)c;
                struct qtool_w4ax_acts acts = {
                    at + in_bytes, (float *)(at + in_bytes + m * token_bytes), (int *)sums};
                if (qtool_w4ax_quantize(&acts, &in, &norm, at, m, QTOOL_F16, timer.stream) !=
                    QTOOL_OK)
                    CHECK(cudaErrorUnknown);
            });
            printf("quantize %s%s%s\t%zu\t%zu\t%.2f\t%.2f\t%.2fx\n", names[what],
                   packed ? " packed" : "", rotated ? " rotated" : "", k, m, us, floor_us,
                   us / floor_us);
        }
        CHECK(cudaFree(blocks));
    }
    CHECK(cudaFree(base));
    CHECK(cudaFree(device_perm));
    CHECK(cudaFree(weight));
    CHECK(cudaFree(sums));
}

int main(int argc, char **argv)
{
    const char *shapes = "4096x4096,8192x8192,57344x8192", *ms = "1,8,16,32,64,128,256,512,4096";
    std::string grains = "block,int,row";
    bool quantize = false;
    for (int i = 1; i < argc; i++) {
        char o = argv[i][0] == '-' ? argv[i][1] : 0;
        tuning |= o == 't';
        packed_wanted |= o == 'p';
        rotated |= o == 'r';
        quantize |= o == 'q';
        shown = o == 'a' ? 1000 : shown;
        if (o == 's' && i + 1 < argc)
            shapes = argv[++i];
        else if (o == 'm' && i + 1 < argc)
            ms = argv[++i];
        else if (o == 'g' && i + 1 < argc)
            grains = argv[++i];
    }
    cudaDeviceProp device;
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
        printf("SKIP: no CUDA device\n");
        return 0;
    }
    timer = timing_new(device);
    cublasHandle_t handle;
    cublasCreate(&handle);
    cublasSetStream(handle, timer.stream);
    void *blas_workspace = gpu_alloc(64 << 20);
    cublasSetWorkspace(handle, blas_workspace, 64 << 20);
    x = gpu_alloc(x_bytes);
    y = gpu_alloc((size_t)4096 * 65536 * 2);
    workspace = gpu_alloc(workspace_bytes);
    fill_half((__half *)x, x_bytes / 2, 5, -1, 1);
    CHECK(cudaMemset(workspace, 0, workspace_bytes));
    printf("# %s\nscales\tN\tK\tM\tus\tfloor\t%%\tx cublas\tTOP/s\tconfig\n", device.name);
    for (const std::string &shape : split(shapes)) {
        size_t n = strtoull(shape.c_str(), NULL, 10);
        size_t k = strtoull(strchr(shape.c_str(), 'x') + 1, NULL, 10);
        if (!quantize)
            bench_products(n, k, split(ms), grains, handle);
        for (const std::string &m : split(quantize ? ms : ""))
            bench_quantize(k, strtoull(m.c_str(), NULL, 10));
    }
    return 0;
}
