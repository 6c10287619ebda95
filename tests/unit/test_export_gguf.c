/* GGUF exports: places of tensors, blocks, keys. tests/cli/export_gguf.t has the files. */
#include "fixture.h"

#include "pack/export/gguf.h"

#include <math.h>

/* ---- names ---------------------------------------------------------------------------------- */

static const struct {
    const char *family, *tensor, *name; /* name NULL: no place */
    bool rotary, plus_1, exact;
    int expert; /* -1: not stacked */
} places[] = {
    {"llama", "model.embed_tokens.weight", "token_embd.weight", false, false, false, -1},
    {"llama", "lm_head.weight", "output.weight", false, false, false, -1},
    {"llama", "model.norm.weight", "output_norm.weight", false, false, false, -1},
    {"llama", "model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", true, false, false,
     -1},
    {"llama", "layers.17.self_attn.k_proj.bias", "blk.17.attn_k.bias", true, false, false, -1},
    {"llama", "model.layers.3.self_attn.v_proj.weight", "blk.3.attn_v.weight", false, false, false,
     -1},
    {"llama", "model.layers.3.mlp.down_proj.bias", "blk.3.ffn_down.bias", false, false, false, -1},
    {"llama", "model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight", false,
     false, false, -1},
    {"llama", "model.layers.3.post_attention_layernorm.bias", NULL, false, false, false, -1},
    {"llama", "model.layers.3.self_attn.q_norm.weight", NULL, false, false, false, -1},
    {"llama", "model.layers..self_attn.q_proj.weight", NULL, false, false, false, -1},
    {"llama", "model.layers.12345678.self_attn.q_proj.weight", NULL, false, false, false, -1},
    {"llama", "model.layers.0.self_attn.q_proj", NULL, false, false, false, -1},
    {"llama", "model.layers.0.weight", NULL, false, false, false, -1},
    {"llama", "model.language_model.layers.0.mlp.up_proj.weight", NULL, false, false, false, -1},
    {"qwen2", "model.layers.1.self_attn.q_proj.bias", "blk.1.attn_q.bias", false, false, false, -1},
    {"qwen3", "model.layers.1.self_attn.o_proj.bias", NULL, false, false, false, -1},
    {"qwen3", "model.layers.1.self_attn.q_norm.weight", "blk.1.attn_q_norm.weight", false, false,
     false, -1},
    {"gemma3_text", "model.layers.1.self_attn.q_norm.weight", "blk.1.attn_q_norm.weight", false,
     true, false, -1},
    {"gemma2", "model.norm.weight", "output_norm.weight", false, true, false, -1},
    {"gemma2", "model.layers.1.post_attention_layernorm.weight", "blk.1.post_attention_norm.weight",
     false, true, false, -1},
    {"gemma2", "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight", false, false, false,
     -1},
    {"phi3", "model.layers.1.self_attn.qkv_proj.weight", "blk.1.attn_qkv.weight", false, false,
     false, -1},
    {"phi3", "model.layers.1.mlp.gate_up_proj.weight", "blk.1.ffn_up.weight", false, false, false,
     -1},
    {"glm4", "model.layers.1.post_mlp_layernorm.weight", "blk.1.post_ffw_norm.weight", false, false,
     false, -1},
    {"olmo2", "model.layers.1.input_layernorm.weight", NULL, false, false, false, -1},
    {"qwen3_moe", "model.layers.2.mlp.gate.weight", "blk.2.ffn_gate_inp.weight", false, false, true,
     -1},
    {"qwen3_moe", "model.layers.2.mlp.experts.11.up_proj.weight", "blk.2.ffn_up_exps.weight", false,
     false, false, 11},
    {"qwen3_moe", "model.layers.2.mlp.experts.x.up_proj.weight", NULL, false, false, false, -1},
    {"qwen3_moe", "model.layers.2.mlp.experts.1.up_proj.bias", NULL, false, false, false, -1},
    {"qwen2_moe", "model.layers.2.mlp.shared_expert.down_proj.weight",
     "blk.2.ffn_down_shexp.weight", false, false, false, -1},
    {"gpt_oss", "model.layers.2.self_attn.sinks", "blk.2.attn_sinks.weight", false, false, false,
     -1},
    {"gpt_oss", "model.layers.2.self_attn.sinks.weight", NULL, false, false, false, -1},
    {"gpt_oss", "model.layers.2.mlp.experts.1.up_proj.bias", "blk.2.ffn_up_exps.bias", false, false,
     false, 1},
    {"glm4_moe", "model.layers.2.mlp.gate.e_score_correction_bias", "blk.2.exp_probs_b.bias", false,
     false, false, -1},
    {"qwen3_next", "model.layers.2.linear_attn.in_proj_qkvz.weight", "blk.2.ssm_in.weight", false,
     false, false, -1},
    {"qwen3_5_text", "model.layers.2.linear_attn.A_log", "blk.2.ssm_a", false, false, false, -1},
    {"qwen3_5_text", "model.layers.2.linear_attn.dt_bias", "blk.2.ssm_dt.bias", false, false, false,
     -1},
    {"qwen3_5_text", "model.layers.2.linear_attn.norm.weight", "blk.2.ssm_norm.weight", false,
     false, false, -1},
    {"qwen3_5_text", "model.layers.2.self_attn.q_norm.weight", "blk.2.attn_q_norm.weight", false,
     true, false, -1},
    {"granitemoe", "model.layers.2.block_sparse_moe.router.layer.weight",
     "blk.2.ffn_gate_inp.weight", false, false, true, -1},
    {"granitemoe", "model.layers.2.block_sparse_moe.experts.3.up_proj.weight",
     "blk.2.ffn_up_exps.weight", false, false, false, 3},
    {"seed_oss", "model.layers.1.post_attention_layernorm.weight",
     "blk.1.post_attention_norm.weight", false, false, false, -1},
    {"ernie4_5", "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight", false, false,
     false, -1},
    {"ernie4_5", "model.layers.1.mlp.down_proj.bias", NULL, false, false, false, -1},
    {"olmoe", "model.layers.1.self_attn.k_norm.weight", "blk.1.attn_k_norm.weight", false, false,
     false, -1},
    {"dots1", "model.layers.1.mlp.shared_experts.up_proj.weight", "blk.1.ffn_up_shexp.weight",
     false, false, false, -1},
    {"deepseek_v3", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
     "blk.1.attn_kv_a_mqa.weight", false, false, false, -1},
    {"deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight", "blk.1.attn_", false, false, false,
     -1},
    {"ernie4_5_moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias",
     "blk.1.exp_probs_b.bias", false, false, false, -1},
    {"minimax_m2", "model.layers.1.block_sparse_moe.experts.2.w3.weight",
     "blk.1.ffn_up_exps.weight", false, false, false, 2},
    {"lfm2", "model.embedding_norm.weight", "token_embd_norm.weight", false, false, false, -1},
    {"lfm2", "model.layers.1.conv.conv.weight", "blk.1.shortconv.conv.weight", false, false, true,
     -1},
    {"lfm2_moe", "model.layers.1.feed_forward.expert_bias", "blk.1.exp_probs_b.bias", false, false,
     false, -1},
    {"llama4_text", "model.layers.1.feed_forward.shared_expert.up_proj.weight",
     "blk.1.ffn_up_shexp.weight", false, false, false, -1},
    {"llama4_text", "model.layers.1.feed_forward.experts.2.down_proj.weight",
     "blk.1.ffn_down_exps.weight", false, false, false, 2},
    {"hunyuan_v1_dense", "model.layers.1.self_attn.query_layernorm.weight",
     "blk.1.attn_q_norm.weight", false, false, false, -1},
    {"hunyuan_v1_moe", "model.layers.1.mlp.gate.wg.weight", "blk.1.ffn_gate_inp.weight", false,
     false, true, -1},
    {"mixtral", "model.layers.2.block_sparse_moe.experts.3.w2.weight", "blk.2.ffn_down_exps.weight",
     false, false, false, 3},
};

