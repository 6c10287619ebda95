#!/bin/sh
# The memory that 'plan' predicts, and the peak that 'quantize' has: fails if they differ by more than
# 10 % and 64 MiB.
#
#   usage: tests/large/plan_memory.sh BUILD CKPT TEXT [SCHEME...]

build=${1:?usage: tests/large/plan_memory.sh BUILD CKPT TEXT [SCHEME...]} ckpt=${2:?CKPT} text=${3:?TEXT}
shift 3
[ $# -gt 0 ] || set -- nf4 mix24 w4ax nf4:learn=1
[ -r "$ckpt/config.json" ] && [ -r "$text" ] || {
    echo "SKIP: no $ckpt or $text"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' INT TERM
passed=0 failed=0

# compare SCHEME [OPTION...]
compare() {
    plan=$("$build/qtool" plan "$ckpt" --scheme "$@" --threads 2 --json |
        sed -n 's/.*"peak_bytes": \([0-9]*\).*/\1/p')
    rm -rf "$dir/out"
    peak=$("$build/tests/peak" 1000000 "$build/qtool" quantize "$ckpt" -o "$dir/out" --scheme "$@" \
        --threads 2 -q 2>&1 >/dev/null | sed -n 's/.*peak_mib \([0-9]*\).*/\1/p')
    plan=$((${plan:-0} / 1048576)) peak=${peak:-0}
    apart=$((plan > peak ? plan - peak : peak - plan))
    echo "$*: predicted $plan MiB, measured $peak MiB"
    if [ "$peak" -gt 0 ] && [ $apart -le $((peak / 10 + 64)) ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
}

for scheme; do
    case $scheme in w4ax* | *learn=1*) ;; *) compare "$scheme" ;; esac
    for windows in '2 256' '16 256' '64 512'; do
        compare "$scheme" --data "$text" --samples ${windows% *} --seqlen ${windows#* }
    done
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
