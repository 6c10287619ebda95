#!/usr/bin/env python3
"""Small random models of every family and variant, with the logits and gradients that Hugging Face
transformers computes for them in float32: an oracle that shares no code with calib/.

  make_model_golden.py            writes tests/golden/models/NAME/{config.json, model.safetensors,
                                  ids.u16, logits.npy, grads.json}, always the same ones
  make_model_golden.py --only NAME...
                                  the same for these models only
  make_model_golden.py --nano DIR writes tests/golden/nano_ids.u16: the first 64 tokens of
                                  DIR/data/prose.eval.txt by DIR/checkpoints/nano-llama/tokenizer.json
  make_model_golden.py --grads    only tests/golden/models/NAME/grads.json and
                                  tests/golden/nano_grads.json, of what is there
  make_model_golden.py --check T...
                                  fresh random models in a temporary directory, then runs the test
                                  binaries T over them; exit 77 when torch or transformers is missing

Weights are stored as FP16 and read back, so that both sides start from the same numbers.
"""
import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    import older_families as older
except ImportError as e:
    print(f"SKIP make_model_golden.py: {e}", file=sys.stderr)
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS = 40  # longer than every window below

LLAMA = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=97, max_position_embeddings=64)
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
GEMMA3 = LLAMA | dict(
    head_dim=8, num_hidden_layers=3, sliding_window=6, query_pre_attn_scalar=5,
    final_logit_softcapping=20.0,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                     "full_attention": {"rope_type": "linear", "factor": 4.0,
                                        "rope_theta": 2000.0}})
MIXTURE = LLAMA | dict(moe_intermediate_size=24, num_experts=6, head_dim=8)
GLM = LLAMA | dict(num_hidden_layers=3, moe_intermediate_size=24, n_routed_experts=6, head_dim=8,
                   num_experts_per_tok=2)
LONGROPE = {"rope_type": "longrope", "rope_theta": 300.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.5, 4.0, 9.0]}
YARN = {"rope_type": "yarn", "rope_theta": 200.0, "factor": 6.0,
        "original_max_position_embeddings": 16}
OPT = dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=101,
           max_position_embeddings=44)

