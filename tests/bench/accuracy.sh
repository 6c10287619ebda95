#!/usr/bin/env bash
# The tables of docs/accuracy.md: perplexity over a whole file of ids, and KL divergence from the
# unquantized model over its first 256 windows.
#   accuracy.sh CKPT IDS [--data TEXT] SPEC...
# TEXT may be a calibration file, .qcal, instead. A SPEC may be followed, after blanks and in the
# same argument, by rules for --tensor.
# WINDOWS: both figures over so many windows instead.
# OPTIONS: further options of quantize, for example "--learn lr=3e-3 --tune-norms".
# Output: tab-separated spec, true bits per weight, perplexity, its rise in %, mean KL divergence.
set -eu
qtool=${QTOOL:-build/qtool}
ckpt=$1 ids=$2
shift 2
data=()
if [ "$1" = --data ]; then
    case $2 in
    *.qcal) data=(--calib "$2") ;;
    *) data=(--data "$2" --samples 128 --seqlen 512) ;;
    esac
    shift 2
fi
limit=(${WINDOWS:+--windows "$WINDOWS"})
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

figure() { # NAME: a number of the plain eval or quantize output on stdin
    awk -v name="$1" 'index($0, name) == 1 { print $(split(name, words, " ") + 1); exit }'
}

reference=$("$qtool" eval "$ckpt" --data "$ids" "${limit[@]}" --quiet | figure perplexity)
printf 'spec\tbpw\tppl\trise %%\tKLD\n'
printf 'unquantized\t-\t%s\t-\t-\n' "$reference"
for spec in "$@"; do
    read -r scheme rules <<<"$spec"
    tensor=()
    for rule in $rules; do tensor+=(--tensor "$rule"); done
    bpw=$("$qtool" quantize "$ckpt" -o "$dir/q" --scheme "$scheme" "${tensor[@]}" "${data[@]}" \
          ${OPTIONS:-} --force --quiet | figure bpw)
    "$qtool" eval "$dir/q" --data "$ids" --ref "$ckpt" --windows "${WINDOWS:-256}" --quiet >"$dir/kl"
    kld=$(figure 'KL divergence' <"$dir/kl")
    if [ "${WINDOWS:-}" ]; then
        ppl=$(figure perplexity <"$dir/kl")
    else
        ppl=$("$qtool" eval "$dir/q" --data "$ids" --quiet | figure perplexity)
    fi
    rise=$(awk -v a="$ppl" -v b="$reference" 'BEGIN { printf "%+.3f", 100 * (a / b - 1) }')
    printf '%s\t%s\t%s\t%s\t%s\n' "$spec" "$bpw" "$ppl" "$rise" "$kld"
done
