/* The option parser: every kind of option, every form, every error. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/opts.c" /* the parser is not part of the library */

struct options {
    bool flag;
    const char *string;
    size_t size;
    int choice;
    struct opt_list list;
};

static const char *const choices[] = {"auto", "plain", "none", NULL};

static const struct opt opts[] = {
    {.name = "flag", .letter = 'f', .kind = OPT_FLAG, .offset = offsetof(struct options, flag)},
    {.name = "string",
     .letter = 's',
     .kind = OPT_STRING,
     .offset = offsetof(struct options, string),
     .metavar = "S"},
    {0},
};

static const struct opt more_opts[] = {
    {.name = "size",
     .kind = OPT_SIZE,
     .offset = offsetof(struct options, size),
     .metavar = "N",
     .min = 2,
     .max = 1000},
    {.name = "choice",
     .kind = OPT_CHOICE,
     .offset = offsetof(struct options, choice),
     .metavar = "MODE",
     .choices = choices},
    {.name = "list",
     .letter = 'l',
     .kind = OPT_LIST,
     .offset = offsetof(struct options, list),
     .metavar = "ITEM"},
    {0},
};

static const struct opt_positional two[] = {{"SRC", "source"}, {"DST", "target"}, {0}};
static const struct opt_syntax syntax = {{opts, more_opts}, two};

static int parse(struct options *o, const char *args[OPTS_MAX_ARGS], char *const argv[],
                 struct qt_err *err)
{
    int argc = 0;
    while (argv[argc])
        argc++;
    *o = (struct options){.string = "default", .size = 7};
    *err = (struct qt_err){0};
    return opts_parse(o, args, &syntax, argc, (char **)(uintptr_t)argv, err);
}

#define ARGV(...) ((char *const[]){__VA_ARGS__, NULL})

static void test_defaults(void **state)
{
    struct options o;
    const char *args[OPTS_MAX_ARGS];
    struct qt_err err;
    (void)state;
    assert_int_equal(parse(&o, args, ARGV("a", "b"), &err), QT_OK);
    assert_string_equal(args[0], "a");
    assert_string_equal(args[1], "b");
    assert_false(o.flag);
    assert_string_equal(o.string, "default");
    assert_int_equal(o.size, 7);
    assert_int_equal(o.list.count, 0);
}

static void test_every_kind_in_any_order(void **state)
{
    struct options o;
    const char *args[OPTS_MAX_ARGS];
    struct qt_err err;
    (void)state;
    assert_int_equal(parse(&o, args,
                           ARGV("--size=12", "a", "--flag", "--list", "x", "--choice", "none", "b",
                                "--list=y=z", "--string", "--flag"),
                           &err),
                     QT_OK);
    assert_string_equal(args[0], "a");
    assert_string_equal(args[1], "b");
    assert_true(o.flag);
    assert_int_equal(o.size, 12);
    assert_int_equal(o.choice, 2);
    assert_string_equal(o.string, "--flag"); /* a value may look like an option */
    assert_int_equal(o.list.count, 2);
    assert_string_equal(o.list.items[0], "x");
    assert_string_equal(o.list.items[1], "y=z"); /* cut at the first '=' only */
    opts_free(&o, &syntax);
    assert_null(o.list.items);
}

static void test_short_options(void **state)
{
    struct options o;
    const char *args[OPTS_MAX_ARGS];
    struct qt_err err;
    (void)state;
    assert_int_equal(parse(&o, args, ARGV("-f", "-s", "v", "-lx", "a", "b", "-l", "y"), &err),
                     QT_OK);
    assert_true(o.flag);
    assert_string_equal(o.string, "v");
    assert_int_equal(o.list.count, 2);
    assert_string_equal(o.list.items[0], "x");
    opts_free(&o, &syntax);
}

static void test_end_of_options(void **state)
{
    struct options o;
    const char *args[OPTS_MAX_ARGS];
    struct qt_err err;
    (void)state;
    assert_int_equal(parse(&o, args, ARGV("-f", "--", "--flag", "--"), &err), QT_OK);
    assert_string_equal(args[0], "--flag");
    assert_string_equal(args[1], "--");
    assert_int_equal(parse(&o, args, ARGV("-", "b"), &err), QT_OK);
    assert_string_equal(args[0], "-");
    assert_int_equal(parse(&o, args, ARGV("--string=", "a", "b"), &err), QT_OK);
    assert_string_equal(o.string, "");
}

static void test_many_list_items(void **state)
{
    char *argv[203];
    struct options o;
    const char *args[OPTS_MAX_ARGS];
    struct qt_err err;
    (void)state;
    for (int i = 0; i < 200; i++)
        argv[i] = i % 2 ? "item" : "--list";
    argv[200] = "a";
    argv[201] = "b";
    argv[202] = NULL;
    assert_int_equal(parse(&o, args, argv, &err), QT_OK);
    assert_int_equal(o.list.count, 100);
    assert_string_equal(o.list.items[99], "item");
    opts_free(&o, &syntax);
}

