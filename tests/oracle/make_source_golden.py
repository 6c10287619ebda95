#!/usr/bin/env python3
"""Writes tests/golden/sources: small quantized and stacked checkpoints, and what they stand for.

    usage: make_source_golden.py OUT      needs torch, numpy, safetensors, transformers,
                                          compressed-tensors, bitsandbytes, gguf

Each case is a directory with model.safetensors and config.json, or model.gguf, and
expected.safetensors. The expected
tensors come from the dequantization of the packages that write the format, where a package can run
on a CPU; those of GPTQ, AWQ and ModelOpt's NVFP4 come from the formulas of their documentation, in
NumPy. test_sources.c compares all bits.
"""
import json
import os
import sys

import numpy as np
import torch
from safetensors.torch import save_file

OUT = sys.argv[1]
LAYER = "model.layers.0."
BF16 = torch.bfloat16


def case(name, stored, expected, section=None, config=None, files=None, nested=False):
    path = os.path.join(OUT, name)
    os.makedirs(path, exist_ok=True)
    save_file({k: v.contiguous() for k, v in stored.items()}, f"{path}/model.safetensors")
    save_file({k: v.contiguous() for k, v in expected.items()}, f"{path}/expected.safetensors")
    doc = {"model_type": "llama", "dtype": "bfloat16", **(config or {})}
    if nested:
        doc = {"model_type": "gemma3", "text_config": doc}
    if section:
        (doc["text_config"] if nested else doc)["quantization_config"] = section
    with open(f"{path}/config.json", "w") as f:
        json.dump(doc, f, indent=2)
    for file, value in (files or {}).items():
        with open(f"{path}/{file}", "w") as f:
            json.dump(value, f)


def normal(*shape):
    return torch.randn(*shape) * 0.05


