"""w4ax: INT4 weights for activations that are quantized to 4 or 8 bits per channel block of 128."""
import torch

from . import layout

PRESETS = {"w4ax": 4}
BLOCK = 128
SCALES = ["block", "int", "row"]


def parse(name, params, k, stored):
    rotate = params.get("rotate")  # absent: format version 1, see `version`
    return {"bits": 4, "scales": SCALES.index(params["scales"]),
            "rotate": 0 if rotate is None else ["none", "hadamard"].index(rotate),
            "padded": 128 if rotate is None else 64}


def version(f):
    """The format version of containers with such matrices."""
    return 1 if f.padded == 128 else 2


def stored_layout(f):
    return "frag16x64/byte"


def _blocks(f):
    return -(-f.k // BLOCK)


def sections(f):
    strips, blocks = layout.strips(f.n), _blocks(f)
    out = {"plane0": (torch.uint32, [strips, -(-f.k // f.padded) * f.padded // 64, 32, 4]),
           "scale": (torch.float16, [strips, blocks if SCALES[f.scales] == "block" else 1, 16])}
    if SCALES[f.scales] == "int":
        out["sub"] = (torch.uint8, [strips, blocks, 16])
    return {**out, "bits": (torch.uint8, [blocks]), "clip": (torch.float32, [1]),
            "col_order": (torch.uint32, [f.k]), "col_exp2": (torch.int8, [f.k]),
            "row_order": (torch.uint32, [f.n]), "row_exp2": (torch.int8, [f.n])}


def check(f, s):
    bits, clip = s["bits"].int(), float(s["clip"])
    if not bool(((bits == 4) | (bits == 8)).all()):
        raise ValueError("bits of a channel block are neither 4 nor 8")
    if not 0 < clip < 1e30:
        raise ValueError("the clip ratio is not positive")
    for name, size in (("col_order", f.k), ("row_order", f.n)):
        order = s[name].long().sort().values
        if not torch.equal(order, torch.arange(size, device=order.device)):
            raise ValueError(f"{name} is not a permutation")


def packed(f, s):
    """w' [n][k]: rows and columns in packed order."""
    codes = layout.unpack([s["plane0"]], "byte", f.n, f.k)
    q = ((codes ^ 8) - 8).float()
    scale = layout.scales(s["scale"], f.exp2, f.n)
    if SCALES[f.scales] == "int":
        scale = scale * layout.unpack_rows(s["sub"], f.n).float()
    if scale.shape[1] > 1:
        scale = layout.spread(scale, BLOCK, f.k)
    return scale * q


def _hadamard(x):
    """x [...][s] times the Hadamard matrix of s channels."""
    s = x.shape[-1]
    shape, distance = x.shape, s // 2
    while distance:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).reshape(shape)
        distance //= 2
    return x * s**-0.5


def rotate(x):
    """Rotates the channel blocks of x FP32 [m][k]."""
    whole = x.shape[1] // BLOCK * BLOCK
    out = [_hadamard(x[:, :whole].unflatten(1, (-1, BLOCK))).flatten(1)] if whole else []
    at = whole
    for size in (64, 32, 16, 8, 4, 2, 1):
        if (x.shape[1] - whole) & size:
            out.append(_hadamard(x[:, at : at + size]))
            at += size
    return torch.cat(out, 1)


def _power(exponents):
    return torch.exp2(exponents.float())


def decode(f, s):
    """W [n][k] in the order of the source."""
    w = packed(f, s)
    w = rotate(w) if f.rotate else w
    w = w * _power(s["row_exp2"])[:, None] / _power(s["col_exp2"])
    out = torch.empty_like(w)
    out[s["row_order"].long()[:, None], s["col_order"].long()] = w
    return out


def _rows(f, s):
    """Where in packed order the rows of the source are."""
    order = s["row_order"].long()
    rows = torch.empty_like(order)
    rows[order] = torch.arange(f.n, device=rows.device)
    return rows


def prepare(f, s, dtype):
    """What `product` takes."""
    rows = _rows(f, s)
    return [packed(f, s), s["bits"], float(s["clip"]), s["col_order"].long(), _power(-s["col_exp2"]),
            rows, _power(s["row_exp2"])[rows]]


def around(f, s, dtype):
    """What surrounds the kernel, all in the order of the source and None where it does nothing:
    factors of channels, positions of rows, factors of rows."""
    rows = _rows(f, s)
    columns = torch.empty(f.k, device=rows.device)
    columns[s["col_order"].long()] = _power(-s["col_exp2"])
    return [columns.to(dtype) if bool(s["col_exp2"].any()) else None,
            None if torch.equal(rows, torch.arange(f.n, device=rows.device)) else rows,
            _power(s["row_exp2"])[rows].to(dtype) if bool(s["row_exp2"].any()) else None]


def quantize(f, x, bits, clip):
    """Rounds activations x FP32 [m][k] in packed order as the runtime does. Factors are numbers of
    Python, rounded once to FP32: GPUs divide a tensor by a number by way of its reciprocal."""
    m, k = x.shape
    x = rotate(x) if f.rotate else x
    v = torch.nn.functional.pad(x, (0, -k % BLOCK)).unflatten(1, (-1, BLOCK))
    four = (bits == 4)[None, :, None]
    a, t = v.abs().amax(2, keepdim=True), v.abs().amax((1, 2), keepdim=True)
    u = t * (1 / 127)
    if SCALES[f.scales] == "block":
        s = torch.where(four, a * (clip / 7), a * (1 / 127))
    elif SCALES[f.scales] == "int":
        factor = torch.round(a * clip / (7 * u)).nan_to_num(1.0).clamp(1, 18)
        s = torch.where(four, factor, 1.0) * u
    else:
        s, four = u.expand_as(a), torch.zeros_like(four)
    usable = s >= 2.0**-120
    inverse = (1 / torch.where(usable, s, 1.0)).double()
    q = torch.round(v.double() * inverse).float()  # FP64: the product is exact
    limit = torch.where(four, 7.0, 127.0)
    q = torch.where(usable, torch.minimum(torch.maximum(q, -limit), limit), 0.0)
    return (q * s).flatten(1)[:, :k]


def product(f, x, prepared):
    w, bits, clip, columns, column_scale, rows, row_scale = prepared
    v = x.reshape(-1, f.k).float()[:, columns] * column_scale
    y = (quantize(f, v, bits, clip) @ w.T)[:, rows] * row_scale
    return y.to(x.dtype).reshape(*x.shape[:-1], f.n)


def no_kernel(f):
    return "K is no multiple of 8" if f.k % 8 else ""
