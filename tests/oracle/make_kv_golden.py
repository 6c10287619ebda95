#!/usr/bin/env python3
"""Golden numbers of 4-bit KV caches, computed as docs/format.md defines them: nothing here is
shared with pack/. Writes FP32 arrays [70 tokens][2 KV heads][20 channels] to tests/golden/kv:
keys.bin and values.bin, and what the cache holds of them after the last token: channel.bin and
token.bin (keys) and rounded.bin (values). Needs numpy only."""
import pathlib
import sys

import numpy as np

OUT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/kv")
TOKENS, HEADS, DIM = 70, 2, 20
F32, F16 = np.float32, np.float16


def codes(q):
    return np.clip(np.rint(q), 0, 15).astype(F32)


def scale_of(bits):
    return F32(np.uint16(bits).view(F16))


def nearest(want, low_bits):
    """Bits of the FP16 number nearest to one, of those that end in low_bits."""
    return min(range(low_bits, 0x7C00, 64), key=lambda b: (abs(b - want), -b))


def keys_round(x):
    """Keys that share an FP16 number: the magnitude is the scale, whose low six bits are the
    magnitude of the zero-point, and the sign is that of the zero-point."""
    low, high = x.min(), x.max()
    middle = (low + high) / F32(2)

    def zero(bits):
        return int(np.clip(np.rint(F32(7.5) - middle * (F32(1) / scale_of(bits))), -63, 63))

    least = abs(middle) * F32(9 / 32)
    want = max(int(F16(max(high - low, least) / F32(15)).view(np.uint16)), 96)
    first = abs(zero(want))
    base = nearest(want, first) - first
    z = zero(base + first)
    s = scale_of(base + abs(z))
    return (codes(x * (F32(1) / s) + F32(z)) - F32(z)) * s


def values_round(x):
    """Values that share an FP16 number, the scale, whose low six bits are 4 * zero-point."""
    low, high = min(x.min(), F32(0)), max(x.max(), F32(0))
    zero = int(np.rint(low * F32(-60) / (high - low))) if high > low else 0
    want = int(F16((high - low) / F32(15)).view(np.uint16))
    bits = nearest(want, zero) or 0x3C00
    s, z = scale_of(bits), F32((bits & 63) / 4)
    return (codes(x * (F32(1) / s) + z) - z) * s


def source(rng):
    """Heavy tails; tokens of very different sizes, some constant, zero, or beyond FP16."""
    x = rng.standard_normal((TOKENS, HEADS, DIM)) ** 3
    x *= 2.0 ** rng.integers(-20, 12, (TOKENS, 1, 1))
    x[7] = 0
    x[8] = 1.001
    x[9, 0] = np.linspace(-1e6, 1e6, DIM)
    x[10, 1, 3] = 65520
    x[11] = np.abs(x[11])
    x[12] = -np.abs(x[12])
    x[13] = np.arange(DIM) % 16 - 4.5
    return x.astype(F32)


def main():
    rng = np.random.default_rng(64)
    keys, values = source(rng), source(rng)
    limit = F32(65504)
    k, v = np.clip(keys, -limit, limit), np.clip(values, -limit, limit)
    k16 = k.astype(F16).astype(F32)
    channel, token, rounded = k16.copy(), k.copy(), v.copy()
    for h in range(HEADS):
        for c in range(DIM):  # token 0 stays in FP16
            for first, end in ((1, 64), (64, TOKENS)):
                channel[first:end, h, c] = keys_round(k16[first:end, h, c])
        for t in range(TOKENS):
            token[t, h] = keys_round(k[t, h])
            for c in range(0, DIM, 16):
                rounded[t, h, c : c + 16] = values_round(v[t, h, c : c + 16])
    OUT.mkdir(parents=True, exist_ok=True)
    arrays = dict(keys=keys, values=values, channel=channel, token=token, rounded=rounded)
    for name, array in arrays.items():
        array.astype("<f4").tofile(OUT / f"{name}.bin")


main()
