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
$ qtool list archs
> ^mixtral +attention
> ^qwen3_moe +attention

# Features that do not support experts are refused before any work.
$ qtool calibrate "$MODELS/mixtral" -o x.qcal --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
? 4
2 quantize with --data instead
$ qtool quantize "$MODELS/mixtral" -o r --scheme w4ax --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
? 4
2 model\.safetensors: tensor [a-z0-9_.]+: w4ax does not support mixtures of experts
$ qtool quantize "$MODELS/mixtral" -o r --scheme nf4:learn=1 --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
? 4
2 learn=1 does not support mixtures of experts
$ qtool plan "$MODELS/mixtral" --scheme nf4:learn=1
? 4
2 learn=1 does not support mixtures of experts
$ qtool quantize "$MODELS/mixtral" -o r --scheme nf4 --tune-norms --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
? 4
2 learning does not support mixtures of experts
$ test ! -e r && test ! -e r.partial && test ! -e x.qcal
