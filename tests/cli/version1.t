# A w4ax container of format version 1, which qtool wrote before version 2 existed
# (quantize "$MODELS/llama" --scheme w4ax:scales=int --data ids.u16 --samples 2 --seqlen 16), gives the
# figures that it gave then.
$ qtool verify "$MODELS/../w4ax_version1" --source "$MODELS/llama"
> ^tensors +14 quantized, 7 copied$
> ^bpw +18\.0865$
> ^sqnr +15\.1422$
> ^max_abs +0\.26598$
$ qtool eval "$MODELS/../w4ax_version1" --data "$MODELS/llama/ids.u16" --ref "$MODELS/llama" --seqlen 16 -q
> ^KL divergence +1\.0869
$ qtool export "$MODELS/../w4ax_version1" -o plain --format dense -q && test -s plain/model.safetensors
$ qtool inspect "$MODELS/../w4ax_version1"
> w4ax:smooth=4,scales=int,method=gptq
