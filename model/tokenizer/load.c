/*
 * "normalizer" and "pre_tokenizer" of tokenizer.json -> stages. Every supported component is a row
 * of a table. Any other component is an error that names it.
 */
#include "model/tokenizer/internal.h"

#include <string.h>

#define PUNCTUATION "[\\p{P}$+<=>^`|~]"
#define GPT2_PATTERN                                                                               \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

struct load {
    struct qt_stages *stages;
    const char *file;
    struct qt_err *err;
};

struct component {
    const char *type;
    int (*load)(struct load *load, const json_t *section);
};

static int add(struct qt_stage **out, struct load *load, enum qt_stage_kind kind)
{
    return qt_stages_add(out, load->stages, kind, load->file, load->err);
}

static int add_unicode(struct load *load, enum qt_unicode_form form)
{
    struct qt_stage *s;
    int rc = add(&s, load, QT_STAGE_UNICODE);
    if (rc == QT_OK)
        s->form = form;
    return rc;
}

static int add_prepend(struct load *load, const char *text, enum qt_prepend_when when)
{
    struct qt_stage *s;
    int rc;
    QT_TRY(add(&s, load, QT_STAGE_PREPEND));
    s->when = when;
    s->text_size = strlen(text);
    QT_TRY(qt_string_copy(&s->text, text, load->err));
done:
    return rc;
}

static int add_replace(struct load *load, const char *pattern, bool literal, const char *content)
{
    struct qt_stage *s;
    int rc;
    QT_TRY(add(&s, load, QT_STAGE_REPLACE));
    s->text_size = strlen(content);
    QT_TRY(qt_string_copy(&s->text, content, load->err));
    QT_TRY(qt_regex_new(&s->regex, pattern, literal, load->file, load->err));
done:
    return rc;
}

static int add_split(struct load *load, const char *pattern, bool literal,
                     enum qt_split_behavior behavior, bool invert)
{
    struct qt_stage *s;
    int rc;
    QT_TRY(add(&s, load, QT_STAGE_SPLIT));
    s->behavior = behavior;
    s->invert = invert;
    QT_TRY(qt_regex_new(&s->regex, pattern, literal, load->file, load->err));
done:
    return rc;
}

/* {"String": "..."} or {"Regex": "..."} */
static int need_pattern(const char **pattern, bool *literal, struct load *load,
                        const json_t *section)
{
    const json_t *object = json_object_get(section, "pattern");
    const char *s = json_string_value(json_object_get(object, "String"));
    *pattern = s ? s : json_string_value(json_object_get(object, "Regex"));
    *literal = s != NULL;
    if (!*pattern)
        return qt_fail(load->err, QT_E_INPUT, load->file, NULL,
                       "pattern is neither a String nor a Regex");
    return QT_OK;
}

static int get_behavior(enum qt_split_behavior *out, struct load *load, const json_t *section)
{
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const char *name = "Isolated";
    int rc = qt_json_get_string(&name, section, "behavior", load->file, load->err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = (enum qt_split_behavior)i;
            return QT_OK;
        }
    return qt_fail(load->err, QT_E_UNSUPPORTED, load->file, NULL,
                   "split behavior '%.100s' is not supported", name);
}

static int load_component(struct load *load, const json_t *section, const char *what,
                          const struct component *table, size_t count)
{
    const char *type;
    int rc;
    if (!json_is_object(section))
        return qt_fail(load->err, QT_E_INPUT, load->file, NULL, "%s is not an object", what);
    QT_TRY(qt_json_need_string(&type, section, "type", load->file, load->err));
    for (size_t i = 0; i < count; i++)
        if (strcmp(type, table[i].type) == 0)
            return table[i].load(load, section);
    rc = qt_fail(load->err, QT_E_UNSUPPORTED, load->file, NULL, "%s '%.100s' is not supported",
                 what, type);
done:
    return rc;
}

static int load_list(struct load *load, const json_t *section, const char *key,
                     int (*one)(struct load *, const json_t *))
{
    const json_t *list = json_object_get(section, key);
    int rc = QT_OK;
    if (!json_is_array(list))
        return qt_fail(load->err, QT_E_INPUT, load->file, NULL, "%s is not an array", key);
    for (size_t i = 0; i < json_array_size(list); i++)
        QT_TRY(one(load, json_array_get(list, i)));
done:
    return rc;
}

