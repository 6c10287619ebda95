/* Which weights are outliers of mix24: those without which the cost of their group of 2 bits is
 * lower by most. */
#include "pack/schemes/mix24/chooser.h"

#include <string.h>

/* Scores the largest and the smallest weight of a 2-bit group in each row by how much the cost of
 * the others falls without it. */
static void score_gain(struct qt_mix24_chooser *c, struct qt_mix24_part *x, size_t strip,
                       size_t count, size_t group)
{
    float all[ROWS];
    c->ops->cost(all, &x->p);
    for (int end = 0; end < 2; end++) {
        size_t extreme[ROWS];
        float rest[ROWS];
        memset(x->outlier_rows, 0, sizeof x->outlier_rows);
        for (size_t r = 0; r < count; r++) {
            size_t best = 0;
            for (size_t j = 1; j < x->p.n; j++) {
                float t = x->t[j * ROWS + r], top = x->t[best * ROWS + r];
                if (end ? t < top : t > top)
                    best = j;
            }
            extreme[r] = best;
            x->outlier_rows[best] |= (uint16_t)(1u << r);
        }
        c->ops->cost(rest, &x->p);
        for (size_t r = 0; r < count; r++) {
            float gain = all[r] - rest[r];
            c->score[(strip * ROWS + r) * c->m.k + group * c->m.g + extreme[r]] =
                gain > 0 ? gain : 0;
        }
    }
}

static int score_strip(void *ctx, size_t strip, int thread, struct qt_err *err)
{
    struct qt_mix24_chooser *c = ctx;
    size_t count;
    const float *rows = qt_mix24_rows_of(c, strip, thread, &count);
    (void)err;
    for (size_t group = 0; group < c->m.groups; group++) {
        struct qt_mix24_part x;
        size_t first = group * c->m.g;
        if (c->is_four[group])
            continue;
        qt_mix24_part(&x, c, rows, count, group);
        if (!c->recipe.outliers_by_abs)
            score_gain(c, &x, strip, count, group);
        for (size_t j = 0; c->recipe.outliers_by_abs && j < x.p.n; j++)
            for (size_t r = 0; r < count; r++)
                c->score[(strip * ROWS + r) * c->m.k + first + j] = fabsf(x.t[j * ROWS + r]);
    }
    return QT_OK;
}

/* Radix selection among the scores with DIGIT bits at a time: nonnegative floats compare like their
 * bits, of which the first is 0. */
struct selection {
    const struct qt_mix24_chooser *c;
    int shift;       /* of the digit */
    uint32_t prefix; /* digits of the limit before it */
    size_t *count;   /* [threads][DIGITS] scores with this prefix by their digit */
};

static int count_digits(void *ctx, size_t strip, int thread, struct qt_err *err)
{
    const struct selection *s = ctx;
    const struct qt_mix24 *m = &s->c->m;
    const size_t first = strip * ROWS * s->c->scores,
                 end = first + qt_min_size(ROWS, m->n - strip * ROWS) * s->c->scores;
    size_t *count = s->count + (size_t)thread * DIGITS;
    (void)err;
    for (size_t i = first; i < end; i++) {
        const uint32_t digits = qt_f32_bits(s->c->score[i]) >> s->shift;
        count[digits % DIGITS] += digits >> DIGIT == s->prefix;
    }
    return QT_OK;
}

/* Finds the m.outliers-th largest score, and how many are larger. */
static int threshold(uint32_t *limit, size_t *above, const struct qt_mix24_chooser *c,
                     struct qt_err *err)
{
    const size_t threads = (size_t)qt_threads();
    struct selection s = {.c = c};
    int rc;
    *above = 0;
    QT_TRY(qt_array_new(&s.count, threads, DIGITS * sizeof *s.count, err));
    for (s.shift = 2 * DIGIT; s.shift >= 0; s.shift -= DIGIT) {
        size_t digit = DIGITS;
        memset(s.count, 0, threads * DIGITS * sizeof *s.count);
        QT_TRY(qt_parallel(c->m.strips, count_digits, &s, err));
        for (size_t i = DIGITS; i < threads * DIGITS; i++)
            s.count[i % DIGITS] += s.count[i];
        while (digit > 1 && *above + s.count[digit - 1] < c->m.outliers)
            *above += s.count[--digit];
        s.prefix = s.prefix << DIGIT | (uint32_t)(digit - 1);
    }
    *limit = s.prefix;
done:
    qt_free(s.count);
    return rc;
}

