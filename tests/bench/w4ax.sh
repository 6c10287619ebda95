#!/usr/bin/env bash
# The tables of docs/accuracy.md about w4ax: the curve of a8max, granularities, rotation, order and
# smoothing with and without outliers, 4-bit caches.
#   w4ax.sh CKPT IDS CALIBRATION.txt [OUTLIER_CKPT]
# OUTLIER_CKPT: CKPT through tests/oracle/inject_outliers.py. WINDOWS, SAMPLES: how much of the data.
# Output: tab-separated model, spec, cache, perplexity, its rise in %, mean KL divergence, share of
# multiply-accumulates at 8 bits.
set -eu
qtool=${QTOOL:-build/qtool}
ckpt=$1 ids=$2 text=$3 outliers=${4:-}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

measure() { # MODEL NAME SPEC [eval options]: quantizes unless it is the spec of the last call
    if [ "$1 $3" != "${last:-}" ]; then
        "$qtool" quantize "$1" -o "$dir/q" --scheme "$3" --kv 4 --data "$text" \
            --samples "${SAMPLES:-128}" --seqlen 512 --force --quiet >/dev/null
        last="$1 $3"
    fi
    macs=$(sed -n 's/.*"a8_macs": \([0-9.]*\).*/\1/p' "$dir/q/qtool.json" | head -1)
    "$qtool" eval "$dir/q" --data "$ids" --ref "$ckpt" --windows "${WINDOWS:-256}" --quiet \
        "${@:4}" | awk -v name="$2" -v spec="$3" -v opt="${*:4}" -v macs="$macs" '
            /^perplexity/ { ppl = $2 } /^reference/ { rise = substr($3, 2) }
            /^KL/ { print name "\t" spec "\t" opt "\t" ppl "\t" rise "\t" $3 "\t" macs }'
}

for a8max in 0 0.05 0.1 0.2 0.4 1; do
    measure "$ckpt" plain "w4ax:a8max=$a8max"
done
for scheme in none w4ax; do
    for keys in static channel token; do
        measure "$ckpt" plain "$scheme" --kv 4 --kv-keys "$keys"
    done
done
for option in scales=int scales=row smooth=0 rotate=none rotate=none,smooth=0,order=none; do
    measure "$ckpt" plain "w4ax:$option"
done
[ -z "$outliers" ] || for option in smooth=1 scales=int order=none smooth=0 rotate=none rotate=none,smooth=0; do
    measure "$outliers" outliers "w4ax:$option"
done
