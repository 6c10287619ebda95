"""A checkpoint whose value heads have two channels 64 times as large, and whose o_proj takes them back.

    usage: value_outliers.py CKPT OUT      one model.safetensors of F16, biases of attention: none

The model is the same but for rounding; a cache of 4 bits that keeps such values as they are is of no use.
"""
import json, os, shutil, struct, sys

ckpt, out = sys.argv[1:]
config = json.load(open(ckpt + "/config.json"))
dim = config["head_dim"]
shutil.copytree(ckpt, out)
data = open(ckpt + "/model.safetensors", "rb").read()
size = struct.unpack("<Q", data[:8])[0]
header, data = json.loads(data[8 : 8 + size]), data[8 + size :]
parts, at = [], 0
for name, t in header.items():
    if name == "__metadata__":
        continue
    begin, end = t["data_offsets"]
    part = data[begin:end]
    if name.endswith(("v_proj.weight", "o_proj.weight")):
        n, k = t["shape"]
        values = list(struct.unpack("<%de" % (n * k), part))
        for r in range(n):
            for c in range(k):
                if name.endswith("v_proj.weight") and r % dim in (3, 40):
                    values[r * k + c] *= 64
                if name.endswith("o_proj.weight") and c % dim in (3, 40):
                    values[r * k + c] /= 64
        part, t["dtype"] = struct.pack("<%df" % (n * k), *values), "F32"
    t["data_offsets"] = [at, at + len(part)]
    parts.append(part)
    at += len(part)
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(out + "/model.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
