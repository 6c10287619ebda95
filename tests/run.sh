#!/bin/sh
# Runs all tests that need no special machine: unit tests, the inputs of the fuzz targets,
# transcripts of the command line, the order of the folders.
#
#   usage: tests/run.sh BUILD      BUILD: the directory with qtool and tests/test_*
#          RUNNER="valgrind ..." tests/run.sh BUILD     unit tests and fuzz inputs only, under RUNNER
#          ONLY="test_pack cli" tests/run.sh BUILD      these alone
#
# The output of each goes to BUILD/tests/NAME.log, and is shown when something failed. The last line
# is "N passed, M failed, K skipped"; the exit status is 1 if anything failed or nothing ran.

cd "$(dirname "$0")/.." || exit 1
build=${1:?usage: tests/run.sh BUILD}
passed=0 failed=0 skipped=0 ran=

# Files come and go by the thousand, each with fsync: in memory, if there is half a gigabyte.
if [ -z "$TMPDIR" ]; then
    TMPDIR=/tmp
    room=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')
    [ "${room:-0}" -lt 524288 ] || [ ! -w /dev/shm ] || TMPDIR=/dev/shm
    export TMPDIR
fi

# cmocka's summary, a transcript's or our own -> "PASSED FAILED SKIPPED".
count() {
    awk '
        /^\[  PASSED  \] [0-9]+ test/ { p += $4 }
        /^\[  FAILED  \] [0-9]+ test/ { f += $4 }
        /^\[  SKIPPED \] [0-9]+ test/ { s += $4 }
        /^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { p += $1; f += $3; s += $5 }
        END { print p + 0, f + 0, s + 0 }' "$1"
}

# run NAME COMMAND...
run() {
    case " ${ONLY:-$1} " in *" $1 "*) ;; *) return ;; esac
    name=$1 log=$build/tests/$1.log ran="$ran $1"
    shift
    start=$(date +%s)
    "$@" >"$log" 2>&1
    status=$?
    set -- $(count "$log")
    # Ended without saying so: a crash, a sanitizer's report, nothing run.
    [ "$status" -eq 0 ] || [ "$2" -gt 0 ] || set -- "$1" 1 "$3"
    [ $(($1 + $2 + $3)) -gt 0 ] || set -- 0 1 0
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
    printf '%-20s %4d passed  %2d failed  %2d skipped  %3d s\n' \
        "$name" "$1" "$2" "$3" $(($(date +%s) - start))
    grep -a '^ *SKIP' "$log"
    [ "$2" -eq 0 ] || { echo "---- $log, exit status $status"; tail -n 100 "$log"; echo ----; }
}

mkdir -p "$build/tests"
run includes tests/includes.sh --test
for source in tests/unit/test_*.c; do
    name=$(basename "$source" .c)
    run "$name" ${RUNNER-} "$build/tests/$name"
done
for source in tests/fuzz/fuzz_*.c; do
    target=$(basename "$source" .c) target=${target#fuzz_}
    run "replay_$target" ${RUNNER-} "$build/tests/replay_$target" $(tests/fuzz/inputs.sh "$target")
done
if [ -z "${RUNNER-}" ]; then
    run cli env QTOOL="$build/qtool" tests/cli/run.sh
    run schema env QTOOL="$build/qtool" tests/cli/schema.sh
    run kill_resume env QTOOL="$build/qtool" tests/cli/kill_resume.sh 2
fi
for name in ${ONLY-}; do
    case "$ran " in *" $name "*) ;; *) echo "there is no test $name" && failed=$((failed + 1)) ;; esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
