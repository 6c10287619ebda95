/*
 * The host code of the CUDA backend on a simulated device: device memory is host memory, cuBLAS is
 * OpenBLAS, and the kernels for matrix products, attention, Hessians and rounding are C loops.
 * Other kernels are missing. This checks the division into panels, 3xTF32 parts, heads and column
 * blocks, and the rounding of a row, without a GPU; tests/gpu/test_backend.c and test_round.c check
 * the kernels.
 */
#include "backend_fixture.h"
#include "coded_fixture.h"
#include "fixture.h"
#include "ranks_fixture.h"

#include "hessian/hessian.h"
#include "kernels/gpu/product.h"
#include "pack/activations/plan.h"
#include "simulated_round.h"
#include "tests/input_errors.h"

#include <cblas.h>

/* ---- the simulated device ------------------------------------------------------------------- */

static bool with_cublas;
static size_t closed, products_of_parts, products_of_halves, halved;

static int simulated_alloc(struct qt_gpu *gpu, void **out, size_t bytes, struct qt_err *err)
{
    (void)gpu;
    char *p;
    int rc = qt_array_new(&p, bytes, 1, err);
    *out = p;
    if (rc == QT_OK)
        memset(p, 0xff, bytes); /* NaN */
    return rc;
}

static void simulated_free(struct qt_gpu *gpu, void *p)
{
    (void)gpu;
    qt_free(p);
}

static size_t simulated_room(struct qt_gpu *gpu)
{
    (void)gpu;
    return SIZE_MAX;
}

static int simulated_fill(struct qt_gpu *gpu, void *dst, int byte, size_t bytes, struct qt_err *err)
{
    (void)gpu;
    (void)err;
    memset(dst, byte, bytes);
    return QT_OK;
}

static int simulated_copy(struct qt_gpu *gpu, void *dst, const void *src, size_t bytes,
                          struct qt_err *err)
{
    (void)gpu;
    (void)err;
    memcpy(dst, src, bytes);
    return QT_OK;
}

static void simulated_close(struct qt_gpu *gpu)
{
    closed++;
    qt_free(gpu);
}

int qt_gpu_open(struct qt_gpu **out, int device, struct qt_err *err)
{
    (void)device;
    int rc = qt_array_new(out, 1, sizeof **out, err);
    if (rc < 0)
        return rc;
    **out = (struct qt_gpu){.has_cublas = with_cublas,
                            .name = "simulated",
                            .cc = 90,
                            .alloc = simulated_alloc,
                            .free = simulated_free,
                            .room = simulated_room,
                            .fill = simulated_fill,
                            .upload = simulated_copy,
                            .download = simulated_copy,
                            .copy = simulated_copy,
                            .close = simulated_close};
    strcpy((*out)->cublas, with_cublas ? "cuBLAS 13.0.2" : "no cuBLAS: a test");
    return rc;
}

struct gpu_cublas *gpu_cublas_of(struct qt_gpu *gpu)
{
    (void)gpu;
    return NULL;
}

void *gpu_stream_of(struct qt_gpu *gpu)
{
    (void)gpu;
    return NULL;
}

static _Thread_local size_t lanes = 1, lane, most_lanes;

int gpu_lanes_begin(struct qt_gpu *gpu, size_t count, struct qt_err *err)
{
    (void)gpu;
    (void)err;
    assert_true(lanes == 1 && lane == 0);
    lanes = count > GPU_LANES ? GPU_LANES : count > 1 ? count : 1;
    most_lanes = lanes > most_lanes ? lanes : most_lanes;
    return QT_OK;
}

int gpu_lane_use(struct qt_gpu *gpu, size_t i, struct qt_err *err)
{
    (void)gpu;
    (void)err;
    lane = i % lanes;
    return QT_OK;
}

int gpu_lanes_end(struct qt_gpu *gpu, struct qt_err *err)
{
    (void)gpu;
    (void)err;
    lanes = 1;
    lane = 0;
    return QT_OK;
}

int gpu_cublas_product(struct gpu_cublas *c, const struct gpu_product *p)
{
    (void)c;
    products_of_parts += p->tf32;
    for (int i = 0; i < p->count; i++)
        cblas_sgemm(CblasRowMajor, p->a_transposed ? CblasTrans : CblasNoTrans,
                    p->b_transposed ? CblasTrans : CblasNoTrans, p->m, p->n, p->k, p->alpha,
                    p->as ? p->as[i] : p->a, p->lda, p->bs ? p->bs[i] : p->b, p->ldb, p->beta,
                    p->cs ? p->cs[i] : p->c, p->ldc);
    return 0;
}

int gpu_cublas_cholesky_solve(struct gpu_cublas *c, double *a, int k, int p, int n)
{
    const size_t width = (size_t)k;
    (void)c;
    cblas_dtrsm(CblasRowMajor, CblasRight, CblasLower, CblasTrans, CblasNonUnit, k - p - n, n, 1,
                a + (size_t)p * (width + 1), k, a + (size_t)(p + n) * width + p, k);
    return 0;
}

int gpu_cublas_cholesky_update(struct gpu_cublas *c, double *a, int k, int p, int n, int from,
                               int to)
{
    const double *l = a + (size_t)from * (size_t)k + p;
    (void)c;
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, k - from, to - from, n, -1, l, k, l, k, 1,
                a + (size_t)from * ((size_t)k + 1), k);
    return 0;
}

int gpu_cublas_solve_upper(struct gpu_cublas *c, float *x, const float *v, bool transposed, int m,
                           int n, int ld)
{
    (void)c;
    cblas_strsm(CblasRowMajor, CblasRight, CblasUpper, transposed ? CblasTrans : CblasNoTrans,
                CblasNonUnit, m, n, 1, v, ld, x, ld);
    return 0;
}

/* The factors are FP16 numbers; they are multiplied as FP32 numbers. */
int gpu_cublas_product_half(struct gpu_cublas *c, const struct gpu_product *p, const void *a,
                            const void *b, const float *factors)
{
    const size_t rows_a = (size_t)(p->a_transposed ? p->k : p->m),
                 rows_b = (size_t)(p->b_transposed ? p->n : p->k);
    const size_t count_a = (rows_a - 1) * (size_t)p->lda + (size_t)(p->a_transposed ? p->m : p->k),
                 count_b = (rows_b - 1) * (size_t)p->ldb + (size_t)(p->b_transposed ? p->k : p->n);
    float *x = random_floats(count_a, 1), *y = random_floats(count_b, 1);
    struct gpu_product q = *p;
    qt_to_f32(x, a, QT_F16, count_a);
    qt_to_f32(y, b, QT_F16, count_b);
    q.a = x;
    q.b = y;
    q.alpha = factors[0];
    q.beta = factors[1];
    products_of_halves++;
    gpu_cublas_product(c, &q);
    qt_free(x);
    qt_free(y);
    return 0;
}

/* ---- its kernels ---------------------------------------------------------------------------- */

static float to_tf32(float x)
{
    const uint32_t bits = (qt_f32_bits(x) + 0x1000) & ~0x1fffu;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

size_t gpu_math_tf32_width(size_t k)
{
    return 3 * qt_round_up(k, 32);
}

int gpu_math_split_tf32(float *z, const float *x, size_t rows, size_t k, size_t ld, bool transposed,
                        bool right, void *stream)
{
    const size_t width = gpu_math_tf32_width(k) / 3;
    (void)stream;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < width; i++) {
            const size_t run = i / GPU_TF32_DEPTH * GPU_TF32_DEPTH;
            const size_t step = qt_min_size(width - run, GPU_TF32_DEPTH);
            const float v = i >= k ? 0 : transposed ? x[i * ld + r] : x[r * ld + i];
            const float high = to_tf32(v), low = to_tf32(v - high);
            float *to = z + 3 * (r * width + run) + (i - run);
            to[0] = right ? high : low;
            to[step] = right ? low : high;
            to[2 * step] = high;
        }
    return 0;
}

int gpu_math_add_lower(double *h, const float *product, size_t i0, size_t rows, size_t cols,
                       size_t k, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j <= i0 + i; j++)
            h[(i0 + i) * k + j] += (double)product[i * cols + j];
    return 0;
}

int gpu_math_cholesky_tile(double *a, int n, size_t pitch, int *failed, void *stream)
{
    (void)stream;
    for (size_t j = 0; j < (size_t)n; j++)
        for (size_t i = j; i < (size_t)n; i++) {
            double sum = a[i * pitch + j];
            for (size_t l = 0; l < j; l++)
                sum -= a[i * pitch + l] * a[j * pitch + l];
            *failed |= i == j && !(sum > 0);
            a[i * pitch + j] = i == j ? sqrt(sum) : sum / a[j * pitch + j];
        }
    return 0;
}

static float half_scale(uint32_t largest)
{
    const int exponent = (int)(largest >> 23) - 127;
    return exponent > -100 && exponent < 128 ? ldexpf(1, 14 - exponent) : 1;
}

