/* Passes over all columns: error feedback, then rounds of polishing until they stop paying. */
#include "hessian/panel.h"

#include <string.h>

enum {
    R = QT_PANEL_ROWS,
    BLOCK = 128, /* columns of a block, where groups do not want more */
    WIDE = 512,  /* where the step is the same for all columns */
};

static const double WORTHWHILE = 1e-3; /* relative gain of a round below which it is the last */

/* ---- blocks --------------------------------------------------------------------------------- */

bool qt_factor_is_one_group(const struct qt_factor *f)
{
    return f->group[0] == f->group[f->k - 1];
}

/* Columns of the block that begins at `at`: whole groups, at least one. Only a group that is all of
 * the matrix is split, unless it is to be refitted as a whole. */
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

struct slab {
    struct panel *panel;
    size_t count;
    bool refits_groups;
    struct qt_running_sums sums;
};

/* A step in all blocks. wide: of any columns. */
static int pass(struct slab *s, qt_panel_step *step, enum qt_running_sums_use use, bool wide,
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

static int feedback(struct slab *s, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_running_sums_start(&s->sums, s->sums.f->v, err));
    QT_TRY(pass(s, qt_panel_compensate, QT_SUMS_ADD, false, err));
done:
    return rc;
}

/* ---- the objective -------------------------------------------------------------------------- */

static void put_source(struct panel *p, size_t at, size_t n)
{
    memcpy(p->change, p->w + at * R, n * R * sizeof *p->change);
    p->changed = true;
}

static void keep_sums(struct panel *p, size_t at, size_t n)
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

/* With G = H (w - q). */
static int objective(struct slab *s, struct qt_err *err)
{
    int rc = pass(s, add_terms, QT_SUMS_READ, true, err);
    for (size_t i = 0; i < s->count; i++)
        s->panel[i].error = s->panel[i].sum;
    return rc;
}

/* Makes G = H (w - q). */
static int start_polishing(struct slab *s, struct qt_err *err)
{
    const float *h = s->sums.f->h;
    int rc;
    if (s->panel[0].hw) {
        QT_TRY(qt_running_sums_start(&s->sums, h, err));
        QT_TRY(pass(s, put_source, QT_SUMS_ADD, true, err));
        QT_TRY(pass(s, keep_sums, QT_SUMS_READ, true, err));
    }
    QT_TRY(qt_running_sums_start(&s->sums, h, err));
    QT_TRY(pass(s, put_error, QT_SUMS_ADD, true, err));
    QT_TRY(objective(s, err));
done:
    return rc;
}

/* Sets done for panels that have gained too little. *left: others. */
static int polish_round(bool *left, struct slab *s, struct qt_err *err)
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
    *left = false;
    for (size_t i = 0; i < s->count; i++) {
        struct panel *p = &s->panel[i];
        p->done |= !(p->before - p->error > WORTHWHILE * p->before);
        *left |= !p->done;
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
    int polish;
    struct qt_backend *be; /* NULL: panels one by one */
    size_t longest;
    bool whole, scales; /* polishing refits groups as a whole; one scale a row */
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

/* Floats of a panel's matrices, and of G where it has one of its own. */
static size_t panel_floats(const struct solve *s)
{
    const size_t matrices = 3 + (size_t)s->scales + !s->be,
                 group = qt_min_size(s->f->group_size, s->f->k);
    return qt_round_up((matrices * s->f->k + 4 * s->longest) * R + (s->whole ? group * group : 0),
                       16);
}

/* Panel number `item` in work[panel_floats(s)]; returns where G would be. */
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
        .spare = work + 3 * block,
        .w = work + 4 * block,
        .q = work + 4 * block + cells,
        .unit = work + 4 * block + 2 * cells,
    };
    work += 4 * block + 3 * cells;
    if (s->scales) {
        p->hw = work;
        work += cells;
    }
    if (s->whole) {
        const size_t group = qt_min_size(s->f->group_size, s->f->k);
        p->v = work;
        work += group * group;
    }
    load_rows(p->w, s->w, s->f, p->row0, p->rows);
    memset(p->unit, 0, cells * sizeof *p->unit);
    memset(p->q, 0, cells * sizeof *p->q);
    return work;
}

