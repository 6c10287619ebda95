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


def choose_fours(w, g, slots, fours):
    """perm: group of each slot."""
    n, k = w.shape
    gain = np.full(slots, -np.inf)
    for j in range(-(-k // g)):
        part = w[:, j * g : j * g + g]
        none = [False] * part.shape[1]
        gain[j] = sum(float(cost(r, none, 2)) - float(cost(r, none, 4)) for r in part)
    kinds = []
    for p in range(slots):
        four = (p + 1) * fours // slots > p * fours // slots
        two = p - p * fours // slots
        kinds.append(0 if four else 1 if two % 3 == 0 else 2)
    order = sorted(range(slots), key=lambda i: (-gain[i], i))
    perm = [0] * slots
    for kind in range(3):
        count = kinds.count(kind)
        for p, j in zip([p for p in range(slots) if kinds[p] == kind], sorted(order[:count])):
            perm[p] = j
        order = order[count:]
    return perm, kinds


def choose_outliers(w, g, perm, kinds, count):
    n, k = w.shape
    score = np.zeros((n, k), np.float32)
    twos = np.zeros(k, bool)
    for j, kind in zip(perm, kinds):
        if kind == 0 or j * g >= k:
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


def second_order(scales, q_max):
    """s2, z2 and q of rows that share them; scales of rows with a range."""
    some = [s for s in scales if s > 0]
    if not some:
        return np.float16(1), 1, [0] * len(scales)
    most, least = max(some), max(some) - max(max(some) - s for s in some)
    s2 = (most - least) / F(q_max)
    if s2 > 0 and np.rint(least / s2) <= 15:
        z2 = int(np.rint(least / s2))
    else:
        s2, z2 = most / F(q_max + 15), 15
    s2 = np.float16(s2)
    inv = F(1) / F(s2)
    q = [int(min(max(np.rint(min(s * inv, F(64))) - z2, z2 == 0), q_max)) for s in scales]
    return s2, z2, q


def mix24(w, g=16, four=0.25, outliers=0.002, g2=16):
    """Sections one after the other."""
    n, k = w.shape
    strips, units = -(-n // 16), -(-k // 128)
    slots = 128 // g * units
    fours = int(np.floor(four * slots + 0.5))
    perm, kinds = choose_fours(w, g, slots, fours)
    count = min(int(outliers * n * k), n * max(0, k - fours * g) // 16)
    apart = choose_outliers(w, g, perm, kinds, count)
    e_count = 2 * fours if g == 16 else fours
    a = np.zeros((strips, units, 32, 4), np.uint32)
    b = np.zeros((strips, -(-e_count // 4), 32), np.uint32)
    meta = np.zeros((strips, -(-(slots - fours) // 3), 16), np.uint16)
    meta4 = np.zeros((strips, -(-fours // 2), 16), np.uint16)
    s2s = np.zeros((strips, slots, 16 // g2), np.float16)
    z2s = np.zeros((strips, slots // 4, 16 // g2), np.uint16)
    for strip in range(strips):
        rows = w[16 * strip : 16 * strip + 16]
        for p, j in enumerate(perm):
            if j * g >= k:
                continue
            top = 15 if kinds[p] == 0 else 3
            q_max = 7 if kinds[p] == 2 else 15
            number = p * fours // slots if kinds[p] == 0 else p - p * fours // slots
            part = rows[:, j * g : j * g + g]
            out = apart[16 * strip : 16 * strip + 16, j * g : j * g + g]
            ranges = [minmax(t, o, top) for t, o in zip(part, out)]
            for h in range(16 // g2):
                here = range(g2 * h, min(g2 * h + g2, len(part)))
                s2, z2, q = second_order([ranges[y][1] for y in here], q_max)
                s2s[strip, p, h] = s2
                z2s[strip, p // 4, h] |= z2 << 4 * (p % 4)
                for y, qy in zip(here, q):
                    zero, code, _ = codes(part[y], F(qy + z2) * F(s2), ranges[y][0], top)
                    at = 2 * (y % 8) + y // 8
                    if kinds[p] == 0:
                        meta4[strip, number // 2, at] |= (qy | zero << 4) << 8 * (number % 2)
                    else:
                        f = number % 3
                        meta[strip, number // 3, at] |= qy << (0, 4, 7)[f] | zero << (10, 12, 14)[f]
                    for c in range(g):
                        if c >= len(code) or out[y, c]:
                            value = zero
                        else:
                            value = code[c]
                        x = p * g + c
                        half, pair, lane, step = x % 16 // 8, x % 2, 4 * (y % 8) + x % 8 // 2, x // 16
                        if kinds[p] == 0 and y >= 8:
                            e = 2 * number + half if g == 16 else number
                            b[strip, e // 4, lane] |= value << 16 * pair + 4 * (e % 4 // 2 + 2 * (e % 2))
                        else:
                            bit = 16 * pair + 4 * (step % 4) + (2 * (y // 8) if kinds[p] else 0)
                            a[strip, step // 8, lane, 2 * (step % 8 // 4) + half] |= value << bit
    ptr = np.concatenate([[0], np.cumsum(apart.sum(1))]).astype("<u4")
    r, c = np.nonzero(apart)
    parts = [a.astype("<u4"), b.astype("<u4"), meta.astype("<u2"), meta4.astype("<u2"), s2s.astype("<f2")]
    parts += [z2s.astype("<u2"), np.array(perm, "<u2")]
    if count:
        parts += [ptr, c.astype("<u2"), w[r, c].astype("<f2")]
    return b"".join(x.tobytes() for x in parts)