/* ---- normalizers ---------------------------------------------------------------------------- */

static int load_normalizer(struct load *load, const json_t *section);

static int load_normalizers(struct load *load, const json_t *section)
{
    return load_list(load, section, "normalizers", load_normalizer);
}

static int load_nfc(struct load *load, const json_t *section)
{
    (void)section;
    return add_unicode(load, QT_NFC);
}

static int load_nfd(struct load *load, const json_t *section)
{
    (void)section;
    return add_unicode(load, QT_NFD);
}

static int load_nfkc(struct load *load, const json_t *section)
{
    (void)section;
    return add_unicode(load, QT_NFKC);
}

static int load_nfkd(struct load *load, const json_t *section)
{
    (void)section;
    return add_unicode(load, QT_NFKD);
}

static int load_lowercase(struct load *load, const json_t *section)
{
    struct qt_stage *s;
    (void)section;
    return add(&s, load, QT_STAGE_LOWER);
}

static int load_strip(struct load *load, const json_t *section)
{
    struct qt_stage *s;
    int rc;
    QT_TRY(add(&s, load, QT_STAGE_STRIP));
    QT_TRY(qt_json_get_bool(&s->left, section, "strip_left", load->file, load->err));
    QT_TRY(qt_json_get_bool(&s->right, section, "strip_right", load->file, load->err));
done:
    return rc;
}

static int load_prepend(struct load *load, const json_t *section)
{
    const char *text;
    int rc;
    QT_TRY(qt_json_need_string(&text, section, "prepend", load->file, load->err));
    QT_TRY(add_prepend(load, text, QT_PREPEND_ALWAYS));
done:
    return rc;
}

static int load_replace(struct load *load, const json_t *section)
{
    const char *pattern, *content;
    bool literal;
    int rc;
    QT_TRY(need_pattern(&pattern, &literal, load, section));
    QT_TRY(qt_json_need_string(&content, section, "content", load->file, load->err));
    QT_TRY(add_replace(load, pattern, literal, content));
done:
    return rc;
}

static int load_charsmap(struct load *load, const json_t *section,
                         const struct qt_charsmap_rules *rules)
{
    const json_t *text = json_object_get(section, "precompiled_charsmap");
    struct qt_stage *s;
    char *data = NULL;
    size_t size;
    int rc;
    if (!json_is_string(text))
        return qt_fail(load->err, QT_E_INPUT, load->file, NULL,
                       "precompiled_charsmap is not a string");
    QT_TRY(qt_base64_decode(&data, &size, json_string_value(text), json_string_length(text),
                            load->file, load->err));
    QT_TRY(add(&s, load, QT_STAGE_CHARSMAP));
    QT_TRY(qt_charsmap_new(&s->charsmap, data, size, rules, load->file, load->err));
done:
    qt_free(data);
    return rc;
}

static int load_precompiled(struct load *load, const json_t *section)
{
    return load_charsmap(load, section, &(struct qt_charsmap_rules){0});
}

static int load_sentencepiece(struct load *load, const json_t *section)
{
    struct qt_charsmap_rules rules = {.whole = true};
    int rc;
    QT_TRY(qt_json_get_bool(&rules.prefix, section, "prefix", load->file, load->err));
    QT_TRY(qt_json_get_bool(&rules.collapse, section, "collapse", load->file, load->err));
    QT_TRY(load_charsmap(load, section, &rules));
done:
    return rc;
}

static int load_strip_accents(struct load *load, const json_t *section)
{
    (void)section;
    return add_replace(load, "\\p{Mn}", false, "");
}

/* Han characters, which BERT takes as words. */
#define HAN                                                                                        \
    "\\x{4e00}-\\x{9fff}\\x{3400}-\\x{4dbf}\\x{20000}-\\x{2a6df}\\x{2a700}-\\x{2b73f}"             \
    "\\x{2b740}-\\x{2b81f}\\x{2b920}-\\x{2ceaf}\\x{f900}-\\x{faff}\\x{2f800}-\\x{2fa1f}"

