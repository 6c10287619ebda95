#!/usr/bin/env bash
# Sends SIGKILL at random points of a calibrated run and resumes it until it ends. The container must equal
# that of an uninterrupted run byte for byte, except the report with its times. Usage: kill_resume.sh [RUNS]
set -u
qtool=${QTOOL:-build/qtool}
runs=${1:-5}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
args=(examples/nano-llama --scheme nf3:g=64 --data examples/nano-llama/calib.txt
      --samples 8 --seqlen 128 --quiet)
failed=0

"$qtool" quantize "${args[@]}" -o "$dir/whole" >/dev/null || exit 1
for run in $(seq "$runs"); do
    kills=0
    while :; do
        "$qtool" quantize "${args[@]}" -o "$dir/out" --resume >/dev/null 2>"$dir/err" &
        pid=$!
        # The delay grows, so that the loop ends on any machine.
        sleep "0.$(printf %03d $(((RANDOM % 200) + 20 * kills)))"
        [ "$kills" -lt 12 ] && kill -9 "$pid" 2>/dev/null && kills=$((kills + 1))
        wait "$pid" 2>/dev/null && break
        [ -d "$dir/out" ] && break # killed after the last rename
    done 2>/dev/null
    if diff -rq -x qtool-report.json "$dir/whole" "$dir/out"; then
        echo "ok: same bytes after $kills kills"
    else
        echo "FAILED: run $run, after $kills kills"
        cat "$dir/err"
        failed=$((failed + 1))
    fi
    rm -rf "$dir/out" "$dir/out.partial"
done
echo "$((runs - failed)) passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
