/* The parts of choosing schemes for a size (private to verify/budget/). */
#ifndef QT_VERIFY_BUDGET_BUDGET_H
#define QT_VERIFY_BUDGET_BUDGET_H

#include "verify/verify.h"

enum { BUDGET_CHOICES = 16 };

/* Tensors that get one scheme. */
struct group {
    char *key; /* "model.layers.0.self_attn.qkv": names the group in the state file */
    uint64_t bytes[BUDGET_CHOICES];
    double error[BUDGET_CHOICES];
    double kld;    /* what quantizing it adds; NaN: not measured */
    size_t choice; /* the result */
};

struct budget {
    const struct qt_ckpt *ckpt;
    const struct qt_budget_options *opt;
    struct qt_plan plan[BUDGET_CHOICES]; /* every choice for all tensors */
    size_t *group_of;                    /* [plan items]; SIZE_MAX: takes no part */
    struct group *groups;
    size_t ngroups, capacity;
    uint64_t fixed;  /* bytes of tensors that take no part, quantized or not */
    uint64_t budget; /* bytes of the groups together */
    size_t uniform;  /* the largest choice that fits for all groups; the smallest, if none does */
    size_t base;     /* the choice that is measured: `uniform`, or that of the state file */
    struct qt_packed *rounded; /* [plan items] what is measured; NULL without data */
    double whole, whole_se;    /* divergence of the model that is quantized with `base` */
};

/* The group of a tensor, by its name; freed with qt_free (ties.c). untied: linears that share an
 * input are groups of their own. */
int budget_key(char **out, const char *name, bool untied, struct qt_err *err);
/* A regular expression for tensors that differ in the number of their decoder layer only: fills
 * out->rules (ties.c). */
int budget_rules(struct qt_budget *out, const struct budget *b, struct qt_err *err);
/* Sets group.choice: least sum of cost[group * BUDGET_CHOICES + choice] within the budget
 * (knapsack.c). */
int budget_solve(struct budget *b, const double *cost, struct qt_err *err);
/* Sets group.error, and rounds all groups with the choice `base` (errors.c). */
int budget_errors(struct budget *b, struct qt_err *err);
/* Rounds all groups with group.choice, as quantize does (errors.c). */
int budget_round_chosen(struct budget *b, struct qt_err *err);
/* The source's weights, with those of one group, or of all (SIZE_MAX), rounded. */
struct budget_changed {
    struct qt_weights source;
    const struct budget *budget;
    size_t group;
};
/* *out must outlive the result (measure.c). */
struct qt_weights budget_changed_weights(struct budget_changed *out, const struct budget *b,
                                         size_t group);
/* Sets group.kld of as many linears of decoder layers as fit into memory at a time, of those that
 * are not measured; *measured: their number (divergence.c). */
int budget_measure_pass(size_t *measured, struct budget *b, struct qt_err *err);
/* Sets `base` to the scheme of the measurements in the state file, if there is one (measure.c). */
int budget_load_base(struct budget *b, struct qt_err *err);
/* Sets `whole` and group.kld of all groups, from the state file or by measuring (measure.c). */
int budget_measure(struct budget *b, struct qt_err *err);
/* Measures the divergence of the rounded model, with all groups (measure.c). */
int budget_measure_all(double *kld, double *se, const struct budget *b, struct qt_err *err);

#endif
