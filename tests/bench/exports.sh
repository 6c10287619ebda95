#!/bin/sh
# Times exports, and a copy and a checksum of the bytes that they write.
#
#   usage: tests/bench/exports.sh QTOOL WORK FORMAT:CONTAINER...      needs GNU time
#
# For each format: exports the container to WORK, copies the result with cp and reads it with
# sha256sum, one after the other. Prints MB written, seconds on the clock and of processor time of the
# export and of cp and sha256sum together, the ratios, and the largest resident memory of the export
# in MiB.

set -e
qtool=${1:?usage: tests/bench/exports.sh QTOOL WORK FORMAT:CONTAINER...} work=$2
shift 2
times=$work/times
rm -rf "$work" && mkdir -p "$work"
printf '%-20s %8s %9s %9s %9s %9s %7s %7s %8s\n' format MB 'export s' 'CPU s' 'cp+sum s' 'CPU s' \
    ratio 'CPU' 'MiB'
for pair; do
    format=${pair%%:*} container=${pair#*:}
    command time -f '%e %U %S %M' -o "$times.export" \
        "$qtool" export "$container" -o "$work/out" --format "$format" -q >/dev/null
    sync
    command time -f '%e %U %S' -o "$times.copy" \
        sh -c "cp -r '$work/out' '$work/copy' && sha256sum '$work'/copy/* >'$work/sums'"
    sync
    size=$(du -sb "$work/out" | cut -f1)
    paste -d' ' "$times.export" "$times.copy" | awk -v f="$format" -v size="$size" '{
        cpu = $2 + $3; copy = $6 + $7
        printf "%-20s %8.0f %9.1f %9.1f %9.1f %9.1f %7.2f %7.2f %8.0f\n",
            f, size / 1e6, $1, cpu, $5, copy, $1 / $5, cpu / copy, $4 / 1024 }'
    rm -rf "$work/out" "$work/copy"
done
