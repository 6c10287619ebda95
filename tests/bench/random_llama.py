#!/usr/bin/env python3
"""A checkpoint in the shape of Llama 3 8B or 70B, or of the mixture Qwen3 30B-A3B, with random
weights, LAYERS decoder layers and a small vocabulary, and token ids: to time calibration where no
real checkpoint is at hand. Needs NumPy.

usage: random_llama.py OUT LAYERS [8b|70b|30b-a3b [TOKENS]]
writes OUT/config.json, model.safetensors, and ids.u16 with TOKENS ids (default 131072)
"""
import json
import os
import sys

import numpy as np

SHAPE = sys.argv[3] if len(sys.argv) > 3 else "8b"
HIDDEN, INNER, HEADS, KV_HEADS = {
    "8b": (4096, 14336, 32, 8), "70b": (8192, 28672, 64, 8), "30b-a3b": (2048, 768, 32, 4)}[SHAPE]
EXPERTS, CHOSEN = (128, 8) if SHAPE == "30b-a3b" else (0, 0)
HEAD, VOCAB = 128, 4096
TOKENS = int(sys.argv[4]) if len(sys.argv) > 4 else 1 << 17
MLP = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
}
if EXPERTS:
    LINEARS["mlp.gate"] = (EXPERTS, HIDDEN)
    LINEARS |= {f"mlp.experts.{i}.{name}": shape for i in range(EXPERTS) for name, shape in MLP.items()}
else:
    LINEARS |= {f"mlp.{name}": shape for name, shape in MLP.items()}
NORMS = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
if EXPERTS:
    NORMS |= {"self_attn.q_norm": HEAD, "self_attn.k_norm": HEAD}
FAMILY = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN, "moe_intermediate_size": INNER, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": []} if EXPERTS else {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def main():
    out, blocks = sys.argv[1], int(sys.argv[2])
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for block in range(blocks):
        prefix = f"model.layers.{block}."
        for norm, size in NORMS.items():
            shapes[prefix + norm + ".weight"] = (size,)
        for name, shape in LINEARS.items():
            shapes[prefix + name + ".weight"] = shape

    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    os.makedirs(out, exist_ok=True)
    with open(f"{out}/model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            if len(shape) == 1:
                values = rng.random(shape, np.float32) + 0.5
            else:
                size = 0.02 if "embed" in name else shape[1] ** -0.5
                values = rng.standard_normal(shape, np.float32) * np.float32(size)
            f.write(values.astype(np.float16).tobytes())
    rng.integers(0, VOCAB, TOKENS).astype(np.uint16).tofile(f"{out}/ids.u16")
    with open(f"{out}/config.json", "w") as f:
        json.dump({
            **FAMILY, "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": INNER,
            "num_hidden_layers": blocks, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCAB,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "tie_word_embeddings": True, "torch_dtype": "float16"}, f)


main()
