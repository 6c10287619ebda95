# What quantize, plan and verify warn of, and refuse with --strict.

# Values in copied tensors that are not finite: the last two bytes are of model.norm.weight, F16.
$ cp -r "$NANO" nan && chmod -R u+w nan && head -c 4069902 "$NANO/model.safetensors" >nan/model.safetensors && printf '\377\177' >>nan/model.safetensors && qtool quantize nan -o out --scheme nf4 --progress none
> ^not finite +1 value in 1 copied tensor, first in model\.norm\.weight$
2 ^qtool quantize: warning: nan/model\.safetensors: tensor model\.norm\.weight: 1 of 256 values are NaN or infinity: they are copied as they are$
$ qtool verify out --source nan -q
> ^not finite +1 value in 1 copied tensor, first in model\.norm\.weight$
$ qtool verify out
2 ^qtool verify: warning: out: tensor model\.norm\.weight: 1 of 256 values are NaN or infinity$
$ qtool verify out --strict -q
? 3
2 ^qtool verify: out: tensor model\.norm\.weight: has values that are NaN or infinity \(1 in all copied tensors\); --strict refuses them$
$ qtool verify out --json -q
> "nonfinite_first": "model\.norm\.weight"
> "nonfinite_values": 1
$ qtool quantize nan -o not --scheme nf4 --strict -q
? 3
>-
2 ^qtool quantize: nan/model\.safetensors: tensor model\.norm\.weight: 1 of 256 values are NaN or infinity; --strict refuses them$
$ test ! -e not && test ! -e not.partial
$ qtool quantize nan -o out --scheme nf4 --strict -q --resume
? 8
2 cannot resume with --strict: 1 of 256 values are NaN or infinity
$ qtool quantize "$NANO" -o whole --scheme nf4 --strict -q && qtool verify whole --strict -q
> ^linears +100\.0 % of 3\.38 MiB quantized$
> ^copied +512\.0 KiB embedding, 3\.50 KiB vector$
>! not finite

# Most weights are in stacked experts, which are copied.
$ mkdir stacked && printf '%-296s' '{"model.layers.0.mlp.experts.up_proj":{"dtype":"F16","shape":[4,64,64],"data_offsets":[0,32768]},"model.layers.0.self_attn.q_proj.weight":{"dtype":"F16","shape":[64,64],"data_offsets":[32768,40960]}}' >header && { printf '\50\1\0\0\0\0\0\0'; cat header; head -c 40960 /dev/zero; } >stacked/model.safetensors && qtool plan stacked --scheme nf4
> experts\.up_proj +F16 +4x64x64 +copied: stacked experts
> ^linears +20\.0 % of 40\.0 KiB quantized$
2 ^qtool plan: warning: only 20\.0 % of the bytes of linear weights are quantized \(8 KiB of 40 KiB\); left: 32 KiB stacked experts$
$ qtool plan stacked --scheme nf4 --strict
? 4
>-
2 ^qtool plan: stacked: only 20\.0 % .*; --strict refuses less than 90 %$
$ qtool quantize stacked -o few --scheme nf4 --strict
? 4
2 --strict refuses less than 90 %
$ test ! -e few && test ! -e few.partial && qtool quantize stacked -o few --scheme nf4 --json
> "linear_bytes": 40960
> "linear_bytes_quantized": 8192
> "reason": "stacked experts"
2 only 20\.0 %
$ qtool plan stacked --scheme nf4 --tensor 'experts=none' --strict
2-
$ qtool plan stacked
> ^nf4 .* 20\.0 %$
$ qtool inspect stacked
> ^linears +40\.0 KiB, of which nf4 can quantize 20\.0 %$

# What is quantized already, and adapters: no scheme is possible.
$ cp -r "$NANO" adapter && chmod -R u+w adapter && echo '{"base_model_name_or_path":"a/b"}' >adapter/adapter_config.json && qtool plan adapter
? 4
>-
2 ^qtool plan: adapter/adapter_config\.json: this is an adapter, not a model: merge it into its base model a/b first
$ qtool inspect adapter
> ^quantize +refuses this: adapter/adapter_config\.json: this is an adapter
$ qtool quantize adapter -o none --scheme nf4
? 4
2 this is an adapter

# JSON as Python writes it does not switch off checks, nor does it stop a model that ignores it.
$ cp -r "$NANO" python && chmod -R u+w python && sed 's/{/{"time_step_limit": [0.0, Infinity], "quantization_config": {},/;q' "$NANO/config.json" >python/config.json && sed 1d "$NANO/config.json" >>python/config.json && qtool quantize python -o none --scheme nf4
? 4
2 ^qtool quantize: python/config\.json: the checkpoint is already quantized \(quantization_config in config\.json; remove it if the weights are not quantized\)
$ cp -r python form && for v in '"gptq"' '[{"bits":4}]'; do sed "s/NaN/0/; s/\"model_type\"/\"quantization_config\": $v, \"model_type\"/" "$NANO/config.json" >form/config.json; qtool plan form --scheme nf4; done
? 4
>-
2 ^qtool plan: form/config\.json: the checkpoint is already quantized \(quantization_config in config\.json; remove it

# An adapter that has not been merged, as PEFT saves it, and one that is a part of the model.
$ for name in default speech; do h='{"model.layers.0.self_attn.q_proj.base_layer.weight":{"dtype":"F16","shape":[64,64],"data_offsets":[0,8192]},"model.layers.0.self_attn.q_proj.lora_A.'$name'.weight":{"dtype":"F16","shape":[16,64],"data_offsets":[8192,10240]}}'; n=${#h}; printf "\\$(printf %03o $((n % 256)))\\$(printf %03o $((n / 256)))\\0\\0\\0\\0\\0\\0%s" "$h" >$name.safetensors; truncate -s $((8 + n + 10240)) $name.safetensors; done; qtool plan speech.safetensors --scheme nf4 | grep -c 'copied: adapter'; qtool plan default.safetensors --scheme nf4
? 4
> ^1$
2 ^qtool plan: default\.safetensors: tensor model\.layers\.0\.self_attn\.q_proj\.lora_A\.default\.weight: this is an adapter, not a model
$ sed -i 's/"quantization_config": {},//' python/config.json && qtool eval python --data "$NANO/eval.txt" --windows 1 --seqlen 16 -q
> ^perplexity
$ sed -i 's/"hidden_size": *[0-9]*/"hidden_size": NaN/' python/config.json && qtool eval python --data "$NANO/eval.txt" --windows 1 --seqlen 16 -q
? 3
2 'hidden_size' is NaN, but a non-negative integer is expected
$ echo '{"model_type": "llama",' >python/config.json && qtool quantize python -o none --scheme nf4
? 3
2 ^qtool quantize: python/config\.json: line
$ test ! -e none