static int load_bert(struct load *load, const json_t *section)
{
    bool clean = true, han = true, lower = true;
    int rc;
    QT_TRY(qt_json_get_bool(&clean, section, "clean_text", load->file, load->err));
    QT_TRY(qt_json_get_bool(&han, section, "handle_chinese_chars", load->file, load->err));
    QT_TRY(qt_json_get_bool(&lower, section, "lowercase", load->file, load->err));
    bool accents = lower; /* null: like lowercase */
    QT_TRY(qt_json_get_bool(&accents, section, "strip_accents", load->file, load->err));
    if (clean) {
        QT_TRY(add_replace(load,
                           "[\\x{0}-\\x{8}\\x{b}\\x{c}\\x{e}-\\x{1f}\\x{7f}-\\x{9f}\\x{fffd}"
                           "\\p{Cf}\\p{Co}]",
                           false, ""));
        QT_TRY(add_replace(load, "\\s", false, " "));
    }
    if (han) {
        QT_TRY(add_replace(load, "(?=[" HAN "])", false, " "));
        QT_TRY(add_replace(load, "(?<=[" HAN "])", false, " "));
    }
    if (accents) {
        QT_TRY(add_unicode(load, QT_NFD));
        QT_TRY(load_strip_accents(load, section));
    }
    if (lower)
        QT_TRY(load_lowercase(load, section));
done:
    return rc;
}

static int load_normalizer(struct load *load, const json_t *section)
{
    static const struct component table[] = {
        {"Sequence", load_normalizers},
        {"NFC", load_nfc},
        {"NFD", load_nfd},
        {"NFKC", load_nfkc},
        {"NFKD", load_nfkd},
        {"Lowercase", load_lowercase},
        {"Strip", load_strip},
        {"Prepend", load_prepend},
        {"Replace", load_replace},
        {"Precompiled", load_precompiled},
        {"SentencePiece", load_sentencepiece}, /* of sentencepiece.c */
        {"StripAccents", load_strip_accents},
        {"BertNormalizer", load_bert},
    };
    return load_component(load, section, "normalizer", table, sizeof table / sizeof *table);
}

int qt_normalizer_load(struct qt_stages *stages, const json_t *section, const char *file,
                       struct qt_err *err)
{
    struct load load = {stages, file, err};
    return !section || json_is_null(section) ? QT_OK : load_normalizer(&load, section);
}

/* ---- pre-tokenizers ------------------------------------------------------------------------- */

static int load_pretokenizer(struct load *load, const json_t *section);

static int load_pretokenizers(struct load *load, const json_t *section)
{
    return load_list(load, section, "pretokenizers", load_pretokenizer);
}

static int load_byte_level(struct load *load, const json_t *section)
{
    bool prefix = true, use_regex = true;
    struct qt_stage *s;
    int rc;
    QT_TRY(qt_json_get_bool(&prefix, section, "add_prefix_space", load->file, load->err));
    QT_TRY(qt_json_get_bool(&use_regex, section, "use_regex", load->file, load->err));
    if (prefix)
        QT_TRY(add_prepend(load, " ", QT_PREPEND_MISSING));
    if (use_regex)
        QT_TRY(add_split(load, GPT2_PATTERN, false, QT_SPLIT_ISOLATED, false));
    QT_TRY(add(&s, load, QT_STAGE_BYTES));
done:
    return rc;
}

static int load_split(struct load *load, const json_t *section)
{
    enum qt_split_behavior behavior;
    const char *pattern;
    bool literal, invert = false;
    int rc;
    QT_TRY(need_pattern(&pattern, &literal, load, section));
    QT_TRY(get_behavior(&behavior, load, section));
    QT_TRY(qt_json_get_bool(&invert, section, "invert", load->file, load->err));
    QT_TRY(add_split(load, pattern, literal, behavior, invert));
done:
    return rc;
}

