# Comparison of all schemes.
$ qtool plan "$NANO"
> ^SCHEME +BPW +SIZE +TENSORS QUANTIZED +OF LINEARS$
> ^nf4 +4\.[0-9]+ +1\.[0-9]+ MiB +21 +100\.0 %$
> ^fp6 +6\.0556 +1\.78 MiB +21 +100\.0 %$
2-

$ qtool plan "$NANO" --scheme nf4:g=64 --tensor 'down_proj=fp6' --tensor 'layers\.2\..*down_proj=none'
> ^TENSOR +DTYPE +SHAPE +SCHEME +BPW +BEFORE +AFTER$
> ^model\.layers\.1\.mlp\.down_proj\.weight +F16 +256x512 +fp6 +6\.0312 +256\.0 KiB +96\.5 KiB$
> ^model\.layers\.2\.mlp\.down_proj\.weight +F16 +256x512 +copied: scheme none +256\.0 KiB +256\.0 KiB$
> ^model\.layers\.2\.mlp\.up_proj\.weight +F16 +512x256 +nf4:g=64
> ^model\.embed_tokens\.weight +F16 +1024x256 +copied: embedding
> ^model\.norm\.weight .*copied: vector
> ^tensors +20 quantized, 9 copied$
> ^memory +[0-9.]+ MiB at the peak, without calibration$
2-

# Linears and others that are copied for one reason are one item.
$ qtool plan "$NANO" --scheme nf4 --tensor '.*=none'
> ^copied +3\.88 MiB scheme none, 3\.50 KiB vector$

# plan and quantize agree.
$ qtool plan "$NANO" --scheme fp5 --json >plan.json && qtool quantize "$NANO" -o fp5 --scheme fp5 --json -q >made.json
$ grep '^  "bpw"' made.json >a && grep '^  "bpw"' plan.json >b && cmp a b
$ grep '^  "bytes"' made.json >a && grep '^  "bytes"' plan.json >b && cmp a b

# With --tensor alone, all other tensors are copied.
$ qtool plan "$NANO" --tensor 'q_proj=nf3'
> ^tensors +3 quantized, 26 copied$

# A shape that no scheme can quantize.
$ qtool plan "$NANO" --scheme nf4 --tensor '^model\.norm=fp6'
? 4
>-
2 tensor model\.norm\.weight: cannot be quantized
# If a rule also matches matrices, norms are copied.
$ qtool plan "$NANO" --scheme none --tensor 'layers\.0\.=fp6'
> ^model\.layers\.0\.input_layernorm\.weight .* copied: vector
> ^tensors +7 quantized, 22 copied$
>! needs

# A tensor name that is too long for its section names.
$ name=m.0.$(printf %0493d 0).weight; printf '%-704s' "{\"$name\":{\"dtype\":\"F16\",\"shape\":[16,64],\"data_offsets\":[0,2048]}}" >header && { printf '\300\2\0\0\0\0\0\0'; cat header; head -c 2048 /dev/zero; } >long.safetensors && qtool plan long.safetensors --scheme none && qtool plan long.safetensors --scheme nf4
? 4
2 its name is too long

# Schemes that need calibration data.
$ qtool plan "$NANO" --scheme nf4 --tensor 'layers\.1.*down=nf4:learn=1'
> ^needs +calibration data \(--data\), first for model\.layers\.1\.mlp\.down_proj\.weight$

$ qtool plan "$NANO" --scheme nf4:method=gptq
> ^needs +calibration data \(--data or --calib\), first for model\.layers\.0\.

# Rules that depend on the model.
$ qtool plan "$NANO" --scheme w4ax --tensor 'v_proj=nf4'
? 4
2 v_proj\.weight: either all or none of the linears that share an input must be w4ax
$ qtool plan "$NANO" --scheme none --tensor 'embed=nf4:learn=1'
? 4
2 learn=1 needs a linear weight of a decoder layer, which this tensor is not

# If the model cannot be run, only schemes that need it are refused.
$ mkdir bare && cp "$NANO/model.safetensors" bare && qtool plan bare
> ^nf4 +4\.
> ^w4ax .*refused: .*bare/config\.json: cannot open
$ qtool plan bare --scheme nf4:method=gptq
? 3
2 bare/config\.json: cannot open
$ qtool plan "$NANO" --scheme nf4:method=gptq --json
> "needs_data": false
> "needs_hessian": true

# An incomplete checkpoint without an index.
$ mkdir part && cp "$NANO/config.json" part && cp "$NANO/model.safetensors" part/model-00001-of-00002.safetensors && qtool plan part --scheme nf4
? 3
2 ^qtool plan: part: the checkpoint has no index, and only 1 of the 2 files to which model-00001-of-00002\.safetensors belongs
$ qtool plan part/model-00001-of-00002.safetensors --scheme nf4
? 3
2 part/model-00001-of-00002\.safetensors: is one of 2 files of a checkpoint: give the directory
$ mv part/model-00001-of-00002.safetensors part/model-00001-of-00001.safetensors && qtool plan part --scheme nf4
> ^tensors +21 quantized
$ mv part/model-00001-of-00001.safetensors part/best-of-model-00001-of-00002.safetensors && qtool plan part --scheme nf4
? 3
2 1 of the 2 files to which best-of-model-00001-of-00002\.safetensors belongs

