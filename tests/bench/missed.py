"""What misses its target in a full run of tests/bench/kernels.sh, as tables (docs/design/kernels_profile.md).

usage: missed.py SPEED.TSV

Targets, of one H200: the microseconds below; 16 tokens take at most 1.10 times as long as one (1.15 for table formats and
mix24), nf4 1.10 times as long as int4; at least 0.98 times the speed of cuBLAS FP16 up to 256 tokens, 0.95 beyond (w4ax 1.00).
"""
import csv
import sys

SQUARE, LARGE, HUGE = (4096, 4096), (8192, 8192), (57344, 8192)
TITLES = ("Microseconds (target)", "16 tokens relative to one", "nf4 relative to int4",
          "Times cuBLAS, up to 256 tokens", "Times cuBLAS, more than 256 tokens")
ONE = {  # microseconds of one token; of mix24 up to 8
    "nf4": {SQUARE: 4.8, LARGE: 11.7, HUGE: 64}, "nf3": {SQUARE: 4.3, LARGE: 9.8, HUGE: 52},
    "fp6": {SQUARE: 5.7, LARGE: 15, HUGE: 86}, "fp5": {SQUARE: 5.2, LARGE: 13, HUGE: 73},
    "int4": {SQUARE: 4.6, LARGE: 11, HUGE: 60}, "mix24": {SQUARE: 4.5, LARGE: 10.2, HUGE: 56}}
TILES = {64: 19, 128: 28, 256: 50}  # of 4 bits at LARGE; fp6 a tenth more
W4AX = {  # microseconds by tokens; 16: up to 16
    "w4ax": {SQUARE: {16: 5}, LARGE: {16: 10.8, 32: 12, 64: 13, 128: 20, 256: 38, 512: 74, 4096: 585},
             HUGE: {16: 58, 32: 62, 128: 135, 512: 520}},
    "w4ax:scales=int": {LARGE: {64: 11, 128: 18, 256: 29, 512: 54, 4096: 410}}}
LOOKED_UP = ("nf4", "nf3", "nf2")


def load(path):
    with open(path) as f:
        for row in csv.DictReader(f, delimiter="\t"):
            if row["launch"] == "plain" and row["scheme"] != "cublas-f16":
                shape = int(row["n"]), int(row["k"])
                yield (row["scheme"], shape, int(row["m"])), (float(row["us"]), float(row["cublas_speedup"]))


def wanted_us(scheme, shape, m):
    if m == 1 or (scheme == "mix24" and m <= 8):
        us = ONE.get(scheme, {}).get(shape)
        if us:
            return us
    if scheme in ("nf4", "int4", "fp6") and shape == LARGE and m in TILES:
        return TILES[m] * (1.1 if scheme == "fp6" else 1)
    return W4AX.get(scheme, {}).get(shape, {}).get(max(m, 16))


def misses(rows):
    """Title, scheme, shape, tokens, what was reached and what was wanted."""
    for (scheme, shape, m), (us, speedup) in rows.items():
        name = scheme.split(":")[0]
        wanted = wanted_us(scheme, shape, m)
        if wanted and us > wanted:
            yield TITLES[0], scheme, shape, m, f"{us:.4g} ({wanted:.4g})"
        if m == 16 and name != "w4ax" and (scheme, shape, 1) in rows:
            ratio, limit = us / rows[scheme, shape, 1][0], 1.15 if name in LOOKED_UP + ("mix24",) else 1.10
            if ratio > limit + .005:
                yield TITLES[1], scheme, shape, m, f"{ratio:.2f}"
        if scheme == "nf4" and ("int4", shape, m) in rows:
            ratio = us / rows["int4", shape, m][0]
            if ratio > 1.105:
                yield TITLES[2], scheme, shape, m, f"{ratio:.2f}"
        limit = 1 if name == "w4ax" else .98 if m <= 256 else .95
        if speedup < limit - .005:
            yield TITLES[3 if m <= 256 else 4], scheme, shape, m, f"{speedup:.2f}"


def main():
    rows = dict(load(sys.argv[1]))
    tables = {}
    for title, scheme, shape, m, text in misses(rows):
        cell = tables.setdefault(title, {}).setdefault(scheme, {}).setdefault(shape, [])
        cell.append(text if title == TITLES[1] else f"M={m} {text}")
    for title in TITLES:
        print(f"\n**{title}**\n\n| scheme | N x K: reached |\n|---|---|")
        for scheme, shapes in tables.get(title, {}).items():
            cells = [f"{n} x {k}: {', '.join(texts)}" for (n, k), texts in shapes.items()]
            print(f"| `{scheme}` | {'; '.join(cells)} |")


main()
