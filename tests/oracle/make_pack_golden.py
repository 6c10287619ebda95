#!/usr/bin/env python3
"""Golden bytes of packed matrices, derived from the drawings in formats/layouts/layout_frag.h and from the
scheme definitions alone: nothing here is shared with pack/. Writes tests/golden/pack/NAME.bin
(sections one after the other, in manifest order) and NAME.w (the FP32 source, row-major);
cases.txt lists NAME, scheme text, N, K, scale_exp2. Needs numpy only."""
import pathlib
import sys
from statistics import NormalDist

import numpy as np

from mix24_golden import mix24

OUT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/pack")


def nf_table(bits):
    nd, delta = NormalDist(), (1 / 30 + 1 / 32) / 2
    low = [nd.inv_cdf(p) for p in np.linspace(delta, 0.5, 2 ** (bits - 1))]
    high = [nd.inv_cdf(p) for p in np.linspace(0.5, 1 - delta, 2 ** (bits - 1) + 1)][1:]
    return np.float16([v / high[-1] for v in low + high]).astype(np.float32)


def mini_values(bits, e):
    """Magnitudes of ExMy in code order."""
    m = bits - 1 - e
    bias = 2 ** (e - 1) - 1
    out = []
    for mag in range(2 ** (bits - 1)):
        x, f = mag >> m, mag & (2**m - 1)
        if x == 31:
            break  # five exponent bits, as FP16 has: infinities and NaN there
        out.append((f / 2**m) * 2.0 ** (1 - bias) if x == 0 else (1 + f / 2**m) * 2.0 ** (x - bias))
    return np.float32(out)


def lut_codes(w, s, table):
    y = w * (np.float32(1) / s)
    mid = (table[:-1] + table[1:]) / np.float32(2)
    return np.array([int(sum(v > mid)) for v in y], np.uint8)


def mini_codes(w, s, bits, e):
    mags = mini_values(bits, e)
    out = []
    for v in w * (np.float32(1) / s):
        d = np.abs(mags.astype(np.float64) - abs(float(v)))
        best = np.flatnonzero(d == d.min())
        mag = int(best[0]) if len(best) == 1 else int([b for b in best if b % 2 == 0][0])
        sign = int(np.signbit(v))
        out.append(sign << 7 | mag if bits == 8 else mag << 1 | sign)
    return np.array(out, np.uint8)


# Words of one lane, as drawn. `q[s][i][h]` is the plane's field of step s, register i, value h.
def nibble_words(q, p):
    of = 4 // p  # steps of a word
    return [
        sum(
            q[of * w + s][i][h] << p * s << 4 * h << 8 * i for s in range(of) for i in range(4) for h in range(2)
        )
        for w in range(p)
    ]


