#!/bin/sh
# The time that 'plan' predicts, and the processor time that 'quantize' takes, divided by its
# threads: fails if they differ by more than a factor of 1.5.
#
#   usage: tests/large/plan_time.sh BUILD CKPT DATA [SCHEME...]
#
# SIZES="16x256 64x512" are the windows of calibration data. Found on 2 threads (29 November 2026),
# seconds:
#
#   checkpoint    scheme and data          predicted  measured
#   nano-llama    int4, 16 x 256                 1.4       1.3
#   nano-llama    nf3, 64 x 512                  7.4       7.0
#   nano-llama    fp6, 64 x 512                  6.9       6.8
#   nano-llama    mix24, 16 x 256               11.4      10.6
#   nano-llama    w4ax, 16 x 256                 2.7       3.7
#   nano-llama    nf4:learn=1, 16 x 256          2.7       3.6
#   tiny-llama    int4, 16 x 256                11.1       8.3
#   tiny-llama    nf4:learn=1, 16 x 256         20.2      19.4
#   tiny-llama    w4ax, 16 x 256                23.2      23.5

build=${1:?usage: tests/large/plan_time.sh BUILD CKPT DATA [SCHEME...]} ckpt=${2:?CKPT}
text=${3:?DATA}
shift 3
[ $# -gt 0 ] || set -- nf4 int4 fp6 mix24 w4ax nf4:learn=1
[ -r "$ckpt/config.json" ] && [ -r "$text" ] || {
    echo "SKIP: no $ckpt or $text"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' INT TERM
passed=0 failed=0

# compare SCHEME OPTION...: in milliseconds
compare() {
    plan=$("$build/qtool" plan "$ckpt" --scheme "$@" --threads 2 --json |
        sed -n 's/.*"estimated_seconds": \([0-9.]*\).*/\1/p')
    rm -rf "$dir/out"
    cpu=$("$build/tests/peak" 1000000 "$build/qtool" quantize "$ckpt" -o "$dir/out" --scheme "$@" \
        --threads 2 -q 2>&1 >/dev/null | sed -n 's/.* cpu \([0-9.]*\) .*/\1/p')
    if echo "${plan:-0} ${cpu:-0}" | awk '{ s = $2 / 2; printf "predicted %.1f s, measured %.1f s: ", $1, s
        exit !($1 > 0 && $1 < 1.5 * s && s < 1.5 * $1) }'; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
    echo "$*"
}

for scheme; do
    for windows in ${SIZES-16x256 64x512}; do
        compare "$scheme" --data "$text" --samples "${windows%x*}" --seqlen "${windows#*x}"
    done
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
