#!/usr/bin/env python3
"""Perplexity of a container in transformers, by the protocol of `qtool eval`: windows without
overlap, all tokens but the first of each scored.

usage: perplexity.py CONTAINER TEXT [SEQLEN [WINDOWS]]
"""
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qtool_torch  # noqa: F401, registers quant_method "qtool"

path, text = sys.argv[1:3]
seqlen = int(sys.argv[3]) if len(sys.argv) > 3 else 512
cuda = torch.cuda.is_available()
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16 if cuda else torch.float32)
model.to("cuda" if cuda else "cpu")
with open(text, encoding="utf-8") as f:
    ids = AutoTokenizer.from_pretrained(path)(f.read(), return_tensors="pt").input_ids[0]
windows = ids[: len(ids) // seqlen * seqlen].view(-1, seqlen)
windows = windows[: int(sys.argv[4])] if len(sys.argv) > 4 else windows

total = 0.0
with torch.no_grad():
    for window in windows.to(model.device):
        logits = model(window[None]).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
loss = total / (len(windows) * (seqlen - 1))
print(f"{len(windows)} windows of {seqlen} tokens: perplexity {torch.tensor(loss).exp():.4f}")
