/*
 * Error feedback. With H = V V^T, V upper triangular, and e = w - q,
 *     E(q) = sum over j of ( V_jj e_j + sum over i < j of V_ij e_i )^2,
 * so that going through the columns in order, the best q_j given all earlier choices is the stored
 * value nearest to w_j + (sum over i < j of V_ij e_i) / V_jj, and V_jj^2 weighs its error. This is
 * GPTQ's update (its U is V^-1) without the inverse. The sums for later columns are one matrix
 * product per block of columns.
 */
#include "hessian/panel.h"

#include <cblas.h>
#include <string.h>

enum {
    R = QT_PANEL_ROWS,
    BLOCK = 128, /* columns whose feedback is applied at once; whole groups, so at times more */
};

/* ---- blocks --------------------------------------------------------------------------------- */

static bool is_one_group(const struct qt_factor *f)
{
    return f->group[0] == f->group[f->k - 1];
}

static size_t block_end(const struct qt_factor *f, size_t at)
{
    size_t end = at;
    if (is_one_group(f))
        return qt_min_size(at + BLOCK, f->k);
    while (end < f->k && end - at < BLOCK)
        end = qt_factor_group_end(f, end);
    return end;
}

static size_t longest_block(const struct qt_factor *f)
{
    size_t longest = 0;
    for (size_t at = 0, end; at < f->k; at = end) {
        end = block_end(f, at);
        longest = end - at > longest ? end - at : longest;
    }
    return longest;
}

/* ---- one panel ------------------------------------------------------------------------------ */

/* acc += a * x over the rows of a panel. */
static inline void axpy_rows(float *restrict acc, float a, const float *restrict x)
{
    for (size_t r = 0; r < R; r++)
        acc[r] += a * x[r];
}

/*
 * Chooses a group's parameters. Its targets are what its columns would be if they could be
 * anything, given the errors made so far: the e that makes every term of E vanish, by forward
 * substitution.
 */
static void begin_group(struct panel *p, size_t from, size_t to)
{
    const struct qt_factor *f = p->f;
    size_t n = to - from, k = f->k;
    float *t = p->w, *e = p->block;
    const struct qt_column_group group = {f->group[from], f->order + from, n,
                                          f->v + from * k + from, k};
    if (from > 0) { /* the first group's targets are the weights themselves */
        t = p->tmp;
        memcpy(e, p->g + from * R, n * R * sizeof *e);
        for (size_t i = 0; i < n; i++) {
            float vii = f->v[(from + i) * k + from + i];
            for (size_t r = 0; r < R; r++) {
                e[i * R + r] /= -vii;
                t[i * R + r] = p->w[(from + i) * R + r] - e[i * R + r];
            }
            for (size_t j = i + 1; j < n; j++)
                axpy_rows(e + j * R, f->v[(from + i) * k + from + j], e + i * R);
        }
    }
    p->rounder->begin(p->rounder->ctx, &group, t, p->row0, p->rows);
}

/* Rounds the column at position j; its error goes to the columns up to `end`. */
static double round_column(struct panel *p, size_t j, size_t end, float *error)
{
    const struct qt_factor *f = p->f;
    float vjj = f->v[j * f->k + j], x[R];
    float *q = p->q + j * R;
    double sum = 0;
    for (size_t r = 0; r < R; r++)
        x[r] = p->w[j * R + r] + p->g[j * R + r] / vjj;
    p->rounder->round(p->rounder->ctx, f->order[j], x, q, p->unit + j * R, p->row0, p->rows);
    for (size_t r = 0; r < p->rows; r++) {
        double term = (double)vjj * (double)(x[r] - q[r]);
        sum += term * term;
    }
    for (size_t r = 0; r < R; r++)
        error[r] = p->w[j * R + r] - q[r];
    for (size_t i = j + 1; i < end; i++)
        axpy_rows(p->g + i * R, f->v[j * f->k + i], error);
    return sum;
}

