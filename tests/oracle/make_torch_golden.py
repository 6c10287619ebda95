#!/usr/bin/env python3
"""Writes tests/golden/torch/, small checkpoints by the real torch.save (tests/unit/test_torch.c).

Usage: make_torch_golden.py OUTDIR. Values are i/4 for element i of a fresh tensor, so that the test
can state them without a copy of this script.
"""
import collections
import json
import os
import sys
import zipfile

import torch


def ramp(*shape, dtype=torch.float32):
    n = 1
    for s in shape:
        n *= s
    return (torch.arange(n, dtype=torch.float32) / 4).to(dtype).reshape(shape)


class Evil:
    def __reduce__(self):
        return (os.system, ("true",))


def save(name, value, **options):
    torch.save(value, os.path.join(OUT, name), **options)


def deflate(source, target):
    with zipfile.ZipFile(os.path.join(OUT, source)) as old, \
            zipfile.ZipFile(os.path.join(OUT, target), "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))


def main():
    os.makedirs(OUT, exist_ok=True)
    save("plain.bin", collections.OrderedDict(w=ramp(3, 5), b=ramp(5), n=torch.tensor(7)))
    save("protocol4.pt", {"w": ramp(3, 5), "b": ramp(5)}, pickle_protocol=4)
    save("halves.pt", {"h": ramp(4, 4, dtype=torch.float16), "b": ramp(4, 4, dtype=torch.bfloat16),
                       "d": ramp(2, dtype=torch.float64), "empty": torch.zeros(0, 4)})
    codes = torch.arange(15, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(3, 5)
    save("float8.pt", {"w": codes, "t": codes.t(),
                       "u": torch.tensor([1, 2, 3, 65535], dtype=torch.uint16),
                       "h": ramp(4, dtype=torch.float16)})
    save("float4.pt", {"w": codes.view(torch.float4_e2m1fn_x2)})
    shared = ramp(6, 4)
    save("shared.bin", {"embed": shared, "head": shared, "row": shared[2]})
    save("transposed.pth", {"t": ramp(3, 4).t(), "p": ramp(2, 3, 4).permute(2, 0, 1),
                            "s": ramp(4, 6)[1:, ::2]})
    module = torch.nn.Linear(4, 3)
    module.weight.data = ramp(3, 4)
    module.bias.data = ramp(3)
    save("module.pt", module.state_dict())  # with its _metadata attribute
    save("parameter.pt", {"w": torch.nn.Parameter(ramp(3, 5))})
    marked = torch.nn.Parameter(ramp(3, 5))
    marked._is_hf_initialized = True  # as those of transformers are
    save("marked.pt", {"w": marked})
    save("nested.pt", {"epoch": 3, "lr": 0.5, "betas": (0.9, 0.95),
                       "state_dict": {"w": ramp(3, 5)}})
    save("expanded.pt", {"w": ramp(1).expand(1000)})
    save("wide.pt", {"x": {"w": ramp(3)}, "w": ramp(3)})
    save("list.pt", [ramp(3)])
    save("legacy.pt", {"w": ramp(3)}, _use_new_zipfile_serialization=False)
    save("evil.bin", {"w": ramp(3), "x": Evil()})
    deflate("plain.bin", "deflated.bin")

    shards = {"pytorch_model-00001-of-00002.bin": {"a": ramp(2, 2), "c": ramp(3)},
              "pytorch_model-00002-of-00002.bin": {"b": ramp(4)}}
    os.makedirs(os.path.join(OUT, "sharded"), exist_ok=True)
    for name, tensors in shards.items():
        save(os.path.join("sharded", name), tensors)
    index = {"metadata": {"total_size": 44},
             "weight_map": {t: name for name, tensors in shards.items() for t in tensors}}
    with open(os.path.join(OUT, "sharded", "pytorch_model.bin.index.json"), "w") as f:
        json.dump(index, f, indent=2)


if __name__ == "__main__":
    OUT = sys.argv[1]
    main()
