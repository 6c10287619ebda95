/* Baichuan. */
#include "model/config/families/families.h"

static const struct arch_alias baichuan_keys[] = {{"max_position_embeddings", "model_max_length"},
                                                  {0}};

/* Models with the key max_position_embeddings (7B) have a rotary embedding, others (13B) ALiBi. */
static int adapt_baichuan(json_t *out, const struct source *src, struct qt_err *err)
{
    return config_put(out, "alibi",
                      json_boolean(!config_given(src->json, "max_position_embeddings")), err);
}

/* Baichuan 2 divides each row of the head by its norm. Its options are those of Baichuan 1, but for
 * the vocabulary and z_loss_weight. */
static int read_baichuan(struct config *cfg, const struct source *src, struct qt_err *err)
{
    cfg->unit_head = cfg->info.vocab == 125696 || config_given(src->json, "z_loss_weight");
    return cfg->unit_head && cfg->tied
               ? config_unsupported(src, "tie_word_embeddings", "true in Baichuan 2", err)
               : QT_OK;
}

const struct arch arch_baichuan = {
    .family = "baichuan",
    .aliases = baichuan_keys,
    LLAMA_LIKE,
    .parts = {[ROLE_ATTN_IN] = "input_layernorm",
              [ROLE_QKV] = "self_attn.W_pack",
              [ROLE_O] = "self_attn.o_proj",
              [ROLE_MLP_IN] = "post_attention_layernorm",
              MLP_PARTS},
    .alibi = {"alibi", false},
    .adapt = adapt_baichuan,
    .read = read_baichuan,
};
