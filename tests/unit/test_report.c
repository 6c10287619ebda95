/* The HTML report: which inputs it takes, what is escaped, that the JSON has what the tables
 * have. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "verify/verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* JSON of a name that would be markup, a script, an attribute, the end of the JSON element, control
 * characters and a change of direction. */
#define EVIL_TEXT                                                                                  \
    "</script><script>window.hostile=1</script>'\\\"><img src=x onerror=alert(1)>&amp;"
#define EVIL_JSON EVIL_TEXT "\\u0001\\u009b\\u202e\\u0000x"

static const char eval_a[] =
    "{\"qtool\": \"0.2.0\", \"schema\": 1, \"command\": \"eval\", \"ok\": true, \"path\": \"a\","
    "\"bytes\": 1000, \"manifest_crc32\": null, \"data\": \"text\", \"ref_ppl\": 10, \"ppl\": 11,"
    "\"ppl_ratio\": 1.1, \"scored_tokens\": 99, \"kld_mean\": 0.1, \"same_top\": 0.9,"
    "\"kld_quantiles\": [{\"q\": 0.5, \"kld\": 0.05}, {\"q\": 0.99, \"kld\": 0.5}],"
    "\"gates\": [{\"condition\": \"ppl < 12\", \"passed\": true, \"value\": 11}]}";
/* Larger and further from the original. */
static const char eval_b[] =
    "{\"qtool\": \"0.2.0\", \"schema\": 1, \"command\": \"eval\", \"ok\": true, \"path\": \"b\","
    "\"bytes\": 2000, \"manifest_crc32\": null, \"ref_ppl\": 10, \"ppl\": 12, \"ppl_ratio\": 1.2,"
    "\"scored_tokens\": 99, \"kld_mean\": 0.2, \"kld_median\": 0.1, \"same_top\": 0.8}";
static const char verify_evil[] =
    "{\"qtool\": \"0.2.0\", \"schema\": 1, \"command\": \"verify\", \"ok\": true,"
    "\"path\": \"" EVIL_TEXT "\", \"bytes\": 3000, \"bpw\": 4, \"gates\": ["
    "{\"condition\": \"" EVIL_TEXT "\", \"passed\": false, \"value\": 1}], \"tensors\": ["
    "{\"name\": \"model.layers.0." EVIL_TEXT ".weight\", \"scheme\": \"" EVIL_TEXT "\","
    "\"shape\": [4, 8], \"bpw\": 4, \"sqnr_db\": 20, \"mse\": 0.01, \"cosine\": 0.9, \"max_abs\": "
    "1},"
    "{\"name\": \"model.layers.1.mlp.experts.7.down_proj.weight\", \"scheme\": \"nf4\","
    "\"shape\": [4, 8], \"bpw\": 4, \"sqnr_db\": 10, \"mse\": 0.01, \"cosine\": 0.9, \"max_abs\": "
    "1}],"
    "\"gpu\": {\"name\": \"" EVIL_TEXT "\"}, \"kernels\": [{\"name\": \"x\", \"times\": ["
    "{\"m\": 1, \"us\": 2, \"cublas_us\": 3}, {\"m\": 16, \"us\": 4, \"cublas_us\": null}]}]}";
static const char bench[] =
    "{\"qtool\": \"0.2.0\", \"schema\": 1, \"command\": \"bench\", \"ok\": true, \"dtype\": "
    "\"FP16\","
    "\"gpu\": {\"name\": \"" EVIL_TEXT "\"}, \"rows\": ["
    "{\"scheme\": \"nf4\", \"shape_name\": null, \"n\": 64, \"k\": 32, \"m\": 1, \"us\": 2,"
    "\"floor_us\": 1, \"floor_share\": 0.5},"
    "{\"scheme\": \"nf4\", \"shape_name\": null, \"n\": 64, \"k\": 32, \"m\": 16, \"us\": 3,"
    "\"floor_us\": 1, \"floor_share\": 0.3}], \"caches\": []}";