/* The weights with scores above `limit`, and the first ones of 2-bit groups whose scores are equal
 * to it. */
struct marking {
    struct qt_mix24_chooser *c;
    uint32_t limit;
    size_t *ties;        /* [n] per row: those that are equal, then those of them to mark */
    uint32_t *per_panel; /* [n] columns of the panel that is being written */
    size_t panel;
};

/* Group and column in it of score i of a row. */
static size_t scored_group(const struct qt_mix24_chooser *c, size_t i)
{
    return c->channel ? i / 2 : i / c->m.g;
}

static size_t scored_column(const struct qt_mix24_chooser *c, size_t row, size_t i)
{
    return c->channel ? c->channel[row * c->scores + i] : i % c->m.g;
}

static void count_ties(void *ctx, size_t row)
{
    const struct marking *x = ctx;
    const struct qt_mix24_chooser *c = x->c;
    for (size_t i = 0; i < c->scores; i++)
        x->ties[row] += qt_f32_bits(c->score[row * c->scores + i]) == x->limit &&
                        !c->is_four[scored_group(c, i)];
}

static void mark_row(void *ctx, size_t row)
{
    const struct marking *x = ctx;
    const struct qt_mix24_chooser *c = x->c;
    size_t ties = x->ties[row];
    for (size_t i = 0; i < c->scores; i++) {
        const uint32_t bits = qt_f32_bits(c->score[row * c->scores + i]);
        const size_t group = scored_group(c, i);
        const bool tie = bits == x->limit && ties > 0 && !c->is_four[group];
        ties -= tie;
        if (bits > x->limit || tie)
            c->marks[row * c->m.groups + group] |= (uint16_t)(1u << scored_column(c, row, i));
    }
}

/* Counts the marked weights of a row in a panel, or writes their columns to `to`. */
static uint32_t row_outliers(uint16_t *to, const struct marking *x, size_t row)
{
    const struct qt_mix24 *m = &x->c->m;
    const size_t per = QT_MIX24_PANEL / m->g, first = x->panel * per,
                 end = qt_min_size(first + per, m->slots);
    const uint16_t *marks = x->c->marks + row * m->groups;
    uint32_t count = 0;
    for (size_t slot = first; slot < end; slot++) {
        if (m->perm[slot] == QT_MIX24_NO_GROUP)
            continue;
        const unsigned columns = marks[m->perm[slot]];
        for (size_t j = 0; columns >> j; j++)
            if (columns >> j & 1) {
                if (to)
                    to[count] = (uint16_t)((slot - first) * m->g + j);
                count++;
            }
    }
    return count;
}

static void count_row(void *ctx, size_t row)
{
    const struct marking *x = ctx;
    x->per_panel[row] = row_outliers(NULL, x, row);
}

static void write_row(void *ctx, size_t row)
{
    const struct marking *x = ctx;
    const struct qt_mix24 *m = &x->c->m;
    row_outliers(m->csr_col + m->csr_ptr[x->panel * (m->n + 1) + row], x, row);
}

/* Brings the two scores of a group into the order of their columns. */
static void sort_scores(void *ctx, size_t row)
{
    const struct qt_mix24_chooser *c = ctx;
    float *score = c->score + row * c->scores;
    uint8_t *channel = c->channel + row * c->scores;
    for (size_t i = 0; i < c->scores; i += 2) {
        const float first = score[i];
        const uint8_t column = channel[i];
        const bool same = column == channel[i + 1], swapped = column > channel[i + 1];
        score[i] = c->is_four[i / 2] || same ? 0 : swapped ? score[i + 1] : first;
        score[i + 1] = c->is_four[i / 2] ? 0 : swapped ? first : score[i + 1];
        channel[i] = swapped ? channel[i + 1] : column;
        channel[i + 1] = swapped ? column : channel[i + 1];
    }
}

