# Several ranks: the same bytes for 1, 2 and 3; refusals; a rank with other input, one with a full disk,
# one that dies; resuming. Not under AddressSanitizer, which reports what Open MPI does not free.
need command -v mpirun >/dev/null && ldd "$(command -v qtool)" | grep -q libmpi && ! ldd "$(command -v qtool)" | grep -q libasan
$ printf '#!/bin/sh\nn=$1\nshift\nexec mpirun --allow-run-as-root --oversubscribe --bind-to none -n $n "$@"\n' >ranks && chmod +x ranks
$ qtool quantize "$NANO" -o fp6-1 --scheme fp6 -q && ./ranks 2 qtool quantize "$NANO" -o fp6-2 --scheme fp6 -q && cmp fp6-1/SHA256SUMS fp6-2/SHA256SUMS
$ echo "--data $NANO/calib.txt --samples 64 --seqlen 128 --threads 1 -q" >data
$ qtool quantize "$NANO" -o nf4-1 --scheme nf4 $(cat data) && ./ranks 3 qtool quantize "$NANO" -o nf4-3 --scheme nf4 $(cat data) && cmp nf4-1/SHA256SUMS nf4-3/SHA256SUMS
$ qtool calibrate "$NANO" -o 1.qcal $(cat data) && ./ranks 2 qtool calibrate "$NANO" -o 2.qcal $(cat data) && cmp 1.qcal 2.qcal
# A mixture of experts: all ranks choose the same tokens for an expert.
$ for i in $(seq 250); do cat "$MODELS/mixtral/ids.u16"; done >ids.u16; echo "--data ids.u16 --samples 600 --seqlen 16 --threads 1 -q" >data2
$ m="$MODELS/mixtral"; qtool quantize "$m" -o moe-1 --scheme nf3:g=32 $(cat data2) && ./ranks 2 qtool quantize "$m" -o moe-2 --scheme nf3:g=32 $(cat data2) && cmp moe-1/SHA256SUMS moe-2/SHA256SUMS
$ m="$MODELS/mixtral"; qtool calibrate "$m" -o moe-1.qcal $(cat data2) && ./ranks 3 qtool calibrate "$m" -o moe-3.qcal $(cat data2) && cmp moe-1.qcal moe-3.qcal
$ ./ranks 2 qtool quantize "$NANO" -o calib --scheme int4 --calib 2.qcal -q && qtool quantize "$NANO" -o calib --resume --scheme int4 --calib 2.qcal -q
> container +calib, already complete
$ echo "eval nf4-1 --ref $NANO --data $NANO/eval.txt --windows 9 --seqlen 256 --json -q" >eval
$ qtool $(cat eval) >1.json && ./ranks 2 qtool $(cat eval) >2.json && cmp 1.json 2.json
$ qtool verify nf4-1 --source "$NANO" --json -q >1.json && ./ranks 2 qtool verify nf4-1 --source "$NANO" --json -q >2.json && cmp 1.json 2.json
# Only rank 0 prints.
$ ./ranks 2 qtool verify nf4-1 | grep -c '^container'
> ^1$
# Each rank adds up other inputs.
$ qtool calibrate "$NANO" -o b.qcal --data "$NANO/eval.txt" --samples 8 --seqlen 128 -q && qtool calibrate --merge 1.qcal b.qcal -o m1.qcal -q && ./ranks 3 qtool calibrate --merge b.qcal 1.qcal -o m3.qcal -q && cmp m1.qcal m3.qcal
$ ./ranks 2 qtool plan "$NANO" --scheme nf4
? 2
2 qtool plan: 'plan' is not shared by several ranks
# Ranks share the windows of a learning step; rank 0 finds static scales; every rank chooses the same
# schemes for a target.
$ l="--scheme nf3:learn=1 --learn passes=1 --tune-norms --kv 4 --kv-keys static --data $NANO/calib.txt --samples 8 --seqlen 64 --threads 1 -q"; qtool quantize "$NANO" -o learn-1 $l && ./ranks 3 qtool quantize "$NANO" -o learn-3 $l && cmp learn-1/SHA256SUMS learn-3/SHA256SUMS
$ l="--scheme nf3:learn=1 --learn passes=1,scope=block --data $NANO/calib.txt --samples 5 --seqlen 32 --threads 1 -q"; qtool quantize "$NANO" -o block-1 $l && ./ranks 2 qtool quantize "$NANO" -o block-2 $l && cmp block-1/SHA256SUMS block-2/SHA256SUMS
$ qtool quantize "$NANO" -o bpw-1 --target-bpw 4 -q >/dev/null && ./ranks 2 qtool quantize "$NANO" -o bpw-2 --target-bpw 4 -q >/dev/null && cmp bpw-1/SHA256SUMS bpw-2/SHA256SUMS
# Ranks that do not have the same input: rank 1 sees another file under the same name.
$ mkdir a b && cp -r "$NANO" a/m && cp -r "$NANO" b/m && head -c 2000 /dev/zero | dd of=b/m/model.safetensors bs=1000 seek=$(($(stat -c %s b/m/model.safetensors) / 1000 - 4)) conv=notrunc 2>/dev/null
$ mpirun --allow-run-as-root --oversubscribe -n 1 -wdir "$PWD/a" qtool quantize m -o "$PWD/no" --scheme nf4 : -n 1 -wdir "$PWD/b" qtool quantize m -o "$PWD/no" --scheme nf4
? 3
2 rank 1: has another input than rank 0: identity.source.sample_crc32
$ mpirun --allow-run-as-root --oversubscribe -n 1 qtool quantize "$NANO" -o no --scheme nf4 : -n 1 qtool quantize "$NANO" -o no --scheme fp6
? 2
2 rank 1: has other arguments than rank 0
# A rank with another qtool.
$ sed "s/$(qtool version | grep -o '[0-9]*\.[0-9]*\.[0-9]*' | head -n 1 | sed 's/\./\\./g')/9.8.7/g" "$(command -v qtool)" >other && chmod +x other && mpirun --allow-run-as-root --oversubscribe -n 1 qtool quantize "$NANO" -o no --scheme nf4 : -n 1 ./other quantize "$NANO" -o no --scheme nf4
? 2
2 rank 1: is qtool 9\.8\.7[^ ]*, but rank 0 is
# A rank whose host does not see the checkpoint.
$ rm -r b/m && mpirun --allow-run-as-root --oversubscribe -n 1 -wdir "$PWD/a" qtool quantize m -o "$PWD/no" --scheme nf4 : -n 1 -wdir "$PWD/b" qtool quantize m -o "$PWD/no" --scheme nf4
? 3
2 qtool quantize: m: rank 1: cannot open
# Ranks without a GPU.
$ CUDA_VISIBLE_DEVICES= ./ranks 2 qtool quantize "$NANO" -o no --scheme nf4 --device cuda
? 7
2 ^qtool quantize: (no|cannot use) GPU 0: .
$ ls
>! ^no
# A full disk on one rank; without shared memory, which would not fit either.
$ mpirun --allow-run-as-root --oversubscribe --mca btl tcp,self -n 1 qtool quantize "$NANO" -o full --scheme fp6 -q : -n 1 sh -c 'ulimit -f 300; exec qtool quantize "$NANO" -o full --scheme fp6 -q'
? 6
2 ^qtool quantize: full\.partial/model\.safetensors: rank 1: cannot write: File too large$
$ test ! -e full && ./ranks 2 qtool quantize "$NANO" -o full --resume --scheme fp6 -q && cmp full/SHA256SUMS fp6-1/SHA256SUMS
# A rank that is killed in the middle, then resumed by another number of ranks.
$ printf '#!/bin/sh\n"$@" &\nwhile kill -0 $! && [ $(grep -c . killed.partial/journal) -lt 3 ]; do sleep 0.05; done 2>/dev/null\nkill -KILL $!\nwait $!\n' >dies && chmod +x dies
$ q="qtool quantize $NANO -o killed --scheme nf4 $(cat data)"; mpirun --allow-run-as-root --oversubscribe --bind-to none -n 1 $q : -n 1 ./dies $q
? 137
2 Process name: .*,1\]$
$ test ! -e killed && ./ranks 3 qtool quantize "$NANO" -o killed --resume --scheme nf4 $(cat data) && cmp killed/SHA256SUMS nf4-1/SHA256SUMS
