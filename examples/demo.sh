#!/bin/sh
# Quantizes examples/nano-llama with several schemes, compares each with the original on eval.txt, and
# prints a table, what the nf4 model says, and the time that it took.
#
#   usage: examples/demo.sh QTOOL OUT      OUT: a directory for the containers

set -e
start=$(date +%s)
qtool=${1:?usage: examples/demo.sh QTOOL OUT} out=${2:?usage: examples/demo.sh QTOOL OUT}
nano=$(dirname "$0")/nano-llama
mkdir -p "$out"
inputs=

# figure NAME FILE: a number at the top level of a --json document.
figure() { sed -n 's/^  "'"$1"'": \([-0-9.e+]*\),*$/\1/p' "$2"; }

row='%-18s %7s %10s %11s %14s %13s\n'
line() {
    LC_ALL=C awk -v row="$row" -v name="$1" -v bpw="$2" -v bytes="$3" -v ppl="$4" -v kld="$5" \
        -v same="$6" 'BEGIN {
            printf row, name, sprintf("%.3f", bpw), sprintf("%.2f MiB", bytes / 1048576),
                sprintf("%.3f", ppl), sprintf("%.4f", kld), sprintf("%.2f %%", 100 * same) }'
}

# try NAME SCHEME [OPTION...]
try() {
    name=$1 scheme=$2 dir=$out/$(echo "$1" | tr -cs 'a-z0-9\n' -)
    shift 2
    echo "$qtool quantize $nano -o $dir --scheme $scheme $*" >&2
    "$qtool" quantize "$nano" -o "$dir" --scheme "$scheme" "$@" --force --quiet --json \
        >"$out/quantize.json"
    echo "$qtool eval $dir --data $nano/eval.txt --ref $nano" >&2
    "$qtool" eval "$dir" --data "$nano/eval.txt" --ref "$nano" --quiet --json >"$out/eval.json"
    cp "$out/eval.json" "$dir.json"
    inputs="$inputs $dir $dir.json"
    line "$name" "$(figure bpw "$out/quantize.json")" "$(figure bytes "$out/quantize.json")" \
        "$(figure ppl "$out/eval.json")" "$(figure kld_mean "$out/eval.json")" \
        "$(figure same_top "$out/eval.json")" >>"$out/table"
}

printf "$row" scheme "bits/w" size perplexity "KL div. (nats)" "same top" >"$out/table"
try fp6 fp6
try fp6:e=2 fp6:e=2
try nf4 nf4
try nf3 nf3
try "nf3, calibrated" nf3 --data "$nano/calib.txt" --seqlen 512
line original 16 "$(figure source_bytes "$out/quantize.json")" \
    "$(figure ref_ppl "$out/eval.json")" 0 1 >>"$out/table"
echo
cat "$out/table"
echo
echo "$qtool generate $out/nf4 --prompt 'Once upon a time' --max-tokens 32" >&2
printf 'Once upon a time'
"$qtool" generate "$out/nf4" --prompt 'Once upon a time' --max-tokens 32 --quiet
echo
"$qtool" report $inputs -o "$out/report.html" --force
echo "took $(($(date +%s) - start)) s"
