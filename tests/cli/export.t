# Golden bytes of every format, made after the packages of the runtimes had read them (make oracle).
$ while read -r sum format scheme; do [ -d "box-$scheme" ] || qtool quantize "$NANO" -o "box-$scheme" --scheme none --tensor "layers.0.self_attn.k_proj=$scheme" -q >/dev/null; qtool export "box-$scheme" -o "out-$format-$scheme" --format $format -q >/dev/null && cat "out-$format-$scheme/model.safetensors" "out-$format-$scheme/config.json" | sha256sum | grep -q "^$sum " || echo "differs: $format $scheme"; done <"$NANO/../../tests/golden/exports.txt"
>-
2-
$ cd out-gptq-int4:g=64 && sha256sum -c SHA256SUMS && cat qtool-export.json quantize_config.json
> ^qtool-export\.json: OK
> "container": \{
> "checkpoint_format": "gptq"
$ qtool export box-int4:g=64 -o many --format gptq --max-shard 1 -q --threads 1 && qtool export box-int4:g=64 -o many2 --format gptq --max-shard 1 -q --threads 4 && diff -r many many2 && ls many && grep -c safetensors many/model.safetensors.index.json
> ^model-00001-of-0000[2-9]\.safetensors$
2-

# What a format cannot hold is refused before any work, with a scheme that fits.
$ qtool export box-nf3 -o x --format gptq
? 4
>-
2 tensor model\.layers\.0\.self_attn\.k_proj\.weight: gptq cannot hold nf3:.*: it has integers only; int4 and int8 fit
$ qtool export box-int4:zero=group -o x --format mlx
? 4
2 mlx cannot hold int4:.*zero=group.* exactly: zero-points become biases of 16 bits; --lossy rounds once
$ qtool export box-int4:zero=group -o x --format mlx --lossy -q
> ^rounded +1 tensors, at most 0\.000[0-9]* of their norm
$ grep -A3 '"rounded"' x/qtool-export.json
> "model\.layers\.0\.self_attn\.k_proj\.weight": \{
> "relative": 0\.000
$ qtool export box-int4:g=64 -o bf --format compressed-tensors --dtype bfloat16
? 4
2 exactly: scales have more than the 8 bits of BF16
$ qtool export box-int4:g=64 -o bf --format compressed-tensors --dtype bfloat16 --lossy -q && grep -c '"dtype": "bfloat16"' bf/config.json && head -c 2000 bf/model.safetensors
> ^1$
> k_proj.weight_scale":\{"dtype":"BF16"
$ qtool export box-fp5 -o x2 --format compressed-tensors
? 4
2 integers, E4M3FN, MXFP4 and NVFP4 only; int4, int8, fp8:max=448, mxfp4 and nvfp4 fit
$ qtool quantize "$NANO" -o mixed --scheme int4 --tensor '(down|gate|up)_proj=int8:g=128' -q >/dev/null && qtool export mixed -o x2 --format awq
? 4
2 awq cannot hold int8
$ qtool export mixed -o x2 --format gptq
? 4
2 gptq needs one scheme for all matrices, but this one is int.* and .* is int.*; compressed-tensors can hold both
$ qtool export mixed -o x2 --format compressed-tensors -q && grep -c '"num_bits"' x2/config.json && grep '"model\.layers\.2\.mlp\.down_proj"' x2/config.json && qtool export mixed -o x3 --format humming -q && grep -A1 -e 'layers.*0.*down_proj\$"' -e gate_proj x3/config.json
> ^2$
> "b_dtype": "uint8"
> "\+:model\\\\\.layers\\\\\.0\\\\\.mlp\\\\\.\(gate_proj\|gate_up_proj\)\$"
$ qtool export box-fp8:max=448 -o fp8 --format compressed-tensors --fp8-inputs -q && grep -A6 input_act fp8/config.json
> "strategy": "token"
> "dynamic": true
$ qtool export mixed --format compressed-tensors --fp8-inputs --dry-run
? 2
2 --fp8-inputs: no matrix of the container has fp8 weights
$ qtool export box-fp8:max=448 --format humming --fp8-inputs --dry-run
? 2
2 --fp8-inputs: humming cannot ask for it; compressed-tensors can
$ qtool quantize "$NANO" -o head --scheme none --tensor 'embed_tokens=int4' -q >/dev/null && qtool export head -o x4 --format compressed-tensors
? 4
2 model\.embed_tokens\.weight: compressed-tensors cannot hold int4.*: the format has no quantized embeddings
$ qtool quantize "$NANO" -o none --scheme none -q >/dev/null && qtool export none -o x4 --format dense
? 4
2 none: nothing in it is quantized
$ ls -d x4* x4.partial 2>/dev/null | wc -l
> ^0$

# mlx: experts of a layer are one tensor, other modules may have options of their own. The bytes are
# those of a file that mlx_lm computed the logits of transformers with.
$ qtool quantize "$MODELS/deepseek_v3_wide" -o moe --scheme none --tensor 'mlp.experts.*=int8:g=32' --tensor 'shared_experts=int4:g=32' -q >/dev/null && qtool export moe -o moe-mlx --format mlx -q >/dev/null && cat moe-mlx/model.safetensors moe-mlx/config.json | sha256sum
> ^8d7224a27ef5c88ef77c0ac3345391028d3771fa5429d99a07c5158ea15ff5f4 
$ grep -ao '"[^"]*switch_mlp[^"]*":{"dtype":"[UF][0-9]*","shape":[^]]*]' moe-mlx/model.safetensors | sort
> ^"model\.layers\.1\.mlp\.switch_mlp\.down_proj\.scales":\{"dtype":"F16","shape":\[6,32,1\]$
> ^"model\.layers\.1\.mlp\.switch_mlp\.up_proj\.weight":\{"dtype":"U32","shape":\[6,32,8\]$
$ qtool quantize "$MODELS/deepseek_v3_wide" -o moe2 --scheme int4:g=32 --tensor 'self_attn=none' --tensor 'experts.3.up_proj=int8:g=32' -q >/dev/null; qtool export moe2 -o x --format mlx
? 4
2 experts\.3\.up_proj\.weight: mlx needs one scheme for all experts, but this one is int8.* and .* is int4
$ qtool quantize "$MODELS/ernie4_5_moe" -o ernie --scheme none --tensor 'q_proj=int4:g=32' -q >/dev/null; qtool export ernie -o x --format mlx
? 4
2 ernie: mlx: mlx_lm ignores the bias of the router of ernie4_5_moe

# Dequantized weights are those that eval runs.
$ qtool quantize "$NANO" -o exact --scheme nf4 -q >/dev/null && qtool export exact -o exact32 --format dense --dtype float32 -q
> ^rounded +none: weights are those of the container$
$ qtool quantize "$NANO" -o all --scheme nf4 -q >/dev/null && qtool export all -o plain --format dense --dtype float32 -q >/dev/null && qtool eval all --data "$NANO/eval.txt" --windows 4 -q >one && qtool eval plain --data "$NANO/eval.txt" --windows 4 -q | diff one - && grep -c quantization plain/config.json
? 1
> ^0$

# dense has the tensors of the checkpoint: matrices as [input][output] (gpt2), experts in one tensor. The weights are those of the container.
$ tensors() { head -c 9000 $1/model.safetensors | tr '}' '\n' | sed -n 's/.*"\([^"]*\)": *{"dtype": *"\([A-Z0-9]*\)", *"shape": *\(\[[0-9, ]*\]\).*/\1 \2 \3/p' | tr -d ' ' | sort; }; for m in gpt2 gpt_oss_moe llama4 granite4_hybrid jetmoe gemma4_moe; do qtool quantize "$MODELS/$m" -o moe --scheme none --tensor '(c_attn|q|up|down)_?(proj)?\.weight$=int8' --force -q >/dev/null && qtool export moe -o moex --format dense --force -q >/dev/null || exit 9; tensors "$MODELS/$m" >want; [ "$(wc -l <want)" -ge 20 ] && tensors moex | cmp - want || echo "differs: $m"; qtool export moe -o moex --format dense --dtype float32 --force -q >/dev/null; qtool eval moe --data "$MODELS/$m/ids.u16" --seqlen 16 -q >want; qtool eval moex --data "$MODELS/$m/ids.u16" --seqlen 16 -q | cmp - want; done
>-
2-
$ qtool quantize "$MODELS/llama4" -o stack --scheme none --tensor 'experts.0.up_proj=int8' -q >/dev/null && qtool export stack --format compressed-tensors --dry-run
2 ^qtool export: warning: experts are written one by one, but checkpoints of llama4_text have
$ qtool export stack --format dense --dry-run
2-
$ sed -i 's/experts\.3\.down_proj/experts.9.down_proj/g' stack/model.safetensors stack/qtool.json && (cd stack && sha256sum $(cut -c67- SHA256SUMS) >s && mv s SHA256SUMS) && qtool export stack -o x9 --format dense
? 3
2 stack: tensor model\.layers\.1\.feed_forward\.experts\.down_proj: an expert is missing
$ qtool quantize "$MODELS/qwen3_vl_moe" -o apart --scheme none --tensor 'experts.0.up_proj=int8' -q >/dev/null && qtool export apart --format dense --dry-run
2 ^qtool export: warning: experts are written one by one
$ cp -r "$NANO" coded && chmod -R u+w coded && sed -i '1s/{/{"auto_map": {"AutoConfig": "configuration_x.XConfig"},/' coded/config.json && qtool quantize coded -o code --scheme int4 -q >/dev/null && qtool export code --format gptq --dry-run
2 ^qtool export: warning: config\.json names Python files \(auto_map\)

# A quantized head.
$ cp -r "$NANO" untied && chmod -R u+w untied && sed -i 's/"model.embed_tokens.weight"/"lm_head.weight"           /' untied/model.safetensors && qtool quantize untied -o headed --scheme int4 --tensor 'lm_head=int4' -q >/dev/null && for f in gptq awq; do qtool export headed -o headed-x --format $f --force -q >/dev/null && echo $f $(grep -o '"lm_head": *[a-z]*' headed-x/config.json); done; qtool export headed --format humming --dry-run
? 4
> ^gptq "lm_head": true$
> ^awq "lm_head": true$
2 tensor lm_head\.weight: humming cannot hold int4.*: vLLM takes no quantized head in this format

# quantize names formats that hold the shapes, and export says which groups fit: here 48 channels.
$ qtool quantize "$MODELS/qwen2" -o short --scheme none --tensor 'down_proj=int4:g=32' >/dev/null; qtool export short --format awq --dry-run
? 4
2 next: .* --format dense$
2 down_proj\.weight: awq cannot hold int4.*: 48 channels are no multiple of the group of 32$
$ mkdir odd && echo '{}' >odd/config.json && { printf '\144\0\0\0\0\0\0\0%-100s' '{"model.layers.0.mlp.up_proj.weight":{"dtype":"F16","shape":[128,192],"data_offsets":[0,49152]}}' && head -c 49152 /dev/zero; } >odd/model.safetensors && qtool quantize odd -o odd-q --scheme int4 >/dev/null; qtool export odd-q --format compressed-tensors --dry-run
? 4
2 next: .* --format dense$
2 compressed-tensors cannot hold int4.*: 192 channels are no multiple of the group of 128; g=64 fits$

# Groups as long as a row are groups: modules with longer rows have the same options.
$ qtool quantize "$NANO" -o long --scheme int4:g=256 --tensor '0.mlp.down_proj=none' -q >/dev/null && for f in compressed-tensors gptq; do qtool export long -o long-x --format $f --force -q >/dev/null && echo $f $(tr -d ' \n' <long-x/config.json | grep -o '"targets":[^]]*]\|"group_size":[0-9-]*'); done
> ^compressed-tensors "targets":\["Linear"\] "group_size":256$
> ^gptq "group_size":256$

# Runtimes fuse q, k and v, and gate and up, and have one kernel for all experts of a layer.
$ for rule in q_proj=int8 v_proj=int4:g=64 up_proj=none down_proj=int8 o_proj=none 'layers\.1\.=int8' 'proj=int4:method=rtn'; do qtool quantize "$NANO" -o fused --force --scheme int4 --tensor "$rule" -q >/dev/null && echo "$rule $(qtool export fused --format compressed-tensors --dry-run 2>&1 | grep -c 'attn\.[kq]_proj and .*self_attn\.[qv]_proj differ\|gate_proj and .*up_proj differ')"; done
> ^q_proj=int8 1$
> ^v_proj=int4:g=64 1$
> ^up_proj=none 1$
> ^down_proj=int8 0$
> ^o_proj=none 0$
> ^layers..1..=int8 0$
> ^proj=int4:method=rtn 0$
$ for rule in 'attn=fp8:max=448' 'experts\.0\.=fp8:max=448' 'experts\.0\.=none'; do qtool quantize "$MODELS/qwen3_moe" -o fused --force --scheme none --tensor experts=int8 --tensor "$rule" -q >/dev/null && echo "$rule $(qtool export fused --format compressed-tensors --dry-run 2>&1 | grep -c 'experts\.[01]\..* and .*experts\.[01]\..* differ')"; done
> ^attn=fp8:max=448 0$
> ^experts..0..=fp8:max=448 1$
> ^experts..0..=none 1$

# Programs load multimodal models under other names than those of the checkpoint: patterns name what is behind the prefix.
$ ignored() { qtool quantize "$MODELS/$1" -o images --force -q --scheme none --tensor "$2" >/dev/null && qtool export images -o images-x --format compressed-tensors --force -q >/dev/null && tr -d ' \n' <images-x/config.json | sed 's/.*"ignore":\[\([^]]*\)\].*/\1/'; echo; }; ignored qwen2_5_vl layers=int8 && ignored qwen3_vl 'layers|visual.*mlp=int8' && ignored qwen2 layers=int8
> ^"re:\(\.\*\\\\\.\)\?lm_head\$","re:\(\.\*\\\\\.\)\?embed_tokens\$","re:\(\.\*\\\\\.\)\?visual\\\\\."$
> ,"re:\(\.\*\\\\\.\)\?visual\\\\\.blocks\\\\\.0\\\\\.attn\\\\\.proj\$",
> ^"model\.embed_tokens","lm_head"$
$ qtool quantize "$MODELS/mistral3_images" -o images --force -q --scheme none --tensor layers=int8 --tensor 'up_proj=fp8:max=448' >/dev/null && qtool export images -o images-x --format compressed-tensors --force -q >/dev/null && grep -c '"re:(.*\\\\.)?layers\\\\.0\\\\.mlp\\\\.down_proj\$"' images-x/config.json
> ^1$

$ qtool quantize "$MODELS/qwen2_5_vl" -o images --force -q --scheme none --tensor '[kv]_proj=nf4:g=32' >/dev/null && qtool export images -o images-x --format bnb --force -q >/dev/null && tr -d ' \n' <images-x/config.json | sed 's/.*"llm_int8_skip_modules":\[\([^]]*\)\].*/\1/'
> ^"lm_head","\.\*lm_head\$","model\.embed_tokens","\.\*embed_tokens\$",.*"model\.layers\.0\.self_attn\.q_proj","\.\*layers\.0\.self_attn\.q_proj\$",.*,"visual","\.\*visual"$
$ qtool quantize "$MODELS/mistral3_images" -o images --force -q --scheme none --tensor 'language.*(gate|up)_proj=int8' --tensor 'language.*0.*up_proj=int4:g=32' >/dev/null && qtool export images -o images-x --format humming --force -q >/dev/null && grep -c '"+:(.*\\\\.)?layers\\\\.0\\\\.mlp\\\\.(up_proj|gate_up_proj)\$"' images-x/config.json
> ^1$

# transformers has experts in one tensor, which bitsandbytes does not quantize.
$ qtool quantize "$MODELS/qwen3_moe" -o expert --scheme none --tensor 'experts.*(gate|up)_proj=nf4:g=32' -q >/dev/null && qtool export expert --format bnb --dry-run
2 ^qtool export: warning: transformers 5 cannot load experts that are quantized in this format
$ qtool quantize "$MODELS/qwen3_moe" -o expert --scheme none --force --tensor 'k_proj=nf4:g=32' -q >/dev/null && qtool export expert --format bnb --dry-run
2-

# NVFP4: runtimes take one tensor scale for matrices that they fuse; the weights do not change.
$ qtool quantize "$NANO" -o nv --scheme nvfp4 -q >/dev/null && qtool export nv -o nvx --format compressed-tensors -q >/dev/null && qtool eval nv --data "$NANO/eval.txt" --windows 1 -q >one && qtool eval nvx --data "$NANO/eval.txt" --windows 1 -q | diff one - && grep -o tensor_group nvx/config.json
> ^tensor_group$

# Containers say in config.json that other programs cannot read them, and the manifest agrees.
$ sed -i 's/"format_version": 1/"format_version": 2/' all/config.json && rm all/SHA256SUMS && qtool eval all --data "$NANO/eval.txt" --windows 1 -q
? 4
2 config\.json: the checkpoint is already quantized \(quantization_config\): give the FP16, BF16 or FP32 checkpoint that it was made from

# Usage.
$ qtool export all --format gtpq
? 2
2 unknown format 'gtpq'; did you mean 'gptq'\?
$ for p in vllm llama.cpp ollama "LM Studio"; do qtool export all --format "$p"; done
? 2
2 'vllm' is a program, which loads these formats: compressed-tensors, humming, gptq, awq, bnb$
2 'llama.cpp' is a program, which loads these formats: gguf$
2 'LM Studio' is a program, which loads these formats: gguf$
$ qtool export all --format v
? 2
2 unknown format 'v'
$ qtool export box-int4:g=64 --format gptq
? 2
2 --out is required, except with --dry-run
$ qtool export box-int4:g=64 --format gptq --dry-run --json
> "dry_run": true
> "rounded": 0
$ qtool export box-int4:g=64 --format dense --dtype bfloat16 --dry-run && qtool export box-int4:g=64 --format dense --dtype bfloat16 --dry-run --json
> ^rounded +1 tensors$
> "worst_relative_error": null
$ qtool export "$NANO" -o x4 --format dense
? 3
2 is not a container
$ qtool export box-int4:g=64 -o out-gptq-int4:g=64 --format gptq
? 2
2 exists already; --force replaces it
$ qtool export box-int4:g=64 -o out-gptq-int4:g=64 --format awq --force -q && ls out-gptq-int4:g=64 && test ! -e out-gptq-int4:g=64.old
>! quantize_config
$ mkdir mine && touch mine/notes && qtool export box-int4:g=64 -o mine --format awq --force
? 2
2 not replaced: it has files but no qtool\.json or qtool-export\.json
$ qtool export box-int4:g=64 -o box-int4:g=64 --format awq --force
? 2
2 would be deleted

# Damage is found while data is read, and nothing is left.
$ cp -r box-int4:g=64 bad && printf '\377' | dd of=bad/model.safetensors bs=1 seek=2000000 conv=notrunc 2>/dev/null && qtool export bad -o x5 --format gptq
? 3
2 the data differs from the manifest's CRC-32
$ mkdir bare && cp "$NANO/model.safetensors" bare && qtool quantize bare -o box-bare --scheme none --tensor 'layers.0.self_attn.k_proj=int4' -q >/dev/null && qtool export box-bare -o x5 --format humming
? 3
2 box-bare/config\.json: missing: runtimes look for the options of humming there
$ ls -d x5* 2>/dev/null | wc -l
> ^0$
$ qtool list exports
> ^compressed-tensors +vLLM
> ^int4 +exact +exact
> ^nf3 +exact +- 
> ^int4:zero=group .*near
$ qtool list exports --json
> "exports"

# GGUF: bytes that the package gguf decodes to the weights of the container.
$ for s in iq4nl mxfp4; do qtool quantize "$NANO" -o "box-$s" --scheme none --force --tensor "layers.0.self_attn.k_proj=$s" -q >/dev/null; qtool export "box-$s" -o "gguf-$s" --format gguf -q >/dev/null; sha256sum <"gguf-$s/model.gguf"; done
> ^9202e999c7927690bd804b5f8068c166235fcdb9f06c56ab7fb4c314f0dd5159
> ^b4280131fc29dac676a87bffa2c5a89bb86b3e69476c300bc414c8cdb03143ca
