#!/usr/bin/env python3
"""The first thing to run on a new machine: a container in transformers next to `qtool eval`.

usage: first.py CONTAINER [QTOOL]

Prints ten logits of both, and the speed of decoding. On a GPU the kernels compute in FP16, `qtool
eval` in FP32.
"""
import os
import subprocess
import sys
import tempfile
import time

import numpy
import torch
from transformers import AutoModelForCausalLM

import qtool_torch  # noqa: F401, registers quant_method "qtool"

path, qtool = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "qtool"
cuda = torch.cuda.is_available()
TOKENS, NEW = 32, 128


def logits_of_qtool(ids):
    with tempfile.TemporaryDirectory() as work:
        data, out = os.path.join(work, "ids.u32"), os.path.join(work, "logits.npy")
        ids.to(torch.int32).numpy().tofile(data)
        subprocess.run([qtool, "eval", path, "--data", data, "--seqlen", str(TOKENS), "--windows",
                        "1", "--logits", out, "-q"], check=True, stdout=subprocess.DEVNULL)
        return torch.from_numpy(numpy.load(out))[-1]


model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16 if cuda else torch.float32)
model.to("cuda" if cuda else "cpu")
ids = torch.arange(TOKENS) * 37 % (model.config.vocab_size - 10) + 3
want = logits_of_qtool(ids)
with torch.no_grad():
    got = model(ids[None].to(model.device)).logits[0, -1].float().cpu()

print("   token  qtool eval  transformers")
for token in want.topk(10).indices.tolist():
    print(f"{token:8} {want[token]:11.4f} {got[token]:13.4f}")
worst = (got - want).abs().max() / (want.max() - want.min())
print(f"largest difference of all logits: {worst:.1e} of their range")

options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW,
           "cache_implementation": "static" if cuda else None}
prompt = ids[None, :8].to(model.device)
model.generate(prompt, **options)  # compiles
start = time.time()
model.generate(prompt, **options)
device = torch.cuda.get_device_name() if cuda else "CPU"
print(f"{NEW / (time.time() - start):.1f} tokens/s ({device}, batch 1)")
sys.exit(0 if worst < 0.02 else 1)
