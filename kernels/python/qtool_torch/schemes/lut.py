"""lut: a table of 2^bits values and a scale per row and group; or zero-points and no table."""
import torch

from . import layout

# Tables of fixed values too: every tensor stores its table.
PRESETS = {"nf4": 4, "nf3": 3, "nf2": 2, "lut4": 4, "lut3": 3, "lut2": 2, "int3": 3, "int2": 2,
           "iq4nl": 4, "mxfp4": 4, "nvfp4": 4}


def parse(name, params, k, stored):
    group = int(params["g"])
    if group not in (16, 32, 64, 128, 256):
        raise ValueError(f"groups of {group}")
    return {"bits": PRESETS[name], "group": group, "zero": int(params.get("zero") == "group")}


def stored_layout(f):
    return "frag16x64/nibble"


def sections(f):
    strips, g = layout.strips(f.n), layout.groups(f.k, f.group)
    last = {"zero": (torch.uint8, [strips, g, 2 * f.bits])} if f.zero \
        else {"table": (torch.float16, [1 << f.bits])}
    return {**layout.plane_sections(f.n, f.k, f.bits),
            "scale": (torch.float16, [strips, g, 16]), **last}


def check(f, s):
    if f.zero:
        return
    table = s["table"]
    if not (table.abs().max() <= 1 and bool((table[1:] >= table[:-1]).all())):
        raise ValueError("the table is not ascending within [-1, 1]")


def decode(f, s):
    planes = [s[f"plane{i}"] for i in range(len(layout.plane_widths(f.bits)))]
    codes = layout.unpack(planes, "nibble", f.n, f.k)
    scale = layout.spread(layout.scales(s["scale"], f.exp2, f.n), f.group, f.k)
    if f.zero:
        zero = layout.spread(layout.zeros(s["zero"], f.bits, f.n), f.group, f.k)
        return scale * (codes - zero).float()
    return scale * s["table"].float()[codes]


def no_kernel(f):
    return "groups of 16" if f.group == 16 else "zero-points of 2 or 3 bits" if f.zero else ""
