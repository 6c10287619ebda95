"""Loads gptq and awq exports with GPTQModel, on the CPU, and compares with the container.

usage: exports_gptqmodel.py QTOOL WORK CHECKPOINT:TEXT

Perplexity of CHECKPOINT in TEXT, quantized without data, against `qtool eval` of the container;
logits, and those of small random models, against transformers with the weights of the container in
FP32 (export `dense`). GPTQModel computes in FP16, which PPL and LOGITS allow for. A wrong zero-point
or order of rows gives differences of the size of the logits.

Needs gptqmodel, torch, transformers.
"""
import json
import math
import os
import subprocess
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than the rest

import torch  # noqa: E402
from gguf_models import make_model
from gptqmodel import BACKEND, GPTQModel
from transformers import AutoModelForCausalLM, AutoTokenizer

qtool, work, model = sys.argv[1:]
checkpoint, text = model.split(":")
CASES = [("int4", "gptq"), ("int4:g=64", "gptq"), ("int8:g=64", "gptq"), ("int3", "gptq"),
         ("int2:g=64", "gptq"), ("int4:zero=group", "gptq"), ("int2:g=64,zero=group", "gptq"),
         ("int4", "awq"), ("int4:g=64,zero=group", "awq")]
RANDOM = {"llama": dict(head_dim=32), "mistral": dict(head_dim=64), "olmo2": {}}
PPL, LOGITS, SEQLEN, WINDOWS = 1e-3, 5e-3, 256, 16
IDS = [[(7 * i * i + 13 * i + 5) % 1000 + 2 for i in range(96)]]
failed = 0


def run(*args):
    return subprocess.run([qtool, *args, "-q"], check=True, capture_output=True, text=True).stdout


def load(path):
    return GPTQModel.load(path, device="cpu", backend=BACKEND.AUTO, dtype=torch.float16).model


def logits(network):
    with torch.no_grad():
        return network(torch.tensor(IDS)).logits.float()


def perplexity(network):
    with open(text, encoding="utf-8") as f:
        ids = AutoTokenizer.from_pretrained(checkpoint)(f.read()).input_ids
    total = 0.0
    for start in range(0, WINDOWS * SEQLEN, SEQLEN):
        window = torch.tensor([ids[start:start + SEQLEN]])
        with torch.no_grad():
            scores = network(window).logits.float()
        total += torch.nn.functional.cross_entropy(scores[0, :-1], window[0, 1:]).item()
    return math.exp(total / WINDOWS)


def compare(source, scheme, form, scored):
    global failed
    name = f"{os.path.basename(source)} {form} {scheme}"
    box, out, dense = (os.path.join(work, kind) for kind in ("box", "out", "dense"))
    run("quantize", source, "-o", box, "--scheme", scheme, "--force")
    run("export", box, "-o", out, "--format", form, "--force")
    run("export", box, "-o", dense, "--format", "dense", "--dtype", "float32", "--force")
    want = logits(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32))
    network = load(out)
    error = ((logits(network) - want).abs().max() / (want.max() - want.min())).item()
    ok, note = error <= LOGITS, f"logits differ by {error:.1e} of their range"
    if scored:
        found = perplexity(network)
        ppl = json.loads(run("eval", box, "--data", text, "--seqlen", str(SEQLEN), "--windows",
                             str(WINDOWS), "--json"))["ppl"]
        ok = ok and abs(found / ppl - 1) <= PPL
        note += f", perplexity {found:.4f}, of qtool {ppl:.4f} ({100 * (found / ppl - 1):+.4f} %)"
    failed += not ok
    print(f"{'ok' if ok else 'FAIL'} {name}: {note}", flush=True)


for scheme, form in CASES:
    compare(checkpoint, scheme, form, True)
for kind, options in RANDOM.items():
    path = os.path.join(work, kind)
    make_model(path, kind, options)
    for scheme, form in [("int4:g=64", "gptq"), ("int4:g=64,zero=group", "gptq"),
                         ("int4:g=64", "awq")]:
        compare(path, scheme, form, False)
print("all as expected" if not failed else f"{failed} differ")
sys.exit(failed > 0)
