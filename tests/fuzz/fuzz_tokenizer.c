/* tokenizer.json; the first line of the input is tokenizer_config.json, or "model" or "tekken":
 * then the rest is tokenizer.model or tekken.json. An accepted tokenizer encodes texts to ids of
 * its vocabulary, twice to the same ids, or refuses them; ids decode to UTF-8. */
#include "calib/calib.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <string.h>

void fuzz_init(void)
{
}

static void encode(const struct qt_tokenizer *tok, const char *text, bool special)
{
    uint32_t *a, *b;
    size_t n, m;
    struct qt_err err = {0};
    int rc = qt_tokenizer_encode(&a, &n, tok, text, strlen(text), special, &err);
    if (!fuzz_accepted(rc, &err))
        return;
    fuzz_ok(qt_tokenizer_encode(&b, &m, tok, text, strlen(text), special, &err), &err);
    FUZZ_CHECK(n == m && (n == 0 || memcmp(a, b, n * sizeof *a) == 0));
    for (size_t i = 0; i < n; i++)
        FUZZ_CHECK(a[i] < qt_tokenizer_vocab(tok));
    qt_free(a);
    qt_free(b);
}

/* All tokens decode to UTF-8, also together and beyond the vocabulary. */
static void decode(const struct qt_detokenizer *back, size_t vocab)
{
    uint32_t ids[300];
    const size_t n = vocab + 1 < 300 ? vocab + 1 : 300;
    struct qt_err err = {0};
    char *text;
    size_t size;
    for (size_t i = 0; i < n; i++)
        ids[i] = (uint32_t)i;
    fuzz_ok(qt_detokenize(&text, &size, back, ids, n, &err), &err);
    FUZZ_CHECK(qt_utf8_check(text, size) == size);
    qt_free(text);
}

static void remove_file(const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", fuzz_dir(), name);
    remove(path);
}

void fuzz_one(const uint8_t *data, size_t size)
{
    static const char *const texts[] = {
        "",
        "a",
        "The quick  brown fox\n\tjumps.",
        "na\xc3\xafve caf\xc3\xa9 \xe2\x82\xac 123456",
        "\xf0\x9f\x98\x80\xe4\xb8\xad\xe6\x96\x87 <s></s> e\xcc\x81 \xef\xac\x81",
    };
    struct qt_tokenizer *tok;
    struct qt_detokenizer *back;
    struct qt_err err = {0};
    const uint8_t *line = size ? memchr(data, '\n', size) : NULL;
    size_t first = line ? (size_t)(line - data) : 0;
    const bool model = first == 5 && memcmp(data, "model", 5) == 0;
    const bool tekken = first == 6 && memcmp(data, "tekken", 6) == 0;
    const char *name = model ? "tokenizer.model" : tekken ? "tekken.json" : "tokenizer.json";
    const size_t skip = model ? first + 1 : first;
    fuzz_write("tokenizer_config.json", first ? data : (const uint8_t *)"{}", first ? first : 2);
    fuzz_write(name, data + skip, size - skip);
    if (!fuzz_accepted(qt_tokenizer_open(&tok, fuzz_dir(), &err), &err)) {
        remove_file(name);
        return;
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        encode(tok, texts[i], i % 2);
    if (fuzz_accepted(qt_detokenizer_open(&back, tok, fuzz_dir(), &err), &err))
        decode(back, qt_tokenizer_vocab(tok));
    qt_detokenizer_close(back);
    qt_tokenizer_close(tok);
    remove_file(name);
}
