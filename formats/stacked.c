/*
 * Stacked experts: names, and where the matrix of an expert lies in the stack. Shapes decide
 * between the two orders of the dimensions, because the widths of gate and up together are twice
 * that of down:
 *
 *     gate_up_proj [E][2 I][H]  down_proj [E][H][I]     most families, written by transformers 5
 *     gate_up_proj [E][H][2 I]  down_proj [E][I][H]     llama4, gpt_oss, early qwen3_vl_moe
 *
 * gpt_oss interleaves the rows of gate and up.
 */
#include "formats/views.h"

#include <stdio.h>
#include <stdlib.h>

/* Names that a family uses for the experts of a stack, and for tensors beside them. */
static const struct names {
    const char *type, *gate, *up, *down;
    const char *from, *to; /* transformers 5 renames tensors: text to replace in their names */
} families[] = {
    {"mixtral", "w1", "w3", "w2", ".mlp.", ".block_sparse_moe."},
    {"minimax", "w1", "w3", "w2", ".mlp.", ".block_sparse_moe."},
    {"minimax_m2", "w1", "w3", "w2", ".mlp.", ".block_sparse_moe."},
    {"phimoe", "w1", "w3", "w2", ".mlp.", ".block_sparse_moe."},
    {"phimoe", NULL, NULL, NULL, ".mlp.router.", ".block_sparse_moe.gate."},
    {"exaone_moe", NULL, NULL, NULL, ".mlp.gate.e_score", ".mlp.e_score"},
    {"granitemoe", "gate_proj", "up_proj", "down_proj", ".mlp.", ".block_sparse_moe."},
    {"lfm2_moe", "w1", "w3", "w2", NULL, NULL},
    {"ernie4_5_moe", NULL, NULL, NULL, ".mlp.gate.moe_statics.", ".mlp.moe_statics."},
};
static const struct names usual = {NULL, "gate_proj", "up_proj", "down_proj", NULL, NULL};

/* The end of its name tells which matrices a tensor of a stack holds. */
enum role { GATE_UP, GATE, UP, DOWN };
static const struct kind {
    const char *end; /* in front of ".weight", if the name ends so */
    enum role role;
    const char *other; /* what replaces `end` in the name of the down (or gate and up) projection */
    const char *between; /* precedes the number of the expert */
    size_t kept;         /* bytes of `end` that stay in front of it */
    const char *name;    /* of the matrices; NULL: the family's */
} kinds[] = {
    {".experts.gate_up_proj", GATE_UP, ".experts.down_proj", "", 9, NULL},
    {".experts.down_proj", DOWN, ".experts.gate_up_proj", "", 9, NULL},
    {".experts.gate_proj", GATE, ".experts.down_proj", "", 9, NULL},
    {".experts.up_proj", UP, ".experts.down_proj", "", 9, NULL},
    {"moe.input_linear", GATE_UP, "moe.output_linear", "experts.", 4, NULL},
    {"moe.output_linear", DOWN, "moe.input_linear", "experts.", 4, NULL},
    {"mlp.input_linear", GATE_UP, "mlp.output_linear", "experts.", 4, NULL},
    {"mlp.output_linear", DOWN, "mlp.input_linear", "experts.", 4, NULL},
    {"attention.experts.input_linear", UP, "attention.experts.output_linear", "", 18, "q_proj"},
    {"attention.experts.output_linear", DOWN, "attention.experts.input_linear", "", 18, "o_proj"},
};

static bool is_type(const struct qt_source *source, const char *type)
{
    return source->model_type && strcmp(source->model_type, type) == 0;
}

/* Length of the name without ".weight" or the ending of a bias. */
static size_t stem_size(const char *name, bool *bias)
{
    *bias = qt_name_ends_in(name, "_bias");
    const char *ending = *bias ? "_bias" : qt_name_ends_in(name, ".weight") ? ".weight" : "";
    return strlen(name) - strlen(ending);
}

static const struct kind *find_kind(const struct qt_tensor *t, size_t *stem, bool *bias)
{
    *stem = stem_size(t->name, bias);
    if (t->ndim != (*bias ? 2 : 3) || t->count == 0)
        return NULL;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const size_t size = strlen(kinds[i].end);
        if (*stem > size && memcmp(t->name + *stem - size, kinds[i].end, size) == 0)
            return &kinds[i];
    }
    return NULL;
}