static void test_mistakes(void **state)
{
    static const struct {
        char *const argv[6];
        const char *message;
    } cases[] = {
        {{"a"}, "DST is missing (target)"},
        {{"--flag"}, "SRC is missing (source)"},
        {{"a", "b", "c"}, "unexpected argument 'c'"},
        {{"a", "b", "--strin", "x"}, "unknown option '--strin'; did you mean '--string'?"},
        {{"a", "b", "--strin=x"}, "unknown option '--strin'; did you mean '--string'?"},
        {{"a", "b", "--qqqqqqqqqqqq"},
         "unknown option '--qqqqqqqqqqqq'; known: --flag, --string, --size, --choice and --list"},
        {{"a", "b", "-z"},
         "unknown option '-z'; known: --flag, --string, --size, --choice and --list"},
        {{"a", "b", "--flag=yes"}, "--flag takes no value"},
        {{"a", "b", "-fs"}, "--flag takes no value"},
        {{"a", "b", "--flag", "-f"}, "--flag is given more than once"},
        {{"a", "b", "-sx", "--string=y"}, "--string is given more than once"},
        {{"a", "b", "--size"}, "--size needs a value (N)"},
        {{"a", "b", "-s"}, "--string needs a value (S)"},
        {{"a", "b", "--choice=non"}, "unknown value of --choice 'non'; did you mean 'none'?"},
        {{"a", "b", "--size=1"}, "--size: '1' is not a number from 2 to 1000"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct options o;
        const char *args[OPTS_MAX_ARGS];
        struct qt_err err;
        assert_int_equal(parse(&o, args, cases[i].argv, &err), QT_E_USAGE);
        assert_string_equal(err.reason, cases[i].message);
        opts_free(&o, &syntax);
    }
}

static void test_numbers_are_strict(void **state)
{
    static const char *const bad[] = {
        "",
        "-5",
        "+5",
        " 5",
        "5 ",
        "5x",
        "0x10",
        "1e2",
        "5.0",
        "1001",
        "1",
        "18446744073709551616",
        "99999999999999999999999999",
        "\xd9\xa3",
    };
    struct qt_err err;
    size_t v = 42;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(opts_size(&v, "--n", bad[i], 2, 1000, &err), QT_E_USAGE);
    assert_int_equal(v, 42);
    assert_int_equal(opts_size(&v, "--n", "0007", 2, 1000, &err), QT_OK);
    assert_int_equal(v, 7);
    assert_int_equal(opts_size(&v, "--n", "18446744073709551615", 0, SIZE_MAX, &err), QT_OK);
    assert_true(v == SIZE_MAX);
}

static void test_required(void **state)
{
    static const struct opt need[] = {
        {.name = "out",
         .letter = 'o',
         .kind = OPT_STRING,
         .offset = offsetof(struct options, string),
         .required = true,
         .metavar = "OUT",
         .help = "target"},
        {0},
    };
    static const struct opt_positional none[] = {{0}};
    const struct opt_syntax s = {{need, NULL}, none};
    const char *args[OPTS_MAX_ARGS];
    struct options o = {0};
    struct qt_err err;
    (void)state;
    assert_int_equal(opts_parse(&o, args, &s, 0, NULL, &err), QT_E_USAGE);
    assert_string_equal(err.reason, "--out OUT is missing (target)");
    assert_int_equal(opts_parse(&o, args, &s, 1, (char *[]){"-ox"}, &err), QT_OK);
    assert_string_equal(o.string, "x");
}

static void test_out_of_memory(void **state)
{
    struct options o;
    const char *args[OPTS_MAX_ARGS];
    struct qt_err err;
    (void)state;
    qt_mem_fail_after(0);
    int rc = parse(&o, args, ARGV("a", "b", "--list", "x"), &err);
    qt_mem_fail_after(-1);
    assert_int_equal(rc, QT_E_RESOURCE);
    opts_free(&o, &syntax);
}

static void test_list_of_arguments(void **state)
{
    static const struct opt_positional many[] = {{"SRC", "source"}, {"PATH...", "more"}, {0}};
    static const struct opt_syntax list = {{opts, more_opts}, many};
    struct options o = {0};
    const char *args[OPTS_MAX_ARGS];
    char *argv[OPTS_MAX_ARGS + 1];
    struct qt_err err;
    (void)state;
    for (size_t i = 0; i < OPTS_MAX_ARGS; i++)
        argv[i] = (char *)(uintptr_t) "x";
    assert_int_equal(opts_parse(&o, args, &list, 1, argv, &err), QT_E_USAGE);
    assert_string_equal(err.reason, "PATH... is missing (more)");
    assert_int_equal(opts_parse(&o, args, &list, 3, argv, &err), QT_OK);
    assert_string_equal(args[2], "x");
    assert_null(args[3]);
    assert_int_equal(opts_parse(&o, args, &list, OPTS_MAX_ARGS - 1, argv, &err), QT_OK);
    assert_null(args[OPTS_MAX_ARGS - 1]);
    assert_int_equal(opts_parse(&o, args, &list, OPTS_MAX_ARGS, argv, &err), QT_E_USAGE);
    assert_string_equal(err.reason, "unexpected argument 'x'");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),           cmocka_unit_test(test_every_kind_in_any_order),
        cmocka_unit_test(test_short_options),      cmocka_unit_test(test_end_of_options),
        cmocka_unit_test(test_many_list_items),    cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_numbers_are_strict), cmocka_unit_test(test_required),
        cmocka_unit_test(test_out_of_memory),      cmocka_unit_test(test_list_of_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