static int load_digits(struct load *load, const json_t *section)
{
    bool individual = false;
    int rc;
    QT_TRY(qt_json_get_bool(&individual, section, "individual_digits", load->file, load->err));
    QT_TRY(add_split(load, "\\p{N}", false, individual ? QT_SPLIT_ISOLATED : QT_SPLIT_CONTIGUOUS,
                     false));
done:
    return rc;
}

static int load_punctuation(struct load *load, const json_t *section)
{
    enum qt_split_behavior behavior;
    int rc;
    QT_TRY(get_behavior(&behavior, load, section));
    QT_TRY(add_split(load, PUNCTUATION, false, behavior, false));
done:
    return rc;
}

static int load_whitespace(struct load *load, const json_t *section)
{
    (void)section;
    /* Inverted: the matches are kept. \w is that of Rust's regex crate, not of Oniguruma. */
#define WORD                                                                                       \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{200c}\\x{200d}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}"  \
    "\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}"
    return add_split(load, "[" WORD "]+|[^" WORD "\\s]+", false, QT_SPLIT_REMOVED, true);
#undef WORD
}

static int load_whitespace_split(struct load *load, const json_t *section)
{
    (void)section;
    return add_split(load, "\\s", false, QT_SPLIT_REMOVED, false);
}

static int load_bert_split(struct load *load, const json_t *section)
{
    int rc;
    (void)section;
    QT_TRY(load_whitespace_split(load, section));
    QT_TRY(add_split(load, PUNCTUATION, false, QT_SPLIT_ISOLATED, false));
done:
    return rc;
}

/* Old files have add_prefix_space; newer files have prepend_scheme and split. */
static int metaspace_scheme(const char **scheme, struct load *load, const json_t *section)
{
    static const char *const known[] = {"always", "first", "never"};
    bool prefix = true;
    int rc;
    QT_TRY(qt_json_get_bool(&prefix, section, "add_prefix_space", load->file, load->err));
    *scheme = prefix ? "always" : "never";
    QT_TRY(qt_json_get_string(scheme, section, "prepend_scheme", load->file, load->err));
    if (!prefix && strcmp(*scheme, "never") != 0)
        return qt_fail(load->err, QT_E_INPUT, load->file, NULL,
                       "Metaspace: add_prefix_space contradicts prepend_scheme");
    for (size_t i = 0; i < 3; i++)
        if (strcmp(*scheme, known[i]) == 0)
            return QT_OK;
    rc = qt_fail(load->err, QT_E_UNSUPPORTED, load->file, NULL,
                 "prepend_scheme '%.100s' is not supported", *scheme);
done:
    return rc;
}

static int load_metaspace(struct load *load, const json_t *section)
{
    const char *mark, *scheme;
    bool split = true;
    int rc;
    QT_TRY(qt_json_need_string(&mark, section, "replacement", load->file, load->err));
    QT_TRY(qt_json_get_bool(&split, section, "split", load->file, load->err));
    QT_TRY(metaspace_scheme(&scheme, load, section));
    QT_TRY(add_replace(load, " ", true, mark));
    if (strcmp(scheme, "never") != 0)
        QT_TRY(add_prepend(load, mark,
                           strcmp(scheme, "first") == 0 ? QT_PREPEND_MISSING_FIRST
                                                        : QT_PREPEND_MISSING));
    if (split)
        QT_TRY(add_split(load, mark, true, QT_SPLIT_MERGED_WITH_NEXT, false));
done:
    return rc;
}

static int load_pretokenizer(struct load *load, const json_t *section)
{
    static const struct component table[] = {
        {"Sequence", load_pretokenizers},
        {"ByteLevel", load_byte_level},
        {"Split", load_split},
        {"Digits", load_digits},
        {"Metaspace", load_metaspace},
        {"Punctuation", load_punctuation},
        {"Whitespace", load_whitespace},
        {"WhitespaceSplit", load_whitespace_split},
        {"BertPreTokenizer", load_bert_split},
    };
    return load_component(load, section, "pre-tokenizer", table, sizeof table / sizeof *table);
}

int qt_pretokenizer_load(struct qt_stages *stages, const json_t *section, const char *file,
                         struct qt_err *err)
{
    struct load load = {stages, file, err};
    return !section || json_is_null(section) ? QT_OK : load_pretokenizer(&load, section);
}