int gpu_math_largest(uint32_t *largest, const float *x, size_t rows, size_t k, size_t ld,
                     void *stream)
{
    (void)stream;
    for (size_t i = 0; i < rows * k; i++) {
        const uint32_t bits = qt_f32_bits(x[i / k * ld + i % k]) & 0x7fffffff;
        *largest = bits > *largest ? bits : *largest;
    }
    return 0;
}

int gpu_math_to_half(void *z, const uint32_t *largest, const float *x, size_t rows, size_t k,
                     size_t ld, void *stream)
{
    uint16_t *to = z;
    (void)stream;
    halved++;
    for (size_t i = 0; i < rows * k; i++)
        to[i] = qt_f32_to_f16(x[i / k * ld + i % k] * half_scale(*largest));
    return 0;
}

int gpu_math_half_factors(float *factors, const uint32_t *largest_a, const uint32_t *largest_b,
                          float alpha, float beta, void *stream)
{
    (void)stream;
    factors[0] = alpha / half_scale(*largest_a) / half_scale(*largest_b);
    factors[1] = beta;
    return 0;
}

int gpu_math_order_gram(float *h, double *a, const double *gram, const uint32_t *order,
                        double scale, double damp, size_t k, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++) {
            const size_t row = qt_max_size(order[i], order[j]);
            const float value = (float)(gram[row * k + order[i] + order[j] - row] * scale);
            h[i * k + j] = value + (i == j ? (float)damp : 0);
            if (i <= j)
                a[(k - 1 - i) * k + k - 1 - j] = (double)value + (i == j ? damp : 0);
        }
    return 0;
}

int gpu_math_copy_columns(float *y, size_t ldy, const float *x, size_t ldx, size_t columns,
                          size_t rows, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < rows * columns; i++)
        y[i / columns * ldy + i % columns] = x[i / columns * ldx + i % columns];
    return 0;
}

int gpu_math_order_again(float *h, double *a, const float *from, const uint32_t *order, size_t k,
                         void *stream)
{
    (void)stream;
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++) {
            h[i * k + j] = from[order[i] * k + order[j]];
            if (i <= j)
                a[(k - 1 - i) * k + k - 1 - j] = (double)h[i * k + j];
        }
    return 0;
}

int gpu_math_reverse(float *v, const double *a, size_t k, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++)
            v[i * k + j] = i <= j ? (float)a[(k - 1 - i) * k + k - 1 - j] : 0;
    return 0;
}

int gpu_math_order_columns(float *y, const float *x, const uint32_t *order, float scale, size_t m,
                           size_t k, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < m * k; i++)
        y[i] = x[i / k * k + order[i % k]] * scale;
    return 0;
}

int gpu_math_restore_columns(float *y, const float *x, const uint32_t *order, size_t m, size_t k,
                             void *stream)
{
    (void)stream;
    for (size_t i = 0; i < m * k; i++)
        y[i / k * k + order[i % k]] = x[i];
    return 0;
}

int gpu_math_row_dots(double *dots, const float *x, const float *y, size_t m, size_t k,
                      void *stream)
{
    (void)stream;
    for (size_t i = 0; i < m * k; i++)
        dots[i / k] = (i % k ? dots[i / k] : 0) + (double)x[i] * (double)y[i];
    return 0;
}

int gpu_math_scale(float *y, float factor, size_t count, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < count; i++)
        y[i] *= factor;
    return 0;
}

int gpu_math_head_pointers(void *pointers, const struct gpu_heads *a, void *stream)
{
    float **to = pointers;
    (void)stream;
    for (size_t i = 0; i < a->batch; i++) {
        const size_t sequence = i / a->heads, head = i % a->heads;
        const size_t query = sequence * a->query_step + head * a->dim;
        const size_t key = sequence * a->key_step + head / a->group * a->dim;
        to[GPU_HEAD_QUERIES * a->batch + i] = (float *)(uintptr_t)(a->q + query);
        to[GPU_HEAD_KEYS * a->batch + i] = (float *)(uintptr_t)(a->k + key);
        to[GPU_HEAD_VALUES * a->batch + i] = (float *)(uintptr_t)(a->v + key);
        to[GPU_HEAD_OUTPUTS * a->batch + i] = a->y + query;
        to[GPU_HEAD_SCORES * a->batch + i] = a->s + i * a->cells;
    }
    return 0;
}

int gpu_math_softmax(float *s, size_t batch, size_t rows, size_t keys, size_t r0, size_t lo,
                     size_t window, float softcap, const float *sinks, size_t heads, void *stream)
{
    (void)stream;
    for (size_t n = 0; n < batch * rows; n++) {
        const size_t sink = n / rows % heads;
        float *row = s + n * keys, most = sinks ? sinks[sink] : -INFINITY, sum = 0;
        const size_t at = r0 + n % rows, from = window && at >= window ? at - window + 1 : 0;
        for (size_t j = 0; j < keys; j++) {
            const float capped = softcap > 0 ? softcap * tanhf(row[j] / softcap) : row[j];
            row[j] = lo + j >= from && lo + j <= at ? capped : -INFINITY;
            most = fmaxf(most, row[j]);
        }
        sum = sinks ? expf(sinks[sink] - most) : 0;
        for (size_t j = 0; j < keys; j++)
            sum += row[j] = expf(row[j] - most);
        for (size_t j = 0; j < keys; j++)
            row[j] /= sum;
    }
    return 0;
}

int gpu_grad_pointers(void *pointers, const struct gpu_grad_heads *a, void *stream)
{
    float **to = pointers;
    const size_t rows = a->rows * a->group;
    (void)stream;
    for (size_t i = 0; i < a->parts; i++) {
        const size_t key = i / a->heads * a->key_step + i % a->heads * a->dim;
        to[GPU_GRAD_Q * a->parts + i] = a->q + i * rows * a->dim;
        to[GPU_GRAD_K * a->parts + i] = (float *)(uintptr_t)(a->k + key);
        to[GPU_GRAD_V * a->parts + i] = (float *)(uintptr_t)(a->v + key);
        to[GPU_GRAD_DY * a->parts + i] = a->dy + i * rows * a->dim;
        to[GPU_GRAD_DQ * a->parts + i] = a->dq + i * rows * a->dim;
        to[GPU_GRAD_DK * a->parts + i] = a->dk + key;
        to[GPU_GRAD_DV * a->parts + i] = a->dv + key;
        to[GPU_GRAD_P * a->parts + i] = a->p + i * rows * a->keys;
        to[GPU_GRAD_DS * a->parts + i] = a->ds + i * rows * a->keys;
    }
    return 0;
}

/* Copies a query head of a row at a time. */
static int stack(float *to, const float *from, const struct gpu_grad_heads *a, size_t width,
                 bool back)
{
    for (size_t part = 0; part < a->parts; part++)
        for (size_t row = 0; row < a->rows; row++)
            for (size_t g = 0; g < a->group; g++) {
                const size_t head = part % a->heads * a->group + g;
                const size_t x = part / a->heads * a->query_step + row * width + head * a->dim;
                const size_t e = ((part * a->rows + row) * a->group + g) * a->dim;
                memcpy(to + (back ? x : e), from + (back ? e : x), a->dim * sizeof *to);
            }
    return 0;
}

int gpu_grad_stack(float *stacked, const float *x, const struct gpu_grad_heads *a, size_t width,
                   void *stream)
{
    (void)stream;
    return stack(stacked, x, a, width, false);
}

int gpu_grad_unstack(float *x, const float *stacked, const struct gpu_grad_heads *a, size_t width,
                     void *stream)
{
    (void)stream;
    return stack(x, stacked, a, width, true);
}

int gpu_grad_softmax(const struct gpu_grad_heads *a, size_t r0, size_t lo, size_t window,
                     float softcap, const float *sinks, void *stream)
{
    for (size_t i = 0; i < a->parts * a->rows * a->group; i++) {
        float *p = a->p + i * a->keys, *ds = a->ds + i * a->keys, *caps = copy_floats(p, a->keys);
        const size_t head = i / a->group / a->rows % a->heads * a->group + i % a->group;
        float mean = 0;
        gpu_math_softmax(p, 1, 1, a->keys, r0 + i / a->group % a->rows, lo, window, softcap,
                         sinks ? sinks + head : NULL, 1, stream);
        for (size_t j = 0; j < a->keys; j++)
            mean += p[j] * ds[j];
        for (size_t j = 0; j < a->keys; j++) {
            const float cap = softcap > 0 ? tanhf(caps[j] / softcap) : 0;
            ds[j] = p[j] * (ds[j] - mean) * (1 - cap * cap);
        }
        qt_free(caps);
    }
    return 0;
}

