#!/usr/bin/env bash
# Ends quantize runs at random moments by SIGKILL, SIGTERM or SIGINT and resumes each until it
# completes. The container must equal that of an uninterrupted run byte for byte, except the report
# with its times: calibrated, with a choice of activation precisions, learned, and without data.
#
#   usage: kill_resume.sh [RUNS]      default 4, with QT_FULL=1 50; QTOOL: the binary
#
# QT_SEED=N repeats the signals and delays, though not what they hit.
set -u
qtool=${QTOOL:-build/qtool}
runs=${1:-$([ -n "${QT_FULL-}" ] && echo 50 || echo 4)}
seed=${QT_SEED:-$(date +%s)}
RANDOM=$((seed % 32768))
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
nano=examples/nano-llama
llama=tests/golden/models/llama
kinds=(calibrated activations learned plain)
calibrated="$nano --scheme nf3:g=64 --data $nano/calib.txt --samples 8 --seqlen 128"
activations="$nano --scheme w4ax --data $nano/calib.txt --samples 4 --seqlen 64"
learned="$llama --scheme nf3:learn=1 --learn passes=1 --tune-norms --data $llama/ids.u16 --samples 2 --seqlen 16"
plain="$nano --scheme lut3"
failed=0
echo "QT_SEED=$seed"

# fault KIND: what is wrong with the interrupted run that has ended now, or nothing.
fault() {
    case $signal.$status in
    none.0 | *.0 | KILL.137 | TERM.75 | INT.75 | TERM.143 | INT.130) ;;
    *) echo "status $status after $signal" && return ;;
    esac
    [ ! -d "$dir/out" ] || [ ! -d "$dir/out.partial" ] || echo "both OUT and OUT.partial exist"
}

# interrupted ARGUMENT...: runs until the container is complete. Sets `wrong` and `kills`.
interrupted() {
    kills=0 wrong=
    while [ -z "$wrong" ]; do
        "$qtool" quantize "$@" -o "$dir/out" --resume --quiet >/dev/null 2>"$dir/err" &
        pid=$! signal=none
        # The delay grows, so that the loop ends on any machine.
        sleep "0.$(printf %03d $(((RANDOM % 200) + 20 * kills)))"
        if [ "$kills" -lt 12 ]; then
            signal=$(set -- KILL KILL TERM INT && shift $((RANDOM % 4)) && echo "$1")
            kill -"$signal" "$pid" && kills=$((kills + 1))
        fi 2>/dev/null
        wait "$pid"
        status=$?
        wrong=$(fault)
        [ ! -d "$dir/out" ] || break # also if it was ended after the last rename
        [ "$signal" != none ] || wrong="it failed without a signal"
    done 2>/dev/null
}

for run in $(seq "$runs"); do
    kind=${kinds[$(((run + seed) % 4))]}
    [ -d "$dir/$kind" ] || "$qtool" quantize ${!kind} -o "$dir/$kind" --quiet >/dev/null || exit 1
    interrupted ${!kind}
    [ -n "$wrong" ] || wrong=$(diff -rq -x qtool-report.json "$dir/$kind" "$dir/out" 2>&1)
    if [ -z "$wrong" ]; then
        echo "ok: $kind: same bytes after $kills signals"
    else
        echo "FAILED: $kind, run $run, after $kills signals: $wrong"
        cat "$dir/err"
        failed=$((failed + 1))
    fi
    rm -rf "$dir/out" "$dir/out.partial"
done
echo "$((runs - failed)) passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
