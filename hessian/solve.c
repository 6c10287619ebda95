/* Passes over all columns: error compensation, then rounds of coordinate descent until the gain is
 * too small. */
#include "hessian/panel.h"

#include <math.h>
#include <string.h>

enum {
    R = QT_PANEL_ROWS,
    BLOCK = 128, /* columns of a column block, unless a group is longer */
    WIDE = 512,  /* the same for steps that treat all columns alike */
};

/* ---- column blocks -------------------------------------------------------------------------- */

bool qt_factor_is_one_group(const struct qt_factor *f)
{
    return f->group[0] == f->group[f->k - 1];
}

/* Number of columns of the column block that begins at `at`: one or more whole groups. A single
 * group that spans the matrix is split, unless it is refitted as a whole. */
static size_t block_columns(const struct qt_factor *f, bool refits_groups, size_t at)
{
    if (qt_factor_is_one_group(f) && !refits_groups)
        return qt_min_size(BLOCK, f->k - at);
    size_t end = qt_factor_group_end(f, at);
    for (size_t next = end; next < f->k; end = next) {
        next = qt_factor_group_end(f, end);
        if (next - at > BLOCK)
            break;
    }
    return end - at;
}

static size_t longest_block(const struct qt_factor *f, bool refits_groups)
{
    size_t longest = qt_min_size(WIDE, f->k);
    for (size_t at = 0, n; at < f->k; at += n) {
        n = block_columns(f, refits_groups, at);
        longest = n > longest ? n : longest;
    }
    return longest;
}

/* ---- panels that are solved together -------------------------------------------------------- */

struct panel_set {
    struct panel *panel;
    size_t count;
    bool refits_groups;
    struct qt_running_sums sums;
};

/* Runs a step on all column blocks; `wide`: the step does not depend on groups. */
static int pass(struct panel_set *s, qt_panel_step *step, enum qt_running_sums_use use, bool wide,
                struct qt_err *err)
{
    const struct qt_factor *f = s->sums.f;
    int rc = QT_OK;
    for (size_t i = 0; i < s->count; i++)
        s->panel[i].sum = 0;
    for (size_t at = 0, n; at < f->k && rc == QT_OK; at += n) {
        n = wide ? qt_min_size(WIDE, f->k - at) : block_columns(f, s->refits_groups, at);
        rc = qt_running_sums_block(&s->sums, step, use, at, n, err);
    }
    return rc;
}

static int compensate(struct panel_set *s, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_running_sums_start(&s->sums, s->sums.f->v, err));
    QT_TRY(pass(s, qt_panel_compensate, QT_SUMS_ADD, false, err));
done:
    return rc;
}

/* ---- the objective -------------------------------------------------------------------------- */

static void put_weights(struct panel *p, size_t at, size_t n)
{
    memcpy(p->change, p->w + at * R, n * R * sizeof *p->change);
    p->changed = true;
}

static void keep_hw(struct panel *p, size_t at, size_t n)
{
    memcpy(p->hw + at * R, p->g, n * R * sizeof *p->g);
}

static void put_error(struct panel *p, size_t at, size_t n)
{
    for (size_t i = 0; i < n * R; i++)
        p->change[i] = p->w[at * R + i] - p->q[at * R + i];
    p->changed = true;
}

static void add_terms(struct panel *p, size_t at, size_t n)
{
    for (size_t i = 0; i < n * R; i++)
        p->sum += (double)(p->w[at * R + i] - p->q[at * R + i]) * (double)p->g[i];
}

/* Computes the objective of each panel; requires G = H (w - q). */
static int objective(struct panel_set *s, struct qt_err *err)
{
    int rc = pass(s, add_terms, QT_SUMS_READ, true, err);
    for (size_t i = 0; i < s->count; i++)
        s->panel[i].error = s->panel[i].sum;
    return rc;
}

