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

$ qtool bench --scheme none
? 2
2 --scheme none: nothing to measure

$ qtool bench --scheme nf4:g=48
? 2
2 g=48: must be 32, 64, 128 or 256

$ qtool version
> ^GPU kernels (not )?built in$
