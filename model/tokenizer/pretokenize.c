#include "model/tokenizer/internal.h"

#include <string.h>

int qt_stages_add(struct qt_stage **out, struct qt_stages *stages, enum qt_stage_kind kind,
                  const char *file, struct qt_err *err)
{
    if (stages->count == QT_MAX_STAGES)
        return qt_fail(err, QT_E_UNSUPPORTED, file, NULL,
                       "more than %d normalizers and pre-tokenizers", QT_MAX_STAGES);
    int rc = qt_array_grow(&stages->list, &stages->capacity, stages->count + 1,
                           sizeof *stages->list, err);
    if (rc < 0)
        return rc;
    *out = &stages->list[stages->count++];
    **out = (struct qt_stage){.kind = kind};
    return QT_OK;
}

void qt_stages_free(struct qt_stages *stages)
{
    for (size_t i = 0; i < stages->count; i++) {
        qt_added_set_free(&stages->list[i].added);
        qt_free(stages->list[i].text);
        qt_regex_free(stages->list[i].regex);
        qt_charsmap_free(stages->list[i].charsmap);
    }
    qt_free(stages->list);
    *stages = (struct qt_stages){0};
}

/* ---- one run -------------------------------------------------------------------------------- */

struct run {
    const struct qt_stages *stages;
    const struct qt_stage_sink *sink;
    struct qt_regex_work *regex;
    struct qt_text scratch[QT_MAX_STAGES]; /* output of each stage that rewrites its piece */
    struct qt_text shadow[QT_MAX_STAGES];  /* what PCRE2 sees of the piece of each stage */
    struct qt_unicode_known known;         /* to PCRE2 */
    char bytes[256][2];                    /* GPT-2's printable characters for bytes, in UTF-8 */
    unsigned char byte_sizes[256];
    struct qt_err *err;
};

static int run_from(struct run *run, size_t i, struct qt_piece piece);

static struct qt_piece part_of(struct qt_piece p, size_t start, size_t end)
{
    size_t head = p.head > start ? qt_min_size(p.head, end) - start : 0;
    return (struct qt_piece){p.text + start, end - start, head};
}

static struct qt_text *scratch_of(struct run *run, size_t i)
{
    run->scratch[i].size = 0;
    return &run->scratch[i];
}

/* Passes the output of stage i, in scratch[i], to the next stage; `head` as in struct qt_piece. */
static int pass_on(struct run *run, size_t i, size_t head)
{
    const struct qt_text *t = &run->scratch[i];
    return run_from(run, i + 1, (struct qt_piece){t->data, t->size, qt_min_size(head, t->size)});
}

/* ---- stages --------------------------------------------------------------------------------- */

static int run_added(struct run *run, size_t i, struct qt_piece p)
{
    const struct qt_added_set *set = &run->stages->list[i].added;
    const struct qt_added *token;
    size_t start, end, from = 0, done_to = 0;
    int rc;
    while ((token = qt_added_next(&start, &end, &from, done_to, set, p.text, p.size,
                                  run->sink->interrupted))) {
        QT_TRY(qt_tokenizer_poll(run->sink->interrupted, run->err));
        if (done_to < start)
            QT_TRY(run_from(run, i + 1, part_of(p, done_to, start)));
        QT_TRY(run->sink->added(run->sink->ctx, token->id, run->err));
        done_to = end;
    }
    QT_TRY(qt_tokenizer_poll(run->sink->interrupted, run->err));
    rc = done_to < p.size ? run_from(run, i + 1, part_of(p, done_to, p.size)) : QT_OK;
done:
    return rc;
}

static int run_unicode(struct run *run, size_t i, struct qt_piece p)
{
    const struct qt_stage *s = &run->stages->list[i];
    struct qt_text *out = scratch_of(run, i);
    size_t first = 0;
    int rc;
    if (s->kind == QT_STAGE_LOWER)
        QT_TRY(qt_unicode_lower(out, p.text, p.size, run->err));
    else
        QT_TRY(qt_unicode_normalize(out, p.text, p.size, s->form, run->err));
    if (p.head)
        qt_utf8_char(&first, out->data);
    rc = pass_on(run, i, first);
done:
    return rc;
}

static int run_charsmap(struct run *run, size_t i, struct qt_piece p)
{
    struct qt_text *out = scratch_of(run, i);
    size_t head = p.head;
    int rc;
    QT_TRY(qt_charsmap_run(out, &head, run->stages->list[i].charsmap, p.text, p.size, run->err));
    rc = pass_on(run, i, head);
done:
    return rc;
}