def e4m3(*shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0x7E  # NaN
    return codes.view(torch.float8_e4m3fn)


# ---- FP8 of transformers ------------------------------------------------------------------------


def dequantize(w, s):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(w, s, output_dtype=BF16)


def fp8_transformers():
    w, v = LAYER + "self_attn.q_proj", LAYER + "mlp.down_proj"
    norm = {LAYER + "input_layernorm.weight": torch.ones(32, dtype=BF16)}
    a, b = e4m3(32, 96), e4m3(16, 32)
    sa, sb = torch.rand(2, 3) * 1e-3, torch.rand(1, 1) * 1e-2
    case("fp8_block",
         {w + ".weight": a, w + ".weight_scale_inv": sa, v + ".weight": b,
          v + ".weight_scale_inv": sb, w + ".input_scale": torch.ones(1), **norm},
         {w + ".weight": dequantize(a, sa), v + ".weight": dequantize(b, sb), **norm},
         {"quant_method": "fp8", "weight_block_size": [16, 32]})
    exponents = torch.randint(110, 125, (2, 3), dtype=torch.uint8)
    case("fp8_e8m0", {w + ".weight": a, w + ".scale": exponents.view(torch.float8_e8m0fnu)},
         {w + ".weight": dequantize(a, exponents)},
         {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0"})
    # MXFP8: a scale for 32 columns of a row.
    mx = torch.randint(110, 125, (32, 3), dtype=torch.uint8)
    case("mxfp8", {w + ".weight": a, w + ".weight_scale": mx}, {w + ".weight": dequantize(a, mx)},
         {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"})
    # Stacked experts with scales.
    gate_up, down = e4m3(2, 32, 64), e4m3(2, 64, 16)
    sg, sd = torch.rand(2, 2, 2) * 1e-3, torch.rand(2, 4, 1) * 1e-3
    experts = LAYER + "mlp.experts."
    expected = {}
    for e in range(2):
        full, low = dequantize(gate_up[e], sg[e]), dequantize(down[e], sd[e])
        expected[f"{experts}{e}.gate_proj.weight"] = full[:16]
        expected[f"{experts}{e}.up_proj.weight"] = full[16:]
        expected[f"{experts}{e}.down_proj.weight"] = low
    case("fp8_stacked",
         {experts + "gate_up_proj": gate_up, experts + "gate_up_proj_scale_inv": sg,
          experts + "down_proj": down, experts + "down_proj_scale_inv": sd}, expected,
         {"quant_method": "fp8", "weight_block_size": [16, 32]}, {"model_type": "qwen3_moe"})
    # FP4 experts of DeepSeek V4.
    codes = torch.randint(0, 256, (8, 32), dtype=torch.uint8).view(torch.int8)
    scale = torch.randint(110, 125, (8, 2), dtype=torch.uint8)
    case("fp4_deepseek", {w + ".weight": codes, w + ".scale": scale.view(torch.float8_e8m0fnu)},
         {w + ".weight": dequantize(codes, scale)}, {"quant_method": "fp8"})


def fp8_transposed():
    """Llama 4 in fbgemm_fp8: stacked as [input][output], a scale per output."""
    gate_up, down = e4m3(2, 16, 24), e4m3(2, 12, 16)
    sg, sd = torch.rand(2, 1, 24) * 1e-3, torch.rand(2, 1, 16) * 1e-3
    experts = LAYER + "feed_forward.experts."
    expected = {}
    for e in range(2):
        full, low = dequantize(gate_up[e], sg[e]).T, dequantize(down[e], sd[e]).T
        expected[f"{experts}{e}.gate_proj.weight"] = full[:12]
        expected[f"{experts}{e}.up_proj.weight"] = full[12:]
        expected[f"{experts}{e}.down_proj.weight"] = low
    case("fp8_transposed",
         {experts + "gate_up_proj": gate_up, experts + "gate_up_proj_scale": sg,
          experts + "down_proj": down, experts + "down_proj_scale": sd}, expected,
         {"quant_method": "fbgemm_fp8"}, {"model_type": "llama4_text"})


# ---- MXFP4 of gpt-oss ---------------------------------------------------------------------------


def mxfp4():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts = LAYER + "mlp.experts."
    blocks = {"gate_up_proj": (2, 64, 1), "down_proj": (2, 32, 1)}  # 2 experts, H = I = 32
    stored, dense = {}, {}
    for name, shape in blocks.items():
        stored[experts + name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        stored[experts + name + "_scales"] = torch.randint(112, 125, shape, dtype=torch.uint8)
        dense[name] = convert_moe_packed_tensors(stored[experts + name + "_blocks"],
                                                 stored[experts + name + "_scales"])
        stored[experts + name + "_bias"] = normal(*shape[:2]).to(BF16)
    case("mxfp4", stored, gpt_oss(experts, dense, stored), {"quant_method": "mxfp4"},
         {"model_type": "gpt_oss"})
    dense = {"gate_up_proj": normal(2, 12, 10).to(BF16), "down_proj": normal(2, 5, 12).to(BF16)}
    stored = {experts + k: v for k, v in dense.items()}
    stored[experts + "gate_up_proj_bias"] = normal(2, 10).to(BF16)
    stored[experts + "down_proj_bias"] = normal(2, 12).to(BF16)
    case("stacked_gpt_oss", stored, gpt_oss(experts, dense, stored), None,
         {"model_type": "gpt_oss"})


def gpt_oss(experts, dense, stored):
    """What the module computes: gate = x @ W[..., ::2] + b[..., ::2]."""
    expected = {}
    for e in range(2):
        for i, name in enumerate(["gate_proj", "up_proj"]):
            expected[f"{experts}{e}.{name}.weight"] = dense["gate_up_proj"][e, :, i::2].T
            expected[f"{experts}{e}.{name}.bias"] = stored[experts + "gate_up_proj_bias"][e, i::2]
        expected[f"{experts}{e}.down_proj.weight"] = dense["down_proj"][e].T
        expected[f"{experts}{e}.down_proj.bias"] = stored[experts + "down_proj_bias"][e]
    return expected


# ---- compressed-tensors -------------------------------------------------------------------------


def compressed_tensors():
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def one(name, form, args, state, section=None):
        """state: without the weight, which is random."""
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        compressor = BaseCompressor.get_value_from_registry(form)
        state["weight"] = normal(*state.pop("shape")).to(BF16)
        packed = compressor.compress(dict(state), scheme)
        dense = compressor.decompress(dict(packed), scheme)["weight"]
        w = LAYER + "self_attn.q_proj."
        case(name, {w + k: v.detach() for k, v in packed.items()},
             {w + "weight": dense.detach().to(BF16)},
             {"quant_method": "compressed-tensors", "format": form,
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}},
             nested=name == "ct_nvfp4")

    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    scale = lambda *shape: (torch.rand(*shape) * 0.01 + 0.001).to(BF16)
    one("ct_int4", "pack-quantized", {**group, "symmetric": True},
        {"shape": (16, 96), "weight_scale": scale(16, 3)})
    one("ct_int4_zero", "pack-quantized", {**group, "symmetric": False},
        {"shape": (16, 96), "weight_scale": scale(16, 3),
         "weight_zero_point": torch.randint(-8, 8, (16, 3), dtype=torch.int8)})
    one("ct_int8", "pack-quantized", {**group, "num_bits": 8, "symmetric": True},
        {"shape": (8, 64), "weight_scale": scale(8, 2) / 16})
    one("ct_w8a8", "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        {"shape": (8, 40), "weight_scale": scale(8, 1) / 16})
    one("ct_fp8_channel", "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        {"shape": (8, 40), "weight_scale": scale(8, 1) / 16})
    one("ct_fp8_tensor", "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
        {"shape": (8, 40), "weight_scale": scale(1) / 16})
    one("ct_nvfp4", "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
         "symmetric": True, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
        {"shape": (8, 64), "weight_scale": torch.rand(8, 4) * 400 + 20,
         "weight_global_scale": torch.tensor([7919.3])})
    one("ct_mxfp4", "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
         "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},
        {"shape": (8, 64), "weight_scale": 2.0 ** torch.randint(-8, -4, (8, 2)).to(BF16)})


# ---- by their documentation ---------------------------------------------------------------------


def modelopt():
    """value = E2M1 * (weight_scale * weight_scale_2)"""
    table = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = np.random.randint(0, 256, (8, 32), dtype=np.uint8)
    scale, scale_2 = (torch.rand(8, 4) * 400 + 20).to(torch.float8_e4m3fn), np.float32(1 / 7919.3)
    values = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(8, 64)
    values = values * np.repeat(scale.float().numpy() * scale_2, 16, 1)
    w, v = LAYER + "self_attn.q_proj.", LAYER + "self_attn."
    case("modelopt_nvfp4",
         {w + "weight": torch.tensor(codes), w + "weight_scale": scale,
          w + "weight_scale_2": torch.tensor(scale_2), w + "input_scale": torch.tensor(0.1),
          v + "k_proj.k_scale": torch.tensor(0.5)},
         {w + "weight": torch.tensor(values).to(BF16)},
         None, None, {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}})


def pack(codes, bits, axis):
    """Packs codes into words of 32 bits along the axis, the first in the lowest bits."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, 0)
    per = 32 // bits
    words = sum(codes[i::per] << np.uint32(bits * i) for i in range(per))
    return torch.tensor(np.moveaxis(words.astype(np.uint32), 0, axis).view(np.int32).copy())


def gptq(name, bits, v2, act_order, dtype="float16"):
    n, k, groups = 24, 64, 4
    codes = np.random.randint(0, 2**bits, (k, n))
    zeros = np.random.randint(0 if v2 else 1, 2**bits, (groups, n))
    if not v2:
        zeros[0, :5] = 0  # stored as -1: borrows from the next field
        zeros[:, -1] = 3
    scales = (np.random.rand(groups, n) * 0.01 + 0.001).astype(np.float16)
    g_idx = np.arange(k) // (k // groups)
    if act_order:
        np.random.shuffle(g_idx)
    stored_zeros = pack(zeros, bits, 1).numpy().view(np.uint32)
    if not v2:
        stored_zeros = stored_zeros - np.uint32(sum(1 << b for b in range(0, 32, bits)))
    values = (codes - zeros[g_idx]).astype(np.float32) * scales[g_idx].astype(np.float32)
    w = LAYER + "self_attn.q_proj."
    case(name,
         {w + "qweight": pack(codes, bits, 0), w + "scales": torch.tensor(scales),
          w + "qzeros": torch.tensor(stored_zeros.view(np.int32)),
          w + "g_idx": torch.tensor(g_idx.astype(np.int32)),
          w + "bias": torch.ones(n, dtype=torch.float16)},
         {w + "weight": torch.tensor(values.T.copy()).to(getattr(torch, dtype)),
          w + "bias": torch.ones(n, dtype=torch.float16)},
         {"quant_method": "gptq", "bits": bits, "group_size": k // groups,
          "checkpoint_format": "gptq_v2" if v2 else "gptq"}, {"dtype": dtype})


def awq():
    n, k, groups = 24, 64, 2
    codes, zeros = np.random.randint(0, 16, (k, n)), np.random.randint(0, 16, (groups, n))
    scales = (np.random.rand(groups, n) * 0.01 + 0.001).astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    shuffle = lambda m: m.reshape(len(m), -1, 8)[:, :, order].reshape(len(m), -1)
    group = np.arange(k) // (k // groups)
    values = (codes - zeros[group]).astype(np.float32) * scales[group].astype(np.float32)
    w = LAYER + "self_attn.q_proj."
    case("awq",
         {w + "qweight": pack(shuffle(codes), 4, 1), w + "qzeros": pack(shuffle(zeros), 4, 1),
          w + "scales": torch.tensor(scales)},
         {w + "weight": torch.tensor(values.T.copy()).half()},
         {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32},
         {"dtype": "float16"})


# ---- bitsandbytes -------------------------------------------------------------------------------


def bitsandbytes():
    import bitsandbytes.functional as F

    def four(name, kind, nested, dtype):
        w = LAYER + "self_attn.q_proj.weight"
        matrix = normal(24, 72).to(dtype)
        packed, state = F.quantize_4bit(matrix, blocksize=64, compress_statistics=nested,
                                        quant_type=kind)
        stored = {w: packed}
        stored.update({f"{w}.{k}": v for k, v in state.as_dict(packed=True).items()})
        dense = F.dequantize_4bit(packed, state) + 0  # the CPU kernel has -0 where the table has 0
        case(name, stored, {w: dense},
             {"quant_method": "bitsandbytes", "load_in_4bit": True},
             {"dtype": str(dtype).split(".")[1]})

    four("bnb_nf4", "nf4", False, BF16)
    four("bnb_nf4_nested", "nf4", True, torch.float16)
    four("bnb_fp4", "fp4", False, BF16)
    w = LAYER + "self_attn.q_proj."
    codes = torch.randint(-127, 128, (8, 40), dtype=torch.int8)
    scb = torch.rand(8)
    dense = torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scb)
    case("bnb_int8", {w + "weight": codes, w + "SCB": scb,
                      w + "weight_format": torch.zeros((), dtype=torch.uint8)},
         {w + "weight": dense.to(BF16)}, {"quant_method": "bitsandbytes", "load_in_8bit": True})


# ---- stacked experts and transposed matrices ----------------------------------------------------


def stacked():
    def experts(gate_up, down, names=("gate_proj", "up_proj", "down_proj"), prefix="mlp.experts."):
        width = gate_up.shape[1] // 2
        out = {}
        for e in range(len(gate_up)):
            for name, m in zip(names, (gate_up[e, :width], gate_up[e, width:], down[e])):
                out[f"{LAYER}{prefix}{e}.{name}.weight"] = m
        return out

    h, i, e = 12, 6, 3  # 2 I = H
    gate_up, down = normal(e, 2 * i, h).to(BF16), normal(e, h, i).to(BF16)
    p = LAYER + "mlp.experts."
    case("stacked", {p + "gate_up_proj": gate_up, p + "down_proj": down}, experts(gate_up, down),
         None, {"model_type": "qwen3_moe"})
    case("stacked_transposed",
         {LAYER + "feed_forward.experts.gate_up_proj": gate_up.transpose(1, 2),
          LAYER + "feed_forward.experts.down_proj": down.transpose(1, 2)},
         experts(gate_up, down, prefix="feed_forward.experts."), None, {"model_type": "llama4_text"})
    router = normal(e, h)
    case("stacked_mixtral",
         {p + "gate_up_proj": gate_up, p + "down_proj": down, LAYER + "mlp.gate.weight": router},
         {**experts(gate_up, down, ("w1", "w3", "w2"), "block_sparse_moe.experts."),
          LAYER + "block_sparse_moe.gate.weight": router}, None, {"model_type": "mixtral"})
    g = LAYER + "block_sparse_moe."
    case("stacked_granite",
         {g + "input_linear.weight": gate_up, g + "output_linear.weight": down},
         experts(gate_up, down, prefix="block_sparse_moe.experts."), None,
         {"model_type": "granitemoe"})
    m = LAYER + "mixer.experts."
    up, low = normal(e, i, h), normal(e, h, i)
    case("stacked_ungated", {m + "up_proj": up, m + "down_proj": low},
         {f"{m}{x}.{n}_proj.weight": t[x] for x in range(e) for n, t in (("up", up), ("down", low))},
         None, {"model_type": "nemotron_h", "hidden_size": h})
    w, wpe = normal(10, 30), normal(8, 10)
    case("conv1d", {"transformer.h.0.attn.c_attn.weight": w, "transformer.wpe.weight": wpe},
         {"transformer.h.0.attn.c_attn.weight": w.T, "transformer.wpe.weight": wpe}, None,
         {"model_type": "gpt2"})


# ---- GGUF ---------------------------------------------------------------------------------------

# Offsets of F16 numbers in a block; the other bytes may have any value.
F16_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0],
          "IQ4_XS": [0], "MXFP4": []}


def blocks(kind, rows, cols):
    """Random rows of a type, and what the gguf package makes of them."""
    import gguf

    kind = gguf.GGMLQuantizationType[kind]
    count, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.randint(0, 256, (rows * cols // count, size), dtype=np.uint8)
    for at in F16_AT[kind.name]:
        scale = (np.random.randn(len(data)) * 1e-3).astype(np.float16)
        data[:, at:at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if kind.name == "MXFP4":
        data[:, 0] = np.random.randint(115, 125, len(data))
    data = data.reshape(rows, cols // count * size)
    return data, torch.from_numpy(gguf.dequantize(data, kind).astype(np.float16)), kind


def gguf_case(name, arch, keys, tensors, expected):
    """tensors: name -> values, or (bytes, type)."""
    import gguf

    path = os.path.join(OUT, name)
    os.makedirs(path, exist_ok=True)
    w = gguf.GGUFWriter(f"{path}/model.gguf", arch)
    for key, value in keys.items():
        (w.add_float32 if isinstance(value, float) else w.add_uint32)(f"{arch}.{key}", value)
    for tensor, value in tensors.items():
        if isinstance(value, tuple):
            w.add_tensor(tensor, value[0], raw_dtype=value[1])
        elif value.dtype == BF16:
            w.add_tensor(tensor, value.contiguous().view(torch.uint16).numpy(),
                         raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            w.add_tensor(tensor, value.numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    save_file({k: v.contiguous() for k, v in expected.items()}, f"{path}/expected.safetensors")


def permuted(w, heads):
    """Rows as convert_hf_to_gguf.py orders those of queries and keys."""
    return (w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2)
            .reshape(w.shape))


def gguf_files():
    keys = {"context_length": 64, "embedding_length": 256, "block_count": 16,
            "feed_forward_length": 4, "attention.head_count": 2, "attention.head_count_kv": 1,
            "attention.key_length": 8, "attention.layer_norm_rms_epsilon": 1e-5}
    embedding = normal(4, 256).half()
    tensors, expected = {"token_embd.weight": embedding}, {"model.embed_tokens.weight": embedding}
    for i, kind in enumerate(F16_AT):
        data, values, kind = blocks(kind, 4, 256)
        tensors[f"blk.{i}.ffn_up.weight"] = (data, kind)
        expected[f"model.layers.{i}.mlp.up_proj.weight"] = values
    q, bias, k = normal(16, 256), normal(16), normal(8, 256).to(BF16)
    tensors.update({"blk.0.attn_q.weight": permuted(q, 2), "blk.0.attn_q.bias": permuted(bias, 2),
                    "blk.0.attn_k.weight": permuted(k, 1)})
    expected.update({LAYER + "self_attn.q_proj.weight": q, LAYER + "self_attn.q_proj.bias": bias,
                     LAYER + "self_attn.k_proj.weight": k})
    # The rows of a quantized matrix are reordered, too.
    data, values, kind = blocks("Q4_0", 16, 256)
    tensors["blk.1.attn_q.weight"] = (permuted(data, 2), kind)
    expected["model.layers.1.self_attn.q_proj.weight"] = values
    gguf_case("gguf_types", "llama", keys, tensors, expected)

    norm, last, head_norm = torch.randn(256), torch.randn(256), torch.randn(8)
    gguf_case("gguf_gemma", "gemma3", {**keys, "attention.sliding_window": 32},
              {"token_embd.weight": embedding, "blk.0.attn_q.weight": q, "blk.0.attn_norm.weight":
               norm + 1, "blk.0.attn_q_norm.weight": head_norm + 1, "output_norm.weight": last + 1},
              {"model.embed_tokens.weight": embedding, LAYER + "self_attn.q_proj.weight": q,
               LAYER + "input_layernorm.weight": (norm + 1) - 1,
               LAYER + "self_attn.q_norm.weight": (head_norm + 1) - 1,
               "model.norm.weight": (last + 1) - 1})

    for name, arch, prefix, names in (
            ("gguf_qwen", "qwen3moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
            ("gguf_mixtral", "llama", "block_sparse_moe", ("w1", "w3", "w2"))):
        gate, gate_w, kind = blocks("Q5_0", 6, 64)
        up, up_w, _ = blocks("Q5_0", 6, 64)
        down, router = normal(2, 64, 3), normal(2, 64)
        p = f"{LAYER}{prefix}."
        want = {"model.embed_tokens.weight": embedding[:, :64], p + "gate.weight": router}
        for e in range(2):
            for key, w in zip(names, (gate_w.reshape(2, 3, 64), up_w.reshape(2, 3, 64), down)):
                want[f"{p}experts.{e}.{key}.weight"] = w[e]
        gguf_case(name, arch, {**keys, "embedding_length": 64, "expert_count": 2,
                               "expert_used_count": 1, "expert_feed_forward_length": 3},
                  {"token_embd.weight": embedding[:, :64].contiguous(),
                   "blk.0.ffn_gate_inp.weight": router,
                   "blk.0.ffn_gate_exps.weight": (gate.reshape(2, 3, -1), kind),
                   "blk.0.ffn_up_exps.weight": (up.reshape(2, 3, -1), kind),
                   "blk.0.ffn_down_exps.weight": down}, want)


torch.manual_seed(1)
np.random.seed(1)
fp8_transformers()
mxfp4()
compressed_tensors()
modelopt()
gptq("gptq", 4, False, False)
gptq("gptq_v2_act_order", 4, True, True, "bfloat16")
gptq("gptq_int8", 8, False, True)
awq()
bitsandbytes()
stacked()
fp8_transposed()
gguf_files()
