/*
 * cuBLAS, loaded at run time so that qtool also runs where it is not installed. The types and
 * constants repeat the C interface of cuBLAS, which has been stable since CUDA 11.
 */
#include "base/base.h"
#include "kernels/gpu/internal.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { POINTERS_TO_HOST = 0, POINTERS_TO_DEVICE = 1 };
enum { LEFT = 0, LOWER = 0, UPPER = 1, NON_UNIT = 0 };
enum {
    OP_N = 0,
    OP_T = 1,
    R_32F = 0,
    R_64F = 1,
    R_16F = 2,
    R_16BF = 14,
    COMPUTE_32F = 68,
    COMPUTE_64F = 70,
    COMPUTE_TF32 = 77,
    ALGO_DEFAULT = -1
};

typedef int create_fn(void **handle);
typedef int destroy_fn(void *handle);
typedef int set_stream_fn(void *handle, void *stream);
typedef int set_workspace_fn(void *handle, void *workspace, size_t bytes);
typedef int version_fn(void *handle, int *version);
typedef int gemm_fn(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha,
                    const void *a, int type_a, int lda, const void *b, int type_b, int ldb,
                    const void *beta, void *c, int type_c, int ldc, int compute, int algo);

typedef int strided_fn(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha,
                       const void *a, int type_a, int lda, long long step_a, const void *b,
                       int type_b, int ldb, long long step_b, const void *beta, void *c, int type_c,
                       int ldc, long long step_c, int count, int compute, int algo);

typedef int batched_fn(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha,
                       const void *const *a, int type_a, int lda, const void *const *b, int type_b,
                       int ldb, const void *beta, void *const *c, int type_c, int ldc, int count,
                       int compute, int algo);

typedef int pointer_mode_fn(void *handle, int mode);

typedef int strsm_fn(void *handle, int side, int uplo, int op_a, int diag, int m, int n,
                     const float *alpha, const float *a, int lda, float *b, int ldb);
typedef int dtrsm_fn(void *handle, int side, int uplo, int op_a, int diag, int m, int n,
                     const double *alpha, const double *a, int lda, double *b, int ldb);
typedef int dsyrk_fn(void *handle, int uplo, int op_a, int n, int k, const double *alpha,
                     const double *a, int lda, const double *beta, double *c, int ldc);

struct gpu_cublas {
    void *library, *handle;
    destroy_fn *destroy;
    set_stream_fn *set_stream;
    set_workspace_fn *set_workspace;
    gemm_fn *gemm;
    strided_fn *strided;
    batched_fn *batched;
    pointer_mode_fn *set_pointer_mode;
    strsm_fn *strsm;
    dtrsm_fn *dtrsm;
    dsyrk_fn *dsyrk;
};

/* Candidates, newest first. A library that the driver cannot run is skipped. */
static const char *const libraries[] = {
    "libcublas.so.13",
    "libcublas.so.12",
    "libcublas.so.11",
    "libcublas.so",
    "/usr/local/cuda/lib64/libcublas.so", /* installers put it here, where ld.so does not look */
};

