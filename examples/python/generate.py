#!/usr/bin/env python3
"""Runs a container in transformers.    usage: generate.py CONTAINER [PROMPT]"""
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qtool_torch  # noqa: F401, registers quant_method "qtool"

path, prompt = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "The"
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).to(device)
inputs = tokenizer(prompt, return_tensors="pt").to(device)
# The static cache makes transformers compile the model: no overhead of Python between kernels.
out = model.generate(**inputs, max_new_tokens=64, do_sample=False,
                     cache_implementation="static" if device == "cuda" else None)
print(tokenizer.decode(out[0], skip_special_tokens=True))
