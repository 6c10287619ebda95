#include "model/tokenizer/bpe.h"

#include <stdio.h>
#include <string.h>

static int bad(const struct qt_bpe *bpe, struct qt_err *err, const char *reason, const char *what)
{
    return qt_fail(err, QT_E_INPUT, bpe->file, NULL, "%s '%.200s'", reason, what);
}

/* ---- vocabulary ----------------------------------------------------------------------------- */

int qt_vocab_load(struct qt_bpe *bpe, const json_t *vocab, struct qt_err *err)
{
    unsigned char *seen = NULL;
    const char *token;
    json_t *value;
    int rc;
    if (!json_is_object(vocab) || json_object_size(vocab) == 0)
        return qt_fail(err, QT_E_INPUT, bpe->file, NULL, "model.vocab is not a non-empty object");
    QT_TRY(qt_array_new(&seen, QT_MAX_ID / 8, 1, err));
    /* Iterating does not change the object; Jansson's macro has no const version. */
    json_object_foreach ((json_t *)(uintptr_t)vocab, token, value) {
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= QT_MAX_ID) {
            rc = bad(bpe, err, "id is not an integer in range for token", token);
            goto done;
        }
        if (seen[id / 8] >> (id % 8) & 1) {
            rc = bad(bpe, err, "id is taken by another token:", token);
            goto done;
        }
        seen[id / 8] |= (unsigned char)(1u << (id % 8));
        QT_TRY(qt_strmap_add(&bpe->vocab, token, strlen(token), (uint32_t)id, err));
        if ((uint32_t)id > bpe->max_id)
            bpe->max_id = (uint32_t)id;
    }
    rc = QT_OK;
done:
    qt_free(seen);
    return rc;
}

static void load_byte_ids(struct qt_bpe *bpe)
{
    char name[8];
    for (unsigned b = 0; b < 256; b++) {
        snprintf(name, sizeof name, "<0x%02X>", b);
        bpe->byte_ids[b] = qt_strmap_find(&bpe->vocab, name, 6);
    }
}

/* ---- merges --------------------------------------------------------------------------------- */

static struct qt_merge *merge_slot(const struct qt_bpe *bpe, uint32_t left, uint32_t right)
{
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
    size_t mask = bpe->merge_slots - 1;
    for (size_t i = (size_t)(h >> 32) & mask;; i = (i + 1) & mask) {
        struct qt_merge *m = &bpe->merges[i];
        if (m->left == QT_NO_ID || (m->left == left && m->right == right))
            return m;
    }
}

const struct qt_merge *qt_bpe_merge(const struct qt_bpe *bpe, uint32_t left, uint32_t right)
{
    const struct qt_merge *m = merge_slot(bpe, left, right);
    return m->left == QT_NO_ID ? NULL : m;
}

struct part {
    const char *s;
    size_t size;
};

/* A merge is "a b" (tokens without spaces) or ["a", "b"]. */
static int parse_merge(struct part out[2], const json_t *merge, size_t rank,
                       const struct qt_bpe *bpe, struct qt_err *err)
{
    if (json_is_string(merge)) {
        const char *s = json_string_value(merge), *space = strchr(s, ' ');
        if (space && !strchr(space + 1, ' ')) {
            out[0] = (struct part){s, (size_t)(space - s)};
            out[1] = (struct part){space + 1, strlen(space + 1)};
            return QT_OK;
        }
    } else if (json_array_size(merge) == 2) {
        for (size_t i = 0; i < 2; i++) {
            const json_t *item = json_array_get(merge, i);
            out[i] = (struct part){json_string_value(item), json_string_length(item)};
        }
        if (out[0].s && out[1].s)
            return QT_OK;
    }
    return qt_fail(err, QT_E_INPUT, bpe->file, NULL, "merge %zu is not a pair of tokens", rank);
}

static int find_token(uint32_t *id, const struct qt_bpe *bpe, const char *s, size_t size,
                      size_t rank, struct qt_err *err)
{
    *id = qt_strmap_find(&bpe->vocab, s, size);
    if (*id == QT_NO_ID)
        return qt_fail(err, QT_E_INPUT, bpe->file, NULL,
                       "merge %zu uses or produces '%.*s', which is not in the vocabulary", rank,
                       (int)qt_min_size(size, 200), s);
    return QT_OK;
}

