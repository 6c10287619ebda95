#!/bin/sh
# Fuzzes targets one after the other. Called by `make fuzz`.
#
#   usage: tests/fuzz/run.sh BUILD SECONDS TARGET...     BUILD: where tests/fuzz_TARGET are
#
# Prints, per target, executions and coverage; exits 1 if any found something (BUILD/found).

cd "$(dirname "$0")/../.." || exit 1
build=$1 seconds=$2
shift 2
failed=0
for target; do
    seeds=$build/seeds/$target corpus=$build/corpus/$target
    mkdir -p "$seeds" "$corpus" "$build/found" "$build/log"
    set -- $(tests/fuzz/inputs.sh "$target")
    QT_FUZZ_SEEDS=$seeds "$build/tests/fuzz_$target" "$corpus" "$@" "$seeds" \
        -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -max_len=16384 -use_value_profile=1 \
        -print_final_stats=1 -artifact_prefix="$build/found/$target-" >"$build/log/$target" 2>&1
    status=$?
    awk -v target="$target" -v status=$status '
        / cov: / { for (i = 1; i < NF; i++) { if ($i == "cov:") cov = $(i + 1); if ($i == "ft:") ft = $(i + 1) } }
        /number_of_executed_units/ { runs = $2 }
        END { printf "%-12s %10d runs  %6d edges  %6d features  %s\n", target, runs, cov, ft,
                     status ? "FOUND SOMETHING" : "clean" }' "$build/log/$target"
    [ $status -eq 0 ] || { failed=1 && tail -n 30 "$build/log/$target"; }
done
exit $failed