/* The row of `families` that renames t, or NULL. */
static const struct names *find_renaming(const struct qt_source *source, const char *name)
{
    const struct names *found = NULL; /* the longest text */
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (is_type(source, families[i].type) && families[i].from &&
            strstr(name, families[i].from) &&
            (!found || strlen(families[i].from) > strlen(found->from)))
            found = &families[i];
    return found;
}

/* The Conv1D modules of GPT-2 store these. */
bool qt_stored_transposed(const char *model_type, const char *name)
{
    static const char *const ends[] = {".c_attn.weight", ".q_attn.weight", ".c_proj.weight",
                                       ".c_fc.weight"};
    bool found = false;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        found = found || qt_name_ends_in(name, ends[i]);
    return found && model_type &&
           (strcmp(model_type, "gpt2") == 0 || strcmp(model_type, "openai-gpt") == 0);
}

static bool is_transposed(const struct qt_source *source, const struct qt_tensor *t)
{
    return t->ndim == 2 && qt_stored_transposed(source->model_type, t->name);
}

bool qt_stack_is_candidate(const struct qt_source *source, const struct qt_tensor *t)
{
    size_t stem;
    bool bias;
    return find_kind(t, &stem, &bias) || is_transposed(source, t) || find_renaming(source, t->name);
}

/* The shape of the other projection, or NULL. */
static const size_t *other_shape(const struct qt_bases *bases, const char *name, size_t stem,
                                 const struct kind *kind)
{
    static const char *const endings[] = {"", ".weight"};
    char other[64];
    const size_t cut = stem - strlen(kind->end);
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        strcpy(other, kind->other);
        strcat(other, endings[i]);
        const struct qt_encoded *found = qt_bases_find(bases, name, cut, other);
        if (!found && kind->role == DOWN && strstr(kind->other, "gate_up_proj")) {
            strcpy(other, ".experts.up_proj");
            strcat(other, endings[i]);
            found = qt_bases_find(bases, name, cut, other);
        }
        if (found && found->info.ndim == 3)
            return found->info.shape;
    }
    return NULL;
}

/* Finds the order of the dimensions; false: the shapes are those of neither. `sets` projections
 * are in `up`. */
static bool find_order(bool *transposed, const size_t *up, const size_t *down, size_t sets,
                       size_t hidden)
{
    const bool usual_order = up[2] == down[1] && up[1] / sets == down[2] && up[1] % sets == 0;
    const bool other_order = up[1] == down[2] && up[2] / sets == down[1] && up[2] % sets == 0;
    *transposed = usual_order && other_order ? up[2] != hidden && up[1] == hidden : other_order;
    return up[0] == down[0] && (usual_order || other_order);
}

static size_t hidden_size(const struct qt_source *source)
{
    const json_t *text = json_object_get(source->config, "text_config");
    const json_t *places[] = {text, source->config};
    json_int_t n = 0;
    for (size_t i = 0; i < 2 && n <= 0; i++)
        n = json_integer_value(json_object_get(places[i], "hidden_size"));
    return n > 0 ? (size_t)n : 0;
}

static void split_stack(struct qt_pieces *out, const struct qt_source *source,
                        const struct qt_bases *bases, const struct qt_tensor *t,
                        const struct kind *kind, size_t stem, bool bias)
{
    const struct names *names = &usual;
    const size_t *matrix = t->shape, *other = other_shape(bases, t->name, stem, kind);
    bool transposed = false;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (is_type(source, families[i].type) && families[i].gate)
            names = &families[i];
    if (bias) { /* beside the matrix of the same name */
        const struct qt_encoded *weight = qt_bases_find(bases, t->name, stem, "");
        if (!weight || weight->info.ndim != 3 || weight->info.shape[0] != t->shape[0])
            return;
        matrix = weight->info.shape;
    }
    const size_t sets = kind->role == GATE_UP ? 2 : 1;
    /* Gate and up, of which `other` may hold both. */
    const size_t down_sets =
        other && (other[1] == 2 * matrix[2] || other[2] == 2 * matrix[1]) ? 2 : 1;
    if (!other || (kind->role == DOWN
                       ? !find_order(&transposed, other, matrix, down_sets, hidden_size(source))
                       : !find_order(&transposed, matrix, other, sets, hidden_size(source))))
        return;
    const size_t rows = matrix[transposed ? 2 : 1], cols = matrix[transposed ? 1 : 2];
    if (bias && t->shape[1] != rows)
        return;
    out->experts = t->shape[0];
    out->count = sets;
    out->name[0] = kind->name           ? kind->name
                   : kind->role == DOWN ? names->down
                   : kind->role == UP   ? names->up
                                        : names->gate;
    out->name[1] = names->up;
    out->ending = bias ? ".bias" : ".weight";
    out->prefix = stem - strlen(kind->end) + kind->kept;
    out->between = kind->between;
    out->n = rows / sets;
    out->k = bias ? 0 : cols;
    out->transposed = transposed && !bias;
    out->interleaved = sets == 2 && is_type(source, "gpt_oss");
}