static void test_places(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const struct qt_gguf_family *arch = qt_gguf_family_find(places[i].family);
        struct qt_gguf_place p;
        assert_non_null(arch);
        const bool found = qt_gguf_place(&p, arch, places[i].tensor, false);
        if (found != (places[i].name != NULL))
            fail_msg("%s %s: %s", places[i].family, places[i].tensor, found ? p.name : "none");
        if (!found)
            continue;
        size_t layer = 0;
        sscanf(p.name, "blk.%zu.", &layer);
        assert_string_equal(p.name, places[i].name);
        assert_int_equal(p.layer, layer);
        assert_int_equal(p.rotary, places[i].rotary);
        assert_int_equal(p.plus_1, places[i].plus_1);
        assert_int_equal(p.exact, places[i].exact);
        assert_int_equal(p.latent, strstr(places[i].tensor, "kv_b_proj") != NULL);
        assert_int_equal(p.stacked ? (int)p.expert : -1, places[i].expert);
        assert_false(p.skip);
    }
}

static void test_tied_head(void **state)
{
    struct qt_gguf_place p;
    (void)state;
    assert_true(qt_gguf_place(&p, qt_gguf_family_find("llama"), "lm_head.weight", true));
    assert_true(p.skip);
    assert_true(qt_gguf_place(&p, qt_gguf_family_find("llama"), "model.norm.weight", true));
    assert_false(p.skip);
    assert_null(qt_gguf_family_find("opt"));
    assert_null(qt_gguf_arch_find("opt"));
}

