"""Reads GGUF exports with the package `gguf`, and compares with the weights of the container.

usage: gguf_decode.py QTOOL WORK CHECKPOINT

For every scheme, the tensors of the export, dequantized by the package, have to be those of the
export `dense --dtype float32` of the same container (tests/unit checks that against the container):
bit for bit, or, where zero-points become offsets of 16 bits, within one rounding. CHECKPOINT is of
the family llama: the order of rows of q and k is undone here. Needs gguf, numpy, safetensors.
"""
import json
import os
import subprocess
import sys

import numpy
from gguf import GGUFReader, dequantize
from safetensors.numpy import load_file

qtool, work, checkpoint = sys.argv[1:]
config = json.load(open(os.path.join(checkpoint, "config.json")))
SCHEMES = {"int4:g=32": "Q4_0", "int4:g=128": "Q4_0", "int4:g=0": "Q4_0", "int8": "Q8_0",
           "int8:g=64": "Q8_0", "int4:g=32,zero=group": "Q4_1", "iq4nl": "IQ4_NL",
           "mxfp4": "MXFP4"}
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm"}
GLOBAL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight":
          "model.norm.weight", "output.weight": "lm_head.weight"}
failed = 0


def run(*args):
    subprocess.run([qtool, *args, "-q"], check=True, stdout=subprocess.DEVNULL)


def name_of(name):
    if name in GLOBAL:
        return GLOBAL[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def rows_of_heads(w, heads):
    """From pairs of neighbours to first and second halves of a head."""
    return w.reshape(heads, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def check(scheme, form):
    global failed
    container, out, dense = (os.path.join(work, scheme + end) for end in ("", "-gguf", "-dense"))
    lossy = ["--lossy"] if form == "Q4_1" else []
    run("quantize", checkpoint, "-o", container, "--scheme", scheme, "--force")
    run("export", container, "-o", out, "--format", "gguf", "--force", *lossy)
    run("export", container, "-o", dense, "--format", "dense", "--dtype", "float32", "--force")
    want = load_file(os.path.join(dense, "model.safetensors"))
    reader = GGUFReader(os.path.join(out, "model.gguf"))
    equal = quantized = 0
    worst = 0.0
    for t in reader.tensors:
        name = name_of(t.name)
        got = dequantize(t.data, t.tensor_type).astype(numpy.float32)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for part, key in heads.items():
            if part in name:
                got = rows_of_heads(got, config[key])
        quantized += t.tensor_type.name == form
        w = want.pop(name).astype(numpy.float32)
        equal += numpy.array_equal(got, w)
        worst = max(worst, numpy.abs(got - w).max() / numpy.abs(w).max())
    n = len(reader.tensors)
    ok = not want and quantized == 7 * config["num_hidden_layers"] and \
        (equal == n or (bool(lossy) and worst < 2 ** -10))
    failed += not ok
    print(f"{'ok' if ok else 'FAIL'} gguf {scheme}: {quantized} tensors {form}, {equal} of {n} equal "
          f"bit for bit, others within {worst:.1e} of the largest weight", flush=True)


for s, f in SCHEMES.items():
    check(s, f)
sys.exit(failed > 0)
