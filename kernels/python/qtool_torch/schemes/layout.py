"""Fragment layouts: where the bits of a code are (docs/schemes.md, "Code layouts")."""
import torch

# Position of row y of a strip in the 16 scales of the strip.
SCALE_ORDER = [2 * (y % 8) + y // 8 for y in range(16)]


def plane_widths(bits):
    """Bits of a code in each plane, from the top bits down."""
    return [4, 4] if bits == 8 else [p for p in (4, 2, 1) if bits & p]


def strips(n):
    return -(-n // 16)


def groups(k, group):
    return -(-k // group) if group else 1


def plane_sections(n, k, bits):
    return {f"plane{i}": (torch.uint32, [strips(n), -(-k // 64), 32, p])
            for i, p in enumerate(plane_widths(bits))}


def _first_bit(order, p):
    """Index of the word in a fragment block and of the lowest bit, for each of 16 x 64 weights."""
    y, x = torch.arange(16)[:, None], torch.arange(64)[None, :]
    if order == "byte":
        lane = 4 * (y % 8) + x % 16 // 4
        at = 32 * (2 * (x // 32) + y // 8) + 8 * (x % 4) + 4 * (x % 32 // 16)
        return lane * p + at // 32, at % 32
    s, i, h = x // 16, y // 8 + 2 * (x % 16 // 8), x % 2
    lane, j = 4 * (y % 8) + x % 8 // 2, 4 * s + i
    if order == "nibble":
        at = 32 * (p * s // 4) + 8 * i + 4 * h + p * s % 4
    elif order == "whole":
        at = 32 * s + 16 * h + 8 * (i % 2)
        return 128 * (i // 2) + lane * p + at // 32, at % 32
    elif p == 2:
        at = 32 * (j // 8) + (16 * h + 2 * (j % 8) + 1) % 32
    else:
        at = 32 * (j // (16 // p)) + 16 * h + p * (j % (16 // p))
    return lane * p + at // 32, (at % 32).expand(16, 64)


def _unpack_plane(words, order, p):
    word, shift = (t.to(words.device) for t in _first_bit(order, p))
    r, c = words.shape[:2]
    picked = words.reshape(r, c, -1)[:, :, word]
    if order == "half" and p == 2:  # the two bits are 25 apart, modulo 32
        code = (picked >> shift & 1) | (picked >> (shift + 25) % 32 & 1) << 1
    else:
        code = picked >> shift & (255 if order == "whole" else (1 << p) - 1)
    return code.permute(0, 2, 1, 3).reshape(16 * r, 64 * c)


def unpack(planes, order, n, k):
    """Codes, int32 [n][k], of planes U32 [strips][fragment blocks][32][p]."""
    planes = [p.view(torch.int32) for p in planes]
    if order == "whole":
        return _unpack_plane(torch.cat([p.flatten(2) for p in planes], 2), order, 4)[:n, :k]
    code = 0
    for words in planes:
        p = words.shape[-1]
        code = code << p | _unpack_plane(words, order, p) if torch.is_tensor(code) \
            else _unpack_plane(words, order, p)
    return code[:n, :k]


def unpack_rows(stored, n):
    """[n][groups] of values stored as [strips][groups][16] in the order of scales."""
    return stored[:, :, SCALE_ORDER].permute(0, 2, 1).flatten(0, 1)[:n]


def zeros(stored, bits, n):
    """Zero-points, int32 [n][groups], of bit strings U8 [strips][groups][2 bits]."""
    one = stored[..., None].int() >> torch.arange(8, device=stored.device) & 1
    values = one.flatten(2).unflatten(2, (16, bits)) << torch.arange(bits, device=stored.device)
    return unpack_rows(values.sum(3), n).int()


def spread(values, group, k):
    """Repeats [n][groups] over the channels of each group: [n][k]."""
    return values.repeat_interleave(group, 1)[:, :k] if group else values


def scales(stored, exp2, n):
    """Scales times 2^exp2, rounded once to FP32: [n][groups]."""
    return (unpack_rows(stored, n).double() * 2.0**exp2).float()
