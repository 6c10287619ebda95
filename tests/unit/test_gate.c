/* --gate expressions: relations, syntax, unknown names, messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "verify/verify.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct qt_figure figures[] = {
    {"ppl", 12.5}, {"kld_mean", 0.01}, {"bpw", 4.25}, {"sqnr", INFINITY}, {"broken", NAN},
};
/* sqnr and bpw of five tensors */
static const char *const names[] = {"l.0.up", "l.0.down", "l.1.up", "l.1.down", "head[x]"};
static const struct qt_figure each[] = {
    {"sqnr", 20}, {"bpw", 4},  {"sqnr", 10}, {"bpw", 6},    {"sqnr", 21},
    {"bpw", 4},   {"sqnr", 9}, {"bpw", 6},   {"sqnr", NAN}, {"bpw", 16},
};
static const struct qt_tensor_figures tensors = {names, 5, each, 2};
enum { FIGURES = sizeof figures / sizeof *figures };

static int check(const char *expr, struct qt_err *err)
{
    *err = (struct qt_err){0};
    return qt_gate_check(expr, figures, FIGURES, &tensors, err);
}

static void test_holds(void **state)
{
    static const char *const good[] = {
        "ppl<=12.5",
        "ppl>=12.5",
        "ppl<12.6",
        "ppl>12.4",
        " ppl <= 1.3e1 , bpw < 5",
        "kld_mean<0.02,bpw<5",
        "sqnr>=1000",
        "bpw<=.425E+1,bpw>-1",
    };
    struct qt_err err;
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_int_equal(check(good[i], &err), QT_OK);
}

static void test_fails(void **state)
{
    static const char *const bad[] = {
        "ppl<12.5",
        "ppl>12.5",
        "ppl<=12.4",
        "ppl>=12.6",
        "bpw<5,ppl<12",
        "ppl<12,bpw<5",
        "sqnr<=1000",
        /* NaN satisfies no condition */
        "broken<=1",
        "broken>=1",
        "broken<1",
        "broken>1",
    };
    struct qt_err err;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(check(bad[i], &err), QT_E_GATE);
}

static void test_failure_names_every_condition(void **state)
{
    struct qt_err err;
    (void)state;
    assert_int_equal(check("ppl<12,bpw<5,kld_mean<=0.005", &err), QT_E_GATE);
    assert_string_equal(err.reason, "gate failed: ppl is 12.5, required < 12; "
                                    "kld_mean is 0.01, required <= 0.005");
}

/* A message with too many failures has whole conditions only, and the number of the others. */
static void test_many_failures(void **state)
{
    char expr[2000] = "ppl<0";
    struct qt_err err;
    (void)state;
    for (size_t i = 1; i < 60; i++)
        strcat(expr, ",ppl<1");
    strcat(expr, ",bpw[.]<0"); /* names three tensors and counts two */
    assert_int_equal(check(expr, &err), QT_E_GATE);
    size_t named = 0, more = 0;
    const char *at = err.reason;
    while ((at = strstr(at, "ppl is 12.5, required < ")) != NULL)
        at++, named++;
    at = strstr(err.reason, "required < 1; and ");
    assert_non_null(at);
    assert_int_equal(sscanf(at, "required < 1; and %zu more", &more), 1);
    assert_string_equal(strchr(at + strlen("required < 1; and "), ' '), " more");
    assert_int_equal(named + more, 65);
    assert_true(named > 20);
}

static void test_syntax(void **state)
{
    static const char *const bad[] = {
        "",          " ",
        "ppl",       "ppl=",
        "ppl==12",   "ppl<=",
        "ppl<=x",    "<=3",
        "ppl<=3,",   "ppl<=3,,",
        ",ppl<=3",   "ppl<=3 bpw<=4",
        "ppl<=3x",   "ppl<=nan",
        "ppl<=inf",  "ppl<=1e999",
        "ppl!=3",    "ppl<=3,bpw",
        "p pl<=3",   "ppl<=3;bpw<4",
        "ppl<=0x10", "bpw<=0x1.1p+2",
    };
    struct qt_err err;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(check(bad[i], &err), QT_E_USAGE);
        assert_non_null(strstr(err.reason, "gate"));
    }
}

