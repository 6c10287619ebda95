"""Loads exports with the packages that read them, and compares with the weights of the container.

usage: exports.py QTOOL CHECKPOINT WORK GOLDEN

For every scheme and format: the container is exported, loaded by the runtime's own package, and
compared with the export `dense --dtype float32` of the same container, which decodes it by itself
(tests/unit checks that against the container). What is compared:

    weights   decompressed by the package, bit for bit where the format is exact
    logits    of transformers with the export, relative to the range of logits, on random ids

If all is well, the SHA-256 of exports of one matrix are written to GOLDEN, for tests/cli/export.t.

Needs torch, transformers, compressed-tensors, bitsandbytes, accelerate; mlx for its format. A
package that is missing skips its formats, loudly.
"""
import hashlib
import json
import os
import subprocess
import sys

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, logging

logging.set_verbosity_error()
logging.disable_progress_bar()

qtool, checkpoint, work, golden = sys.argv[1:5]
passed = failed = skipped = 0


def report(name, ok, detail):
    global passed, failed
    passed, failed = passed + ok, failed + (not ok)
    print(f"{'ok' if ok else 'FAIL'} {name}: {detail}", flush=True)


def skip(name, why):
    global skipped
    skipped += 1
    print(f"SKIP {name}: {why}", flush=True)


def run(*args):
    subprocess.run([qtool, *args, "-q"], check=True, stdout=subprocess.DEVNULL)


def container(scheme):
    path = os.path.join(work, "c-" + scheme)
    if not os.path.exists(path):
        run("quantize", checkpoint, "-o", path, "--scheme", scheme)
    return path


def export(scheme, form, *options):
    path = os.path.join(work, f"e-{form}-{scheme}-{'-'.join(options)}")
    run("export", container(scheme), "-o", path, "--format", form, "--force", *options)
    return path


def dense(scheme):
    return export(scheme, "dense", "--dtype", "float32")


def logits(path, dtype, hook=None):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    for name, module in model.named_modules():
        if hook and name.endswith("_proj"):
            module.register_forward_pre_hook(hook)
    ids = torch.arange(64).remainder(model.config.vocab_size).mul(7)
    ids = ids.remainder(model.config.vocab_size)[None]
    with torch.no_grad():
        return model(ids).logits.float()


def compare_logits(name, path, scheme, dtype, limit, hook=None):
    try:
        got = logits(path, dtype)
    except (ImportError, RuntimeError) as e:
        return skip(name, str(e).split("\n")[0])
    want = logits(dense(scheme), torch.float32, hook)
    scale = (want.max() - want.min()).item()
    worst = (got - want).abs().max().item() / scale
    report(name, worst <= limit, f"logits differ by {worst:.1e} of their range (<= {limit:.0e})")


def fp8_inputs(module, args):
    scale = args[0].abs().amax(-1, keepdim=True) / 448
    return (args[0] / scale).to(torch.float8_e4m3fn).float() * scale


def weights(scheme):
    return load_file(os.path.join(dense(scheme), "model.safetensors"))


# Modules that vLLM fuses: it takes one tensor scale of NVFP4 for all.
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up",
         "up_proj": "gate_up"}

# ---- compressed-tensors: its own decompression -------------------------------------------------

def compressed_tensors(scheme):
    name = f"compressed-tensors {scheme}"
    path = export(scheme, "compressed-tensors")
    try:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    except ImportError as e:
        return skip(name, e)
    want = weights(scheme)
    config = json.load(open(os.path.join(path, "config.json")))["quantization_config"]
    group = config["config_groups"]["group_0"]
    args = QuantizationArgs(**group["weights"])
    QuantizationScheme(**{k: v for k, v in group.items() if k != "format"}, format=group["format"])
    equal = total = 0
    shared = {}
    with safe_open(os.path.join(path, "model.safetensors"), "pt") as f:
        for key in f.keys():
            parent, part, last = key.rsplit(".", 2) if key.count(".") > 1 else ("", "", "")
            if last == "weight_global_scale":
                scales = shared.setdefault((parent, FUSED.get(part, part)), set())
                scales.add(f.get_tensor(key).item())
        for key in f.keys():
            if not key.endswith(".weight_scale"):
                continue
            module = key[: -len(".weight_scale")]
            got = decompress(f, module, args, group["format"])
            total += 1
            equal += torch.equal(got, want[module + ".weight"])
    one = all(len(scales) == 1 for scales in shared.values())
    report(name, equal == total and total > 0 and one,
           f"{equal} of {total} matrices equal bit for bit" + ("" if one else
           ", but tensor scales of fused modules differ"))


