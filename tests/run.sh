#!/bin/sh
# Runs all tests that need no special machine: unit tests, the inputs of the fuzz targets,
# transcripts of the command line, the order of the folders; as many at a time as there are
# processors.
#
#   usage: tests/run.sh BUILD      BUILD: the directory with qtool and tests/test_*
#          RUNNER="valgrind ..." tests/run.sh BUILD     unit tests and fuzz inputs only, under RUNNER
#          ONLY="test_pack cli" tests/run.sh BUILD      these alone
#          SKIP="test_pack cli" tests/run.sh BUILD      all but these
#          JOBS=1 tests/run.sh BUILD                    one at a time
#
# The output of each goes to BUILD/tests/NAME.log, and is shown at the end when something failed.
# The last line is "N passed, M failed, K skipped"; the exit status is 1 if anything failed or
# nothing ran.

cd "$(dirname "$0")/.." || exit 1
build=${1:?usage: tests/run.sh BUILD}
jobs=${JOBS:-$(nproc)}

# Files come and go by the thousand, each with fsync: in memory, if there is half a gigabyte.
if [ -z "$TMPDIR" ]; then
    TMPDIR=/tmp
    room=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')
    [ "${room:-0}" -lt 524288 ] || [ ! -w /dev/shm ] || TMPDIR=/dev/shm
    export TMPDIR
fi
# Threads of several tests share the processors: those that wait sleep.
export OMP_WAIT_POLICY=passive

# Longest first, or it would run alone at the end.
names() {
    {
        [ -n "${RUNNER-}" ] || printf '%s\n' cli mutants damage kill_resume determinism schema includes
        printf '%s\n' test_faults test_calibrated test_mix24 test_writer test_gpu_backend \
            test_device_w4ax test_backend_cpu test_eval test_learn
        basename -s .c tests/unit/test_*.c tests/fuzz/fuzz_*.c | sed 's/^fuzz_/replay_/'
    } | awk '!seen[$0]++'
}

# cmocka's summary, a transcript's or our own -> "PASSED FAILED SKIPPED".
count() {
    awk '
        /^\[  PASSED  \] [0-9]+ test/ { p += $4 }
        /^\[  FAILED  \] [0-9]+ test/ { f += $4 }
        /^\[  SKIPPED \] [0-9]+ test/ { s += $4 }
        /^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { p += $1; f += $3; s += $5 }
        END { print p + 0, f + 0, s + 0 }' "$1"
}

command_of() {
    case $1 in
    includes) exec tests/includes.sh --test ;;
    cli) exec env QTOOL="$build/qtool" tests/cli/run.sh ;;
    schema) exec env QTOOL="$build/qtool" tests/cli/schema.sh ;;
    kill_resume) exec env QTOOL="$build/qtool" tests/cli/kill_resume.sh ;;
    mutants | damage) exec "$build/tests/$1" "$build/qtool" ;;
    determinism) exec tests/determinism.sh --quick "$build/qtool" ;;
    replay_*) exec ${RUNNER-} "$build/tests/$1" $(tests/fuzz/inputs.sh "${1#replay_}") ;;
    test_*) exec ${RUNNER-} "$build/tests/$1" ;;
    esac
}

# One test: its log, and BUILD/tests/NAME.count.
if [ $# -eq 2 ]; then
    name=$2 log=$build/tests/$2.log start=$(date +%s)
    (command_of "$name") >"$log" 2>&1
    status=$?
    set -- $(count "$log")
    # Ended without saying so: a crash, a sanitizer's report, nothing run.
    [ "$status" -eq 0 ] || [ "$2" -gt 0 ] || set -- "$1" 1 "$3"
    [ $(($1 + $2 + $3)) -gt 0 ] || set -- 0 1 0
    echo "$1 $2 $3 $status" >"$build/tests/$name.count"
    # In one piece, as others write too.
    echo "$(printf '%-20s %4d passed  %2d failed  %2d skipped  %3d s' \
        "$name" "$1" "$2" "$3" $(($(date +%s) - start)); echo; grep -a '^ *SKIP' "$log")"
    exit 0
fi

passed=0 failed=0 skipped=0 known=" $(names | tr '\n' ' ') " chosen=
for name in ${ONLY:-$known}; do
    case " ${SKIP-} " in
    *" $name "*) continue ;;
    esac
    case $known in
    *" $name "*) chosen="$chosen $name" ;;
    *) echo "there is no test $name" && failed=$((failed + 1)) ;;
    esac
done
mkdir -p "$build/tests"
for name in $chosen; do
    rm -f "$build/tests/$name.count"
done
echo "$chosen" | xargs -n 1 -P "$jobs" tests/run.sh "$build"
for name in $chosen; do
    read -r p f s status 2>/dev/null <"$build/tests/$name.count" || p=0 f=1 s=0 status=unknown
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    [ "$f" -eq 0 ] || {
        log=$build/tests/$name.log
        echo "---- $log, exit status $status"
        tail -n 100 "$log"
        echo ----
    }
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
