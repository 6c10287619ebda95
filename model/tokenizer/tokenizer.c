/* The tokenizer: reads tokenizer.json with its added tokens and BOS/EOS template; encodes text. */
#include "model/tokenizer/internal.h"

#include <string.h>

enum { MAX_ADDED_BYTES = 4096 }; /* bounds the work per byte of text */

struct qt_tokenizer {
    char *file, *config_file;
    struct qt_words words;
    struct qt_stages stages;
    size_t vocab;
    bool has_template;            /* a post-processor is a TemplateProcessing */
    bool by_config;               /* the prefix is from tokenizer_config.json */
    struct qt_ids prefix, suffix; /* special tokens before and after the text */
};

/* ---- added tokens --------------------------------------------------------------------------- */

/* The tokenizers library ignores the id in the file: an added token gets its id in the vocabulary,
 * or else the next free id, in file order. A file with a different id is refused. */
static int check_added_id(struct qt_tokenizer *tok, const char *content, uint32_t id,
                          size_t *next_id, struct qt_err *err)
{
    uint32_t known = qt_strmap_find(&tok->words.bpe.vocab, content, strlen(content));
    uint32_t given = known != QT_NO_ID ? known : (uint32_t)(*next_id)++;
    if (id != given)
        return qt_fail(err, QT_E_INPUT, tok->file, NULL,
                       "added token '%.200s' has id %u where it must be %u", content, id, given);
    if (id >= tok->vocab)
        tok->vocab = (size_t)id + 1;
    return QT_OK;
}

static int parse_added(struct qt_added *out, const char **content, const json_t *item,
                       const struct qt_tokenizer *tok, struct qt_err *err)
{
    size_t id;
    int rc;
    if (!json_is_object(item))
        return qt_fail(err, QT_E_INPUT, tok->file, NULL,
                       "added_tokens has an entry that is not an object");
    QT_TRY(qt_json_need_string(content, item, "content", tok->file, err));
    QT_TRY(qt_json_need_size(&id, item, "id", tok->file, err));
    if (id >= QT_MAX_ID)
        return qt_fail(err, QT_E_INPUT, tok->file, NULL, "added token id %zu is out of range", id);
    if (strlen(*content) > MAX_ADDED_BYTES)
        return qt_fail(err, QT_E_UNSUPPORTED, tok->file, NULL,
                       "an added token has %zu bytes; at most %d are supported", strlen(*content),
                       MAX_ADDED_BYTES);
    out->id = (uint32_t)id;
    QT_TRY(qt_json_get_bool(&out->single_word, item, "single_word", tok->file, err));
    QT_TRY(qt_json_get_bool(&out->lstrip, item, "lstrip", tok->file, err));
    QT_TRY(qt_json_get_bool(&out->rstrip, item, "rstrip", tok->file, err));
    QT_TRY(qt_json_get_bool(&out->normalized, item, "normalized", tok->file, err));
done:
    return rc;
}

static int append_text(void *ctx, const char *s, size_t size, struct qt_err *err)
{
    return qt_text_add(ctx, s, size, err);
}

/* Sets token->text to the text to search for: content, or normalized content. */
static int added_text(struct qt_added *token, const char *content,
                      const struct qt_stages *normalizers, const char *file, struct qt_err *err)
{
    struct qt_text text = {0};
    int rc;
    if (token->normalized) {
        struct qt_stage_sink sink = {.ctx = &text, .piece = append_text};
        QT_TRY(qt_stages_run(normalizers, &sink, content, strlen(content), err));
    } else {
        QT_TRY(qt_text_add(&text, content, strlen(content), err));
    }
    /* The tokenizers library finds an empty token everywhere, or fails. */
    if (text.size == 0) {
        rc = qt_fail(err, QT_E_UNSUPPORTED, file, NULL,
                     "added token '%.200s' is empty after normalization; this is not supported",
                     content);
        goto done;
    }
    token->text = text.data;
    token->size = text.size;
    text.data = NULL;
done:
    qt_free(text.data);
    return rc;
}

