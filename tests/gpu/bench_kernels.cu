/*
 * Speed of the kernels. Weights are cold in L2: launches rotate over copies of more than four times
 * its size; the launches of a round are captured into one CUDA graph; medians of graph replays.
 * In the same run: the read floor (a bare cold read of the same bytes by the copy engine or by
 * plain loads, whichever is faster) and cuBLAS FP16.
 *
 * usage: bench_kernels [-s NxK[,NxK]] [-m M[,M]] [-f FORMAT[,FORMAT]] [-t] [-o FILE.tsv] [-p]
 *   FORMAT nf4 nf3 nf2 fp6 fp6e2 fp5 fp4; -t tries many configurations; -p dependent launches
 */
#include "kernels/qtool_kernels.h"
#include "tests/gpu/gpu.cuh"

#include <algorithm>
#include <cublas_v2.h>
#include <string>
#include <vector>

static int replays = 15;
static cudaStream_t stream;

struct format {
    const char *name;
    enum qt_matmul_kind kind;
    unsigned bits, exp_bits;
    size_t group;
};

static const struct format formats[] = {
    {"nf4", QT_MATMUL_LUT, 4, 0, 128}, {"nf3", QT_MATMUL_LUT, 3, 0, 128},
    {"nf2", QT_MATMUL_LUT, 2, 0, 128}, {"fp6", QT_MATMUL_FPX, 6, 3, 0},
    {"fp6e2", QT_MATMUL_FPX, 6, 2, 0}, {"fp5", QT_MATMUL_FPX, 5, 2, 0},
    {"fp4", QT_MATMUL_FPX, 4, 2, 0},
};

/* ---- timing ------------------------------------------------------------------------------------
 */

static size_t cold_bytes;

static int copies_of(size_t bytes)
{
    size_t c = cold_bytes / bytes + 1;
    return (int)(c < 4 ? 4 : c > 64 ? 64 : c);
}

/* Microseconds a launch; launch(copy) only enqueues on `stream`. */
template <class F> static double time_us(int copies, F launch)
{
    int rounds = copies < 8 ? (8 + copies - 1) / copies * copies : copies;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    std::vector<float> us;
    launch(0);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < rounds; i++)
        launch(i % copies);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int i = 0; i < replays + 2; i++) {
        float ms;
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 2)
            us.push_back(ms * 1000 / (float)rounds);
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

/* ---- the floor ---------------------------------------------------------------------------------
 */

