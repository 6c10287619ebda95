/* The file that a tokenizer is read from. Other formats than tokenizer.json are turned into its
 * form, so that all else knows one format. */
#include "model/tokenizer/internal.h"

#include <nettle/base64.h>
#include <string.h>

int qt_base64_decode(char **out, size_t *bytes, const char *text, size_t size, const char *file,
                     struct qt_err *err)
{
    struct base64_decode_ctx ctx;
    char *data = NULL;
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(&data, BASE64_DECODE_LENGTH(size) + 1, 1, err));
    base64_decode_init(&ctx);
    *bytes = BASE64_DECODE_LENGTH(size);
    if (!base64_decode_update(&ctx, bytes, (uint8_t *)data, size, text) ||
        !base64_decode_final(&ctx)) {
        rc = qt_fail(err, QT_E_INPUT, file, NULL, "'%.*s' is not base64",
                     (int)qt_min_size(size, 40), text);
        goto done;
    }
    data[*bytes] = '\0';
    *out = data;
    data = NULL;
done:
    qt_free(data);
    return rc;
}

/* tokenizer_config.json, which need not exist or be valid: then *out = NULL. */
static int read_config(json_t **out, const char *dir, struct qt_err *err)
{
    char *path = NULL, *text = NULL;
    struct qt_err ignored;
    size_t size;
    int rc;
    *out = NULL;
    QT_TRY(qt_path_join(&path, dir, "tokenizer_config.json", err));
    if (!qt_path_exists(path))
        goto done;
    QT_TRY(qt_file_read(&text, &size, path, QT_TOKENIZER_LIMIT, err));
    if (qt_json_parse_data(out, text, size, 1, "\\ufffd", path, &ignored) < 0)
        *out = NULL;
done:
    qt_free(path);
    qt_free(text);
    return rc;
}

/* tokenizer.model is a file of tiktoken (lines of base64) or of SentencePiece (a protocol buffer,
 * which begins with the tag of a message). */
static int read_model(struct qt_tokenizer_file *file, const char *dir, struct qt_err *err)
{
    char *text = NULL;
    json_t *config = NULL;
    size_t size;
    int rc;
    QT_TRY(qt_file_read(&text, &size, file->path, QT_TOKENIZER_LIMIT, err));
    if (size && *text == '\n') {
        QT_TRY(qt_sentencepiece_read(file, text, size, err));
    } else {
        QT_TRY(read_config(&config, dir, err));
        QT_TRY(qt_tiktoken_read(file, text, size, config, err));
    }
done:
    json_decref(config);
    qt_free(text);
    return rc;
}

static int read_tekken(struct qt_tokenizer_file *file, struct qt_err *err)
{
    json_t *json = NULL;
    int rc;
    QT_TRY(qt_json_load_lenient(&json, file->path, QT_TOKENIZER_LIMIT, err));
    QT_TRY(qt_tekken_read(file, json, err));
done:
    json_decref(json);
    return rc;
}

static const char *const names[] = {"tokenizer.json", "tekken.json", QT_QWEN_TOKENS,
                                    "tiktoken.model", "tokenizer.model"};
enum { NAMES = sizeof names / sizeof *names };

/* *found: whether DIR has the file; *path: of the file, freed with qt_free. */
static int look_for(char **path, bool *found, const char *dir, const char *name, struct qt_err *err)
{
    const int rc = qt_path_join(path, dir, name, err);
    *found = rc == QT_OK && qt_path_exists(*path);
    return rc;
}

static int no_tokenizer(const char *dir, struct qt_err *err)
{
    char *path = NULL;
    bool merges = false;
    const int rc = look_for(&path, &merges, dir, "merges.txt", err);
    qt_free(path);
    return rc < 0 ? rc
           : merges
               ? qt_fail(
                     err, QT_E_INPUT, dir, NULL,
                     "the tokenizer is in vocab.json and merges.txt, which qtool does not read; "
                     "make tokenizer.json of them with AutoTokenizer.from_pretrained and "
                     "save_pretrained of transformers")
               : qt_fail(err, QT_E_INPUT, dir, NULL,
                         "there is no tokenizer: %s, %s, %s, %s or %s; only data that is token ids "
                         "(.npy, .u16, .u32) needs none",
                         names[0], names[1], names[2], names[3], names[4]);
}

int qt_tokenizer_file_open(struct qt_tokenizer_file *out, const char *dir, struct qt_err *err)
{
    bool found = false;
    int rc;
    *out = (struct qt_tokenizer_file){0};
    for (int i = 0; i < NAMES && !found; i++) {
        qt_free(out->path);
        QT_TRY(look_for(&out->path, &found, dir, names[i], err));
        if (!found)
            continue;
        rc = i == 0   ? qt_json_load_lenient(&out->root, out->path, QT_TOKENIZER_LIMIT, err)
             : i == 1 ? read_tekken(out, err)
                      : read_model(out, dir, err);
    }
    if (rc == QT_OK && !found)
        rc = no_tokenizer(dir, err);
done:
    if (rc < 0)
        qt_tokenizer_file_close(out);
    return rc;
}

void qt_tokenizer_file_close(struct qt_tokenizer_file *file)
{
    json_decref(file->root);
    qt_free(file->ranks.data);
    qt_free(file->path);
    *file = (struct qt_tokenizer_file){0};
}