/* Two schemes and two batches; one row was refused. */
static const char bench_model[] =
    "{\"qtool\": \"0.2.0\", \"schema\": 1, \"command\": \"bench\", \"ok\": true,"
    "\"gpu\": {\"name\": \"" EVIL_TEXT "\"}, \"model\": \"" EVIL_TEXT "\","
    "\"random_weights\": true, \"prompt\": 512, \"tokens\": 64, \"kv_bits\": 16, \"rows\": ["
    "{\"scheme\": \"fp16\", \"batch\": 1, \"decode_tokens_per_s\": 200, \"kernels_us\": "
    "{\"products\": 4000, \"head\": 300, \"attention\": 100, \"heads\": 50, \"norms\": 100,"
    "\"activation\": 20, \"other\": 30}},"
    "{\"scheme\": \"int4\", \"batch\": 1, \"prefill_tokens_per_s\": 40000,"
    "\"decode_tokens_per_s\": 500, \"step_ms\": 2, \"fp16_speedup\": 2.5, \"bytes\": 1048576,"
    "\"watts\": 300, \"joules_per_token\": 0.6, \"dollars_per_million_tokens\": null,"
    "\"kernels_us\": {\"products\": 1000, \"head\": 300, \"attention\": 100, \"heads\": 50,"
    "\"norms\": 100, \"activation\": 20, \"other\": 30}},"
    "{\"scheme\": \"fp16\", \"batch\": 16, \"decode_tokens_per_s\": 3000, \"kernels_us\": {}},"
    "{\"scheme\": \"int4\", \"batch\": 16, \"refused\": \"" EVIL_TEXT "\"}]}";

static char dir[64];

/* Writes a file of the test's directory. Its path is valid until the fourth next call. */
static const char *file(const char *name, const char *text)
{
    static char paths[4][128];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    assert_int_equal(qt_file_write(path, text, strlen(text), NULL), QT_OK);
    return path;
}

/* Makes the page of n inputs. */
static int make(char **text, size_t *size, json_t **sections, const char *const *paths, size_t n,
                struct qt_err *err)
{
    struct qt_report *r = NULL;
    int rc;
    *text = NULL;
    *sections = NULL;
    QT_TRY(qt_report_new(&r, err));
    for (size_t i = 0; i < n; i++)
        QT_TRY(qt_report_add(r, paths[i], err));
    QT_TRY(qt_report_html(text, size, sections, r, err));
done:
    qt_report_free(r);
    return rc;
}

/* The page as a string, which is text without NUL. */
static char *page(json_t **sections, const char *const *paths, size_t n)
{
    struct qt_err err = {0};
    char *raw, *text;
    size_t size;
    if (make(&raw, &size, sections, paths, n, &err) < 0)
        fail_msg("%s: %s", err.file, err.reason);
    assert_true(qt_is_text(raw, size));
    assert_null(memchr(raw, 0, size));
    assert_int_equal(qt_string_format(&text, NULL, "%.*s", (int)size, raw), QT_OK);
    qt_free(raw);
    return text;
}

static bool has_section(const json_t *sections, const char *id)
{
    size_t i;
    const json_t *s;
    json_array_foreach (sections, i, s) {
        if (strcmp(json_string_value(s), id) == 0)
            return true;
    }
    return false;
}

static size_t count(const char *text, const char *what)
{
    size_t n = 0;
    for (const char *p = text; (p = strstr(p, what)) != NULL; p++)
        n++;
    return n;
}

/* The JSON in the page. */
static json_t *data_of(const char *text)
{
    static const char head[] = "<script type=\"application/json\" id=\"data\">";
    const char *begin = strstr(text, head), *end;
    json_t *doc;
    assert_non_null(begin);
    begin += strlen(head);
    end = strstr(begin, "</script>");
    assert_non_null(end);
    assert_int_equal(qt_json_parse(&doc, begin, (size_t)(end - begin), "data", NULL), QT_OK);
    return doc;
}

