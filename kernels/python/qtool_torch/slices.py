"""Slices of quantized matrices for tensor parallelism (docs/kernels.md, "Slices"), and matrices on
top of each other."""
import torch

from . import schemes
from .schemes import layout


def rows(f, s, first, count):
    """Format and sections of rows [first, first + count)."""
    if (first, count) == (0, f.n):
        return f, s
    name = schemes.NAMES[f.scheme]
    if name == "w4ax":
        raise ValueError("w4ax matrices cannot be divided among devices: their rows are permuted")
    if first % 16:
        raise ValueError(f"a slice starts at row {first}, no multiple of 16")
    part = slice(first // 16, layout.strips(first + count))
    if name == "mix24":
        return _mix24_rows(f, s, first, count, part)
    return f._replace(n=count), {key: t if key == "table" else t[part].contiguous()
                                 for key, t in s.items()}


def _mix24_rows(f, s, first, count, part):
    out = {"stream": s["stream"][part].contiguous(), "perm": s["perm"]}
    if not f.outliers:
        return f._replace(n=count), out
    ptr = s["csr_ptr"].long()[:, first : first + count + 1]
    kept = torch.cat([torch.arange(a, b) for a, b in ptr[:, [0, -1]].tolist()])
    if not kept.numel():
        return f._replace(n=count, outliers=0), out
    sizes = (ptr[:, -1] - ptr[:, 0]).cumsum(0)
    out["csr_ptr"] = (ptr - ptr[:, :1] + (sizes - (ptr[:, -1] - ptr[:, 0]))[:, None]).int() \
        .view(torch.uint32)
    # PyTorch cannot index 16-bit unsigned numbers on every device.
    out["csr_col"] = s["csr_col"].view(torch.int16)[kept].view(torch.uint16)
    out["csr_val"] = s["csr_val"][kept]
    return f._replace(n=count, outliers=kept.numel()), out


def columns(f, s, first, count):
    """Format and sections of channels [first, first + count)."""
    if (first, count) == (0, f.k):
        return f, s
    if schemes.NAMES[f.scheme] in ("mix24", "w4ax"):
        raise ValueError("mix24 and w4ax matrices cannot be divided along channels, which are "
                         "permuted")
    step = max(64, f.group)
    if first % step or (count % step and first + count != f.k):
        raise ValueError(f"channels {first} to {first + count} do not start and end at multiples "
                         f"of {step}")
    out = {}
    for key, t in s.items():
        if key.startswith("plane"):
            t = t[:, first // 64 : -(-(first + count) // 64)].contiguous()
        elif key in ("scale", "zero") and f.group:
            t = t[:, first // f.group : layout.groups(first + count, f.group)].contiguous()
        out[key] = t
    return f._replace(k=count), out


def stacked(parts):
    """Merges neighbors of a list of (Format, sections) where one matrix can hold both: the same
    format and table, and whole strips."""
    out = []
    for f, s in parts:
        if out and _fit(*out[-1], f, s):
            g, t = out.pop()
            f, s = f._replace(n=g.n + f.n), {
                key: t[key] if key == "table" else torch.cat([t[key], s[key]]) for key in s}
        out.append((f, s))
    return out


def _fit(g, t, f, s):
    same = "table" not in s or torch.equal(t["table"], s["table"])
    return (schemes.NAMES[f.scheme] in ("lut", "fpx", "int") and g.n % 16 == 0
            and g == f._replace(n=g.n) and same)
