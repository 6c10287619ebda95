#!/usr/bin/env python3
"""Gives a Llama-like checkpoint the activation outliers of large models without changing what it
computes: some channels are multiplied by a factor where they are made, and divided by it where they
are read. Norm weights and q/k/v or gate/up columns; up rows and down columns; v rows and o columns.

    inject_outliers.py CKPT OUT [--share 0.01] [--factor 50] [--seed 1]

Needs numpy and safetensors. Writes F32, so that (nearly) nothing is rounded."""
import argparse
import glob
import json
import os
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file


def main():
    p = argparse.ArgumentParser()
    p.add_argument("ckpt")
    p.add_argument("out")
    p.add_argument("--share", type=float, default=0.01, help="of the channels of every input")
    p.add_argument("--factor", type=float, default=50)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--f16", action="store_true", help="half the size, rounded")
    a = p.parse_args()
    config = json.load(open(os.path.join(a.ckpt, "config.json")))
    w = {}
    for f in sorted(glob.glob(os.path.join(a.ckpt, "*.safetensors"))):
        w.update({k: v.astype(np.float32) for k, v in load_file(f).items()})
    rng = np.random.default_rng(a.seed)
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]

    def pick(n):
        return rng.choice(n, max(1, round(a.share * n)), replace=False)

    for layer in range(config["num_hidden_layers"]):
        t = f"model.layers.{layer}."
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            c = pick(len(w[t + norm + ".weight"]))
            w[t + norm + ".weight"][c] *= a.factor
            for r in readers:
                w[t + r + ".weight"][:, c] /= a.factor
        c = pick(len(w[t + "mlp.up_proj.weight"]))
        w[t + "mlp.up_proj.weight"][c] *= a.factor
        w[t + "mlp.down_proj.weight"][:, c] /= a.factor
        c = pick(len(w[t + "self_attn.v_proj.weight"]))
        w[t + "self_attn.v_proj.weight"][c] *= a.factor
        for head in range(group):
            w[t + "self_attn.o_proj.weight"][:, (c // dim * group + head) * dim + c % dim] /= a.factor
    if a.f16:
        w = {k: v.astype(np.float16) for k, v in w.items()}
    os.makedirs(a.out, exist_ok=True)
    save_file(w, os.path.join(a.out, "model.safetensors"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if os.path.exists(os.path.join(a.ckpt, name)):
            shutil.copyfile(os.path.join(a.ckpt, name), os.path.join(a.out, name))


main()