int gpu_math_own_scores(const struct gpu_own_scores *a, void *stream)
{
    (void)stream;
    for (size_t h = 0; h < a->count * a->group; h++)
        for (size_t i = a->r0; i < a->r0 + a->rows; i++)
            for (size_t j = qt_max_size(qt_kv4_group(i), a->lo); j <= i; j++) {
                const float *exact = a->exact + h / a->group * a->dim;
                const float *q = a->q + (i - a->r0) * a->ldq + h * a->dim;
                float sum = 0;
                for (size_t d = 0; d < a->dim; d++)
                    sum += q[d] * cached_key(exact, a->ldk, i, j, d);
                a->s[(h * a->rows + i - a->r0) * a->keys + j - a->lo] = sum * a->scale;
            }
    return 0;
}

/* NCCL between ranks that are threads. A rank sees its memory only. */
static bool nccl_starts;

int gpu_nccl_open(struct gpu_nccl **out, char *text, size_t size, struct qt_comm *comm, int device,
                  void *stream, struct qt_err *err)
{
    (void)device;
    (void)stream;
    (void)err;
    *out = nccl_starts ? (struct gpu_nccl *)(void *)comm : NULL;
    snprintf(text, size, nccl_starts ? "by threads" : "through host memory");
    return QT_OK;
}

void gpu_nccl_close(struct gpu_nccl *c)
{
    (void)c;
}

static size_t nccl_calls;

int gpu_nccl_shift(struct gpu_nccl *c, const void *out, size_t out_bytes, size_t to, void *in,
                   size_t in_bytes, size_t from, struct qt_err *err)
{
    struct qt_comm *comm = (struct qt_comm *)(void *)c;
    (void)err;
    if (comm->rank == 0)
        nccl_calls++;
    comm->shift(comm, out, out_bytes, to, in, in_bytes, from);
    return QT_OK;
}

int gpu_nccl_broadcast(struct gpu_nccl *c, void *data, size_t bytes, size_t from,
                       struct qt_err *err)
{
    struct qt_comm *comm = (struct qt_comm *)(void *)c;
    (void)err;
    if (comm->rank == 0)
        nccl_calls++;
    comm->broadcast(comm, data, bytes, from);
    return QT_OK;
}

/* ---- against the CPU ------------------------------------------------------------------------ */

static struct qt_backend *open_simulated(void)
{
    struct qt_backend *be;
    with_cublas = true;
    assert_int_equal(qt_backend_cuda_open(&be, 0, NULL), QT_OK);
    assert_memory_equal(be->name, "simulated, cuBLAS 13.0.2, OpenBLAS ", 35);
    return be;
}

static size_t random_size(size_t from, size_t to)
{
    return from + random_u64() % (to - from + 1);
}

static void compare(const float *x, const float *y, size_t n, double tolerance)
{
    double most = 0;
    for (size_t i = 0; i < n; i++)
        most = fmax(most, fabs((double)x[i]));
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)x[i] - (double)y[i]) <= tolerance * most))
            fail_msg("%zu of %zu: %g, not %g", i, n, (double)y[i], (double)x[i]);
}

static void linear_case(size_t m, size_t n, size_t k)
{
    struct qt_backend *be = open_simulated(), *cpu = open_cpu();
    float *x = random_floats(m * k, 1), *w = random_floats(n * k, 1);
    float *want = random_floats(m * n, 1), *y = random_floats(m * n, 1);
    assert_int_equal(cpu->linear(cpu, want, x, w, NULL, m, n, k, NULL), QT_OK);
    assert_int_equal(be->linear(be, y, x, w, NULL, m, n, k, NULL), QT_OK);
    compare(want, y, m * n, 1e-5);
    qt_free(x);
    qt_free(w);
    qt_free(want);
    qt_free(y);
    be->close(be);
    cpu->close(cpu);
}

