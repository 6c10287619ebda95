/* Schemes for a size: the knapsack against brute force, ties, and the rules that name a result. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "verify/budget/budget.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { GROUPS = 6, CHOICES = 4 };

static const char *const choices[CHOICES] = {"nf2", "nf3", "nf4", "fp6"};

/* The least cost of all CHOICES^GROUPS results within the budget. */
static double brute_force(const struct budget *b, const double *cost)
{
    double best = INFINITY;
    for (size_t code = 0; code < 1u << (2 * GROUPS); code++) {
        uint64_t bytes = 0;
        double sum = 0;
        for (size_t g = 0; g < GROUPS; g++) {
            const size_t c = code >> (2 * g) & 3;
            bytes += b->groups[g].bytes[c];
            sum += cost[g * BUDGET_CHOICES + c];
        }
        if (bytes <= b->budget)
            best = fmin(best, sum);
    }
    return best;
}

/* unit: sizes are multiples of it. */
static void check_random(uint64_t seed, uint64_t unit, double tolerance)
{
    struct group groups[GROUPS] = {0};
    const struct qt_budget_options opt = {.choices = choices, .nchoices = CHOICES};
    struct budget b = {.opt = &opt, .groups = groups, .ngroups = GROUPS};
    double cost[GROUPS * BUDGET_CHOICES] = {0}, sum = 0;
    uint64_t least = 0, most = 0, used = 0;
    for (size_t g = 0; g < GROUPS; g++) {
        uint64_t bytes = unit;
        double price = 1e-3 * (double)(qt_splitmix64(&seed) % 100000);
        for (size_t c = 0; c < CHOICES; c++) {
            bytes += unit * (1 + qt_splitmix64(&seed) % 50);
            groups[g].bytes[c] = bytes;
            cost[g * BUDGET_CHOICES + c] = price;
            price *= 1e-3 * (double)(qt_splitmix64(&seed) % 1000);
        }
        least += groups[g].bytes[0];
        most += groups[g].bytes[CHOICES - 1];
    }
    b.budget =
        least + (uint64_t)((double)(most - least) * (double)(qt_splitmix64(&seed) % 100) / 100);
    assert_int_equal(budget_solve(&b, cost, NULL), QT_OK);
    for (size_t g = 0; g < GROUPS; g++) {
        used += groups[g].bytes[groups[g].choice];
        sum += cost[g * BUDGET_CHOICES + groups[g].choice];
    }
    assert_true(used <= b.budget);
    const double best = brute_force(&b, cost);
    if (!(sum <= best * (1 + tolerance) + 1e-12))
        fail_msg("cost %.9g, possible %.9g", sum, best);
}

static void test_knapsack(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        check_random(seed, 4096, 0);
        check_random(seed, 1, 0);
    }
}

/* Sizes without a common divisor: within what rounding to 1/65536 of the budget allows. */
static void test_knapsack_rounded(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++)
        check_random(seed, 1000003, 0.02);
}