def decompress(f, module, args, form):
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scale = f.get_tensor(module + ".weight_scale")
    if form in ["mxfp4-pack-quantized", "nvfp4-pack-quantized"]:
        from compressed_tensors.compressors import BaseCompressor

        packed = f.get_tensor(module + ".weight_packed")
        state = {"weight_packed": packed, "weight_scale": scale}
        if form.startswith("nv"):
            state["weight_global_scale"] = f.get_tensor(module + ".weight_global_scale")
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        return BaseCompressor.get_value_from_registry(form).decompress(state, scheme)["weight"].float()
    scale = scale.float()
    if form == "float-quantized":
        return f.get_tensor(module + ".weight").float() * scale
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    shape = torch.Size(f.get_tensor(module + ".weight_shape").tolist())
    codes = unpack_from_int32(f.get_tensor(module + ".weight_packed"), args.num_bits, shape)
    zero = None
    if not args.symmetric:
        packed = f.get_tensor(module + ".weight_zero_point")
        zero = unpack_from_int32(packed, args.num_bits, torch.Size([shape[0], scale.shape[1]]),
                                 packed_dim=0)
        zero = zero.float()
    return dequantize(codes.float(), scale, zero, args=args, dtype=torch.float32)


# ---- gptq and awq: written out from the formats' definitions -----------------------------------

def unpack_rows(words, bits, count):
    """Dense bit strings along dimension 0 of words [W][N]: codes [count][N]."""
    words = words.numpy().view(numpy.uint32).astype(numpy.uint64)
    out = numpy.zeros((count, words.shape[1]), numpy.int64)
    for i in range(count):
        at, shift = divmod(i * bits, 32)
        value = words[at] >> numpy.uint64(shift)
        if shift + bits > 32:
            value |= words[at + 1] << numpy.uint64(32 - shift)
        out[i] = value & numpy.uint64((1 << bits) - 1)
    return torch.from_numpy(out)


def gptq(scheme):
    path = export(scheme, "gptq")
    config = json.load(open(os.path.join(path, "quantize_config.json")))
    bits, add = config["bits"], config["checkpoint_format"] == "gptq"
    t, want = load_file(os.path.join(path, "model.safetensors")), weights(scheme)
    equal = total = 0
    for key in [k for k in t if k.endswith(".qweight")]:
        m = key[: -len(".qweight")]
        k = t[m + ".g_idx"].shape[0]
        code = unpack_rows(t[key], bits, k)
        n = code.shape[1]
        zero = unpack_rows(t[m + ".qzeros"].T.contiguous(), bits, n).T + add
        g = t[m + ".g_idx"].long()
        got = (t[m + ".scales"].float()[g] * (code - zero[g])).T
        total += 1
        equal += torch.equal(got, want[m + ".weight"])
    report(f"gptq {scheme}", equal == total and total > 0, f"{equal} of {total} matrices equal")


def awq(scheme):
    path = export(scheme, "awq")
    t, want = load_file(os.path.join(path, "model.safetensors")), weights(scheme)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    equal = total = 0

    def unpack(words):
        out = torch.zeros(words.shape[0], words.shape[1], 8, dtype=torch.int64)
        for p, row in enumerate(order):
            out[:, :, row] = words.long().bitwise_right_shift(4 * p).bitwise_and(15)
        return out.reshape(words.shape[0], -1)

    for key in [k for k in t if k.endswith(".qweight")]:
        m = key[: -len(".qweight")]
        scale = t[m + ".scales"].float()
        code, zero = unpack(t[key]), unpack(t[m + ".qzeros"])
        g = torch.arange(code.shape[0]) // (code.shape[0] // scale.shape[0])
        got = (scale[g] * (code - zero[g])).T
        total += 1
        equal += torch.equal(got, want[m + ".weight"])
    report(f"awq {scheme}", equal == total and total > 0, f"{equal} of {total} matrices equal")


# ---- humming ------------------------------------------------------------------------------------

