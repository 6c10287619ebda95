#!/bin/sh
# Every family's small model (tests/golden/models): `eval` on the GPU gives the perplexity of the CPU, and `quantize`
# with calibration runs on the GPU. Models without a tokenizer whose perplexity needs one (encoders) are only quantized.
#
#   usage: tests/gpu/families.sh QTOOL [FAMILY...]     default: all
#
# Prints one line per failure, the largest difference, and "N passed, M failed, K skipped".

qtool=${1:?usage: tests/gpu/families.sh QTOOL [FAMILY...]}
shift
models=$(dirname "$0")/../golden/models
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
passed=0 failed=0 skipped=0 largest=0

"$qtool" bench --quiet --scheme nf4 --shape 128x128 --m 1 >"$dir/log" 2>&1
if [ $? -eq 7 ]; then
    echo "SKIP: $(tail -n 1 "$dir/log")"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi

# perplexity FAMILY DEVICE
perplexity() {
    "$qtool" eval "$models/$1" --data "$models/$1/ids.u16" --seqlen 20 --windows 2 --device "$2" --quiet --json 2>"$dir/log" |
        sed -n 's/^  "ppl": \([-0-9.e+]*\),*$/\1/p'
}
# count STATUS TEXT: one check
count() {
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $2"
    fi
}

[ $# -gt 0 ] || set -- $(ls "$models")
for family; do
    cpu=$(perplexity "$family" cpu)
    if [ -n "$cpu" ]; then
        gpu=$(perplexity "$family" cuda)
        error=$(awk -v a="${gpu:-0}" -v b="$cpu" 'BEGIN { d = a / b - 1; print d < 0 ? -d : d }')
        awk -v e="$error" 'BEGIN { exit !(e < 1e-5) }'
        count $? "$family: perplexity ${gpu:-none} on the GPU, $cpu on the CPU $(cat "$dir/log")"
        largest=$(awk -v a="$largest" -v b="$error" 'BEGIN { print (a > b ? a : b) }')
    elif grep -q tokenizer.json "$dir/log"; then
        skipped=$((skipped + 1))
    else
        count 1 "$family: $(cat "$dir/log")"
    fi
    "$qtool" quantize "$models/$family" -o "$dir/out" --scheme int8:g=32 --data "$models/$family/ids.u16" --seqlen 20 \
        --samples 2 --device cuda --force --quiet >"$dir/log" 2>&1
    count $? "$family: $(cat "$dir/log")"
done

echo "largest difference of perplexity: $largest"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
