"""Documents of `qtool bench --json` -> OUT/speed.tsv and OUT/kv4.tsv (a line per measurement), and
OUT/speed.md (tables).

usage: speed_tables.py OUT BENCH.json...
"""
import json
import os
import sys

COLUMNS = ["scheme", "n", "k", "m", "launch", "us", "with_activations_us", "gb_per_s", "floor_us",
           "floor_share", "tflop_per_s", "cublas_speedup", "config"]


def load(paths):
    rows, caches = [], []
    for path in paths:
        with open(path) as f:
            doc = json.load(f)
        launch = "dependent" if doc["dependent_launches"] else "plain"
        launch = "invariant" if doc["batch_invariant"] else launch
        launch = launch if doc["compute"] == "own" else "as " + doc["compute"]
        launch = launch if doc["dtype"] == "FP16" else "BF16"
        for row in doc["rows"]:
            if not row["refused"]:
                rows.append(dict(row, launch=launch))
        caches += [row for row in doc["caches"] if not row["refused"]]
    return rows, caches


def text(value):
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def unique(values):
    return list(dict.fromkeys(values))


def table(head, lines):
    return "\n".join("| " + " | ".join(line) + " |"
                     for line in [head, ["---"] * len(head)] + lines) + "\n"


def cell(row):
    if not row:
        return ""
    speedup = row["cublas_speedup"]
    return f"{row['us']:.1f}" + (f" / {speedup:.2f}x" if speedup else "")


def scheme_table(rows, scheme, launch="plain"):
    mine = [r for r in rows if r["scheme"] == scheme and r["launch"] == launch]
    tokens = sorted(unique(r["m"] for r in mine))
    at = {(r["n"], r["k"], r["m"]): r for r in mine}
    lines = []
    for n, k in unique((r["n"], r["k"]) for r in mine):
        floor = next(r["floor_us"] for r in mine if (r["n"], r["k"]) == (n, k))
        lines.append([f"{n}, {k}", f"{floor:.1f}" if floor else ""] +
                     [cell(at.get((n, k, m))) for m in tokens])
    title = scheme if launch == "plain" else f"{scheme}, {launch}"
    return f"#### {title}\n\n" + table(["N, K", "floor"] + [f"M={m}" for m in tokens], lines)


def dependent_table(rows):
    mine = [r for r in rows if r["launch"] == "dependent" and not r["scheme"].startswith("cublas")]
    cases = unique((r["n"], r["k"], r["m"]) for r in mine)
    at = {(r["scheme"], r["n"], r["k"], r["m"]): r for r in mine}
    lines = [[s] + [f"{at[(s, *c)]['us']:.2f}" if (s, *c) in at else "" for c in cases]
             for s in unique(r["scheme"] for r in mine)]
    return "#### Dependent launches\n\n" + table(
        ["scheme"] + [f"{n}, {k}, M={m}" for n, k, m in cases], lines)


def cache_cell(row):
    return f"{row['us']:.1f} / {100 * row['floor_share']:.0f} %"


def cache_shape(row):
    return row["heads"], row["kv_heads"], row["head_dim"]


def cache_table(caches, shape):
    lines = []
    caches = [r for r in caches if cache_shape(r) == shape]
    for m, length in unique((r["m"], r["length"]) for r in caches):
        mine = [r for r in caches if (r["m"], r["length"]) == (m, length)]
        lines.append([str(m), str(length)] + [cache_cell(r) for r in mine])
    return "#### Attention over a cache, %d heads, %d KV heads of %d\n\n" % shape + table(
        ["sequences", "tokens", "FP16", "4 bits", "4 bits, pages"], lines)


def write_caches(path, caches):
    cases = unique((cache_shape(r), r["m"], r["length"]) for r in caches)
    with open(path, "w") as f:
        f.write("heads\tkv_heads\tchannels\tsequences\ttokens\tfp16_us\tfp16_floor_pct\tint4_us\t"
                "int4_floor_pct\tint4_pages_us\tint4_pages_floor_pct\n")
        for shape, m, length in cases:
            line = [str(x) for x in (*shape, m, length)]
            for r in caches:
                if (cache_shape(r), r["m"], r["length"]) == (shape, m, length):
                    line += [f"{r['us']:.1f}", f"{100 * r['floor_share']:.0f}"]
            f.write("\t".join(line) + "\n")


def main(out, paths):
    rows, caches = load(paths)
    with open(os.path.join(out, "speed.tsv"), "w") as f:
        f.write("\t".join(COLUMNS) + "\n")
        for r in rows:
            f.write("\t".join(text(r[c]) for c in COLUMNS) + "\n")
    write_caches(os.path.join(out, "kv4.tsv"), caches)
    with open(os.path.join(out, "speed.md"), "w") as f:
        others = unique((r["scheme"], r["launch"]) for r in rows
                        if r["launch"].startswith("as ") or r["launch"] == "BF16")
        f.write("\n".join([scheme_table(rows, s) for s in unique(r["scheme"] for r in rows)] +
                          [scheme_table(rows, s, launch) for s, launch in others] +
                          [dependent_table(rows)] +
                          [cache_table(caches, c) for c in unique(map(cache_shape, caches))]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
