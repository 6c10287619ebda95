#!/bin/sh
# Makes a container for release from a checkpoint: plan, quantize, verify, eval, checksums. Written to be
# copied into a CI pipeline: it asks nothing, results are JSON documents, and the exit status is that of
# the qtool step that failed (see below).
#
#   usage: examples/ci/release.sh CKPT OUT        environment, with defaults:
#     QTOOL=qtool  SCHEME=fp6:e=2  CALIB=CKPT/calib.txt  DATA=CKPT/eval.txt
#     BPW=6.2 SQNR=20 RATIO=1.05 KLD=0.05           limits for the container
#     WINDOWS=                                      windows of DATA to evaluate; empty: all
#     LOGS=OUT.logs                                 documents and messages of every step
#
# Exit status: 0 success; 2 usage error; 3 bad input; 4 unsupported; 5 a gate failed; 6 out of memory, disk
# full or I/O error; 7 no GPU; 8 OUT or OUT.partial is from a different run; 75 interrupted: run it again with
# the same arguments.

set -u
ckpt=${1:?usage: release.sh CKPT OUT} out=${2:?usage: release.sh CKPT OUT}
out=${out%/} # the logs go next to it
qtool=${QTOOL:-qtool} scheme=${SCHEME:-fp6:e=2}
calib=${CALIB:-$ckpt/calib.txt} data=${DATA:-$ckpt/eval.txt}
bpw=${BPW:-6.2} sqnr=${SQNR:-20} ratio=${RATIO:-1.05} kld=${KLD:-0.05}
logs=${LOGS:-$out.logs}
for file in "$calib" "$data"; do # the last step needs DATA
    [ -r "$file" ] || { echo "$file: cannot be read" >&2; exit 3; }
done
mkdir -p "$logs" || exit 6

# step NAME ARGUMENT...: runs a qtool command; exits with its status if it fails. Forwards signals to qtool,
# which stops at a point from which it can resume.
step() {
    name=$1
    shift
    echo "$name: qtool $*"
    "$qtool" "$@" --json --progress plain >"$logs/$name.json" 2>"$logs/$name.log" &
    pid=$!
    trap 'kill -TERM "$pid" 2>/dev/null' HUP INT TERM
    wait "$pid"
    status=$?
    while kill -0 "$pid" 2>/dev/null; do # a signal ended `wait`, but not qtool
        wait "$pid"
        status=$?
    done
    trap - HUP INT TERM
    [ $status -eq 0 ] && return
    echo "$name: exit status $status" >&2
    tail -n 5 "$logs/$name.log" >&2
    exit $status
}

# number KEY FILE: prints a number from the top level of a document.
number() { sed -n 's/^  "'"$1"'": \([-0-9.e+]*\),*$/\1/p' "$2"; }

# Sizes and refusals first: plan does not quantize.
step plan plan "$ckpt" --scheme "$scheme"
awk -v bpw="$(number bpw "$logs/plan.json")" -v most="$bpw" 'BEGIN { exit !(bpw <= most) }' || {
    echo "plan: more than $bpw bits per weight" >&2
    exit 5
}
# --resume: continue an interrupted run. --strict: fail if a tensor cannot be calibrated.
step quantize quantize "$ckpt" -o "$out" --scheme "$scheme" --data "$calib" --resume --strict
step verify verify "$out" --source "$ckpt" --gate "bpw<=$bpw,sqnr>=$sqnr,sqnr[.]>=$sqnr"
step eval eval "$out" --data "$data" --ref "$ckpt" ${WINDOWS:+--windows "$WINDOWS"} \
    --gate "ppl_ratio<=$ratio,kld<=$kld"

# The released files are the tested ones, and the manifest records their origin.
(CDPATH='' cd -- "$out" && sha256sum --strict --quiet -c SHA256SUMS) || exit 3
for member in '"tool"' '"sample_crc32"' '"scheme"' '"ids_crc32"'; do
    grep -q "$member" "$out/qtool.json" || {
        echo "manifest: no $member in $out/qtool.json" >&2
        exit 3
    }
done
echo "$out: $(number bpw "$logs/verify.json") bits per weight, perplexity x" \
    "$(number ppl_ratio "$logs/eval.json"), sha256 of SHA256SUMS" \
    "$(sha256sum <"$out/SHA256SUMS" | cut -c1-64)"