void qt_stack_split(struct qt_pieces *out, const struct qt_source *source,
                    const struct qt_bases *bases, const struct qt_encoded *base)
{
    const struct qt_tensor *t = &base->info;
    const struct names *renaming = find_renaming(source, t->name);
    size_t stem;
    bool bias;
    const struct kind *kind = find_kind(t, &stem, &bias);
    *out = (struct qt_pieces){.transposed = !base->encoding && is_transposed(source, t)};
    if (kind)
        split_stack(out, source, bases, t, kind, stem, bias);
    if (renaming) {
        out->from = renaming->from;
        out->to = renaming->to;
    }
}

/* ---- the way back --------------------------------------------------------------------------- */

/* Forms of stacks, by model_type. The names of matrices and stacks begin alike. */
static const struct form {
    const char *type;
    const char *experts; /* stands in front of the number of the expert */
    size_t kept;         /* bytes of it that the name of the stack has, too */
    bool linears;        /* see stack_names */
    bool transposed, interleaved;
} forms[] = {
    {"gemma4", ".experts.", 9, false, false, false},
    {"gemma4_text", ".experts.", 9, false, false, false},
    {"granitemoe_swa", ".experts.", 9, false, false, false},
    {"mistral3", ".experts.", 9, false, false, false},
    {"llama4", ".experts.", 9, false, true, false},
    {"llama4_text", ".experts.", 9, false, true, false},
    {"gpt_oss", ".experts.", 9, false, true, true},
    {"granitemoe", ".experts.", 1, true, false, false},
    {"granitemoeshared", ".experts.", 1, true, false, false},
    {"granitemoehybrid", ".experts.", 1, true, false, false},
    {"jetmoe", "attention.experts.", 18, true, false, false},
    {"jetmoe", ".experts.", 1, true, false, false},
};

/* Without linears, and with: that of gate and up, or of queries; that of down, or of outputs. */
static const char *const stack_names[2][2] = {{"gate_up_proj", "down_proj"},
                                              {"input_linear.weight", "output_linear.weight"}};

/* The matrices of an expert: which stack has them, and where. */
static const struct matrix {
    const char *name;
    size_t stack, part, parts;
} matrices[] = {
    {"gate_proj", 0, 0, 2}, {"up_proj", 0, 1, 2}, {"down_proj", 1, 0, 1},
    {"q_proj", 0, 0, 1},    {"o_proj", 1, 0, 1},
};

bool qt_stored_in_stack(struct qt_stack *out, const char *model_type, const char *name)
{
    const struct form *form = NULL;
    const char *at = NULL;
    char *end;
    for (size_t i = 0; model_type && !at && i < sizeof forms / sizeof *forms; i++) {
        form = &forms[i];
        at = strcmp(form->type, model_type) == 0 ? strstr(name, form->experts) : NULL;
    }
    if (!at || at[strlen(form->experts)] < '0' || at[strlen(form->experts)] > '9')
        return false;
    *out = (struct qt_stack){.expert = strtoul(at + strlen(form->experts), &end, 10),
                             .transposed = form->transposed,
                             .interleaved = form->interleaved};
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
        const struct matrix *m = &matrices[i];
        const size_t size = strlen(m->name);
        if (*end != '.' || strncmp(end + 1, m->name, size) != 0)
            continue;
        const bool bias = !form->linears && strcmp(end + 1 + size, ".bias") == 0;
        if (!bias && strcmp(end + 1 + size, ".weight") != 0)
            return false;
        out->part = m->part;
        out->parts = m->parts;
        return snprintf(out->name, sizeof out->name, "%.*s%s%s", (int)(at - name) + (int)form->kept,
                        name, stack_names[form->linears][m->stack],
                        bias ? "_bias" : "") < (int)sizeof out->name;
    }
    return false;
}
