"""Charts and key tables of docs/kernels_speed.md and docs/quantize_speed.md.

usage: python3 docs/charts.py

Reads docs/kernels_h200.tsv (one line per measurement of tests/bench/kernels.sh),
docs/kv4_h200.tsv and docs/quantize_h200.tsv (tests/bench/quantize_time.py). Writes
docs/kernels_cublas.svg, docs/kernels_floor.svg, docs/kernels_kv4.svg, docs/quantize_time.svg, and
the tables between the marks of both pages. The output depends on the input alone.
"""
import csv
import math
import os
import re

DOCS = os.path.dirname(os.path.abspath(__file__))
COLORS = ["#4c8fd6", "#e08a2c", "#3fa66a", "#d65f5f", "#9a74d1", "#2fa8a8", "#b08a3e", "#d46aa8"]
STYLE = """<style>
text { font: 12px sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: bold }
.panel { font-weight: bold }
.grid { stroke: #8c959f; stroke-opacity: 0.35 }
.one { stroke: #57606a; stroke-dasharray: 5 3 }
.axis { stroke: #57606a; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #d0d7de }
  .one, .axis { stroke: #9198a1 }
}
</style>"""
PRESETS = ["nf4", "int4", "nf3", "nf2", "fp6", "fp5", "mix24", "w4ax"]


def read(name):
    with open(os.path.join(DOCS, name)) as f:
        return list(csv.DictReader(f, delimiter="\t"))


def shape(row):
    return int(row["n"]), int(row["k"])


class Svg:
    def __init__(self, width, height, title):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                      f'viewBox="0 0 {width} {height}" role="img">', f"<title>{title}</title>",
                      STYLE]
        self.text(width / 2, 22, title, "middle", "title")

    def text(self, x, y, words, anchor="middle", kind="", turn=False):
        rotate = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
        style = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}{rotate}>'
                          f"{words}</text>")

    def line(self, x1, y1, x2, y2, kind):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                          f'class="{kind}"/>')

    def curve(self, points, color):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" '
                          'stroke-width="2"/>')
        for x, y in points:
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>')

    def bar(self, x, y, width, height, color):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                          f'height="{height:.1f}" fill="{color}"/>')

    def legend(self, x, y, names, step):
        for i, name in enumerate(names):
            self.bar(x + i * step, y - 9, 12, 10, COLORS[i])
            self.text(x + i * step + 17, y, name, "start")

    def save(self, name):
        with open(os.path.join(DOCS, name), "w") as f:
            f.write("\n".join(self.parts + ["</svg>"]) + "\n")


class Panel:
    """Axes with a logarithmic x (powers of two) and a linear y."""

    def __init__(self, svg, box, title, x_ticks, y_ticks, labels):
        self.svg, (self.x, self.y, self.w, self.h) = svg, box
        self.x_ticks, self.y_ticks = x_ticks, y_ticks
        svg.text(self.x + self.w / 2, self.y - 8, title, "middle", "panel")
        for v in y_ticks:
            svg.line(self.x, self.at_y(v), self.x + self.w, self.at_y(v), "grid")
            svg.text(self.x - 6, self.at_y(v) + 4, f"{v:g}", "end")
        for v in x_ticks:
            svg.line(self.at_x(v), self.y, self.at_x(v), self.y + self.h, "grid")
            svg.text(self.at_x(v), self.y + self.h + 16, f"{v:g}")
        svg.parts.append(f'<rect x="{self.x}" y="{self.y}" width="{self.w}" height="{self.h}" '
                         'class="axis"/>')
        svg.text(self.x + self.w / 2, self.y + self.h + 34, labels[0])
        svg.text(self.x - 40, self.y + self.h / 2, labels[1], "middle", "", True)

    def at_x(self, v):
        first, last = math.log2(self.x_ticks[0]), math.log2(self.x_ticks[-1])
        return self.x + self.w * (math.log2(v) - first) / (last - first)

    def at_y(self, v):
        return self.y + self.h * (1 - v / self.y_ticks[-1])

    def curve(self, points, color):
        self.svg.curve([(self.at_x(x), self.at_y(y)) for x, y in points], color)


