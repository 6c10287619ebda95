#!/usr/bin/env python3
"""A random checkpoint of the shape of Qwen3 0.6B twice: in BF16, and in FP8 with scales for blocks of
128x128, to compare how fast both are quantized. Needs NumPy.

usage: fp8_source.py OUT     writes OUT/bf16 and OUT/fp8
       for s in bf16 fp8 bf16 fp8; do
           rm -rf out; /usr/bin/time -f "$s %e s" qtool quantize OUT/$s -o out --scheme nf4 -q
       done
"""
import json
import os
import sys

import numpy as np

HIDDEN, INNER, Q, KV, VOCAB, LAYERS, BLOCK = 1024, 3072, 2048, 1024, 151936, 28, 128
LINEARS = {
    "self_attn.q_proj": (Q, HIDDEN), "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN), "self_attn.o_proj": (HIDDEN, Q),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
E4M3 = np.array([(-1) ** (c >> 7) * ((1 + (c & 7) / 8) * 2.0 ** ((c >> 3 & 15) - 7) if c >> 3 & 15
                 else (c & 7) / 8 * 2.0 ** -6) for c in range(256)], np.float32)


def write(path, tensors, config):
    header, at = {}, 0
    for name, (dtype, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": data.shape, "data_offsets": [at, at + data.nbytes]}
        at += data.nbytes
    text = json.dumps(header).encode()
    os.makedirs(path, exist_ok=True)
    with open(f"{path}/model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, data in tensors.values():
            f.write(data.tobytes())
    with open(f"{path}/config.json", "w") as f:
        json.dump({"model_type": "qwen3", "dtype": "bfloat16", **config}, f)


def bf16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def main():
    out, rng = sys.argv[1], np.random.default_rng(0)
    plain, coded = {}, {}
    for name, shape in {"model.embed_tokens.weight": (VOCAB, HIDDEN)}.items():
        plain[name] = coded[name] = ("BF16", bf16(rng.standard_normal(shape, np.float32) * 0.02))
    for layer in range(LAYERS):
        for name, (n, k) in LINEARS.items():
            name = f"model.layers.{layer}.{name}.weight"
            # The codes of a normal distribution whose largest values are about 448.
            values = rng.standard_normal((n, k), np.float32) * 100
            codes = np.clip(np.abs(values), 2**-6, 448).view(np.uint32)
            codes = ((codes + 0x7FFFF) >> 20) - ((127 - 7) << 3)
            codes = (np.minimum(codes, 126) | (values < 0).astype(np.uint32) << 7).astype(np.uint8)
            scales = (rng.random((n // BLOCK, k // BLOCK)) * 1e-4 + 1e-4).astype(np.float32)
            coded[name] = ("F8_E4M3", codes)
            coded[name + "_scale_inv"] = ("F32", scales)
            dense = E4M3[codes] * scales.repeat(BLOCK, 0).repeat(BLOCK, 1)
            plain[name] = ("BF16", bf16(dense))
    write(f"{out}/bf16", plain, {})
    write(f"{out}/fp8", coded, {"quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}})


main()
