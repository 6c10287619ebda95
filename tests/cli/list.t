$ qtool list schemes
> ^fpx: minifloat
> ^lut: 
> ^int: integers
> ^  nf4 +NormalFloat
> ^  fp6 +E3M2
> ^  parameter +values +default +meaning$
> ^  method +[a-z|]*rtn\|search
> ^none: the tensor is copied
2-

$ qtool list archs
> ^llama$
2-

$ qtool list kernels
> ^cpu +OpenBLAS
> ^lut +frag16x64/nibble +CUDA
> ^fpx +frag16x64/half +CUDA
> ^int +frag16x64/half +CUDA
> ^w4ax +frag16x64/byte +CUDA
> ^kv4 +CUDA
2-