/* Splits added_tokens into those found in the raw and those found in the normalized text. */
static int load_added(struct qt_added_set sets[2], struct qt_tokenizer *tok, const json_t *list,
                      const struct qt_stages *normalizers, struct qt_err *err)
{
    size_t n = json_array_size(list), capacity[2] = {0}, next_id = tok->words.bpe.vocab.count;
    struct qt_strmap seen = {0};
    int rc = QT_OK;
    if (list && !json_is_null(list) && !json_is_array(list))
        return qt_fail(err, QT_E_INPUT, tok->file, NULL, "added_tokens is not an array");
    for (size_t i = 0; i < n; i++) {
        struct qt_added token = {.order = i};
        const char *content;
        QT_TRY(parse_added(&token, &content, json_array_get(list, i), tok, err));
        if (!*content) /* the tokenizers library ignores it, too */
            continue;
        const uint32_t before = qt_strmap_find(&seen, content, strlen(content));
        if (before == token.id)
            continue;
        if (before != QT_NO_ID) {
            rc = qt_fail(err, QT_E_INPUT, tok->file, NULL,
                         "added token '%.200s' appears twice, with other ids", content);
            goto done;
        }
        QT_TRY(qt_strmap_add(&seen, content, strlen(content), token.id, err));
        QT_TRY(check_added_id(tok, content, token.id, &next_id, err));
        struct qt_added_set *set = &sets[token.normalized];
        QT_TRY(qt_array_grow(&set->tokens, &capacity[token.normalized], set->count + 1,
                             sizeof token, err));
        QT_TRY(added_text(&token, content, normalizers, tok->file, err));
        set->tokens[set->count++] = token;
    }
    qt_added_set_sort(&sets[0]);
    qt_added_set_sort(&sets[1]);
done:
    qt_strmap_free(&seen);
    return rc;
}

/* ---- stages --------------------------------------------------------------------------------- */

/* Moves the set into a new stage. */
static int add_added_stage(struct qt_tokenizer *tok, struct qt_added_set *set, struct qt_err *err)
{
    struct qt_stage *stage;
    int rc;
    if (set->count == 0)
        return QT_OK;
    QT_TRY(qt_stages_add(&stage, &tok->stages, QT_STAGE_ADDED, tok->file, err));
    stage->added = *set;
    *set = (struct qt_added_set){0};
done:
    return rc;
}

/* Moves all stages of `from` to the end of the tokenizer's list. */
static int append_stages(struct qt_tokenizer *tok, struct qt_stages *from, struct qt_err *err)
{
    struct qt_stage *stage;
    int rc = QT_OK;
    for (size_t i = 0; i < from->count; i++) {
        QT_TRY(qt_stages_add(&stage, &tok->stages, from->list[i].kind, tok->file, err));
        *stage = from->list[i];
        from->list[i] = (struct qt_stage){0};
    }
done:
    return rc;
}

static int load_stages(struct qt_tokenizer *tok, const json_t *root, struct qt_err *err)
{
    struct qt_stages normalizers = {0};
    struct qt_added_set added[2] = {0};
    int rc;
    QT_TRY(qt_normalizer_load(&normalizers, json_object_get(root, "normalizer"), tok->file, err));
    QT_TRY(load_added(added, tok, json_object_get(root, "added_tokens"), &normalizers, err));
    QT_TRY(add_added_stage(tok, &added[0], err));
    QT_TRY(append_stages(tok, &normalizers, err));
    QT_TRY(add_added_stage(tok, &added[1], err));
    QT_TRY(
        qt_pretokenizer_load(&tok->stages, json_object_get(root, "pre_tokenizer"), tok->file, err));
done:
    qt_stages_free(&normalizers);
    qt_added_set_free(&added[0]);
    qt_added_set_free(&added[1]);
    return rc;
}

/* ---- post-processor ------------------------------------------------------------------------- */