/* reports[slab->count] */
static int solve_slab(struct qt_solve_report *reports, const struct solve *s, struct slab *slab,
                      struct qt_err *err)
{
    bool left = true;
    int rc = QT_OK;
    QT_TRY(feedback(slab, err));
    for (size_t i = 0; i < slab->count; i++)
        reports[i].feedback = slab->panel[i].error = slab->panel[i].sum;
    if (s->polish > 0)
        QT_TRY(start_polishing(slab, err));
    for (int round = 0; round < s->polish && left; round++)
        QT_TRY(polish_round(&left, slab, err));
    for (size_t i = 0; i < slab->count; i++)
        reports[i].polished = slab->panel[i].error;
done:
    return rc;
}

/* Each thread solves panels on its own. */
struct alone {
    struct solve *s;
    float *work; /* per thread */
    size_t stride;
};

static int solve_alone(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct alone *a = ctx;
    struct panel p;
    float *g = panel_open(&p, a->s, item, a->work + (size_t)thread * a->stride);
    struct slab slab = {&p, 1, a->s->whole, {.f = a->s->f, .panel = &p, .panels = 1, .g = g}};
    return solve_slab(&a->s->panels[item], a->s, &slab, err);
}

static int solve_panels_cpu(struct solve *s, size_t panels, struct qt_err *err)
{
    struct alone a = {s, NULL, panel_floats(s)};
    int rc;
    QT_TRY(qt_array_new(&a.work, (size_t)qt_threads(), a.stride * sizeof *a.work, err));
    QT_TRY(qt_parallel(panels, solve_alone, &a, err));
done:
    qt_free(a.work);
    return rc;
}

/* All panels at the same time. */
struct together {
    const struct solve *s;
    struct panel *panel;
    float *work;
};

static int open_panel(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct together *t = ctx;
    (void)thread;
    (void)err;
    panel_open(&t->panel[item], t->s, item, t->work + item * panel_floats(t->s));
    return QT_OK;
}

static int solve_panels_backend(struct solve *s, size_t panels, struct qt_err *err)
{
    struct together t = {.s = s};
    struct slab slab = {.count = panels, .refits_groups = s->whole};
    int rc;
    QT_TRY(qt_array_new(&t.panel, panels, sizeof *t.panel, err));
    QT_TRY(qt_array_new(&t.work, panels, panel_floats(s) * sizeof *t.work, err));
    QT_TRY(qt_parallel(panels, open_panel, &t, err));
    slab.panel = t.panel;
    slab.sums = (struct qt_running_sums){.f = s->f, .panel = t.panel, .panels = panels};
    QT_TRY(qt_running_sums_on_backend(&slab.sums, s->be, s->longest, err));
    QT_TRY(solve_slab(s->panels, s, &slab, err));
done:
    qt_running_sums_free(&slab.sums);
    qt_free(t.panel);
    qt_free(t.work);
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
        .polish = opt->polish,
        .be = f->backend,
        .whole = opt->polish > 0 && rounder->refit,
        .scales = opt->polish > 0 && !rounder->refit && qt_factor_is_one_group(f),
    };
    const size_t panels = qt_ceil_div(n, R);
    int rc = QT_OK;
    *out = (struct qt_solve_report){0};
    openblas_set_num_threads(1); /* panels are the threads */
    s.longest = longest_block(f, s.whole);
    QT_TRY(qt_array_new(&s.panels, panels, sizeof *s.panels, err));
    QT_TRY(s.be && panels ? solve_panels_backend(&s, panels, err)
                          : solve_panels_cpu(&s, panels, err));
    for (size_t i = 0; i < panels; i++) {
        out->feedback += s.panels[i].feedback;
        out->polished += s.panels[i].polished;
    }
done:
    qt_free(s.panels);
    return rc;
}
