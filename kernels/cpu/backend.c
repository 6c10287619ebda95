/*
 * The CPU backend: OpenBLAS for matrix products, base/par.h for parallelism. Backend memory is host
 * memory.
 *
 * Every operation is divided into items whose size depends on the shapes only. One thread computes
 * an item, and no sum crosses items, so results do not depend on the number of threads.
 */
#include "kernels/cpu/internal.h"
#include "kernels/cpu/math.h"
#include "kernels/kernels.h"

#include <cblas.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* Output tile of `linear`. Every sgemm call packs its operands, so small tiles are slow. Speed
 * relative to one large sgemm on the same two cores, 2048 tokens, k = 384..5632: 512x128 at least
 * 88 %, 256x256 87 %, 128x128 74 %. The short side is n, because k and v projections are narrow. */
enum { TILE_M = 512, TILE_N = 128 };

struct cpu {
    struct qt_backend be;
    char name[96];
    struct cpu_scratch scratch;
};

/* ---- memory --------------------------------------------------------------------------------- */

static int cpu_alloc(struct qt_backend *be, void *out, size_t bytes, struct qt_err *err)
{
    (void)be;
    return qt_array_new(out, bytes, 1, err);
}

static void cpu_free(struct qt_backend *be, void *p)
{
    (void)be;
    qt_free(p);
}

static void cpu_pin(struct qt_backend *be, void *p, size_t bytes)
{
    (void)be;
    (void)p;
    (void)bytes;
}

static void cpu_unpin(struct qt_backend *be, void *p)
{
    (void)be;
    (void)p;
}

static int cpu_copy(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                    struct qt_err *err)
{
    (void)be;
    (void)err;
    if (bytes)
        memcpy(dst, src, bytes);
    return QT_OK;
}

static int cpu_zero(struct qt_backend *be, void *p, size_t bytes, struct qt_err *err)
{
    (void)be;
    (void)err;
    if (bytes)
        memset(p, 0, bytes);
    return QT_OK;
}

/* ---- linear --------------------------------------------------------------------------------- */

struct linear_job {
    float *y;
    const float *x, *w, *bias;
    size_t m, n, k, tiles_n;
};

static int linear_tile(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct linear_job *job = ctx;
    (void)thread;
    (void)err;
    size_t i = item / job->tiles_n * TILE_M, j = item % job->tiles_n * TILE_N;
    size_t rows = qt_min_size(TILE_M, job->m - i), cols = qt_min_size(TILE_N, job->n - j);
    float *y = job->y + i * job->n + j;
    int k = (int)job->k, ldy = (int)job->n;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)cols, k, 1.0f,
                job->x + i * job->k, k, job->w + j * job->k, k, 0.0f, y, ldy);
    for (size_t r = 0; job->bias && r < rows; r++)
        cpu_add(y + r * job->n, job->bias + j, cols);
    return QT_OK;
}

static int cpu_linear(struct qt_backend *be, float *y, const float *x, const float *w,
                      const float *bias, size_t m, size_t n, size_t k, struct qt_err *err)
{
    struct linear_job job = {y, x, w, bias, m, n, k, qt_ceil_div(n, TILE_N)};
    int rc = QT_OK;
    (void)be;
    QT_TRY(cpu_check_width(n, err));
    QT_TRY(cpu_check_width(k, err));
    QT_TRY(qt_parallel(qt_ceil_div(m, TILE_M) * job.tiles_n, linear_tile, &job, err));
done:
    return rc;
}

/* ---- rows and elements ---------------------------------------------------------------------- */

struct norm_job {
    float *y;
    const float *x, *w, *bias;
    enum qt_norm_kind kind;
    float eps;
    size_t m, n;
};

static void norm_item(void *ctx, size_t item)
{
    const struct norm_job *job = ctx;
    size_t step = cpu_rows_per_item(job->n), end = qt_min_size((item + 1) * step, job->m);
    for (size_t i = item * step; i < end; i++)
        cpu_norm(job->y + i * job->n, job->x + i * job->n, job->w, job->bias, job->kind, job->eps,
                 job->n);
}

static int cpu_norm_rows(struct qt_backend *be, float *y, const float *x, const float *w,
                         const float *bias, enum qt_norm_kind kind, float eps, size_t m, size_t n,
                         struct qt_err *err)
{
    struct norm_job job = {y, x, w, bias, kind, eps, m, n};
    (void)be;
    (void)err;
    qt_parallel_for(qt_ceil_div(m, cpu_rows_per_item(n)), norm_item, &job);
    return QT_OK;
}