/* Gradients are added to the previous contents. */
static void gradients_case(size_t m, size_t n, size_t k)
{
    struct qt_backend *be = open_simulated(), *cpu = open_cpu();
    float *x = random_floats(m * k, 1), *w = random_floats(n * k, 1), *dy = random_floats(m * n, 1);
    float *dx = random_floats(m * k, 1), *dx2 = copy_floats(dx, m * k);
    float *dw = random_floats(n * k, 1), *dw2 = copy_floats(dw, n * k);
    assert_int_equal(cpu->linear_grad_x(cpu, dx, dy, w, true, m, n, k, NULL), QT_OK);
    assert_int_equal(be->linear_grad_x(be, dx2, dy, w, true, m, n, k, NULL), QT_OK);
    compare(dx, dx2, m * k, 1e-5);
    assert_int_equal(cpu->linear_grad_w(cpu, dw, dy, x, true, m, n, k, NULL), QT_OK);
    assert_int_equal(be->linear_grad_w(be, dw2, dy, x, true, m, n, k, NULL), QT_OK);
    compare(dw, dw2, n * k, 1e-5);
    float *const all[] = {x, w, dy, dx, dx2, dw, dw2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qt_free(all[i]);
    be->close(be);
    cpu->close(cpu);
}

static void products(void **state)
{
    (void)state;
    linear_case(3, 5, 7);
    gradients_case(3, 5, 7);
    assert_int_equal(products_of_parts, 0);
    linear_case(256, 256, 256);
    gradients_case(256, 256, 256);
    assert_int_equal(products_of_parts, 3);
    linear_case(300, 256, 2049);
    linear_case(random_size(256, 300), random_size(256, 300), random_size(2000, 4500));
    gradients_case(random_size(256, 300), random_size(256, 700), random_size(256, 2500));
}

/* Products of rounded factors, with values beyond those of FP16. */
static void half_case(size_t m, size_t n, size_t k, double scale)
{
    struct qt_backend *be = open_simulated(), *cpu = open_cpu();
    float *x = random_floats(m * k, scale), *w = random_floats(n * k, 1);
    float *want = random_floats(m * n, 1), *y = random_floats(m * n, 1);
    float *dw = random_floats(n * k, scale), *dw2 = copy_floats(dw, n * k);
    double *h, *g, most = 0;
    assert_int_equal(qt_array_new(&h, k * k, sizeof *h, NULL), QT_OK);
    assert_int_equal(qt_array_new(&g, k * k, sizeof *g, NULL), QT_OK);
    be->half = true;
    products_of_halves = 0;
    assert_int_equal(cpu->linear(cpu, want, x, w, NULL, m, n, k, NULL), QT_OK);
    assert_int_equal(be->linear(be, y, x, w, NULL, m, n, k, NULL), QT_OK);
    compare(want, y, m * n, 1e-3);
    assert_int_equal(cpu->linear_grad_w(cpu, dw, want, x, true, m, n, k, NULL), QT_OK);
    assert_int_equal(be->linear_grad_w(be, dw2, want, x, true, m, n, k, NULL), QT_OK);
    compare(dw, dw2, n * k, 1e-3);
    assert_int_equal(cpu->gram(cpu, h, x, m, k, NULL), QT_OK);
    assert_int_equal(be->gram(be, g, x, m, k, NULL), QT_OK);
    assert_true(products_of_halves >= 3);
    for (size_t i = 0; i < k; i++)
        most = fmax(most, h[i * k + i]);
    for (size_t i = 0; i < k * k; i++)
        assert_true(fabs(h[i] - g[i]) <= 1e-3 * most);
    float *const all[] = {x, w, want, y, dw, dw2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qt_free(all[i]);
    qt_free(h);
    qt_free(g);
    be->close(be);
    cpu->close(cpu);
}

/* Products that follow each other share factors in FP16, unless these have changed. */
static void shared_factors(void **state)
{
    enum { N = 256, COUNT = N * N };
    struct qt_backend *be = open_simulated(), *cpu = open_cpu();
    float *x[7], *want = random_floats(COUNT, 1);
    (void)state;
    for (size_t i = 0; i < 7; i++)
        x[i] = random_floats(COUNT, 1);
    be->half = true;
    halved = 0;
    assert_int_equal(be->linear(be, x[2], x[0], x[1], NULL, N, N, N, NULL), QT_OK);
    assert_int_equal(halved, 2);
    assert_int_equal(be->linear(be, x[4], x[0], x[3], NULL, N, N, N, NULL), QT_OK);
    assert_int_equal(be->linear_grad_w(be, x[6], x[0], x[3], true, N, N, N, NULL), QT_OK);
    assert_int_equal(halved, 3);
    assert_int_equal(be->linear(be, x[3], x[0], x[1], NULL, N, N, N, NULL), QT_OK);
    assert_int_equal(halved, 3);
    assert_int_equal(be->linear(be, x[4], x[0], x[3], NULL, N, N, N, NULL), QT_OK); /* a result */
    assert_int_equal(halved, 4);
    assert_int_equal(cpu->linear(cpu, want, x[0], x[3], NULL, N, N, N, NULL), QT_OK);
    compare(want, x[4], COUNT, 1e-3);
    assert_int_equal(be->scale(be, x[0], 3, COUNT, NULL), QT_OK);
    assert_int_equal(be->linear(be, x[4], x[0], x[3], NULL, N, N, N, NULL), QT_OK);
    assert_int_equal(halved, 5); /* x[3] is as before */
    assert_int_equal(cpu->linear(cpu, want, x[0], x[3], NULL, N, N, N, NULL), QT_OK);
    compare(want, x[4], COUNT, 1e-3);
    for (size_t i = 1; i < 6; i++) /* more than are stored */
        assert_int_equal(be->linear_grad_x(be, x[6], x[0], x[i], false, N, N, N, NULL), QT_OK);
    const size_t before = halved;
    assert_int_equal(be->linear(be, x[6], x[0], x[1], NULL, N, N, N, NULL), QT_OK);
    assert_int_equal(halved, before + 1);
    be->same_weights = true;
    assert_int_equal(be->copy_columns(be, x[2], 1, x[4], 1, 1, 1, NULL), QT_OK);
    for (size_t i = 0; i < 3; i++) { /* whatever else changes */
        assert_int_equal(be->linear(be, x[6], x[0], x[5], NULL, N, N, N, NULL), QT_OK);
        assert_int_equal(be->copy_columns(be, x[2], 1, x[4], 1, 1, 1, NULL), QT_OK);
    }
    assert_int_equal(halved, before + 1 + 4);
    assert_int_equal(be->linear_grad_x(be, x[6], x[0], x[5], false, N, N, N, NULL), QT_OK);
    assert_int_equal(halved, before + 1 + 5);
    be->same_weights = false;
    assert_int_equal(be->linear(be, x[6], x[0], x[5], NULL, N, N, N, NULL), QT_OK);
    assert_int_equal(halved, before + 1 + 6);
    for (size_t i = 0; i < 7; i++)
        qt_free(x[i]);
    qt_free(want);
    be->close(be);
    cpu->close(cpu);
}

static void halves(void **state)
{
    (void)state;
    half_case(256, 256, 256, 1);
    half_case(300, 257, 290, 1e9);
    half_case(256, 300, 261, 1e-9);
}

/* c = a b + c; the parts of only `rows` rows of a and b fit into memory at a time. */
static void panels_case(int m, int n, int k, int rows)
{
    struct gpu_products g = {.split_cells = rows * k};
    float *a = random_floats((size_t)m * (size_t)k, 1),
          *b = random_floats((size_t)n * (size_t)k, 1);
    float *want = random_floats((size_t)m * (size_t)n, 1);
    float *c = copy_floats(want, (size_t)m * (size_t)n);
    struct gpu_product p = {.m = m,
                            .n = n,
                            .k = k,
                            .alpha = 1,
                            .beta = 1,
                            .a = a,
                            .b = b,
                            .c = want,
                            .a_transposed = true,
                            .b_transposed = true,
                            .lda = m,
                            .ldb = k,
                            .ldc = n,
                            .count = 1};
    with_cublas = true;
    assert_int_equal(qt_gpu_open(&g.gpu, 0, NULL), QT_OK);
    gpu_cublas_product(NULL, &p);
    p.c = c;
    products_of_parts = 0;
    assert_int_equal(gpu_product(&g, &p, NULL), QT_OK);
    assert_int_equal(products_of_parts, qt_ceil_div((size_t)m, (size_t)rows) *
                                            qt_ceil_div((size_t)n, (size_t)rows) *
                                            qt_ceil_div((size_t)k, GPU_TF32_DEPTH));
    compare(want, c, (size_t)m * (size_t)n, 1e-5);
    gpu_products_free(&g);
    g.gpu->close(g.gpu);
    qt_free(a);
    qt_free(b);
    qt_free(want);
    qt_free(c);
}

static void panels(void **state)
{
    (void)state;
    panels_case(700, 300, 130, 300);
    panels_case(300, 700, 2050, 256);
    panels_case((int)random_size(600, 900), (int)random_size(600, 900), 128, 257);
}

static void gram_case(size_t m, size_t k)
{
    struct qt_backend *be = open_simulated(), *cpu = open_cpu();
    float *x = random_floats(m * k, 1);
    double *want, *h, most = 0;
    assert_int_equal(qt_array_new(&want, k * k, sizeof *want, NULL), QT_OK);
    assert_int_equal(qt_array_new(&h, k * k, sizeof *h, NULL), QT_OK);
    for (int twice = 0; twice < 2; twice++) { /* the second call adds to h */
        assert_int_equal(cpu->gram(cpu, want, x, m, k, NULL), QT_OK);
        assert_int_equal(be->gram(be, h, x, m, k, NULL), QT_OK);
    }
    for (size_t i = 0; i < k; i++)
        most = fmax(most, want[i * k + i]);
    for (size_t i = 0; i < k * k; i++)
        assert_true(fabs(want[i] - h[i]) <= 1e-5 * most);
    qt_free(x);
    qt_free(want);
    qt_free(h);
    be->close(be);
    cpu->close(cpu);
}

/* Factors a matrix of several blocks of columns: h = v v^T, in the order. */
static void factorization(void **state)
{
    enum { K = 1100, TOKENS = K + 50 };
    struct qt_backend *be = open_simulated();
    float *x = random_floats((size_t)TOKENS * K, 1), *h, *v, *product;
    double *gram;
    size_t *order;
    bool positive;
    (void)state;
    h = random_floats((size_t)K * K, 1);
    v = random_floats((size_t)K * K, 1);
    product = random_floats((size_t)K * K, 1);
    assert_int_equal(qt_array_new(&gram, K, K * sizeof *gram, NULL), QT_OK);
    assert_int_equal(qt_array_new(&order, K, sizeof *order, NULL), QT_OK);
    assert_int_equal(be->gram(be, gram, x, TOKENS, K, NULL), QT_OK);
    for (size_t i = 0; i < K; i++)
        order[i] = i * 7 % K;
    assert_int_equal(be->factor(be, h, v, &positive, gram, order, 0.5, 0.1, K, NULL), QT_OK);
    assert_true(positive);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, K, K, K, 1, v, K, v, K, 0, product, K);
    compare(h, product, (size_t)K * K, 1e-5);
    for (size_t i = 0; i < K; i++)
        for (size_t j = 0; j < i; j++)
            assert_true(v[i * K + j] == 0);
    gram[order[1050] * (K + 1)] = -1; /* in the first block: the last come first */
    assert_int_equal(be->factor(be, h, v, &positive, gram, order, 0.5, 0.1, K, NULL), QT_OK);
    assert_false(positive);
    qt_free(x);
    qt_free(h);
    qt_free(v);
    qt_free(product);
    qt_free(gram);
    qt_free(order);
    be->close(be);
}

static void gram_matrices(void **state)
{
    (void)state;
    gram_case(7, 5);
    gram_case(random_size(100, 3000), random_size(256, 400));
    gram_case(random_size(1025, 1300), 2048 + random_size(1, 200)); /* two panels, two batches */
}

static void attention_case(size_t sequences, struct qt_attention a, bool with_exact_keys)
{
    struct qt_backend *be = open_simulated(), *cpu = open_cpu();
    const size_t m = sequences * a.seqlen, wide = m * a.heads * a.head_dim;
    const size_t narrow = m * a.kv_heads * a.head_dim;
    const size_t width = a.kv_heads * a.head_dim;
    float *exact = with_exact_keys ? random_exact_keys(m, width, 1) : NULL;
    float *k = exact ? cached_keys(exact, m, width, a.seqlen) : random_floats(narrow, 2);
    float *q = random_floats(wide, 2), *v = random_floats(narrow, 1);
    float *want = random_floats(wide, 1), *y = random_floats(wide, 1);
    float *sinks = random_floats(a.heads, 2);
    a.exact_keys = exact;
    for (int with_sinks = 0; with_sinks < 2; with_sinks++) {
        a.sinks = with_sinks ? sinks : NULL;
        assert_int_equal(cpu->attention(cpu, want, q, k, v, m, &a, NULL), QT_OK);
        assert_int_equal(be->attention(be, y, q, k, v, m, &a, NULL), QT_OK);
        compare(want, y, wide, 1e-5);
    }
    if (!exact && a.heads < 100) {
        float *dx[6];
        for (size_t i = 0; i < 6; i++)
            dx[i] = random_floats(i < 2 ? wide : narrow, 1);
        a.sinks = a.window ? NULL : sinks;
        assert_int_equal(cpu->attention_grad(cpu, dx[0], dx[2], dx[4], y, q, k, v, m, &a, NULL),
                         QT_OK);
        assert_int_equal(be->attention_grad(be, dx[1], dx[3], dx[5], y, q, k, v, m, &a, NULL),
                         QT_OK);
        for (size_t i = 0; i < 6; i += 2) {
            compare(dx[i], dx[i + 1], i < 2 ? wide : narrow, 2e-5);
            qt_free(dx[i]);
            qt_free(dx[i + 1]);
        }
    }
    a.sinks = sinks;
    a.past = a.seqlen / 3; /* fewer queries than keys */
    a.seqlen -= a.past;
    assert_int_equal(cpu->attention(cpu, want, q, k, v, sequences * a.seqlen, &a, NULL), QT_OK);
    assert_int_equal(be->attention(be, y, q, k, v, sequences * a.seqlen, &a, NULL), QT_OK);
    compare(want, y, wide, 1e-5);
    qt_free(sinks);
    qt_free(q);
    qt_free(k);
    qt_free(exact);
    qt_free(v);
    qt_free(want);
    qt_free(y);
    be->close(be);
    cpu->close(cpu);
}

static void attention(void **state)
{
    (void)state;
    for (int exact = 0; exact < 2; exact++) {
        attention_case(
            3, (struct qt_attention){1, 4, 2, 8, 0.5f, 0, 0, NULL, NULL, 0, NULL, 0, false}, exact);
        attention_case(
            2, (struct qt_attention){300, 8, 2, 16, 0.5f, 0, 0, NULL, NULL, 0, NULL, 0, false},
            exact);
        attention_case(
            1, (struct qt_attention){513, 6, 6, 8, 0.5f, 5, 0, NULL, NULL, 0, NULL, 0, false},
            exact); /* a KV head per query head */
        attention_case(
            2, (struct qt_attention){270, 6, 1, 8, 0.5f, 0, 100, NULL, NULL, 0, NULL, 0, false},
            exact); /* one KV head */
        attention_case(
            1, (struct qt_attention){600, 2, 1, 128, 0.2f, 0, 257, NULL, NULL, 0, NULL, 0, false},
            exact); /* one head at a time, in parts */
        attention_case(
            1, (struct qt_attention){300, 1, 1, 256, 0.1f, 0, 0, NULL, NULL, 0, NULL, 0, false},
            exact); /* a batch of one product, as large as one that would be split */
        attention_case(
            1, (struct qt_attention){257, 1100, 550, 2, 1, 0, 0, NULL, NULL, 0, NULL, 0, false},
            exact); /* too many heads for one batch */
    }
}

/* The CPU computes it. */
static void biased_attention(void **state)
{
    enum { M = 60, KV = 2, DIM = 8, WIDE = 2 * KV * DIM, LIMIT = 1 };
    struct qt_backend *be = open_simulated(), *cpu = open_cpu();
    float *exact = random_exact_keys(M, KV * DIM, 1), *k = cached_keys(exact, M, KV * DIM, M / 2);
    float *q = random_floats(M * WIDE, 2), *v = random_floats(M * KV * DIM, 1);
    float *want = random_floats(M * WIDE, 1), *y = random_floats(M * WIDE, 1);
    float *bias = random_floats(2 * KV * M, 2), *sinks = random_floats(2 * KV, 2);
    struct qt_attention a = {.seqlen = M / 2,
                             .heads = 2 * KV,
                             .kv_heads = KV,
                             .head_dim = DIM,
                             .scale = 0.5f,
                             .bias = bias,
                             .bias_step = M,
                             .sinks = sinks,
                             .exact_keys = exact};
    (void)state;
    assert_int_equal(cpu->attention(cpu, want, q, k, v, M, &a, NULL), QT_OK);
    assert_int_equal(be->attention(be, y, q, k, v, M, &a, NULL), QT_OK);
    assert_memory_equal(want, y, M * WIDE * sizeof *y);
    a.past = M / 2 - 5; /* the last queries */
    a.seqlen = 5;
    assert_int_equal(cpu->attention(cpu, want, q, k, v, 2 * a.seqlen, &a, NULL), QT_OK);
    assert_int_equal(be->attention(be, y, q, k, v, 2 * a.seqlen, &a, NULL), QT_OK);
    assert_memory_equal(want, y, 2 * a.seqlen * WIDE * sizeof *y);
    float *dx[2][3];
    for (int i = 0; i < 2; i++) {
        struct qt_backend *on = i ? be : cpu;
        for (size_t j = 0; j < 3; j++)
            dx[i][j] = random_floats(M * WIDE, 1);
        a = (struct qt_attention){.seqlen = M / 2, .heads = 2 * KV, .kv_heads = KV};
        a.head_dim = DIM;
        a.scale = 0.5f;
        a.bias = bias;
        a.bias_step = M;
        assert_int_equal(
            on->attention_grad(on, dx[i][0], dx[i][1], dx[i][2], want, q, k, v, M, &a, NULL),
            QT_OK);
    }
    for (size_t j = 0; j < 3; j++) {
        assert_memory_equal(dx[0][j], dx[1][j], (size_t)M * (j ? KV * DIM : WIDE) * sizeof *y);
        qt_free(dx[0][j]);
        qt_free(dx[1][j]);
    }
    assert_int_equal(be->clip(be, y, LIMIT, M * WIDE, NULL), QT_OK);
    assert_int_equal(cpu->clip(cpu, want, LIMIT, M * WIDE, NULL), QT_OK);
    assert_memory_equal(want, y, M * WIDE * sizeof *y);
    qt_free(exact);
    qt_free(k);
    qt_free(q);
    qt_free(v);
    qt_free(want);
    qt_free(y);
    qt_free(bias);
    qt_free(sinks);
    be->close(be);
    cpu->close(cpu);
}

/* ---- rounding ------------------------------------------------------------------------------- */

enum kind { PLAIN, ZERO_ROWS, ZERO_GROUP, DEAD_CHANNELS, HUGE_VALUES, TINY_VALUES, KINDS };

static double *random_hessian(size_t k, enum kind kind)
{
    const size_t m = k + k / 2 + 8;
    float *x = random_floats(m * k, 1);
    double *h;
    assert_int_equal(qt_array_new(&h, k * k, sizeof *h, NULL), QT_OK);
    for (size_t i = 0; i < m; i++) /* neighbours are correlated, channels differ in size */
        for (size_t j = k; j-- > 0;)
            x[i * k + j] = (x[i * k + j] + (j ? x[i * k + j - 1] : 0)) *
                           (j % 7 == 0 ? 4.0f : 1.0f) *
                           (kind == DEAD_CHANNELS && j % 5 == 2 && k > 5 ? 0.0f : 1.0f);
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j <= i; j++)
            for (size_t t = 0; t < m; t++)
                h[i * k + j] += (double)x[t * k + i] * (double)x[t * k + j];
    qt_free(x);
    return h;
}

