#!/bin/sh
# A checkpoint that is larger than the memory qtool may take: quantizes 6 GB of BF16 to nf4, and
# fails if more than 1.5 GB was ever resident.
#
#   usage: tests/large/memory.sh BUILD      in TMPDIR (/tmp), which needs 10 GB

build=${1:?usage: tests/large/memory.sh BUILD}
limit=1430 # MiB: 1.5 GB
weights=3035627520
room=$(df -Pk "${TMPDIR:-/tmp}" | awk 'NR == 2 { print $4 }')
if [ "${room:-0}" -lt 10000000 ]; then
    echo "SKIP: less than 10 GB are free in ${TMPDIR:-/tmp}"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' INT TERM

"$build/tests/make_checkpoint" "$dir/source" || exit 1
if "$build/tests/peak" $limit "$build/qtool" quantize "$dir/source" -o "$dir/out" --scheme nf4 \
    --quiet --json >"$dir/document" 2>"$dir/figures"; then
    result="1 passed, 0 failed, 0 skipped"
else
    result="0 passed, 1 failed, 0 skipped"
    cat "$dir/document"
fi
LC_ALL=C awk -v weights=$weights '
    $1 == "seconds" {
        printf "peak %d MiB of %d allowed; %.1f s, %.1f million weights/s, %.1f s of CPU\n",
            $6, $8, $2, weights / $2 / 1e6, $4
        next
    }
    { print }' "$dir/figures"
echo "$result"
[ "${result%% *}" -eq 1 ]
