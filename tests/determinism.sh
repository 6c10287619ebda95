#!/usr/bin/env bash
# One container for one input and one set of options: every scheme and method, by every build that is
# given, with 1 and 4 threads, with 4 also on every instruction set path and twice on the best one; on a
# model of odd little shapes, and one preset of each scheme, calibrated and with a KV cache, on
# examples/nano-llama.
#
#   usage: tests/determinism.sh QTOOL...       QTOOL: executables, say of two compilers
#          tests/determinism.sh --quick QTOOL  ten schemes and methods with five numbers of threads, on
#                                              the little model alone
#
# Prints one line per scheme and method with the SHA-256 of the container's files, qtool-report.json
# (times) left out. Exit status 1 if any two differ.

cd "$(dirname "$0")/.." || exit 1
quick=
[ "${1-}" != --quick ] || { quick=yes && shift; }
[ $# -gt 0 ] || { echo "usage: tests/determinism.sh [--quick] QTOOL..." >&2; exit 2; }
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
jobs=$(nproc)
repeats="1 2"
# Waiting threads sleep: there are more threads than processors.
export OMP_WAIT_POLICY=passive

# Copies, so that nothing changes under way.
copies=()
for qtool; do
    cp "$qtool" "$dir/qtool-${#copies[@]}" || exit 1
    copies+=("$dir/qtool-${#copies[@]}")
    [ -n "$quick" ] || echo "${copies[-1]##*/}: $qtool"
done
set -- "${copies[@]}"

# The instruction set paths of this machine, and the choice by itself.
isas="generic"
! grep -qw avx2 /proc/cpuinfo || isas="$isas avx2"
! grep -qw avx512bw /proc/cpuinfo || isas="$isas avx512"

small() {
    model=tests/golden/models/llama threads="1 4"
    data=(--data tests/golden/models/llama/ids.u16 --samples 2 --seqlen 16)
}
large() {
    model=examples/nano-llama threads="1 4" isas=${isas%% *}
    data=(--data examples/nano-llama/calib.txt --samples 4 --seqlen 128 --kv 4 --kv-keys static)
}

# "NAME METHOD METHOD..." per preset, from the table of schemes.
# With "first", one preset of each scheme.
presets() {
    "$1" list schemes --json | python3 -c '
import json, sys
for scheme in json.load(sys.stdin)["schemes"]:
    methods = [c for p in scheme["parameters"] if p["key"] == "method" for c in p.get("choices", [])]
    for preset in scheme["presets"][:1 if sys.argv[1:] == ["first"] else None]:
        print(preset["name"], *(methods or ["-"]))' "${@:2}"
}

# hash QTOOL THREADS ISA SPEC: of one run's container, or of its refusal.
hash() {
    local out=$dir/$BASHPID
    if ! QTOOL_ISA=$3 "$1" quantize $model -o "$out" --scheme "$4" --threads "$2" "${data[@]}" \
        --quiet >/dev/null 2>"$out.err"; then
        echo "refused: $(head -n 1 "$out.err")"
        return
    fi
    rm -f "$out/qtool-report.json"
    (cd "$out" && sha256sum -- *) | sha256sum | cut -d' ' -f1
    rm -rf "$out"
}

# check SPEC QTOOL...
check() {
    local spec=$1 first= runs=0 got qtool count isa again
    shift
    for qtool; do
        for count in $threads; do
            for isa in $isas ''; do
                for again in $repeats; do
                    [ "$count" = "${threads##* }" ] || [ "$isa$again" = 1 ] || continue
                    [ "$again" = 1 ] || [ -z "$isa" ] || continue
                    got=$(hash "$qtool" "$count" "$isa" "$spec")
                    first=${first:-$got} runs=$((runs + 1))
                    [ "$got" = "$first" ] && continue
                    echo "FAIL $spec: ${qtool##*/}, $count threads, path '${isa:-best}': $got, not $first"
                    return
                done
            done
        done
    done
    case $first in
    refused*) echo "FAIL $spec: $first" ;;
    *) printf '%-26s %.16s  %d runs\n' "$spec" "$first" "$runs" ;;
    esac
}

# start SPEC QTOOL...: check in the background, as many at a time as there are processors.
start() {
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    check "$@" | tee -a "$dir/lines" &
}

# The summary and the exit status.
finish() {
    local failed passed
    wait
    failed=$(grep -c '^FAIL' "$dir/lines")
    passed=$(grep -vc '^FAIL' "$dir/lines")
    echo "$passed passed, $failed failed, 0 skipped"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
    exit
}

small
if [ -n "$quick" ]; then
    threads="1 2 3 5 16" isas= repeats=1 jobs=1
    data+=(--kv 4 --kv-keys static)
    for spec in fp6 fp4:method=gptq nf4 nf3:method=gptq lut3 lut2:method=gptq mix24 int4 int8 w4ax; do
        start "$spec" "$@"
    done
    finish
fi
while read -r name methods; do
    for method in $methods; do
        [ "$method" != auto ] || continue
        spec=$name
        [ "$method" = - ] || spec=$name:method=$method
        start "$spec" "$@"
    done
done < <(presets "$1")
large
while read -r name _; do
    start "$name" "$@"
done < <(presets "$1" first)
finish