static float *random_weights(size_t n, size_t k, enum kind kind)
{
    float *w = random_floats(n * k, kind == HUGE_VALUES ? 1e30 : kind == TINY_VALUES ? 1e-30 : 0.1);
    for (size_t i = 0; i < n * k; i++)
        if ((kind == ZERO_ROWS && i / k % 3 == 0) || (kind == ZERO_GROUP && i % k < 32))
            w[i] = 0;
    return w;
}

/* Without a Hessian the codes are nearly all the same. In a matrix of few groups the error differs
 * by up to 1.2e-2 if the search chooses one of two nearly equal scales. */
static void plain_case(struct qt_backend *be, const char *text, const struct qt_matrix *m,
                       const float *importance)
{
    struct qt_error error[2];
    for (int on = 0; on < 2; on++) {
        struct qt_spec spec;
        struct qt_packed p;
        assert_int_equal(qt_spec_parse(&spec, text, NULL), QT_OK);
        assert_int_equal(
            qt_packed_quantize_on(on ? be : NULL, &p, &spec, m, importance, &error[on], NULL),
            QT_OK);
        qt_packed_free(&p);
    }
    const double near = m->n * m->k < 4000 ? 2e-2 : 5e-3;
    if (!(fabs(error[1].sum_e2 - error[0].sum_e2) <= near * error[0].sum_e2))
        fail_msg("%s, %zu x %zu: squared error %g, not %g", text, m->n, m->k, error[1].sum_e2,
                 error[0].sum_e2);
}

