#include "pack/learn/learn.h"

enum {
    EVALUATIONS = 2,   /* per pass */
    PATIENCE = 2,      /* evaluations without a new best */
    SAVE_SECONDS = 10, /* between two evaluations that save the progress */
};

/* ---- steps ---------------------------------------------------------------------------------- */

static size_t steps_per_pass(const struct qt_learner *l)
{
    return qt_ceil_div(l->ntrain, l->opt.batch);
}

static size_t all_steps(const struct qt_learner *l)
{
    return l->opt.passes * steps_per_pass(l);
}

/* Learning rate: warm-up over a twentieth of the steps, then half a cosine down to 0. */
static double rate(const struct qt_learner *l, size_t step)
{
    double total = (double)all_steps(l), warm = fmax(1, total / 20), t = (double)step + 1;
    if (t < warm)
        return l->opt.lr * t / warm;
    return l->opt.lr * 0.5 * (1 + cos(3.14159265358979323846 * (t - warm) / (total - warm + 1)));
}

/* Returns the training windows in the order of pass number `pass`, shuffled by SplitMix64. */
static void shuffle(size_t *windows, const struct qt_learner *l, size_t pass)
{
    uint64_t state = l->data->seed * 1000003 + pass;
    memcpy(windows, l->train, l->ntrain * sizeof *windows);
    for (size_t i = l->ntrain; i > 1; i--) {
        size_t j = (size_t)(qt_splitmix64(&state) % i), swap = windows[i - 1];
        windows[i - 1] = windows[j];
        windows[j] = swap;
    }
}

/* Takes the result of the loss of a step. It has changed nothing yet, so the steps since the last
 * evaluation are saved if it was interrupted. (A save during an evaluation would make the resumed
 * run skip it, and one while parameters are applied would repeat the step.) */
static int save_if_interrupted(struct qt_learner *l, int rc, struct qt_err *err)
{
    if (rc == QT_E_INTERRUPTED && learn_params_save(l, NULL) < 0)
        return qt_fail(err, QT_E_RESOURCE, l->run->opt->out_dir, NULL,
                       "could not save the learning progress");
    return rc;
}

static int step(struct qt_learner *l, const size_t *windows, size_t first, size_t end,
                learn_loss_fn *loss, struct qt_err *err)
{
    size_t at = l->at.step % steps_per_pass(l) * l->opt.batch;
    double value;
    int rc;
    learn_params_clear(l, first, end);
    QT_TRY(save_if_interrupted(
        l, loss(&value, l, windows + at, qt_min_size(l->opt.batch, l->ntrain - at), true, err),
        err));
    if (!isfinite(value) || !learn_params_finite(l, first, end))
        return qt_fail(err, QT_E_INPUT, l->source.dir, NULL,
                       "learning: loss or gradient is not finite at step %zu; try a lower lr",
                       (size_t)l->at.step);
    QT_TRY(learn_params_step(l, first, end, l->at.step + 1, rate(l, l->at.step), err));
    l->at.loss_sum += value;
    l->at.loss_steps++;
    l->at.step++;
done:
    return rc;
}

/* ---- evaluation ----------------------------------------------------------------------------- */

static int held_out_loss(double *out, struct qt_learner *l, learn_loss_fn *loss, struct qt_err *err)
{
    double sum = 0;
    for (size_t i = 0; i < l->nheld; i += l->opt.batch) {
        size_t n = qt_min_size(l->opt.batch, l->nheld - i);
        double value;
        int rc = loss(&value, l, l->held + i, n, false, err);
        if (rc < 0)
            return rc;
        sum += value * (double)n;
    }
    *out = sum / (double)l->nheld;
    return QT_OK;
}

/* Appends a row to the curve, keeps the parameters if they are the best so far, and saves the
 * progress if the latest save is some time ago. An interrupted step saves, too. */
