#!/bin/sh
# The commands that use a GPU, on examples/nano-llama: `verify --device cuda` of a container of every scheme and of
# calibrated containers with a KV cache; calibrate, quantize and eval on the GPU, compared with the CPU; bench.
#
#   usage: tests/gpu/commands.sh QTOOL [SCHEME...]     schemes of uncalibrated containers; default: all
#
# Prints one line per check and "N passed, M failed, K skipped".

qtool=${1:?usage: tests/gpu/commands.sh QTOOL [SCHEME...]}
shift
nano=$(dirname "$0")/../../examples/nano-llama
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
passed=0 failed=0

"$qtool" bench --quiet --scheme nf4 --shape 128x128 --m 1 >"$dir/log" 2>&1
if [ $? -eq 7 ]; then
    echo "SKIP: $(tail -n 1 "$dir/log")"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi

# check NAME COMMAND...
check() {
    name=$1
    shift
    "$@" >"$dir/log" 2>&1
    status=$?
    if [ $status -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok $name"
    else
        failed=$((failed + 1))
        echo "FAILED $name: status $status of: $*"
        tail -n 20 "$dir/log"
    fi
}

# quantize OUT SCHEME [OPTION...]
quantize() {
    out=$dir/$1 scheme=$2
    shift 2
    "$qtool" quantize "$nano" -o "$out" --scheme "$scheme" --force --quiet "$@"
}
quantize_and_verify() {
    quantize "$@" && "$qtool" verify "$dir/$1" --device cuda --source "$nano" --quiet
}

# with_data COMMAND...: adds calibration data.
with_data() { "$@" --data "$nano/calib.txt" --samples 8 --seqlen 256; }

# perplexity CONTAINER [OPTION...]
perplexity() {
    what=$1
    shift
    "$qtool" eval "$what" --data "$nano/eval.txt" --windows 8 --quiet --json "$@" |
        sed -n 's/^  "ppl": \([-0-9.e+]*\),*$/\1/p'
}
# same_perplexity TOLERANCE CONTAINER CONTAINER [OPTION...]: the first on the GPU, the second on the CPU.
same_perplexity() {
    tolerance=$1 first=$2 second=$3
    shift 3
    gpu=$(perplexity "$first" --device cuda "$@") cpu=$(perplexity "$second" "$@")
    echo "perplexity $gpu on the GPU, $cpu on the CPU"
    awk -v a="$gpu" -v b="$cpu" -v tolerance="$tolerance" 'BEGIN { exit !(a > 1 && b > 1 && a / b < 1 + tolerance && b / a < 1 + tolerance) }'
}

# same_errors CONTAINER CONTAINER: the errors of their linears under the Hessians, in the first relative to the second.
# Those of o_proj and down_proj depend most on codes that were rounded before.
same_errors() {
    for container; do
        sed -n 's/^ *"error_after": \([0-9.e+-]*\).*/\1/p' "$container/qtool-report.json" >"$container.errors"
    done
    paste "$1.errors" "$2.errors" | awk '
        $1 > 0 && $2 > 0 { r = log($1 / $2); sum += r; if (r < low) low = r; if (r > high) high = r; n++ }
        END {
            printf "%d of %d linears: ratio %.4f, from %.4f to %.4f\n", n, NR, exp(sum / n), exp(low), exp(high)
            exit !(n > 0 && n == NR && sum / n < 0.01 && sum / n > -0.01 && low > -0.1 && high < 0.1)
        }'
}
mixed_schemes() {
    for device in cuda cpu; do
        quantize mixed-$device lut3 --tensor '.*[qk]_proj.*=fp5' --tensor '.*v_proj.*=lut4:g=64' --device $device "$@" ||
            return
    done
    same_errors "$dir/mixed-cuda" "$dir/mixed-cpu"
}

# Presets that need no data, from `list schemes`, and other schemes with kernels.
presets() {
    "$qtool" list schemes | awk '/^[a-z0-9]+: / { p = 1 } /^  parameter/ { p = 0 } p && /^  [a-z]/ && $1 != "w4ax" && $1 != "nvfp4" { print $1 }'
}
[ $# -gt 0 ] || set -- $(presets) \
    fp6:e=2 nf4:g=32 nf3:g=64 int4:g=256 int4:zero=group int4:g=32,zero=group int8:g=32 int8:g=128,zero=group \
    mix24:outliers=0 mix24:four=1
for scheme; do
    check "$scheme" quantize_and_verify plain "$scheme"
done

# Groups of 16 have no fused kernel, so that verify's gate fails.
check "nvfp4" quantize plain nvfp4
no_kernel() { "$qtool" verify "$dir/plain" --device cuda --quiet; [ $? -eq 5 ]; }
check "nvfp4 has no fused kernel" no_kernel

# Products on the GPU differ by roundings. The code that a weight (or an activation of w4ax) is rounded to changes all
# later ones, so containers that are made on the GPU differ, and so do perplexities of w4ax.
for scheme in nf3 int4 mix24 w4ax w4ax:scales=int; do
    case $scheme in w4ax*) same=2e-2 ;; *) same=1e-3 ;; esac
    check "$scheme, calibrated on the GPU, with a cache" with_data quantize_and_verify gpu "$scheme" --kv 4 --device cuda
    check "$scheme, calibrated on the CPU, with a cache" with_data quantize_and_verify cpu "$scheme" --kv 4
    check "$scheme: perplexity of one container" same_perplexity $same "$dir/cpu" "$dir/cpu" --kv 4
    check "$scheme: perplexity of both" same_perplexity 8e-2 "$dir/gpu" "$dir/cpu" --kv 4
    case $scheme in w4ax*) ;; *) check "$scheme: errors of both" same_errors "$dir/gpu" "$dir/cpu" ;; esac
