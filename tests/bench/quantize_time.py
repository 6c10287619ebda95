"""Where the time of `quantize --device cuda` goes -> OUT, a table with tabs.

usage: quantize_time.py QTOOL CKPT IDS LAYERS OUT [SCHEME...]     needs gcc and CUPTI

CKPT is a checkpoint of LAYERS decoder layers (random_llama.py), IDS its calibration tokens: 64 windows of 2048. Each
scheme runs twice: alone, which gives the seconds, and with gpu_activities.c, which gives the time of kernels and copies.
A line: scheme, seconds of the whole command, and seconds of
    products    FP16 factors: the forward passes of both models and the sums of H
    tf32        products of FP32 numbers as TF32: regressions, and updates in rounding
    factors     FP64 kernels: factors of H
    rounding    search, error compensation, coordinate descent
    other       attention's softmax, norms, conversions and further kernels
    copies      between host and device, and within the device
    idle        of the GPU between its first and its last activity
    outside     before and after: start of the program and of CUDA, the end of writing
"""
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
KINDS = ["products", "tf32", "factors", "rounding", "other", "copies"]
ROUNDING = ["gpu_round", "mix24", "costs", "order_", "restore_", "row_kernel", "factor_kernel", "range_kernel", "fit"]


def kind(name):
    if name.startswith("copy ") or name == "fill":
        return "copies"
    if "gemm" in name or "nvjet" in name:
        return "tf32" if "tf32" in name or "s1688" in name else "factors" if "f64" in name else "products"
    if any(w in name for w in ["f64", "trsm", "syrk", "syherk", "cholesky", "potrf", "reverse_kernel"]):
        return "factors"
    return "rounding" if any(w in name for w in ROUNDING) else "other"


def build(folder):
    cuda, library = os.environ.get("CUDA_HOME", "/usr/local/cuda"), os.path.join(folder, "gpu_activities.so")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", f"-I{cuda}/include", f"-I{cuda}/extras/CUPTI/include", "-o", library,
                    f"{HERE}/gpu_activities.c", f"-L{cuda}/lib64", f"-L{cuda}/extras/CUPTI/lib64", "-lcupti"], check=True)
    return library


def run(command, out, env):
    subprocess.run(["rm", "-rf", out], check=True)
    start = time.time()
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return time.time() - start


def main():
    qtool, ckpt, ids, layers, path = sys.argv[1:6]
    with tempfile.TemporaryDirectory() as folder, open(path, "w") as f:
        library = os.environ.get("QT_ACTIVITIES_LIBRARY") or build(folder)
        out, activities = os.path.join(folder, "out"), os.path.join(folder, "activities.tsv")
        f.write("\t".join(["scheme", "layers", "seconds"] + KINDS + ["idle", "outside"]) + "\n")
        for scheme in sys.argv[6:] or ["int4", "nf4", "nf3", "fp6", "lut4", "lut3", "w4ax", "mix24"]:
            command = [qtool, "quantize", ckpt, "-o", out, "--scheme", scheme, "--data", ids, "--samples", "64", "--seqlen",
                       "2048", "--device", "cuda", "--quiet"]
            seconds = run(command, out, os.environ)
            traced = run(command, out, dict(os.environ, CUDA_INJECTION64_PATH=library, QT_ACTIVITIES=activities))
            sums = dict.fromkeys(KINDS, 0.0)
            with open(activities) as lines:
                for line in lines:
                    value, _, _, name = line.rstrip("\n").split("\t")
                    if name in ("busy", "span"):
                        sums[name] = float(value)
                    else:
                        sums[kind(name)] += float(value)
            # Activities overlap, copies above all: their shares are those of the time with any of them.
            scale = sums["busy"] / sum(sums[k] for k in KINDS)
            parts = [scale * sums[k] for k in KINDS]
            outside = traced - sums["span"]
            parts += [seconds - sums["busy"] - outside, outside]  # tracing itself costs idle time
            f.write("\t".join([scheme, layers, f"{seconds:.2f}"] + [f"{p:.2f}" for p in parts]) + "\n")
            f.flush()
            print(f"{scheme}: {seconds:.2f} s, traced {traced:.2f} s", flush=True)


main()