/* Rounds a matrix on the CPU and on the simulated device, and compares their errors. */
static void round_case(const char *text, size_t n, size_t k, enum kind kind)
{
    struct qt_backend *be = open_simulated();
    double *h = random_hessian(k, kind);
    float *w = random_weights(n, k, kind), *importance = random_floats(k, 1);
    for (size_t i = 0; i < k; i++)
        importance[i] *= importance[i];
    const struct qt_matrix m = {w, QT_F32, n, k, "test", "w"};
    struct qt_solve_report report[2];
    struct qt_packed p[2];
    for (int on = 0; on < 2; on++) {
        struct qt_spec spec;
        struct qt_factor f;
        struct qt_err err = {0};
        double stored;
        float *q;
        assert_int_equal(qt_spec_parse(&spec, text, &err), QT_OK);
        assert_int_equal(qt_packed_describe(&p[on], &spec, n, k, &err), QT_OK);
        const struct qt_factor_options opt = {
            .damp = 0.01, .group = qt_packed_group(&p[on]), .backend = on ? be : NULL};
        assert_int_equal(qt_factor_new(&f, h, k, &opt, &err), QT_OK);
        /* The source weights are on the device or not; the rounded ones are those that are
         * stored. */
        float *rounded = random_floats(n * k, 1);
        const struct qt_place place = {.w = n % 2 ? w : NULL, .rounded = rounded};
        assert_int_equal(
            qt_packed_round(&p[on], &spec, &m, &f, be, &place, NULL, &report[on], &err), QT_OK);
        assert_true((p[on].codes != NULL) == (on == 1));
        assert_int_equal(qt_packed_complete(&p[on], &m, NULL, &err), QT_OK);
        q = random_floats(n * k, 1);
        assert_int_equal(qt_packed_weights(q, &p[on], &err), QT_OK);
        if (on)
            assert_memory_equal(q, rounded, n * k * sizeof *q);
        qt_free(rounded);
        /* The reported error is that of the stored values. */
        assert_int_equal(qt_solve_error(&stored, &f, w, q, n, &err), QT_OK);
        if (!(fabs(stored - report[on].after_descent) <= 1e-3 * report[on].after_descent))
            fail_msg("%s, %zu x %zu, kind %d: %g is reported, %g stored", text, n, k, (int)kind,
                     report[on].after_descent, stored);
        qt_free(q);
        qt_factor_free(&f);
    }
    /* In a small matrix one other code is a larger share of the error. */
    const double near = n * k < 4000 ? 1e-2 : 2e-3;
    if (!(fabs(report[1].before - report[0].before) <= near * report[0].before &&
          report[1].after_compensation <= 1.1 * report[0].after_compensation &&
          report[1].after_descent <= (n * k < 4000 ? 1.1 : 1.02) * report[0].after_descent))
        fail_msg("%s, %zu x %zu, kind %d: errors %g, %g, %g, not %g, %g, %g", text, n, k, (int)kind,
                 report[1].before, report[1].after_compensation, report[1].after_descent,
                 report[0].before, report[0].after_compensation, report[0].after_descent);
    for (int on = 0; on < 2; on++)
        qt_packed_free(&p[on]);
    plain_case(be, text, &m, NULL);
    plain_case(be, text, &m, importance);
    qt_free(importance);
    qt_free(h);
    qt_free(w);
    be->close(be);
}

static void rounding(void **state)
{
    static const char *const specs[] = {"nf4",
                                        "nf3:g=32",
                                        "nf2:g=64",
                                        "lut3",
                                        "int2",
                                        "iq4nl",
                                        "mxfp4",
                                        "nvfp4",
                                        "int4",
                                        "int4:zero=group,g=32",
                                        "int3:zero=group",
                                        "w4ax:rotate=none",
                                        "int8",
                                        "int8:zero=group,g=256",
                                        "fp6",
                                        "fp4",
                                        "fp8",
                                        "nf4:g=256"};
    (void)state;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        round_case(specs[i], i % 6 == 0 ? 130 : 20, 132 + random_size(0, 9), PLAIN);
        round_case(specs[i], 1, 128, PLAIN);
        round_case(specs[i], 3, 7, PLAIN);
        round_case(specs[i], 9, 64 + random_size(0, 60), (enum kind)(1 + i % (KINDS - 1)));
    }
    round_case("nf3", 5, 300, PLAIN);
    round_case("nf4", 258, 580 + random_size(0, 9), PLAIN); /* two spans */
    round_case("fp5", 5, 300, PLAIN);
    round_case("int4:g=256", 5, 600, PLAIN);
    round_case("mix24", 36, 260, PLAIN);
    round_case("mix24:g=8,g2=8,outliers=0.03", 17, 140, PLAIN);
    round_case("mix24:four=1,outliers=0", 3, 7, PLAIN);
    round_case("mix24:ocrit=abs", 36, 260, PLAIN);
    /* more outliers than weights with a gain */
    round_case("mix24:four=0,outliers=0.03", 36, 34, ZERO_GROUP);
    round_case("mix24:polish=1,order=natural", 9, 64 + random_size(0, 60), ZERO_ROWS);
    round_case("mix24:polish=1,four=0", 9, 130, ZERO_GROUP);
    round_case("mix24:polish=1", 9, 130, DEAD_CHANNELS);
    round_case("mix24:polish=1", 9, 130, HUGE_VALUES);
    round_case("mix24:polish=1", 9, 130, TINY_VALUES);
}

static void expect_same_packed(const struct qt_packed *a, const struct qt_packed *b)
{
    assert_true(a->nsections == b->nsections && a->scale_exp2 == b->scale_exp2);
    for (size_t i = 0; i < a->nsections; i++)
        assert_memory_equal(a->section[i].data, b->section[i].data, a->section[i].bytes);
}

/* Matrices that are rounded together, more than there are lanes, have the bytes that each has
 * alone. One of them has no Hessian. */
static void several_matrices(void **state)
{
    enum { MATRICES = GPU_LANES + 3, PLAIN_ONE = 4 };
    static const char *const specs[] = {"nf4", "int4:g=32", "mix24", "fp6", "nf3:g=32"};
    struct qt_backend *be = open_simulated();
    struct qt_factor factor[MATRICES] = {0};
    struct qt_packed alone[MATRICES], together[MATRICES];
    struct qt_solve_report one[MATRICES], many[MATRICES];
    struct qt_rounding *r[MATRICES];
    struct qt_matrix m[MATRICES];
    struct qt_err err = {0};
    (void)state;
    for (size_t i = 0; i < MATRICES; i++) {
        const size_t n = random_size(1, 40), k = random_size(100, 700);
        struct qt_factor *f = i == PLAIN_ONE ? NULL : &factor[i];
        struct qt_spec spec;
        double *h = random_hessian(k, PLAIN);
        m[i] = (struct qt_matrix){random_weights(n, k, PLAIN), QT_F32, n, k, "test", "w"};
        assert_int_equal(qt_spec_parse(&spec, specs[i % 5], &err), QT_OK);
        assert_int_equal(qt_packed_describe(&alone[i], &spec, n, k, &err), QT_OK);
        const struct qt_factor_options opt = {
            .damp = 0.01, .group = qt_packed_group(&alone[i]), .backend = be};
        assert_int_equal(qt_factor_new(&factor[i], h, k, &opt, &err), QT_OK);
        assert_int_equal(qt_packed_round(&alone[i], &spec, &m[i], f, be, NULL, NULL, &one[i], &err),
                         QT_OK);
        assert_int_equal(
            qt_rounding_new(&r[i], &together[i], &spec, &m[i], f, be, NULL, NULL, &many[i], &err),
            QT_OK);
        qt_free(h);
    }
    most_lanes = 0;
    assert_int_equal(qt_rounding_run(r, MATRICES, &err), QT_OK);
    assert_int_equal(most_lanes, GPU_LANES);
    for (size_t i = 0; i < MATRICES; i++) {
        qt_rounding_free(r[i]);
        assert_memory_equal(&one[i], &many[i], sizeof *one);
        assert_int_equal(qt_packed_complete(&alone[i], &m[i], NULL, &err), QT_OK);
        assert_int_equal(qt_packed_complete(&together[i], &m[i], NULL, &err), QT_OK);
        expect_same_packed(&alone[i], &together[i]);
        qt_packed_free(&alone[i]);
        qt_packed_free(&together[i]);
        qt_factor_free(&factor[i]);
        qt_free((void *)(uintptr_t)m[i].data);
    }
    qt_rounding_free(NULL);
    be->close(be);
}

/* ---- quantized activations ------------------------------------------------------------------ */

static struct qt_act act_of(const struct gpu_input *a)
{
    return (struct qt_act){.k = a->k,
                           .order = (uint32_t *)(uintptr_t)a->order,
                           .factor = (float *)(uintptr_t)a->factor,
                           .bits = (uint8_t *)(uintptr_t)a->bits,
                           .clip = a->clip,
                           .scales = (enum qt_act_scales)a->scales,
                           .rotate = a->rotate};
}

int gpu_round_inputs(const struct gpu_input *a, void *stream)
{
    const struct qt_act act = act_of(a);
    (void)stream;
    return qt_act_apply(a->y, a->x, a->m, &act, NULL) < 0;
}

int gpu_arrange_inputs(const struct gpu_input *a, void *stream)
{
    const struct qt_act act = act_of(a);
    (void)stream;
    return qt_act_arrange(a->y, a->x, a->m, &act, NULL) < 0;
}

int gpu_input_errors(const struct gpu_input_errors *a, void *stream)
{
    const size_t blocks = qt_ceil_div(a->in.k, QT_ACT_BLOCK),
                 tiles = qt_ceil_div(a->in.m, GPU_ERROR_TOKENS);
    const struct qt_act act = act_of(&a->in);
    struct qt_act_rounding how[GPU_ROUNDINGS];
    const size_t sums = (size_t)a->count * blocks;
    double *d = NULL;
    int rc;
    (void)stream;
    QT_TRY(qt_array_new(&d, 2, sums * sizeof *d, NULL));
    for (int i = 0; i < a->count; i++)
        how[i] = (struct qt_act_rounding){a->how[i].narrow ? 4 : 8, a->how[i].clip};
    for (size_t tile = 0; tile < tiles; tile++) {
        const size_t first = tile * GPU_ERROR_TOKENS;
        QT_TRY(input_errors_by_definition(NULL, d, d + sums, a->in.x + first * a->in.k, a->g,
                                          qt_min_size(GPU_ERROR_TOKENS, a->in.m - first), &act, how,
                                          (size_t)a->count, NULL));
        for (size_t i = 0; i < 2 * sums; i++)
            a->part[i * tiles + tile] = d[i];
    }
done:
    qt_free(d);
    return rc < 0;
}