/* True when U+2581 follows another character somewhere in the token. */
static bool has_inner_space_mark(const char *s, size_t size)
{
    bool after_other = false;
    for (size_t i = 0; i < size;)
        if (size - i >= 3 && memcmp(s + i, "\xe2\x96\x81", 3) == 0) {
            if (after_other)
                return true;
            i += 3;
        } else {
            after_other = true;
            i++;
        }
    return false;
}

static int load_merge(struct qt_bpe *bpe, const json_t *merge, size_t rank, char **joined,
                      size_t *joined_capacity, struct qt_err *err)
{
    struct part part[2] = {0};
    uint32_t left, right, id;
    int rc;
    QT_TRY(parse_merge(part, merge, rank, bpe, err));
    QT_TRY(find_token(&left, bpe, part[0].s, part[0].size, rank, err));
    QT_TRY(find_token(&right, bpe, part[1].s, part[1].size, rank, err));
    /* As in the tokenizers library, which does not look at what it cuts. */
    const size_t cut = qt_min_size(bpe->prefix ? strlen(bpe->prefix) : 0, part[1].size);
    size_t size = part[0].size + part[1].size - cut;
    QT_TRY(qt_array_grow(joined, joined_capacity, size + 1, 1, err));
    memcpy(*joined, part[0].s, part[0].size);
    memcpy(*joined + part[0].size, part[1].s + cut, part[1].size - cut);
    QT_TRY(find_token(&id, bpe, *joined, size, rank, err));
    if (has_inner_space_mark(*joined, size))
        bpe->cut_at_space_mark = false;
    bpe->longest = qt_max_size(bpe->longest, size);
    /* The last of equal pairs wins, as in the tokenizers library. */
    *merge_slot(bpe, left, right) = (struct qt_merge){left, right, (uint32_t)rank, id};
    rc = QT_OK;
done:
    return rc;
}

/* Number of ways to cut the token into two tokens; `add`: makes a merge of each. */
static size_t cut_token(struct qt_bpe *bpe, const char *token, uint32_t id, uint32_t rank, bool add)
{
    const size_t size = strlen(token);
    size_t ways = 0;
    for (size_t at = 1; at < size; at++) {
        if (((unsigned char)token[at] & 0xc0) == 0x80)
            continue;
        const uint32_t left = qt_strmap_find(&bpe->vocab, token, at);
        const uint32_t right =
            left == QT_NO_ID ? QT_NO_ID : qt_strmap_find(&bpe->vocab, token + at, size - at);
        if (right == QT_NO_ID)
            continue;
        ways++;
        if (add)
            *merge_slot(bpe, left, right) = (struct qt_merge){left, right, rank, id};
    }
    if (ways) {
        bpe->longest = qt_max_size(bpe->longest, size);
        bpe->cut_at_space_mark = bpe->cut_at_space_mark && !has_inner_space_mark(token, size);
    }
    return ways;
}

static int load_ranks(struct qt_bpe *bpe, const struct qt_ids *ranks, const json_t *vocab,
                      struct qt_err *err)
{
    const char *token;
    json_t *value;
    size_t n = 0;
    int rc;
    for (int pass = 0; pass < 2; pass++) {
        json_object_foreach ((json_t *)(uintptr_t)vocab, token, value) {
            const uint32_t id = (uint32_t)json_integer_value(value);
            if (id < ranks->count && ranks->data[id] != QT_NO_ID)
                n += cut_token(bpe, token, id, ranks->data[id], pass > 0);
        }
        if (pass)
            break;
        for (bpe->merge_slots = 16; bpe->merge_slots < 2 * n;)
            bpe->merge_slots *= 2;
        QT_TRY(qt_array_new(&bpe->merges, bpe->merge_slots, sizeof *bpe->merges, err));
        for (size_t i = 0; i < bpe->merge_slots; i++)
            bpe->merges[i].left = QT_NO_ID;
    }
    rc = QT_OK;
done:
    return rc;
}

