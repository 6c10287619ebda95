# What needs a GPU, on a machine without one (or where it is hidden): exit status 7 and one line.
$ CUDA_VISIBLE_DEVICES= qtool bench
? 7
>-
2 ^qtool bench: no GPU 0: .
2! tells more

$ CUDA_VISIBLE_DEVICES= qtool bench --json --device cuda:1
? 7
> "status": "no_gpu"
> "message": "no GPU 1: .

# Before anything else is looked at.
$ CUDA_VISIBLE_DEVICES= qtool verify nowhere --device cuda
? 7
>-
2 ^qtool verify: no GPU 0: .
2! nowhere

# Mistakes are mistakes with and without a GPU.
$ qtool bench --device cpu
? 2
2 bench measures a GPU: --device cuda

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

# Of a long number all digits count.
$ qtool bench --m 1,000000000000000000000070000
? 2
2 --m: '000000000000000000000070000' is not a number

$ qtool bench --scheme none
? 2
2 --scheme none: nothing to measure

$ qtool bench --scheme nf4:g=48
? 2
2 g=48: must be 32, 64, 128 or 256

$ qtool bench --scheme kv4 --shape 4096x4096
? 2
2 --shape 4096x4096 is of a matrix; --scheme kv4 wants HEADSxKV_HEADSxDIM

$ qtool bench --scheme kv4 --scheme fp6 --shape 4096x4096
? 2
2 --scheme kv4: no --shape is of attention \(HEADSxKV_HEADSxDIM\)

$ qtool bench --scheme w4ax:scales=int --shape 32x8x128
? 2
2 --shape 32x8x128 is of attention, which is --scheme kv4

$ qtool bench --scheme w4ax --scheme kv4 --shape llama3-8b:attention
? 2
2 --scheme w4ax: no --shape is of a matrix

$ qtool bench --scheme kv4 --shape 32x7x128
? 2
2 --shape 32x7x128: 32 heads are no multiple of 7

$ qtool bench --scheme kv4 --shape 32x8x
? 2
2 unknown shape '32x8x'

$ qtool bench --scheme kv4 --shape llama3-8b:atention
? 2
2 unknown shape 'llama3-8b:atention'; did you mean 'llama3-8b:attention'\?

$ qtool bench --scheme kv4 --length 0
? 2
2 --length: '0' is not a number from 1 to

# An option that no scheme has a use for.
$ qtool bench --scheme nf4 --length 100
? 2
>-
2 --length 100 is of attention, which is --scheme kv4

$ qtool bench --scheme kv4 --compute 8.0
? 2
>-
2 --compute 8.0 is of products; --scheme kv4 has none

$ qtool bench --scheme kv4 --invariant
? 2
>-
2 --invariant is of products; --scheme kv4 has none

# What is right goes as far as to the GPU.
$ for s in llama3-8b 32x8x128; do CUDA_VISIBLE_DEVICES= qtool bench --scheme kv4 --shape $s; test $? = 7 || echo $s; done
>-
2 no GPU 0: .

$ CUDA_VISIBLE_DEVICES= qtool bench --scheme w4ax --scheme kv4 --shape 512x512 --shape 4x2x64
? 7
>-
2 no GPU 0: .

$ qtool version
> ^GPU kernels (not )?built in$

$ qtool bench --compute 7.5
? 2
2 unknown value of --compute '7.5'; did you mean '8.0'\?

# What runs a model can run it on a GPU.
$ CUDA_VISIBLE_DEVICES= qtool eval "$NANO" --data "$NANO/eval.txt" --device cuda
? 7
2 ^qtool eval: no GPU 0: .
$ CUDA_VISIBLE_DEVICES= qtool quantize "$NANO" -o x --scheme nf4 --data "$NANO/calib.txt" --device cuda:3
? 7
2 ^qtool quantize: no GPU 3: .
$ CUDA_VISIBLE_DEVICES= qtool calibrate "$NANO" -o x.qcal --data "$NANO/calib.txt" --device cuda
? 7
2 ^qtool calibrate: no GPU 0: .
$ CUDA_VISIBLE_DEVICES= qtool quantize "$NANO" -o x --scheme nf4 --calib any.qcal --device cuda
? 7
2 ^qtool quantize: no GPU 0: .
$ test ! -e x && test ! -e x.partial && test ! -e x.qcal
$ qtool quantize "$NANO" -o x --scheme nf4 --device cuda
? 2
2 --device cuda: only what calibration data decide runs on a GPU
$ qtool calibrate --merge a.qcal b.qcal -o c.qcal --device cuda
? 2
2 --device cuda: only what calibration data decide runs on a GPU
