#!/bin/sh
# Measures docs/kernels_h200.tsv or kernels_h100.tsv (speed.tsv) and docs/kv4_h200.tsv (kv4.tsv) on
# the GPU of this machine. `make charts` then updates docs/kernels_speed.md.
#
#   usage: tests/bench/kernels.sh QTOOL OUT     OUT: an empty directory for *.json, *.tsv, speed.md
set -e
here=$(cd "$(dirname "$0")" && pwd)
qtool=${1:?usage: tests/bench/kernels.sh QTOOL OUT} out=${2:?}
bench() { # NAME OPTION...
    name=$1
    shift
    "$qtool" bench --quiet --json "$@" >"$out/$name.json"
}
bench tokens --scheme nf4 --scheme int4 --scheme nf3 --scheme nf2 --scheme fp6 --scheme fp5 \
    --shape 1024x4096 --shape 4096x4096 --shape 6144x4096 --shape 14336x4096 --shape 28672x4096 --shape 4096x14336 \
    --shape 8192x8192 --shape 10240x8192 --shape 8192x28672 --m 1,8,16,32,64,128,192,256,1024
bench large --scheme nf4 --scheme int4 --scheme nf3 --scheme nf2 --scheme fp6 --scheme fp5 \
    --shape 57344x8192 --m 1,8,16,64,256
bench many --scheme nf4 --scheme fp6 --shape 4096x4096 --shape 28672x4096 --shape 4096x14336 \
    --shape 8192x8192 --m 2048,4096
bench integers --scheme int4:zero=group --scheme int8:g=128 --scheme int8:g=128,zero=group \
    --shape 4096x4096 --shape 28672x4096 --shape 8192x8192 --m 1,16,32,64,128,256,1024
bench narrow --scheme nf4:g=32 --scheme nf3:g=32 --scheme int4:g=32 --scheme int4:g=32,zero=group --scheme int8:g=32 \
    --shape 4096x4096 --shape 28672x4096 --shape 8192x8192 --m 1,16,32,64,128,256,1024
bench minifloats --scheme fp8 --scheme fp8:e=5 --scheme fp7 --shape 4096x4096 --shape 28672x4096 --shape 8192x8192 \
    --m 1,16,32,64,128,256,1024
bench bf16 --dtype bf16 --scheme nf4 --scheme int4 --scheme nf3 --scheme fp6 --shape 1024x4096 --shape 4096x4096 \
    --shape 14336x4096 --shape 4096x14336 --shape 8192x8192 --shape 57344x8192 --m 1,2,4,8,16,64
bench older --compute 8.0 --scheme nf4 --scheme int4 --scheme fp6 --shape 4096x4096 --shape 28672x4096 \
    --shape 8192x8192 --m 1,8,16,32,64,128,256,1024
bench mix24 --scheme mix24 --scheme mix24:outliers=0 --shape 4096x4096 --shape 6144x4096 --shape 14336x4096 \
    --shape 8192x8192 --shape 8192x28672 --shape 57344x8192 --m 1,8,16,32,64,128,256,512,1024,4096
bench dependent --dependent --scheme nf4 --scheme int4 --scheme nf3 --scheme nf2 --scheme fp6 \
    --scheme fp5 --scheme w4ax --shape 4096x4096 --shape 8192x8192 --shape 57344x8192 --m 1,16
bench invariant --invariant --scheme nf4 --shape 8192x8192 --m 1,16,64
bench w4ax --scheme w4ax --scheme w4ax:scales=int --scheme w4ax:scales=row --shape 4096x4096 --shape 6144x4096 \
    --shape 14336x4096 --shape 4096x14336 --shape 8192x8192 --shape 57344x8192 --m 1,8,16,32,64,128,256,512,4096
bench kv4 --scheme kv4 --shape 32x8x128 --m 1,4,16,64 --length 1024,2048,4096,8192,32768
bench kv4_70b --scheme kv4 --shape 64x8x128 --m 1,16,64 --length 2048,8192
cd "$out"
python3 "$here/speed_tables.py" . tokens.json large.json many.json integers.json narrow.json minifloats.json bf16.json older.json mix24.json w4ax.json dependent.json \
    invariant.json kv4.json kv4_70b.json
