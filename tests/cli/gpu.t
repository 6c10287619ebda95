# Without a GPU (or with it hidden), commands that need one end with exit status 7 and one line.
$ CUDA_VISIBLE_DEVICES= qtool bench
? 7
>-
2 ^qtool bench: (no|cannot use) GPU 0: .
2! for usage

$ CUDA_VISIBLE_DEVICES= qtool bench --json --device cuda:1
? 7
> "status": "no_gpu"
> "message": "(no|cannot use) GPU 1: .

# The GPU is checked before the files.
$ CUDA_VISIBLE_DEVICES= qtool verify nowhere --device cuda
? 7
>-
2 ^qtool verify: (no|cannot use) GPU 0: .
2! nowhere

# Usage errors are reported with and without a GPU.
$ qtool bench --device cpu
? 2
2 bench needs a GPU: use --device cuda

$ qtool bench --shape llama3-70B
? 2
2 unknown shape 'llama3-70B'; did you mean 'llama3-70b'\?

$ qtool bench --shape 4096x
? 2
2 unknown shape '4096x'

$ qtool bench --shape 0x64
? 2
2 --shape: '0' is not a number from 1 to

$ qtool bench --m 1,,2
? 2
2 --m: '' is not a number

$ qtool bench --m 1,99999999999999999999999999
? 2
2 --m: '9+' is not a number

# All digits of a long number count.
$ qtool bench --m 1,000000000000000000000070000
? 2
2 --m: '000000000000000000000070000' is not a number

$ qtool bench --scheme none
? 2
2 --scheme none copies weights: there is no kernel to measure

$ qtool bench --scheme nf4:g=48
? 2
2 g=48: must be 32, 64, 128 or 256

$ qtool bench --scheme kv4 --shape 4096x4096
? 2
2 --shape 4096x4096 is a matrix shape: --scheme kv4 needs HEADSxKV_HEADSxDIM

$ qtool bench --scheme kv4 --scheme fp6 --shape 4096x4096
? 2
2 --scheme kv4 needs an attention shape: --shape HEADSxKV_HEADSxDIM

$ qtool bench --scheme w4ax:scales=int --shape 32x8x128
? 2
2 --shape 32x8x128 is an attention shape: it needs --scheme kv4

$ qtool bench --scheme w4ax --scheme kv4 --shape llama3-8b:attention
? 2
2 --scheme w4ax needs a matrix shape: --shape NxK

$ qtool bench --scheme kv4 --shape 32x7x128
? 2
2 --shape 32x7x128: 32 query heads are not a multiple of 7 KV heads

$ qtool bench --scheme kv4 --shape 32x8x
? 2
2 unknown shape '32x8x'

$ qtool bench --scheme kv4 --shape llama3-8b:atention
? 2
2 unknown shape 'llama3-8b:atention'; did you mean 'llama3-8b:attention'\?

$ qtool bench --scheme kv4 --length 0
? 2
2 --length: '0' is not a number from 1 to

# Options that apply to no scheme.
$ qtool bench --scheme nf4 --length 100
? 2
>-
2 --length applies to attention only: it needs --scheme kv4

$ qtool bench --scheme kv4 --compute 8.0
? 2
>-
2 --compute applies to matrix products only, not to --scheme kv4

$ qtool bench --scheme kv4 --invariant
? 2
>-
2 --invariant applies to matrix products only, not to --scheme kv4

# Valid arguments get as far as opening the GPU.
$ for s in llama3-8b 32x8x128; do CUDA_VISIBLE_DEVICES= qtool bench --scheme kv4 --shape $s; test $? = 7 || echo $s; done
>-
2 (no|cannot use) GPU 0: .

$ CUDA_VISIBLE_DEVICES= qtool bench --scheme w4ax --scheme kv4 --shape 512x512 --shape 4x2x64
? 7
>-
2 (no|cannot use) GPU 0: .

$ qtool version
> ^GPU kernels (not )?built in$

$ qtool bench --compute 7.5
? 2
2 unknown value of --compute '7.5'; did you mean '8.0'\?

# Commands that run a model can use a GPU.
$ CUDA_VISIBLE_DEVICES= qtool eval "$NANO" --data "$NANO/eval.txt" --device cuda
? 7
2 ^qtool eval: (no|cannot use) GPU 0: .
$ CUDA_VISIBLE_DEVICES= qtool quantize "$NANO" -o x --scheme nf4 --data "$NANO/calib.txt" --device cuda:3
? 7
2 ^qtool quantize: (no|cannot use) GPU 3: .
$ CUDA_VISIBLE_DEVICES= qtool calibrate "$NANO" -o x.qcal --data "$NANO/calib.txt" --device cuda
? 7
2 ^qtool calibrate: (no|cannot use) GPU 0: .
$ CUDA_VISIBLE_DEVICES= qtool quantize "$NANO" -o x --scheme nf4 --calib any.qcal --device cuda
? 7
2 ^qtool quantize: (no|cannot use) GPU 0: .
$ test ! -e x && test ! -e x.partial && test ! -e x.qcal
$ CUDA_VISIBLE_DEVICES= qtool quantize "$NANO" -o x --scheme nf4 --device cuda
? 7
2 ^qtool quantize: (no|cannot use) GPU 0: .
$ CUDA_VISIBLE_DEVICES= qtool plan "$NANO" --target-bpw 3.5 --data "$NANO/calib.txt" --device cuda
? 7
2 ^qtool plan: (no|cannot use) GPU 0: .
$ qtool plan "$NANO" --scheme nf4 --data "$NANO/calib.txt" --device cuda
? 2
2 ^qtool plan: --device cuda: the GPU measures schemes, which plan does only with --data and
$ qtool calibrate --merge a.qcal b.qcal -o c.qcal --device cuda
? 2
2 --device cuda: --merge runs on the CPU only

$ qtool bench --moe qwen3-30B
? 2
2 unknown layer of experts 'qwen3-30B'; did you mean 'qwen3-30b'\?

$ qtool bench --moe 8,9,256,128
? 2
2 --moe: '9' is not a number from 1 to 8

$ qtool bench --moe mixtral --shape 64x64
? 2
2 --shape does not apply to --moe
