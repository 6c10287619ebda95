/*
 * Byte-level BPE as keys of a GGUF file: the algorithm "gpt2" of llama.cpp, with merges and a
 * splitting of the text that is chosen by name (qt_gguf_pre_at).
 */
#include "pack/export/gguf_tokens.h"

#include <stdio.h>
#include <string.h>

/* ---- pre-tokenizers ------------------------------------------------------------------------- */

enum { STEPS = 4096 };

/* A line end in a regular expression, which means the same as its escape, is written as that. */
static void add_step(char *steps, const char *name, const char *argument)
{
    size_t used = strlen(steps);
    used += (size_t)snprintf(steps + used, STEPS - used, "%s%s", name, *argument ? " " : "");
    for (; *argument && used + 4 < STEPS; argument++) {
        const bool line_end = *argument == '\n' || *argument == '\r';
        if (line_end)
            steps[used++] = '\\';
        steps[used++] = line_end ? (*argument == '\n' ? 'n' : 'r') : *argument;
    }
    snprintf(steps + qt_min_size(used, STEPS - 2), 2, "\n");
}

/* Writes the pre-tokenizers as lines; one that is not known here becomes a line that no row of the
 * table has. */
static void describe(char *steps, const json_t *section)
{
    const char *type = qt_gguf_section(section);
    const json_t *list = json_object_get(section, "pretokenizers");
    const char *regex =
        json_string_value(json_object_get(json_object_get(section, "pattern"), "Regex"));
    const char *behavior = json_string_value(json_object_get(section, "behavior"));
    for (size_t i = 0; strcmp(type, "Sequence") == 0 && i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        if (strcmp(qt_gguf_section(item), "Sequence") != 0)
            describe(steps, item);
    }
    if (strcmp(type, "Sequence") == 0)
        return;
    if (strcmp(type, "ByteLevel") == 0 && !qt_gguf_flag(section, "add_prefix_space", true))
        add_step(steps, qt_gguf_flag(section, "use_regex", true) ? "words" : "bytes", "");
    else if (strcmp(type, "Digits") == 0 && qt_gguf_flag(section, "individual_digits", false))
        add_step(steps, "digits", "");
    else if (strcmp(type, "Split") == 0 && regex && behavior && strcmp(behavior, "Isolated") == 0 &&
             !qt_gguf_flag(section, "invert", false))
        add_step(steps, "split", regex);
    else
        add_step(steps, "unknown", type);
}

/* *all: merges make every token that is no added one, so that ignore_merges changes nothing. */
static int check_merges(bool *all, const struct tokens *t)
{
    int rc = QT_OK;
    *all = true;
    for (size_t i = 0; i < t->count && rc == QT_OK && *all; i++)
        if (t->list[i].type == TOKEN_NORMAL)
            rc = qt_tokenizer_merges(all, t->tok, t->list[i].text, t->err);
    return rc;
}

/* *out = NULL: llama.cpp has no such splitting. */
static int find_pre(const struct qt_gguf_pre **out, const struct tokens *t, char *steps)
{
    const json_t *model = json_object_get(t->root, "model");
    const struct qt_gguf_pre *pre, *other = NULL;
    bool all = false;
    int rc = QT_OK;
    *out = NULL;
    *steps = '\0';
    describe(steps, json_object_get(t->root, "pre_tokenizer"));
    for (size_t i = 0; !*out && (pre = qt_gguf_pre_at(i)) != NULL; i++) {
        if (strcmp(pre->steps, steps) != 0)
            continue;
        if (pre->ignore_merges == qt_gguf_flag(model, "ignore_merges", false))
            *out = pre;
        else if (!other)
            other = pre;
    }
    if (!*out && other)
        rc = check_merges(&all, t);
    if (all)
        *out = other;
    return rc;
}

/* ---- merges ---------------------------------------------------------------------------------- */

static int write_merges(struct qt_gguf_bytes *b, const struct tokens *t)
{
    const json_t *merges = json_object_get(json_object_get(t->root, "model"), "merges");
    size_t count = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < json_array_size(merges); i++)
        count += !qt_gguf_is_version(json_array_get(merges, i));
    qt_gguf_array(b, "tokenizer.ggml.merges", QT_GGUF_STRING, count);
    for (size_t i = 0; i < json_array_size(merges); i++) {
        char *text;
        if (qt_gguf_is_version(json_array_get(merges, i)))
            continue;
        QT_TRY(qt_gguf_merge(&text, t, json_array_get(merges, i)));
        const char *space = strchr(text, ' ');
        const bool plain = space && !strchr(space + 1, ' ');
        qt_gguf_text(b, text, strlen(text));
        qt_free(text);
        if (!plain)
            return qt_gguf_no_tokenizer(t, "byte-level BPE with spaces in merges");
    }
done:
    return rc;
}

/* NFC changes text that is not composed, which llama.cpp takes as it is; its converter accepts
 * that, too. */
int qt_gguf_write_bpe(struct qt_gguf_bytes *b, const struct tokens *t)
{
    const json_t *normalizer = json_object_get(t->root, "normalizer");
    char steps[STEPS];
    const struct qt_gguf_pre *pre;
    int rc = find_pre(&pre, t, steps);
    if (rc < 0)
        return rc;
    if (!json_is_array(json_object_get(json_object_get(t->root, "model"), "merges")))
        return qt_gguf_no_tokenizer(t, "tokenizer model but BPE in these files");
    const bool empty = strcmp(qt_gguf_section(normalizer), "Sequence") == 0 &&
                       json_array_size(json_object_get(normalizer, "normalizers")) == 0;
    if (json_is_object(normalizer) && !empty && strcmp(qt_gguf_section(normalizer), "NFC") != 0)
        return qt_fail(t->err, QT_E_UNSUPPORTED, t->path, NULL,
                       "gguf cannot hold this tokenizer: llama.cpp has no normalizer '%.100s'",
                       qt_gguf_section(normalizer));
    if (!pre) {
        for (char *s = steps; *s; s++)
            *s = *s == '\n' ? ';' : *s;
        return qt_fail(t->err, QT_E_UNSUPPORTED, t->path, NULL,
                       "gguf cannot hold this tokenizer: its pre-tokenizer is not in the table of "
                       "those that llama.cpp has (ignore_merges %s; %.300s)",
                       qt_gguf_flag(json_object_get(t->root, "model"), "ignore_merges", false)
                           ? "true"
                           : "false",
                       steps);
    }
    qt_gguf_string(b, "", "tokenizer.ggml.model", "gpt2");
    qt_gguf_string(b, "", "tokenizer.ggml.pre", pre->name);
    qt_gguf_write_tokens(b, t);
    QT_TRY(write_merges(b, t));
done:
    return rc;
}