# name: (model_type, config, edits of the written config.json: None removes a key)
MODELS = {
    "llama": ("llama", LLAMA, {}),
    "llama_old_keys": ("llama", LLAMA | dict(tie_word_embeddings=True, num_key_value_heads=4),
                       {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": "null",
                        "head_dim": None, "num_key_value_heads": None, "rms_norm_eps": None}),
    "llama_linear_biased": ("llama", LLAMA | dict(
        attention_bias=True, mlp_bias=True, head_dim=12, hidden_act="gelu", rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}), {}),
    "llama_linear_old_keys": ("llama", LLAMA, {
        "rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama3": ("llama", LLAMA | dict(head_dim=16, rope_parameters=LLAMA3 | {"rope_theta": 500.0}),
               {}),
    "llama3_old_keys": ("llama", LLAMA | dict(num_key_value_heads=1), {
        "rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": LLAMA3}),
    "mistral_window": ("mistral", LLAMA | dict(sliding_window=7), {}),
    "mistral_full": ("mistral", LLAMA | dict(sliding_window=None, head_dim=6), {}),
    "qwen2": ("qwen2", LLAMA | dict(tie_word_embeddings=True), {}),
    "qwen2_window": ("qwen2", LLAMA | dict(use_sliding_window=True, sliding_window=5,
                                           max_window_layers=1), {}),
    "qwen2_window_old_keys": ("qwen2", LLAMA | dict(use_sliding_window=True, sliding_window=5,
                                                    max_window_layers=1), {"layer_types": None}),
    "qwen3": ("qwen3", LLAMA | dict(head_dim=16), {}),
    "qwen3_biased": ("qwen3", LLAMA | dict(head_dim=8, attention_bias=True,
                                           tie_word_embeddings=True), {}),
    "gemma2": ("gemma2", LLAMA | dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=5,
                                      attn_logit_softcapping=2.0, final_logit_softcapping=20.0),
               {"layer_types": None}),
    "gemma2_uncapped": ("gemma2", LLAMA | dict(
        head_dim=10, sliding_window=9, query_pre_attn_scalar=16, attn_logit_softcapping=None,
        final_logit_softcapping=None, attention_bias=True,
        layer_types=["full_attention", "sliding_attention"]), {}),
    "opt": ("opt", OPT, {}),
    "opt_norm_after": ("opt", OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=20), {}),
    "opt_bare_unbiased": ("opt", OPT | dict(enable_bias=False, activation_function="gelu",
                                            _remove_final_layer_norm=True), {}),
    "gemma3": ("gemma3_text", GEMMA3, {}),
    "gemma3_old_keys": ("gemma3_text", GEMMA3, {
        "rope_parameters": None, "rope_theta": 3000.0, "rope_local_base_freq": 50.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "layer_types": None,
        "sliding_window_pattern": 2}),
    "qwen3_moe": ("qwen3_moe", MIXTURE | dict(num_experts_per_tok=3, norm_topk_prob=True,
                                              tie_word_embeddings=True),
                  {"num_local_experts": None, "num_experts": 6}),
    "qwen3_moe_biased_window": ("qwen3_moe", MIXTURE | dict(
        num_experts_per_tok=2, attention_bias=True, use_sliding_window=True, sliding_window=9,
        num_hidden_layers=1), {}),
    "qwen3_moe_some_dense": ("qwen3_moe", MIXTURE | dict(
        num_hidden_layers=4, num_experts_per_tok=2, mlp_only_layers=[2], decoder_sparse_step=2),
        {}),
    "qwen3_moe_one_dense": ("qwen3_moe", MIXTURE | dict(
        num_hidden_layers=3, num_experts_per_tok=2, mlp_only_layers=[1]), {}),
    "glm4_moe": ("glm4_moe", GLM | dict(use_qk_norm=True, attention_bias=True), {}),
    "glm4_moe_groups": ("glm4_moe", GLM | dict(
        n_group=3, topk_group=2, n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=3,
        routed_scaling_factor=1.7, tie_word_embeddings=True),
        {"rms_norm_eps": None, "rope_parameters": None, "use_qk_norm": None,
         "first_k_dense_replace": None}),
    "glm4_moe_all": ("glm4_moe", GLM | dict(
        first_k_dense_replace=0, num_hidden_layers=1, num_experts_per_tok=4, rope_parameters={
            "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}), {}),
    "olmoe": ("olmoe", LLAMA | dict(num_experts=5, num_experts_per_tok=2), {
        "rms_norm_eps": None}),
    "olmoe_biased": ("olmoe", LLAMA | dict(
        num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True,
        num_hidden_layers=1, num_key_value_heads=4), {}),
    "mixtral": ("mixtral", LLAMA | dict(num_local_experts=5, num_experts_per_tok=2), {}),
    "mixtral_window": ("mixtral", LLAMA | dict(num_local_experts=3, num_experts_per_tok=1,
                                               sliding_window=6, num_hidden_layers=1),
                       {"rms_norm_eps": None, "rope_parameters": None}),
    "phi3": ("phi3", LLAMA | dict(sliding_window=9),
             {"rms_norm_eps": None, "rope_parameters": None, "rope_theta": 500.0}),
    "phi3_short": ("phi3", LLAMA | dict(original_max_position_embeddings=40,
                                        tie_word_embeddings=True, rope_parameters=LONGROPE), {}),
    "phi3_long_old_keys": ("phi3", LLAMA | dict(num_attention_heads=2, num_key_value_heads=1), {
        "rope_parameters": None, "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5],
                         "long_factor": [1.5, 4.0, 9.0, 12.0]},
        "original_max_position_embeddings": 16}),
    "llama_longrope": ("llama", LLAMA | dict(head_dim=6, rope_parameters=LONGROPE | {
        "partial_rotary_factor": 1.0, "original_max_position_embeddings": 20, "factor": 2.0,
        "attention_factor": 1.3}), {}),
    "llama_yarn": ("llama", LLAMA | dict(head_dim=16, rope_parameters=YARN), {}),
    "llama_yarn_old_keys": ("llama", LLAMA | dict(num_attention_heads=2, num_key_value_heads=1), {
        "rope_parameters": None, "rope_theta": 90.0, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 2, "truncate": False,
            "attention_factor": 0.9}}),
    "ministral3": ("ministral3", LLAMA | dict(head_dim=8, rope_parameters=YARN | {
        "mscale": 1.5, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.2}), {}),
    "seed_oss": ("seed_oss", LLAMA | dict(head_dim=8), {}),
    "seed_oss_biased": ("seed_oss", LLAMA | dict(head_dim=8, attention_bias=False,
                                                 attention_out_bias=True, mlp_bias=True), {}),
    "starcoder2": ("starcoder2", LLAMA | dict(sliding_window=8), {"norm_epsilon": None}),
    "starcoder2_unbiased": ("starcoder2", LLAMA | dict(use_bias=False, tie_word_embeddings=False),
                            {}),
    "granite": ("granite", LLAMA | dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
        logits_scaling=2.5), {}),
    "granite_biased_plain": ("granite", LLAMA | dict(attention_bias=True, mlp_bias=True,
                                                     tie_word_embeddings=True), {
        "embedding_multiplier": None, "residual_multiplier": None, "logits_scaling": None}),
    "smollm3": ("smollm3", LLAMA | dict(num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1]), {}),
    "smollm3_interval": ("smollm3", LLAMA | dict(
        num_hidden_layers=3, no_rope_layer_interval=2, tie_word_embeddings=False,
        attention_bias=True), {"no_rope_layers": None, "layer_types": None,
                               "rope_parameters": None}),
    "olmo2": ("olmo2", LLAMA, {"rms_norm_eps": None}),
    "olmo2_biased": ("olmo2", LLAMA | dict(attention_bias=True, num_key_value_heads=4,
                                           head_dim=12), {}),
    "olmo3": ("olmo3", LLAMA | dict(sliding_window=7, rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": YARN}, layer_types=["full_attention", "sliding_attention"]), {}),
    "olmo3_old_keys": ("olmo3", LLAMA | dict(num_hidden_layers=4, sliding_window=7), {
        "rope_parameters": None, "rope_theta": 5e5, "layer_types": None,
        "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"}}),
    "exaone4": ("exaone4", LLAMA | dict(
        num_hidden_layers=3, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
        {"sliding_window_pattern": "LLLG"}),
    "exaone4_full": ("exaone4", LLAMA | dict(
        sliding_window=None, layer_types=["full_attention"] * 2, rope_parameters=LLAMA3 | {"rope_theta": 500.0},
        tie_word_embeddings=True), {"rms_norm_eps": None}),
    "glm": ("glm", LLAMA | dict(num_attention_heads=2, head_dim=12, attention_bias=False,
                                rope_parameters={"rope_type": "default", "rope_theta": 300.0,
                                                 "partial_rotary_factor": 1.0}), {}),
    "glm_old_keys": ("glm", LLAMA | dict(head_dim=8), {
        "rms_norm_eps": None, "rope_parameters": None, "rope_theta": 200.0,
        "partial_rotary_factor": 0.75, "attention_bias": None}),
    "glm4": ("glm4", LLAMA | dict(head_dim=12, rope_parameters=LLAMA3 | {
        "rope_theta": 500.0, "partial_rotary_factor": 0.5}), {}),
    "glm4_old_keys": ("glm4", LLAMA | dict(head_dim=8, attention_bias=False,
                                           tie_word_embeddings=True), {
        "rms_norm_eps": None, "rope_parameters": None, "num_key_value_heads": None}),
    "ernie4_5": ("ernie4_5", LLAMA | dict(head_dim=8, use_bias=True, tie_word_embeddings=False,
                                          rope_parameters=YARN), {}),
    "ernie4_5_plain": ("ernie4_5", LLAMA | dict(head_dim=6), {
        "rms_norm_eps": None, "rope_parameters": None, "use_bias": None,
        "tie_word_embeddings": None}),
    "helium": ("helium", LLAMA | dict(head_dim=8), {"rms_norm_eps": None, "rope_parameters": None}),
    "helium_biased": ("helium", LLAMA | dict(head_dim=8, attention_bias=True, mlp_bias=True,
                                             tie_word_embeddings=True), {}),
    # Models of images and text: the least that transformers takes for eyes.
    "gemma3_images": ("gemma3", dict(
        text_config=GEMMA3 | dict(final_logit_softcapping=None), mm_tokens_per_image=4,
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                           num_attention_heads=2, image_size=28, patch_size=14)), {}),
    "mistral3_images": ("mistral3", dict(
        tie_word_embeddings=False,
        text_config=LLAMA | dict(model_type="ministral3", head_dim=6, rope_parameters=YARN | {
            "llama_4_scaling_beta": 0.3}),
        vision_config=dict(model_type="pixtral", hidden_size=16, intermediate_size=16,
                           num_hidden_layers=1, num_attention_heads=2, head_dim=8, image_size=28,
                           patch_size=14)), {"tie_word_embeddings": None}),
    "qwen2_5_vl": ("qwen2_5_vl", dict(
        text_config=LLAMA | dict(rope_parameters={"rope_type": "default", "rope_theta": 900.0,
                                                  "mrope_section": [1, 1, 2]}),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2,
                           out_hidden_size=32, fullatt_block_indexes=[0])),
        {"flat": True, "rope_parameters": None, "rope_theta": 900.0,
         "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}),
    "qwen3_vl": ("qwen3_vl", dict(
        tie_word_embeddings=True,
        text_config=LLAMA | dict(head_dim=8, tie_word_embeddings=True, rope_parameters={
            "rope_type": "default", "rope_theta": 700.0, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True}),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2,
                           out_hidden_size=32, num_position_embeddings=16,
                           deepstack_visual_indexes=[0])), {}),
}
MODELS["qwen3_vl_bare"] = MODELS["qwen3_vl"]
# Behind the others, whose seeds follow from their places.
MODELS["qwen2_moe"] = ("qwen2_moe", MIXTURE | dict(
    num_experts_per_tok=2, shared_expert_intermediate_size=20), {})
MODELS["qwen2_moe_some_dense"] = ("qwen2_moe", MIXTURE | dict(
    num_hidden_layers=3, num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1],
    shared_expert_intermediate_size=36, qkv_bias=False, tie_word_embeddings=True,
    use_sliding_window=True, sliding_window=5, max_window_layers=2), {"layer_types": None})
MODELS["ernie4_5_moe"] = ("ernie4_5_moe", LLAMA | dict(
    num_hidden_layers=3, head_dim=8, moe_intermediate_size=24, moe_num_experts=6, moe_k=2,
    moe_num_shared_experts=1, tie_word_embeddings=True), {})
MODELS["ernie4_5_moe_interval"] = ("ernie4_5_moe", LLAMA | dict(
    num_hidden_layers=4, num_key_value_heads=4, moe_intermediate_size=20, moe_num_experts=4,
    moe_k=3, moe_layer_start_index=0, moe_layer_end_index=2, moe_layer_interval=2,
    rms_norm_eps=1e-3, tie_word_embeddings=False), {
        "moe_num_shared_experts": None, "rope_parameters": None, "num_key_value_heads": None})
MODELS["ernie4_5_moe_alone"] = ("ernie4_5_moe", LLAMA | dict(
    num_hidden_layers=3, moe_intermediate_size=20, moe_num_experts=5, moe_k=2,
    moe_num_shared_experts=0, moe_layer_start_index=2, tie_word_embeddings=False), {})