/* Sets G = H (w - q), and hw = H w if needed. */
static int start_descent(struct panel_set *s, struct qt_err *err)
{
    const float *h = s->sums.f->h;
    int rc;
    if (s->panel[0].hw) {
        QT_TRY(qt_running_sums_start(&s->sums, h, err));
        QT_TRY(pass(s, put_weights, QT_SUMS_ADD, true, err));
        QT_TRY(pass(s, keep_hw, QT_SUMS_READ, true, err));
    }
    QT_TRY(qt_running_sums_start(&s->sums, h, err));
    QT_TRY(pass(s, put_error, QT_SUMS_ADD, true, err));
    QT_TRY(objective(s, err));
done:
    return rc;
}

/* Marks panels that gained too little as converged. *active: some have not converged. */
static int descent_round(bool *active, struct panel_set *s, struct qt_err *err)
{
    int rc;
    for (size_t i = 0; i < s->count; i++)
        s->panel[i].before = s->panel[i].error;
    QT_TRY(pass(s, qt_panel_descend, QT_SUMS_ADD, false, err));
    if (s->panel[0].hw) {
        QT_TRY(pass(s, qt_panel_moments, QT_SUMS_READ, true, err));
        QT_TRY(pass(s, qt_panel_rescale, QT_SUMS_STORE, true, err));
    }
    QT_TRY(objective(s, err));
    *active = false;
    for (size_t i = 0; i < s->count; i++) {
        struct panel *p = &s->panel[i];
        p->round++;
        p->converged |= !(p->before - p->error > QT_SOLVE_MIN_GAIN * p->before);
        *active |= !p->converged;
    }
done:
    return rc;
}

/* ---- all panels ----------------------------------------------------------------------------- */

struct solve {
    const struct qt_factor *f;
    const float *w;
    size_t n;
    const struct qt_rounder *rounder;
    int descent_rounds;
    struct qt_backend *be;                 /* NULL: each thread solves one panel at a time */
    size_t longest;                        /* columns of the longest column block */
    bool refits_groups, refits_row_scales; /* how descent refits: whole groups; one scale per row */
    struct qt_solve_report *panels;
};

void qt_solve_add(struct qt_solve_report *out, const struct qt_solve_report *panel)
{
    out->before += panel->before;
    out->after_compensation += panel->after_compensation;
    out->after_descent += panel->after_descent;
}

static void load_rows(float *dst, const float *src, const struct qt_factor *f, size_t row0,
                      size_t rows)
{
    memset(dst, 0, f->k * R * sizeof *dst);
    for (size_t r = 0; r < rows; r++)
        for (size_t j = 0; j < f->k; j++)
            dst[j * R + r] = src[(row0 + r) * f->k + f->order[j]];
}

/* Floats of a panel's matrices, and of its G without a backend. */
static size_t panel_floats(const struct solve *s)
{
    const size_t matrices = 3 + (size_t)s->refits_row_scales + !s->be,
                 group = qt_min_size(s->f->group_size, s->f->k);
    return qt_round_up(
        (matrices * s->f->k + 4 * s->longest) * R + (s->refits_groups ? group * group : 0), 16);
}

/* Sets up panel number `item` in work[panel_floats(s)]; returns the place of its G. */
static float *panel_open(struct panel *p, const struct solve *s, size_t item, float *work)
{
    const size_t cells = s->f->k * R, block = s->longest * R;
    *p = (struct panel){
        .f = s->f,
        .rounder = s->rounder,
        .row0 = item * R,
        .rows = qt_min_size(R, s->n - item * R),
        .g = work,
        .change = work + block,
        .target = work + 2 * block,
        .scratch = work + 3 * block,
        .w = work + 4 * block,
        .q = work + 4 * block + cells,
        .unit = work + 4 * block + 2 * cells,
    };
    work += 4 * block + 3 * cells;
    if (s->refits_row_scales) {
        p->hw = work;
        work += cells;
    }
    if (s->refits_groups) {
        const size_t group = qt_min_size(s->f->group_size, s->f->k);
        p->v = work;
        work += group * group;
    }
    load_rows(p->w, s->w, s->f, p->row0, p->rows);
    memset(p->unit, 0, cells * sizeof *p->unit);
    memset(p->q, 0, cells * sizeof *p->q);
    return work;
}