/* First value heads 0, 3 and 6 of three key heads, then 1, 4 and 7, ... */
static void test_value_heads(void **state)
{
    static const size_t order[] = {0, 3, 6, 1, 4, 7, 2, 5, 8};
    (void)state;
    for (size_t i = 0; i < 9; i++)
        assert_int_equal(qt_gguf_value_head(i, 9, 3), order[i]);
    for (size_t i = 0; i < 12; i++)
        assert_int_equal(qt_gguf_value_head(qt_gguf_value_head(i, 12, 3), 12, 4), i);
}

/* Reader and exporter know the same families. */
static void test_families(void **state)
{
    const struct qt_gguf_family *f;
    (void)state;
    for (size_t i = 0; (f = qt_gguf_family_at(i)) != NULL; i++)
        assert_non_null(qt_gguf_arch_find(f->family));
}

/* ---- blocks --------------------------------------------------------------------------------- */

static float f16_at(const unsigned char *p)
{
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return qt_f16_to_f32(bits);
}

/* Decodes a block by the definition of its type. */
static void decode(float *w, const struct qt_gguf_type *type, const unsigned char *b)
{
    for (size_t i = 0; i < QT_GGUF_BLOCK; i++) {
        const float d = f16_at(b);
        const size_t skip = strcmp(type->name, "Q4_1") == 0 ? 4 : 2;
        const int nibble = b[skip + i % 16] >> (i < 16 ? 0 : 4) & 15;
        if (strcmp(type->name, "Q4_0") == 0)
            w[i] = d * (float)(nibble - 8);
        else if (strcmp(type->name, "Q4_1") == 0)
            w[i] = d * (float)nibble + f16_at(b + 2);
        else
            w[i] = d * (float)(int8_t)b[2 + i];
    }
}

static const struct {
    const char *spec, *type;
    enum qt_export_fit fit;
} types[] = {
    {"int4:g=32", "Q4_0", QT_EXPORT_EXACT},
    {"int4:g=0", "Q4_0", QT_EXPORT_EXACT},
    {"int4:g=128,zero=group", "Q4_1", QT_EXPORT_NEAR},
    {"int8", "Q8_0", QT_EXPORT_EXACT},
    {"int8:zero=group", NULL, QT_EXPORT_NO},
    {"nf4", NULL, QT_EXPORT_NO},
    {"fp6", NULL, QT_EXPORT_NO},
    {"mix24", NULL, QT_EXPORT_NO},
};

