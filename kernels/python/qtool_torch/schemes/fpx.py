"""fpx: minifloats ExMy, one scale per row."""
import torch

from . import layout

PRESETS = {"fp8": 8, "fp7": 7, "fp6": 6, "fp5": 5, "fp4": 4, "fpx": 0}


def parse(name, params, k, stored):
    bits, e = PRESETS[name] or int(params["bits"]), int(params["e"])
    if not 3 <= bits <= 8 or not 1 <= e < bits or e > 6:
        raise ValueError(f"{bits} bits with {e} exponent bits")
    return {"bits": bits, "exp_bits": e}


def _order(f):
    return "nibble" if f.bits <= 4 else "whole" if f.bits == 8 else "half"


def stored_layout(f):
    return "frag16x64/" + _order(f)


def sections(f):
    return {**layout.plane_sections(f.n, f.k, f.bits),
            "scale": (torch.float16, [layout.strips(f.n), 1, 16])}


def check(f, s):
    pass


def values(bits, e):
    """The value of every code."""
    m, bias = bits - 1 - e, 2 ** (e - 1) - 1
    out = []
    for code in range(1 << bits):
        magnitude, sign = (code & 127, code >> 7) if bits == 8 else (code >> 1, code & 1)
        x, fraction = magnitude >> m, magnitude % 2**m / 2**m
        value = 2.0 ** (x - bias) * (1 + fraction) if x else 2.0 ** (1 - bias) * fraction
        out.append(-value if sign else value)
    return torch.tensor(out)


def decode(f, s):
    planes = [s[f"plane{i}"] for i in range(len(layout.plane_widths(f.bits)))]
    codes = layout.unpack(planes, _order(f), f.n, f.k)
    value = values(f.bits, f.exp_bits).to(codes.device)[codes]
    return layout.scales(s["scale"], f.exp2, f.n) * value


def no_kernel(f):
    return "6 exponent bits" if f.exp_bits == 6 else ""