/* Fills reports[set->count]. */
static int solve_set(struct qt_solve_report *reports, const struct solve *s, struct panel_set *set,
                     struct qt_err *err)
{
    bool active = true;
    int rc = QT_OK;
    QT_TRY(compensate(set, err));
    for (size_t i = 0; i < set->count; i++)
        reports[i].after_compensation = set->panel[i].error = set->panel[i].sum;
    if (s->descent_rounds > 0)
        QT_TRY(start_descent(set, err));
    for (int round = 0; round < s->descent_rounds && active; round++)
        QT_TRY(descent_round(&active, set, err));
    for (size_t i = 0; i < set->count; i++)
        reports[i].after_descent = set->panel[i].error;
done:
    return rc;
}

/* Each thread solves one panel at a time. */
struct cpu_job {
    struct solve *s;
    float *work; /* [threads][stride] */
    size_t stride;
};

static int solve_panel(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct cpu_job *job = ctx;
    const struct solve *s = job->s;
    struct panel p;
    float *g = panel_open(&p, s, item, job->work + (size_t)thread * job->stride);
    struct panel_set set = {&p, 1, s->refits_groups, {.f = s->f, .panel = &p, .panels = 1, .g = g}};
    return solve_set(&s->panels[item], s, &set, err);
}

static int solve_panels_cpu(struct solve *s, size_t panels, struct qt_err *err)
{
    struct cpu_job job = {s, NULL, panel_floats(s)};
    int rc;
    QT_TRY(qt_array_new(&job.work, (size_t)qt_threads(), job.stride * sizeof *job.work, err));
    QT_TRY(qt_parallel(panels, solve_panel, &job, err));
done:
    qt_free(job.work);
    return rc;
}

/* All panels advance together. */
struct backend_job {
    const struct solve *s;
    struct panel *panel;
    float *work;
};

static void open_panel(void *ctx, size_t item)
{
    const struct backend_job *job = ctx;
    panel_open(&job->panel[item], job->s, item, job->work + item * panel_floats(job->s));
}

static int solve_panels_backend(struct solve *s, size_t panels, struct qt_err *err)
{
    struct backend_job job = {.s = s};
    struct panel_set set = {.count = panels, .refits_groups = s->refits_groups};
    int rc;
    QT_TRY(qt_array_new(&job.panel, panels, sizeof *job.panel, err));
    QT_TRY(qt_array_new(&job.work, panels, panel_floats(s) * sizeof *job.work, err));
    qt_parallel_for(panels, open_panel, &job);
    set.panel = job.panel;
    set.sums = (struct qt_running_sums){.f = s->f, .panel = job.panel, .panels = panels};
    QT_TRY(qt_running_sums_on_backend(&set.sums, s->be, s->longest, err));
    QT_TRY(solve_set(s->panels, s, &set, err));
done:
    qt_running_sums_free(&set.sums);
    qt_free(job.panel);
    qt_free(job.work);
    return rc;
}

int qt_solve(struct qt_solve_report *out, const struct qt_factor *f, const float *w, size_t n,
             const struct qt_rounder *rounder, const struct qt_solve_options *opt,
             struct qt_err *err)
{
    struct solve s = {
        .f = f,
        .w = w,
        .n = n,
        .rounder = rounder,
        .descent_rounds = opt->descent_rounds,
        .be = f->backend,
        .refits_groups = opt->descent_rounds > 0 && rounder->refit,
        .refits_row_scales =
            opt->descent_rounds > 0 && !rounder->refit && qt_factor_is_one_group(f),
    };
    const size_t panels = qt_ceil_div(n, R);
    int rc = QT_OK;
    *out = (struct qt_solve_report){0};
    openblas_set_num_threads(1); /* threads work on panels instead */
    s.longest = longest_block(f, s.refits_groups);
    QT_TRY(qt_array_new(&s.panels, panels, sizeof *s.panels, err));
    QT_TRY(s.be && panels ? solve_panels_backend(&s, panels, err)
                          : solve_panels_cpu(&s, panels, err));
    for (size_t i = 0; i < panels; i++) {
        s.panels[i].before = NAN;
        if (opt->panels)
            opt->panels[i] = s.panels[i];
        qt_solve_add(out, &s.panels[i]);
    }
done:
    qt_free(s.panels);
    return rc;
}
