#include "formats/formats.h"
#include "tests/unit/fixture.h"

static int parse(json_t **out, const char *text, struct qt_err *err)
{
    return qt_json_parse(out, text, strlen(text), "x.json", err);
}

static const struct {
    const char *name, *text, *fragment;
} hostile[] = {
    {"empty", "", "line 1"},
    {"not json", "hello", "line 1"},
    {"bare value", "42", "'[' or '{' expected"},
    {"unclosed", "{\"a\": 1", "line 1"},
    {"second line", "{\n \"a\": 1,\n}", "line 3"},
    {"column", "{\"a\" 1}", "line 1, column 6: ':' expected"},
    {"duplicate key", "{\"a\": 1, \"a\": 2}", "duplicate object key"},
    {"duplicate by escape", "{\"a\": 1, \"\\u0061\": 2}", "duplicate object key"},
    {"nul in string", "{\"a\": \"\\u0000\"}", "NUL byte in a string"},
    {"nul in key", "{\"a\\u0000b\": 1}", "NUL"},
    {"bad utf-8", "{\"a\": \"\xff\"}", "unable to decode byte 0xff"},
    {"overlong utf-8", "{\"a\": \"\xc0\xaf\"}", "unable to decode byte 0xc0"},
    {"surrogate in utf-8", "{\"a\": \"\xed\xa0\x80\"}", "unable to decode byte"},
    {"lone surrogate", "{\"a\": \"\\ud800\"}", "invalid Unicode"},
    {"control character", "{\"a\": \"\x01\"}", "control character"},
    {"integer too big", "{\"a\": 99999999999999999999}", "too big integer"},
    {"real too big", "{\"a\": 1e999}", "real number overflow"},
    {"leading zero", "{\"a\": 01}", "line 1"},
    {"trailing comma", "[1,]", "unexpected token"},
    {"trailing garbage", "{} x", "end of file expected"},
    {"two documents", "{}{}", "end of file expected"},
    {"NaN", "{\"a\": NaN}", "invalid token"},
    {"comment", "{/**/}", "line 1"},
};

static void test_hostile(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        struct qt_err err = {0};
        json_t *root = (json_t *)&err;
        int rc = parse(&root, hostile[i].text, &err);
        expect_error(hostile[i].name, rc, QT_E_INPUT, hostile[i].fragment, &err);
        expect_error(hostile[i].name, rc, QT_E_INPUT, "x.json: ", &err);
        assert_null(root);
    }
}

static void test_depth(void **state)
{
    (void)state;
    struct qt_err err = {0};
    json_t *root;
    char text[256];
    for (int depth = 63; depth <= 66; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        text[2 * depth] = '\0';
        int rc = parse(&root, text, &err);
        expect_error("depth", rc, depth <= 64 ? QT_OK : QT_E_INPUT, "column 65: JSON nested", &err);
        json_decref(root);
    }
    /* Brackets in strings do not nest, also after escapes. */
    assert_int_equal(
        parse(&root, "[\"\\\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\"]",
              &err),
        QT_OK);
    json_decref(root);
    assert_int_equal(parse(&root, "[\"\\\\\", [], [], [], []]", &err), QT_OK);
    json_decref(root);
}

