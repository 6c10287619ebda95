#!/usr/bin/env python3
"""Exports in Humming's kernels: products of a model's matrices against FP64 products of the weights.

usage: exports_humming.py QTOOL CHECKPOINT [SCHEME...]      needs humming-kernels and a GPU

For each SCHEME: quantizes the checkpoint without data, exports it as `humming` and as `dense`, loads
matrices of the first by Humming itself, unmodified, and multiplies random activations in FP16.
Humming compiles a kernel for each shape, so every matrix has a process of its own, all at the same
time. Prints one line per scheme; exit status 1 if an error (RMS, relative to the product's RMS)
exceeds 2^-11, which is what one rounding of the weights and one of the result give.
"""
import multiprocessing
import os
import subprocess
import sys
import tempfile

import torch
from humming.layer import HummingLayer
from safetensors import safe_open

SCHEMES = ["fp6", "fp6:e=2", "fp5", "fp4", "fp7", "fp8:max=448", "int2", "int3", "int4",
           "int4:g=64,zero=group", "int8"]
MODULES = ["self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"]
LIMIT = 2.0**-11


def run(*args):
    subprocess.run(args + ("-q",), check=True, stdout=subprocess.DEVNULL)


def prepare(qtool, checkpoint, scheme, directory):
    """The exports as `humming` and as `dense`."""
    container, export, dense = (os.path.join(directory, n + scheme) for n in "cxd")
    run(qtool, "quantize", checkpoint, "-o", container, "--scheme", scheme)
    run(qtool, "export", container, "-o", export, "--format", "humming")
    run(qtool, "export", container, "-o", dense, "--format", "dense", "--dtype", "float32")
    return export, dense


def worst_error(export, dense, module):
    """Of one matrix: the largest error over numbers of tokens, or text that says what failed."""
    name, worst = "model.layers.0." + module, 0.0
    try:
        with safe_open(os.path.join(dense, "model.safetensors"), "pt", device="cuda") as weights:
            w = weights.get_tensor(name + ".weight").double()
        layer = HummingLayer.from_safetensors(export, name, torch_dtype=torch.float16).cuda()
        layer.transform()
        for tokens in (1, 7, 16, 100):
            x = torch.randn(tokens, w.shape[1], dtype=torch.float16, device="cuda")
            want = x.double() @ w.T
            got = layer(x)[:, : w.shape[0]].double()
            worst = max(worst, ((got - want).norm() / want.norm()).item())
        return worst
    except Exception as e:
        return f"{module}: {type(e).__name__}: {e}"[:300]


def main():
    if len(sys.argv) < 3:
        print(__doc__)
        return 2
    schemes, bad = sys.argv[3:] or SCHEMES, 0
    workers = min(os.cpu_count(), len(schemes) * len(MODULES))
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory, spawn.Pool(workers) as pool:
        jobs = []
        for scheme in schemes:
            paths = prepare(*sys.argv[1:3], scheme, directory)
            jobs.append([pool.apply_async(worst_error, (*paths, m)) for m in MODULES])
        for scheme, job in zip(schemes, jobs):
            errors = [j.get() for j in job]
            failed = [e for e in errors if isinstance(e, str) or not e <= LIMIT]
            bad += len(failed) > 0
            print(f"{'FAIL' if failed else 'ok'} {scheme}:", failed if failed else
                  f"error at most {max(errors):.2e} in {len(MODULES)} matrices", flush=True)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