/* Copies the result of dlsym, as ISO C does not define its conversion to a function pointer. */
static bool find(void *out, void *library, const char *name)
{
    void *symbol = dlsym(library, name);
    memcpy(out, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* A new stream makes cuBLAS forget the workspace. */
int gpu_cublas_move(struct gpu_cublas *c, void *stream, void *workspace, size_t bytes)
{
    const int status = c->set_stream(c->handle, stream);
    return status ? status : c->set_workspace(c->handle, workspace, bytes);
}

/* Creates the handle. Returns NULL or what failed. The workspace is set because cuBLAS would
 * otherwise allocate one during graph capture. */
static const char *connect(struct gpu_cublas *c, int *version, void *stream, void *workspace,
                           size_t bytes)
{
    create_fn *create;
    version_fn *get_version;
    if (!find(&create, c->library, "cublasCreate_v2") ||
        !find(&c->destroy, c->library, "cublasDestroy_v2") ||
        !find(&c->set_stream, c->library, "cublasSetStream_v2") ||
        !find(&c->set_workspace, c->library, "cublasSetWorkspace_v2") ||
        !find(&get_version, c->library, "cublasGetVersion_v2") ||
        !find(&c->gemm, c->library, "cublasGemmEx") ||
        !find(&c->strided, c->library, "cublasGemmStridedBatchedEx") ||
        !find(&c->batched, c->library, "cublasGemmBatchedEx") ||
        !find(&c->set_pointer_mode, c->library, "cublasSetPointerMode_v2") ||
        !find(&c->strsm, c->library, "cublasStrsm_v2") ||
        !find(&c->dtrsm, c->library, "cublasDtrsm_v2") ||
        !find(&c->dsyrk, c->library, "cublasDsyrk_v2"))
        return "libcublas.so lacks a required function";
    if (create(&c->handle) != 0)
        return "cublasCreate failed";
    if (gpu_cublas_move(c, stream, workspace, bytes) != 0 || get_version(c->handle, version) != 0)
        return "setting its stream or workspace failed";
    return NULL;
}

static void disconnect(struct gpu_cublas *c)
{
    if (c->handle)
        c->destroy(c->handle);
    if (c->library)
        dlclose(c->library);
    *c = (struct gpu_cublas){0};
}

struct gpu_cublas *gpu_cublas_open(char *text, size_t size, void *stream, void *workspace,
                                   size_t bytes)
{
    struct gpu_cublas *c = NULL;
    const char *fault = "libcublas.so is not installed";
    int version = 0;
    if (qt_array_new(&c, 1, sizeof *c, NULL) < 0)
        fault = "out of memory";
    for (size_t i = 0; c && fault && i < sizeof libraries / sizeof *libraries; i++) {
        c->library = dlopen(libraries[i], RTLD_NOW | RTLD_LOCAL);
        if (!c->library)
            continue;
        fault = connect(c, &version, stream, workspace, bytes);
        if (fault)
            disconnect(c);
    }
    if (fault) {
        snprintf(text, size, "no cuBLAS: %s", fault);
        gpu_cublas_close(c);
        return NULL;
    }
    snprintf(text, size, "cuBLAS %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return c;
}

void gpu_cublas_close(struct gpu_cublas *c)
{
    if (c)
        disconnect(c);
    qt_free(c);
}

/* cuBLAS is column-major and computes Y^T[n][m] = W[n][k] X^T[k][m]. */
int gpu_cublas_gemm(struct gpu_cublas *c, void *y, int ldy, const void *x, const void *w, int m,
                    int n, int k, bool bf16)
{
    const float one = 1, zero = 0;
    const int type = bf16 ? R_16BF : R_16F;
    return c->gemm(c->handle, OP_T, OP_N, n, m, k, &one, w, type, k, x, type, k, &zero, y, type,
                   ldy, COMPUTE_32F, ALGO_DEFAULT);
}

int gpu_cublas_gemm_batch(struct gpu_cublas *c, void *y, const void *x, const void *w, int count,
                          int m, int n, int k)
{
    const float one = 1, zero = 0;
    return c->strided(c->handle, OP_T, OP_N, n, m, k, &one, w, R_16F, k, (long long)n * k, x, R_16F,
                      k, (long long)m * k, &zero, y, R_16F, n, (long long)m * n, count, COMPUTE_32F,
                      ALGO_DEFAULT);
}

int gpu_cublas_gemm_f32(struct gpu_cublas *c, float *y, const void *x, const void *w, int m, int n,
                        int k)
{
    const float one = 1, zero = 0;
    return c->gemm(c->handle, OP_T, OP_N, n, m, k, &one, w, R_16F, k, x, R_16F, k, &zero, y, R_32F,
                   n, COMPUTE_32F, ALGO_DEFAULT);
}

/* cuBLAS is column-major and computes C^T = B^T A^T: a row-major matrix is its transpose in
 * column-major order. */
int gpu_cublas_product(struct gpu_cublas *c, const struct gpu_product *p)
{
    const int op_a = p->a_transposed ? OP_T : OP_N, op_b = p->b_transposed ? OP_T : OP_N;
    const int compute = p->tf32 ? COMPUTE_TF32 : COMPUTE_32F;
    return p->as
               ? c->batched(c->handle, op_b, op_a, p->n, p->m, p->k, &p->alpha,
                            (const void *const *)p->bs, R_32F, p->ldb, (const void *const *)p->as,
                            R_32F, p->lda, &p->beta, (void *const *)p->cs, R_32F, p->ldc, p->count,
                            compute, ALGO_DEFAULT)
               : c->gemm(c->handle, op_b, op_a, p->n, p->m, p->k, &p->alpha, p->b, R_32F, p->ldb,
                         p->a, R_32F, p->lda, &p->beta, p->c, R_32F, p->ldc, compute, ALGO_DEFAULT);
}

int gpu_cublas_product_half(struct gpu_cublas *c, const struct gpu_product *p, const void *a,
                            const void *b, const float *factors)
{
    int status = c->set_pointer_mode(c->handle, POINTERS_TO_DEVICE);
    if (status == 0)
        status = c->gemm(c->handle, p->b_transposed ? OP_T : OP_N, p->a_transposed ? OP_T : OP_N,
                         p->n, p->m, p->k, factors, b, R_16F, p->ldb, a, R_16F, p->lda, factors + 1,
                         p->c, R_32F, p->ldc, COMPUTE_32F, ALGO_DEFAULT);
    const int restored = c->set_pointer_mode(c->handle, POINTERS_TO_HOST);
    return status ? status : restored;
}

/* In column-major order v is V^T, lower triangular, and x is X^T[n][m], which is replaced by
 * V^-T X^T, or by V^-1 X^T if `transposed`. */
int gpu_cublas_solve_upper(struct gpu_cublas *c, float *x, const float *v, bool transposed, int m,
                           int n, int ld)
{
    const float one = 1;
    return c->strsm(c->handle, LEFT, LOWER, transposed ? OP_T : OP_N, NON_UNIT, n, m, &one, v, ld,
                    x, ld);
}

/* In column-major order lower triangles are upper triangles of their transposes: L21^T = L11^-1
 * A21^T. */
int gpu_cublas_cholesky_solve(struct gpu_cublas *c, double *a, int k, int p, int n)
{
    const double one = 1;
    const size_t width = (size_t)k;
    return c->dtrsm(c->handle, LEFT, UPPER, OP_T, NON_UNIT, n, k - p - n, &one,
                    a + (size_t)p * (width + 1), k, a + (size_t)(p + n) * width + p, k);
}

/* Up to the last column only the triangle is computed. */
int gpu_cublas_cholesky_update(struct gpu_cublas *c, double *a, int k, int p, int n, int from,
                               int to)
{
    const double one = 1, minus = -1;
    const double *l = a + (size_t)from * (size_t)k + p;
    double *at = a + (size_t)from * ((size_t)k + 1);
    return to == k ? c->dsyrk(c->handle, UPPER, OP_T, k - from, n, &minus, l, k, &one, at, k)
                   : c->gemm(c->handle, OP_T, OP_N, to - from, k - from, n, &minus, l, R_64F, k, l,
                             R_64F, k, &one, at, R_64F, k, COMPUTE_64F, ALGO_DEFAULT);
}