static void test_getters(void **state)
{
    (void)state;
    struct qt_err err = {0};
    json_t *o;
    const char *s = "default";
    size_t n = 7;
    double d = 0.5;
    bool b = true;
    expect_ok("parse",
              parse(&o,
                    "{\"s\": \"text\", \"n\": 12, \"d\": 1.5, \"b\": false, \"z\": null,"
                    " \"neg\": -1, \"o\": {}, \"a\": []}",
                    &err),
              &err);
    expect_ok("absent", qt_json_get_string(&s, o, "none", "f", &err), &err);
    assert_string_equal(s, "default");
    expect_ok("null", qt_json_get_size(&n, o, "z", "f", &err), &err);
    assert_int_equal(n, 7);
    expect_ok("absent real", qt_json_get_real(&d, o, "none", "f", &err), &err);
    assert_true(d == 0.5);
    expect_ok("absent bool", qt_json_get_bool(&b, o, "none", "f", &err), &err);
    assert_true(b);
    expect_ok("string", qt_json_need_string(&s, o, "s", "f", &err), &err);
    assert_string_equal(s, "text");
    expect_ok("size", qt_json_need_size(&n, o, "n", "f", &err), &err);
    assert_int_equal(n, 12);
    expect_ok("real", qt_json_get_real(&d, o, "d", "f", &err), &err);
    assert_true(d == 1.5);
    expect_ok("integer as real", qt_json_get_real(&d, o, "n", "f", &err), &err);
    assert_true(d == 12);
    expect_ok("bool", qt_json_get_bool(&b, o, "b", "f", &err), &err);
    assert_false(b);

    expect_error("need absent", qt_json_need_string(&s, o, "none", "f", &err), QT_E_INPUT,
                 "f: 'none' is missing", &err);
    expect_error("need null", qt_json_need_size(&n, o, "z", "f", &err), QT_E_INPUT,
                 "'z' is missing", &err);
    expect_error("negative", qt_json_need_size(&n, o, "neg", "f", &err), QT_E_INPUT,
                 "'neg' is a negative integer, but a non-negative integer is expected", &err);
    expect_error("real as size", qt_json_get_size(&n, o, "d", "f", &err), QT_E_INPUT,
                 "'d' is a real number", &err);
    expect_error("object as string", qt_json_get_string(&s, o, "o", "f", &err), QT_E_INPUT,
                 "'o' is an object", &err);
    expect_error("bool as real", qt_json_get_real(&d, o, "b", "f", &err), QT_E_INPUT,
                 "'b' is a boolean", &err);
    expect_error("array as bool", qt_json_get_bool(&b, o, "a", "f", &err), QT_E_INPUT,
                 "'a' is an array", &err);
    expect_error("no object", qt_json_need_size(&n, json_object_get(o, "a"), "n", "f", &err),
                 QT_E_INPUT, "an object with 'n' is expected", &err);
    expect_error("no value", qt_json_need_size(&n, NULL, "n", "f", &err), QT_E_INPUT,
                 "an object with 'n' is expected", &err);
    json_decref(o);
}

/* Python's JSON, and what the strict parse of the same text gives. "%" stands for the backslash. */
static const struct {
    const char *text, *strict;
} python[] = {
    {"{'a': NaN, 'b': [Infinity,-Infinity], 'c': 1}",
     "{'a': {'NaN': 0}, 'b': [{'Infinity': 0}, {'-Infinity': 0}], 'c': 1}"},
    {"{'NaN': 'NaN, -Infinity', 'b': -1, 'c': '%%%'NaN'}",
     "{'NaN': 'NaN, -Infinity', 'b': -1, 'c': '%%%'NaN'}"},
    {"['%ud800', '%udfffx', '%uDBFF%uDBFF%uDFFF', '%udc00%ud800', '%%ud800']",
     "['%ufffd', '%ufffdx', '%ufffd%uDBFF%uDFFF', '%ufffd%ufffd', '%%ud800']"},
    {"{'%ud8ff': 1}", "{'%ufffd': 1}"},
    {"[9223372036854775807, 9223372036854775808, -100000000000000000000, 1e19, "
     "12345678901234567890.5]",
     "[9223372036854775807, 9223372036854775808.0, -100000000000000000000.0, 1e19, "
     "12345678901234567890.5]"},
};

static void unquote(char out[256], const char *text)
{
    size_t i = 0;
    for (; text[i]; i++)
        out[i] = (char)(text[i] == '\'' ? '"' : text[i] == '%' ? '\\' : text[i]);
    out[i] = '\0';
}