# Added in 2026, with sizes as small as possible.
TINY = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=53, max_position_embeddings=64)
GLM_TINY = TINY | dict(moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2,
                       head_dim=8)
VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16)
CLIP = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            image_size=28, patch_size=14)
HEADS2 = dict(num_attention_heads=2, num_key_value_heads=1)
MROPE = {"rope_type": "default", "rope_theta": 700.0, "mrope_section": [1, 1, 2]}
MODELS |= {
    "gemma": ("gemma", TINY | dict(head_dim=8, hidden_act="gelu"), {"hidden_activation": "null"}),
    "ministral": ("ministral", TINY | dict(sliding_window=7, head_dim=4, layer_types=[
        "sliding_attention", "full_attention"]), {}),
    "internlm3": ("internlm3", TINY | dict(head_dim=6, attention_bias=True, mlp_bias=True,
        rope_parameters={"rope_type": "dynamic", "factor": 6.0, "rope_theta": 500.0}),
        {"attention_bias": None, "mlp_bias": None, "qkv_bias": True, "bias": True}),
    "exaone": ("exaone", TINY | dict(rope_parameters=LLAMA3 | {"rope_theta": 500.0}),
               {"num_hidden_layers": None, "num_layers": 2, "rms_norm_eps": None,
                "hidden_act": None, "activation_function": "silu"}),
    "cwm": ("cwm", TINY | dict(head_dim=6, num_hidden_layers=3, sliding_window=7,
                               rope_parameters=LLAMA3 | {"rope_theta": 500.0}),
            {"layer_types": None, "rms_norm_eps": None}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", TINY | dict(head_dim=8, rope_parameters={
        "rope_type": "dynamic", "alpha": 20.0, "factor": 1.0, "rope_theta": 300.0}), {}),
    "arcee": ("arcee", TINY, {"rms_norm_eps": None}),
    "jais2": ("jais2", TINY, {"layer_norm_eps": None}),
    "nemotron": ("nemotron", TINY | dict(head_dim=8), {"norm_eps": None}),
    "dots1": ("dots1", GLM_TINY | dict(
        n_shared_experts=2, first_k_dense_replace=1, sliding_window=8, max_window_layers=1,
        routed_scaling_factor=1.5, norm_topk_prob=True), {"layer_types": None}),
    "solar_open": ("solar_open", GLM_TINY | dict(n_group=2, topk_group=1), {"rms_norm_eps": None}),
    "granite4_dense": ("granitemoehybrid", TINY | dict(
        shared_intermediate_size=24, num_local_experts=0, mamba_n_heads=4, layer_types=["full_attention"] * 2,
        position_embedding_type="rope", embedding_multiplier=3.0, attention_multiplier=0.2,
        residual_multiplier=0.4, logits_scaling=2.5), {
            "layer_types": None, "layers_block_type": ["attention"] * 2}),
    "granite4_nope": ("granitemoehybrid", TINY | dict(
        shared_intermediate_size=20, num_local_experts=0, mamba_n_heads=4, num_hidden_layers=1,
        layer_types=["full_attention"], tie_word_embeddings=True), {}),
    "qwen2_vl": ("qwen2_vl", dict(
        text_config=TINY | HEADS2 | dict(rope_parameters=MROPE),
        vision_config=dict(depth=1, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=1)), {}),
    "qwen2_5_omni": ("qwen2_5_omni_thinker", dict(
        text_config=TINY | HEADS2 | dict(rope_parameters=MROPE, tie_word_embeddings=False),
        vision_config=VISION | dict(fullatt_block_indexes=[0]),
        audio_config=dict(d_model=16, encoder_layers=1, encoder_attention_heads=2,
                          encoder_ffn_dim=16, output_dim=16, num_mel_bins=8)),
        {"omni": "qwen2_5_omni"}),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker", dict(
        text_config=TINY | dict(head_dim=8, moe_intermediate_size=8, num_experts=4,
                                num_experts_per_tok=2, rope_parameters=MROPE | {
                                    "mrope_interleaved": True}),
        vision_config=VISION | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
        audio_config=dict(d_model=16, encoder_layers=1, encoder_attention_heads=2,
                          encoder_ffn_dim=16, output_dim=16, num_mel_bins=16,
                          downsample_hidden_size=8)),
        {"omni": "qwen3_omni_moe"}),
    "glm4v": ("glm4v", dict(
        text_config=TINY | HEADS2 | dict(tie_word_embeddings=False, rope_parameters=MROPE | {
            "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}),
        vision_config=VISION | dict(image_size=28, patch_size=14)), {}),
    "glm4v_moe": ("glm4v_moe", dict(
        text_config=GLM_TINY | dict(tie_word_embeddings=False, rope_parameters=MROPE | {
            "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}),
        vision_config=VISION | dict(image_size=28, patch_size=14)), {}),
}
LATENT = TINY | dict(num_key_value_heads=4, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4,
                     v_head_dim=5, q_lora_rank=12)
LATENT_MOE = LATENT | dict(num_hidden_layers=2, moe_intermediate_size=8, n_routed_experts=6,
                           num_experts_per_tok=2, first_k_dense_replace=1, n_shared_experts=1)
MODELS |= {
    "deepseek_v2": ("deepseek_v2", LATENT_MOE | dict(
        q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy", rope_parameters=YARN | {
            "mscale": 0.707, "mscale_all_dim": 0.707}), {}),
    "deepseek_v2_groups": ("deepseek_v2", LATENT_MOE | dict(
        n_group=3, topk_group=2, topk_method="group_limited_greedy", n_shared_experts=2,
        first_k_dense_replace=0, num_hidden_layers=1, attention_bias=True,
        routed_scaling_factor=1.5), {}),
    "deepseek_v3": ("deepseek_v3", LATENT_MOE | dict(
        n_group=3, topk_group=2, v_head_dim=12, rope_parameters=YARN | {
            "mscale": 1.0, "mscale_all_dim": 1.0}), {"routed_scaling_factor": None}),
    # Wide enough for the blocks of 32 of GGUF.
    "deepseek_v3_wide": ("deepseek_v3", LATENT_MOE | dict(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=32, kv_lora_rank=32, n_group=3,
        topk_group=2, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}), {}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT_MOE | dict(
        v_head_dim=10, mlp_layer_types=["dense", "sparse"]), {
            "mlp_layer_types": None, "rms_norm_eps": None}),
    "youtu": ("youtu", LATENT | dict(num_hidden_layers=1, rope_interleave=False), {}),
    "minicpm3": ("minicpm3", LATENT | dict(dim_model_base=8, v_head_dim=4, rope_parameters={
        "rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.0, 1.25],
        "long_factor": [1.5, 4.0], "original_max_position_embeddings": 20}),
        {"scale_emb": None, "scale_depth": None}),
}
DELTA = TINY | dict(head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
                    linear_key_head_dim=6, linear_value_head_dim=4, linear_conv_kernel_dim=3)
DELTA_MOE = DELTA | dict(moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
                         shared_expert_intermediate_size=8)
MODELS |= {
    "gpt_oss_moe": ("gpt_oss", TINY | dict(
        hidden_size=32, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=7, rope_parameters=YARN | {"truncate": False}), {
            "layer_types": None, "rms_norm_eps": None}),
    "granite_swa": ("granite_swa", TINY | dict(
        num_hidden_layers=3, sliding_window=7, layer_rope_theta=[0, 300.0, 300.0],
        rope_parameters={"rope_type": "default", "rope_theta": 300.0}, embedding_multiplier=3.0,
        attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=2.5),
        {"layer_types": None, "rms_norm_eps": None}),
    "qwen3_next_moe": ("qwen3_next", DELTA_MOE | dict(
        layer_types=["linear_attention", "full_attention"]),
        {"layer_types": None, "full_attention_interval": 2}),
    "qwen3_5": ("qwen3_5", dict(
        text_config=DELTA | dict(
            num_hidden_layers=3, linear_num_value_heads=2, linear_value_head_dim=10,
            tie_word_embeddings=False,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 700.0,
                             "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
                             "mrope_interleaved": True}),
        vision_config=VISION | dict(num_position_embeddings=16)), {}),
    "qwen3_5_moe": ("qwen3_5_moe", dict(
        text_config=DELTA_MOE | dict(
            tie_word_embeddings=False, layer_types=["linear_attention", "full_attention"]),
        vision_config=VISION | dict(num_position_embeddings=16)), {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", dict(
        text_config=TINY | dict(
            head_dim=8, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
            num_hidden_layers=1, rope_parameters=MROPE | {"mrope_interleaved": True}),
        vision_config=VISION | dict(num_position_embeddings=16, deepstack_visual_indexes=[0])),
        {}),
}
MODELS |= {
    "cohere": ("cohere", TINY | dict(logit_scale=0.2, attention_bias=True), {
        "layer_norm_eps": None}),
    "cohere2": ("cohere2", TINY | dict(num_hidden_layers=3, sliding_window=7), {
        "layer_types": None, "sliding_window_pattern": 2, "logit_scale": None}),
    "stablelm": ("stablelm", TINY | HEADS2 | dict(use_qkv_bias=True), {"layer_norm_eps": None}),
    "stablelm_parallel": ("stablelm", TINY | HEADS2 | dict(
        num_hidden_layers=1, use_parallel_residual=True, rope_parameters={
            "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}), {}),
    "phi": ("phi", TINY | dict(num_hidden_layers=1), {"layer_norm_eps": None}),
    "gpt2": ("gpt2", dict(n_embd=16, n_layer=2, n_head=4, n_positions=44, vocab_size=53), {}),
}
SPARSE = LATENT_MOE | dict(n_group=2, topk_group=1, index_topk=48, index_head_dim=8, index_n_heads=2)
MODELS |= {
    "deepseek_v32": ("deepseek_v32", SPARSE | dict(num_hidden_layers=2), {"layer_types": None}),
    "glm_moe_dsa": ("glm_moe_dsa", SPARSE | dict(
        num_hidden_layers=1, n_group=1, first_k_dense_replace=0), {
            "rms_norm_eps": None, "mlp_layer_types": None}),
    "minimax_m2": ("minimax_m2", TINY | dict(
        head_dim=8, num_local_experts=4, num_experts_per_tok=2, intermediate_size=8,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0,
                         "partial_rotary_factor": 0.5}),
        {"rope_parameters": None, "rope_theta": 300.0, "rotary_dim": 4}),
    "granitemoe": ("granitemoe", TINY | dict(
        num_local_experts=4, intermediate_size=12, embedding_multiplier=3.0,
        attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=2.5), {}),
}
MODELS |= {
    "mistral4": ("mistral3", dict(
        tie_word_embeddings=False,
        text_config=LATENT_MOE | dict(
            model_type="mistral4", num_hidden_layers=1, first_k_dense_replace=0, n_group=2,
            topk_group=1, rope_parameters=YARN | {
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}),
        vision_config=dict(model_type="pixtral", hidden_size=16, intermediate_size=16,
                           num_hidden_layers=1, num_attention_heads=2, head_dim=8, image_size=28,
                           patch_size=14)), {}),
}
GEMMA4 = TINY | dict(
    num_hidden_layers=3, head_dim=4, global_head_dim=8, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=53, sliding_window=7,
    layer_types=["sliding_attention", "full_attention", "full_attention"],
    rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                     "full_attention": {"rope_type": "proportional", "rope_theta": 2000.0,
                                        "partial_rotary_factor": 0.5}})
MODELS |= {
    "gemma4": ("gemma4", dict(
        text_config=GEMMA4 | dict(num_global_key_value_heads=1, attention_k_eq_v=True,
                                  final_logit_softcapping=20.0),
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=8,
                           num_attention_heads=1, num_key_value_heads=1, patch_size=2,
                           position_embedding_size=4), audio_config=None), {"global": True}),
    "gemma4_moe": ("gemma4_text", GEMMA4 | dict(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=8), {}),
    "gemma4_unified": ("gemma4_unified_text", {k: v for k, v in GEMMA4.items() if "input" not in k}
                       | dict(num_hidden_layers=2, layer_types=None, attention_bias=True),
                       {"layer_types": None}),
}
MOE_TINY = TINY | dict(num_experts_per_tok=2, num_local_experts=4, num_experts=4, intermediate_size=8)
MODELS |= {
    "granitemoeshared": ("granitemoeshared", MOE_TINY | dict(
        shared_intermediate_size=12, num_hidden_layers=1, embedding_multiplier=3.0,
        attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=2.5), {}),
    "phimoe": ("phimoe", MOE_TINY | dict(
        num_hidden_layers=1, router_jitter_noise=0.4, attention_bias=True, lm_head_bias=True,
        rope_parameters={"rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.0, 1.25],
                         "long_factor": [1.5, 4.0], "original_max_position_embeddings": 44,
                         "short_mscale": 1.2, "long_mscale": 1.2}), {"rms_norm_eps": None}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", MOE_TINY | dict(num_hidden_layers=1, head_dim=6), {
        "num_experts_per_tok": None, "moe_topk": [2, 2]}),
    "exaone_moe": ("exaone_moe", TINY | dict(
        moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, sliding_window=7,
        layer_types=["sliding_attention", "full_attention"], n_group=2, topk_group=1),
        {"layer_types": None, "sliding_window_pattern": 2, "rms_norm_eps": None,
         "mlp_layer_types": None, "routed_scaling_factor": None}),
    "afmoe": ("afmoe", TINY | dict(
        moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, num_shared_experts=1,
        sliding_window=7, head_dim=6, layer_types=["sliding_attention", "full_attention"],
        mup_enabled=True, route_scale=1.5), {
            "layer_types": None, "global_attn_every_n_layers": 2, "rms_norm_eps": None}),
    "llama4": ("llama4_text", TINY | dict(
        head_dim=6, intermediate_size=8, intermediate_size_mlp=24, num_local_experts=4,
        num_experts_per_tok=2, no_rope_layers=[1, 0], moe_layers=[1], attention_chunk_size=48,
        floor_scale=16, rope_parameters=LLAMA3 | {"rope_theta": 500.0}),
        {"rms_norm_eps": None, "moe_layers": None, "interleave_moe_layer_step": 2,
         "no_rope_layers": [], "no_rope_layer_interval": 2, "layer_types": None}),
}
MODELS |= {
    "lfm2": ("lfm2", TINY | dict(
        num_hidden_layers=3, block_multiple_of=8, full_attn_idxs=[1]),
        {"layer_types": None, "intermediate_size": None, "block_ff_dim": 24,
         "tie_word_embeddings": None, "tie_embedding": True, "norm_eps": None}),
    "lfm2_moe": ("lfm2_moe", TINY | dict(
        layer_types=["full_attention", "conv"], moe_intermediate_size=8, num_experts=4,
        num_experts_per_tok=2, num_dense_layers=1, conv_L_cache=4, routed_scaling_factor=1.5),
        {}),
}
NEOX = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, vocab_size=53,
            max_position_embeddings=64)