int gpu_math_gather(float *y, const float *x, const uint32_t *rows, const float *factor, size_t m,
                    size_t n, uint32_t *largest, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            y[i * n + j] = x[(rows ? rows[i] : i) * n + j] * (factor ? factor[i] : 1);
            const uint32_t bits = qt_f32_bits(y[i * n + j]) & 0x7fffffff;
            if (largest && bits > *largest)
                *largest = bits;
        }
    return 0;
}

int gpu_math_add(float *y, const float *x, size_t count, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < count; i++)
        y[i] += x[i];
    return 0;
}

int gpu_math_widen(float *y, const void *x, bool bf16, size_t count, void *stream)
{
    (void)stream;
    qt_to_f32(y, x, bf16 ? QT_BF16 : QT_F16, count);
    return 0;
}

static void round_inputs(void **state)
{
    enum { M = 5 };
    struct qt_backend *be = open_simulated();
    (void)state;
    for (int i = 0; i < 6; i++) {
        const size_t k = 100 + random_size(0, 300);
        float *x = random_floats(M * k, 1), *y = random_floats(M * k, 1),
              *want = random_floats(M * k, 1);
        struct qt_act act;
        assert_int_equal(qt_act_new(&act, k, i % 2 ? 4 : 8, NULL), QT_OK);
        act.order[0] = (uint32_t)k - 1;
        act.order[k - 1] = 0;
        act.factor[3] = 0.25f;
        act.clip = 0.75f;
        act.scales = (enum qt_act_scales)(i % 3);
        act.rotate = i > 2;
        assert_int_equal(qt_act_apply(want, x, M, &act, NULL), QT_OK);
        assert_int_equal(qt_act_apply_on(be, y, x, M, &act, NULL), QT_OK);
        assert_memory_equal(y, want, M * k * sizeof *y);
        qt_act_free(&act);
        qt_free(x);
        qt_free(y);
        qt_free(want);
    }
    be->close(be);
}

/* Pieces of rows, of which the last one is shorter, and a last channel block that is narrower. */
static void block_grams(void **state)
{
    enum { N = 300, K = 300, CELLS = 3 * QT_ACT_BLOCK * QT_ACT_BLOCK };
    struct qt_backend *be = open_simulated();
    float *w = random_floats(N * K, 1), *g = random_floats(CELLS, 1),
          *want = random_floats(CELLS, 1);
    (void)state;
    for (size_t n = 0; n < N; n += n < 5 ? 1 : 97) {
        memcpy(want, g, CELLS * sizeof *g);
        block_grams_by_definition(want, w, n, K);
        assert_int_equal(be->block_grams(be, g, w, n, K, NULL), QT_OK);
        for (size_t i = 0; i < CELLS; i++)
            assert_true(fabsf(g[i] - want[i]) <= 1e-4f * (1 + fabsf(want[i])));
    }
    qt_free(w);
    qt_free(g);
    qt_free(want);
    be->close(be);
}

/* Tiles of tokens add up to the sums over all tokens. */
static void input_errors(void **state)
{
    enum { M = 2 * GPU_ERROR_TOKENS + 3, K = 300, BLOCKS = 3, SIDE = QT_ACT_BLOCK };
    static const struct qt_act_rounding how[] = {{8, 1}, {4, 0.75f}};
    struct qt_backend *be = open_simulated();
    float *x = random_floats(M * K, 1), *g = random_floats(BLOCKS * SIDE * SIDE, 0.1f);
    double d[4 * BLOCKS], want[4 * BLOCKS]; /* then squares */
    struct qt_act act;
    (void)state;
    for (size_t i = 0; i < BLOCKS * SIDE; i++)
        g[i * SIDE + i % SIDE] = 1;
    assert_int_equal(qt_act_new(&act, K, 4, NULL), QT_OK);
    act.rotate = true;
    assert_int_equal(
        input_errors_by_definition(NULL, want, want + 2 * BLOCKS, x, g, M, &act, how, 2, NULL),
        QT_OK);
    assert_int_equal(be->input_errors(be, d, d + 2 * BLOCKS, x, g, M, &act, how, 2, NULL), QT_OK);
    for (size_t i = 0; i < 4 * BLOCKS; i++)
        assert_true(fabs(d[i] - want[i]) <= 1e-9 * want[i]);
    qt_act_free(&act);
    qt_free(x);
    qt_free(g);
    be->close(be);
}

/* ---- ranks ---------------------------------------------------------------------------------- */

/* A backend apart from the host: the CPU backend, with the functions of the CUDA backend for
 * Hessians, rounding and ranks. */
static _Thread_local struct qt_backend *cuda;

static int apart_factor(struct qt_backend *be, float *h, float *v, bool *positive,
                        const double *gram, const size_t *order, double scale, double damp,
                        size_t k, struct qt_err *err)
{
    (void)be;
    return cuda->factor(cuda, h, v, positive, gram, order, scale, damp, k, err);
}

static int apart_regress(struct qt_backend *be, float *s, double *explained, const float *c,
                         const float *v, const size_t *order, double scale, size_t m, size_t k,
                         struct qt_err *err)
{
    (void)be;
    return cuda->regress(cuda, s, explained, c, v, order, scale, m, k, err);
}

static int apart_round(struct qt_backend *be, struct qt_round *const *jobs, size_t count,
                       struct qt_err *err)
{
    (void)be;
    return cuda->round(cuda, jobs, count, err);
}

static int apart_group_range(struct qt_backend *be, float *largest, float *smallest, const float *w,
                             size_t n, size_t k, size_t group, struct qt_err *err)
{
    (void)be;
    return cuda->group_range(cuda, largest, smallest, w, n, k, group, err);
}

static int apart_arrange_inputs(struct qt_backend *be, float *y, const float *x, size_t m,
                                const struct qt_act *act, struct qt_err *err)
{
    (void)be;
    return cuda->arrange_inputs(cuda, y, x, m, act, err);
}

static int apart_block_grams(struct qt_backend *be, float *g, const float *w, size_t n, size_t k,
                             struct qt_err *err)
{
    (void)be;
    return cuda->block_grams(cuda, g, w, n, k, err);
}

static int apart_input_errors(struct qt_backend *be, double *d, double *squares, const float *x,
                              const float *g, size_t m, const struct qt_act *act,
                              const struct qt_act_rounding *how, size_t count, struct qt_err *err)
{
    (void)be;
    return cuda->input_errors(cuda, d, squares, x, g, m, act, how, count, err);
}

static void apart_open(struct qt_backend *apart, const struct qt_backend *cpu)
{
    *apart = *cpu;
    apart->host = false;
    apart->factor = apart_factor;
    apart->regress = apart_regress;
    apart->round = apart_round;
    apart->group_range = apart_group_range;
    apart->arrange_inputs = apart_arrange_inputs;
    apart->block_grams = apart_block_grams;
    apart->input_errors = apart_input_errors;
}

static int apart_link(struct qt_backend *be, struct qt_comm *comm, char *text, size_t size,
                      struct qt_err *err)
{
    int rc = cuda->link(cuda, comm, text, size, err);
    be->linked = cuda->linked;
    return rc;
}

static int apart_shift(struct qt_backend *be, const void *out, size_t out_bytes, size_t to,
                       void *in, size_t in_bytes, size_t from, struct qt_err *err)
{
    (void)be;
    return cuda->shift(cuda, out, out_bytes, to, in, in_bytes, from, err);
}

static int apart_broadcast(struct qt_backend *be, void *data, size_t bytes, size_t from,
                           struct qt_err *err)
{
    (void)be;
    return cuda->broadcast(cuda, data, bytes, from, err);
}

/* Two chunks of tokens (pack/sequential.c), so that two ranks have work. */
enum { RANK_SEQLEN = 64, RANK_SAMPLES = 16384 / RANK_SEQLEN + 8 };

static size_t apart_room(struct qt_backend *be)
{
    (void)be;
    return SIZE_MAX;
}

struct rank_run {
    const char *model, *scheme;
    char out[300];
    uint32_t ids[RANK_SAMPLES * RANK_SEQLEN];
};

