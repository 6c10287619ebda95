$ qtool inspect "$NANO"
> ^TENSOR +DTYPE +SHAPE +SIZE$
> ^model\.layers\.1\.mlp\.down_proj\.weight +F16 +256x512 +256\.0 KiB$
> ^model\.norm\.weight +F16 +256 +512 B$
> ^model +llama: 3 layers, hidden 256, vocabulary 1024, heads 4 \(2 key/value\)$
> ^parameters +2033408$
> ^size +3\.88 MiB \(4066816 bytes\)$
>!  $
2-

# Quantized tensors are shown as they are read; one that cannot be read, as it is stored.
$ cp -r "$NANO/../../tests/golden/sources/fp8_stacked" fp8 && rm fp8/expected.safetensors && qtool inspect fp8
> ^model\.layers\.0\.mlp\.experts\.1\.up_proj\.weight +BF16 from fp8 +16x64 +2\.00 KiB$
$ qtool inspect fp8 --json
> "encoding": "fp8",
$ sed 's/gate_up_proj_scale_inv/gate_up_proj_scale_xxx/' fp8/model.safetensors >fp8/x && mv fp8/x fp8/model.safetensors && qtool inspect fp8
> ^model\.layers\.0\.mlp\.experts\.gate_up_proj +F8_E4M3 +2x32x64
> ^quantize +refuses this: fp8/config\.json: tensor model\.layers\.0\.mlp\.experts\.gate_up_proj: the checkpoint is already quantized
$ sed 's/"fp8"/"exl3"/' fp8/config.json >c && mv c fp8/config.json && qtool plan fp8 --scheme nf4
? 4
2 ^qtool plan: fp8: the checkpoint is already quantized with quant_method 'exl3', which is not supported

# A single file is a checkpoint.
$ qtool inspect "$NANO/model.safetensors"
> ^tensors +29 in 1 file$

# A model that cannot be run can be inspected.
$ mkdir odd && cp "$NANO/model.safetensors" odd && sed 's/"llama"/"alpaca"/' "$NANO/config.json" >odd/config.json
$ qtool inspect odd
> ^model +cannot be run by eval: .*alpaca
> ^parameters +2033408$
$ qtool inspect odd --json
> "unsupported": "odd/config\.json: .*alpaca
$ sed 's/"num_hidden_layers": 3/"num_hidden_layers": 4/' "$NANO/config.json" >odd/config.json
$ qtool inspect odd
> ^model +cannot be run by eval: .*model\.layers\.3\.

$ qtool quantize "$NANO" -o nf4 --scheme nf4:g=64 --tensor 'down_proj=fp6:e=2' -q
$ qtool inspect nf4
> ^QUANTIZED +SCHEME +SHAPE +SIZE +BPW +SQNR dB +COSINE$
> ^model\.layers\.0\.mlp\.down_proj\.weight +fp6:e=2.* +256x512 .* +6\.0312 +[0-9.]+ +0\.99[0-9]+$
> ^model\.layers\.0\.mlp\.up_proj\.weight +nf4:g=64
> ^COPIED +DTYPE +SHAPE +SIZE$
> ^tensors +21 quantized, 8 copied$
> ^bpw +4\.6[0-9]+ bits per quantized weight$

# Bad input.
$ qtool inspect nowhere
? 3
>-
2 ^qtool inspect: nowhere: 

$ qtool inspect /dev/null
? 3
2 ^qtool inspect: /dev/null: 

$ mkdir empty && qtool inspect empty
? 3
2 ^qtool inspect: empty: 

$ head -c 1000 "$NANO/model.safetensors" >cut.safetensors && qtool inspect cut.safetensors
? 3
2 ^qtool inspect: cut\.safetensors: 

$ printf 'not a checkpoint at all' >text.safetensors && qtool inspect text.safetensors
? 3

$ cp -r nf4 broken && printf '{' >broken/qtool.json && qtool inspect broken
? 3
2 broken/qtool\.json

$ cp -r nf4 newer && sed 's/"format_version": *1/"format_version":3/' nf4/qtool.json >newer/qtool.json && qtool inspect newer
? 4
2 newer/qtool\.json: format version 3