struct rope_job {
    float *x;
    const float *cos, *sin;
    size_t m, seqlen, heads, dim, half;
    bool interleaved;
};

static void rope_item(void *ctx, size_t item)
{
    const struct rope_job *job = ctx;
    size_t width = job->heads * job->dim, step = cpu_rows_per_item(width);
    size_t end = qt_min_size((item + 1) * step, job->m);
    for (size_t i = item * step; i < end; i++) {
        size_t at = i % job->seqlen * job->half;
        cpu_rope(job->x + i * width, job->cos + at, job->sin + at, job->heads, job->dim, job->half,
                 job->interleaved);
    }
}

static int cpu_rope_rows(struct qt_backend *be, float *x, const float *cos, const float *sin,
                         size_t m, size_t seqlen, size_t heads, size_t dim, size_t rot,
                         bool interleaved, struct qt_err *err)
{
    struct rope_job job = {x, cos, sin, m, seqlen, heads, dim, rot / 2, interleaved};
    (void)be;
    (void)err;
    qt_parallel_for(qt_ceil_div(m, cpu_rows_per_item(heads * dim)), rope_item, &job);
    return QT_OK;
}

static int cpu_attention_op(struct qt_backend *be, float *y, const float *q, const float *k,
                            const float *v, size_t m, const struct qt_attention *a,
                            struct qt_err *err)
{
    struct cpu *cpu = be->ctx;
    return cpu_attention(&cpu->scratch, y, q, k, v, m, a, err);
}

enum element_op { OP_ACTIVATE, OP_ADD, OP_SUBTRACT, OP_SCALE, OP_CLIP };

struct element_job {
    enum element_op op;
    float *y;
    const float *x, *up;
    enum qt_act_kind kind;
    float factor;
    size_t count;
};

static void element_item(void *ctx, size_t item)
{
    const struct element_job *job = ctx;
    size_t at = item * CPU_ITEM, n = qt_min_size(CPU_ITEM, job->count - at);
    switch (job->op) {
    case OP_ACTIVATE:
        cpu_activate(job->y + at, job->x + at, job->up ? job->up + at : NULL, job->kind, n);
        break;
    case OP_ADD:
        cpu_add(job->y + at, job->x + at, n);
        break;
    case OP_SUBTRACT:
        cpu_subtract(job->y + at, job->x + at, n);
        break;
    case OP_SCALE:
        cpu_scale(job->y + at, job->factor, n);
        break;
    case OP_CLIP:
        for (float *y = job->y + at; y < job->y + at + n; y++)
            *y = *y > job->factor ? job->factor : *y < -job->factor ? -job->factor : *y;
        break;
    }
}

static int run_elements(struct element_job job)
{
    qt_parallel_for(qt_ceil_div(job.count, CPU_ITEM), element_item, &job);
    return QT_OK;
}

static int cpu_activate_op(struct qt_backend *be, float *y, const float *gate, const float *up,
                           enum qt_act_kind kind, size_t count, struct qt_err *err)
{
    (void)be;
    (void)err;
    return run_elements((struct element_job){
        .op = OP_ACTIVATE, .y = y, .x = gate, .up = up, .kind = kind, .count = count});
}

static int cpu_add_op(struct qt_backend *be, float *y, const float *x, size_t count,
                      struct qt_err *err)
{
    (void)be;
    (void)err;
    return run_elements((struct element_job){.op = OP_ADD, .y = y, .x = x, .count = count});
}

static int cpu_subtract_op(struct qt_backend *be, float *y, const float *x, size_t count,
                           struct qt_err *err)
{
    (void)be;
    (void)err;
    return run_elements((struct element_job){.op = OP_SUBTRACT, .y = y, .x = x, .count = count});
}

static int cpu_scale_op(struct qt_backend *be, float *y, float factor, size_t count,
                        struct qt_err *err)
{
    (void)be;
    (void)err;
    return run_elements(
        (struct element_job){.op = OP_SCALE, .y = y, .factor = factor, .count = count});
}

static int cpu_clip_op(struct qt_backend *be, float *y, float limit, size_t count,
                       struct qt_err *err)
{
    (void)be;
    (void)err;
    return run_elements(
        (struct element_job){.op = OP_CLIP, .y = y, .factor = limit, .count = count});
}

