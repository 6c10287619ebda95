#!/bin/sh
# Makes reports of examples/nano-llama and of hostile documents, and opens them in headless Chromium.
#
#   usage: tests/browser/run.sh BUILD [SCREENSHOTS]

cd "$(dirname "$0")/../.." || exit 1
case $1 in /*) build=$1 ;; *) build=$PWD/${1:?usage: tests/browser/run.sh BUILD} ;; esac
command -v chromium >/dev/null || { echo "SKIP: no chromium (Debian: chromium)"; exit 77; }
nano=$PWD/examples/nano-llama root=$PWD shots=${2:-$build/browser}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
PATH=$build:$PATH
cd "$tmp" || exit 1
qtool quantize "$nano" -o nf4 --scheme nf4 -q >/dev/null || exit 1
qtool quantize "$nano" -o mixed --scheme nf3 --tensor 'down_proj=fp6' -q >/dev/null || exit 1
qtool quantize "$nano" -o learned --scheme nf3:learn=1 --data "$nano/calib.txt" --samples 4 \
    --seqlen 64 -q >/dev/null || exit 1
qtool calibrate "$nano" -o nano.qcal --data "$nano/calib.txt" --samples 4 --seqlen 64 -q >/dev/null
for c in nf4 mixed learned; do
    qtool eval $c --data "$nano/eval.txt" --windows 4 --ref "$nano" --gate 'kld<0.3' --json -q \
        >$c.json 2>/dev/null
done
# The measured speeds of docs, in the form of bench --json.
python3 - "$root/docs/kernels_h200.tsv" >bench.json <<'PYTHON' || exit 1
import csv, json, sys
rows = []
for row in csv.DictReader(open(sys.argv[1]), delimiter="\t"):
    if row["launch"] != "plain" or row["n"] not in ("4096", "28672") or row["k"] != "4096":
        continue
    out = {k: float(v) if v else None for k, v in row.items() if k not in ("scheme", "launch", "config")}
    rows.append({**out, "scheme": row["scheme"], "config": row["config"], "shape_name": None})
json.dump({"qtool": "0", "command": "bench", "dtype": "FP16", "gpu": {"name": "NVIDIA H200"},
           "rows": rows, "caches": []}, sys.stdout)
PYTHON
qtool report nf4 mixed learned ./*.json nano.qcal -o report.html >/dev/null || exit 1
evil='</script><script>window.hostile=1</script>'\''\"><img src=x onerror=window.hostile=1>'
cat >evil.json <<END
{"qtool": "0", "command": "verify", "path": "$evil a-very-long-path-without-any-place-to-break-it-$evil",
 "bytes": 3000, "gates": [{"condition": "$evil", "passed": false, "value": 1}],
 "tensors": [{"name": "model.layers.0.$evil.weight", "scheme": "$evil", "shape": [4, 8], "bpw": 4,
  "sqnr_db": 20, "mse": 0.01}, {"name": "$evil", "scheme": "nf4", "shape": [4, 8], "bpw": 4,
  "sqnr_db": 10, "mse": 0.01}, {"name": "c", "scheme": "c", "shape": [4, 8], "bpw": 3, "sqnr_db": 9,
  "mse": 0.01}]}
END
qtool report evil.json evil.json nf4 -o evil.html >/dev/null || exit 1
failed=0
python3 "$root/tests/browser/report.py" report.html "$shots/report" || failed=1
python3 "$root/tests/browser/report.py" evil.html "$shots/evil" || failed=1
exit $failed
