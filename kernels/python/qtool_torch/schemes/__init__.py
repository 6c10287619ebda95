"""The schemes of docs/schemes.md, decoded by PyTorch.

A scheme is a module with

    PRESETS                  names in the manifest
    parse(name, params, k, stored)
                             the fields of Format; params: those of the manifest's scheme text,
                             stored: {name: (dtype, shape)} of the sections
    stored_layout(f)         the manifest's `layout`
    sections(f)              {name: (dtype, shape)} in the order of operator arguments
    check(f, s)              raises ValueError if values could lead a kernel out of its memory, or
                             are not what the scheme allows
    decode(f, s)             W, FP32 [n][k]
    no_kernel(f)             why no fused kernel takes the matrix, or ""

and, if a product is more than F.linear(x, W), `prepare` and `product`.
"""
from importlib import import_module
from typing import NamedTuple

import torch

NAMES = ["lut", "fpx", "int", "mix24", "w4ax"]
SCHEMES = [import_module(f".{name}", __name__) for name in NAMES]


class Format(NamedTuple):
    """A quantized matrix W[n][k]. All integers: operators take it as int[]."""
    scheme: int  # index in SCHEMES
    n: int
    k: int
    exp2: int  # scale_exp2 of the manifest
    bits: int = 0
    exp_bits: int = 0  # fpx
    group: int = 0  # channels per scale; 0: one scale per row
    zero: int = 0  # int, lut: 1 with zero-points
    fours: int = 0  # mix24: units of 4-bit groups
    rows: int = 0  # mix24: rows that share a second-order scale
    outliers: int = 0  # mix24
    scales: int = 0  # w4ax: index in w4ax.SCALES
    rotate: int = 0  # w4ax: 1: channel blocks are rotated by Hadamard matrices
    padded: int = 0  # w4ax: K is padded to multiples of this


FIELDS = len(Format._fields)


def scheme_of(f: Format):
    return SCHEMES[f.scheme]


def parse(text: str, n: int, k: int, exp2: int, stored: dict) -> Format:
    """Format of a manifest's scheme text; `stored`: {name: (dtype, shape)} of its sections."""
    name, _, rest = text.partition(":")
    params = dict(item.split("=", 1) for item in rest.split(",") if item)
    for index, scheme in enumerate(SCHEMES):
        if name in scheme.PRESETS:
            return Format(index, n, k, exp2, **scheme.parse(name, params, k, stored))
    raise ValueError(f"the scheme '{name}' is not known")


def sections(f: Format):
    return scheme_of(f).sections(f)


def check(f: Format, s: dict):
    if not bool(torch.isfinite(s["scale"]).all() if "scale" in s else True):
        raise ValueError("a scale is not finite")
    scheme_of(f).check(f, s)


def decode(f: Format, s: dict):
    return scheme_of(f).decode(f, s)


def prepare(f: Format, s: dict, dtype):
    """Tensors for `product`, computed once."""
    scheme = scheme_of(f)
    return scheme.prepare(f, s, dtype) if hasattr(scheme, "prepare") else [decode(f, s).to(dtype)]


def product(f: Format, x, prepared):
    """x W^T without a fused kernel."""
    scheme = scheme_of(f)
    if hasattr(scheme, "product"):
        return scheme.product(f, x, prepared)
    return torch.nn.functional.linear(x, prepared[0])