struct sum_job {
    double *y;
    const double *x;
    size_t count;
};

static void sum_item(void *ctx, size_t item)
{
    const struct sum_job *job = ctx;
    const size_t end = qt_min_size((item + 1) * CPU_ITEM, job->count);
    for (size_t i = item * CPU_ITEM; i < end; i++)
        job->y[i] += job->x[i];
}

static int cpu_add_f64(struct qt_backend *be, double *y, const double *x, size_t count,
                       struct qt_err *err)
{
    struct sum_job job = {y, x, count};
    (void)be;
    (void)err;
    qt_parallel_for(qt_ceil_div(count, CPU_ITEM), sum_item, &job);
    return QT_OK;
}

struct rows_job {
    float *y;
    const float *x;
    const uint32_t *rows;
    const float *factor;
    bool scatter;
    size_t m, n;
};

static void rows_item(void *ctx, size_t item)
{
    const struct rows_job *job = ctx;
    size_t n = job->n, step = cpu_rows_per_item(n), end = qt_min_size((item + 1) * step, job->m);
    for (size_t i = item * step; i < end; i++) {
        const size_t other = job->rows ? job->rows[i] : i;
        const float factor = job->factor ? job->factor[i] : 1;
        if (job->scatter)
            for (size_t j = 0; j < n; j++)
                job->y[other * n + j] += job->x[i * n + j] * factor;
        else
            for (size_t j = 0; j < n; j++)
                job->y[i * n + j] = job->x[other * n + j] * factor;
    }
}

static int cpu_gather_rows(struct qt_backend *be, float *y, const float *x, const uint32_t *rows,
                           const float *factor, size_t m, size_t n, struct qt_err *err)
{
    struct rows_job job = {y, x, rows, factor, false, m, n};
    (void)be;
    (void)err;
    qt_parallel_for(qt_ceil_div(m, cpu_rows_per_item(n)), rows_item, &job);
    return QT_OK;
}

static int cpu_scatter_rows(struct qt_backend *be, float *y, const float *x, const uint32_t *rows,
                            const float *factor, size_t m, size_t n, struct qt_err *err)
{
    struct rows_job job = {y, x, rows, factor, true, m, n};
    (void)be;
    (void)err;
    qt_parallel_for(qt_ceil_div(m, cpu_rows_per_item(n)), rows_item, &job);
    return QT_OK;
}

struct columns_job {
    float *y;
    const float *x;
    size_t ldy, ldx, n, m;
};

static void columns_item(void *ctx, size_t item)
{
    const struct columns_job *job = ctx;
    const size_t rows = cpu_rows_per_item(job->n), first = item * rows;
    for (size_t i = first; i < qt_min_size(first + rows, job->m); i++)
        memcpy(job->y + i * job->ldy, job->x + i * job->ldx, job->n * sizeof(float));
}

static int cpu_copy_columns(struct qt_backend *be, float *y, size_t ldy, const float *x, size_t ldx,
                            size_t n, size_t m, struct qt_err *err)
{
    struct columns_job job = {y, x, ldy, ldx, n, m};
    (void)be;
    (void)err;
    qt_parallel_for(qt_ceil_div(m, cpu_rows_per_item(n)), columns_item, &job);
    return QT_OK;
}

/* ---- recurrences ---------------------------------------------------------------------------- */

static int cpu_delta_rule_op(struct qt_backend *be, float *y, const float *qkv, const float *decay,
                             const float *rate, size_t m, const struct qt_delta *d,
                             struct qt_err *err)
{
    struct cpu *cpu = be->ctx;
    return cpu_delta_rule(&cpu->scratch, y, qkv, decay, rate, m, d, err);
}

static int cpu_state_space_op(struct qt_backend *be, float *y, const float *xbc, const float *steps,
                              size_t m, const struct qt_state_space *s, struct qt_err *err)
{
    struct cpu *cpu = be->ctx;
    return cpu_state_space(&cpu->scratch, y, xbc, steps, m, s, err);
}

/* ---- score ---------------------------------------------------------------------------------- */

struct score_job {
    const struct cpu_scratch *scratch;
    struct qt_score *scores;
    const float *logits, *ref;
    const uint32_t *targets;
    float softcap;
    size_t vocab;
};

