/* The parts of choosing schemes for a size (private to verify/budget/). */
#ifndef QT_VERIFY_BUDGET_BUDGET_H
#define QT_VERIFY_BUDGET_BUDGET_H

#include "verify/verify.h"

enum { BUDGET_CHOICES = 16 };

/* Tensors that get one scheme. */
struct group {
    char *key; /* "model.layers.0.self_attn.qkv": names the group in the state file */
    uint64_t bytes[BUDGET_CHOICES];
    double error[BUDGET_CHOICES]; /* with data relative to that of the base; NaN: unknown */
    double kld;                   /* what quantizing it adds, alone; NaN: not measured */
    size_t kind;                  /* index */
    double depth;                 /* of its decoder layer: -1 is the first, 1 the last */
    size_t choice;                /* the result */
};

/* Divergence of the model that quantize makes with `base`, one kind of groups with `choice`. */
struct probe {
    size_t choice;
    double kld; /* NaN: unknown */
};

/* The groups whose keys differ in the number of the decoder layer only. */
struct kind {
    char *key;           /* "model.layers.*.self_attn.qkv" */
    struct probe better; /* with the next larger choice */
    struct probe worse;  /* with one that has more error than the base; known if groups have such */
};

/* Divergence of a group in the model that quantize makes, per divergence of the group alone. */
struct kind_factor {
    double cost; /* with the base, and for what a choice with less error saves */
    double rise; /* for what a choice with more error adds */
};

/* A model that quantize makes. */
struct model {
    double kld;
    struct kind_factor *error; /* [kinds]: `kld` is the sum of its products with factors */
    struct kind_factor *deep;  /* [kinds]: the same with errors times depths */
};

struct budget {
    const struct qt_ckpt *ckpt;
    const struct qt_budget_options *opt;
    struct qt_plan plan[BUDGET_CHOICES]; /* every choice for all tensors */
    size_t *group_of;                    /* [plan items]; SIZE_MAX: takes no part */
    struct group *groups;
    size_t ngroups, capacity;
    struct kind *kinds;
    size_t nkinds, kinds_capacity;
    struct probe late; /* the second half of the decoder layers with more bits */
    uint64_t fixed;    /* bytes of tensors that take no part, quantized or not */
    uint64_t budget;   /* bytes of the groups together */
    size_t uniform;    /* the largest choice that fits for all groups; the smallest, if none does */
    size_t base;       /* the choice that is measured: `uniform`, or that of the state file */
    struct qt_packed *rounded; /* [plan items] what is measured; NULL without data */
    json_t *state;             /* content of the state file; NULL without data */
    double whole, whole_se;    /* divergence of the model that quantize makes with `base` */
    struct model *models;      /* what factors of kinds are estimated from */
    size_t nmodels, models_capacity;
};

/* The group of a tensor, by its name; freed with qt_free (ties.c). untied: linears that share an
 * input are groups of their own. */
int budget_key(char **out, const char *name, bool untied, struct qt_err *err);
/* The key of the kind of a group; freed with qt_free (ties.c). */
int budget_kind_key(char **out, const char *key, struct qt_err *err);
/* A regular expression for tensors that differ in the number of their decoder layer only: fills
 * out->rules (ties.c). */
int budget_rules(struct qt_budget *out, const struct budget *b, struct qt_err *err);
/* Sets group.choice: least sum of cost[group * BUDGET_CHOICES + choice] within the budget
 * (knapsack.c). */
int budget_solve(struct budget *b, const double *cost, struct qt_err *err);
/* Sets group.error, and rounds all groups with the choice `base`, unless nothing is left to measure
 * (errors.c). */
int budget_errors(struct budget *b, struct qt_err *err);
/* Rounds all groups with group.choice, as quantize does (errors.c). log: may be NULL. */
int budget_round_chosen(struct budget *b, const struct qt_log *log, struct qt_err *err);
/* The source's weights, with those of one group, or of all (SIZE_MAX), rounded. */
struct budget_changed {
    struct qt_replaced weights;
    const struct budget *budget;
    size_t group;
};
/* *out must outlive the result (measure.c). */
struct qt_weights budget_changed_weights(struct budget_changed *out, const struct budget *b,
                                         size_t group);
/* Sets group.kld of as many linears of decoder layers as fit into memory at a time, of those that
 * are not measured; *measured: their number (divergence.c). */
int budget_measure_pass(size_t *measured, struct budget *b, struct qt_err *err);
/* Reads the state file, if there is one: `base` becomes the scheme of its measurements. Sets
 * `whole`, group.kld and group.error (state.c). */
int budget_load(struct budget *b, struct qt_err *err);
/* Sets probe->kld of a kind, or of `late`, by its key from the state file; NAN: it is not there
 * (state.c). */
void budget_load_probe(struct probe *probe, const struct budget *b, const char *key);
#define BUDGET_LATE_KEY "second half"
/* Writes the state file, if there is to be one (state.c). */
int budget_save(const struct budget *b, struct qt_err *err);
/* Sets group.kld of the groups for which it is unknown (measure.c). */
int budget_measure(struct budget *b, struct qt_err *err);
/* Measures the model that quantize makes with group.choice (measure.c). log: may be NULL. */
int budget_measure_choice(double *kld, double *se, struct budget *b, const struct qt_log *log,
                          struct qt_err *err);
/* Finds the kinds and sets group.kind (kinds.c). */
int budget_find_kinds(struct budget *b, struct qt_err *err);
/* Sets `whole` and kind.better of all kinds (kinds.c). */
int budget_measure_kinds(struct budget *b, struct qt_err *err);
/* Sets kind.worse of the kinds that need it for group.choice and lack it; *measured: their number
 * (kinds.c). */
int budget_measure_worse(size_t *measured, struct budget *b, struct qt_err *err);
/* Adds the model with group.choice to `models` (factors.c). */
int budget_observe(struct budget *b, double kld, struct qt_err *err);
/* factor[kinds], for groups of depth 0. A group of another depth costs 1 + *slope * depth times as
 * much (factors.c). */
int budget_kind_factors(struct kind_factor *factor, double *slope, const struct budget *b,
                        struct qt_err *err);

#endif