/* A syntax error takes precedence over a failed condition before it. */
static void test_unknown_name(void **state)
{
    struct qt_err err;
    (void)state;
    assert_int_equal(check("ppl<1,kld<=3", &err), QT_E_USAGE);
    assert_non_null(strstr(err.reason, "unknown figure 'kld'"));
    assert_non_null(strstr(err.reason, "ppl, kld_mean, bpw"));
    assert_int_equal(check("ppl<1,bpw=3", &err), QT_E_USAGE);
}

static void test_long_name(void **state)
{
    char expr[300];
    struct qt_err err;
    (void)state;
    memset(expr, 'a', sizeof expr);
    strcpy(expr + sizeof expr - 5, "<=3");
    assert_int_equal(check(expr, &err), QT_E_USAGE);
}

static void test_names(void **state)
{
    (void)state;
    assert_true(qt_gate_names("ppl<=3", "ppl"));
    assert_true(qt_gate_names("bpw<5 , bpw[ppl]<5, ppl > 0", "ppl"));
    assert_false(qt_gate_names("bpw[ppl,ppl<=3]<5", "ppl"));
    assert_false(qt_gate_names("ppl[up]<5", "ppl"));
    assert_false(qt_gate_names("ppl_ratio<5,kppl<=1", "ppl"));
}

static void test_tensors(void **state)
{
    struct qt_err err;
    (void)state;
    assert_int_equal(check("sqnr[up$]>=20,bpw[.]<=16,ppl<13", &err), QT_OK);
    assert_int_equal(check("bpw[^l[.][01]]<=6 , bpw[head\\[x\\]] >= 16", &err), QT_OK);
    assert_int_equal(check("bpw[d\\[x] >= 16,bpw[x\\]$]>=16", &err), QT_OK);
    assert_int_equal(check("sqnr[down]>=10", &err), QT_E_GATE);
    assert_string_equal(err.reason, "gate failed: sqnr of l.1.down is 9, required >= 10");
    assert_int_equal(check("bpw[.]<1,ppl<1", &err), QT_E_GATE);
    assert_string_equal(err.reason,
                        "gate failed: bpw of l.0.up is 4, required < 1; bpw of l.0.down is 6, "
                        "required < 1; bpw of l.1.up is 4, required < 1; and 2 more tensors; "
                        "ppl is 12.5, required < 1");
    assert_int_equal(check("sqnr[head]>0", &err), QT_E_GATE);
    static const struct {
        const char *expr, *reason;
    } bad[] = {
        {"sqnr[lm_head]>=1", "gate: 'lm_head' matches no quantized tensor"},
        {"kld_mean[up]<=1", "unknown tensor figure 'kld_mean'; known figures: sqnr, bpw"},
        {"sqnr[up>=1", "expected [REGEX] at '[up>=1'"},
        {"sqnr[]>=1", "expected [REGEX]"},
        {"sqnr[(]>=1", "gate: '(': missing closing parenthesis"},
        {"sqnr[up]", "expected <=, >=, < or >"},
        {"[up]>=1", "expected the name of a figure"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(check(bad[i].expr, &err), QT_E_USAGE);
        if (!strstr(err.reason, bad[i].reason))
            fail_msg("%s: %s", bad[i].expr, err.reason);
    }
    assert_int_equal(qt_gate_check("sqnr[up]>1", figures, FIGURES, NULL, &err), QT_E_USAGE);
}

/* The message has the whole name of the tensor. */
static void test_long_tensor(void **state)
{
    char name[QT_TENSOR_NAME_MAX + 1] = "";
    const char *const all[] = {name};
    const struct qt_tensor_figures one = {all, 1, each, 2};
    struct qt_err err;
    (void)state;
    memset(name, 'x', QT_TENSOR_NAME_MAX);
    assert_int_equal(qt_gate_check("sqnr[.]>=30", figures, FIGURES, &one, &err), QT_E_GATE);
    assert_non_null(strstr(err.reason, name));
    assert_non_null(strstr(err.reason, "x is 20, required >= 30"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_holds),
        cmocka_unit_test(test_fails),
        cmocka_unit_test(test_failure_names_every_condition),
        cmocka_unit_test(test_many_failures),
        cmocka_unit_test(test_syntax),
        cmocka_unit_test(test_unknown_name),
        cmocka_unit_test(test_long_name),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_long_tensor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