/* With logits a, reference logits b, and p = softmax(b): KL = sum p (b - a) - (lse b - lse a). For
 * equal rows every term and KL are exactly 0. Values that rounding makes negative become 0. */
static int score_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct score_job *job = ctx;
    struct qt_score *out = &job->scores[item];
    size_t vocab = job->vocab, target = job->targets[item];
    const float *a = job->logits + item * vocab, *b = job->ref ? job->ref + item * vocab : NULL;
    float *buf = cpu_scratch_of(job->scratch, thread);
    if (target >= vocab)
        return qt_fail(err, QT_E_INPUT, NULL, NULL,
                       "target %zu is token %zu, but the vocabulary has %zu tokens", item, target,
                       vocab);
    if (job->softcap > 0.0f) {
        cpu_softcap(buf, a, job->softcap, vocab);
        a = buf;
        if (b) {
            cpu_softcap(buf + vocab, b, job->softcap, vocab);
            b = buf + vocab;
        }
    }
    struct cpu_row_stats sa = cpu_row_stats(a, vocab);
    double lse_a = (double)sa.max + log(sa.sum);
    *out = (struct qt_score){.nll = lse_a - (double)a[target]};
    if (b) {
        struct cpu_row_stats sb = cpu_row_stats(b, vocab);
        double lse_b = (double)sb.max + log(sb.sum);
        double kld = cpu_cross_sum(b, a, sb.max, vocab) / sb.sum - (lse_b - lse_a);
        out->ref_nll = lse_b - (double)b[target];
        out->kld = kld < 0.0 ? 0.0 : kld;
        out->p_delta = exp(-out->nll) - exp(-out->ref_nll);
        out->same_top = sa.top == sb.top;
    }
    return QT_OK;
}

static int cpu_score(struct qt_backend *be, struct qt_score *scores, const float *logits,
                     const float *ref, const uint32_t *targets, float softcap, size_t m,
                     size_t vocab, struct qt_err *err)
{
    struct cpu *cpu = be->ctx;
    struct score_job job = {&cpu->scratch, scores, logits, ref, targets, softcap, vocab};
    int rc = QT_OK;
    QT_TRY(cpu_scratch_need(&cpu->scratch, softcap > 0.0f ? 2 * vocab : 0, err));
    QT_TRY(qt_parallel(m, score_item, &job, err));
done:
    return rc;
}

static int cpu_gram_op(struct qt_backend *be, double *h, const float *x, size_t m, size_t k,
                       struct qt_err *err)
{
    struct cpu *cpu = be->ctx;
    return cpu_gram(&cpu->scratch, h, x, m, k, err);
}

static int cpu_channels_op(struct qt_backend *be, const struct qt_channels *c, const float *x,
                           size_t m, size_t k, struct qt_err *err)
{
    (void)be;
    (void)err;
    cpu_channels(c, x, m, k);
    return QT_OK;
}

static int cpu_attention_grad_op(struct qt_backend *be, float *dq, float *dk, float *dv,
                                 const float *dy, const float *q, const float *k, const float *v,
                                 size_t m, const struct qt_attention *a, struct qt_err *err)
{
    struct cpu *cpu = be->ctx;
    return cpu_attention_grad(&cpu->scratch, dq, dk, dv, dy, q, k, v, m, a, err);
}

static int cpu_loss_grad_op(struct qt_backend *be, double *losses, float *dlogits,
                            const float *logits, const float *ref, const uint32_t *targets,
                            float softcap, float weight, size_t m, size_t vocab, struct qt_err *err)
{
    struct cpu *cpu = be->ctx;
    return cpu_loss_grad(&cpu->scratch, losses, dlogits, logits, ref, targets, softcap, weight, m,
                         vocab, err);
}

/* ---- open and close ------------------------------------------------------------------------- */

static void cpu_close(struct qt_backend *be)
{
    if (!be)
        return;
    struct cpu *cpu = be->ctx;
    qt_free(cpu->scratch.data);
    qt_free(cpu);
}

/* The name holds the version of OpenBLAS and the processor type that it selected kernels for. */
static void set_name(struct cpu *cpu)
{
    char version[32] = "";
    sscanf(openblas_get_config(), "OpenBLAS %31s", version);
    snprintf(cpu->name, sizeof cpu->name, "OpenBLAS %s %s", version, openblas_get_corename());
}

