/* The next token, and the way from ids to text. */
#include "fixture.h"
#include "model/model.h"

#include <math.h>

/* ---- sampling ------------------------------------------------------------------------------- */

static uint32_t sample(const float *logits, size_t n, struct qt_sampling how, uint64_t index)
{
    uint32_t id;
    assert_int_equal(qt_sample(&id, logits, n, &how, 3, index, NULL), QT_OK);
    return id;
}

static void test_most_probable(void **state)
{
    const float logits[] = {1, 5, -2, 5, 4};
    (void)state;
    assert_int_equal(sample(logits, 5, (struct qt_sampling){.top_p = 1}, 0), 1);
    for (uint64_t i = 0; i < 100; i++) {
        const struct qt_sampling one = {.temperature = 50, .top_p = 1, .top_k = 1, .seed = i};
        const struct qt_sampling none = {.temperature = 50, .top_p = 0, .seed = i};
        const struct qt_sampling cold = {.temperature = 1e-300, .top_p = 1, .seed = i};
        assert_int_equal(sample(logits, 5, one, i), 1);
        assert_int_equal(sample(logits, 5, none, i), 1);
        assert_true(sample(logits, 5, cold, i) % 2 == 1); /* 1 or 3, which are equal */
    }
}

/* Counts of 20000 draws against probabilities, within five standard deviations. */
static void check_draws(const float *logits, size_t n, struct qt_sampling how, const double *p)
{
    enum { DRAWS = 20000 };
    size_t count[8] = {0};
    for (uint64_t i = 0; i < DRAWS; i++)
        count[sample(logits, n, how, i)]++;
    for (size_t i = 0; i < n; i++)
        assert_true(fabs((double)count[i] - DRAWS * p[i]) <=
                    5 * sqrt(DRAWS * p[i] * (1 - p[i])) + 1e-9);
}

static void test_distribution(void **state)
{
    const float logits[] = {0, (float)log(2), (float)log(4), (float)log(3)};
    const double all[] = {0.1, 0.2, 0.4, 0.3};
    const double two[] = {0, 0, 4.0 / 7, 3.0 / 7};
    const double three[] = {0, 2.0 / 9, 4.0 / 9, 3.0 / 9};
    const double hot[] = {1 / (1 + sqrt(2) + 2 + sqrt(3)), sqrt(2) / (1 + sqrt(2) + 2 + sqrt(3)),
                          2 / (1 + sqrt(2) + 2 + sqrt(3)), sqrt(3) / (1 + sqrt(2) + 2 + sqrt(3))};
    (void)state;
    check_draws(logits, 4, (struct qt_sampling){1, 1, 0, 7}, all);
    check_draws(logits, 4, (struct qt_sampling){1, 1, 100, 7}, all);
    check_draws(logits, 4, (struct qt_sampling){1, 1, 2, 8}, two);
    check_draws(logits, 4, (struct qt_sampling){1, 0.65, 0, 9}, two);
    check_draws(logits, 4, (struct qt_sampling){1, 0.75, 0, 9}, three);
    check_draws(logits, 4, (struct qt_sampling){2, 1, 0, 10}, hot);
}

static void test_not_finite(void **state)
{
    const float bad[] = {0, NAN, 1}, infinite[] = {0, 1, INFINITY};
    const struct qt_sampling how = {.top_p = 1};
    struct qt_err err = {0};
    uint32_t id;
    (void)state;
    assert_int_equal(qt_sample(&id, bad, 3, &how, 0, 0, &err), QT_E_INPUT);
    assert_non_null(strstr(err.reason, "token 1"));
    assert_int_equal(qt_sample(&id, infinite, 3, &how, 0, 0, &err), QT_E_INPUT);
}

/* ---- ids to text ---------------------------------------------------------------------------- */

/* Ids of the vocabulary below. */
enum { MARK, HI, BYTE_E2, BYTE_82, BYTE_AC, SPECIAL, OWN };

