"""Loads MLX exports of small random models with mlx_lm, on the CPU.

usage: exports_mlx.py QTOOL WORK      needs mlx, mlx_lm, torch, transformers

Logits in FP32 against transformers with the dequantized weights (export `dense`). Experts become
one tensor per layer and projection; some models have modules with options of their own.
"""
import json
import os
import pathlib
import subprocess
import sys

import mlx.core as mx
import numpy
import torch
import transformers
from gguf_models import ARCHS, make_model
from mlx_lm.utils import load_model

qtool, work = sys.argv[1:3]
LIMIT, IDS = 1e-4, [(7 * i * i + 13 * i + 5) % 1000 + 2 for i in range(96)]
ALL = ["--scheme", "int8:g=32"]
MIXED = ["--scheme", "int4:g=32", "--tensor", "down_proj=int8:g=32", "--tensor",
         "^(?!.*layers).*embed_tokens=int8:g=64", "--tensor", "layers.0.*q_proj=none"]
EXPERTS = ["--scheme", "int8:g=32", "--tensor", "experts=int4:g=32", "--tensor",
           "layers.2.*experts=none"]
CASES = [(a, ALL) for a in ["qwen2_moe", "mixtral", "olmoe", "glm4_moe", "granitemoe", "gpt_oss",
                            "dots1", "minimax_m2", "deepseek_v2", "qwen3_moe"]]
CASES += [(a, MIXED) for a in ["llama", "qwen3", "smollm3"]]
CASES += [(a, EXPERTS) for a in ["qwen3_moe", "gpt_oss", "mixtral"]]
failed = 0


def run(*args):
    subprocess.run([qtool, *args, "-q", "--force"], check=True, capture_output=True)


def older_keys(path, options):
    """config.json as published models have it: mlx_lm does not read all keys of transformers 5."""
    with open(path) as f:
        config = json.load(f)
    rope = config.pop("rope_parameters", None) or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            config[key] = rope.pop(key)
    scaled = rope.get("rope_type", "default") != "default"
    config["rope_scaling"] = {**rope, "type": rope["rope_type"]} if scaled else None
    config["shared_intermediate_size"] = 0
    config.update({k: v for k, v in options.items() if k == "num_experts"})
    with open(path, "w") as f:
        json.dump(config, f)


def compare(name, schemes):
    global failed
    kind, options = ARCHS[name]
    source = os.path.join(work, name)
    make_model(source, kind, options)
    older_keys(os.path.join(source, "config.json"), options)
    run("quantize", source, "-o", source + "-c", *schemes)
    run("export", source + "-c", "-o", source + "-mlx", "--format", "mlx")
    run("export", source + "-c", "-o", source + "-dense", "--format", "dense", "--dtype", "float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source + "-dense", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        want = reference(torch.tensor([IDS])).logits[0].double().numpy()
    model, _ = load_model(pathlib.Path(source + "-mlx"))
    model.set_dtype(mx.float32)
    got = numpy.array(model(mx.array([IDS]))[0].astype(mx.float32)).astype(float)
    rms = numpy.sqrt(((got - want) ** 2).mean()) / want.std()
    failed += not rms <= LIMIT
    print(f"{'ok' if rms <= LIMIT else 'FAIL'} {name} {' '.join(schemes)}: logits of mlx_lm differ "
          f"from transformers by {rms:.1e} of their standard deviation (<= {LIMIT})", flush=True)


transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
for arch, rules in CASES:
    compare(arch, rules)
sys.exit(failed > 0)
