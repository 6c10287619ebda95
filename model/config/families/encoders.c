/* Encoders. */
#include "model/config/families/families.h"

static int check_encoder(const struct config *cfg, const struct source *src, struct qt_err *err)
{
    int rc;
    QT_TRY(config_refuse_flag(src, "is_decoder", true, err));
    QT_TRY(config_refuse_flag(src, "add_cross_attention", true, err));
    if (!cfg->tied)
        QT_TRY(config_unsupported(src, "tie_word_embeddings", "false", err));
done:
    return rc;
}

/* RoBERTa counts positions from pad_token_id + 1 on, and its table has these rows, too; its head
 * has GELU whatever hidden_act is. */
static int read_bert(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const size_t offset = cfg->arch->position_offset;
    size_t pad = offset ? offset - 1 : 0;
    int rc;
    QT_TRY(check_encoder(cfg, src, err));
    QT_TRY(config_expect_string(src, "position_embedding_type", "absolute", err));
    cfg->types = 2;
    QT_TRY(config_read_size(&cfg->types, src, "type_vocab_size", CONFIG_WIDTH, err));
    QT_TRY(qt_json_get_size(&pad, src->json, "pad_token_id", src->path, err));
    if (offset && pad != offset - 1)
        QT_TRY(config_unsupported(src, "pad_token_id", "a number other than 1", err));
    if (cfg->info.max_positions <= offset)
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'max_position_embeddings' is %zu, at least %zu is required",
                       cfg->info.max_positions, offset + 1);
    cfg->info.max_positions -= offset;
    cfg->norm_after = cfg->transform_bias = true;
    cfg->final_norm = false;
    cfg->transform_act = offset ? QT_ACT_GELU : cfg->act;
done:
    return rc;
}

/* Encoders whose norms follow the residual adds. */
#define BERT_LIKE                                                                                  \
    .layers = "encoder.layer.", .embed = "embeddings.word_embeddings",                             \
    .positions = "embeddings.position_embeddings", .types = "embeddings.token_type_embeddings",    \
    .embed_norm = "embeddings.LayerNorm", .both_ways = true, .norm = QT_NORM_LAYER,                \
    .parts = {[ROLE_ATTN_IN] = "attention.output.LayerNorm",                                       \
              [ROLE_Q] = "attention.self.query",                                                   \
              [ROLE_K] = "attention.self.key",                                                     \
              [ROLE_V] = "attention.self.value",                                                   \
              [ROLE_O] = "attention.output.dense",                                                 \
              [ROLE_MLP_IN] = "output.LayerNorm",                                                  \
              [ROLE_UP] = "intermediate.dense",                                                    \
              [ROLE_DOWN] = "output.dense"},                                                       \
    .qkv_bias = {NULL, true}, .o_bias = {NULL, true}, .mlp_bias = {NULL, true},                    \
    .act_key = "hidden_act", .act = "gelu", .eps_key = "layer_norm_eps", .eps = 1e-12,             \
    .tied = {"tie_word_embeddings", true}, .read = read_bert

const struct arch arch_bert = {
    .family = "bert",
    BERT_LIKE,
    .transform = "cls.predictions.transform.dense",
    .transform_norm = "cls.predictions.transform.LayerNorm",
    .head_biases = "cls.predictions",
};

#define ROBERTA_LIKE                                                                               \
    BERT_LIKE, .position_offset = 2, .transform = "lm_head.dense",                                 \
               .transform_norm = "lm_head.layer_norm", .head_biases = "lm_head"

const struct arch arch_roberta = {
    .family = "roberta",
    ROBERTA_LIKE,
};

const struct arch arch_xlm_roberta = {
    .family = "xlm-roberta",
    ROBERTA_LIKE,
};

static const struct arch_alias modernbert_keys[] = {{"rope_theta", "global_rope_theta"}, {0}};

/* local_attention is the number of positions in a window without the query's own. */
static int read_modernbert(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char act[] = "gelu";
    size_t local = 128;
    int rc;
    QT_TRY(check_encoder(cfg, src, err));
    QT_TRY(config_refuse_flag(src, "norm_bias", true, err));
    QT_TRY(config_expect_string(src, "hidden_activation", act, err));
    QT_TRY(config_expect_string(src, "classifier_activation", act, err));
    QT_TRY(config_read_flag(&cfg->transform_bias, src, &cfg->arch->transform_bias, err));
    QT_TRY(config_read_size(&local, src, "local_attention", CONFIG_POSITIONS, err));
    cfg->transform_act = QT_ACT_GELU;
    for (size_t i = 0; i < cfg->info.layers; i++)
        cfg->windows[i] = cfg->windows[i] ? local / 2 + 1 : 0;
done:
    return rc;
}

const struct arch arch_modernbert = {
    .family = "modernbert",
    .aliases = modernbert_keys,
    .layers = "layers.",
    .embed = "embeddings.tok_embeddings",
    .embed_norm = "embeddings.norm",
    .final_norm = "final_norm",
    .head = "decoder",
    .both_ways = true,
    .first_bare = true,
    .transform = "head.dense",
    .transform_norm = "head.norm",
    .transform_bias = {"classifier_bias", false},
    .head_biases = "decoder",
    .parts = {[ROLE_ATTN_IN] = "attn_norm",
              [ROLE_QKV] = "attn.Wqkv",
              [ROLE_O] = "attn.Wo",
              [ROLE_MLP_IN] = "mlp_norm",
              [ROLE_GATE_UP] = "mlp.Wi",
              [ROLE_DOWN] = "mlp.Wo"},
    .rope = true,
    .theta = 160000,
    .local_theta = 1e4,
    .local_theta_key = "local_rope_theta",
    .window = WINDOW_PATTERN_FIRST,
    .window_period = 3,
    .window_period_key = "global_attn_every_n_layers",
    .eps_key = "norm_eps",
    .eps = 1e-5,
    .act_key = "hidden_activation",
    .act = "gelu",
    .norm = QT_NORM_LAYER,
    .norms_unbiased = true,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
    .tied = {"tie_word_embeddings", true},
    .read = read_modernbert,
};