static int add_special(struct qt_ids *ids, const struct qt_tokenizer *tok, const json_t *template,
                       const char *name, struct qt_err *err)
{
    const json_t *specials = json_object_get(template, "special_tokens");
    const json_t *list = json_object_get(json_object_get(specials, name), "ids");
    int rc = QT_OK;
    if (!json_is_array(list))
        return qt_fail(err, QT_E_INPUT, tok->file, NULL,
                       "TemplateProcessing: special token '%.200s' is not defined", name);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        json_int_t id = json_is_integer(item) ? json_integer_value(item) : -1;
        if (id < 0 || (uint64_t)id >= tok->vocab) {
            rc = qt_fail(err, QT_E_INPUT, tok->file, NULL,
                         "TemplateProcessing: id of '%.200s' is not in the vocabulary", name);
            goto done;
        }
        QT_TRY(qt_ids_add(ids, (uint32_t)id, err));
    }
done:
    return rc;
}

/* "cls" and "sep", each a text and its id, go before and after the text. */
static int load_pair(struct qt_tokenizer *tok, const json_t *section, struct qt_err *err)
{
    static const char *const keys[] = {"cls", "sep"};
    int rc = QT_OK;
    tok->has_template = true;
    for (size_t i = 0; i < 2; i++) {
        const json_t *id = json_array_get(json_object_get(section, keys[i]), 1);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            (uint64_t)json_integer_value(id) >= tok->vocab)
            return qt_fail(err, QT_E_INPUT, tok->file, NULL,
                           "post-processor: '%s' is not a token and its id", keys[i]);
        QT_TRY(qt_ids_add(i ? &tok->suffix : &tok->prefix, (uint32_t)json_integer_value(id), err));
    }
done:
    return rc;
}

/* Items of "single" are {"SpecialToken": {"id": "<s>"}} or, once, {"Sequence": {"id": "A"}}. A
 * second template is refused: the tokenizers library applies its form for pairs, or none. */
static int load_template(struct qt_tokenizer *tok, const json_t *section, struct qt_err *err)
{
    const json_t *single = json_object_get(section, "single");
    bool seen = false;
    int rc = QT_OK;
    if (tok->has_template)
        return qt_fail(err, QT_E_UNSUPPORTED, tok->file, NULL,
                       "more than one TemplateProcessing is not supported");
    tok->has_template = true;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *item = json_array_get(single, i);
        const json_t *special = json_object_get(item, "SpecialToken");
        const json_t *sequence = json_object_get(item, "Sequence");
        const char *name = json_string_value(json_object_get(special ? special : sequence, "id"));
        if (!name || (!special && (strcmp(name, "A") != 0 || seen))) {
            rc = qt_fail(err, QT_E_UNSUPPORTED, tok->file, NULL,
                         "TemplateProcessing: item %zu of \"single\" is not supported", i);
            goto done;
        }
        seen = seen || !special;
        if (special)
            QT_TRY(add_special(seen ? &tok->suffix : &tok->prefix, tok, section, name, err));
    }
    if (!seen)
        rc = qt_fail(err, QT_E_INPUT, tok->file, NULL, "TemplateProcessing: \"single\" lacks $A");
done:
    return rc;
}

static int load_post_processor(struct qt_tokenizer *tok, const json_t *section, struct qt_err *err)
{
    const char *type;
    int rc;
    if (!json_is_object(section))
        return qt_fail(err, QT_E_INPUT, tok->file, NULL, "post-processor is not an object");
    QT_TRY(qt_json_need_string(&type, section, "type", tok->file, err));
    if (strcmp(type, "TemplateProcessing") == 0)
        return load_template(tok, section, err);
    if (strcmp(type, "RobertaProcessing") == 0 || strcmp(type, "BertProcessing") == 0)
        return load_pair(tok, section, err);
    if (strcmp(type, "ByteLevel") == 0) /* about offsets only */
        return QT_OK;
    if (strcmp(type, "Sequence") != 0)
        return qt_fail(err, QT_E_UNSUPPORTED, tok->file, NULL,
                       "post-processor '%.100s' is not supported", type);
    const json_t *list = json_object_get(section, "processors");
    if (!json_is_array(list))
        return qt_fail(err, QT_E_INPUT, tok->file, NULL, "processors is not an array");
    for (size_t i = 0; i < json_array_size(list); i++)
        QT_TRY(load_post_processor(tok, json_array_get(list, i), err));
done:
    return rc;
}