def half_words(q, p):
    if p == 4:
        return [sum(sum(q[s][i][h] << 4 * i for i in range(4)) << 16 * h for h in range(2)) for s in range(4)]
    if p == 1:
        return [sum(sum(q[s][i][h] << (4 * s + i) for s in range(4) for i in range(4)) << 16 * h for h in range(2))]
    words = []
    for w in range(2):
        word = 0
        for j in range(8):
            for h in range(2):
                field = q[2 * w + j // 4][j % 4][h]
                sign_at = 16 * h + 2 * j + 1
                word |= (field & 1) << sign_at
                word |= (field >> 1) << ((sign_at - 7) % 32)
        words.append(word)
    return words


def pack_plane(codes, shift, p, words_of):
    n, k = codes.shape
    out = []
    for strip in range(n // 16):
        for block in range(k // 64):
            part = codes[16 * strip : 16 * strip + 16, 64 * block : 64 * block + 64] >> shift & (2**p - 1)
            for lane in range(32):
                g, t = divmod(lane, 4)
                q = [
                    [
                        [int(part[g + 8 * (i & 1), 16 * s + 2 * t + 8 * (i >> 1) + h]) for h in range(2)]
                        for i in range(4)
                    ]
                    for s in range(4)
                ]
                out += words_of(q, p)
    return np.array(out, "<u4").tobytes()


def whole_words(q, plane):
    return [
        sum(q[s][i][h] << 16 * h + 8 * (i % 2) for i in (2 * plane, 2 * plane + 1) for h in range(2)) for s in range(4)
    ]


def pack(codes, bits, order):
    planes, left, out = [], bits, b""
    if bits == 8:
        return b"".join(pack_plane(codes, 0, 8, lambda q, _: whole_words(q, plane)) for plane in range(2))
    while left:
        planes.append(4 if left >= 4 else 2 if left >= 2 else 1)
        left -= planes[-1]
    shift = bits
    for p in planes:
        shift -= p
        out += pack_plane(codes, shift, p, nibble_words if order == "nibble" else half_words)
    return out


def pack_scales(scales):
    n, groups = scales.shape
    order = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    return b"".join(
        scales[16 * t : 16 * t + 16, g][order].astype("<f2").tobytes() for t in range(n // 16) for g in range(groups)
    )


def rotated(w):
    """The rows of w by Hadamard matrices, as docs/schemes.md says: butterflies in FP32."""
    w, k, at = w.astype(np.float32), w.shape[1], 0
    while at < k:
        size = 128
        while size > k - at or at % 128 + size > 128:
            size //= 2
        x, d = w[:, at : at + size], size // 2
        while d:
            y = x.reshape(len(w), -1, 2, d)
            x = np.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], 2).reshape(len(w), size)
            d //= 2
        w[:, at : at + size] = x * np.float32(1 / np.sqrt(size))
        at += size
    return w


def w4ax_case(name, text, w, per_row=False, multiples=0, version=2):
    """As int4, but two's complement, in the order of formats/layouts/layout_frag8.h. Version 1 is padded to 128 columns."""
    n, k = w.shape
    source, w = w, rotated(w) if "rotate=hadamard" in text else w
    g, pad = k if per_row else 128, 128 if version == 1 else 64
    np_, kp, groups = -(-n // 16) * 16, -(-k // pad) * pad, -(-k // g)
    codes = np.zeros((np_, kp), np.int64)
    scales, subs, units = np.zeros((np_, groups), np.float16), np.zeros((np_, groups), np.uint8), np.zeros(np_, np.float16)
    for r in range(n):
        top = np.abs(w[r]).max()
        units[r] = top / np.float32(7) / np.float32(multiples) if multiples else 0
        for j in range(groups):
            x = w[r, j * g : j * g + g]
            s = np.abs(x).max() / np.float32(7)
            if multiples:
                m = np.clip(np.rint(s * (np.float32(1) / np.float32(units[r]))), 1, multiples)
                subs[r, j], s = int(m), np.float32(m) * np.float32(units[r])
            else:
                scales[r, j] = s
                s = np.float32(scales[r, j])
            codes[r, j * g : j * g + len(x)] = np.clip(np.rint(x * (np.float32(1) / s)), -8, 7)
    words = []
    for strip in range(np_ // 16):
        for block in range(kp // 64):
            part = codes[16 * strip : 16 * strip + 16, 64 * block : 64 * block + 64] & 15
            for lane in range(32):
                row, t = divmod(lane, 4)
                for word in range(4):
                    base, r = 32 * (word // 2) + 4 * t, row + 8 * (word % 2)
                    words.append(
                        sum(int(part[r, base + b]) << 8 * b | int(part[r, base + 16 + b]) << 8 * b + 4 for b in range(4))
                    )
    data = np.array(words, "<u4").tobytes()
    order = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    if multiples:
        data += pack_scales(units[:, None])
        data += b"".join(bytes(subs[16 * t : 16 * t + 16, j][order]) for t in range(np_ // 16) for j in range(groups))
    else:
        data += pack_scales(scales)
    data += bytes([8] * (-(-k // 128))) + np.float32(1).tobytes()
    data += np.arange(k, dtype="<u4").tobytes() + bytes(k) + np.arange(n, dtype="<u4").tobytes() + bytes(n)
    (OUT / f"{name}.bin").write_bytes(data)
    (OUT / f"{name}.w").write_bytes(source.astype("<f4").tobytes())
    return f"{name} {text} {n} {k} 0 {version}\n"


def int_case(name, text, w, bits, group=None, asymmetric=False):
    n, k = w.shape
    g, top = group or k, 2**bits - 1
    half = 2 ** (bits - 1)
    np_, kp = -(-n // 16) * 16, -(-k // 64) * 64
    groups = -(-k // g)
    codes = np.full((np_, kp), 0 if asymmetric else half, np.uint8)
    scales, zeros = np.zeros((np_, groups), np.float16), np.zeros((np_, groups), np.uint8)
    for r in range(n):
        for j in range(0, k, g):
            x = w[r, j : j + g]
            low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
            zero = half
            if not np.any(x):
                scales[r, j // g] = 1
                zero = 0 if asymmetric else half
            elif asymmetric:
                scales[r, j // g] = (high - low) / np.float32(top)
                zero = int(np.rint(-low / (high - low) * np.float32(top)))
            else:
                scales[r, j // g] = np.abs(x).max() / np.float32(half - 1)
            inverse = np.float32(1) / np.float32(scales[r, j // g])
            q = np.clip(np.rint(x * inverse), -zero, top - zero)
            codes[r, j : j + len(x)] = (q + zero).astype(np.uint8)
            if asymmetric:
                zeros[r, j // g] = zero
        codes[r, k:] = zeros[r, -1] if asymmetric else half
    data = pack(codes, bits, "half" if bits >= 4 else "nibble") + pack_scales(scales)
    if asymmetric:
        order = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
        for t in range(np_ // 16):
            for j in range(groups):
                string = sum(int(v) << bits * i for i, v in enumerate(zeros[16 * t : 16 * t + 16, j][order]))
                data += string.to_bytes(2 * bits, "little")
    (OUT / f"{name}.bin").write_bytes(data)
    (OUT / f"{name}.w").write_bytes(w.astype("<f4").tobytes())
    return f"{name} {text} {n} {k} 0 1\n"


IQ4NL = np.float32([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]) / 128
E2M1 = np.float32([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 8


def integers(bits):
    return (np.arange(2**bits, dtype=np.float32) - 2 ** (bits - 1)) / 2 ** (bits - 1)


def nearest_power(s):
    """The power of two whose ratio to s is nearest to 1."""
    return np.float32(2.0 ** np.rint(np.log2(np.float64(s))))


def nearest_e4m3_8(s):
    """8 times the value of E4M3FN that is nearest to s / 8, ties to even."""
    x = np.float64(s) / 8
    step = 2.0 ** (max(int(np.floor(np.log2(x))), -6) - 3)
    return np.float32(8 * min(np.rint(x / step) * step, 448))


def case(name, text, w, bits, group=None, e=None, table=None, scales=None):
    n, k = w.shape
    if e is None and table is None:
        table = nf_table(bits)
    top = mini_values(bits, e)[-1] if e is not None else np.abs(table).max()
    g = group or k
    np_, kp = -(-n // 16) * 16, -(-k // 64) * 64
    amax = [a for r in range(n) for j in range(0, k, g) if (a := np.abs(w[r, j : j + g]).max() / top) > 0]
    inside = min(amax) >= 2**-12 and max(amax) <= 2**14
    exp2 = 0 if inside else int(np.frexp(max(amax))[1]) - 14
    if scales is nearest_e4m3_8:
        exp2 = int(np.frexp(max(amax) * top)[1]) - 11
    zero = 0 if e is not None else int(np.argmin(np.abs(table)))
    codes = np.full((np_, kp), zero, np.uint8)
    stored_scales = np.zeros((np_, -(-k // g)), np.float16)
    for r in range(n):
        for j in range(0, k, g):
            x = w[r, j : j + g]
            a = np.abs(x).max()
            if a == 0:
                stored_scales[r, j // g] = 1
                continue
            stored = np.ldexp(np.float32(a / top), -exp2)
            stored = np.float16(scales(stored) if scales else stored)
            s = np.ldexp(np.float32(stored), exp2).astype(np.float32)
            stored_scales[r, j // g] = stored
            codes[r, j : j + len(x)] = mini_codes(x, s, bits, e) if e is not None else lut_codes(x, s, table)
    data = pack(codes, bits, "half" if e is not None and bits > 4 else "nibble") + pack_scales(stored_scales)
    if table is not None:
        data += table.astype("<f2").tobytes()
    (OUT / f"{name}.bin").write_bytes(data)
    (OUT / f"{name}.w").write_bytes(w.astype("<f4").tobytes())
    return f"{name} {text} {n} {k} {exp2} 1\n"


def mix_case(name, options, w):
    keys = ",".join(f"{k}={v}" for k, v in options.items())
    data, exp2 = mix24(w, **options)
    (OUT / f"{name}.bin").write_bytes(data)
    (OUT / f"{name}.w").write_bytes(w.astype("<f4").tobytes())
    return f"{name} mix24:{keys + ',' if keys else ''}method=rtn {w.shape[0]} {w.shape[1]} {exp2} 1\n"


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(20240611)
    rng4 = np.random.default_rng(20261121)

    def w4(n, k):
        return rng4.standard_normal((n, k)).astype(np.float32) * np.float32(0.05)

    rng5 = np.random.default_rng(20261129)

    def w5(n, k):
        return rng5.standard_normal((n, k)).astype(np.float32) * np.float32(0.05)

    rng6 = np.random.default_rng(20261130)

    def w6(n, k, zero_row=None):
        x = rng6.standard_normal((n, k)).astype(np.float32) * np.float32(0.05) + np.float32(0.02)
        if zero_row is not None:
            x[zero_row] = 0
        return x

    def w(n, k, zero_row=None):
        x = rng.standard_normal((n, k)).astype(np.float32) * np.float32(0.05)
        if zero_row is not None:
            x[zero_row] = 0
        return x

    lines = [
        case("fp6", "fp6:method=rtn", w(17, 70, 3), 6, e=3),
        case("fp6e2", "fp6:e=2,method=rtn", w(16, 64), 6, e=2),
        case("fp5", "fp5:method=rtn", w(3, 65), 5, e=2),
        case("fp4", "fp4:method=rtn", w(16, 129), 4, e=2),
        case("fp3", "fpx:bits=3,e=1,method=rtn", w(5, 64), 3, e=1),
        case("fp7", "fp7:method=rtn", w(18, 64), 7, e=3),
        case("fp8", "fp8:method=rtn", w(16, 66), 8, e=4),
        case("nf4", "nf4:g=64,method=rtn", w(17, 130, 16), 4, group=64),
        case("nf3", "nf3:g=32,method=rtn", w(16, 100), 3, group=32),
        case("nf2", "nf2:g=128,method=rtn", w(9, 192), 2, group=128),
        case("nf4_big", "nf4:g=32,method=rtn", w(2, 64) * np.float32(3e6), 4, group=32),
        int_case("int4", "int4:g=64,method=rtn", w(17, 130, 3), 4, group=64),
        int_case("int4z", "int4:g=32,zero=group,method=rtn", w(18, 100, 5), 4, group=32, asymmetric=True),
        int_case("int8", "int8:method=rtn", w(16, 66) * np.float32(8), 8),
        int_case("int8z", "int8:g=128,zero=group,method=rtn", w(3, 140) * np.float32(8), 8, group=128, asymmetric=True),
        mix_case("mix24", {}, w(35, 200)),
        mix_case("mix24_g8", {"g": 8, "four": 0.4, "outliers": 0.01}, w(17, 130)),
        mix_case("mix24_g2", {"g2": 8, "four": 1}, w(24, 150)),
        mix_case("mix24_none", {"four": 0, "outliers": 0.02}, w(16, 128)),
        w4ax_case("w4ax", "w4ax:method=rtn,rotate=none", w4(17, 200)),
        w4ax_case("w4ax_int", "w4ax:scales=int,method=rtn,rotate=none", w4(19, 300) * np.float32(8), multiples=15),
        w4ax_case("w4ax_row", "w4ax:scales=row,method=rtn,rotate=none", w4(16, 130), per_row=True),
        case("fp8e5", "fp8:e=5,method=rtn", w4(17, 66), 8, e=5),
        case("int3", "int3:method=rtn", w5(17, 130), 3, group=128, table=integers(3)),
        int_case("int3z", "int3:g=32,zero=group,method=rtn", w6(18, 100, 5), 3, group=32, asymmetric=True),
        int_case("int2z", "int2:g=64,zero=group,method=rtn", w6(3, 140), 2, group=64, asymmetric=True),
        case("int2", "int2:g=64,method=rtn", w5(16, 66), 2, group=64, table=integers(2)),
        case("iq4nl", "iq4nl:g=32,method=rtn", w5(9, 96), 4, group=32, table=IQ4NL),
        case("mxfp4", "mxfp4:g=32,method=rtn", w5(18, 70), 4, group=32, table=E2M1, scales=nearest_power),
        case("nvfp4", "nvfp4:g=16,method=rtn", w5(17, 72), 4, group=16, table=E2M1, scales=nearest_e4m3_8),
        w4ax_case("w4ax_rotated", "w4ax:method=rtn,rotate=hadamard", w4(17, 248)),
        w4ax_case("w4ax_int_rotated", "w4ax:scales=int,method=rtn,rotate=hadamard", w4(19, 296), multiples=15),
        w4ax_case("w4ax_version1", "w4ax:method=rtn", w4(17, 180), version=1),
    ]
    (OUT / "cases.txt").write_text("".join(lines))


main()
