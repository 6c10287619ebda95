# Mixtures of experts: the router is copied, experts have statistics of their own.
$ qtool plan "$MODELS/mixtral" --scheme nf4
> ^tensors +38 quantized
> block_sparse_moe\.gate\.weight.*router
$ qtool quantize "$MODELS/mixtral" -o q --scheme nf4:g=32 --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
> ^tensors +38 quantized
2 10 experts were chosen by fewer than 4 tokens of calibration data a channel, down to [0-9]+ tokens
$ qtool verify q --source "$MODELS/mixtral" -q
> ^tensors +38 quantized
$ qtool eval q --ref "$MODELS/mixtral" --data "$MODELS/mixtral/ids.u16" --seqlen 40 -q
> ^KL divergence
$ test "$(grep -c '"tokens"' q/qtool-report.json)" -eq 30
$ qtool list archs
> ^mixtral$
> ^qwen3_moe$

# What is not for them, said before any work.
$ qtool calibrate "$MODELS/mixtral" -o x.qcal --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
? 4
2 quantize with calibration data \(--data\)
$ qtool quantize "$MODELS/mixtral" -o r --scheme w4ax --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
? 4
2 model\.safetensors: tensor [a-z0-9_.]+: w4ax is not for mixtures of experts
$ qtool quantize "$MODELS/mixtral" -o r --scheme nf4:learn=1 --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
? 4
2 learn=1, but the model is a mixture of experts
$ qtool plan "$MODELS/mixtral" --scheme nf4:learn=1
? 4
2 learn=1, but the model is a mixture of experts
$ qtool quantize "$MODELS/mixtral" -o r --scheme nf4 --tune-norms --data "$MODELS/mixtral/ids.u16" --samples 2 --seqlen 16
? 4
2 learning goes through models without mixtures of experts only
$ test ! -e r && test ! -e r.partial && test ! -e x.qcal
