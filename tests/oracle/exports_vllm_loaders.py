#!/usr/bin/env python3
"""Exports in the config parsers and weight loaders of vLLM 0.33, on the CPU.

usage: exports_vllm_loaders.py QTOOL CHECKPOINT WORK      needs vllm 0.33 (its Python files), torch

For each scheme: the checkpoint, a Llama, is quantized and exported. vLLM's own classes parse
quantization_config, choose the kind of layer, declare its parameters and load the tensors of the
export into them, with q, k and v, and gate and up, fused to one layer, as the engine does it. What
the parameters hold then is compared with the export `dense` of the same container, bit for bit:

    integers, minifloats  decoded here, as Humming's kernels read them: Humming's own decoder needs a
                          GPU
    2, 4 and 8 bits       of compressed-tensors also by vLLM, in its mode that dequantizes before the
                          product (compressed-tensors 0.17, which that mode calls, does not unpack
                          the bit strings of 3 bits that vLLM's parameters and kernels hold)
    fp8                   no loading: the kind of layer, with and without --fp8-inputs

What a GPU is needed for (repacking, kernels) is not run.
"""
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
from unittest.mock import MagicMock

# Packages that vLLM imports on the way to its quantization modules, which do not use them.
ABSENT = ["anthropic", "llguidance", "mcp", "mistral_common", "oss_harmony", "outlines_core",
          "torchcodec", "tvm_ffi", "xgrammar"]


class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        found = name.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__file__ = spec, [], None
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Stub())  # the last: what is installed is used
os.environ["VLLM_BATCH_INVARIANT"] = "1"

import numpy
import torch
from safetensors.torch import load_file
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_wNa16)

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
MIXED = ["--tensor", "q_proj|k_proj|v_proj=fp5", "--tensor", "down_proj=int4:zero=group"]

for module in (linear, parameter):
    module.get_tensor_model_parallel_rank = lambda: 0
    module.get_tensor_model_parallel_world_size = lambda: 1
compressed_tensors_wNa16.matmul_batch_invariant = torch.matmul

qtool, checkpoint, work = sys.argv[1:4]
failed = 0


def report(name, ok, detail):
    global failed
    failed += not ok
    print(f"{'ok' if ok else 'FAIL'} {name}: {detail}", flush=True)


def run(*args):
    subprocess.run([qtool, *args, "-q"], check=True, stdout=subprocess.DEVNULL)


def exported(name, scheme, rules, form, *options):
    box, out, dense = (os.path.join(work, kind + name) for kind in ("c-", f"e-{form}-", "d-"))
    if not os.path.exists(box):
        run("quantize", checkpoint, "-o", box, "--scheme", scheme, *rules)
        run("export", box, "-o", dense, "--format", "dense", "--dtype", "float32")
    run("export", box, "-o", out, "--format", form, "--force", *options)
    return out, load_file(os.path.join(dense, "model.safetensors"))


def parsed(path):
    config = json.load(open(os.path.join(path, "config.json")))
    quantization = config["quantization_config"]
    out = get_quantization_config(quantization["quant_method"]).from_config(quantization)
    out.packed_modules_mapping = FUSED
    return config, out


