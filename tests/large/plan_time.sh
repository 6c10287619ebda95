#!/bin/sh
# The time that 'plan' predicts, and the processor time that 'quantize' takes, divided by its
# threads: fails if they differ by more than a factor of 1.5.
#
#   usage: tests/large/plan_time.sh BUILD CKPT DATA [SCHEME...]
#
# SIZES="16x256 64x512" are the windows of calibration data. Found on 2 threads (29 November 2026),
# seconds:
#
#   checkpoint    scheme and data          predicted  measured
#   nano-llama    int4, 16 x 256                 1.4       1.3
#   nano-llama    nf3, 64 x 512                  7.4       7.0
#   nano-llama    fp6, 64 x 512                  6.9       6.8
#   nano-llama    mix24, 16 x 256               11.4      10.6
#   nano-llama    w4ax, 16 x 256                 2.7       3.7
#   nano-llama    nf4:learn=1, 16 x 256          2.7       3.6
#   tiny-llama    int4, 16 x 256                11.1       8.3
#   tiny-llama    nf4:learn=1, 16 x 256         20.2      19.4
#   tiny-llama    w4ax, 16 x 256                23.2      23.5

. "${0%/*}/plan.sh"

within() {
    echo "$1 $2" | awk '{ s = $2 / 2; printf "predicted %.1f s, measured %.1f s: ", $1, s
        exit !($1 > 0 && $1 < 1.5 * s && s < 1.5 * $1) }'
}
# compare SCHEME OPTION...
compare() {
    plan=$(planned estimated_seconds "$@") cpu=$(measured cpu "$@")
    count within "${plan:-0}" "${cpu:-0}"
    echo "$*"
}

for scheme; do
    with_data "${SIZES-16x256 64x512}" "$scheme"
done
finish
