#!/usr/bin/env python3
"""Writes model/tokenizer/unicode_tables.h: what Unicode 16 says about the characters that some PCRE2 or
utf8proc in use does not know, or knows otherwise.

usage: make_unicode.py OUT PYTHON...

Needs the package unicodedata2 of version 16.0.0; each PYTHON is an interpreter whose unicodedata is of
an older Unicode: 3.6 (9.0), 3.7 (11.0), 3.8 (12.1), 3.9 (13.0), 3.11 (14.0), 3.12 (15.0), 3.13 (15.1).
"""
import subprocess
import sys

import unicodedata2 as ucd

DUMP = ("import sys, unicodedata as u; sys.stdout.write(u.unidata_version + '\\n'); "
        "sys.stdout.write(' '.join(u.category(chr(c)) for c in range(0x110000)))")
SCRIPTS = ("CJK UNIFIED", "CJK COMPATIBILITY IDEOGRAPH", "CJK RADICAL", "KANGXI", "HIRAGANA", "KATAKANA", "HANGUL", "LATIN",
           "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "THAI", "DEVANAGARI")


def script(c):
    name = ucd.name(chr(c), "")
    return next((s for s in SCRIPTS if name.startswith(s)), "")


def size(c):
    return 1 if c < 0x80 else 2 if c < 0x800 else 3 if c < 0x10000 else 4


def lower(c):
    """The lower case of a new character, by its name."""
    name = ucd.name(chr(c), "")
    if ucd.category(chr(c)) != "Lu" or "CAPITAL" not in name:
        return c
    small = name.replace("MTAVRULI CAPITAL ", "").replace("CAPITAL", "SMALL")
    return ord(ucd.lookup(small))


def main():
    assert ucd.unidata_version == "16.0.0"
    versions, tables = [], []
    for python in sys.argv[2:]:
        text = subprocess.run([python, "-c", DUMP], check=True, capture_output=True).stdout.decode()
        version, categories = text.split("\n")
        versions.append(version)
        tables.append(categories.split(" "))
    now = [ucd.category(chr(c)) for c in range(0x110000)]
    versions.append("16.0.0")
    tables.append(now)

    def since(c):
        """Index of the version from which on the category is what it is now."""
        i = len(tables) - 1
        while i and tables[i - 1][c] == now[c]:
            i -= 1
        return i

    born = {c: since(c) for c in range(0x80, 0x110000) if not 0xD800 <= c < 0xE000}
    new = [c for c in born if born[c] and now[c] != "Cn"]
    old = {}
    for c in born:
        if not born[c] and now[c] not in ("Cn", "Co"):
            old.setdefault((now[c], size(c)), []).append(c)
    scripts = {c: script(c) for pool in old.values() for c in pool}

    def stand_in(c):
        """The nearest old character of the same category, size and, if possible, script. (The only
        dash of four bytes is new: another punctuation mark takes its place.)"""
        pool = old.get((now[c], size(c))) or [
            x for (category, n), p in old.items() if category[0] == now[c][0] and n == size(c)
            for x in p]
        same = [x for x in pool if scripts[x] == script(c)]
        best = min(same or pool, key=lambda x: abs(x - c), default=None)
        assert best is not None, hex(c)
        return best

    ranges = []
    for c in sorted(new):
        row = [now[c], born[c], script(c)]
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == row and size(c) == size(c - 1):
            ranges[-1][1] = c
        else:
            ranges.append([c, c, row, stand_in(c)])
    gaps = []
    for c in born:
        if now[c] == "Cn":
            if gaps and gaps[-1][1] == c - 1:
                gaps[-1][1] = c
            else:
                gaps.append([c, c])
    marks = [(c, ucd.combining(chr(c))) for c in sorted(new) if ucd.combining(chr(c))]
    decompositions, pairs, lowers = [], [], []
    for c in sorted(new):
        for compat, form in ((0, "NFD"), (1, "NFKD")):
            text = ucd.normalize(form, chr(c))
            if text != chr(c) and (not compat or text != ucd.normalize("NFD", chr(c))):
                decompositions.append((c, compat, [ord(x) for x in text]))
        text = ucd.decomposition(chr(c))
        if text and not text.startswith("<") and len(text.split()) == 2:
            a, b = (int(x, 16) for x in text.split())
            if ucd.normalize("NFC", chr(a) + chr(b)) == chr(c):
                pairs.append((a, b, c))
        if lower(c) != c:
            lowers.append((c, lower(c)))
    longest = max(len(d[2]) for d in decompositions)

    categories = sorted({r[2][0] for r in ranges})
    out = []
    put = out.append
    put("/* Made by tests/oracle/make_unicode.py from Unicode 16.0.0 and older versions. */")
    put("static const struct {\n    unsigned major, minor;\n} unicode_versions[] = {" +
        ", ".join("{%s, %s}" % tuple(v.split(".")[:2]) for v in versions) + "};\n")
    put("/* Ranges of characters that are new, or have another category, since version `since` of the\n"
        " * list; an older character of the same category, script and number of bytes. */")
    put("static const struct unicode_new {\n    uint32_t first, last, stand_in;\n"
        "    unsigned char since, category;\n} unicode_new[] = {")
    rows = ["{0x%x, 0x%x, 0x%x, %d, %s}" % (a, b, s, row[1], "UTF8PROC_CATEGORY_" + row[0].upper())
            for a, b, row, s in ranges]
    put(fill(rows) + "};\n")
    put("/* Ranges without characters. */")
    put("static const uint32_t unicode_gaps[][2] = {")
    put(fill(["{0x%x, 0x%x}" % tuple(g) for g in gaps]) + "};\n")
    put("/* Combining classes of new characters, if not 0. */")
    put("static const uint32_t unicode_marks[][2] = {")
    put(fill(["{0x%x, %d}" % m for m in marks]) + "};\n")
    put("/* Full decompositions of new characters; compat: if not the same as without. */")
    put("enum { UNICODE_LONGEST = %d };" % longest)
    put("static const struct unicode_decomposition {\n    uint32_t c, compat, to[UNICODE_LONGEST];\n"
        "} unicode_decompositions[] = {")
    put(fill(["{0x%x, %d, {%s}}" % (c, k, ", ".join("0x%x" % x for x in to))
              for c, k, to in decompositions]) + "};\n")
    put("/* a, b -> composite, where the composite is new. */")
    put("static const uint32_t unicode_pairs[][3] = {")
    put(fill(["{0x%x, 0x%x, 0x%x}" % p for p in sorted(pairs)]) + "};\n")
    put("/* Lower case of new characters, if another character. */")
    put("static const uint32_t unicode_lower[][2] = {")
    put(fill(["{0x%x, 0x%x}" % p for p in lowers]) + "};")
    with open(sys.argv[1], "w") as f:
        f.write("/* clang-format off */\n" + "\n".join(out) + "\n/* clang-format on */\n")
    print(len(ranges), len(gaps), len(marks), len(decompositions), len(pairs), len(lowers), categories)


def fill(items):
    lines, line = [], "   "
    for item in items:
        if len(line) + len(item) + 2 > 100:
            lines.append(line)
            line = "   "
        line += " " + item + ","
    return "\n".join(lines + [line]) + "\n"


if __name__ == "__main__":
    main()
