#!/usr/bin/env python3
"""Which model types of Hugging Face transformers qtool can run, in tests/oracle/families.tsv.

  families.py QTOOL           compares the table with `QTOOL list archs` and the installed transformers
  families.py QTOOL --write   makes the table again

The table has a row for each model type that transformers can generate text with, and for each that
qtool can run: the type, "yes" or "-", and for supported types a checksum over the options of
config.json and their defaults. A supported type whose options change, or that transformers drops,
is an error: read what is new, then write the table again. Types that only transformers has gained
are listed, but are no error. Exit status: 0 equal, 1 different, 77 without transformers.
"""
import json
import pathlib
import subprocess
import sys
import zlib

try:
    import transformers
    from transformers.models.auto import modeling_auto as auto
except ImportError as e:
    print(f"SKIP families.py: {e}", file=sys.stderr)
    sys.exit(77)

TABLE = pathlib.Path(__file__).with_suffix(".tsv")
# What is no option of the decoder, or differs from version to version.
IGNORED = {"transformers_version", "dtype", "architectures", "id2label", "label2id",
           "return_dict", "output_hidden_states", "output_attentions"}


def supported(qtool):
    out = subprocess.run([qtool, "list", "archs"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in out.stdout.splitlines()[1:] if line.strip()}


def options(model_type):
    """Options of a type and their defaults as sorted lines; None if transformers lacks the type."""
    if model_type not in transformers.CONFIG_MAPPING:
        return None
    config = transformers.CONFIG_MAPPING[model_type]().to_dict()
    inner = config.get("text_config") or config.get("thinker_config", {}).get("text_config")
    chosen = inner if isinstance(inner, dict) else config
    return [f"{k} {json.dumps(v, sort_keys=True, default=str)}" for k, v in sorted(chosen.items())
            if k not in IGNORED]


def rows(qtool):
    runs = supported(qtool)
    types = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | runs
    out = {}
    for t in sorted(types):
        known = options(t) if t in runs else None
        digest = "%08x" % zlib.crc32("\n".join(known).encode()) if known else "-"
        out[t] = ("yes" if t in runs else "-", digest)
    return out


def main():
    transformers.utils.logging.set_verbosity_error()
    now = rows(sys.argv[1])
    if "--write" in sys.argv:
        TABLE.write_text("".join(f"{t}\t{yes}\t{digest}\n" for t, (yes, digest) in now.items()))
    then = {t: (yes, digest) for t, yes, digest in
            (line.split("\t") for line in TABLE.read_text().splitlines())}
    failed = 0
    for t in sorted(now.keys() | then.keys()):
        new, old = now.get(t, ("-", "-")), then.get(t, ("-", "-"))
        if t not in then:
            print(f"new in transformers: {t}")
        if new == old or "yes" not in (new[0], old[0]):
            continue
        failed += 1
        print(f"FAIL {t}: was {old[0]} {old[1]}, is {new[0]} {new[1]}; its options now:")
        print("".join(f"    {line}\n" for line in options(t) or ["none"]), end="")
    causal = [t for t in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    print("%s: %d of %d types of the causal mapping of transformers %s, %d types in all" % (
        "FAIL" if failed else "ok", sum(now[t][0] == "yes" for t in causal), len(causal),
        transformers.__version__, sum(yes == "yes" for yes, _ in now.values())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