def cublas_chart(rows):
    svg = Svg(980, 760, "Speed-up over cuBLAS FP16 (one H200)")
    schemes = ["nf4", "int4", "nf3", "fp6", "mix24", "w4ax"]
    shapes = [(4096, 4096), (14336, 4096), (8192, 8192), (57344, 8192)]
    ticks = [1, 4, 16, 64, 256, 1024, 4096]
    for i, at in enumerate(shapes):
        box = (70 + i % 2 * 470, 70 + i // 2 * 330, 400, 240)
        panel = Panel(svg, box, f"{at[0]} x {at[1]}", ticks, [0, 1, 2, 3, 4, 5],
                      ("tokens (M)", "times as fast as cuBLAS"))
        svg.line(box[0], panel.at_y(1), box[0] + box[2], panel.at_y(1), "one")
        for color, scheme in zip(COLORS, schemes):
            points = sorted((int(r["m"]), float(r["cublas_speedup"])) for r in rows
                            if r["scheme"] == scheme and shape(r) == at)
            panel.curve(points, color)
    svg.legend(250, 742, schemes, 85)
    svg.save("kernels_cublas.svg")


def floor_chart(rows):
    svg = Svg(960, 400, "One token: share of the read floor (one H200)")
    shapes = [(4096, 4096), (8192, 8192), (57344, 8192)]
    left, top, width, height = 70, 50, 860, 260
    for percent in range(0, 101, 20):
        y = top + height * (1 - percent / 100)
        svg.line(left, y, left + width, y, "grid")
        svg.text(left - 6, y + 4, str(percent), "end")
    step = width / len(PRESETS)
    for i, scheme in enumerate(PRESETS):
        for j, at in enumerate(shapes):
            row = next(r for r in rows if r["scheme"] == scheme and shape(r) == at
                       and r["m"] == "1")
            share = 100 * float(row["floor_us"]) / float(row["us"])
            x, tall = left + i * step + 12 + j * 28, height * share / 100
            svg.bar(x, top + height - tall, 26, tall, COLORS[j])
            svg.text(x + 13, top + height - tall - 4, f"{share:.0f}")
        svg.text(left + (i + 0.5) * step, top + height + 18, scheme)
    svg.line(left, top + height, left + width, top + height, "axis")
    svg.text(24, top + height / 2, "time of a bare read / time, percent", "middle", "", True)
    svg.text(left + width / 2, top + height + 38, "scheme")
    svg.legend(330, 384, [f"{n} x {k}" for n, k in shapes], 120)
    svg.save("kernels_floor.svg")


def kv4_chart(rows):
    svg = Svg(980, 420, "Attention over a KV cache, 32 query heads, 8 KV heads of 128 (one H200)")
    sequences = ["1", "4", "16", "64"]
    ticks = [1024, 2048, 4096, 8192, 16384, 32768]
    share = Panel(svg, (70, 70, 400, 260), "4-bit cache: share of the read floor", ticks,
                  [0, 20, 40, 60, 80, 100], ("tokens per sequence", "percent"))
    faster = Panel(svg, (540, 70, 400, 260), "4-bit cache over FP16 cache", ticks,
                   [0, 1, 2, 3, 4], ("tokens per sequence", "times as fast"))
    for color, count in zip(COLORS, sequences):
        mine = [r for r in rows if r["heads"] == "32" and r["sequences"] == count]
        share.curve([(int(r["tokens"]), float(r["int4_floor_pct"])) for r in mine], color)
        faster.curve([(int(r["tokens"]), float(r["fp16_us"]) / float(r["int4_us"]))
                      for r in mine], color)
    svg.legend(240, 402, [f"{s} sequence" + "s" * (s != "1") for s in sequences], 130)
    svg.save("kernels_kv4.svg")


PARTS = ["products", "tf32", "factors", "rounding", "other", "copies", "idle", "outside"]
LAYER_FLOOR = 0.27  # seconds: docs/quantize_speed.md


def quantize_chart(rows):
    """A bar for each scheme: the parts of a layer's time, and its floor."""
    svg = Svg(980, 110 + 40 * len(rows), "Quantizing a decoder layer of an 8B model (one H200)")
    left, top, width, most = 80, 50, 860, 2.5
    at = lambda seconds: left + width * seconds / most
    bottom, parts = top + 40 * len(rows), PARTS[:PARTS.index("outside")]
    for tick in range(0, 6):
        svg.line(at(tick / 2), top, at(tick / 2), bottom, "grid")
        svg.text(at(tick / 2), bottom + 16, f"{tick / 2:g}")
    for i, row in enumerate(rows):
        y, before = top + 40 * i + 6, 0
        svg.text(left - 8, y + 18, row["scheme"], "end")
        for color, part in zip(COLORS, parts):
            seconds = float(row[part]) / int(row["layers"])
            svg.bar(at(before), y, at(seconds) - left, 28, color)
            before += seconds
    svg.line(at(LAYER_FLOOR), top, at(LAYER_FLOOR), bottom, "one")
    svg.text(left + width / 2, bottom + 34, "seconds; dashed: floor of a layer")
    svg.legend(180, bottom + 54, parts, 100)
    svg.save("quantize_time.svg")


def quantize_table(rows):
    lines = [[f"`{r['scheme']}`", r["seconds"]] + [r[part] for part in PARTS] for r in rows]
    return table(["scheme", "seconds"] + PARTS, lines)


def table(head, lines):
    return "\n".join("| " + " | ".join(line) + " |"
                     for line in [head, ["---"] * len(head)] + lines) + "\n"


def products_table(rows):
    cases = [(4096, 4096, 1), (4096, 4096, 64), (8192, 8192, 1), (8192, 8192, 16),
             (8192, 8192, 64), (8192, 8192, 256), (57344, 8192, 1)]
    # cuBLAS has a row for every scheme; the first one is beside nf4.
    at = {(r["scheme"], *shape(r), int(r["m"])): r for r in reversed(rows)}
    lines = []
    for scheme in ["cublas-f16"] + PRESETS + ["mix24:outliers=0", "w4ax:scales=int",
                                              "w4ax:scales=row"]:
        line = [f"`{scheme}`"]
        for case in cases:
            row = at.get((scheme, *case))
            ratio = f" ({float(row['cublas_speedup']):.2f})" if row else ""
            line.append(f"{float(row['us']):.1f}" + ratio * (scheme != "cublas-f16") if row
                        else "")
        lines.append(line)
    return table(["scheme"] + [f"{n} x {k}, M={m}" for n, k, m in cases], lines)


def kv4_table(rows):
    lines = [[r["heads"], r["sequences"], r["tokens"], r["fp16_us"],
              f"{r['int4_us']} ({r['int4_floor_pct']} %)",
              f"{r['int4_pages_us']} ({r['int4_pages_floor_pct']} %)"]
             for r in rows if r["tokens"] in ("2048", "8192", "32768")]
    return table(["query heads", "sequences", "tokens", "FP16", "4 bits", "4 bits, pages"], lines)


def write_tables(name, tables):
    """Puts the tables between their marks in a page."""
    path = os.path.join(DOCS, name)
    with open(path) as f:
        page = f.read()
    for mark, text in tables.items():
        page, count = re.subn(f"(<!-- {mark} begins -->\n).*?(<!-- {mark} ends -->)",
                              lambda m, text=text: m[1] + "\n" + text + "\n" + m[2], page,
                              flags=re.S)
        if count != 1:
            raise SystemExit(f"{name}: no marks for the table {mark}")
    with open(path, "w") as f:
        f.write(page)


def main():
    every = read("kernels_h200.tsv")
    rows = [r for r in every if r["launch"] == "plain"]
    caches, quantizing = read("kv4_h200.tsv"), read("quantize_h200.tsv")
    cublas_chart(rows)
    floor_chart(rows)
    kv4_chart(caches)
    quantize_chart(quantizing)
    write_tables("kernels_speed.md", {"products": products_table(rows), "kv4": kv4_table(caches)})
    write_tables("quantize_speed.md", {"quantizing": quantize_table(quantizing)})


if __name__ == "__main__":
    main()