MODELS |= {
    "gptj": ("gptj", dict(n_embd=16, n_layer=1, n_head=2, n_positions=44, vocab_size=53,
                          rotary_dim=4), {}),
    "gpt_neox": ("gpt_neox", NEOX | dict(num_hidden_layers=2, rope_parameters={
        "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}),
        {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 300}),
    "gpt_neox_sequential": ("gpt_neox", NEOX | dict(
        num_hidden_layers=1, use_parallel_residual=False, attention_bias=False), {}),
}
FALCON = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=53,
              ffn_hidden_size=24)
MODELS |= {
    "codegen": ("codegen", dict(n_embd=16, n_layer=1, n_head=2, n_positions=44, vocab_size=53,
                                rotary_dim=4), {}),
    "falcon": ("falcon", FALCON | dict(
        new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False), {
            "layer_norm_epsilon": None, "rope_parameters": None, "rope_theta": 300.0,
            "max_position_embeddings": None}),
    "bloom": ("bloom", dict(n_layer=2, n_head=4, hidden_size=16, vocab_size=53), {
        "layer_norm_epsilon": None, "hidden_size": None, "n_embed": 16, "seq_length": 64}),
    "mpt": ("mpt", dict(d_model=18, n_layers=1, n_heads=6, max_seq_len=64, vocab_size=53,
                        attn_config=dict(clip_qkv=0.7, softmax_scale=0.4)), {}),
}
# Families that transformers lacks: options of the model in older.BASE, and the whole config.json.
SAME_HEADS = TINY | dict(num_key_value_heads=4)
QWEN = dict(hidden_size=16, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            vocab_size=53, kv_channels=4, seq_length=50, layer_norm_epsilon=1e-6, no_bias=True,
            use_dynamic_ntk=True, use_logn_attn=True, rotary_pct=1.0, rotary_emb_base=300)
CHATGLM = dict(hidden_size=16, ffn_hidden_size=24, num_layers=2, num_attention_heads=4,
               padded_vocab_size=53, vocab_size=50, kv_channels=8, seq_length=64,
               layernorm_epsilon=1e-5, multi_query_attention=True, multi_query_group_num=2,
               add_qkv_bias=True, add_bias_linear=False, rmsnorm=True, rope_ratio=50)
BAICHUAN = {k: v for k, v in SAME_HEADS.items() if k not in (
    "num_key_value_heads", "max_position_embeddings")} | dict(rms_norm_eps=1e-6)
MODELS |= {
    "internlm2": ("internlm2", TINY, TINY | dict(bias=False, rms_norm_eps=1e-6, rope_scaling={
        "type": "dynamic", "factor": 2.0})),
    "baichuan2_alibi": ("baichuan", SAME_HEADS | dict(
        num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=6, head_dim=4,
        hidden_size=24), BAICHUAN | dict(
            num_hidden_layers=1, num_attention_heads=6, hidden_size=24, model_max_length=64,
            z_loss_weight=0)),
    "qwen": ("qwen", SAME_HEADS | dict(num_hidden_layers=1, rope_parameters={
        "rope_type": "default", "rope_theta": 300.0}), QWEN),
    "chatglm": ("chatglm", TINY | dict(head_dim=8, rms_norm_eps=1e-5, rope_parameters={
        "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}), CHATGLM),
}
MAMBA = TINY | dict(mamba_n_heads=4, mamba_d_state=6, mamba_d_conv=3, mamba_chunk_size=16)
NEMOTRON_H = TINY | dict(
    layers_block_type=["linear_attention", "full_attention", "mlp", "moe"], mamba_num_heads=4,
    mamba_head_dim=6, ssm_state_size=6, n_groups=2, conv_kernel=3, chunk_size=16, head_dim=8,
    time_step_min=0.5, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
    moe_shared_expert_intermediate_size=20, n_group=2, topk_group=1, routed_scaling_factor=1.5)
MODELS |= {
    "bamba": ("bamba", MAMBA | dict(
        attn_layer_indices=[1], mamba_n_groups=2, mamba_proj_bias=True, attention_bias=True,
        mlp_bias=True, time_step_limit=[0.5, 0.9]), {"rms_norm_eps": None}),
    "granite4_hybrid": ("granitemoehybrid", MAMBA | dict(
        shared_intermediate_size=12, num_local_experts=4, num_experts_per_tok=2,
        intermediate_size=8, mamba_conv_bias=False, layer_types=["linear_attention", "full_attention"],
        embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.4,
        logits_scaling=2.5), {"mamba_d_head": "auto", "layer_types": None,
                              "layers_block_type": ["mamba", "attention"]}),
    "falcon_h1": ("falcon_h1", MAMBA | dict(
        num_hidden_layers=1, mamba_d_ssm=24, mamba_n_groups=2, mamba_rms_norm=True,
        projectors_bias=True, lm_head_multiplier=0.4, embedding_multiplier=3.0,
        mlp_multipliers=[0.7, 1.4], key_multiplier=1.5, attention_out_multiplier=0.6,
        attention_in_multiplier=1.3, ssm_multipliers=[0.5, 1.2, 0.8, 1.4, 0.7],
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.6), {}),
    "nemotron_h": ("nemotron_h", NEMOTRON_H, {
        "layers_block_type": None, "hybrid_override_pattern": "M*-E", "layer_norm_epsilon": None}),
    "mamba2": ("mamba2", dict(
        hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, state_size=6, n_groups=2,
        conv_kernel=3, chunk_size=16, use_bias=True, use_conv_bias=False, vocab_size=53), {}),
}
MODELS |= {
    "gemma4_small": ("gemma4_text", GEMMA4 | dict(
        num_hidden_layers=4, hidden_size_per_layer_input=6, num_kv_shared_layers=2,
        use_double_wide_mlp=True, layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=20.0), {}),
}
MODELS["Yi"] = ("Yi", TINY | dict(num_hidden_layers=1),
                TINY | dict(num_hidden_layers=1, rms_norm_eps=1e-6))
MODELS |= {
    "gpt_bigcode": ("gpt_bigcode", dict(n_embd=16, n_layer=1, n_head=4, n_positions=44,
                                        vocab_size=53), {}),
    "gpt_neo": ("gpt_neo", dict(hidden_size=16, num_layers=2, num_heads=2, vocab_size=53,
                                max_position_embeddings=44, window_size=7, intermediate_size=24,
                                attention_types=[[["global", "local"], 1]]), {}),
    "vaultgemma": ("vaultgemma", TINY | dict(head_dim=8, sliding_window=6,
                                             query_pre_attn_scalar=5), {"layer_types": None}),
    "flex_olmo": ("flex_olmo", TINY | dict(num_hidden_layers=1, num_experts=4,
                                           num_experts_per_tok=2), {"rope_parameters": None}),
}
# Encoders; "old": with the names of norms that the first checkpoints of BERT have.
BERT = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=53, max_position_embeddings=48)
MODELS |= {
    "bert": ("bert", BERT, {"old": True, "layer_norm_eps": None}),
    "roberta": ("roberta", BERT | dict(
        pad_token_id=1, type_vocab_size=1, num_hidden_layers=1, hidden_act="gelu_new",
        layer_norm_eps=1e-5), {}),
    "modernbert": ("modernbert", BERT | dict(
        num_hidden_layers=3, local_attention=9, global_attn_every_n_layers=2), {
            "layer_types": None, "rope_parameters": None, "global_rope_theta": 300.0,
            "local_rope_theta": 100.0, "global_attn_every_n_layers": 2, "norm_eps": None}),
    "xlm_roberta": ("xlm-roberta", BERT | dict(
        pad_token_id=1, type_vocab_size=1, num_hidden_layers=1), {}),
}
GEMMA3N = TINY | dict(
    num_hidden_layers=4, head_dim=4, hidden_size_per_layer_input=6, vocab_size_per_layer_input=50,
    sliding_window=7, layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2, altup_num_inputs=3, laurel_rank=5, altup_correct_scale=False,
    activation_sparsity_pattern=[0.6, 0.0, 0.3, 0.0], rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0}})
PHI4 = TINY | dict(
    vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                       num_attention_heads=1, image_size=28, patch_size=14, crop_size=28),
    audio_config=dict(hidden_size=8, intermediate_size=8, num_blocks=1, num_attention_heads=1,
                      input_size=8, nemo_conv_channels=8, nemo_final_size=8, ext_pw_out_channel=8,
                      depthwise_separable_out_channel=8))