static const json_t *find_table(const json_t *doc, const char *section, size_t number)
{
    size_t i;
    const json_t *s;
    json_array_foreach (json_object_get(doc, "sections"), i, s) {
        if (strcmp(json_string_value(json_object_get(s, "id")), section) == 0)
            return json_array_get(json_object_get(s, "tables"), number);
    }
    return NULL;
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void test_choice(void **state)
{
    const char *const paths[] = {file("b.json", eval_b), file("a.json", eval_a)};
    json_t *sections;
    char *text = page(&sections, paths, 2);
    json_t *doc = data_of(text);
    const json_t *rows = json_object_get(find_table(doc, "choice", 0), "rows");
    (void)state;
    /* The smallest first, and what is better. */
    assert_int_equal(json_array_size(rows), 2);
    const json_t *first = json_array_get(rows, 0), *second = json_array_get(rows, 1);
    assert_string_equal(json_string_value(json_array_get(first, 0)), "a");
    assert_string_equal(json_string_value(json_array_get(first, 1)), "best of its size");
    assert_string_equal(json_string_value(json_array_get(second, 1)), "a is better");
    assert_non_null(strstr(text, ">a is better<"));
    assert_non_null(strstr(text, "Best of their size"));
    assert_true(has_section(sections, "quantiles"));
    assert_true(has_section(sections, "gates"));
    assert_true(has_section(sections, "compare"));
    assert_false(has_section(sections, "errors"));
    assert_false(has_section(sections, "speed"));
    assert_false(has_section(sections, "activations"));
    json_decref(doc);
    json_decref(sections);
    qt_free(text);
}

/* Evaluations with different references cannot be compared: both are best. */
static void test_not_comparable(void **state)
{
    char other[sizeof eval_b];
    snprintf(other, sizeof other, "%s", eval_b);
    memcpy(strstr(other, "\"ref_ppl\": 10"), "\"ref_ppl\": 13", 13);
    const char *const paths[] = {file("a.json", eval_a), file("o.json", other)};
    json_t *sections;
    char *text = page(&sections, paths, 2);
    (void)state;
    assert_null(strstr(text, ">a is better<"));
    json_decref(sections);
    qt_free(text);
}

static void test_escaped(void **state)
{
    const char *const paths[] = {file("evil.json", verify_evil), file("bench.json", bench),
                                 file("a.json", eval_a)};
    json_t *sections;
    char *text = page(&sections, paths, 3);
    json_t *doc = data_of(text);
    (void)state;
    /* The page's two script elements, and no other markup from names. */
    assert_int_equal(count(text, "<script"), 2);
    assert_int_equal(count(text, "</script"), 2);
    assert_null(strstr(text, "<img"));
    assert_non_null(strstr(text, "&lt;/script&gt;&lt;script&gt;window.hostile=1"));
    assert_non_null(strstr(text, "&amp;amp;")); /* is shown as &amp; */
    assert_true(has_section(sections, "speed"));
    assert_true(has_section(sections, "errors"));
    /* The JSON has the name as it is. */
    const json_t *rows = json_object_get(find_table(doc, "errors", 1), "rows");
    assert_int_equal(json_array_size(rows), 2);
    const char *worst = json_string_value(json_array_get(json_array_get(rows, 0), 0));
    const char *evil = json_string_value(json_array_get(json_array_get(rows, 1), 0));
    assert_string_equal(worst, "model.layers.1.mlp.experts.7.down_proj.weight");
    assert_non_null(strstr(evil, "</script><script>window.hostile=1</script>'\"><img"));
    assert_string_equal(json_string_value(json_array_get(json_array_get(rows, 0), 2)),
                        "experts.*.down_proj");
    json_decref(doc);
    json_decref(sections);
    qt_free(text);
}

static void test_models(void **state)
{
    const char *const paths[] = {file("model.json", bench_model), file("bench.json", bench)};
    json_t *sections;
    char *text = page(&sections, paths, 2);
    json_t *doc = data_of(text);
    (void)state;
    assert_true(has_section(sections, "models") && has_section(sections, "speed"));
    const json_t *rows = json_object_get(find_table(doc, "models", 0), "rows");
    assert_int_equal(json_array_size(rows), 4);
    const json_t *int4 = json_array_get(rows, 1);
    assert_string_equal(json_string_value(json_array_get(int4, 0)), "int4");
    assert_true(json_number_value(json_array_get(int4, 3)) == 500);
    assert_true(json_number_value(json_array_get(int4, 6)) == 1);
    /* Parts of the two bars with batch 1, which has 4.6 and 1.6 ms: products and others. */
    assert_non_null(strstr(text, ">4.600 ms</text>"));
    assert_non_null(strstr(text, ">1.600 ms</text>"));
    assert_non_null(strstr(text, "class=\"b0\" x=\"0.0\" y=\"17.0\" width=\"400.0\""));
    assert_non_null(strstr(text, "class=\"b0\" x=\"0.0\" y=\"49.0\" width=\"100.0\""));
    assert_non_null(strstr(text, "class=\"b5\" x=\"155.0\" y=\"49.0\" width=\"5.0\""));
    assert_null(strstr(text, "batch 16</h4>"));
    assert_null(strstr(text, "<img"));
    json_decref(doc);
    json_decref(sections);
    qt_free(text);
}

/* Control characters, direction overrides and bytes that are not UTF-8. */
static void test_hidden(void **state)
{
    static const char text_json[] = "{\"qtool\": \"\\u0001\\u009b\\u202ex\", \"command\": "
                                    "\"eval\", \"path\": \"p\\u0007\\u2066q\"}";
    const char *const paths[] = {file("\xff\x1b[31m.json", text_json)};
    json_t *sections;
    char *text = page(&sections, paths, 1);
    (void)state;
    assert_non_null(strstr(text, "p\ufffd\ufffdq"));
    assert_non_null(strstr(text, "\ufffd\ufffd\ufffdx"));
    for (const char *p = text; *p; p++)
        assert_true(*p == '\n' || (unsigned char)*p >= 0x20);
    assert_null(strstr(text, "\u202e"));
    json_decref(sections);
    qt_free(text);
}

static void test_same_bytes(void **state)
{
    const char *const paths[] = {file("evil.json", verify_evil), file("bench.json", bench),
                                 file("a.json", eval_a)};
    json_t *first, *second;
    char *one = page(&first, paths, 3), *two = page(&second, paths, 3);
    (void)state;
    assert_string_equal(one, two);
    json_decref(first);
    json_decref(second);
    qt_free(one);
    qt_free(two);
}

static void test_refused(void **state)
{
    static const struct {
        const char *text, *reason;
    } cases[] = {
        {"{}", "not a document that 'qtool eval'"},
        {"[1]", "not a document that 'qtool eval'"},
        {"{\"qtool\": 1, \"command\": \"eval\"}", "not a document"},
        {"{\"qtool\": \"0\", \"command\": \"plan\"}", "is a document of 'qtool plan'"},
        {"{\"qtool\": \"0\", \"command\": \"eval\", \"error\": {\"status\": \"bad_input\", "
         "\"message\": \"no such file\"}}",
         "failed, without results: no such file"},
        {"{\"qtool\": ", "unexpected token"},
        {"just text\n", "is plain text"},
        {"", "is an empty file"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_report *r;
        struct qt_err err = {0};
        assert_int_equal(qt_report_new(&r, &err), QT_OK);
        assert_int_equal(qt_report_add(r, file("x", cases[i].text), &err), QT_E_INPUT);
        if (!strstr(err.reason, cases[i].reason))
            fail_msg("'%s' instead of '%s'", err.reason, cases[i].reason);
        assert_int_equal(qt_report_add(r, dir, &err), QT_E_INPUT);
        assert_non_null(strstr(err.reason, "not a container"));
        qt_report_free(r);
    }
}

/* Members of other types than expected are as good as missing. */
static void test_wrong_types(void **state)
{
    static const char wrong[] =
        "{\"qtool\": \"0\", \"command\": \"verify\", \"path\": [], \"bytes\": \"many\", \"bpw\": "
        "{},"
        "\"gates\": {\"a\": 1}, \"tensors\": [1, {}, {\"name\": \"n\", \"scheme\": \"s\", "
        "\"shape\": 3},"
        "{\"name\": \"\", \"scheme\": \"\", \"shape\": [\"a\", -1], \"mse\": \"x\"}], \"gpu\": 3,"
        "\"kernels\": [3, {\"times\": 3}, {\"times\": [{\"m\": -1, \"us\": 0}, {\"m\": 1e300, "
        "\"us\": 1e-300}]}]}";
    static const char numbers[] =
        "{\"qtool\": \"0\", \"command\": \"eval\", \"bytes\": -1e308, \"kld_mean\": 1e-320, "
        "\"ppl\": 1e308, \"ref_ppl\": \"x\", \"kld_quantiles\": [{\"q\": 0.5, \"kld\": 1e-300}, "
        "{\"q\": 0.9, \"kld\": 1e300}, 7], \"gates\": [7]}";
    static const char rows[] =
        "{\"qtool\": \"0\", \"command\": \"bench\", \"rows\": [7, {\"us\": 1}, {\"scheme\": \"s\", "
        "\"n\": 1e300, \"k\": 1e300, \"us\": 1, \"m\": 0, \"floor_us\": -1}], \"caches\": [7]}";
    static const char models[] =
        "{\"qtool\": \"0\", \"command\": \"bench\", \"model\": \"m\", \"rows\": [7, {\"scheme\": "
        "3}, "
        "{\"scheme\": \"s\", \"batch\": 1, \"decode_tokens_per_s\": 1e308, \"kernels_us\": "
        "{\"products\": 1e308, \"head\": 1e308, \"norms\": -1e308}}, {\"scheme\": \"t\", "
        "\"batch\": "
        "1, \"kernels_us\": [1]}, {\"scheme\": \"t\", \"batch\": -2}]}";
    const char *const paths[] = {file("w.json", wrong), file("n.json", numbers),
                                 file("r.json", rows), file("m.json", models)};
    json_t *sections;
    (void)state;
    qt_free(page(&sections, paths, 4));
    json_decref(sections);
}

/* ---- weights -------------------------------------------------------------------------------- */

enum { ROWS = 40, CHANNELS = 300, PLANTED = 277 };

/* A checkpoint of one matrix, in which one channel stands out. */
static const char *write_matrix(float w[ROWS][CHANNELS])
{
    static struct {
        uint64_t size;
        char header[120];
        float w[ROWS][CHANNELS];
    } st;
    for (size_t r = 0; r < ROWS; r++)
        for (size_t j = 0; j < CHANNELS; j++)
            w[r][j] = (float)((int)(r * 7919 + j * 104729) % 2003 - 1001) / (float)(r + 900);
    w[17][PLANTED] = -40;
    w[3][0] = 0;
    st.size = sizeof st.header;
    memset(st.header, ' ', sizeof st.header);
    const int n = snprintf(st.header, sizeof st.header,
                           "{\"model.layers.0.mlp.up_proj.weight\": {\"dtype\": \"F32\", "
                           "\"shape\": [%d, %d], \"data_offsets\": [0, %zu]}}",
                           ROWS, CHANNELS, sizeof st.w);
    st.header[n] = ' ';
    memcpy(st.w, w, sizeof st.w);
    static char path[128];
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    assert_int_equal(qt_file_write(path, &st, sizeof st, NULL), QT_OK);
    return path;
}

static void keep_distribution(void *ctx, json_t *tensor)
{
    json_t **out = ctx;
    *out = json_deep_copy(json_object_get(tensor, "distribution"));
}

/* The distribution that quantizing records, with some number of threads. */
static json_t *record(const char *out, const char *source, int threads)
{
    json_t *d = NULL;
    const struct qt_quantize_options opt = {.plan = {.scheme = "nf4"},
                                            .out_dir = out,
                                            .force = true,
                                            .tensor = keep_distribution,
                                            .tensor_ctx = &d};
    struct qt_quantize_report report;
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    qt_threads_set(threads);
    assert_int_equal(qt_ckpt_open(&ckpt, source, &err), QT_OK);
    if (qt_quantize(&report, ckpt, &opt, &err) < 0)
        fail_msg("%s: %s", err.file, err.reason);
    json_decref(report.document);
    qt_ckpt_close(ckpt);
    assert_non_null(d);
    return d;
}

static double number(const json_t *o, const char *key)
{
    assert_true(json_is_number(json_object_get(o, key)));
    return json_number_value(json_object_get(o, key));
}

/* Of all weights, by the plainest means. */
static void check_distribution(const json_t *d, float w[ROWS][CHANNELS])
{
    const json_t *bins = json_object_get(d, "histogram"),
                 *channels = json_object_get(d, "channels");
    const json_int_t first = json_integer_value(json_object_get(d, "first_bin"));
    double sum2 = 0, total = 0, previous = 40;
    size_t i;
    const json_t *bin;
    for (size_t r = 0; r < ROWS; r++)
        for (size_t j = 0; j < CHANNELS; j++)
            sum2 += (double)w[r][j] * (double)w[r][j];
    json_array_foreach (bins, i, bin) {
        const double b = (double)(first + (json_int_t)i);
        const double from = b > 0 ? exp2((b - 33) / 2) : 0, to = exp2((b - 32) / 2);
        size_t count = 0;
        for (size_t r = 0; r < ROWS; r++)
            for (size_t j = 0; j < CHANNELS; j++)
                count += fabsf(w[r][j]) >= (float)from && fabsf(w[r][j]) < (float)to;
        assert_int_equal(json_integer_value(bin), count);
        total += (double)count;
    }
    assert_true(total == ROWS * CHANNELS);
    assert_true(first == 0); /* the weight that is 0 */
    assert_float_equal(number(d, "rms"), sqrt(sum2 / (ROWS * CHANNELS)), 1e-7);
    assert_true(number(d, "absmax") == 40);
    assert_int_equal(json_array_size(channels), 4);
    for (i = 0; i < 4; i++) {
        const json_t *c = json_array_get(channels, i);
        const size_t j = (size_t)json_integer_value(json_array_get(c, 0));
        double channel2 = 0, absmax = 0;
        for (size_t r = 0; r < ROWS; r++) {
            channel2 += (double)w[r][j] * (double)w[r][j];
            absmax = fmax(absmax, fabs((double)w[r][j]));
        }
        assert_true(i > 0 || j == PLANTED);
        assert_float_equal(json_number_value(json_array_get(c, 1)), absmax, 1e-7);
        assert_true(absmax <= previous);
        assert_float_equal(json_number_value(json_array_get(c, 2)), sqrt(channel2 / ROWS), 1e-7);
        previous = absmax;
    }
}

static void test_weights(void **state)
{
    static float w[ROWS][CHANNELS];
    const char *source = write_matrix(w);
    char one[128], two[128], manifest[160];
    json_t *sections, *a, *b, *doc;
    (void)state;
    snprintf(one, sizeof one, "%s/one", dir);
    snprintf(two, sizeof two, "%s/two", dir);
    a = record(one, source, 1);
    b = record(two, source, 3);
    check_distribution(a, w);
    assert_true(json_equal(a, b));
    snprintf(manifest, sizeof manifest, "%s/qtool.json", one);
    assert_int_equal(qt_json_load(&doc, manifest, 1 << 20, NULL), QT_OK);
    const json_t *entry =
        json_object_get(json_object_get(doc, "tensors"), "model.layers.0.mlp.up_proj.weight");
    assert_non_null(entry);
    assert_null(json_object_get(entry, "distribution"));
    json_decref(doc);
    const char *const paths[] = {one};
    char *text = page(&sections, paths, 1);
    doc = data_of(text);
    assert_true(has_section(sections, "weights"));
    /* Histogram, heat map, channels. */
    const json_t *rows = json_object_get(find_table(doc, "weights", 2), "rows");
    assert_int_equal(json_array_size(rows), 4);
    assert_true(json_real_value(json_array_get(json_array_get(rows, 0), 1)) == PLANTED);
    json_decref(a);
    json_decref(b);
    json_decref(doc);
    json_decref(sections);
    qt_free(text);
    assert_int_equal(qt_dir_remove(one, NULL), QT_OK);
    assert_int_equal(qt_dir_remove(two, NULL), QT_OK);
}

/* A report file in which other types stand than expected. */
static void test_wrong_distribution(void **state)
{
    static const char *const wrong[] = {
        "7", "{}", "{\"rms\": 0, \"absmax\": 1, \"histogram\": 3, \"channels\": {}}",
        ("{\"rms\": 1, \"absmax\": \"x\", \"first_bin\": -3, \"histogram\": [1, -1, \"x\", 1, 2],"
         "\"channels\": [1, {}, [], [\"</script>\", 1e300, -1], [1e300, 1e300]]}"),
        "{\"rms\": 1e-300, \"absmax\": 1e300, \"first_bin\": 62.5, \"histogram\": [1, 1, 1, 1]}"};
    static float w[ROWS][CHANNELS];
    char out[128], path[160];
    (void)state;
    snprintf(out, sizeof out, "%s/wrong", dir);
    json_decref(record(out, write_matrix(w), 1));
    snprintf(path, sizeof path, "%s/qtool-report.json", out);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char text[1024];
        const int n = snprintf(text, sizeof text,
                               "{\"tensors\": [{\"name\": \"model.layers.0.mlp.up_proj.weight\", "
                               "\"distribution\": %s}]}",
                               wrong[i]);
        assert_int_equal(qt_file_write(path, text, (size_t)n, NULL), QT_OK);
        const char *const paths[] = {out};
        json_t *sections;
        char *html = page(&sections, paths, 1);
        assert_int_equal(count(html, "</script"), 2);
        json_decref(sections);
        qt_free(html);
    }
    assert_int_equal(qt_dir_remove(out, NULL), QT_OK);
}

static void test_out_of_memory(void **state)
{
    const char *const paths[] = {file("evil.json", verify_evil), file("bench.json", bench),
                                 file("a.json", eval_a)};
    char *text;
    size_t size;
    json_t *sections;
    struct qt_err err;
    int rc = QT_E_RESOURCE;
    (void)state;
    for (long n = 0; rc < 0; n += 1 + n / 40) {
        qt_mem_fail_after(n);
        rc = make(&text, &size, &sections, paths, 3, &err);
        qt_mem_fail_after(-1);
        assert_true(rc == QT_OK || rc == QT_E_RESOURCE);
        json_decref(sections);
        qt_free(text);
        assert_true(n < 1000000);
    }
}

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "%s/qtool-report-XXXXXX",
             getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return qt_dir_remove(dir, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_not_comparable),
        cmocka_unit_test(test_escaped),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_hidden),
        cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_wrong_types),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_wrong_distribution),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