# config.json rules out quantization.
$ mkdir conv && h='{"h.0.attn.c_attn.weight":{"dtype":"F16","shape":[16,64],"data_offsets":[0,2048]},"codes":{"dtype":"I32","shape":[4,4],"data_offsets":[2048,2112]}}' && printf "\\$(printf %o ${#h})\\0\\0\\0\\0\\0\\0\\0%s" "$h" >conv/model.safetensors && head -c 2112 /dev/zero >>conv/model.safetensors && echo '{"model_type":"gpt2"}' >conv/config.json && qtool plan conv --scheme nf4
> ^h\.0\.attn\.c_attn\.weight +F16 +64x16 
$ echo '{"model_type":"gpt_bigcode","quantization_config":{"quant_method":"gptq"}}' >conv/config.json && qtool quantize conv -o x --scheme nf4 -q
? 4
2 tensor codes: the checkpoint is already quantized
$ h='{"h.0.qweight":{"dtype":"I32","shape":[4,4],"data_offsets":[0,64]}}' && mkdir codes && printf "\\$(printf %o ${#h})\\0\\0\\0\\0\\0\\0\\0%s" "$h" >codes/model.safetensors && head -c 64 /dev/zero >>codes/model.safetensors && echo '{"quantization_config":{"quant_method":"gptq"}}' >codes/config.json && qtool plan codes --scheme nf4
? 3
2 tensor h\.0\.qweight: cannot be dequantized: there is no scales beside it
$ qtool plan codes --scheme none
> ^tensors +0 quantized
$ echo '{"model_type":"gpt_bigcode"}' >conv/config.json && qtool plan conv --scheme nf4
> ^tensors +1 quantized
$ qtool plan conv --scheme none
> ^tensors +0 quantized

$ mkdir loop && cp "$NANO/model.safetensors" loop && ln -s config.json loop/config.json && qtool plan loop --scheme nf4
? 6
2 ^qtool plan: loop/config\.json: cannot open: Too many levels
$ qtool plan '' --scheme nf4
? 3
2 ^qtool plan: '': cannot open: No such file

# What people give who know transformers: the name of a model, or its cache.
$ qtool plan Qwen/Qwen3-0.6B
? 3
2 ^qtool plan: Qwen/Qwen3-0\.6B: cannot open: No such file or directory; qtool downloads no models: use 'hf download Qwen/Qwen3-0\.6B --local-dir DIR'$
$ mkdir Qwen && qtool plan Qwen/Qwen3-0.6B
? 3
2 ^qtool plan: Qwen/Qwen3-0\.6B: cannot open: No such file or directory$
$ for p in ./q/x q/x/y q/x.gguf q/x.safetensors 'q/x y'; do qtool plan "$p" && exit 9; done; exit 0
2! downloads
$ mkdir -p hub/snapshots/1 hub/blobs && cp "$NANO"/model.safetensors hub/blobs/b && ln -s ../../blobs/b hub/snapshots/1/model.safetensors && qtool plan hub/snapshots/1 && qtool plan hub
? 3
2 ^qtool plan: hub: no checkpoint here, but a cache of Hugging Face: give a directory in snapshots/$

# The memory that plan predicts is about what quantize takes.
$ qtool plan "$NANO" --scheme nf3 --data "$NANO/calib.txt" --samples 8 --seqlen 128 --threads 2
> ^memory +[0-9.]+ MiB at the peak, for 8 windows of 128 tokens$
>! ^needs
$ qtool plan "$NANO" --scheme nf3 --samples 8
> ^memory .* for 8 windows of [0-9]+ tokens$
$ qtool plan "$NANO" --scheme nf3
> ^memory .* without calibration$
# 10 % and 64 MiB; a sanitizer's build takes more.
need sh -c 'ulimit -v 800000; timeout 20 qtool version'
$ for d in "--data $NANO/calib.txt --samples 8 --seqlen 128" ''; do p=$(qtool plan "$NANO" --scheme nf3 $d --threads 2 --json | sed -n 's/.*"peak_bytes": \([0-9]*\).*/\1/p'); qtool quantize "$NANO" -o out --force --scheme nf3 $d --threads 2 -q >/dev/null & pid=$!; while kb=$(sed -n 's/^VmHWM:[^0-9]*\([0-9]*\) kB/\1/p' /proc/$pid/status 2>/dev/null) && [ -n "$kb" ]; do peak=$kb; sleep 0.02; done; wait $pid && d=$((p / 1048576 - peak / 1024)) && [ ${d#-} -le $((peak / 10240 + 64)) ] || echo "predicted $p, measured $peak kB"; done; rm -rf out
>-

# The time of calibration, from a sample of the work.
$ qtool plan "$NANO" --scheme nf3 --samples 8 --seqlen 128 --threads 2
> ^time +about [0-9]+\.[0-9] s, estimated for 2 threads of an idle machine$
# Of ranks that share 8 blocks of windows.
$ for n in 1 4; do qtool plan "$NANO" --scheme nf3 --samples 64 --seqlen 512 --threads 2 --ranks $n --json >$n.json; sed -n 's/^  "peak_bytes": \([0-9]*\),*$/\1/p' $n.json; done | sort -c -n -r && grep '"ranks"' 1.json 4.json; qtool plan "$NANO" --scheme nf3 --samples 64 --seqlen 512 --threads 2 --ranks 4 | grep -E "^(memory|time)"
> ^4.json: +"ranks": 4,$
> ^memory +[0-9.]+ MiB at the peak of each of 4 ranks, for 64 windows of 512 tokens$
> ^time +about [0-9.]+ s, estimated for 4 ranks with 2 threads on idle machines$
$ qtool plan "$NANO" --scheme w4ax --data "$NANO/calib.txt" --samples 2 --seqlen 64 --json | grep -Ec '"estimated_seconds": [0-9.]+,$'
> ^1$
$ qtool plan "$NANO" --scheme nf3
>! ^time
$ qtool plan "$MODELS/qwen3_moe" --scheme int8 --samples 1 --seqlen 16
>! ^time