static void test_python(void **state)
{
    static const struct {
        const char *text, *fragment;
    } bad[] = {
        {"{'a': NaN,\n 'b': NaN, 'c': [NaN, x]}", "line 2, column 23: invalid token"},
        {"{'a': NaNx}", "line 1, column 10"},
        {"[100000000000000000000, x]", "line 1, column 25: invalid token"},
        {"{'a': nan}", "invalid token"},
        {"{'a': -infinity}", "invalid token"},
        {"{'a': +Infinity}", "invalid token"},
        {"{NaN: 1}", "string or '}' expected"},
        {"NaN NaN", "end of file expected"},
        {"['%ud80']", "invalid escape"},
        {"['%ud8", "line 1"},
        {"['%", "line 1"},
    };
    (void)state;
    struct qt_err err = {0};
    char text[256];
    json_t *root, *want;
    double d = 1;
    for (size_t i = 0; i < sizeof python / sizeof *python; i++) {
        unquote(text, python[i].strict);
        expect_ok("strict", parse(&want, text, &err), &err);
        unquote(text, python[i].text);
        expect_ok(text, qt_json_parse_lenient(&root, text, strlen(text), "x.json", &err), &err);
        assert_true(json_equal(root, want));
        json_decref(root);
        json_decref(want);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        unquote(text, bad[i].text);
        expect_error(text, qt_json_parse_lenient(&root, text, strlen(text), "x.json", &err),
                     QT_E_INPUT, bad[i].fragment, &err);
    }
    unquote(text, "{'theta': -Infinity}");
    expect_ok("literal", qt_json_parse_lenient(&root, text, strlen(text), "f", &err), &err);
    assert_string_equal(qt_json_literal(json_object_get(root, "theta")), "-Infinity");
    assert_null(qt_json_literal(root));
    expect_error("needed", qt_json_get_real(&d, root, "theta", "f", &err), QT_E_INPUT,
                 "f: 'theta' is -Infinity, but a number is expected", &err);
    json_decref(root);
    unquote(text, "{'a': '%ud800'}");
    expect_ok("other", qt_json_parse_data(&root, text, strlen(text), 7, "\\ufffe", "f", &err),
              &err);
    assert_string_equal(json_string_value(json_object_get(root, "a")), "\xef\xbf\xbe");
    json_decref(root);
    unquote(text, "\n'%u0000");
    expect_error("lines", qt_json_parse_data(&root, text, strlen(text), 7, "\\ufffd", "f", &err),
                 QT_E_INPUT, "f: line 8, column", &err);
}

static void test_load(void **state)
{
    (void)state;
    struct qt_err err = {0};
    json_t *root;
    char *dir = fixture_dir();
    const char *path = fixture_write(dir, "a.json", "{\"k\": [1, 2]}", 13);
    expect_ok("load", qt_json_load(&root, path, 13, &err), &err);
    assert_int_equal(json_array_size(json_object_get(root, "k")), 2);
    json_decref(root);
    expect_error("limit", qt_json_load(&root, path, 12, &err), QT_E_INPUT, "13 bytes, at most 12",
                 &err);
    assert_null(root);
    path = fixture_write(dir, "b.json", "\xef\xbb\xbf{}", 5);
    expect_error("mark", qt_json_load(&root, path, 12, &err), QT_E_INPUT,
                 "b.json: begins with a byte order mark", &err);
    expect_error("absent", qt_json_load(&root, "/nonexistent/x", 100, &err), QT_E_INPUT,
                 "/nonexistent/x: cannot open", &err);
    fixture_remove(dir);
}