/* Exported by OpenBLAS but not declared by its headers: takes one of its buffers for products,
 * mapping a new one if all are taken, and gives it back. A buffer stays mapped. */
void *blas_memory_alloc(int unused) __attribute__((weak));
void blas_memory_free(void *buffer) __attribute__((weak));

/* Address space that a buffer, or any later small allocation of a thread, takes. */
enum { BUFFER_MB = 128, MARGIN_MB = 10 };

struct buffers {
    void **taken; /* [threads] */
};

static bool have_room(size_t bytes)
{
    void *room = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room != MAP_FAILED)
        munmap(room, bytes);
    return room != MAP_FAILED;
}

/* One thread at a time, so that the room is still there when OpenBLAS takes it. */
static int take_buffer(void *ctx, int thread, struct qt_err *err)
{
    struct buffers *b = ctx;
    int rc = QT_OK;
#pragma omp critical(cpu_take_buffer)
    if (have_room((size_t)(BUFFER_MB + MARGIN_MB) << 20))
        b->taken[thread] = blas_memory_alloc(0);
    else
        rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL,
                     "out of memory: OpenBLAS needs %d MB of address space (ulimit -v) for each "
                     "of %d threads (--threads)",
                     BUFFER_MB, qt_threads());
    return rc;
}

static int give_buffer(void *ctx, int thread, struct qt_err *err)
{
    struct buffers *b = ctx;
    (void)err;
    if (b->taken[thread])
        blas_memory_free(b->taken[thread]);
    return QT_OK;
}

/*
 * Makes OpenBLAS map all its buffers if address space is limited (ulimit -v): if it cannot map one
 * during a product, it retries for ever. All threads hold a buffer at the same time, as they may
 * during products; none is mapped after that.
 */
static int reserve_buffers(struct qt_err *err)
{
    struct rlimit limit;
    struct buffers b;
    if (getrlimit(RLIMIT_AS, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY || !blas_memory_alloc ||
        !blas_memory_free)
        return QT_OK;
    int rc = qt_array_new(&b.taken, (size_t)qt_threads(), sizeof *b.taken, err);
    if (rc < 0)
        return rc;
    rc = qt_per_thread(take_buffer, &b, err);
    qt_per_thread(give_buffer, &b, NULL);
    qt_free(b.taken);
    return rc;
}

int qt_backend_cpu_open(struct qt_backend **out, struct qt_err *err)
{
    struct cpu *cpu;
    *out = NULL;
    int rc = reserve_buffers(err);
    if (rc == QT_OK)
        rc = qt_array_new(&cpu, 1, sizeof *cpu, err);
    if (rc < 0)
        return rc;
    /* The backend parallelizes by itself: an OpenBLAS with several threads would add in an order
     * that depends on their number. */
    openblas_set_num_threads(1);
    set_name(cpu);
    cpu->be = (struct qt_backend){
        .name = cpu->name,
        .host = true,
        .ctx = cpu,
        .alloc = cpu_alloc,
        .free = cpu_free,
        .upload = cpu_copy,
        .download = cpu_copy,
        .pin = cpu_pin,
        .unpin = cpu_unpin,
        .copy = cpu_copy,
        .zero = cpu_zero,
        .linear = cpu_linear,
        .norm = cpu_norm_rows,
        .rope = cpu_rope_rows,
        .attention = cpu_attention_op,
        .activate = cpu_activate_op,
        .add = cpu_add_op,
        .subtract = cpu_subtract_op,
        .gather_rows = cpu_gather_rows,
        .scatter_rows = cpu_scatter_rows,
        .copy_columns = cpu_copy_columns,
        .convolve = cpu_convolve,
        .delta_rule = cpu_delta_rule_op,
        .state_space = cpu_state_space_op,
        .scale = cpu_scale_op,
        .clip = cpu_clip_op,
        .score = cpu_score,
        .gram = cpu_gram_op,
        .add_f64 = cpu_add_f64,
        .channels = cpu_channels_op,
        .linear_grad_x = cpu_linear_grad_x,
        .linear_grad_w = cpu_linear_grad_w,
        .norm_grad = cpu_norm_grad_rows,
        .attention_grad = cpu_attention_grad_op,
        .activate_grad = cpu_activate_grad_op,
        .loss_grad = cpu_loss_grad_op,
        .square_grad = cpu_square_grad,
        .close = cpu_close,
    };
    *out = &cpu->be;
    return QT_OK;
}
