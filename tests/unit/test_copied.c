/* Tensors that are copied unless --tensor names them, by their names. */
#include "fixture.h"

#include "formats/formats.h"
#include "pack/pack.h"

/* Names from published checkpoints. why: the reason for copying; NULL: quantized. */
static const struct {
    const char *name, *why;
} cases[] = {
    {"model.layers.0.self_attn.qkv_proj.weight", NULL},
    {"model.language_model.layers.0.mlp.up_proj.weight", NULL},
    {"transformer.h.0.attn.division.weight", NULL},
    {"model.layers.0.mlp.gate.weight", "router"},
    {"model.layers.0.mlp.shared_expert_gate.weight", "router"},
    {"model.layers.0.mlp.gate.wg.weight", "router"},
    {"model.layers.0.mlp.shared_expert.gate_proj.weight", NULL},
    {"model.layers.0.mlp.experts.gate.weight", "router"},
    {"model.layers.0.linear_attn.in_proj_a.weight", "gate"},
    {"model.layers.0.linear_attn.in_proj_b.weight", "gate"},
    {"model.layers.0.linear_attn.in_proj_ba.weight", "gate"},
    {"model.layers.0.linear_attn.in_proj_qkvz.weight", NULL},
    {"model.layers.0.attn.b_proj.weight", "gate"},
    {"model.layers.0.self_attn.kv_b_proj.weight", NULL},
    {"model.layers.0.self_attn.indexer.weights_proj.weight", "gate"},
    {"model.layers.0.self_attn.indexer.wq_b.weight", "gate"},
    {"model.layers.0.self_attn.indexer.wk.weight", "gate"},
    {"model.layers.0.attn.wq_b.weight", NULL},
    {"model.layers.0.hc_attn_fn.weight", "gate"},
    {"model.layers.0.hyper_connection.fn.weight", "gate"},
    {"merger.mlp.0.weight", "multimodal"},
    {"model.merger.layers.0.weight", "multimodal"},
    {"model.patch_merger.0.merging_layer.weight", "multimodal"},
    {"model.deepstack_merger_list.0.linear_fc1.weight", "multimodal"},
    {"model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", "adapter"},
    {"model.layers.0.time_mix.w_lora.lora.0.weight", NULL},
    {"optimizer.state.0.exp_avg.weight", "optimizer"},
    {"model.layers.0.mlp.up_proj.exp_avg.weight", "optimizer"},
    {"model.layers.0.mixer.conv1d.weight", "not a linear"},
    {"model.mtp_block.0.self_attn.q_proj.weight", "MTP"},
    {"model.mtp_linear_proj.0.weight", "MTP"},
    {"mtp.layers.0.mlp.up_proj.weight", "MTP"},
    {"mtp_block.0.mlp.up_proj.weight", "MTP"},
    {"model.layers.0.mlp.smtp_proj.weight", NULL},
    {"model.layers.0.self_attn.rotary_embed.weight", "embedding"},
    {"language_model.lm_head.weight", "head"},
    {"vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "multimodal"},
    {"model.visual.blocks.0.attn.qkv.weight", "multimodal"},
    {"visual.blocks.0.attn.qkv.weight", "multimodal"},
    {"thinker.audio_tower.layers.0.fc1.weight", "multimodal"},
    {"model.layers.0.self_attn.q_proj.lora_A.speech.weight", "adapter"},
    {"vpm.encoder.layers.0.mlp.fc1.weight", "multimodal"},
    {"apm.layers.0.fc1.weight", "multimodal"},
    {"qformer.encoder.layer.0.output.dense.weight", "multimodal"},
    {"model.connector.perceiver_resampler.layers.0.fc.weight", "multimodal"},
    {"model.mm_projector.0.weight", "multimodal"},
    {"multi_modal_projector.1.weight", "multimodal"},
    {"aligner.layers.0.weight", "multimodal"},
    {"mlp1.1.weight", "multimodal"},
    {"model.sam_model.blocks.0.attn.qkv.weight", "multimodal"},
    {"siglip.encoder.layers.0.mlp.fc1.weight", "multimodal"},
    {"model.image_newline.0.weight", "multimodal"},
};

enum { CASES = sizeof cases / sizeof *cases, N = 16, K = 64, BYTES = N * K * 2 };

static void test_names(void **state)
{
    char *dir = fixture_dir(), *header;
    struct qt_tensor tensors[CASES];
    uint64_t offsets[CASES + 1];
    struct qt_err err;
    struct qt_ckpt *ckpt;
    struct qt_plan plan;
    size_t size;
    (void)state;
    for (size_t i = 0; i < CASES; i++)
        tensors[i] = (struct qt_tensor){cases[i].name, NULL, QT_F16, 2, {N, K}, N * K, BYTES, NULL};
    expect_ok("header", qt_safetensors_header(&header, &size, offsets, tensors, CASES, NULL, &err),
              &err);
    char *data = calloc(1, offsets[CASES]);
    memcpy(data, header, size);
    fixture_write(dir, "model.safetensors", data, offsets[CASES]);
    expect_ok("open", qt_ckpt_open(&ckpt, dir, &err), &err);
    expect_ok("plan", qt_plan_new(&plan, ckpt, &(struct qt_plan_options){.scheme = "nf4"}, &err),
              &err);
    assert_int_equal(plan.count, CASES);
    for (size_t i = 0; i < CASES; i++) {
        const struct qt_plan_item *item = &plan.items[i];
        assert_string_equal(item->tensor->name, cases[i].name);
        if (item->copied != (cases[i].why != NULL) ||
            (item->copied && !strstr(item->why, cases[i].why)))
            fail_msg("%s: %s", cases[i].name, item->copied ? item->why : "quantized");
    }
    qt_plan_free(&plan);
    qt_ckpt_close(ckpt);
    qt_free(header);
    free(data);
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_names)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
