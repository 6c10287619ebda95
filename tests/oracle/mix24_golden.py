"""mix24 with method=rtn, from docs/schemes.md alone: what make_pack_golden.py writes for it."""
import numpy as np

F = np.float32


def minmax(t, apart, top):
    """Range, 0 included, and the scale it gives."""
    kept = [v for v, a in zip(t, apart) if not a]
    low, high = min([F(0)] + kept), max([F(0)] + kept)
    return low, (high - low) / F(top)


def codes(t, s, low, top):
    inv = F(1) / s if s > 0 else F(0)
    zero = int(np.rint(min(max(-low * inv, F(0)), F(top))))
    y = [np.rint(min(max(v * inv, F(-zero)), F(top - zero))) for v in t]
    return zero, [int(v) + zero for v in y], [s * F(v) for v in y]


def cost(t, apart, bits):
    top = 2**bits - 1
    low, s = minmax(t, apart, top)
    _, _, q = codes(t, s, low, top)
    total = F(0)
    for v, x, a in zip(t, q, apart):
        if not a:
            total += (v - x) * (v - x)
    return total


def choose_fours(w, g, units, fours):
    """Group of each slot (None: no group), and whether a unit is of 4 bits."""
    n, k = w.shape
    groups, per_unit = -(-k // g), 128 // g
    gain = []
    for j in range(groups):
        part = w[:, j * g : j * g + g]
        none = [False] * part.shape[1]
        gain.append(sum(float(cost(r, none, 2)) - float(cost(r, none, 4)) for r in part))
    order = sorted(range(groups), key=lambda i: (-gain[i], i))
    four_groups = sorted(order[: fours * per_unit])
    two_groups = sorted(order[fours * per_unit :])
    is_four = [(u + 1) * fours // units > u * fours // units for u in range(units)]
    perm = []
    for four in is_four:
        source = four_groups if four else two_groups
        perm += [source.pop(0) if source else None for _ in range(per_unit)]
    return perm, is_four


def choose_outliers(w, g, perm, is_four, count):
    n, k = w.shape
    score = np.zeros((n, k), np.float32)
    twos = np.zeros(k, bool)
    for slot, j in enumerate(perm):
        if j is None or is_four[slot * g // 128]:
            continue
        twos[j * g : j * g + g] = True
        for r in range(n):
            t = w[r, j * g : j * g + g]
            whole = cost(t, [False] * len(t), 2)
            for i in (int(np.argmax(t)), int(np.argmin(t))):
                rest = cost(t, [c == i for c in range(len(t))], 2)
                score[r, j * g + i] = max(whole - rest, F(0))
    flat = score.ravel()
    eligible = [i for i in range(n * k) if twos[i % k]]
    best = sorted(eligible, key=lambda i: (-flat[i], i))[:count]
    apart = np.zeros((n, k), bool)
    apart.ravel()[best] = True
    return apart


def storable(x, z2, step, up):
    """The second-order scale near x, as bits of FP16."""
    most = F(65504) / F(15 + z2)
    top = int(np.float16(most).view(np.uint16))
    if np.float16(most) > most:
        top -= 1
    bits = min(int(np.float16(x * F(2**22)).view(np.uint16)) + up, top)
    return max(bits - bits % step, step)


def number(bits):
    return F(np.uint16(bits).view(np.float16)) * F(2.0**-22)


def second_order(scales, step):
    """s2, z2 and q of rows that share them; of the scales of rows with a range."""
    some = [s for s in scales if s > 0]
    if not some:
        return 0x3C00, 1, [0] * len(scales)
    most, least = max(some), max(some) - max(max(some) - s for s in some)
    s2 = storable((most - least) / F(15), 0, step, step - 1)
    if np.rint(least / number(s2)) > 15:
        s2 = storable(most / F(30), 15, step, step - 1)
    z2 = int(min(np.rint(least / number(s2)), 15))
    s2 = storable(number(s2), z2, step, 0)
    inv = F(1) / number(s2)
    return s2, z2, [int(min(max(np.rint(min(s * inv, F(64))) - z2, z2 == 0), 15)) for s in scales]


def exponent(w, apart, g, perm, is_four):
    """What brings the largest (q + z2) s2 of min-max into [24576, 49152)."""
    largest = F(0)
    for slot, j in enumerate(perm):
        for r in range(len(w)) if j is not None else ():
            part, out = w[r, j * g : j * g + g], apart[r, j * g : j * g + g]
            largest = max(largest, minmax(part, out, 15 if is_four[slot * g // 128] else 3)[1])
    by_outliers = np.frexp(np.abs(w[apart]).max() / F(32768))[1] if apart.any() else -999
    return int(max(np.frexp(largest / F(49152 * 2.0**-22))[1], by_outliers))


class Record:
    """The record of a unit, one bit after the other."""

    def __init__(self, four, parts, halves):
        self.four, self.codes = four, 1024 if four else 512
        self.z, self.u = 64, 128 if four else 96
        self.part = self.u + 16 * halves
        self.bytes = bytearray(self.codes + parts * self.part)

    def put(self, at, bit, width, value):
        for i in range(width):
            self.bytes[at + (bit + i) // 8] |= (value >> i & 1) << (bit + i) % 8

    def code(self, row, col, value):
        b, t, j = col // 64, col % 64 // 16, col % 16
        s, i, h, lane = j // 4, 2 * (j % 4 // 2) + row // 8, j % 2, 4 * (row % 8) + t
        if self.four:
            word, first = 128 * b + 4 * lane + s, 16 * h + 2 + 4 * i
        else:
            word, first = 4 * lane + 2 * b + s // 2, 16 * h + 2 + 2 * (4 * (s % 2) + i)
        for bit in range(4 if self.four else 2):
            self.put(4 * word, (first + bit) % 32, 1, value >> bit & 1)

    def params(self, row, col, part, q, zero):
        b, lane, upper = col // 64, 4 * (row % 8) + col % 64 // 16, row // 8
        base = self.codes + part * self.part
        self.put(base + 2 * lane, 8 * upper + 4 * b, 4, q)
        if self.four:
            self.put(base + self.z + 2 * lane, 8 * b + 4 * upper, 4, zero)
        else:
            self.put(base + self.z + lane, 4 * b + 2 * upper, 2, zero)

    def second(self, col, part, half, s2, z2):
        at = self.codes + part * self.part + self.u + 16 * half + 4 * (col % 64 // 16)
        self.put(at, 16 * (col // 64), 16, s2 | z2)


def put_group(record, rows, out, col, part, g, g2, k_left):
    """rows[<= 16][<= g] of a group, from column col of the record on."""
    top = 15 if record.four else 3
    ranges = [minmax(t, o, top) for t, o in zip(rows, out)]
    for h in range(16 // g2):
        here = range(g2 * h, min(g2 * h + g2, len(rows)))
        s2, z2, q = second_order([ranges[y][1] for y in here], 0x200 if record.four else 0x80)
        record.second(col, part, h, s2, z2)
        for y, qy in zip(here, q):
            zero, code, _ = codes(rows[y], F(qy + z2) * number(s2), ranges[y][0], top)
            record.params(y, col, part, qy, zero)
            for c in range(g):
                record.code(y, col + c, zero if c >= k_left or out[y, c] else code[c])


def mix24(w, g=16, four=0.25, outliers=0.002, g2=16):
    """Sections one after the other, and the exponent."""
    n, k = w.shape
    units, parts = -(-k // 128), 16 // g
    fours = int(np.floor(four * units + 0.5))
    perm, is_four = choose_fours(w, g, units, fours)
    count = min(int(outliers * n * k), n * max(0, k - 128 * fours) // 16)
    apart = choose_outliers(w, g, perm, is_four, count)
    exp2 = exponent(w, apart, g, perm, is_four)
    w = np.ldexp(w, -exp2).astype(np.float32)
    stream = b""
    for first in range(0, n, 16):
        for u in range(units):
            record = Record(is_four[u], parts, 16 // g2)
            for slot in range(128 // g):
                j = perm[u * 128 // g + slot]
                if j is not None:
                    part, out = (x[first : first + 16, j * g : j * g + g] for x in (w, apart))
                    put_group(record, part, out, slot * g, slot % parts, g, g2, k - j * g)
            stream += bytes(record.bytes)
    source = [None if j is None or j * g + c >= k else j * g + c for j in perm for c in range(g)]
    cols = [[p for p, s in enumerate(source) if s is not None and apart[r, s]] for r in range(n)]
    parts = [np.array([0xFFFF if j is None else j for j in perm], "<u2")]
    if count:
        parts.append(np.cumsum([0] + [len(c) for c in cols]).astype("<u4"))
        parts.append(np.array([p for c in cols for p in c], "<u2"))
        parts.append(np.array([w[r, source[p]] for r, c in enumerate(cols) for p in c]).astype("<f2"))
    return stream + b"".join(x.tobytes() for x in parts), exp2
