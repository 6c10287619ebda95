"""int: 4- or 8-bit integers, symmetric or with a zero-point per row and group."""
import torch

from . import layout

PRESETS = {"int4": 4, "int8": 8}


def parse(name, params, k, stored):
    group, zero = int(params["g"]), params["zero"]
    if group not in (0, 32, 64, 128, 256) or zero not in ("none", "group"):
        raise ValueError(f"groups of {group}, zero-points '{zero}'")
    return {"bits": PRESETS[name], "group": group, "zero": int(zero == "group")}


def _order(f):
    return "half" if f.bits == 4 else "whole"


def stored_layout(f):
    return "frag16x64/" + _order(f)


def sections(f):
    strips, g = layout.strips(f.n), layout.groups(f.k, f.group)
    out = {**layout.plane_sections(f.n, f.k, f.bits), "scale": (torch.float16, [strips, g, 16])}
    if f.zero:
        out["zero"] = (torch.uint8, [strips, g, 2 * f.bits])
    return out


def check(f, s):
    pass


def decode(f, s):
    planes = [s[f"plane{i}"] for i in range(len(layout.plane_widths(f.bits)))]
    codes = layout.unpack(planes, _order(f), f.n, f.k)
    zero = 1 << (f.bits - 1)
    if f.zero:
        zero = layout.spread(layout.zeros(s["zero"], f.bits, f.n), f.group, f.k)
    scale = layout.spread(layout.scales(s["scale"], f.exp2, f.n), f.group, f.k)
    return scale * (codes - zero).float()


def no_kernel(f):
    return ""