static double feedback_pass(struct panel *p)
{
    const struct qt_factor *f = p->f;
    size_t k = f->k;
    double sum = 0;
    memset(p->g, 0, k * R * sizeof *p->g);
    for (size_t at = 0, end; at < k; at = end) {
        end = block_end(f, at);
        float *errors = p->block + (end - at) * R; /* behind what begin_group uses */
        for (size_t j = at; j < end; j++) {
            if (j == 0 || f->group[j] != f->group[j - 1])
                begin_group(p, j, qt_factor_group_end(f, j));
            sum += round_column(p, j, end, errors + (j - at) * R);
        }
        if (end < k) /* g[rest] += V[block][rest]^T errors[block] */
            cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)(k - end), R, (int)(end - at),
                        1, f->v + at * k + end, (int)k, errors, R, 1, p->g + end * R, R);
    }
    return sum;
}

/* ---- all panels ----------------------------------------------------------------------------- */

struct solve {
    const struct qt_factor *f;
    const float *w;
    const float *q; /* qt_solve_error only */
    size_t n;
    const struct qt_rounder *rounder;
    const struct qt_solve_options *opt;
    float *work; /* per thread */
    size_t work_stride;
    struct qt_solve_report *panels;
};

static void load_rows(float *dst, const float *src, const struct qt_factor *f, size_t row0,
                      size_t rows)
{
    memset(dst, 0, f->k * R * sizeof *dst);
    for (size_t r = 0; r < rows; r++)
        for (size_t j = 0; j < f->k; j++)
            dst[j * R + r] = src[(row0 + r) * f->k + f->order[j]];
}

static struct panel panel_of(const struct solve *s, size_t item, int thread)
{
    size_t cells = s->f->k * R;
    float *work = s->work + (size_t)thread * s->work_stride;
    struct panel p = {
        .f = s->f,
        .rounder = s->rounder,
        .row0 = item * R,
        .rows = qt_min_size(R, s->n - item * R),
        .w = work,
        .q = work + cells,
        .unit = work + 2 * cells,
        .g = work + 3 * cells,
        .tmp = work + 4 * cells,
        .block = work + 5 * cells,
    };
    load_rows(p.w, s->w, s->f, p.row0, p.rows);
    memset(p.q, 0, cells * sizeof *p.q);
    memset(p.unit, 0, cells * sizeof *p.unit);
    return p;
}

static int solve_panel(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct solve *s = ctx;
    struct panel p = panel_of(s, item, thread);
    (void)err;
    s->panels[item].feedback = s->panels[item].polished = feedback_pass(&p);
    if (s->opt->polish > 0)
        s->panels[item].polished = qt_panel_polish(&p, s->opt->polish);
    return QT_OK;
}

static int error_panel(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct solve *s = ctx;
    struct panel p = panel_of(s, item, thread);
    (void)err;
    load_rows(p.q, s->q, s->f, p.row0, p.rows);
    s->panels[item].polished = qt_panel_polish(&p, 0);
    return QT_OK;
}

static int solve_run(struct qt_solve_report *out, struct solve *s,
                     int (*fn)(void *, size_t, int, struct qt_err *), struct qt_err *err)
{
    size_t panels = qt_ceil_div(s->n, R);
    int rc = QT_OK;
    *out = (struct qt_solve_report){0};
    openblas_set_num_threads(1); /* panels are the threads */
    s->work_stride = qt_round_up(5 * s->f->k * R + 2 * longest_block(s->f) * R, 16);
    QT_TRY(qt_array_new(&s->work, (size_t)qt_threads(), s->work_stride * sizeof *s->work, err));
    QT_TRY(qt_array_new(&s->panels, panels, sizeof *s->panels, err));
    QT_TRY(qt_parallel(panels, fn, s, err));
    for (size_t i = 0; i < panels; i++) {
        out->feedback += s->panels[i].feedback;
        out->polished += s->panels[i].polished;
    }
done:
    qt_free(s->work);
    qt_free(s->panels);
    return rc;
}

int qt_solve(struct qt_solve_report *out, const struct qt_factor *f, const float *w, size_t n,
             const struct qt_rounder *rounder, const struct qt_solve_options *opt,
             struct qt_err *err)
{
    struct solve s = {.f = f, .w = w, .n = n, .rounder = rounder, .opt = opt};
    return solve_run(out, &s, solve_panel, err);
}

int qt_solve_error(double *out, const struct qt_factor *f, const float *w, const float *q, size_t n,
                   struct qt_err *err)
{
    struct solve s = {.f = f, .w = w, .q = q, .n = n};
    struct qt_solve_report report;
    int rc = solve_run(&report, &s, error_panel, err);
    *out = report.polished;
    return rc;
}
