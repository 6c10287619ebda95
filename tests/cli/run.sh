#!/bin/sh
# Runs the transcripts tests/cli/*.t with the qtool binary.
#
#   usage: tests/cli/run.sh [NAME.t...]       QTOOL: the binary, default build/qtool
#
# The steps of a transcript share a working directory that is empty at first:
#
#   # comment
#   need COMMAND      skip the rest of the file unless COMMAND succeeds
#   $ COMMAND         a step: run by sh -c, with qtool in PATH, NANO = the example checkpoint,
#                     BAD = tests/bad, MODELS = tests/golden/models, RELEASE = examples/ci/release.sh
#   ? N               its exit status (default 0)
#   > ERE             a line of stdout matches             >! ERE   no line matches
#   2 ERE             a line of stderr matches             2! ERE   no line matches
#   >-                stdout is empty                      2-       stderr is empty
#
# Prints one line per failed check and a summary; exits 1 if anything failed.

cd "$(dirname "$0")/../.." || exit 1
root=$PWD
here=$root/tests/cli
QTOOL=${QTOOL:-build/qtool}
case $QTOOL in /*) ;; *) QTOOL=$root/$QTOOL ;; esac
[ -x "$QTOOL" ] || { echo "$0: no executable $QTOOL" >&2; exit 1; }
NANO=$root/examples/nano-llama
BAD=$root/tests/bad
MODELS=$root/tests/golden/models
RELEASE=$root/examples/ci/release.sh
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' INT TERM
mkdir "$tmp/bin" && ln -s "$QTOOL" "$tmp/bin/qtool" || exit 1
PATH=$tmp/bin:$PATH
LC_ALL=C
export PATH NANO BAD MODELS RELEASE LC_ALL

passed=0 failed=0 skipped=0

# Ends a step: without a "?" line its exit status must be 0.
finish_step() {
    [ -n "$step" ] || return 0
    at=$number number=$step_line
    [ -n "$status_checked" ] || check "exit status $status, expected 0" test "$status" -eq 0
    number=$at
    if [ -z "$step_failed" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        sed 's/^/    stderr: /' "$tmp/err" | head -n 5
    fi
    step=
}

# check MESSAGE COMMAND...: the step fails if COMMAND fails.
check() {
    message=$1
    shift
    "$@" && return
    [ -n "$step_failed" ] || echo "FAIL $file:$step_line: $step"
    echo "    line $number: $message"
    step_failed=1
}

has() { grep -Eq -e "$2" "$1"; }
has_not() { ! has "$1" "$2"; }
is_empty() { [ ! -s "$1" ]; }

run_step() {
    step=$1 step_line=$number step_failed= status_checked=
    (cd "$tmp/work" && sh -c "$step") >"$tmp/out" 2>"$tmp/err" </dev/null
    status=$?
}

run_line() {
    case $1 in
    '' | '#'*) ;;
    'need '*)
        finish_step
        sh -c "${1#need }" >/dev/null 2>&1 && return
        echo "SKIP rest of $file: needs ${1#need }"
        skipped=$((skipped + 1))
        return 1
        ;;
    '$ '*) finish_step && run_step "${1#??}" ;;
    '? '*)
        status_checked=1
        check "exit status $status, expected ${1#??}" test "$status" -eq "${1#??}"
        ;;
    '>! '*) check "stdout has: ${1#???}" has_not "$tmp/out" "${1#???}" ;;
    '> '*) check "stdout lacks: ${1#??}" has "$tmp/out" "${1#??}" ;;
    '>-') check "stdout is not empty" is_empty "$tmp/out" ;;
    '2! '*) check "stderr has: ${1#???}" has_not "$tmp/err" "${1#???}" ;;
    '2 '*) check "stderr lacks: ${1#??}" has "$tmp/err" "${1#??}" ;;
    '2-') check "stderr is not empty" is_empty "$tmp/err" ;;
    *) step=${step:-none} check "not a transcript line: $1" false ;;
    esac
    return 0
}

run_file() {
    rm -rf "$tmp/work" && mkdir "$tmp/work" || exit 1
    number=0 step=
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        run_line "$line" || break
    done <"$here/$file"
    finish_step
}

[ $# -gt 0 ] || set -- $(cd "$here" && ls ./*.t)
for file; do
    file=$(basename "$file")
    run_file
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