static int score_on_backend(struct qt_mix24_chooser *c, struct qt_err *err)
{
    float *importance = NULL;
    int rc;
    c->scores = 2 * c->m.groups;
    QT_TRY(qt_mix24_importance_new(&importance, c, err));
    QT_TRY(qt_array_new(&c->score, c->m.n, c->scores * sizeof *c->score, err));
    QT_TRY(qt_array_new(&c->channel, c->m.n, c->scores, err));
    struct qt_mix24_costs costs = qt_mix24_costs_on(c, importance);
    costs.gain = c->score;
    costs.channel = c->channel;
    QT_TRY(c->on->be->mix24_costs(c->on->be, &costs, err));
    qt_parallel_for(c->m.n, sort_scores, c);
done:
    qt_free(importance);
    return rc;
}

struct spreading {
    const struct qt_mix24_chooser *c;
    float *to; /* [n][k] */
};

static void spread_row(void *ctx, size_t row)
{
    const struct spreading *x = ctx;
    const struct qt_mix24_chooser *c = x->c;
    for (size_t i = 0; i < c->scores; i++)
        if (c->score[row * c->scores + i] > 0)
            x->to[row * c->m.k + i / 2 * c->m.g + scored_column(c, row, i)] =
                c->score[row * c->scores + i];
}

/* From scores of two weights of a group to those of all: the limit is 0. */
static int spread_scores(struct qt_mix24_chooser *c, struct qt_err *err)
{
    struct spreading x = {.c = c};
    int rc = qt_array_new(&x.to, c->m.n, c->m.k * sizeof *x.to, err);
    if (rc < 0)
        return rc;
    qt_parallel_for(c->m.n, spread_row, &x);
    qt_free(c->score);
    qt_free(c->channel);
    c->score = x.to;
    c->scores = c->m.k;
    c->channel = NULL;
    return QT_OK;
}

static int score_on_host(struct qt_mix24_chooser *c, struct qt_err *err)
{
    int rc;
    c->scores = c->m.k;
    QT_TRY(qt_array_new(&c->score, c->m.n, c->m.k * sizeof *c->score, err));
    QT_TRY(qt_parallel(c->m.strips, score_strip, c, err));
done:
    return rc;
}

/* Marks the m.outliers largest scores, ties by index, and writes rows and columns of the CSR
 * matrix. If too few weights have a gain, the first weights of 2-bit groups fill up the count. */
int qt_mix24_choose_outliers(struct qt_mix24_chooser *c, struct qt_err *err)
{
    const struct qt_mix24 *m = &c->m;
    struct marking x = {.c = c};
    size_t above, left, at = 0;
    int rc;
    QT_TRY(c->on && !c->recipe.outliers_by_abs ? score_on_backend(c, err) : score_on_host(c, err));
    QT_TRY(qt_array_new(&c->marks, m->n, m->groups * sizeof *c->marks, err));
    QT_TRY(qt_array_new(&x.ties, m->n, sizeof *x.ties, err));
    QT_TRY(qt_array_new(&x.per_panel, m->n, sizeof *x.per_panel, err));
    QT_TRY(threshold(&x.limit, &above, c, err));
    if (x.limit == 0 && c->channel)
        QT_TRY(spread_scores(c, err));
    qt_parallel_for(m->n, count_ties, &x);
    left = m->outliers - above;
    for (size_t row = 0; row < m->n; row++) {
        x.ties[row] = qt_min_size(x.ties[row], left);
        left -= x.ties[row];
    }
    qt_parallel_for(m->n, mark_row, &x);
    for (x.panel = 0; x.panel < m->panels; x.panel++) {
        uint32_t *ptr = m->csr_ptr + x.panel * (m->n + 1);
        qt_parallel_for(m->n, count_row, &x);
        for (size_t row = 0; row < m->n; row++) {
            ptr[row] = (uint32_t)at;
            at += x.per_panel[row];
        }
        ptr[m->n] = (uint32_t)at;
        qt_parallel_for(m->n, write_row, &x);
    }
done:
    qt_free(x.ties);
    qt_free(x.per_panel);
    return rc;
}