template <int UNROLL>
static __global__ void __launch_bounds__(512) read_kernel(const uint4 *p, size_t n, uint32_t *out)
{
    size_t stride = (size_t)gridDim.x * blockDim.x;
    uint32_t sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += stride * UNROLL) {
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            v[u] = i + u * stride < n ? __ldcs(p + i + u * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    if (sum == 0x12345679)
        *out = sum;
}

static double read_floor(const char *base, size_t bytes, int copies, int sms)
{
    static uint32_t *out = (uint32_t *)gpu_new(64);
    double best = 1e30;
    for (int per_sm = 1; per_sm <= 4; per_sm *= 2)
        for (int threads = 256; threads <= 512; threads *= 2) {
            best = std::min(best, time_us(copies, [&](int c) {
                                read_kernel<8><<<sms * per_sm, threads, 0, stream>>>(
                                    (const uint4 *)(base + (size_t)c * bytes), bytes / 16, out);
                            }));
            best = std::min(best, time_us(copies, [&](int c) {
                                read_kernel<16><<<sms * per_sm, threads, 0, stream>>>(
                                    (const uint4 *)(base + (size_t)c * bytes), bytes / 16, out);
                            }));
        }
    return best;
}

/* ---- one format at one shape -------------------------------------------------------------------
 */

struct copies {
    char *base;
    size_t bytes; /* packed, of one copy */
    int count, sms;
    double floor_us;
    std::vector<struct qt_matmul_weight> weight;
};

static void copies_new(struct copies *c, const struct format *f, size_t n, size_t k, int sms)
{
    size_t strips = (n + 15) / 16, blocks = (k + 63) / 64,
           groups = f->group ? (k + f->group - 1) / f->group : 1;
    size_t scale = strips * groups * 32, planes = strips * blocks * 128 * f->bits;
    c->bytes = (planes + scale) / 256 * 256 + 256;
    c->count = copies_of(c->bytes);
    c->sms = sms;
    c->base = (char *)gpu_new(c->bytes * (size_t)c->count + 256);
    fill_bits(c->base, c->bytes * (size_t)c->count, 1);
    __half *table = (__half *)gpu_new(64);
    fill_half(table, 16, 2, -1, 1);
    c->floor_us = read_floor(c->base, c->bytes, c->count, sms);
    for (int i = 0; i < c->count; i++) {
        struct qt_matmul_weight w = {};
        char *at = c->base + (size_t)i * c->bytes;
        fill_half(at + planes, scale / 2, 3, 0.05f, 0.15f);
        w.kind = f->kind;
        w.bits = f->bits;
        w.exp_bits = f->exp_bits;
        w.n = n;
        w.k = k;
        w.group = f->group;
        unsigned left = f->bits;
        for (int p = 0; left; p++) {
            unsigned width = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            w.plane[p] = at;
            at += strips * blocks * 128 * width;
            left -= width;
        }
        w.scale = at;
        w.table = f->kind == QT_MATMUL_LUT ? table : NULL;
        c->weight.push_back(w);
    }
    CHECK(cudaDeviceSynchronize());
}

static void *x, *y, *workspace;
static size_t workspace_bytes = 512 << 20;
static FILE *tsv;

static double time_plan(const struct qt_matmul_plan *p, const struct copies *c)
{
    if (p->workspace_bytes > workspace_bytes)
        return 1e30;
    CHECK(cudaMemsetAsync(workspace, 0, p->workspace_bytes, stream));
    return time_us(c->count, [&](int i) {
        if (qt_matmul_run(p, &c->weight[(size_t)i], y, x, workspace, stream) != QT_MATMUL_OK)
            CHECK(cudaErrorUnknown);
    });
}

static std::string config_text(const struct qt_matmul_config *c)
{
    char text[96];
    snprintf(text, sizeof text, "t%d_s%d_w%d/%d_c%d_x%d", c->token_tiles, c->strips, c->warps,
             c->warps_k, c->strips_cta, c->splits);
    return text;
}

static void report(const char *name, size_t n, size_t k, size_t m, double us, size_t bytes,
                   double floor_us, double cublas_us, const struct qt_matmul_config *c)
{
    char line[256];
    snprintf(line, sizeof line, "%s\t%zu\t%zu\t%zu\t%.2f\t%.0f\t%.1f\t%.2f\t%.2f\t%s", name, n, k,
             m, us, (double)bytes / us / 1e3, 100 * floor_us / us, floor_us, cublas_us / us,
             c ? config_text(c).c_str() : "-");
    puts(line);
    fflush(stdout);
    if (tsv) {
        fprintf(tsv, "%s\n", line);
        fflush(tsv);
    }
}

struct tried {
    double us;
    struct qt_matmul_config config;
};

/* Configurations around the planned one; the best few to the table. */
static void tune(const struct format *f, const struct copies *c, struct qt_matmul_plan plan,
                 double cublas_us)
{
    std::vector<tried> all;
    const struct qt_matmul_weight *w = &c->weight[0];
    struct qt_matmul_config base = plan.config;
    int strips_total = (int)((w->n + 15) / 16);
    int keep = replays;
    replays = 5;
    for (int strips = 1; strips <= 2; strips++)
        for (int splits = 1; splits <= (plan.m > 8 ? 8 : 4); splits++)
            for (int warps = 8; warps <= 16; warps *= 2)
                for (int warps_k = warps / 4; warps_k <= warps; warps_k *= 2)
                    for (int per_sm = 1; per_sm <= 16 / warps; per_sm++) {
                        int groups = c->sms * per_sm / splits;
                        struct qt_matmul_config t = base;
                        t.strips = strips;
                        t.splits = splits;
                        t.warps = warps;
                        t.warps_k = warps_k;
                        t.strips_cta = (strips_total + groups - 1) / groups;
                        t.strips_cta = (t.strips_cta + strips - 1) / strips * strips;
                        plan.config = t;
                        if (qt_matmul_plan_check(&plan, w) == QT_MATMUL_OK)
                            all.push_back({time_plan(&plan, c), t});
                    }
    replays = keep;
    std::sort(all.begin(), all.end(), [](const tried &a, const tried &b) { return a.us < b.us; });
    for (size_t i = 0; i < all.size() && i < 6; i++) {
        plan.config = all[i].config;
        if (qt_matmul_plan_check(&plan, w) == QT_MATMUL_OK)
            report((std::string(f->name) + "*").c_str(), w->n, w->k, plan.m, time_plan(&plan, c),
                   c->bytes, c->floor_us, cublas_us, &plan.config);
    }
}

static double cublas_time(cublasHandle_t handle, size_t n, size_t k, size_t m)
{
    size_t bytes = n * k * 2;
    int count = copies_of(bytes);
    char *w = (char *)gpu_new(bytes * (size_t)count);
    fill_half(w, n * k * (size_t)count, 7, -0.02f, 0.02f);
    float one = 1, zero = 0;
    double us = time_us(count, [&](int i) {
        cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, (int)n, (int)m, (int)k, &one,
                     w + (size_t)i * bytes, CUDA_R_16F, (int)k, x, CUDA_R_16F, (int)k, &zero, y,
                     CUDA_R_16F, (int)n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    });
    CHECK(cudaFree(w));
    return us;
}

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

int main(int argc, char **argv)
{
    const char *shapes = "4096x4096,8192x8192,57344x8192", *ms = "1,8,16", *names = NULL;
    bool tuning = false;
    struct qt_matmul_options opt = {};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-t") == 0)
            tuning = true;
        else if (strcmp(argv[i], "-p") == 0)
            opt.dependent_launch = 1;
        else if (i + 1 < argc && argv[i][0] == '-') {
            char o = argv[i][1];
            const char *v = argv[++i];
            if (o == 's')
                shapes = v;
            else if (o == 'm')
                ms = v;
            else if (o == 'f')
                names = v;
            else if (o == 'r')
                replays = atoi(v);
            else if (o == 'o')
                tsv = fopen(v, "a");
        }
    }
    cudaDeviceProp device;
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
        printf("SKIP: no CUDA device\n");
        return 0;
    }
    int sms = device.multiProcessorCount;
    cold_bytes = (size_t)device.l2CacheSize * 5;
    CHECK(cudaStreamCreate(&stream));
    cublasHandle_t handle;
    cublasCreate(&handle);
    cublasSetStream(handle, stream);
    void *blas_workspace = gpu_new(64 << 20);
    cublasSetWorkspace(handle, blas_workspace, 64 << 20);
    x = gpu_new((size_t)4096 * 32768 * 2);
    y = gpu_new((size_t)4096 * 65536 * 2);
    workspace = gpu_new(workspace_bytes);
    fill_half(x, (size_t)4096 * 32768, 5, -1, 1);
    CHECK(cudaMemset(workspace, 0, workspace_bytes));
    printf("# %s, %d SMs, L2 %d MB, %s launches\n", device.name, sms, device.l2CacheSize >> 20,
           opt.dependent_launch ? "dependent" : "plain");
    puts("format\tN\tK\tM\tus\tGB/s\t%floor\tfloor_us\tx_cublas\tconfig");
    for (const std::string &shape : split(shapes)) {
        size_t n = strtoull(shape.c_str(), NULL, 10);
        size_t k = strtoull(strchr(shape.c_str(), 'x') + 1, NULL, 10);
        std::vector<double> blas;
        for (const std::string &m : split(ms)) {
            blas.push_back(cublas_time(handle, n, k, strtoull(m.c_str(), NULL, 10)));
            report("cublas", n, k, strtoull(m.c_str(), NULL, 10), blas.back(), n * k * 2,
                   blas.back(), blas.back(), NULL);
        }
        for (const struct format &f : formats) {
            bool wanted = !names;
            for (const std::string &name : split(names ? names : ""))
                wanted = wanted || name == f.name;
            if (!wanted)
                continue;
            struct copies c;
            copies_new(&c, &f, n, k, sms);
            size_t j = 0;
            for (const std::string &text : split(ms)) {
                size_t m = strtoull(text.c_str(), NULL, 10);
                struct qt_matmul_plan plan;
                if (qt_matmul_plan(&plan, &c.weight[0], m, &opt) != QT_MATMUL_OK) {
                    printf("%s: %s\n", f.name, plan.reason);
                    continue;
                }
                report(f.name, n, k, m, time_plan(&plan, &c), c.bytes, c.floor_us, blas[j],
                       &plan.config);
                if (tuning)
                    tune(&f, &c, plan, blas[j]);
                j++;
            }
            CHECK(cudaFree(c.base));
        }
    }
    return 0;
}
