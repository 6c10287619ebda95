/* Text for the byte-level tokenizer of the example model. Exactly the valid UTF-8 is accepted, and
 * the concatenated bytes of the tokens are the text. */
#include "calib/calib.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

static struct qt_tokenizer *tok;
static char **bytes; /* bytes of each token */
static size_t *lengths;

/* The vocabulary writes bytes that are not printable Latin-1 as U+0100, U+0101, ... */
static unsigned char byte_of(int32_t c)
{
    int32_t next = 256;
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b != 0xad);
        if (c == (printable ? b : next))
            return (unsigned char)b;
        next += !printable;
    }
    fuzz_broken(__FILE__, __LINE__, "a token stands for bytes");
}

static void add_token(const char *text, size_t id)
{
    size_t n = strlen(text), made = 0;
    FUZZ_CHECK(id < qt_tokenizer_vocab(tok));
    bytes[id] = malloc(n + 1);
    FUZZ_CHECK(bytes[id]);
    for (size_t at = 0; at < n;) {
        utf8proc_int32_t c;
        at += (size_t)utf8proc_iterate((const utf8proc_uint8_t *)text + at, -1, &c);
        bytes[id][made++] = (char)byte_of(c);
    }
    lengths[id] = made;
}

void fuzz_init(void)
{
    struct qt_err err = {0};
    json_t *json, *id;
    const char *text;
    fuzz_ok(qt_tokenizer_open(&tok, "examples/nano-llama", &err), &err);
    fuzz_ok(qt_json_load(&json, "examples/nano-llama/tokenizer.json", 1 << 24, &err), &err);
    bytes = calloc(qt_tokenizer_vocab(tok), sizeof *bytes);
    lengths = calloc(qt_tokenizer_vocab(tok), sizeof *lengths);
    FUZZ_CHECK(bytes && lengths);
    json_object_foreach (json_object_get(json_object_get(json, "model"), "vocab"), text, id) {
        add_token(text, (size_t)json_integer_value(id));
    }
    json_decref(json);
}

void fuzz_one(const uint8_t *data, size_t size)
{
    uint32_t *ids;
    size_t count, at = 0;
    struct qt_err err = {0};
    bool valid = true;
    for (size_t i = 0; valid && i < size;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate(data + i, (utf8proc_ssize_t)(size - i), &c);
        valid = n > 0;
        i += valid ? (size_t)n : 0;
    }
    int rc = qt_tokenizer_encode(&ids, &count, tok, (const char *)data, size, false, &err);
    FUZZ_CHECK(fuzz_accepted(rc, &err) == valid);
    if (rc < 0)
        return;
    for (size_t i = 0; i < count; i++) {
        FUZZ_CHECK(ids[i] < qt_tokenizer_vocab(tok) && lengths[ids[i]] <= size - at);
        FUZZ_CHECK(memcmp(bytes[ids[i]], data + at, lengths[ids[i]]) == 0);
        at += lengths[ids[i]];
    }
    FUZZ_CHECK(at == size);
    qt_free(ids);
}
