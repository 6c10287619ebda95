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

# Parameters that no name of the scheme leaves open are not shown.
$ qtool list schemes | grep -c '^  table '
? 1
> ^0$

$ qtool list archs
> ^model_type +layers +MLP +calibration file +w4ax +learn +kv4 +fused +gguf$
> ^llama +attention +dense +yes +yes +yes +yes +yes +yes$
> ^mixtral +attention +experts +yes +yes +yes +yes +yes +yes$
> ^bert +attention to both sides +dense +yes +no +no +no +no +no$
> ^cohere2 +attention +dense +yes +yes +yes +yes +yes +no$
> ^gemma3n_text +attention +dense +no +no +no +no +no +no$
> ^gemma4_text +attention +experts +yes +no +no +no +some +no$
> ^gemma4_unified +attention +dense +yes +no +no +no +yes +no$
> ^lfm2 +short convolution and attention +dense +yes +no +no +no
> ^bamba +state space and attention +dense +yes +no +no +no
> ^nemotron_h +state space and attention +experts +no +no +no +no
> ^minicpm3 +latent attention +dense +yes +no +no +no
> ^qwen3_5 +gated DeltaNet and attention +dense +yes +no +no +no +no +yes$
2-

# docs/exports.md names the same families for GGUF, and --json says the same.
$ qtool list archs | sed -n 's/^\([^ ]*\) .* yes$/\1/p' | sort >table; wc -l <table
> ^[1-9][0-9]+$
$ sed -n '/^- Architectures (/,/^- llama.cpp computes/p' "$NANO/../../docs/exports.md" | sed 's/^- Architectures ([^)]*)//' | grep -o '`[a-z0-9_]*`' | tr -d '`' | sort >docs && diff table docs
>-
$ qtool list archs --json | awk -F'"' '$2 == "model_type" { type = $4 } $2 == "gguf" { print type }' | sort | diff - table
>-

# --json says the same of the fused runtime.
$ qtool list archs | awk 'NR > 1 { print $1, $(NF - 1) }' >table
$ qtool list archs --json | awk -F'"' '$2 == "model_type" { type = $4 } $2 == "fused" { print type, $4 }' | diff - table
>-

$ qtool list kernels
> ^cpu +OpenBLAS
> ^lut +frag16x64/nibble +CUDA
> ^fpx +frag16x64/half +CUDA
> ^int +frag16x64/half +CUDA
> ^w4ax +frag16x64/byte +CUDA
> ^kv4 +CUDA
2-
