# Multimodal models: the decoder is quantized, the vision module is copied.
$ qtool plan "$MODELS/gemma3_images" --scheme nf4
> ^tensors +21 quantized
> vision_tower\.encoder\.layers\.0\.mlp\.fc1\.weight.*multimodal tensor
$ qtool quantize "$MODELS/gemma3_images" -o q --scheme nf4:g=32 --data "$MODELS/gemma3_images/ids.u16" --samples 2 --seqlen 16 --kv 4
> ^tensors +21 quantized
$ qtool verify q --source "$MODELS/gemma3_images" -q
> ^tensors +21 quantized
$ qtool eval q --ref "$MODELS/gemma3_images" --data "$MODELS/gemma3_images/ids.u16" --seqlen 40 -q
> ^KL divergence
$ qtool quantize "$MODELS/qwen3_vl" -o r --scheme w4ax --data "$MODELS/qwen3_vl/ids.u16" --samples 2 --seqlen 16
> ^tensors
$ qtool plan "$MODELS/qwen3_vl" --scheme nf4 --tensor 'visual.*fc1=fp6'
> model\.visual\.blocks\.0\.mlp\.linear_fc1\.weight.*fp6
$ qtool list archs
> ^gemma3 +attention
> ^qwen2_5_vl +attention
