#!/usr/bin/env python3
"""Writes tests/golden/qcal/experts.qcal: a calibration file (docs/format.md) with a layer of latent
attention and a layer of two experts, of the activations that test_qcal.c makes.

    usage: make_qcal_golden.py OUT.qcal      needs numpy
"""
import json
import struct
import sys
import zlib

import numpy as np

K = [[3, 2, 1, 4, 3, 6], [3, 4, 3, 2, 3, 5, 3]]
EXPERTS = [0, 2]
ROUTED = [11, 4]
TOKENS = 3 * 4 + 8


def activations(layer, i, tokens):
    """x[t][j] = FP32(sin(1 + t + 31 j + 7 i + 3 layer)) * 2^(3 j - 8); channel 2 is 0."""
    k = K[layer][i]
    t, j = np.arange(tokens)[:, None], np.arange(k)[None, :]
    x = np.sin((1 + t + 31 * j + 7 * i + 3 * layer).astype(np.float64)).astype(np.float32)
    x = x * np.exp2(3.0 * j - 8).astype(np.float32)
    x[:, 2:3] = 0
    return x


def bins(x):
    """Bin 0 is [0, 2^-16), bin b is [2^((b - 33) / 2), 2^((b - 32) / 2)), bin 63 has no end."""
    edges = np.exp2((np.arange(1, 64) - 33.0) / 2)
    return np.searchsorted(edges, np.abs(x).astype(np.float64), side="right")


def statistics(layer, i):
    experts = EXPERTS[layer]
    first = len(K[layer]) - (2 * experts + 1) if experts else len(K[layer])
    of_expert = first <= i < first + 2 * experts
    x = activations(layer, i, ROUTED[(i - first) // 2] + 1 if of_expert else TOKENS)
    wide = x.astype(np.float64)
    k = x.shape[1]
    sum2, h = np.zeros(k), np.zeros((k, k))
    for row in wide:  # the order of the sums is that of the tokens
        sum2 += row * row
        h += np.outer(row, row)
    hist = np.stack([np.bincount(bins(x[:, c]), minlength=64) for c in range(k)])
    return {"sum2": ("F64", sum2), "hist": ("U32", hist.astype(np.uint32)),
            "absmax": ("F32", np.abs(x).max(0)),
            "h": ("F32", h[np.tril_indices(k)].astype(np.float32))}


def main(out):
    tensors, data = {}, b""
    crcs = {}

    def add(name, dtype, values):
        nonlocal data
        raw = values.tobytes()
        tensors[name] = {"dtype": dtype, "shape": list(values.shape),
                         "data_offsets": [len(data), len(data) + len(raw)]}
        crcs[name] = f"{zlib.crc32(raw):08x}"
        data += raw

    for layer, widths in enumerate(K):
        for i in range(len(widths)):
            for kind, (dtype, values) in statistics(layer, i).items():
                add(f"layers.{layer}.input.{i}.{kind}", dtype, values)
        if EXPERTS[layer]:
            add(f"layers.{layer}.routed", "U32", np.array(ROUTED, np.uint32))
    document = {
        "format": "qtool-calibration", "version": 2, "tool": {"name": "qtool", "version": "golden"},
        "model": {"family": "mixtral", "layers": 2, "hidden": 3, "sample_crc32": "abcdef01",
                  "k": K, "experts": EXPERTS},
        "tokens": TOKENS,
        "parts": [{"samples": 3, "seqlen": 4, "seed": 9, "bos": True, "ids_crc32": "00001234",
                   "data": ["prose.txt", "b?.txt"]},
                  {"samples": 1, "seqlen": 8, "seed": 0, "bos": False, "ids_crc32": "fedcba98",
                   "data": ["prose.txt"]}],
        "crc32": crcs}
    header = json.dumps({"__metadata__": {"qtool": json.dumps(document)}, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    with open(out, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + data)


if __name__ == "__main__":
    main(sys.argv[1])