static void check_block(const struct qt_gguf_type *type, bool asymmetric)
{
    unsigned char block[64];
    uint8_t code[QT_GGUF_BLOCK];
    float got[QT_GGUF_BLOCK], said[QT_GGUF_BLOCK];
    const unsigned levels = strcmp(type->name, "Q8_0") == 0 ? 256 : 16;
    const float scale = -0.0371f, stored = qt_f16_to_f32(qt_f32_to_f16(scale));
    const float zero = asymmetric ? 11 : (float)levels / 2;
    for (size_t i = 0; i < QT_GGUF_BLOCK; i++)
        code[i] = (uint8_t)(i * levels / QT_GGUF_BLOCK * 7 % levels);
    code[5] = (uint8_t)(levels - 1);
    code[6] = 0;
    type->encode(block, code, stored, asymmetric ? zero : 0, said);
    decode(got, type, block);
    for (size_t i = 0; i < QT_GGUF_BLOCK; i++) {
        const float want = stored * ((float)code[i] - zero);
        if (!asymmetric)
            assert_true(got[i] == want);
        else
            assert_true(got[i] == said[i] && fabsf(got[i] - want) <= 11 * 0.0371f / 2048);
    }
}

static void test_types(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        struct qt_spec spec;
        struct qt_err err = {0};
        enum qt_export_fit fit;
        const char *why;
        expect_ok(types[i].spec, qt_spec_parse(&spec, types[i].spec, &err), &err);
        const struct qt_gguf_type *type = qt_gguf_type_of(&fit, &why, &spec);
        assert_int_equal(fit, types[i].fit);
        assert_int_equal(type != NULL, types[i].type != NULL);
        assert_true((why != NULL) == (fit != QT_EXPORT_EXACT));
        if (!type)
            continue;
        assert_string_equal(type->name, types[i].type);
        check_block(type, fit == QT_EXPORT_NEAR);
    }
    assert_int_equal(qt_gguf_type_plain(QT_F32)->id, 0);
    assert_int_equal(qt_gguf_type_plain(QT_F16)->id, 1);
    assert_int_equal(qt_gguf_type_plain(QT_BF16)->id, 30);
    assert_null(qt_gguf_type_plain(QT_I32));
}

/* ---- keys ----------------------------------------------------------------------------------- */

static void test_keys(void **state)
{
    static const unsigned char want[] = {
        3, 0, 0,   0,   0, 0, 0, 0, 'a', '.', 'n', 4,   0, 0, 0, 7, 0,    0, 0, /* u32 */
        1, 0, 0,   0,   0, 0, 0, 0, 's', 8,   0,   0,   0, 2, 0, 0, 0,    0, 0,
        0, 0, 'h', 'i',                                                   /* string */
        1, 0, 0,   0,   0, 0, 0, 0, 'b', 7,   0,   0,   0, 1,             /* bool */
        1, 0, 0,   0,   0, 0, 0, 0, 'f', 6,   0,   0,   0, 0, 0, 0, 0x3f, /* f32 0.5 */
        1, 0, 0,   0,   0, 0, 0, 0, 'l', 9,   0,   0,   0, 5, 0, 0, 0,    /* array of i32 */
        1, 0, 0,   0,   0, 0, 0, 0, 254, 255, 255, 255,
    };
    const int32_t minus_2 = -2;
    struct qt_err err = {0};
    struct qt_gguf_bytes b = {.err = &err};
    (void)state;
    qt_gguf_u32(&b, "a.", "n", 7);
    qt_gguf_string(&b, "", "s", "hi");
    qt_gguf_bool(&b, "b", true);
    qt_gguf_f32(&b, "", "f", 0.5f);
    qt_gguf_array(&b, "l", QT_GGUF_I32, 1);
    qt_gguf_raw(&b, &minus_2, sizeof minus_2);
    assert_int_equal(b.rc, QT_OK);
    assert_int_equal(b.keys, 5);
    assert_int_equal(b.size, sizeof want);
    assert_memory_equal(b.data, want, sizeof want);
    qt_free(b.data);
}

/* After a failure nothing is appended, and the status stays. */
static void test_no_memory(void **state)
{
    struct qt_err err = {0};
    struct qt_gguf_bytes b = {.err = &err};
    (void)state;
    qt_mem_fail_after(0);
    qt_gguf_u16(&b, "split.no", 1);
    qt_mem_fail_after(-1);
    qt_gguf_i32(&b, "split.tensors.count", 1);
    assert_int_equal(b.rc, QT_E_RESOURCE);
    assert_int_equal(b.size, 0);
    qt_free(b.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),      cmocka_unit_test(test_tied_head),
        cmocka_unit_test(test_value_heads), cmocka_unit_test(test_families),
        cmocka_unit_test(test_types),       cmocka_unit_test(test_keys),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