def layers_of(config, quantization):
    """Yields (layer, its prefix, [(name of a part, shard id)]) of the decoder layers."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    inner, kv, head = config["intermediate_size"], config["num_key_value_heads"], hidden // heads
    common = {"bias": False, "params_dtype": torch.float32, "quant_config": quantization}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield linear.QKVParallelLinear(
            hidden, head, heads, kv, prefix=at + "self_attn.qkv_proj", **common), [
                (at + "self_attn." + part, part[0]) for part in FUSED["qkv_proj"]]
        yield linear.RowParallelLinear(
            hidden, hidden, prefix=at + "self_attn.o_proj", **common), [
                (at + "self_attn.o_proj", None)]
        yield linear.MergedColumnParallelLinear(
            hidden, [inner, inner], prefix=at + "mlp.gate_up_proj", **common), [
                (at + "mlp." + part, i) for i, part in enumerate(FUSED["gate_up_proj"])]
        yield linear.RowParallelLinear(
            inner, hidden, prefix=at + "mlp.down_proj", **common), [(at + "mlp.down_proj", None)]


def load(layer, parts, tensors):
    parameters = dict(layer.named_parameters())
    for module, shard in parts:
        for name in [n for n in tensors if n.startswith(module + ".")]:
            p = parameters[name[len(module) + 1 :]]
            p.weight_loader(p, tensors[name], *([] if shard is None else [shard]))


def unpack(words, bits, count):
    """Dense bit strings [rows][words]: codes [rows][count]."""
    words = words.numpy().view(numpy.uint32).astype(numpy.uint64)
    out = numpy.zeros((words.shape[0], count), numpy.int64)
    for i in range(count):
        at, shift = divmod(i * bits, 32)
        value = words[:, at] >> numpy.uint64(shift)
        if shift + bits > 32:
            value |= words[:, at + 1] << numpy.uint64(32 - shift)
        out[:, i] = value & numpy.uint64((1 << bits) - 1)
    return torch.from_numpy(out)


def decoded(packed, scale, zero, bits, exponent_bits, k):
    """Weights [n][k] of minifloats, or of integers if exponent_bits = 0."""
    code = unpack(packed.data, bits, k)
    if exponent_bits:
        e, m = exponent_bits, bits - 1 - exponent_bits
        sign, magnitude = 1 - 2 * (code >> (bits - 1)), code & ((1 << (bits - 1)) - 1)
        exponent, fraction = magnitude >> m, (magnitude & ((1 << m) - 1)).float() / (1 << m)
        bias = (1 << (e - 1)) - 1
        value = sign * torch.where(exponent > 0,
                                   (1 + fraction) * torch.exp2((exponent - bias).float()),
                                   fraction * 2.0 ** (1 - bias))
    else:
        middle = 1 << (bits - 1)
        if zero is not None:
            middle = unpack(zero.data.T.contiguous(), bits, code.shape[0]).T
            middle = middle.repeat_interleave(k // scale.shape[1], 1)
        value = (code - middle).float()
    return value * scale.data.float().repeat_interleave(k // scale.shape[1], 1)


def equal(layer, want):
    p, k = dict(layer.named_parameters()), want.shape[1]
    if not hasattr(layer, "scheme"):
        schema = layer.quant_method.weight_schema
        zero = p["zero_point"] if schema.has_zero_point else None
        exponent_bits = getattr(schema.b_dtype, "exponent_bits", 0)
        return torch.equal(want, decoded(p["weight"], p["weight_scale"], zero,
                                         schema.b_dtype.num_bits, exponent_bits, k))
    bits = layer.scheme.num_bits
    same = torch.equal(want, decoded(p["weight_packed"], p["weight_scale"],
                                     p.get("weight_zero_point"), bits, 0, k))
    if 32 % bits:
        return same
    layer.quant_method.process_weights_after_loading(layer)
    return same and torch.equal(want, layer.quant_method.apply(layer, torch.eye(k)).T)


def check(form, scheme, rules=()):
    name = f"{form} {scheme}" + (" and others" if rules else "")
    out, want = exported(scheme + ("-mixed" if rules else ""), scheme, rules, form)
    config, quantization = parsed(out)
    tensors = load_file(os.path.join(out, "model.safetensors"))
    same = total = 0
    kinds = set()
    for layer, parts in layers_of(config, quantization):
        w = torch.cat([want[module + ".weight"] for module, _ in parts])
        load(layer, parts, tensors)
        kinds.add(type(getattr(layer, "scheme", layer.quant_method)).__name__)
        same += equal(layer, w)
        total += 1
    report(name, same == total, f"{same} of {total} layers equal ({', '.join(sorted(kinds))})")


def check_fp8(options, expected):
    out, _ = exported("fp8:max=448", "fp8:max=448", (), "compressed-tensors", *options)
    _, quantization = parsed(out)
    scheme = quantization.target_scheme_map["Linear"]
    weights, inputs = scheme["weights"], scheme["input_activations"]
    w8a8 = quantization._is_fp8_w8a8(weights, inputs)
    kind = "W8A8" if w8a8 else "W8A16" if quantization._is_fp8_w8a16(weights, inputs) else "none"
    report(" ".join(["compressed-tensors fp8:max=448", *options]), kind == expected, kind)


with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
    for scheme in ["int2", "int3", "int4", "int8", "int3:zero=group", "int2:g=64,zero=group",
                   "int4:zero=group", "int8:g=128,zero=group"]:
        check("compressed-tensors", scheme)
    check("compressed-tensors", "int4:g=64", ["--tensor", "q_proj|k_proj|v_proj=int3"])
    for scheme in ["fp6", "fp6:e=2", "fp5", "fp4", "fp7", "fp8:max=448", "int2", "int3", "int4",
                   "int8", "int3:zero=group", "int2:zero=group"]:
        check("humming", scheme)
    check("humming", "fp6", MIXED)
    check("humming", "int4:zero=group", MIXED[:2])
    check_fp8([], "W8A16")
    check_fp8(["--fp8-inputs"], "W8A8")
sys.exit(failed > 0)
