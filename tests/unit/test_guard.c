/* Checkpoints that quantize refuses because it would do nothing, or the wrong thing, with success;
 * and what a plan says about those that it accepts. */
#include "fixture.h"

#include "formats/formats.h"
#include "pack/pack.h"

#include <math.h>

enum { MAX_TENSORS = 8 };

struct tensor {
    const char *name;
    enum qt_dtype dtype;
    size_t shape[QT_MAX_DIMS]; /* ends with 0; NONE stands for a size of 0 */
};
#define NONE SIZE_MAX

/* Writes model.safetensors with values of 0. */
static void write_model(const char *dir, const struct tensor *list)
{
    struct qt_tensor tensors[MAX_TENSORS];
    uint64_t offsets[MAX_TENSORS + 1];
    struct qt_err err;
    char *header;
    size_t size, n = 0;
    for (; n < MAX_TENSORS && list[n].name; n++) {
        struct qt_tensor *t = &tensors[n];
        *t = (struct qt_tensor){.name = list[n].name, .dtype = list[n].dtype, .count = 1};
        while (list[n].shape[t->ndim]) {
            t->shape[t->ndim] = list[n].shape[t->ndim] == NONE ? 0 : list[n].shape[t->ndim];
            t->count *= t->shape[t->ndim++];
        }
        t->nbytes = t->count * qt_dtype_bits(t->dtype) / 8;
    }
    expect_ok("header", qt_safetensors_header(&header, &size, offsets, tensors, n, NULL, &err),
              &err);
    char *data = calloc(1, offsets[n]);
    memcpy(data, header, size);
    fixture_write(dir, "model.safetensors", data, offsets[n]);
    qt_free(header);
    free(data);
}

#define UP                                                                                         \
    {                                                                                              \
        "model.layers.0.mlp.up_proj.weight", QT_F16,                                               \
        {                                                                                          \
            64, 64                                                                                 \
        }                                                                                          \
    }
#define EMBED                                                                                      \
    {                                                                                              \
        "model.embed_tokens.weight", QT_F16,                                                       \
        {                                                                                          \
            64, 64                                                                                 \
        }                                                                                          \
    }