static void test_keys(void **state)
{
    static const char *const cases[][2] = {
        {"model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.qkv"},
        {"model.layers.3.self_attn.v_proj.weight", "model.layers.3.self_attn.qkv"},
        {"model.layers.3.self_attn.o_proj.weight", "model.layers.3.self_attn.o_proj.weight"},
        {"model.layers.12.mlp.up_proj.weight", "model.layers.12.mlp.gate_up"},
        {"model.layers.1.mlp.experts.7.down_proj.weight", "model.layers.1.mlp.experts"},
        {"model.layers.1.mlp.experts.8.up_proj.weight", "model.layers.1.mlp.experts"},
        {"q_proj.weight", "q_proj.weight"},
        {"transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *key;
        assert_int_equal(budget_key(&key, cases[i][0], false, NULL), QT_OK);
        assert_string_equal(key, cases[i][1]);
        qt_free(key);
    }
}

static void test_kind_keys(void **state)
{
    static const char *const cases[][2] = {
        {"model.layers.3.self_attn.qkv", "model.layers.*.self_attn.qkv"},
        {"model.layers.12.mlp.experts", "model.layers.*.mlp.experts"},
        {"h.0.mlp.7.weight", "h.*.mlp.7.weight"},
        {"model.embed_tokens.weight", "model.embed_tokens.weight"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *key;
        assert_int_equal(budget_kind_key(&key, cases[i][0], NULL), QT_OK);
        assert_string_equal(key, cases[i][1]);
        qt_free(key);
    }
}

/* Observes the model in which the groups of a kind have a choice, the others the base. */
static void observe(struct budget *b, size_t kind, size_t choice, double kld)
{
    for (size_t g = 0; g < b->ngroups; g++)
        b->groups[g].choice = b->groups[g].kind == kind ? choice : b->base;
    assert_int_equal(budget_observe(b, kld, NULL), QT_OK);
}

static void free_models(struct budget *b)
{
    for (size_t m = 0; m < b->nmodels; m++)
        qt_free(b->models[m].error);
    qt_free(b->models);
}

/* Costs and divergences of models whose kinds cost what their factors say: the factors are found,
 * as far as they are not small. The base is choice 1, choice 3 saves 3/4, and choice 0
 * has 4 times the errors: what it adds has factors of its own. */
static void test_kind_factors(void **state)
{
    static const double alone[4] = {0.5, 0.5, 0.5, 0.01}, wanted[4] = {0.2, 0.5, 0.6, 0.9},
                        rise[4] = {0.7, 0.5, 0.6}; /* without a measurement: near what it costs */
    struct group groups[5] = {0};
    const struct qt_budget_options opt = {.choices = choices, .nchoices = CHOICES};
    struct budget b = {.opt = &opt, .groups = groups, .ngroups = 5, .nkinds = 4, .base = 1};
    struct kind_factor factor[4];
    double whole = 0, slope;
    (void)state;
    for (size_t g = 0; g < 5; g++) {
        groups[g].kind = g < 4 ? g : 3;
        groups[g].kld = g < 4 ? alone[g] : -1e-5; /* a gain by chance does not count */
        memcpy(groups[g].error, (double[]){8, 2, 1, 0.5}, 4 * sizeof(double));
    }
    for (size_t k = 0; k < 4; k++)
        whole += wanted[k] * alone[k];
    b.whole = 1.01 * whole; /* an unlucky rounding of one model */
    observe(&b, SIZE_MAX, 1, b.whole);
    for (size_t k = 0; k < 4; k++)
        observe(&b, k, 3, whole - 0.75 * wanted[k] * alone[k]);
    for (size_t k = 0; k < 3; k += 2)
        observe(&b, k, 0, whole + 3 * rise[k] * alone[k]);
    assert_int_equal(budget_kind_factors(factor, &slope, &b, NULL), QT_OK);
    for (size_t k = 0; k < 3; k++)
        if (fabs(factor[k].cost - wanted[k]) > 0.04 || fabs(factor[k].rise - rise[k]) > 0.05)
            fail_msg("factors %zu: %g, %g", k, factor[k].cost, factor[k].rise);
    assert_true(fabs(slope) < 1e-9); /* all groups have depth 0 */
    const double mean = whole / 1.51;
    assert_true(factor[3].cost > mean - 0.1 && factor[3].cost < mean + 0.1); /* lost in chance */

    /* A model that saves less than was promised: its kind costs less than it seemed to. */
    const double before = factor[1].cost;
    groups[0].choice = groups[2].choice = b.base;
    groups[1].choice = 3;
    assert_int_equal(budget_observe(&b, whole - 0.6 * wanted[1] * alone[1], NULL), QT_OK);
    assert_int_equal(budget_kind_factors(factor, &slope, &b, NULL), QT_OK);
    assert_true(factor[1].cost < before && fabs(factor[0].cost - wanted[0]) < 0.06);
    free_models(&b);
}

/* Two kinds in four layers; groups of the last layer cost more than those of the first. */
static void test_slope(void **state)
{
    static const double cost[2] = {0.5, 0.8}, wanted = 0.3;
    struct group groups[8] = {0};
    const struct qt_budget_options opt = {.choices = choices, .nchoices = CHOICES};
    struct budget b = {.opt = &opt, .groups = groups, .ngroups = 8, .base = 1};
    struct kind_factor factor[2];
    double whole = 0, late = 0, of_kind[2] = {0}, slope;
    char keys[8][40];
    (void)state;
    for (size_t g = 0; g < 8; g++) {
        snprintf(keys[g], sizeof keys[g], "model.layers.%zu.%s", g / 2, g % 2 ? "k" : "v");
        groups[g].key = keys[g];
        groups[g].kld = 0.1;
        memcpy(groups[g].error, (double[]){8, 2, 1, 0.5}, 4 * sizeof(double));
    }
    assert_int_equal(budget_find_kinds(&b, NULL), QT_OK);
    assert_int_equal(b.nkinds, 2);
    for (size_t g = 0; g < 8; g++) {
        const double depth = 2 * (double)(g / 2) / 3 - 1;
        const double adds = cost[g % 2] * 0.1 * (1 + wanted * depth);
        assert_true(fabs(groups[g].depth - depth) < 1e-9);
        whole += adds;
        of_kind[g % 2] += adds;
        late += depth > 0 ? adds : 0;
    }
    b.whole = whole;
    observe(&b, SIZE_MAX, 1, whole);
    observe(&b, 0, 3, whole - 0.75 * of_kind[0]);
    observe(&b, 1, 3, whole - 0.75 * of_kind[1]);
    for (size_t g = 0; g < 8; g++)
        groups[g].choice = groups[g].depth > 0 ? 3 : 1;
    assert_int_equal(budget_observe(&b, whole - 0.75 * late, NULL), QT_OK);
    assert_int_equal(budget_kind_factors(factor, &slope, &b, NULL), QT_OK);
    if (fabs(slope - wanted) > 0.06 || fabs(factor[0].cost - cost[0]) > 0.05 ||
        fabs(factor[1].cost - cost[1]) > 0.05)
        fail_msg("slope %g, factors %g, %g", slope, factor[0].cost, factor[1].cost);
    for (size_t k = 0; k < b.nkinds; k++)
        qt_free(b.kinds[k].key);
    qt_free(b.kinds);
    free_models(&b);
}

static void test_rules(void **state)
{
    static const struct {
        const char *name;
        size_t group;
    } tensors[] = {
        {"m.layers.0.a+b=c.weight", 0},
        {"m.layers.1.a+b=c.weight", 1},
        {"m.layers.10.a+b=c.weight", 0},
        {"m.layers.0.experts.0.down_proj.weight", 0},
        {"m.layers.0.experts.1.down_proj.weight", 0},
        {"m.layers.2.x.weight", 2},
        {"m.layers.9.a+b=c.weight", 0},
    };
    enum { N = sizeof tensors / sizeof *tensors };
    struct qt_tensor t[N] = {0};
    struct qt_plan_item items[N] = {0};
    struct group groups[3] = {{.choice = 1}, {.choice = 2}, {.choice = 2}};
    size_t group_of[N];
    const struct qt_budget_options opt = {.choices = choices, .nchoices = CHOICES};
    struct budget b = {.opt = &opt, .groups = groups, .ngroups = 3, .group_of = group_of};
    struct qt_budget out = {0};
    (void)state;
    for (size_t i = 0; i < N; i++) {
        t[i].name = tensors[i].name;
        t[i].count = tensors[i].group == 2 ? 1000 : 10; /* nf4 has most weights */
        items[i].tensor = &t[i];
        group_of[i] = tensors[i].group;
    }
    b.plan[0].items = items;
    b.plan[0].count = N;
    assert_int_equal(budget_rules(&out, &b, NULL), QT_OK);
    assert_string_equal(out.scheme, "nf4");
    assert_int_equal(out.nrules, 2);
    assert_string_equal(out.rules[0].regex, "^m\\.layers\\.(0|9|10)\\.a\\+b\\x3dc\\.weight$");
    assert_string_equal(out.rules[0].spec, "nf3");
    assert_string_equal(out.rules[1].regex,
                        "^m\\.layers\\.0\\.experts\\.[0-9]+\\.down_proj\\.weight$");
    qt_budget_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_knapsack),     cmocka_unit_test(test_knapsack_rounded),
        cmocka_unit_test(test_keys),         cmocka_unit_test(test_kind_keys),
        cmocka_unit_test(test_kind_factors), cmocka_unit_test(test_slope),
        cmocka_unit_test(test_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
