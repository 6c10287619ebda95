"""Families whose code is not part of transformers, made of models that compute the same.

InternLM2, Baichuan, Qwen (1), ChatGLM and Yi are Llama, Qwen2 or GLM with other names, fused
matrices and other options. make_model_golden.py makes a model of transformers with the options of
`base`; `tensors` stores its parameters as the family does, and `prepare` makes the forward pass
compute what the published code of the family adds: ALiBi (arXiv 2108.12409) instead of the rotary
embedding, and a head whose rows are normalized (Baichuan 2).
"""
import math
import re

import torch

BASE = {"Yi": "llama", "baichuan": "llama", "chatglm": "glm", "internlm2": "llama",
        "qwen": "qwen2"}

NAMES = {
    "Yi": [("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2")],
    "baichuan": [],
    "chatglm": [
        (r"model\.embed_tokens", "transformer.embedding.word_embeddings"),
        (r"model\.layers", "transformer.encoder.layers"),
        (r"model\.norm", "transformer.encoder.final_layernorm"),
        ("lm_head", "transformer.output_layer"), (r"self_attn\.o_proj", "self_attention.dense"),
        ("gate_up_proj", "dense_h_to_4h"), ("down_proj", "dense_4h_to_h")],
    "internlm2": [
        ("embed_tokens", "tok_embeddings"), ("lm_head", "output"),
        (r"self_attn\.o_proj", "attention.wo"), ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"), (r"mlp\.gate_proj", "feed_forward.w1"),
        (r"mlp\.up_proj", "feed_forward.w3"), (r"mlp\.down_proj", "feed_forward.w2")],
    "qwen": [
        (r"model\.embed_tokens", "transformer.wte"), (r"model\.layers", "transformer.h"),
        (r"model\.norm", "transformer.ln_f"), (r"self_attn\.o_proj", "attn.c_proj"),
        ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
        (r"mlp\.gate_proj", "mlp.w2"), (r"mlp\.up_proj", "mlp.w1"),
        (r"mlp\.down_proj", "mlp.c_proj")],
}
FUSED = {"baichuan": "self_attn.W_pack", "chatglm": "self_attention.query_key_value",
         "internlm2": "attention.wqkv", "qwen": "attn.c_attn"}


def rename(kind, name):
    for old, new in NAMES[kind]:
        name = re.sub(old, new, name)
    return name


def fuse(kind, q, k, v, kv_heads):
    if kind != "internlm2":
        return torch.cat([q, k, v])
    groups = [x.reshape(kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(groups, 1).reshape(-1, *q.shape[1:])


def tensors(kind, published, kv_heads):
    """Parameters (or their gradients) by their names in transformers -> as the family has them."""
    out = {}
    for name, t in published.items():
        if kind in FUSED and re.search(r"self_attn\.[kv]_proj", name):
            continue
        if kind in FUSED and "self_attn.q_proj" in name:
            t = fuse(kind, t, *(published[name.replace("q_proj", f"{x}_proj")] for x in "kv"),
                     kv_heads)
            name = name.replace("self_attn.q_proj", FUSED[kind])
        out[rename(kind, name)] = t.contiguous()
    return out


def slopes(heads):
    """As in the code of the paper."""
    if math.log2(heads).is_integer():
        first = 2 ** (-2 ** -(math.log2(heads) - 3))
        return [first ** (i + 1) for i in range(heads)]
    n = 2 ** math.floor(math.log2(heads))
    return slopes(n) + slopes(2 * n)[0::2][:heads - n]


def prepare(model, config, tokens):
    """Changes the model to what `config` says; returns arguments of its forward pass."""
    if config["model_type"] != "baichuan":
        return {}
    if "z_loss_weight" in config:
        model.lm_head.weight.data = torch.nn.functional.normalize(model.lm_head.weight.data)
    if "max_position_embeddings" in config:
        return {}
    model.model.rotary_emb.inv_freq.zero_()
    i = torch.arange(tokens)
    distance = (i[None] - i[:, None]).float()
    bias = torch.tensor(slopes(config["num_attention_heads"]))[:, None, None] * distance
    return {"attention_mask": bias.masked_fill(distance > 0, torch.finfo(torch.float32).min)[None]}
