"""Small random models of every architecture that GGUF exports have, made by transformers."""
import os
import shutil

import torch

NANO = os.path.join(os.path.dirname(__file__), "../../examples/nano-llama")


def rope(**options):
    return {"rope_parameters": {"rope_theta": 10000.0, **options}}


EXPERTS = dict(moe_intermediate_size=96, num_experts=6, num_experts_per_tok=2,
               decoder_sparse_step=1, mlp_only_layers=[])
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
LATENT = dict(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=48,
              moe_intermediate_size=96, num_experts_per_tok=2, first_k_dense_replace=1)
ARCHS = {
    "llama": ("llama", dict(head_dim=32, attention_bias=True, mlp_bias=True)),
    "llama3": ("llama", dict(head_dim=32, **rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=128))),
    "llama_linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "llama_yarn": ("llama", YARN),
    "mistral": ("mistral", dict(head_dim=64)),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", YARN),
    "qwen3": ("qwen3", dict(head_dim=64)),
    "qwen2_moe": ("qwen2_moe", dict(shared_expert_intermediate_size=160, norm_topk_prob=False,
                                    **EXPERTS)),
    "qwen3_moe": ("qwen3_moe", dict(head_dim=64, norm_topk_prob=True, **EXPERTS)),
    "ministral3": ("ministral3", dict(head_dim=64, sliding_window=None, **rope(
        rope_type="yarn", factor=16.0, original_max_position_embeddings=32, beta_fast=32.0,
        beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1))),
    "glm4_moe": ("glm4_moe", dict(
        head_dim=64, attention_bias=True, use_qk_norm=True, moe_intermediate_size=96,
        n_routed_experts=6, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=1.5, n_group=1, topk_group=1,
        **rope(rope_type="default", partial_rotary_factor=0.5))),
    "olmoe": ("olmoe", dict(num_key_value_heads=4, intermediate_size=96, num_experts=6,
                            num_experts_per_tok=2, norm_topk_prob=False)),
    "dots1": ("dots1", dict(
        num_key_value_heads=4, head_dim=32, moe_intermediate_size=96, n_routed_experts=6,
        n_shared_experts=2,
        num_experts_per_tok=2, first_k_dense_replace=1, norm_topk_prob=True,
        routed_scaling_factor=1.5, n_group=1, topk_group=1, max_window_layers=4)),
    "deepseek_v3": ("deepseek_v3", dict(
        num_key_value_heads=4, q_lora_rank=96, **LATENT, n_routed_experts=8, n_shared_experts=1,
        n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, **rope(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=128, mscale=1.0,
            mscale_all_dim=1.0))),
    "deepseek_v2": ("deepseek_v2", dict(
        num_key_value_heads=4, q_lora_rank=None, num_hidden_layers=27, **LATENT,
        n_routed_experts=8, n_shared_experts=2, topk_method="greedy", norm_topk_prob=False,
        routed_scaling_factor=1.0, **rope(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=128, mscale=0.707,
            mscale_all_dim=0.707))),
    "glm4_moe_lite": ("glm4_moe_lite", dict(
        num_key_value_heads=4, q_lora_rank=96, **LATENT, n_routed_experts=8, n_shared_experts=1,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.8, **rope(
            rope_type="default"))),
    "ernie4_5_moe": ("ernie4_5_moe", dict(
        head_dim=32, moe_intermediate_size=96, moe_num_experts=6, moe_k=2,
        moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=3,
        moe_layer_interval=1)),
    "minimax_m2": ("minimax_m2", dict(
        head_dim=64, intermediate_size=96, num_local_experts=6, num_experts_per_tok=2,
        rotary_dim=32, **rope(rope_type="default", partial_rotary_factor=0.5))),
    "lfm2": ("lfm2", dict(num_hidden_layers=6, full_attn_idxs=[2, 4], block_multiple_of=32)),
    "lfm2_moe": ("lfm2_moe", dict(
        num_hidden_layers=6, layer_types=["conv", "conv", "full_attention"] * 2,
        moe_intermediate_size=96, num_experts=6, num_experts_per_tok=2, num_dense_layers=2,
        routed_scaling_factor=1.0)),
    "llama4": ("llama4_text", dict(
        head_dim=32, intermediate_size=96, intermediate_size_mlp=256, num_local_experts=6,
        num_experts_per_tok=1, interleave_moe_layer_step=2, num_hidden_layers=8, **rope(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=128))),
    "hunyuan_dense": ("hunyuan_v1_dense", dict(head_dim=64, attention_bias=False, **rope(
        rope_type="dynamic", alpha=100.0, factor=1.0))),
    "hunyuan_moe": ("hunyuan_v1_moe", dict(
        head_dim=64, intermediate_size=96, num_experts=6, moe_topk=2, attention_bias=False,
        **rope(rope_type="dynamic", alpha=100.0, factor=1.0))),
    "qwen3_next": ("qwen3_next", dict(
        head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_conv_kernel_dim=4, shared_expert_intermediate_size=160,
        norm_topk_prob=True, **EXPERTS, **rope(rope_type="default", partial_rotary_factor=0.25))),
    "qwen3_5": ("qwen3_5_text", dict(
        head_dim=64, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_conv_kernel_dim=4, num_hidden_layers=8, **rope(
            rope_type="default", partial_rotary_factor=0.25, mrope_section=[3, 3, 2],
            mrope_interleaved=True))),
    "qwen3_5_moe": ("qwen3_5_moe_text", dict(
        head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_conv_kernel_dim=4, moe_intermediate_size=96,
        shared_expert_intermediate_size=160, num_experts=6, num_experts_per_tok=2, **rope(
            rope_type="default", partial_rotary_factor=0.25, mrope_section=[3, 3, 2],
            mrope_interleaved=True))),
    "gpt_oss": ("gpt_oss", dict(head_dim=32, intermediate_size=96, num_local_experts=6,
                                num_experts_per_tok=2, sliding_window=32, **rope(
                                    rope_type="yarn", factor=4.0, truncate=True,
                                    original_max_position_embeddings=128))),
    "gemma": ("gemma", dict(head_dim=64)),
    "gemma2": ("gemma2", dict(head_dim=64, query_pre_attn_scalar=64, sliding_window=32)),
    "gemma3": ("gemma3_text", dict(head_dim=64, query_pre_attn_scalar=64, sliding_window=32,
                                   num_hidden_layers=7)),
    "phi3": ("phi3", {}),
    "phi3_partial": ("phi3", rope(rope_type="default", partial_rotary_factor=0.5)),
    "phi3_long": ("phi3", dict(original_max_position_embeddings=300, **rope(
        rope_type="longrope", short_factor=[1.0 + 0.05 * i for i in range(16)],
        long_factor=[1.5 + 0.3 * i for i in range(16)]))),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", dict(sliding_window=32, rope_parameters={
        "full_attention": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                               original_max_position_embeddings=128),
        "sliding_attention": dict(rope_type="default", rope_theta=10000.0)})),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=4)),
    "granite": ("granite", dict(embedding_multiplier=6.0, attention_multiplier=0.1,
                                residual_multiplier=0.3, logits_scaling=4.0)),
    "granitemoe": ("granitemoe", dict(
        embedding_multiplier=6.0, attention_multiplier=0.1, residual_multiplier=0.3,
        logits_scaling=4.0, num_local_experts=6, num_experts_per_tok=2)),
    "seed_oss": ("seed_oss", dict(head_dim=64, attention_bias=True, attention_out_bias=False)),
    "ernie4_5": ("ernie4_5", dict(head_dim=64, use_bias=False)),
    "exaone4": ("exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 4, **rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=128))),
    "exaone4_windows": ("exaone4", dict(num_hidden_layers=64, intermediate_size=128,
                                        sliding_window=32, sliding_window_pattern=4)),
    "glm4": ("glm4", dict(head_dim=32, attention_bias=True)),
}
# qtool does not read these files.
WRITTEN_ONLY = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "olmoe", "dots1", "ernie4_5_moe",
                "minimax_m2", "hunyuan_dense", "hunyuan_moe", "llama4", "lfm2", "lfm2_moe", "qwen3_next",
                "qwen3_5", "qwen3_5_moe"}


def scale_of(name, kind, shape):
    if "embed" in name:
        return 0.1 if "gemma" in kind or "granite" in kind else 1.0
    if "correction_bias" in name:
        return 0.1  # more makes llama.cpp normalize by its smallest sum of routing weights
    if len(shape) == 1:
        return 0.3
    return 0.5 if name.endswith("gate.weight") else (2.0 / shape[-1]) ** 0.5


def make_model(path, kind, options):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{
        **dict(vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
               num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
               bos_token_id=0, eos_token_id=1, pad_token_id=None,
               tie_word_embeddings=kind in ("gemma", "gemma2", "gemma3_text", "smollm3", "granite",
                                             "granitemoe")),
        **options})
    model = AutoModelForCausalLM.from_config(config)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            middle = 1.0 if "norm" in name and "gemma" not in kind else 0.0
            p.copy_(middle + scale_of(name, kind, p.shape) * torch.randn(p.shape, generator=rng))
    shutil.rmtree(path, ignore_errors=True)
    model.half().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(NANO, name), path)