static int quantize_as_rank(struct qt_comm *c, void *ctx, struct qt_err *err)
{
    const struct rank_run *r = ctx;
    struct qt_backend *cpu = NULL, apart;
    struct qt_quantize_report report = {0};
    struct qt_ckpt *ckpt = NULL;
    int rc;
    QT_TRY(qt_backend_cpu_open(&cpu, err));
    QT_TRY(qt_backend_cuda_open(&cuda, 0, err));
    apart_open(&apart, cpu);
    apart.room = apart_room;
    apart.link = apart_link;
    apart.shift = apart_shift;
    apart.broadcast = apart_broadcast;
    coded_functions(&apart);
    const struct qt_calibration data = {
        .ids = r->ids, .samples = RANK_SAMPLES, .seqlen = RANK_SEQLEN, .backend = &apart};
    struct qt_learn_options learn;
    QT_TRY(qt_learn_parse(&learn, "passes=1,lr=1e-2", err));
    const struct qt_quantize_options opt = {.plan = {.scheme = r->scheme, .calibrated = true},
                                            .calibration = &data,
                                            .learn = strstr(r->scheme, "learn") ? &learn : NULL,
                                            .backend = &apart,
                                            .comm = c,
                                            .out_dir = r->out};
    QT_TRY(qt_ckpt_open(&ckpt, r->model, err));
    QT_TRY(qt_quantize(&report, ckpt, &opt, err));
done:
    rc = qt_comm_meet(c, rc, err);
    json_decref(report.document);
    qt_ckpt_close(ckpt);
    if (cuda)
        cuda->close(cuda);
    if (cpu)
        cpu->close(cpu);
    return rc;
}

static void expect_same_checksums(const char *dir, const char *a, const char *b)
{
    char *text[2], path[300];
    size_t size;
    struct qt_err err;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s/SHA256SUMS", dir, i ? b : a);
        expect_ok(path, qt_file_read(&text[i], &size, path, 1 << 16, &err), &err);
    }
    assert_string_equal(text[0], text[1]);
    qt_free(text[0]);
    qt_free(text[1]);
}

/* Ranks whose GPUs are connected, or not, make the bytes of one process. fit=minmax is rounded on
 * the host, so that packed matrices are sent; the scales of learn=1 are in backend memory. One
 * process rounds matrices of several experts together, ranks do not. */
static void ranks_share_calibration(void **state)
{
    static const struct {
        const char *model, *scheme;
    } runs[] = {{"tests/golden/models/llama", "nf4:g=32"},
                {"tests/golden/models/llama", "mix24:fit=minmax"},
                {"tests/golden/models/llama", "nf4:g=32,learn=1"},
                {"tests/golden/models/qwen3_moe", "nf4:g=32"}};
    struct rank_run *r = calloc(1, sizeof *r);
    char *dir = fixture_dir();
    struct world w;
    (void)state;
    assert_non_null(r);
    with_cublas = true;
    for (size_t i = 0; i < RANK_SAMPLES * RANK_SEQLEN; i++)
        r->ids[i] = (uint32_t)(uniform() * 97);
    for (size_t s = 0; s < sizeof runs / sizeof *runs; s++) {
        struct qt_err err;
        r->model = runs[s].model;
        r->scheme = runs[s].scheme;
        snprintf(r->out, sizeof r->out, "%s/one", dir);
        times_tuned = most_lanes = 0;
        expect_ok("one", quantize_as_rank(NULL, r, &err), &err);
        assert_true(most_lanes >= (strstr(r->model, "moe")      ? 4
                                   : strstr(r->scheme, "mix24") ? 0
                                                                : 3));
        assert_int_equal(times_tuned > 0, strstr(r->scheme, "learn") != NULL);
        for (int starts = 0; starts < 2; starts++) {
            nccl_starts = starts;
            nccl_calls = 0;
            snprintf(r->out, sizeof r->out, "%s/two", dir);
            run_world(&w, 2, quantize_as_rank, r);
            for (size_t i = 0; i < w.size; i++)
                expect_ok(r->scheme, ranks[i].rc, &ranks[i].err);
            assert_true((nccl_calls > 0) == nccl_starts);
            expect_same_checksums(dir, "one", "two");
            assert_int_equal(qt_dir_remove(fixture_path(dir, "two"), NULL), QT_OK);
        }
        assert_int_equal(qt_dir_remove(fixture_path(dir, "one"), NULL), QT_OK);
    }
    fixture_remove(dir);
    free(r);
}

/* Weights with activation outliers that do not change the model: every seventh weight of the norms
 * in front of sublayers is multiplied by 64, and the columns that read it are divided by that. */
static int outlier_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    static const char *const readers[] = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"};
    struct qt_weights plain = qt_weights_of_ckpt(ctx);
    size_t shape[QT_MAX_DIMS];
    int rc = plain.load(plain.ctx, name, dst, err), ndim;
    bool reads = false;
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++)
        reads |= strstr(name, readers[i]) != NULL;
    plain.shape(plain.ctx, name, &ndim, shape);
    for (size_t i = 3; rc == QT_OK && strstr(name, "layernorm.weight") && i < shape[0]; i += 7)
        dst[i] *= 64;
    for (size_t i = 0; rc == QT_OK && reads && i < shape[0] * shape[1]; i++)
        dst[i] /= i % shape[1] % 7 == 3 ? 64 : 1;
    return rc;
}

static bool outlier_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    struct qt_weights plain = qt_weights_of_ckpt(ctx);
    return plain.shape(plain.ctx, name, ndim, shape);
}

/* The activation plan is the same where weights and tokens are in the memory of a backend. */
static void activation_plans(void **state)
{
    enum { SAMPLES = 8, SEQLEN = 48 };
    static const char *const schemes[] = {"w4ax", "w4ax:a8max=0", "w4ax:scales=row"};
    struct qt_backend *cpu, apart;
    uint32_t ids[SAMPLES * SEQLEN];
    struct qt_ckpt *ckpt;
    struct qt_model *model;
    struct qt_err err;
    (void)state;
    with_cublas = true;
    for (size_t i = 0; i < SAMPLES * SEQLEN; i++)
        ids[i] = (uint32_t)(i * i % 89 + i % 7);
    expect_ok("CPU", qt_backend_cpu_open(&cpu, &err), &err);
    expect_ok("GPU", qt_backend_cuda_open(&cuda, 0, &err), &err);
    apart_open(&apart, cpu);
    expect_ok("checkpoint", qt_ckpt_open(&ckpt, "tests/golden/models/llama", &err), &err);
    const struct qt_weights source = {
        .dir = qt_ckpt_dir(ckpt), .ctx = ckpt, .shape = outlier_shape, .load = outlier_load};
    expect_ok("model", qt_model_open(&model, &source, &err), &err);
    for (size_t s = 0; s < sizeof schemes / sizeof *schemes; s++) {
        const struct qt_plan_options how = {.scheme = schemes[s], .calibrated = true};
        struct qt_act_plan acts[2];
        struct qt_plan plan;
        bool scaled = false;
        expect_ok(schemes[s], qt_plan_new(&plan, ckpt, &how, &err), &err);
        for (int i = 0; i < 2; i++) {
            const struct qt_calibration data = {
                .ids = ids, .samples = SAMPLES, .seqlen = SEQLEN, .backend = i ? &apart : cpu};
            const struct qt_quantize_options opt = {.calibration = &data, .out_dir = "out"};
            expect_ok(schemes[s], qt_act_plan_new(&acts[i], &plan, model, &source, &opt, &err),
                      &err);
        }
        for (size_t v = 0; v < acts[0].layers * QT_INPUTS; v++) {
            const struct qt_act *a = &acts[0].act[v], *b = &acts[1].act[v];
            assert_int_equal(a->k, b->k);
            assert_memory_equal(a->order, b->order, a->k * sizeof *a->order);
            assert_memory_equal(a->factor, b->factor, a->k * sizeof *a->factor);
            assert_memory_equal(a->bits, b->bits, qt_ceil_div(a->k, QT_ACT_BLOCK));
            assert_true(a->clip == b->clip);
            for (size_t c = 0; c < a->k; c++)
                scaled |= a->factor[c] != 1;
        }
        assert_true(scaled || s == 0);
        for (int i = 0; i < 2; i++)
            qt_act_plan_free(&acts[i]);
        qt_plan_free(&plan);
    }
    qt_model_close(model);
    qt_ckpt_close(ckpt);
    cuda->close(cuda);
    cpu->close(cpu);
}

static void without_cublas(void **state)
{
    struct qt_backend *be;
    struct qt_err err = {0};
    (void)state;
    with_cublas = false;
    closed = 0;
    assert_int_equal(qt_backend_cuda_open(&be, 0, &err), QT_E_NO_GPU);
    assert_string_equal(err.reason, "GPU 0 cannot run models: no cuBLAS: a test");
    assert_int_equal(closed, 1);
}

int main(void)
{
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),         cmocka_unit_test(halves),
        cmocka_unit_test(shared_factors),   cmocka_unit_test(panels),
        cmocka_unit_test(factorization),    cmocka_unit_test(gram_matrices),
        cmocka_unit_test(attention),        cmocka_unit_test(biased_attention),
        cmocka_unit_test(rounding),         cmocka_unit_test(several_matrices),
        cmocka_unit_test(round_inputs),     cmocka_unit_test(block_grams),
        cmocka_unit_test(input_errors),     cmocka_unit_test(ranks_share_calibration),
        cmocka_unit_test(activation_plans), cmocka_unit_test(without_cublas)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