/* The id of an added token or vocabulary entry with this text, or QT_NO_ID. */
static uint32_t token_id(const struct qt_tokenizer *tok, const json_t *root, const char *token)
{
    const json_t *list = json_object_get(root, "added_tokens");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        if (strcmp(json_string_value(json_object_get(item, "content")), token) == 0)
            return (uint32_t)json_integer_value(json_object_get(item, "id"));
    }
    return qt_strmap_find(&tok->words.bpe.vocab, token, strlen(token));
}

static int read_config(json_t **config, const struct qt_tokenizer *tok, struct qt_err *err)
{
    char *text = NULL;
    size_t size;
    int rc;
    *config = NULL;
    /* Parsed as data: an unknown model_max_length is written as 1000000000000000019884624838656. */
    QT_TRY(qt_file_read(&text, &size, tok->config_file, QT_TOKENIZER_LIMIT, err));
    QT_TRY(qt_json_parse_data(config, text, size, 1, "\\ufffd", tok->config_file, err));
    if (!json_is_object(*config))
        rc = qt_fail(err, QT_E_INPUT, tok->config_file, NULL, "not a JSON object");
done:
    qt_free(text);
    return rc;
}

/* A token such as "bos_token" is a string, or an object with "content". */
static const char *config_token(const json_t *config, const char *key)
{
    const json_t *token = json_object_get(config, key);
    return json_string_value(json_is_object(token) ? json_object_get(token, "content") : token);
}

/*
 * tokenizer_config.json is used only if tokenizer.json has no template, the class is LlamaTokenizer
 * and add_bos_token is true. Version 4 of transformers then puts a BOS before the text, whatever
 * the post-processor is, and the models were trained with it. Version 5 uses tokenizer.json only.
 */
static int load_config(struct qt_tokenizer *tok, const json_t *root, struct qt_err *err)
{
    json_t *config = NULL;
    const char *class = "", *bos = NULL;
    bool add_bos = false;
    int rc = QT_OK;
    if (!qt_path_exists(tok->config_file))
        return QT_OK;
    QT_TRY(read_config(&config, tok, err));
    QT_TRY(qt_json_get_string(&class, config, "tokenizer_class", tok->config_file, err));
    QT_TRY(qt_json_get_bool(&add_bos, config, "add_bos_token", tok->config_file, err));
    if (!add_bos || strncmp(class, "LlamaTokenizer", 14) != 0)
        goto done;
    bos = config_token(config, "bos_token");
    tok->by_config = true;
    uint32_t id = bos ? token_id(tok, root, bos) : QT_NO_ID;
    if (id == QT_NO_ID)
        rc = qt_fail(err, QT_E_INPUT, tok->config_file, NULL,
                     "add_bos_token is true, but bos_token is not a token of tokenizer.json");
    else
        rc = qt_ids_add(&tok->prefix, id, err);
done:
    json_decref(config);
    return rc;
}

/* ---- public --------------------------------------------------------------------------------- */

static int load_tokenizer(struct qt_tokenizer *tok, const struct qt_tokenizer_file *from,
                          struct qt_err *err)
{
    const json_t *root = from->root;
    const json_t *post = json_object_get(root, "post_processor");
    int rc;
    if (!json_is_object(root))
        return qt_fail(err, QT_E_INPUT, tok->file, NULL, "not a JSON object");
    QT_TRY(
        qt_words_load(&tok->words, json_object_get(root, "model"), &from->ranks, tok->file, err));
    tok->vocab = (size_t)tok->words.bpe.max_id + 1;
    QT_TRY(load_stages(tok, root, err));
    if (post && !json_is_null(post))
        QT_TRY(load_post_processor(tok, post, err));
    if (!tok->has_template)
        QT_TRY(load_config(tok, root, err));
done:
    return rc;
}