def humming(scheme):
    path = export(scheme, "humming")
    config = json.load(open(os.path.join(path, "config.json")))["quantization_config"]
    kind = config["b_dtype"]
    t, want = load_file(os.path.join(path, "model.safetensors")), weights(scheme)
    equal = total = 0
    if kind.startswith("float"):
        bits, rest = kind[5:].split("e")
        e, m = rest.split("m")
        bits, e, m = int(bits), int(e), int(m)
    else:
        bits = int(kind[4:])
    for key in [k for k in t if k.endswith(".weight_scale")]:
        name = key[: -len("_scale")]
        scale = t[key].float()
        n, k = want[name].shape
        code = unpack_rows(t[name].T.contiguous(), bits, k).T
        if kind.startswith("float"):
            sign = 1 - 2 * (code >> (bits - 1))
            mag = code & ((1 << (bits - 1)) - 1)
            exponent, mantissa = mag >> m, (mag & ((1 << m) - 1)).float()
            bias = (1 << (e - 1)) - 1
            value = torch.where(exponent > 0,
                                (1 + mantissa / (1 << m)) * torch.exp2((exponent - bias).float()),
                                mantissa / (1 << m) * 2.0 ** (1 - bias)) * sign
        else:
            zero = name[: -len(".weight")] + ".zero_point"
            middle = unpack_rows(t[zero], bits, n) if zero in t else 1 << (bits - 1)
            if zero in t:
                middle = middle.repeat_interleave(k // scale.shape[1], 1)
            value = (code - middle).float()
        got = value * scale.repeat_interleave(k // scale.shape[1], 1)
        total += 1
        equal += torch.equal(got, want[name])
    report(f"humming {scheme}", equal == total and total > 0, f"{equal} of {total} matrices equal")


# ---- mlx ----------------------------------------------------------------------------------------

def mlx(scheme, *options):
    name = f"mlx {scheme}"
    try:
        import mlx.core as mx
    except ImportError as e:
        return skip(name, e)
    path = export(scheme, "mlx", *options)
    config = json.load(open(os.path.join(path, "config.json")))["quantization"]
    t, want = mx.load(os.path.join(path, "model.safetensors")), weights(scheme)
    worst, total = 0.0, 0
    for key in [k for k in t if k.endswith(".scales")]:
        m = key[: -len(".scales")]
        got = mx.dequantize(t[m + ".weight"], t[key].astype(mx.float32),
                            t[m + ".biases"].astype(mx.float32), config["group_size"],
                            config["bits"])
        got = torch.from_numpy(numpy.array(got))
        exact = want[m + ".weight"]
        worst = max(worst, ((got - exact).abs().max() / exact.abs().max()).item())
        total += 1
    limit = 2.0**-10 if options else 2.0**-22  # FP32 product and sum, or a rounded bias
    report(name, worst <= limit and total > 0, f"{total} matrices within {worst:.1e} of the largest")


for scheme in ["int4", "int4:zero=group", "int4:g=64", "int8", "int8:g=128,zero=group",
               "int3", "int2:g=64", "int3:zero=group", "int2:g=64,zero=group", "mxfp4", "nvfp4",
               "fp8:max=448"]:
    compressed_tensors(scheme)
for scheme in ["int4", "int4:g=64", "int8:g=64", "int3", "int2", "int4:zero=group",
               "int3:zero=group", "int2:g=64,zero=group"]:
    gptq(scheme)
for scheme in ["int4", "int4:g=64,zero=group"]:
    awq(scheme)
for scheme in ["fp6", "fp6:e=2", "fp5", "fp7", "fp4", "fp8:max=448", "int4", "int8",
               "int3", "int4:zero=group", "int3:zero=group", "int2:zero=group"]:
    humming(scheme)
mlx("int4:g=64")
mlx("int8:g=128")
mlx("int3:g=64")
for scheme in ["int4:g=64,zero=group", "int3:g=32,zero=group", "int2:zero=group"]:
    mlx(scheme, "--lossy")

# compressed-tensors 0.20.1 does not pack zero-points of modules on the meta device, where
# transformers makes them, so it refuses every asymmetric checkpoint with a size mismatch.
half = torch.float16
compare_logits("transformers, dense", export("nf4", "dense"), "nf4", torch.float32, 2e-3)
for scheme in ["int4", "int4:zero=group", "int8", "fp8:max=448"]:
    compare_logits(f"transformers, compressed-tensors {scheme}",
                   export(scheme, "compressed-tensors"), scheme, half, 5e-3)
compare_logits("transformers, compressed-tensors fp8:max=448 --fp8-inputs",
               export("fp8:max=448", "compressed-tensors", "--fp8-inputs"), "fp8:max=448",
               torch.float32, 1e-6, fp8_inputs)
compare_logits("transformers, bnb nf4:g=64", export("nf4:g=64", "bnb"), "nf4:g=64", half, 5e-3)
for form in ["gptq", "awq"]:
    compare_logits(f"transformers, {form}", export("int4", form), "int4", half, 5e-3)

# ---- golden bytes -------------------------------------------------------------------------------

FORMATS = {
    "compressed-tensors": ["int4:g=64", "int4:zero=group", "int8", "fp8:max=448",
                           "int3", "mxfp4", "nvfp4", "int3:zero=group"],
    "humming": ["fp6", "fp5", "fp4", "int4:zero=group"],
    "gptq": ["int4:g=64", "int4:zero=group", "int3", "int2:zero=group"],
    "awq": ["int4:g=64", "int4:zero=group"],
    "bnb": ["nf4"],
    "mlx": ["int4:g=64"],
    "dense": ["nf3", "mix24"],
}


def write_golden():
    lines = []
    for form, schemes in FORMATS.items():
        for scheme in schemes:
            box = os.path.join(work, f"one-{scheme}")
            if not os.path.exists(box):
                run("quantize", checkpoint, "-o", box, "--scheme", "none", "--tensor",
                    "layers.0.self_attn.k_proj=" + scheme)
            out = os.path.join(work, f"one-{form}-{scheme}")
            run("export", box, "-o", out, "--format", form, "--force")
            data = open(os.path.join(out, "model.safetensors"), "rb").read()
            config = open(os.path.join(out, "config.json"), "rb").read()
            lines.append(f"{hashlib.sha256(data + config).hexdigest()} {form} {scheme}\n")
    with open(golden, "w") as f:
        f.writelines(lines)


if not failed:
    write_golden()
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(failed > 0)