/* Members are set to {"m": [1]} or (set = false) removed. */
static const struct {
    const char *name, *text, *path;
    bool set;
    const char *expected;
} edits[] = {
    {"remove the first", "{'q': {'a': [1, 2]}, 'b': 1}", "q", false, "{ 'b': 1}"},
    {"remove one between", "{'a': 1, 'q' : '}%'%%', 'b': 1}", "q", false, "{'a': 1, 'b': 1}"},
    {"remove the last", "{\n  'a': 1,\n  'q': 2\n}\n", "q", false, "{\n  'a': 1\n}\n"},
    {"remove the only one", "{\n\t'q': [{}, []]\n}", "q", false, "{\n}"},
    {"remove none", " {'a': {'q': 1}} ", "q", false, " {'a': {'q': 1}} "},
    {"remove from an empty object", "{ }", "q", false, "{ }"},
    {"remove an inner one", "{'t': {'q': 1, 'b': 1e5}, 'q': 2}", "t/q", false,
     "{'t': { 'b': 1e5}, 'q': 2}"},
    {"no such object", "{'t': [{'q': 1}]}", "t/q", false, "{'t': [{'q': 1}]}"},
    {"remove an escaped key", "{'%u0071': 1, '%%q': 2}", "q", false, "{ '%%q': 2}"},
    {"keep literals", "{'a': NaN, 'q': -Infinity, 'b': 1.50}", "q", false, "{'a': NaN, 'b': 1.50}"},
    {"replace", "{'a': 1, 'q': [2],\t'b': 3}", "q", true, "{'a': 1, 'q': {'m': [1]},\t'b': 3}"},
    {"replace a line", "{\n  'q': true ,\n  'b': 3}", "q", true,
     "{\n  'q': {\n    'm': [\n      1\n    ]\n  } ,\n  'b': 3}"},
    {"add", "{'a': '%'q%': 1' }", "q", true, "{'a': '%'q%': 1','q': {'m': [1]} }"},
    {"add in a line", "{'a': 1, 'b': 2}", "q", true, "{'a': 1, 'b': 2, 'q': {'m': [1]}}"},
    {"add a line", "{\r\n\t'a': 1\r\n}\r\n", "q", true,
     "{\r\n\t'a': 1,\r\n\t'q': {\n\t  'm': [\n\t    1\n\t  ]\n\t}\r\n}\r\n"},
    {"add to an empty object", "{\n}", "q", true, "{'q': {'m': [1]}\n}"},
    {"add an inner one", "{'t': {}, 'u': 0}", "t/q", true, "{'t': {'q': {'m': [1]}}, 'u': 0}"},
};

static void test_edit(void **state)
{
    (void)state;
    struct qt_err err = {0};
    char text[256], expected[256], *out;
    size_t size;
    json_t *value = json_pack("{s[i]}", "m", 1), *parsed;
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        unquote(text, edits[i].text);
        unquote(expected, edits[i].expected);
        int rc =
            edits[i].set
                ? qt_json_edit_set(&out, &size, text, strlen(text), edits[i].path, value, "f", &err)
                : qt_json_edit_remove(&out, &size, text, strlen(text), edits[i].path, "f", &err);
        expect_ok(edits[i].name, rc, &err);
        if (strcmp(out, expected) != 0)
            fail_msg("%s: %s, expected %s", edits[i].name, out, expected);
        assert_int_equal(size, strlen(expected));
        expect_ok("parse", qt_json_parse_lenient(&parsed, out, size, "f", &err), &err);
        json_decref(parsed);
        qt_free(out);
    }
    expect_error("syntax", qt_json_edit_remove(&out, &size, "{\"a\" 1}", 7, "a", "f", &err),
                 QT_E_INPUT, "f: line 1", &err);
    assert_null(out);
    expect_error("list", qt_json_edit_set(&out, &size, "[1]", 3, "a", value, "f", &err), QT_E_INPUT,
                 "f: is an array, but an object is expected", &err);
    expect_error("place", qt_json_edit_set(&out, &size, "{}", 2, "t/a", value, "f", &err),
                 QT_E_INPUT, "f: 't/a' has no place", &err);
    assert_null(out);
    int rc = QT_E_RESOURCE;
    for (long n = 0; rc != QT_OK; n++) {
        qt_mem_fail_after(n);
        rc = qt_json_edit_set(&out, &size, "{\n  \"a\": 1}", 11, "q", value, "f", &err);
        qt_mem_fail_after(-1);
        if (rc != QT_OK)
            expect_error("allocation", rc, QT_E_RESOURCE, "out of memory", &err);
    }
    qt_free(out);
    json_decref(value);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    static const char text[] =
        "{\"name that is longer than a small buffer\": [1, 2.5, \"s\\u00e9\"], "
        "\"other\": {\"a\": 12345678901234, \"b\": null}}";
    struct qt_err err = {0};
    json_t *root;
    int rc = QT_E_RESOURCE;
    long n = 0;
    for (; rc != QT_OK; n++) {
        qt_mem_fail_after(n);
        rc = parse(&root, text, &err);
        qt_mem_fail_after(-1);
        if (rc != QT_OK)
            expect_error("allocation", rc, QT_E_RESOURCE, "out of memory", &err);
    }
    assert_true(n > 10);
    json_decref(root);
}