static int load_merges(struct qt_bpe *bpe, const json_t *merges, struct qt_err *err)
{
    char *joined = NULL;
    size_t capacity = 0, n = json_array_size(merges);
    int rc;
    if (!json_is_array(merges))
        return qt_fail(err, QT_E_INPUT, bpe->file, NULL, "model.merges is not an array");
    for (bpe->merge_slots = 16; bpe->merge_slots < 2 * n;)
        bpe->merge_slots *= 2;
    QT_TRY(qt_array_new(&bpe->merges, bpe->merge_slots, sizeof *bpe->merges, err));
    for (size_t i = 0; i < bpe->merge_slots; i++)
        bpe->merges[i].left = QT_NO_ID;
    for (size_t i = 0; i < n; i++) {
        const json_t *merge = json_array_get(merges, i);
        const char *line = json_string_value(merge);
        if (line && strncmp(line, "#version", 8) == 0)
            continue;
        QT_TRY(load_merge(bpe, merge, i, &joined, &capacity, err));
    }
    rc = QT_OK;
done:
    qt_free(joined);
    return rc;
}

/* ---- the section ---------------------------------------------------------------------------- */

static int load_affixes(struct qt_bpe *bpe, const json_t *model, struct qt_err *err)
{
    const char *prefix = "", *suffix = "";
    int rc;
    QT_TRY(qt_json_get_string(&prefix, model, "continuing_subword_prefix", bpe->file, err));
    QT_TRY(qt_json_get_string(&suffix, model, "end_of_word_suffix", bpe->file, err));
    if (*prefix)
        QT_TRY(qt_string_copy(&bpe->prefix, prefix, err));
    if (*suffix)
        QT_TRY(qt_string_copy(&bpe->suffix, suffix, err));
done:
    return rc;
}

static int check_unused_options(const json_t *model, const char *file, struct qt_err *err)
{
    double dropout = 0;
    int rc;
    QT_TRY(qt_json_get_real(&dropout, model, "dropout", file, err));
    if (dropout != 0)
        return qt_fail(err, QT_E_UNSUPPORTED, file, NULL, "BPE dropout %g is not supported",
                       dropout);
done:
    return rc;
}

int qt_bpe_load(struct qt_bpe *bpe, const json_t *model, const struct qt_ids *ranks,
                const char *file, struct qt_err *err)
{
    const char *unk = NULL;
    int rc;
    *bpe = (struct qt_bpe){.file = file, .unk = QT_NO_ID, .cut_at_space_mark = true};
    QT_TRY(check_unused_options(model, file, err));
    QT_TRY(qt_json_get_bool(&bpe->byte_fallback, model, "byte_fallback", file, err));
    QT_TRY(qt_json_get_bool(&bpe->fuse_unk, model, "fuse_unk", file, err));
    QT_TRY(qt_json_get_bool(&bpe->ignore_merges, model, "ignore_merges", file, err));
    QT_TRY(qt_json_get_string(&unk, model, "unk_token", file, err));
    QT_TRY(load_affixes(bpe, model, err));
    QT_TRY(qt_vocab_load(bpe, json_object_get(model, "vocab"), err));
    if (ranks->count)
        QT_TRY(load_ranks(bpe, ranks, json_object_get(model, "vocab"), err));
    else
        QT_TRY(load_merges(bpe, json_object_get(model, "merges"), err));
    load_byte_ids(bpe);
    bpe->has_unk = unk != NULL;
    if (unk)
        bpe->unk = qt_strmap_find(&bpe->vocab, unk, strlen(unk));
    /* If U+2581 is unknown, it may fuse with an unknown character before it; with ignore_merges the
     * whole word may be a token. */
    if (bpe->ignore_merges || bpe->prefix || bpe->suffix ||
        qt_strmap_find(&bpe->vocab, "\xe2\x96\x81", 3) == QT_NO_ID)
        bpe->cut_at_space_mark = false;
done:
    if (rc < 0)
        qt_bpe_free(bpe);
    return rc;
}

void qt_bpe_free(struct qt_bpe *bpe)
{
    qt_strmap_free(&bpe->vocab);
    qt_free(bpe->merges);
    qt_free(bpe->prefix);
    qt_free(bpe->suffix);
    bpe->merges = NULL;
    bpe->prefix = bpe->suffix = NULL;
}