static int evaluate(struct qt_learner *l, size_t first, size_t end, learn_loss_fn *loss,
                    struct qt_err *err)
{
    struct learn_progress *at = &l->at;
    double value;
    int rc;
    QT_TRY(held_out_loss(&value, l, loss, err));
    if (!isfinite(value))
        return qt_fail(err, QT_E_INPUT, l->source.dir, NULL,
                       "learning: the held-out loss is not finite at step %zu; try a lower lr",
                       (size_t)at->step);
    QT_TRY(qt_array_grow(&l->points, &l->points_capacity, at->points + 1, sizeof *l->points, err));
    l->points[at->points++] = (struct learn_point){
        at->layer, at->step, at->loss_steps ? at->loss_sum / (double)at->loss_steps : 0, value};
    at->loss_sum = 0;
    at->loss_steps = 0;
    at->stale++;
    if (at->step == 0 || value < at->best_loss) {
        at->best_loss = value;
        at->best_step = at->step;
        at->stale = 0;
        QT_TRY(learn_params_keep(l, first, end, err));
    }
    /* Ranks save together. */
    if (qt_comm_size(l->run->opt->comm) > 1 || qt_clock() - l->saved_at >= SAVE_SECONDS)
        QT_TRY(learn_params_save(l, err));
done:
    return rc;
}

static bool is_due(const struct qt_learner *l)
{
    size_t every = qt_ceil_div(steps_per_pass(l), EVALUATIONS);
    return l->at.step % every == 0 || l->at.step == all_steps(l);
}

/* Stores the best parameters in delta and the matrices. If no step was better than the start, the
 * matrices are read back from disk: with mode=ste, applying delta = 0 chooses new codes. */
static int restore_best(struct qt_learner *l, size_t first, size_t end, struct qt_err *err)
{
    int rc;
    QT_TRY(learn_params_fetch(l, first, end, err));
    memcpy(l->params.delta + first, l->params.best + first, (end - first) * sizeof(float));
    if (l->at.best_step)
        return learn_params_apply(l, first, end, err);
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++) {
        struct learn_matrix *m = &l->matrices[i];
        if (!m->learns || m->first < first || m->first >= end)
            continue;
        qt_packed_free(&m->packed);
        m->new_codes = m->new_scales = true;
        rc = qt_run_read_back(&m->packed, l->run, m->item, err);
    }
done:
    return rc;
}

/* ---- the loop ------------------------------------------------------------------------------- */

static int train(struct qt_learner *l, size_t *windows, size_t first, size_t end,
                 learn_loss_fn *loss, struct qt_err *err)
{
    size_t per_pass = steps_per_pass(l);
    int rc = QT_OK;
    if (l->at.points == 0 || l->points[l->at.points - 1].layer != l->at.layer)
        QT_TRY(evaluate(l, first, end, loss, err));
    QT_TRY(learn_params_apply(l, first, end, err)); /* for a resumed run, or mode=ste */
    while (l->at.step < all_steps(l) && l->at.stale < PATIENCE) {
        shuffle(windows, l, l->at.step / per_pass);
        QT_TRY(step(l, windows, first, end, loss, err));
        if (is_due(l))
            QT_TRY(evaluate(l, first, end, loss, err));
        qt_log_progress(
            l->run->opt->log, "learn", (double)(l->at.layer * all_steps(l) + l->at.step),
            (double)(all_steps(l) * (l->opt.scope == QT_LEARN_BLOCK ? l->info.layers : 1)));
    }
    QT_TRY(restore_best(l, first, end, err));
done:
    return rc;
}

int learn_train(struct qt_learner *l, size_t first, size_t end, learn_loss_fn *loss,
                struct qt_err *err)
{
    size_t *windows;
    int rc = qt_array_new(&windows, l->ntrain, sizeof *windows, err);
    const double start = qt_clock();
    if (rc == QT_OK)
        rc = train(l, windows, first, end, loss, err);
    l->seconds += qt_clock() - start;
    qt_free(windows);
    return rc;
}
