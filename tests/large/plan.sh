# Shared by plan_memory.sh and plan_time.sh, which source it: reads their arguments BUILD CKPT DATA
# [SCHEME...] into $build, $ckpt, $text and the positional parameters, and compares.

build=${1:?usage: $0 BUILD CKPT DATA [SCHEME...]} ckpt=${2:?CKPT} text=${3:?DATA}
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

# planned KEY SCHEME [OPTION...]: a number of plan's document.
planned() {
    key=$1
    shift
    "$build/qtool" plan "$ckpt" --scheme "$@" --threads 2 --json |
        sed -n 's/.*"'"$key"'": \([0-9.]*\).*/\1/p'
}
# measured WORD SCHEME [OPTION...]: the number behind WORD that tests/peak prints for quantize.
measured() {
    word=$1
    shift
    rm -rf "$dir/out"
    "$build/tests/peak" 1000000 "$build/qtool" quantize "$ckpt" -o "$dir/out" --scheme "$@" \
        --threads 2 -q 2>&1 >/dev/null | sed -n 's/.*'"$word"' \([0-9.]*\).*/\1/p'
}
# with_data SIZES SCHEME: `compare SCHEME OPTION...` for each size of calibration data.
with_data() {
    for windows in $1; do
        compare "$2" --data "$text" --samples "${windows%x*}" --seqlen "${windows#*x}"
    done
}
# count COMMAND...: a check, passed if the command succeeds.
count() { if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi; }
finish() {
    echo "$passed passed, $failed failed, 0 skipped"
    [ $failed -eq 0 ]
}