static int run_strip(struct run *run, size_t i, struct qt_piece p)
{
    const struct qt_stage *s = &run->stages->list[i];
    size_t start = 0, end = p.size, n;
    while (s->left && start < end && qt_char_is_space(qt_utf8_char(&n, p.text + start)))
        start += n;
    while (s->right && end > start) {
        size_t last = qt_utf8_back(p.text, end);
        if (!qt_char_is_space(qt_utf8_char(&n, p.text + last)))
            break;
        end = last;
    }
    return run_from(run, i + 1, part_of(p, start, end));
}

static int run_prepend(struct run *run, size_t i, struct qt_piece p)
{
    const struct qt_stage *s = &run->stages->list[i];
    int rc;
    if (s->when != QT_PREPEND_ALWAYS &&
        ((p.size >= s->text_size && memcmp(p.text, s->text, s->text_size) == 0) ||
         (s->when == QT_PREPEND_MISSING_FIRST && !p.head)))
        return run_from(run, i + 1, p);
    struct qt_text *out = scratch_of(run, i);
    QT_TRY(qt_text_add(out, s->text, s->text_size, run->err));
    QT_TRY(qt_text_add(out, p.text, p.size, run->err));
    rc = pass_on(run, i, p.head ? p.head + s->text_size : 0);
done:
    return rc;
}

static int scan_of(struct qt_regex_scan *out, struct run *run, size_t i, struct qt_piece p)
{
    const struct qt_regex *regex = run->stages->list[i].regex;
    *out =
        (struct qt_regex_scan){.regex = regex, .work = run->regex, .text = p.text, .size = p.size};
    return qt_regex_is_literal(regex) ? QT_OK
                                      : qt_unicode_shadow(&out->seen, &run->shadow[i], run->known,
                                                          p.text, p.size, run->err);
}

static int run_replace(struct run *run, size_t i, struct qt_piece p)
{
    const struct qt_stage *s = &run->stages->list[i];
    struct qt_regex_scan scan;
    struct qt_text *out = scratch_of(run, i);
    size_t start, end, done_to = 0, head = p.head;
    bool found;
    int rc;
    QT_TRY(scan_of(&scan, run, i, p));
    for (;;) {
        QT_TRY(qt_regex_next(&found, &start, &end, &scan, run->err));
        if (!found)
            break;
        QT_TRY(qt_text_add(out, p.text + done_to, start - done_to, run->err));
        /* The replacement counts as coming from the last character that it replaces. */
        if (start < p.head)
            head = end <= p.head ? head + s->text_size - (end - start) : out->size;
        QT_TRY(qt_text_add(out, s->text, s->text_size, run->err));
        done_to = end;
    }
    QT_TRY(qt_text_add(out, p.text + done_to, p.size - done_to, run->err));
    rc = pass_on(run, i, head);
done:
    return rc;
}

static bool joins_previous(enum qt_split_behavior behavior, bool previous, bool flag)
{
    switch (behavior) {
    case QT_SPLIT_CONTIGUOUS:
        return flag == previous;
    case QT_SPLIT_MERGED_WITH_PREVIOUS:
        return flag && !previous;
    case QT_SPLIT_MERGED_WITH_NEXT:
        return !flag && previous;
    default:
        return false;
    }
}

/* The piece that a split has collected so far. */
struct gather {
    size_t start, end;
    bool any, previous; /* flag of the segment last seen */
};

/* Adds the next segment of the text, a match or the text between two matches. `invert` swaps the
 * roles of both. */
static int add_segment(struct run *run, size_t i, struct qt_piece p, struct gather *g, size_t start,
                       size_t end, bool match)
{
    const struct qt_stage *s = &run->stages->list[i];
    bool flag = match != s->invert;
    int rc = QT_OK;
    if (g->any && joins_previous(s->behavior, g->previous, flag)) {
        g->end = end;
    } else {
        if (g->any)
            QT_TRY(run_from(run, i + 1, part_of(p, g->start, g->end)));
        g->start = start;
        g->end = end;
        g->any = !(flag && s->behavior == QT_SPLIT_REMOVED);
    }
    g->previous = flag;
done:
    return rc;
}

