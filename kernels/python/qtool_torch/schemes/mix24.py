"""mix24: groups of 2- and 4-bit codes, quantized scales, FP16 outliers."""
import torch

from . import layout

PRESETS = {"mix24": 0}
PANEL = 65536  # packed columns with 16-bit column indices
EMPTY = 65535  # in perm


def parse(name, params, k, stored):
    group, rows = int(params["g"]), int(params["g2"])
    four = float(params["four"])
    if group not in (8, 16) or rows not in (8, 16) or not 0 <= four <= 1:
        raise ValueError(f"groups of {group}, {rows} rows, a share of {four}")
    outliers = stored["csr_val"][1][0] if "csr_val" in stored else 0
    return {"group": group, "rows": rows, "fours": int(four * -(-k // 128) + 0.5),
            "outliers": outliers}


def stored_layout(f):
    return "mix16x128"


def _units(f):
    return -(-f.k // 128)


def is_four(f):
    """For each unit, whether it has 4-bit groups."""
    units = _units(f)
    return [(u + 1) * f.fours // units > u * f.fours // units for u in range(units)]


def _record_bytes(f, four):
    params = 64 + (64 if four else 32) + 16 * (16 // f.rows)
    return (1024 if four else 512) + 16 // f.group * params


def sections(f):
    units = _units(f)
    width = f.fours * _record_bytes(f, True) + (units - f.fours) * _record_bytes(f, False)
    out = {"stream": (torch.uint8, [layout.strips(f.n), width]),
           "perm": (torch.uint16, [128 // f.group * units])}
    if f.outliers:
        out["csr_ptr"] = (torch.uint32, [-(-128 * units // PANEL), f.n + 1])
        out["csr_col"] = (torch.uint16, [f.outliers])
        out["csr_val"] = (torch.float16, [f.outliers])
    return out


def check(f, s):
    perm = s["perm"].int()
    filled = perm[perm != EMPTY]
    count = -(-f.k // f.group)
    if not torch.equal(filled.sort().values, torch.arange(count, device=perm.device)):
        raise ValueError("perm does not have each group once")
    if not f.outliers:
        return
    ptr = s["csr_ptr"].long()
    flat = torch.cat([ptr[:, :-1].flatten(), ptr[-1:, -1]])
    if int(flat[0]) != 0 or int(flat[-1]) != f.outliers or bool((flat[1:] < flat[:-1]).any()) \
            or bool((ptr[1:, 0] != ptr[:-1, -1]).any()):
        raise ValueError("csr_ptr is not ascending from 0 to the number of outliers")
    if not bool(torch.isfinite(s["csr_val"]).all()):
        raise ValueError("an outlier is not finite")
    _, column = _outliers(f, s)
    if int(column.max()) >= 128 * _units(f):
        raise ValueError("csr_col is beyond the last column")


def _outliers(f, s):
    """Row and packed column of every outlier."""
    counts = s["csr_ptr"].long().diff(dim=1)
    panels, n = counts.shape
    row = torch.arange(n, device=counts.device).repeat(panels).repeat_interleave(counts.flatten())
    panel = torch.arange(panels, device=counts.device).repeat_interleave(counts.sum(1))
    return row, s["csr_col"].long() + PANEL * panel


def _fields(words, at, bits):
    """Fields of `bits` bits from bit `at` up, bit 0 following bit 31."""
    words = words.long() & 0xffffffff
    return (words >> at | words << (32 - at)) & ((1 << bits) - 1)


def _decode_units(f, records, four):
    """FP32 [strips][units][16][128] of records U8 [strips][units][bytes], before 2^exp2."""
    device, bits = records.device, 4 if four else 2
    y = torch.arange(16, device=device)[:, None]
    c = torch.arange(128, device=device)[None, :]
    b, t, j = c // 64, c % 64 // 16, c % 16
    lane, s, i, h = 4 * (y % 8) + t, j // 4, 2 * (j % 4 // 2) + y // 8, j % 2
    at = 1024 if four else 512
    codes = records[..., :at].contiguous().view(torch.int32)
    if four:
        code = _fields(codes[..., 128 * b + 4 * lane + s], (16 * h + 2 + 4 * i) % 32, 4)
    else:
        code = _fields(codes[..., 4 * lane + 2 * b + s // 2],
                       (16 * h + 2 + 2 * (4 * (s % 2) + i)) % 32, 2)

    size = (records.shape[-1] - at) // (16 // f.group)
    parts = records[..., at:].unflatten(-1, (-1, size))  # one, or for groups of 8 two
    part = j // f.group

    def words(first, last, dtype):
        return parts[..., first:last].contiguous().view(dtype).to(torch.int32)

    end = 64 + (64 if four else 32)
    q = words(0, 64, torch.int16)[..., part, lane] >> (8 * (y // 8) + 4 * b) & 15
    if four:
        zero = words(64, end, torch.int16)[..., part, lane] >> (8 * b + 4 * (y // 8)) & 15
    else:
        zero = words(64, end, torch.uint8)[..., part, lane] >> (4 * b + 2 * (y // 8)) & 3
    u = words(end, size, torch.int16)[..., part, 2 * t + b + (8 * (y // 8) if f.rows == 8 else 0)]
    z2, s2 = u & 15, (u & 0x7f80).to(torch.int16).view(torch.float16).float()
    scale = (q + z2).float() * s2 * 2.0**-22
    return (code.float() * scale - (zero.float() * scale).half().float()).half().float()


def decode(f, s):
    four = torch.tensor(is_four(f))
    sizes = [_record_bytes(f, x) for x in four.tolist()]
    records = s["stream"].split(sizes, 1)
    strips, units = layout.strips(f.n), _units(f)
    packed = torch.empty(strips, units, 16, 128, device=s["stream"].device)
    for kind in (False, True):
        chosen = [u for u in range(units) if bool(four[u]) == kind]
        if chosen:
            packed[:, chosen] = _decode_units(f, torch.stack([records[u] for u in chosen], 1), kind)
    packed = packed.permute(0, 2, 1, 3).reshape(16 * strips, 128 * units)
    if f.outliers:
        packed[_outliers(f, s)] = s["csr_val"].float()
    perm = s["perm"].long()
    slots = packed.unflatten(1, (-1, f.group))[: f.n, perm != EMPTY]
    w = torch.empty_like(slots)
    w[:, perm[perm != EMPTY]] = slots
    return (w.flatten(1)[:, : f.k].double() * 2.0**f.exp2).float()


def no_kernel(f):
    return "groups of 8" if f.group == 8 or f.rows == 8 else ""