static void decode_case(const char *decoder, const uint32_t *ids, size_t count, const char *want)
{
    static const char head[] =
        "{\"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {\"\xe2\x96\x81\": 0, "
        "\"\xe2\x96\x81hi\": 1, \"<0xE2>\": 2, \"<0x82>\": 3, \"<0xac>\": 4}}, \"added_tokens\": "
        "[{\"id\": 5, \"content\": \"<s>\", \"special\": true}, {\"id\": 6, \"content\": \"<o>\"}]";
    char json[2048], *dir = fixture_dir();
    struct qt_tokenizer *tok;
    struct qt_detokenizer *d = NULL;
    struct qt_err err = {0};
    char *text;
    size_t size;
    snprintf(json, sizeof json, "%s%s%s}", head, decoder ? ", \"decoder\": " : "",
             decoder ? decoder : "");
    const char *path = fixture_write(dir, "tokenizer.json", json, strlen(json));
    assert_int_equal(qt_tokenizer_open(&tok, dir, &err), QT_OK);
    int rc = qt_detokenizer_open(&d, tok, dir, &err);
    if (want) {
        assert_int_equal(rc, QT_OK);
        assert_int_equal(qt_detokenize(&text, &size, d, ids, count, &err), QT_OK);
        assert_int_equal(size, strlen(want));
        assert_string_equal(text, want);
        qt_free(text);
    } else {
        assert_true(rc == QT_E_INPUT || rc == QT_E_UNSUPPORTED);
        assert_non_null(strstr(err.reason, "ecoder"));
        assert_string_equal(err.file, path);
    }
    qt_detokenizer_close(d);
    qt_tokenizer_close(tok);
    fixture_remove(dir);
}

#define LLAMA                                                                                      \
    "{\"type\": \"Sequence\", \"decoders\": [{\"type\": \"Replace\", \"pattern\": {\"String\": "   \
    "\"\xe2\x96\x81\"}, \"content\": \" \"}, {\"type\": \"ByteFallback\"}, {\"type\": \"Fuse\"}, " \
    "{\"type\": \"Strip\", \"content\": \" \", \"start\": 1, \"stop\": 0}]}"

static void test_decoders(void **state)
{
    const uint32_t euro[] = {SPECIAL, HI, BYTE_E2, BYTE_82, BYTE_AC, HI, OWN, 99};
    const uint32_t broken[] = {HI, BYTE_E2, BYTE_82, MARK, BYTE_AC};
    (void)state;
    decode_case(LLAMA, euro, 8, "hi\xe2\x82\xac hi<o>");
    decode_case(LLAMA, broken, 5, "hi\xef\xbf\xbd\xef\xbf\xbd \xef\xbf\xbd");
    decode_case(LLAMA, NULL, 0, "");
    decode_case(NULL, euro, 2, "\xe2\x96\x81hi");
    decode_case(NULL, broken, 2, "\xe2\x96\x81hi <0xE2>");
    decode_case("null", euro, 2, "\xe2\x96\x81hi");
    decode_case("{\"type\": \"Metaspace\", \"replacement\": \"\xe2\x96\x81\"}", broken, 1, "hi");
    decode_case("{\"type\": \"Metaspace\", \"prepend_scheme\": \"never\"}", broken, 1, " hi");
}

static void test_bad_decoders(void **state)
{
    static const char *const bad[] = {
        "3",
        "{\"type\": \"Nothing\"}",
        "{\"type\": \"Sequence\", \"decoders\": {}}",
        "{\"type\": \"Sequence\", \"decoders\": [3]}",
        "{\"type\": \"Replace\", \"pattern\": {\"Regex\": \"a\"}, \"content\": \"\"}",
        "{\"type\": \"Replace\", \"pattern\": {\"String\": \"\"}, \"content\": \"\"}",
        "{\"type\": \"Strip\", \"content\": \"\", \"start\": 0, \"stop\": 0}",
        "{\"type\": \"Metaspace\", \"replacement\": \"\"}",
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        decode_case(bad[i], NULL, 0, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_most_probable), cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_not_finite),    cmocka_unit_test(test_decoders),
        cmocka_unit_test(test_bad_decoders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
