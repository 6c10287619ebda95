"""Reads GGUF exports back: random models of every architecture through a GGUF file and past it.

usage: gguf_families.py QTOOL WORK      needs transformers, torch, safetensors

Every model is quantized (int8), and exported to a GGUF file and to a dense FP16 checkpoint. qtool
reads both. Their tensors have to have the same names and, but for one rounding of norms that GGUF
stores with 1 added, the same values; `eval` has to find the same perplexity with both, which it
does only if config.json, made from the keys of GGUF, says the same.
"""
import json
import os
import subprocess
import sys

import torch
from gguf_models import ARCHS, WRITTEN_ONLY, make_model
from safetensors.torch import load_file

qtool, work = sys.argv[1:3]
failed = 0


def run(*args):
    return subprocess.run([qtool, *args, "-q"], check=True, capture_output=True, text=True).stdout


def tensors(path):
    run("quantize", path, "-o", path + "-read", "--scheme", "none", "--force")
    return load_file(os.path.join(path + "-read", "model.safetensors"))


def perplexity(path, ids):
    return json.loads(run("eval", path, "--data", ids, "--seqlen", "64", "--windows", "4", "--json"))[
        "ppl"]


def check(name, kind, options, ids):
    global failed
    source = os.path.join(work, name)
    make_model(source, kind, options)
    run("quantize", source, "-o", source + "-int8", "--scheme", "int8:g=32", "--force")
    for form, more in {"gguf": [], "dense": ["--dtype", "float16"]}.items():
        run("export", source + "-int8", "-o", f"{source}-{form}", "--format", form, "--force", *more)
    got, want = tensors(source + "-gguf"), tensors(source + "-dense")
    same = got.keys() == want.keys() and all(
        torch.equal(got[k].float(), want[k].float())
        or ("norm" in k and (got[k].float() - want[k].float()).abs().max() <= 2.0**-22)
        for k in want)
    ppl = [perplexity(source + "-" + form, ids) for form in ("gguf", "dense")]
    ok = same and abs(ppl[0] / ppl[1] - 1) <= 1e-5
    failed += not ok
    print(f"{'ok' if ok else 'FAIL'} {name}: {len(got)} of {len(want)} tensors, "
          f"{'equal' if same else 'different'}; perplexity {ppl[0]:.4f} and {ppl[1]:.4f}", flush=True)


data = os.path.join(work, "ids.u16")
torch.arange(1 << 10).mul(37).remainder(1000).add(2).to(torch.int16).numpy().tofile(data)
for arch, (family, extra) in ARCHS.items():
    if arch not in WRITTEN_ONLY:
        check(arch, family, extra, data)
sys.exit(failed > 0)