static int run_split(struct run *run, size_t i, struct qt_piece p)
{
    struct qt_regex_scan scan;
    struct gather g = {0};
    size_t start, end, done_to = 0;
    bool found;
    int rc;
    QT_TRY(scan_of(&scan, run, i, p));
    for (;;) {
        QT_TRY(qt_regex_next(&found, &start, &end, &scan, run->err));
        if (!found)
            break;
        if (done_to < start)
            QT_TRY(add_segment(run, i, p, &g, done_to, start, false));
        QT_TRY(add_segment(run, i, p, &g, start, end, true));
        done_to = end;
    }
    if (done_to < p.size)
        QT_TRY(add_segment(run, i, p, &g, done_to, p.size, false));
    rc = g.any ? run_from(run, i + 1, part_of(p, g.start, g.end)) : QT_OK;
done:
    return rc;
}

static int run_bytes(struct run *run, size_t i, struct qt_piece p)
{
    struct qt_text *out = scratch_of(run, i);
    int rc = qt_array_grow(&out->data, &out->capacity, 2 * p.size, 1, run->err);
    if (rc < 0)
        return rc;
    for (size_t k = 0; k < p.size; k++) {
        unsigned char b = (unsigned char)p.text[k];
        memcpy(out->data + out->size, run->bytes[b], run->byte_sizes[b]);
        out->size += run->byte_sizes[b];
    }
    return pass_on(run, i, p.head ? run->byte_sizes[(unsigned char)p.text[0]] : 0);
}

static int run_from(struct run *run, size_t i, struct qt_piece piece)
{
    if (piece.size == 0)
        return QT_OK;
    if (i == run->stages->count)
        return run->sink->piece(run->sink->ctx, piece.text, piece.size, run->err);
    switch (run->stages->list[i].kind) {
    case QT_STAGE_ADDED:
        return run_added(run, i, piece);
    case QT_STAGE_UNICODE:
    case QT_STAGE_LOWER:
        return run_unicode(run, i, piece);
    case QT_STAGE_STRIP:
        return run_strip(run, i, piece);
    case QT_STAGE_PREPEND:
        return run_prepend(run, i, piece);
    case QT_STAGE_REPLACE:
        return run_replace(run, i, piece);
    case QT_STAGE_SPLIT:
        return run_split(run, i, piece);
    case QT_STAGE_BYTES:
        return run_bytes(run, i, piece);
    case QT_STAGE_CHARSMAP:
        return run_charsmap(run, i, piece);
    }
    return qt_fail(run->err, QT_E_INTERNAL, NULL, NULL, "unknown tokenizer stage");
}

/* ---- entry ---------------------------------------------------------------------------------- */

int32_t qt_byte_char(int32_t b)
{
    return b <= ' '    ? 0x100 + b
           : b <= '~'  ? b
           : b <= 0xa0 ? 0x121 + b - 0x7f
           : b == 0xad ? 0x143
                       : b;
}

static void fill_byte_table(struct run *run)
{
    for (int32_t b = 0; b < 256; b++) {
        const int32_t c = qt_byte_char(b);
        if (c < 0x80) {
            run->bytes[b][0] = (char)c;
            run->byte_sizes[b] = 1;
        } else {
            run->bytes[b][0] = (char)(0xc0 | c >> 6);
            run->bytes[b][1] = (char)(0x80 | (c & 0x3f));
            run->byte_sizes[b] = 2;
        }
    }
}

int qt_stages_run(const struct qt_stages *stages, const struct qt_stage_sink *sink, const char *s,
                  size_t size, struct qt_err *err)
{
    struct run *run = NULL;
    size_t first = 0, limit;
    int rc;
    QT_TRY(qt_array_new(&run, 1, sizeof *run, err));
    QT_TRY(qt_regex_work_new(&run->regex, s, size, sink->interrupted, err));
    run->stages = stages;
    run->sink = sink;
    run->err = err;
    fill_byte_table(run);
    run->known = qt_unicode_known_to_pcre2();
    /* Normalization forms expand a text less than this; a hostile list of Replace has no bound. */
    if (qt_mul_overflow(&limit, size, 64) || qt_add_overflow(&limit, limit, 1 << 16))
        limit = SIZE_MAX;
    for (size_t i = 0; i < stages->count; i++) {
        run->scratch[i].limit = limit;
        run->scratch[i].interrupted = sink->interrupted;
    }
    if (size)
        qt_utf8_char(&first, s);
    rc = run_from(run, 0, (struct qt_piece){s, size, first});
done:
    if (run) {
        for (size_t i = 0; i < stages->count; i++)
            qt_free(run->scratch[i].data), qt_free(run->shadow[i].data);
        qt_regex_work_free(run->regex);
        qt_free(run);
    }
    return rc;
}