static const struct {
    struct tensor tensors[MAX_TENSORS];
    const char *file, *text; /* a file beside the weights, or NULL */
    enum qt_status status;   /* QT_OK: accepted */
    const char *message;
} cases[] = {
    {{UP, EMBED}, NULL, NULL, QT_OK, ""},
    /* Quantized already. */
    {{UP, {"model.layers.0.mlp.up_proj.weight_scale", QT_F32, {1}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "weight_scale: the checkpoint is already quantized"},
    {{UP, {"model.layers.0.mlp.up_proj.weight_scale_inv", QT_F32, {1, 1}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "already quantized"},
    {{UP, {"model.layers.0.mlp.up_proj.weight_packed", QT_I32, {64, 8}}},
     NULL,
     NULL,
     QT_E_INPUT,
     "weight_packed: cannot be dequantized: there is no weight_shape beside it"},
    {{UP, {"model.layers.0.mlp.down_proj.qweight", QT_I32, {8, 64}}},
     NULL,
     NULL,
     QT_E_INPUT,
     "qweight: cannot be dequantized: there is no scales beside it"},
    {{UP, {"model.layers.0.mlp.down_proj.g_idx", QT_I32, {64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "already quantized"},
    {{UP, {"model.layers.0.mlp.down_proj.weight", QT_U8, {2048, 1}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "dtype U8"},
    {{UP, {"model.layers.0.mlp.down_proj.weight.absmax", QT_F32, {64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "already quantized"},
    {{UP, {"model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4", QT_U8, {80}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "already quantized"},
    {{UP, {"model.layers.0.mlp.down_proj.weight", QT_F8_E4M3, {64, 64}}},
     NULL,
     NULL,
     QT_E_INPUT,
     "down_proj.weight: cannot be dequantized: there is no weight_scale_inv beside it"},
    {{UP, {"model.layers.0.mlp.down_proj.weight", QT_F8_E4M3FNUZ, {64, 64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "dtype F8_E4M3FNUZ"},
    {{UP, {"model.layers.0.mlp.down_proj.weight", QT_I8, {64, 64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "dtype I8"},
    {{UP, {"model.layers.0.mlp.experts.gate_up_proj_blocks", QT_U8, {4, 64, 2, 16}}},
     NULL,
     NULL,
     QT_E_INPUT,
     "gate_up_proj_blocks: cannot be dequantized: there is no _scales beside it"},
    {{UP, {"model.layers.0.mlp.experts.gate_up_proj_scale_inv", QT_F32, {4, 1, 1}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "already quantized"},
    {{UP},
     "config.json",
     "{\"quantization_config\":{\"quant_method\":\"fp8\"}}",
     QT_E_UNSUPPORTED,
     "quantization_config in config.json; remove it if"},
    {{UP},
     "config.json",
     "{\"quantization_config\":{\"quant_method\":\"exl3\"}}",
     QT_E_UNSUPPORTED,
     "already quantized with quant_method 'exl3', which is not supported"},
    {{UP},
     "config.json",
     "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\","
     "\"transform_config\":{\"config_groups\":{\"R4\":{}}}}}",
     QT_E_UNSUPPORTED,
     "the activations of the quantized model are transformed"},
    {{UP},
     "config.json",
     "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\","
     "\"sparsity_config\":{\"format\":\"sparse-24-bitmask\"}}}",
     QT_E_UNSUPPORTED,
     "sparse weights"},
    {{UP, {"model.layers.0.mlp.up_proj.pre_quant_scale", QT_F16, {64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "pre_quant_scale: the checkpoint is already quantized"},
    {{UP,
      {"model.layers.0.mlp.down_proj.weight", QT_F8_E4M3, {64, 64}},
      {"model.layers.0.mlp.down_proj.weight_scale", QT_F32, {1}}},
     "config.json",
     "{\"quantization_config\":{\"quant_method\":\"fp8\"}}",
     QT_OK,
     ""},
    {{UP}, "config.json", "{\"quantization_config\":null}", QT_OK, ""},
    {{UP},
     "config.json",
     "{\"text_config\":{\"quantization_config\":{}}}",
     QT_E_UNSUPPORTED,
     "already quantized"},
    {{UP},
     "config.json",
     "{\"quantization\":{\"bits\":4,\"group_size\":64}}",
     QT_E_UNSUPPORTED,
     "quantization in config.json"},
    {{UP}, "config.json", "{\"codec_config\":{\"quantization\":{\"bits\":4}}}", QT_OK, ""},
    {{UP},
     "config.json",
     "{\"a\":[0.0,Infinity],\"quantization_config\":{}}",
     QT_E_UNSUPPORTED,
     "already quantized"},
    {{UP}, "config.json", "{\"quantization_config\":NaN}", QT_E_UNSUPPORTED, "already quantized"},
    {{UP},
     "hf_quant_config.json",
     "{\"quantization\":{\"quant_algo\":\"FP8\"}}",
     QT_E_UNSUPPORTED,
     "hf_quant_config.json: the checkpoint is already quantized"},
    {{UP}, "hf_quant_config.json", "{\"quantization\":{\"quant_algo\":null}}", QT_OK, ""},
    {{UP}, "quantize_config.json", "{\"bits\":4", QT_E_INPUT, "quantize_config.json: line 1"},
    /* No evidence: integers that are no weights, scales that a model has of its own. */
    {{UP, {"model.position_ids", QT_I64, {1, 64}}}, NULL, NULL, QT_OK, ""},
    {{UP, {"model.layers.0.attn.bias", QT_BOOL, {1, 1, 64, 64}}}, NULL, NULL, QT_OK, ""},
    {{UP, {"model.layers.0.layer_scale.weight", QT_F16, {64}}}, NULL, NULL, QT_OK, ""},
    {{UP, {"model.layers.0.self_attn.k_scale", QT_F32, {1}}}, NULL, NULL, QT_OK, ""},
    /* config.json that cannot be read. */
    {{UP}, "config.json", "{\"model_type\":\"llama\",", QT_E_INPUT, "config.json: line 1"},
    {{UP}, "config.json", "[]", QT_E_INPUT, "is an array, but an object is expected"},
    {{UP}, "config.json", "\xef\xbb\xbf{}", QT_E_INPUT, "config.json"},
    {{UP}, "config.json", "\xff\xfe{", QT_E_INPUT, "config.json"},
    {{UP}, "config.json", "", QT_E_INPUT, "config.json"},
    {{UP},
     "config.json",
     "{\"time_step_limit\":[0.0,Infinity],\"x\":-Infinity,\"y\":NaN}",
     QT_OK,
     ""},
    {{UP}, "config.json", "{\"a\":\"\\ud800\"}", QT_OK, ""},
    /* Adapters. */
    {{UP},
     "adapter_config.json",
     "{\"base_model_name_or_path\":\"some/model\"}",
     QT_E_UNSUPPORTED,
     "adapter_config.json: this is an adapter, not a model: merge it into its "
     "base model some/model first (with PEFT: merge_and_unload), then quantize the result; if the "
     "weights beside it are merged already, remove this file"},
    {{UP}, "adapter_config.json", "", QT_E_INPUT, "adapter_config.json"},
    {{{"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", QT_F32, {16, 64}},
      {"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight", QT_F32, {64, 16}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "this is an adapter"},
    {{{"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", QT_F32, {16, 64}},
      {"base_model.model.model.layers.0.mlp.down_proj.weight", QT_F32, {64, 64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "this is an adapter"},
    {{{"lora_te_layers_0.lora_up.weight", QT_F32, {64, 16}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "this is an adapter"},
    {{{"model.layers.0.adapter.down_proj.weight", QT_F32, {16, 64}},
      {"model.layers.0.output_adapters.adapters.x.adapter_up.weight", QT_F32, {64, 16}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "this is an adapter"},
    {{{"model.layers.0.self_attention.adapter_layer.lora_kqv_adapter.linear_in.weight",
       QT_F32,
       {16, 64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "this is an adapter"},
    {{UP, {"model.layers.0.mlp.up_proj.lora_A.weight", QT_F16, {16, 64}}}, NULL, NULL, QT_OK, ""},
    /* Tensors without elements. */
    {{UP, {"model.layers.0.mlp.down_proj.weight", QT_F16, {NONE, 64}}},
     NULL,
     NULL,
     QT_E_INPUT,
     "down_proj.weight: has no elements"},
    {{{"model.layers.0.mlp.down_proj.weight", QT_F16, {64, NONE}}},
     NULL,
     NULL,
     QT_E_INPUT,
     "has no elements"},
    /* Nothing to quantize. */
    {{EMBED},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "nothing to quantize: no tensor is a matrix of a "
     "decoder layer"},
    {{{"vision_model.layers.0.mlp.fc1.weight", QT_F16, {64, 64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "1 multimodal tensor"},
    {{{"optimizer.state.0.exp_avg.weight", QT_F32, {64, 64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "1 optimizer state"},
    {{{"model.layers.0.mlp.experts.up_proj", QT_F16, {4, 64, 64}}},
     NULL,
     NULL,
     QT_E_UNSUPPORTED,
     "1 stacked experts"},
    {{{"model.norm.weight", QT_F16, {64}}}, NULL, NULL, QT_E_UNSUPPORTED, "1 vector"},
};

static int plan_of(const char *dir, const char *scheme, struct qt_plan *plan, struct qt_ckpt **ckpt,
                   struct qt_err *err)
{
    const struct qt_plan_options opt = {.scheme = scheme};
    *plan = (struct qt_plan){0};
    expect_ok("open", qt_ckpt_open(ckpt, dir, err), err);
    return qt_plan_new(plan, *ckpt, &opt, err);
}

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *dir = fixture_dir(), what[300];
        struct qt_err err = {0};
        struct qt_ckpt *ckpt;
        struct qt_plan plan;
        write_model(dir, cases[i].tensors);
        if (cases[i].file)
            fixture_write(dir, cases[i].file, cases[i].text, strlen(cases[i].text));
        snprintf(what, sizeof what, "case %zu: %s, %s", i, cases[i].tensors[1].name, cases[i].text);
        const int rc = plan_of(dir, "nf4", &plan, &ckpt, &err);
        if (cases[i].status == QT_OK)
            expect_ok(what, rc, &err);
        else
            expect_error(what, rc, cases[i].status, cases[i].message, &err);
        qt_plan_free(&plan);
        /* Without quantization there is nothing to guard. */
        expect_ok(what, qt_plan_new(&plan, ckpt, &(struct qt_plan_options){.scheme = "none"}, &err),
                  &err);
        qt_plan_free(&plan);
        qt_ckpt_close(ckpt);
        fixture_remove(dir);
    }
}

/* ---- shares --------------------------------------------------------------------------------- */

static char last_warning[1024];

static void remember(void *ctx, enum qt_log_level level, const char *text)
{
    (void)ctx;
    if (level == QT_LOG_WARNING)
        snprintf(last_warning, sizeof last_warning, "%s", text);
}

static void test_share(void **state)
{
    static const struct tensor tensors[] = {
        UP,
        EMBED,
        {"model.layers.0.mlp.experts.gate_up_proj", QT_F16, {3, 64, 64}},
        {"model.layers.0.self_attn.conv.weight", QT_F16, {64, 1, 4}},
        {"model.layers.0.mlp.gate.weight", QT_F16, {16, 64}},
        {0},
    };
    const struct qt_log log = {.message = remember};
    char *dir = fixture_dir();
    struct qt_left left[QT_LEFT_MAX];
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    struct qt_plan plan;
    (void)state;
    write_model(dir, tensors);
    expect_ok("plan", plan_of(dir, "fp4", &plan, &ckpt, &err), &err);
    assert_int_equal(plan.share.linear, 4 * 8192);
    assert_int_equal(plan.share.quantized, 8192);
    assert_true(qt_share_ratio(&plan.share) == 0.25);
    const size_t n = qt_plan_left(left, &plan);
    assert_int_equal(n, 4);
    assert_string_equal(left[0].why, "stacked experts");
    assert_true(left[0].linear && left[0].count == 1 && left[0].bytes == 3 * 8192);
    assert_string_equal(left[1].why, "embedding");
    assert_false(left[1].linear);
    expect_ok("review", qt_plan_review(&plan, ckpt, false, &log, &err), &err);
    if (!strstr(last_warning, "only 25.0 % of the bytes of linear weights are quantized (8 KiB of "
                              "32 KiB); left: 24 KiB stacked experts"))
        fail_msg("%s", last_warning);
    expect_error("strict", qt_plan_review(&plan, ckpt, true, &log, &err), QT_E_UNSUPPORTED,
                 "24 KiB stacked experts; --strict refuses less than 90 %", &err);
    qt_plan_free(&plan);

    /* What the user excludes is no reason to warn. */
    const struct qt_rule rule = {"experts", "none"};
    last_warning[0] = '\0';
    expect_ok("plan",
              qt_plan_new(&plan, ckpt,
                          &(struct qt_plan_options){.scheme = "fp4", .rules = &rule, .nrules = 1},
                          &err),
              &err);
    expect_ok("review", qt_plan_review(&plan, ckpt, true, &log, &err), &err);
    assert_string_equal(last_warning, "");
    qt_plan_free(&plan);
    qt_ckpt_close(ckpt);
    fixture_remove(dir);
    const struct qt_share none = {0};
    assert_true(isnan(qt_share_ratio(&none)));
}

/* ---- matrices that would grow --------------------------------------------------------------- */

static void test_growing(void **state)
{
    static const struct tensor tensors[] = {
        UP,
        {"model.layers.0.narrow.weight", QT_F16, {256, 16}},
        {"model.layers.0.less_narrow.weight", QT_F16, {256, 24}},
        {"model.layers.0.narrow_f32.weight", QT_F32, {256, 16}},
        {0},
    };
    static const char *const want[] = {NULL, "would grow: 17.06 bits/weight from 16", NULL, NULL};
    const struct qt_log log = {.message = remember};
    const struct qt_rule rule = {"\\.narrow", "nf4"};
    char *dir = fixture_dir(), why[QT_WHY_SIZE];
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    struct qt_plan plan;
    (void)state;
    write_model(dir, tensors);
    expect_ok("plan", plan_of(dir, "nf4", &plan, &ckpt, &err), &err);
    for (size_t i = 0; i < plan.count; i++) { /* in order of their data, as written */
        const struct qt_plan_item *item = &plan.items[i];
        assert_string_equal(item->tensor->name, tensors[i].name);
        assert_int_equal(item->copied, want[i] != NULL);
        if (want[i])
            assert_string_equal(qt_plan_item_why(why, item), want[i]);
        else
            assert_true(item->grown_bpw == 0);
    }
    qt_plan_free(&plan);
    last_warning[0] = '\0';
    expect_ok("named",
              qt_plan_new(&plan, ckpt,
                          &(struct qt_plan_options){.scheme = "nf4", .rules = &rule, .nrules = 1},
                          &err),
              &err);
    assert_int_equal(plan.quantized, 4);
    expect_ok("review", qt_plan_review(&plan, ckpt, true, &log, &err), &err);
    if (!strstr(last_warning, "narrow.weight grows: 17.06 bits/weight from 16; it is quantized "
                              "because --tensor names it"))
        fail_msg("%s", last_warning);
    qt_plan_free(&plan);
    qt_ckpt_close(ckpt);
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_share),
        cmocka_unit_test(test_growing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
