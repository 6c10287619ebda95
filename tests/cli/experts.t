# Mixtures of experts: the router is copied; each expert has its own statistics.
$ qtool plan "$MODELS/mixtral" --scheme nf4
> ^tensors +38 quantized
> block_sparse_moe\.gate\.weight.*router
$ qtool quantize "$MODELS/mixtral" -o q --scheme nf4:g=32 --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
> ^tensors +38 quantized
2 10 experts were selected by fewer than 4 calibration tokens per channel \(the fewest: [0-9]+\)
$ qtool verify q --source "$MODELS/mixtral" -q
> ^tensors +38 quantized
$ qtool eval q --ref "$MODELS/mixtral" --data "$MODELS/mixtral/ids.u16" --seqlen 40 -q
> ^KL divergence
$ test "$(grep -c '"tokens"' q/qtool-report.json)" -eq 30
$ qtool report q -o q.html && grep -c 'Tokens of experts, by decoder layer' q.html
$ qtool list archs
> ^mixtral +attention
> ^qwen3_moe +attention

# Calibration files: each expert has Hessians of its own. The same bytes for any number of threads;
# files can be merged.
$ echo "--data $MODELS/mixtral/ids.u16 --seqlen 16 -q" >data
$ for t in 1 2 3; do qtool calibrate "$MODELS/mixtral" -o $t.qcal $(cat data) --samples 2 --threads $t || exit; done; cmp 1.qcal 2.qcal && cmp 1.qcal 3.qcal
$ qtool inspect 1.qcal
> ^ +1 +expert 4 in +32 +32 
> ^ +1 +expert 4 down +48 +32 
> ^ +1 +experts in +32 +32 
$ qtool calibrate "$MODELS/mixtral" -o s.qcal $(cat data) --samples 1 --seed 3 && qtool calibrate --merge 1.qcal s.qcal -o m.qcal -q
> ^tokens +48$
$ qtool quantize "$MODELS/mixtral" -o c --scheme nf4:g=32 --calib m.qcal
> ^tensors +38 quantized
2 10 experts were selected by fewer than 4 calibration tokens per channel \(the fewest: [0-9]+\)
$ qtool quantize "$MODELS/mixtral" -o c1 --scheme nf4:g=32 --calib m.qcal -q --threads 1 && cmp c/model.safetensors c1/model.safetensors && qtool verify c --source "$MODELS/mixtral" -q
> ^tensors +38 quantized
$ test "$(grep -c '"tokens"' c/qtool-report.json)" -eq 30
$ qtool quantize "$MODELS/qwen3_moe" -o x --scheme nf4 --calib m.qcal -q
? 3
2 m\.qcal: made from another model than .*qwen3_moe.*: the family is mixtral, not qwen3_moe
$ qtool plan "$MODELS/mixtral" --scheme nf4:g=32 --calib m.qcal
> ^memory .* with the calibration file$

# Latent attention has more inputs.
$ qtool calibrate "$MODELS/deepseek_v3" -o l.qcal --data "$MODELS/deepseek_v3/ids.u16" --seqlen 16 -q --samples 2 && qtool inspect l.qcal
> ^tokens +32$
> ^ +0 +mixer 2 +8 
$ qtool quantize "$MODELS/deepseek_v3" -o l --scheme fp6 --calib l.qcal -q && grep -q ".fallbacks.: 0" l/qtool-report.json
> ^tensors +[0-9]+ quantized

# Learning goes through the chosen experts.
$ qtool quantize "$MODELS/mixtral" -o t --scheme nf3:g=32,learn=1 --tune-norms --learn lr=1e-2,passes=4 --data "$MODELS/mixtral/ids.u16" --samples 10 --seqlen 4 -q
> ^tensors +38 quantized
$ grep -o '"train": *[0-9.]*' t/qtool-report.json | tr -d ' ' | awk -F: 'NR == 3 { first = $2 } { last = $2 } END { exit !(NR > 3 && last < 0.8 * first) }'
$ qtool verify t --source "$MODELS/mixtral" -q
> ^tensors +38 quantized

# A layer may end with matrices that are not quantized. Sinks, clamped activations, scaled inputs.
$ qtool quantize "$MODELS/gpt_oss_moe" -o sinks --scheme nf3:g=32,learn=1 --tune-norms --learn passes=1 --data "$MODELS/gpt_oss_moe/ids.u16" --samples 4 --seqlen 8 -q
> ^tensors +[1-9][0-9]* quantized
$ qtool quantize "$MODELS/llama4" -o scaled --scheme none --tensor 'up_proj|q_proj=nf3:g=32,learn=1' --learn passes=1 --data "$MODELS/llama4/ids.u16" --samples 4 --seqlen 8 -q
> ^tensors +[1-9][0-9]* quantized

# Activations of experts: all gate and up projections of a layer have the same input.
$ qtool quantize "$MODELS/mixtral" -o w4 --scheme w4ax:scales=int --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16 -q
> ^tensors +[1-9][0-9]* quantized
$ qtool verify w4 --source "$MODELS/mixtral" -q
> ^tensors +[1-9][0-9]* quantized
$ qtool eval w4 --data "$MODELS/mixtral/ids.u16" --seqlen 20 --windows 1 -q
> ^perplexity

# Features that do not support experts are refused before any work.
$ qtool quantize "$MODELS/qwen2_moe" -o r --scheme w4ax --data "$MODELS/qwen2_moe/ids.u16" --samples 2 --seqlen 16
? 4
2 model\.safetensors: tensor [a-z0-9_.]+: w4ax does not support layers whose experts have several sizes
$ qtool quantize "$MODELS/gemma4_moe" -o r --scheme none --tensor down=nf4:learn=1 --data "$MODELS/gemma4_moe/ids.u16" --samples 2 --seqlen 16
? 4
2 learn=1 does not support mixtures of experts of this kind
$ qtool plan "$MODELS/gemma4_moe" --scheme none --tensor down=nf4:learn=1
? 4
2 learn=1 does not support mixtures of experts of this kind
$ qtool quantize "$MODELS/gemma4_moe" -o r --scheme none --tensor down=nf4 --tune-norms --data "$MODELS/gemma4_moe/ids.u16" --samples 2 --seqlen 16
? 4
2 learning does not support mixtures of experts of this kind
$ test ! -e r && test ! -e r.partial && test ! -e x