/* ---- parts ---------------------------------------------------------------------------------- */

/* Cuts an object or array and parses its parts. Returns their number, or -1. */
static int cut(const char *text, char open)
{
    struct qt_json_cursor c;
    struct qt_json_part part;
    enum qt_json_step step;
    json_t *value;
    int n = 0;
    if (!qt_json_enter(&c, (struct qt_json_part){text, strlen(text)}, open))
        return -1;
    while ((step = qt_json_next(&part, &c)) == QT_JSON_PART) {
        if (qt_json_parse_part(&value, part, open, false, "x.json", NULL) < 0)
            return -1;
        json_decref(value);
        n++;
    }
    return step == QT_JSON_END ? n : -1;
}

static void test_cut(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        char open;
        int parts;
    } cases[] = {
        {"{}", '{', 0},
        {" [ ] \n", '[', 0},
        {"{\"a\": [1, {\"b\": \"}],\\\"\"}], \"c\" : null }", '{', 2},
        {"[1, \"x\", [2, 3], {\"a\": 4}]", '[', 4},
        {"[1]", '{', -1},
        {"", '{', -1},
        {"{\"a\": 1", '{', -1},
        {"{\"a\": 1,}", '{', -1},
        {"{,}", '{', -1},
        {"[1] 2", '[', -1},
        {"[1 2]", '[', -1},
        {"[1}", '[', -1},
        {"{\"a\": [}]}", '{', -1},
        {"{\"a\": \"x}", '{', -1},
        {"{\"a\": 1 \"b\": 2}", '{', -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (cut(cases[i].text, cases[i].open) != cases[i].parts)
            fail_msg("'%s': %d parts", cases[i].text, cut(cases[i].text, cases[i].open));
        /* every text that is accepted is valid JSON, and the other way round */
        struct qt_err err = {0};
        json_t *whole;
        const bool valid = parse(&whole, cases[i].text, &err) == QT_OK;
        assert_int_equal(valid && cases[i].text[strspn(cases[i].text, " ")] == cases[i].open,
                         cases[i].parts >= 0);
        json_decref(whole);
    }
}

static void test_part_value(void **state)
{
    (void)state;
    const char *text = "\"key\" : [1]";
    struct qt_json_part value;
    const struct qt_json_part member = {text, strlen(text)};
    assert_true(qt_json_part_value(&value, member, "key"));
    assert_int_equal(value.size, 3);
    assert_memory_equal(value.text, "[1]", 3);
    assert_false(qt_json_part_value(&value, member, "ke"));
    assert_false(qt_json_part_value(&value, member, "key2"));
    assert_false(qt_json_part_value(&value, (struct qt_json_part){text, 5}, "key"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile),    cmocka_unit_test(test_depth),
        cmocka_unit_test(test_getters),    cmocka_unit_test(test_load),
        cmocka_unit_test(test_python),     cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_edit),       cmocka_unit_test(test_cut),
        cmocka_unit_test(test_part_value),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
