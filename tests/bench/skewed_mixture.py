#!/usr/bin/env python3
"""Makes a mixture of experts (8 experts of which a token takes 2) from a dense Llama checkpoint,
with a router that sends few tokens to most experts: to measure calibration of those. Every expert
is the MLP with random factors of 1 +- 0.1 on its weights (sparse upcycling, arXiv 2212.05055). The
router is random; the standard deviation of the scores of expert e is about 3 * 0.6^e. Needs NumPy.

usage: skewed_mixture.py LLAMA OUT [FAMILY]

FAMILY: mixtral (default) or qwen3_moe, which has norms of queries and keys: their random weights
make it another model than the Llama.
"""
import json
import pathlib
import shutil
import struct
import sys

import numpy as np

EXPERTS, CHOSEN, NOISE, SCORE, FALL = 8, 2, 0.1, 3, 0.6
# The MLP and the names of an expert's gate, up and down; changes of config.json.
FAMILIES = {"mixtral": (".block_sparse_moe.", ("w1", "w3", "w2"),
                        {"architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS}),
            "qwen3_moe": (".mlp.", ("gate_proj", "up_proj", "down_proj"),
                          {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS,
                           "decoder_sparse_step": 1, "mlp_only_layers": [],
                           "norm_topk_prob": True, "use_sliding_window": False})}


def read(directory):
    """{name: FP16 array} of a checkpoint of FP16 safetensors files."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        size, = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8:8 + size]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = np.frombuffer(data[8 + size + begin:8 + size + end], "<f2") \
                    .reshape(entry["shape"])
    return tensors


def write(path, tensors):
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": "F16", "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor).tobytes())


def main():
    source, out = map(pathlib.Path, sys.argv[1:3])
    family = sys.argv[3] if len(sys.argv) > 3 else "mixtral"
    block, names, change = FAMILIES[family]
    parts = dict(zip(("gate_proj", "up_proj", "down_proj"), names))
    rng = np.random.default_rng(1)
    tensors = {}
    for name, w in sorted(read(source).items()):
        mlp, found, part = name.removesuffix(".weight").rpartition(".mlp.")
        if not found:
            tensors[name] = w
            continue
        for e in range(EXPERTS):
            noisy = w * (1 + NOISE * rng.uniform(-1, 1, w.shape))
            tensors[f"{mlp}{block}experts.{e}.{parts[part]}.weight"] = noisy.astype("<f2")
        if part == "gate_proj":
            deviation = SCORE * FALL ** np.arange(EXPERTS)[:, None] / w.shape[1] ** 0.5
            router = deviation * rng.standard_normal((EXPERTS, w.shape[1]))
            tensors[mlp + block + "gate.weight"] = router.astype("<f2")
    config = json.loads((source / "config.json").read_text())
    config |= change | {"model_type": family, "num_experts_per_tok": CHOSEN}
    if family == "qwen3_moe":
        config["moe_intermediate_size"] = config["intermediate_size"]
        for i in range(2 * config["num_hidden_layers"]):
            weight = 1.5 + 0.2 * rng.standard_normal(config["head_dim"])
            tensors[f"model.layers.{i // 2}.self_attn.{'qk'[i % 2]}_norm.weight"] = \
                weight.astype("<f2")
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for file in source.glob("tokenizer*.json"):
        shutil.copy(file, out)
    write(out / "model.safetensors", tensors)


if __name__ == "__main__":
    main()