MODELS |= {
    "gemma3n": ("gemma3n_text", GEMMA3N | dict(final_logit_softcapping=20.0), {}),
    "phi4mm": ("phi4_multimodal", PHI4 | dict(
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True), {
            "wrapped": "phi4mm", "rope_parameters": None,
            "partial_rotary_factor": 0.5, "rope_scaling": {
                "type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.5, 4.0]},
            "original_max_position_embeddings": 16}),
    # What llama.cpp computes, wide enough for the blocks of 32 of GGUF.
    "llama4_wide": ("llama4_text", TINY | dict(
        hidden_size=32, head_dim=8, num_hidden_layers=4, intermediate_size=64,
        intermediate_size_mlp=32, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=2, rope_parameters=LLAMA3 | {"rope_theta": 500.0}), {}),
    "llama4_chunks": ("llama4_text", TINY | dict(
        head_dim=6, intermediate_size=8, intermediate_size_mlp=24, num_hidden_layers=3,
        num_local_experts=4, num_experts_per_tok=1, moe_layers=[1], attention_chunk_size=16,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1], floor_scale=16), {}),
}
MIMO = TINY | dict(head_dim=6, v_head_dim=4, num_key_value_heads=1, sliding_window=7,
                   moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2)
MODELS |= {
    "mimo_v2_flash": ("mimo_v2_flash", MIMO | dict(
        num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"],
        n_group=2, topk_group=1, rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0,
                               "partial_rotary_factor": 0.7},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0,
                                  "partial_rotary_factor": 0.7}}), {"rms_norm_eps": None}),
}
MODELS |= {
    "minimax_m3": ("minimax_m3_vl", dict(
        text_config=TINY | dict(
            intermediate_size=8, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
            dense_intermediate_size=24, shared_intermediate_size=12, rotary_dim=4,
            mlp_layer_types=["dense", "sparse"], index_n_heads=2, index_head_dim=8,
            index_block_size=16, index_topk_blocks=3, rope_parameters={
                "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            layer_types=["full_attention", "minimax_m3_sparse"]),
        projector_hidden_size=16, vision_config=dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            image_size=28, patch_size=14)), {"m3": True}),
}
SARVAM = GLM_TINY | dict(num_hidden_layers=2)
MODELS |= {
    "mellum": ("mellum", TINY | dict(
        head_dim=8, moe_intermediate_size=8, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=7, mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention", "sliding_attention"], rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}), {}),
    "hy_v3": ("hy_v3", TINY | dict(
        head_dim=6, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
        num_shared_experts=2), {"rms_norm_eps": None, "mlp_layer_types": None,
                                "router_scaling_factor": None}),
    "granitemoe_swa": ("granitemoe_swa", MOE_TINY | dict(
        shared_intermediate_size=12, sliding_window=7, embedding_multiplier=3.0,
        attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=2.5,
        layer_rope_theta=[0, 10000.0]), {"layer_types": None}),
    "sarvam_moe": ("sarvam_moe", SARVAM | dict(n_shared_experts=2, attention_bias=True), {
        "rope_parameters": None, "routed_scaling_factor": None, "n_shared_experts": None,
        "num_shared_experts": 2, "attention_bias": None, "use_qkv_bias": True}),
    "iquestcoder": ("iquestcoder", TINY | dict(
        num_hidden_layers=1, head_dim=6, attention_bias=True, mlp_bias=True), {
        "rms_norm_eps": None}),
    "sarvam_mla": ("sarvam_mla", LATENT_MOE | dict(q_lora_rank=None, rope_parameters=YARN | {
        "mscale": 0.8, "mscale_all_dim": 0.7}), {"rms_norm_eps": None}),
}
JETMOE = dict(hidden_size=16, vocab_size=53, num_hidden_layers=2, num_key_value_heads=2,
              kv_channels=6, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2,
              rms_norm_eps=1e-3, max_position_embeddings=48, tie_word_embeddings=False)
MODELS["jetmoe"] = ("jetmoe", JETMOE, {})
# Compared by --check only: the same decoders with other options or the names of multimodal models.
CHECKED = {
    "jetmoe_square": ("jetmoe", JETMOE | dict(
        kv_channels=8, num_experts_per_tok=3, tie_word_embeddings=True), {}),
    "falcon_h1_plain": ("falcon_h1", MAMBA | dict(
        num_hidden_layers=2, mamba_d_ssm=None, attention_bias=True, mlp_bias=True,
        mamba_proj_bias=True, attention_out_multiplier=0.6), {}),
    "falcon_h1_norm_last": ("falcon_h1", MAMBA | dict(
        num_hidden_layers=2, mamba_d_ssm=24, mamba_rms_norm=True, mamba_norm_before_gate=False,
        mamba_conv_bias=False), {"mamba_d_head": "auto"}),
    "nemotron_h_dense": ("nemotron_h", NEMOTRON_H | dict(
        layers_block_type=["linear_attention", "linear_attention", "mlp", "full_attention"],
        n_groups=1, use_bias=True, mlp_bias=True, use_conv_bias=False), {}),
    "codegen_many": ("codegen", dict(n_embd=32, n_layer=2, n_head=8, n_positions=44, vocab_size=53,
                                     rotary_dim=4, n_inner=24), {}),
    "gpt_bigcode_heads": ("gpt_bigcode", dict(
        n_embd=16, n_layer=2, n_head=4, n_positions=44, vocab_size=53, multi_query=False,
        n_inner=24), {}),
    "falcon_old": ("falcon", FALCON, {"num_kv_heads": None, "max_position_embeddings": None}),
    "falcon_heads": ("falcon", FALCON | dict(multi_query=False, bias=True, parallel_attn=False,
                                             num_attention_heads=2), {}),
    "falcon_alibi": ("falcon", FALCON | dict(
        hidden_size=24, num_attention_heads=6, multi_query=False, bias=True, parallel_attn=False,
        alibi=True), {}),
    "falcon_alibi_old": ("falcon", FALCON | dict(alibi=True, num_hidden_layers=1), {}),
    "falcon_one_norm": ("falcon", FALCON | dict(
        new_decoder_architecture=True, num_kv_heads=1, num_ln_in_parallel_attn=1), {}),
    "falcon_all_heads": ("falcon", FALCON | dict(new_decoder_architecture=True), {
        "num_kv_heads": None}),
    "bloom_heads": ("bloom", dict(n_layer=1, n_head=12, hidden_size=24, vocab_size=53), {
        "seq_length": 64}),
    "internlm2_biased": ("internlm2", TINY | dict(attention_bias=True, num_key_value_heads=1),
                         TINY | dict(num_key_value_heads=1, rms_norm_eps=1e-6)),
    "baichuan": ("baichuan", SAME_HEADS, BAICHUAN | dict(max_position_embeddings=64,
                                                         model_max_length=60)),
    "gemma3n_scaled": ("gemma3n_text", GEMMA3N | dict(
        num_hidden_layers=11, intermediate_size=[256] * 11, layer_types=None,
        num_kv_shared_layers=3, altup_correct_scale=True, activation_sparsity_pattern=None), {
            "layer_types": None, "rope_parameters": None, "rope_theta": 3000.0,
            "rope_local_base_freq": 50.0}),
    # As published; head_dim 6 has no rotary channels by the default factor.
    "mimo_v2_flash_old_keys": ("mimo_v2_flash", MIMO | dict(
        num_hidden_layers=7, head_dim=12, num_attention_heads=2, routed_scaling_factor=1.0,
        attention_value_scale=None, attention_bias=True), {
            "layer_types": None, "mlp_layer_types": None, "rope_parameters": None,
            "rms_norm_eps": None, "layernorm_epsilon": 1e-5, "sliding_window_size": 6,
            "routed_scaling_factor": "null", "rope_theta": 5e6, "swa_rope_theta": 1e4,
            "swa_num_key_value_heads": 2, "swa_head_dim": 12, "swa_v_head_dim": 4,
            "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1], "moe_layer_freq": [0] + [1] * 6,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": "null"}),
    "phi4_multimodal": ("phi4_multimodal", PHI4 | dict(sliding_window=9), {}),
    "llama4_all_chunks": ("llama4_text", TINY | dict(
        head_dim=6, intermediate_size=8, num_local_experts=4, num_experts_per_tok=1,
        attention_chunk_size=13, no_rope_layers=[1, 1], use_qk_norm=False), {
            "layer_types": None}),
    "baichuan_alibi": ("baichuan", SAME_HEADS, BAICHUAN | dict(model_max_length=64)),
    "baichuan2": ("baichuan", SAME_HEADS, BAICHUAN | dict(max_position_embeddings=64,
                                                          z_loss_weight=0.0)),
    "chatglm_all_heads": ("chatglm", SAME_HEADS | dict(
        head_dim=8, rms_norm_eps=1e-5, attention_bias=False, rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        {k: v for k, v in CHATGLM.items() if k not in (
            "multi_query_attention", "add_qkv_bias", "rope_ratio")}),
    "mpt_plain": ("mpt", dict(d_model=16, n_layers=2, n_heads=4, max_seq_len=64, vocab_size=53),
                  {"attn_config": None}),
    "modernbert_biased": ("modernbert", BERT | dict(
        attention_bias=True, mlp_bias=True, classifier_bias=True, num_hidden_layers=2,
        local_attention=12, rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}), {}),
    "llava": ("llava", dict(text_config=TINY | dict(model_type="llama"), vision_config=CLIP), {}),
    "llava_next": ("llava_next", dict(text_config=TINY | dict(model_type="mistral"),
                                      vision_config=CLIP), {}),
    "llava_onevision": ("llava_onevision", dict(
        text_config=TINY | dict(model_type="qwen2"),
        vision_config=CLIP | dict(model_type="siglip_vision_model")), {}),
    "vipllava": ("vipllava", dict(text_config=TINY | dict(model_type="llama"), vision_config=CLIP |
                                  dict(num_hidden_layers=8),
                                  vision_feature_layers=[-2, -5]), {}),
    "internvl": ("internvl", dict(text_config=TINY | dict(model_type="qwen3", head_dim=8),
                                  vision_config=CLIP | dict(image_size=[28, 28],
                                                            patch_size=[14, 14])), {}),
    "idefics3": ("idefics3", dict(text_config=TINY | dict(model_type="llama"), vision_config=CLIP),
                 {}),
    "smolvlm": ("smolvlm", dict(text_config=TINY | dict(model_type="llama"), vision_config=CLIP),
                {}),
    "exaone4_5": ("exaone4_5", dict(
        text_config=TINY | dict(model_type="exaone4", sliding_window=None,
                                layer_types=["full_attention"] * 2),
        vision_config=VISION | dict(num_key_value_heads=1, fullatt_block_indexes=[0])),
        {}),
}
# Multimodal models that are stored with their vision tensors, for tests of quantization.
WHOLE = {"gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"}
MULTIMODAL = {kind for kind, options, _ in (MODELS | CHECKED).values() if "text_config" in options}


ENCODERS = {"bert", "roberta", "xlm-roberta", "modernbert"}
# Encoders, and the matrices of GPT-2, which are stored transposed.
NO_GRADS = ENCODERS | {"gpt2", "phi4_multimodal"}


def published(model):
    """The parameters of a model under the names that published checkpoints have."""
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        return load_file(pathlib.Path(tmp) / "model.safetensors")


def predictor(tensors, layers):
    """GLM's checkpoints have one more layer, which predicts the token after the next one."""
    first, last = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    embed = tensors["model.embed_tokens.weight"]
    return {n.replace(first, last): t for n, t in tensors.items() if n.startswith(first)} | {
        last + "eh_proj.weight": torch.cat([embed[:embed.shape[1]]] * 2, 1).contiguous(),
        last + "embed_tokens.weight": embed, last + "shared_head.head.weight": embed}


def fill(model, rng, embed_std):
    """Weights large enough that attention is far from uniform and softcaps bend."""
    for name, p in model.named_parameters():
        std = 0.2
        if p.dim() >= 2:
            std = embed_std if "embed" in name or "lm_head" in name else 1.5 / p.shape[-1] ** 0.5
        p.data.normal_(0, std, generator=rng)
        if p.dim() == 1 and re.search(r"[nN]orm(_[12])?\.weight$", name) \
                and not re.search("Gemma[^4]", type(model).__name__):
            p.data += 1
    for name, b in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            b.data = torch.empty_like(b).normal_(0, 0.2, generator=rng).half().float()
        if name.endswith("layer_scalar"):
            b.data = torch.empty_like(b).uniform_(0.5, 1, generator=rng).half().float()
    for p in model.parameters():
        p.data = p.data.half().float()


def write_config(directory, edits):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in edits.items():
        if key in ("omni", "old", "wrapped"):
            continue
        elif key == "global":  # as published, instead of transformers 5's per_layer_config
            text = config["text_config"]
            one = text.pop("per_layer_config").popitem()[1]
            text |= {"global_head_dim": one["head_dim"],
                     "num_global_key_value_heads": one["num_key_value_heads"]}
        elif key == "m3":  # as published
            text = config["text_config"]
            text["moe_layer_freq"] = [int(t == "sparse") for t in text.pop("mlp_layer_types")]
            text["sparse_attention_config"] = {
                "sparse_attention_freq": [int("sparse" in t) for t in text.pop("layer_types")],
                "sparse_block_size": text.pop("index_block_size"),
                "sparse_topk_blocks": text.pop("index_topk_blocks"),
                "sparse_num_index_heads": text.pop("index_n_heads"),
                "sparse_index_dim": text.pop("index_head_dim")}
            text["hidden_act"] = "swigluoai"
        elif key == "flat":
            config = config.pop("text_config") | config
        elif value is None:
            config.pop(key, None)
        else:
            config[key] = None if value == "null" else value
    config.pop("transformers_version", None)
    config["dtype"] = "float16"
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def auto_class(kind):
    if kind.endswith("_thinker"):
        return {"qwen2_5_omni_thinker": transformers.Qwen2_5OmniThinkerForConditionalGeneration,
                "qwen3_omni_moe_thinker":
                    transformers.Qwen3OmniMoeThinkerForConditionalGeneration}[kind]
    return transformers.AutoModelForImageTextToText if kind in MULTIMODAL \
        else transformers.AutoModelForMaskedLM if kind in ENCODERS \
        else transformers.AutoModelForCausalLM


def load(directory, kind):
    # The eager attention of Falcon adds the ALiBi biases twice.
    return auto_class(kind).from_pretrained(
        directory, dtype=torch.float32,
        attn_implementation="sdpa" if kind == "falcon" else "eager").eval()


def one_by_one(tensors):
    """The same with a matrix for each expert where they are stacked: [experts][out][in], or
    [experts][in][out]; the rows of gate and up alternate in gpt-oss."""
    out = {}
    hidden = next(t for n, t in tensors.items() if "norm" in n).shape[0]
    for name, t in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj|"
                             r"(.*\.block_sparse_moe)\.(input|output)_linear\.weight", name)
        if not found:
            out[name] = t
            continue
        both = (found[2] or found[4]) in ("gate_up", "input")
        down = name.replace("gate_up", "down").replace("input_linear", "output_linear")
        if tensors[down].shape[1] != hidden:
            t = t.transpose(1, 2)
        for e, w in enumerate(t):
            gate_up = (w[::2], w[1::2]) if name + "_bias" in tensors else w.chunk(2)
            for part, matrix in zip(("gate", "up"), gate_up) if both else (("down", w),):
                out[f"{found[1] or found[3] + '.experts'}.{e}.{part}_proj.weight"] = matrix
    return out


def write_grads(path, model, ids, stored=published, **inputs):
    """Gradients of the sum of -ln p(next token): of each, its norm and two projections."""
    logits = model(ids, **inputs).logits[0, :-1].float()
    torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
    for p in model.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    grads = {}
    for name, g in one_by_one(stored(model)).items():
        g = g.double().flatten()
        if not g.any():  # what sees images
            continue
        i = torch.arange(g.numel(), dtype=torch.float64)
        projections = [g.norm(), (g * torch.cos(i)).sum(), (g * torch.cos(i * i % 1009)).sum()]
        grads[name] = [float(v) for v in projections]
    path.write_text(json.dumps(grads, indent=1) + "\n")


def write_model(directory, kind, options, edits, seed):
    directory.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(seed)
    if kind.endswith("_thinker"):
        config = auto_class(kind).config_class(pad_token_id=None, **options)
    else:
        config = transformers.AutoConfig.for_model(kind, **{"pad_token_id": None} | options)
    model = (auto_class(kind)._from_config if kind.endswith("_thinker")
             else auto_class(kind).from_config)(config)
    # Small embeddings where the norms' epsilon is a default: then its value shows.
    fill(model, rng, 0.02 if kind == "opt" or None in (
        edits.get("rms_norm_eps", 1), edits.get("norm_epsilon", 1), edits.get("norm_eps", 1),
        edits.get("layer_norm_eps", 1)) else 1.0)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    write_config(directory, edits)
    files = {n: t.half().contiguous() for n, t in published(model).items()}
    if kind == "glm4_moe":
        files |= {n: t.clone() for n, t in predictor(files, config.num_hidden_layers).items()}
    if "old" in edits:
        for part in (".weight", ".gamma"), (".bias", ".beta"):
            files = {re.sub("LayerNorm" + part[0], "LayerNorm" + part[1], n): t
                     for n, t in files.items()}
    save_file(files, directory / "model.safetensors", {"format": "pt"})
    # The truth is what transformers makes of the files, not of the objects they came from.
    read = load(directory, kind)
    assert all(torch.equal(t, read.state_dict()[n]) for n, t in model.state_dict().items()), \
        "transformers has read other weights"
    model = read
    if "bare" in directory.name:  # the base model's own names lack "model."
        save_file({n.removeprefix("model."): t for n, t in files.items()},
                  directory / "model.safetensors", {"format": "pt"})
    if kind in (MULTIMODAL | {"phi4_multimodal"}) - WHOLE:
        files = {n: t for n, t in files.items() if not re.search("vision|visual|audio|extend", n)}
        save_file(files, directory / "model.safetensors", {"format": "pt"})
    if "wrapped" in edits:  # linears that have adapters
        linear = re.compile("(proj)(?=.weight)")
        save_file({linear.sub(r"\1.base_layer", n): t for n, t in files.items()},
                  directory / "model.safetensors", {"format": "pt"})
        write_config(directory, {"model_type": edits["wrapped"], "audio_config": None,
                                 "vision_config": None})
    ids = torch.randint(0, config.get_text_config().vocab_size, (1, TOKENS), generator=rng)
    if kind in ENCODERS:
        ids[ids == 1] = 2  # RoBERTa gives padding no position
    with torch.no_grad():
        logits = model(ids).logits[0]
    np.save(directory / "logits.npy", logits.numpy().astype("<f4"))
    ids[0].numpy().astype("<u2").tofile(directory / "ids.u16")
    if "omni" in edits:
        path = directory / "config.json"
        path.write_text(json.dumps({"model_type": edits["omni"], "thinker_config": json.loads(
            path.read_text())}, indent=1, sort_keys=True) + "\n")
    unsupported = re.compile("kv_b_proj|A_log|layer_scalar|conv\\.conv|altup|experts\\.router|"
                             "sink_bias")
    clipped = "clip_qkv" in options.get("attn_config", {})
    if kind not in NO_GRADS and not clipped and not any(unsupported.search(n) for n in files):
        write_grads(directory / "grads.json", model, ids)


def write_older(directory, kind, options, config, seed):
    """The same for a family that transformers lacks."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(seed)
    base = transformers.AutoConfig.for_model(older.BASE[kind], pad_token_id=None, **options)
    model = transformers.AutoModelForCausalLM.from_config(base, attn_implementation="eager").eval()
    fill(model, rng, 1.0)
    config = config | {"model_type": kind, "dtype": "float16"}
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")

    def stored(model):
        return older.tensors(kind, published(model), base.num_key_value_heads)
    save_file({n: t.half() for n, t in stored(model).items()}, directory / "model.safetensors",
              {"format": "pt"})
    ids = torch.randint(0, base.vocab_size, (1, TOKENS), generator=rng)
    inputs = older.prepare(model, config, TOKENS)
    with torch.no_grad():
        np.save(directory / "logits.npy", model(ids, **inputs).logits[0].numpy().astype("<f4"))
    ids[0].numpy().astype("<u2").tofile(directory / "ids.u16")
    if kind not in NO_GRADS:
        write_grads(directory / "grads.json", model, ids, stored, **inputs)


def write_models(root, seed, models):
    for i, (name, (kind, options, edits)) in enumerate(models.items()):
        write = write_older if kind in older.BASE else write_model
        write(root / name, kind, options, edits, seed + i)


def write_all_grads():
    golden = ROOT / "tests/golden"
    places = [(d, d / "ids.u16", d / "grads.json") for d in sorted((golden / "models").iterdir())
              if (d / "grads.json").exists()]
    places.append((ROOT / "examples/nano-llama", golden / "nano_ids.u16",
                   golden / "nano_grads.json"))
    for directory, ids, grads in places:
        ids = torch.from_numpy(np.fromfile(ids, dtype="<u2").astype(np.int64))[None]
        kind = MODELS[directory.name][0] if directory.name in MODELS else "llama"
        if kind not in older.BASE:  # else transformers cannot read the files
            write_grads(grads, load(directory, kind), ids)


def write_nano(shared):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(shared / "checkpoints/nano-llama/tokenizer.json"))
    text = (shared / "data/prose.eval.txt").read_text()[:4000]
    ids = tok.encode(text, add_special_tokens=False).ids[:64]
    np.array(ids, dtype="<u2").tofile(ROOT / "tests/golden/nano_ids.u16")


def check(binaries):
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"make_model_golden.py --check: seed {seed}")
    with tempfile.TemporaryDirectory() as tmp:
        write_models(pathlib.Path(tmp), seed, MODELS | CHECKED)
        env = os.environ | {"QT_MODELS": tmp}
        return max(subprocess.run([b], env=env, cwd=ROOT).returncode for b in binaries)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nano", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--grads", action="store_true")
    parser.add_argument("--only", metavar="NAME", nargs="+")
    parser.add_argument("--check", metavar="TEST", nargs="+")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.check:
        sys.exit(check(args.check))
    if args.nano:
        write_nano(args.nano)
    elif args.grads:
        write_all_grads()
    elif args.only:
        for i, (name, model) in enumerate(MODELS.items()):
            if name in args.only:
                write_models(ROOT / "tests/golden/models", 1 + i, {name: model})
    else:
        write_models(ROOT / "tests/golden/models", 1, MODELS)


if __name__ == "__main__":
    main()