done
check "errors with three schemes for an input" with_data mixed_schemes
check "perplexity of the original" same_perplexity 1e-3 "$nano" "$nano"
check "nf3, scales tuned on the GPU" with_data quantize_and_verify learned nf3:learn=1 --tune-norms --device cuda
check "calibrate on the GPU" with_data "$qtool" calibrate "$nano" -o "$dir/x.qcal" --device cuda --quiet
check "nf3, from that file" quantize_and_verify file nf3 --calib "$dir/x.qcal" --device cuda
check "perplexity of that" same_perplexity 1e-3 "$dir/file" "$dir/file"
check "bench" "$qtool" bench --quiet --scheme nf4 --scheme mix24 --scheme w4ax --shape 256x512 --m 1,40 --json
check "bench experts" "$qtool" bench --quiet --moe 8,2,256,128 --scheme nf4 --scheme mix24 --m 1,100 --json
check "bench kv4" "$qtool" bench --quiet --scheme kv4 --shape 4x2x64 --m 2 --length 100 --json

# Two ranks, which share the GPU if there is only one; then one of them without a GPU.
ranks() { mpirun --allow-run-as-root --oversubscribe --bind-to none "$@"; }
calibrated() {
    echo "quantize $nano --scheme $1 --data $nano/calib.txt --samples 140 --seqlen 256" \
        "--device cuda --quiet --force"
}
same_bytes() {
    "$qtool" $(calibrated "$1") -o "$dir/one" &&
        ranks -n 2 "$qtool" $(calibrated "$1") -o "$dir/two" &&
        cmp "$dir/one/SHA256SUMS" "$dir/two/SHA256SUMS"
}
rank_without_gpu() {
    set -- "$qtool" $(calibrated nf4) -o "$dir/none"
    ranks -n 1 "$@" : -n 1 env CUDA_VISIBLE_DEVICES= "$@" 2>"$dir/err"
    status=$?
    grep '^qtool' "$dir/err"
    [ $status -eq 7 ] && grep -q '^qtool quantize: rank 1: no GPU 0: ' "$dir/err" &&
        [ "$(grep -c '^qtool' "$dir/err")" -eq 1 ] && [ ! -e "$dir/none" ] &&
        [ ! -e "$dir/none.partial" ]
}
if command -v mpirun >/dev/null && ldd "$qtool" | grep -q libmpi; then
    for scheme in nf4 int4 mix24 w4ax; do
        check "$scheme on two ranks" same_bytes "$scheme"
    done
    check "a rank without a GPU" rank_without_gpu
fi

echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