int qt_tokenizer_open(struct qt_tokenizer **out, const char *dir, struct qt_err *err)
{
    struct qt_tokenizer *tok = NULL;
    struct qt_tokenizer_file file = {0};
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(&tok, 1, sizeof *tok, err));
    QT_TRY(qt_path_join(&tok->config_file, dir, "tokenizer_config.json", err));
    QT_TRY(qt_tokenizer_file_open(&file, dir, err));
    QT_TRY(qt_string_copy(&tok->file, file.path, err));
    QT_TRY(load_tokenizer(tok, &file, err));
    *out = tok;
    tok = NULL;
done:
    qt_tokenizer_file_close(&file);
    qt_tokenizer_close(tok);
    return rc;
}

void qt_tokenizer_close(struct qt_tokenizer *tok)
{
    if (!tok)
        return;
    qt_words_free(&tok->words);
    qt_stages_free(&tok->stages);
    qt_free(tok->prefix.data);
    qt_free(tok->suffix.data);
    qt_free(tok->file);
    qt_free(tok->config_file);
    qt_free(tok);
}

size_t qt_tokenizer_vocab(const struct qt_tokenizer *tok)
{
    return tok->vocab;
}

struct encode {
    const struct qt_tokenizer *tok;
    struct qt_bpe_work work;
    struct qt_ids ids;
    bool enough;
};

/* Ends a run that has given enough ids. */
static int stop_if_enough(struct encode *e)
{
    e->enough = qt_bpe_enough(&e->ids, &e->work);
    return e->enough ? QT_E_INTERRUPTED : QT_OK;
}

static int encode_piece(void *ctx, const char *s, size_t size, struct qt_err *err)
{
    struct encode *e = ctx;
    int rc = qt_words_encode(&e->ids, &e->work, &e->tok->words, s, size, err);
    return rc < 0 ? rc : stop_if_enough(e);
}

static int encode_added(void *ctx, uint32_t id, struct qt_err *err)
{
    struct encode *e = ctx;
    int rc = qt_ids_add(&e->ids, id, err);
    return rc < 0 ? rc : stop_if_enough(e);
}

static int add_all(struct qt_ids *ids, const struct qt_ids *more, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < more->count; i++)
        QT_TRY(qt_ids_add(ids, more->data[i], err));
done:
    return rc;
}

bool qt_tokenizer_adds_bos(const struct qt_tokenizer *tok)
{
    return tok->prefix.count > 0;
}

const char *qt_tokenizer_bos_file(const struct qt_tokenizer *tok)
{
    return tok->by_config ? "tokenizer_config.json" : "tokenizer.json";
}

int qt_tokenizer_bos(uint32_t *id, const struct qt_tokenizer *tok, struct qt_err *err)
{
    json_t *config = NULL;
    uint32_t *ids = NULL;
    size_t count = 0;
    int rc = QT_OK;
    *id = tok->prefix.count ? tok->prefix.data[0] : QT_NO_ID;
    if (tok->prefix.count)
        return QT_OK;
    if (qt_path_exists(tok->config_file))
        QT_TRY(read_config(&config, tok, err));
    const char *bos = config_token(config, "bos_token");
    if (bos)
        QT_TRY(qt_tokenizer_encode(&ids, &count, tok, bos, strlen(bos), false, err));
    if (count == 1)
        *id = ids[0];
    else
        rc = qt_fail(err, QT_E_INPUT, tok->config_file, NULL,
                     "the tokenizer has no BOS token: \"bos_token\" is missing or no single token");
done:
    qt_free(ids);
    json_decref(config);
    return rc;
}

int qt_tokenizer_mask(uint32_t *id, const struct qt_tokenizer *tok, struct qt_err *err)
{
    const char *names[] = {NULL, "[MASK]", "<mask>"};
    json_t *config = NULL;
    int rc = QT_OK;
    *id = QT_NO_ID;
    if (qt_path_exists(tok->config_file))
        QT_TRY(read_config(&config, tok, err));
    names[0] = config_token(config, "mask_token");
    for (size_t i = 0; i < sizeof names / sizeof *names && *id == QT_NO_ID; i++) {
        uint32_t *ids = NULL;
        size_t count = 0;
        if (names[i])
            QT_TRY(qt_tokenizer_encode(&ids, &count, tok, names[i], strlen(names[i]), false, err));
        if (count == 1)
            *id = ids[0];
        qt_free(ids);
    }
    if (*id == QT_NO_ID)
        rc = qt_fail(
            err, QT_E_INPUT, tok->config_file, NULL,
            "the tokenizer has no mask token: \"mask_token\" is missing or no single token");
done:
    json_decref(config);
    return rc;
}

static int add_prefix(struct qt_ids *ids, const struct qt_tokenizer *tok, enum qt_bos bos,
                      struct qt_err *err)
{
    uint32_t id;
    int rc = QT_OK;
    if (bos == QT_BOS_NO)
        return QT_OK;
    if (bos == QT_BOS_AUTO || tok->prefix.count)
        return add_all(ids, &tok->prefix, err);
    QT_TRY(qt_tokenizer_bos(&id, tok, err));
    QT_TRY(qt_ids_add(ids, id, err));
done:
    return rc;
}

/* Checks that the text is UTF-8, in pieces between which an interruption is noticed. */
static int check_text(const char *text, size_t size, bool (*interrupted)(void), struct qt_err *err)
{
    enum { PIECE = 1 << 20, LONGEST = 4 /* bytes of a character */ };
    int rc = QT_OK;
    for (size_t at = 0; at < size;) {
        const size_t n = qt_min_size(size - at, PIECE), valid = qt_utf8_check(text + at, n);
        at += valid;
        if (valid < n && (n - valid >= LONGEST || at + n - valid == size))
            return qt_fail(err, QT_E_INPUT, NULL, NULL, "the text is not UTF-8 at byte %zu", at);
        QT_TRY(qt_tokenizer_poll(interrupted, err));
    }
done:
    return rc;
}

int qt_tokenizer_encode_most(uint32_t **ids, size_t *count, const struct qt_tokenizer *tok,
                             const char *text, size_t size, const struct qt_encode_options *opt,
                             struct qt_err *err)
{
    struct encode e = {.tok = tok, .work = {.interrupted = opt->interrupted, .most = opt->most}};
    struct qt_stage_sink sink = {&e, opt->interrupted, encode_piece, encode_added};
    int rc;
    *ids = NULL;
    *count = 0;
    QT_TRY(check_text(text, size, opt->interrupted, err));
    /* An empty result is an array, too. */
    QT_TRY(qt_array_grow(&e.ids.data, &e.ids.capacity, 16, sizeof *e.ids.data, err));
    if (opt->special)
        QT_TRY(add_prefix(&e.ids, tok, opt->bos, err));
    rc = qt_stages_run(&tok->stages, &sink, text, size, err);
    if (e.enough)
        rc = QT_OK;
    else if (rc == QT_OK && opt->special)
        rc = add_all(&e.ids, &tok->suffix, err);
    if (rc < 0)
        goto done;
    *ids = e.ids.data;
    *count = opt->most ? qt_min_size(e.ids.count, opt->most) : e.ids.count;
    e.ids.data = NULL;
done:
    qt_free(e.ids.data);
    qt_bpe_work_free(&e.work);
    return rc;
}

int qt_tokenizer_encode(uint32_t **ids, size_t *count, const struct qt_tokenizer *tok,
                        const char *text, size_t size, bool special, struct qt_err *err)
{
    const struct qt_encode_options opt = {.special = special};
    return qt_tokenizer_encode_most(ids, count, tok, text, size, &opt, err);
}

int qt_tokenizer_merges(bool *made, const struct qt_tokenizer *tok, const char *word,
                        struct qt_err *err)
{
    struct qt_bpe_work work = {0};
    struct qt_ids ids = {0};
    int rc = QT_OK;
    if (tok->words.kind == QT_WORDS_BPE)
        rc = qt_bpe_encode_by_merges(&ids, &work, &tok->words.bpe, word, strlen(word), err);
    *made = ids.count == 1;
    qt_free(ids.data);
    qt_bpe_work_free(&work);
    return rc;
}
