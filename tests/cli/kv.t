# 4-bit KV caches: kinds of key scales in quantize, inspect, verify, plan and eval; errors.
$ qtool quantize "$NANO" -o q --scheme fp6 --kv 4 --kv-keys static -q
? 2
>-
2 static scales of 4-bit keys need calibration data \(--data\)
$ qtool quantize "$NANO" -o q --scheme fp6 --kv 8 -q
? 2
2 --kv: '8' is not supported, only 4 is
$ qtool quantize "$NANO" -o q --scheme fp6 --kv-keys channel -q
? 2
2 --kv-keys needs --kv 4
$ qtool calibrate "$NANO" -o x.qcal --data "$NANO/calib.txt" --samples 1 --seqlen 16 -q && qtool quantize "$NANO" -o q --scheme fp6 --kv 4 --kv-keys static --calib x.qcal -q
? 2
2 \(--data\): a calibration file does not hold them
$ test ! -e q && test ! -e q.partial

# Scales that the cache makes itself need no data and store nothing.
$ qtool quantize "$NANO" -o c --scheme fp6 --kv 4 -q && qtool quantize "$NANO" -o plain --scheme fp6 -q && cmp c/model.safetensors plain/model.safetensors
$ qtool inspect c
> ^kv cache +4 bits: key scales per channel and 64 tokens, value scales per token and 16 channels; 4\.625 bits with scales$
>! sqnr
$ qtool inspect c --json
> "keys": "channel",
> "sqnr_db": null
$ qtool eval c --data "$NANO/eval.txt" --windows 1 --seqlen 130 --kv 4 -q
> ^kv cache .*; 4\.625 bits with scales, 8\.625 with the FP16 keys of 130 tokens$
$ qtool eval c --data "$NANO/eval.txt" --windows 1 --seqlen 130 --kv 4 --json -q
> "kv_bits": 8\.625
$ qtool verify c --source "$NANO" -q && qtool quantize "$NANO" -o c --scheme fp6 --kv 4 -q --resume
$ qtool quantize "$NANO" -o c --scheme fp6 -q --resume
? 8
$ cp -r c odd && chmod -R u+w odd && sed -i 's/"group": 64/"group": 32/' odd/qtool.json && ! cmp -s c/qtool.json odd/qtool.json && for x in inspect verify "eval --data $NANO/eval.txt --windows 1 --kv 4"; do qtool $x odd; echo $?; done; rm -r odd
> ^3$
>! ^[01245678]
2 odd: 'kv\.keys' and 'kv\.values' describe no cache that this version knows
$ qtool plan "$NANO" --scheme fp6 --kv 4
> ^kv cache +4 bits: key scales per channel and 64 tokens, value scales per token and 16 channels; 4\.625 bits with scales$
>! ^needs
$ qtool plan "$NANO" --scheme fp6 --kv 4 --json >planned && qtool inspect c --json | grep -q "$(sed -n 's/^  \("bytes": [0-9]*\),$/\1/p' planned)" && grep -A 9 '"kv": {' planned | tr -d ' \n'
> "kv":\{"bits":4,"keys":"channel","layers":3,"kv_heads":2,"head_dim":64,"bytes":0,"bits_per_number":4\.625,"tail_bytes":49920\}

# Static scales.
$ qtool quantize "$NANO" -o q --scheme fp6 --kv 4 --kv-keys static --data "$NANO/calib.txt" --samples 4 --seqlen 128 --progress plain
2 ^qtool quantize: keys done
$ qtool inspect q
> ^tensors +21 quantized, 8 copied$
> ^kv cache +4 bits: key scales static, value scales per token and 16 channels; 4\.5 bits with scales$
> ^key sqnr +[12][0-9]\.[0-9]+ dB or more in every layer$
>! kv\.layers
$ qtool inspect q --json
> "keys": "static",
> "sqnr_db": [12][0-9]\.
$ qtool verify q --source "$NANO" -q
$ cp -r q odd && chmod -R u+w odd && sed -i 's/"scales": "static"/"scales": "statue"/' odd/qtool.json && qtool verify odd -q
? 3
2 odd: 'kv\.keys' and 'kv\.values' describe no cache that this version knows
$ grep -c '"kv.layers.[0-2].k_\(scale\|zero\)"' q/qtool.json
> ^6$

# plan and quantize agree.
$ qtool plan "$NANO" --scheme fp6 --kv 4 --kv-keys static
> ^needs +calibration data \(--data\), for the static key scales$
> q_proj\.weight +F16 +256x256 +fp6:.*method=gptq
$ qtool plan "$NANO" --scheme fp6 --kv 4 --kv-keys static --json >planned && qtool inspect q --json | grep -q "$(sed -n 's/^  \("bytes": [0-9]*\),$/\1/p' planned)"
$ grep -A 9 '"kv": {' planned | tr -d ' \n'
> "kv":\{"bits":4,"keys":"static","layers":3,"kv_heads":2,"head_dim":64,"bytes":3072,"bits_per_number":4\.5,"tail_bytes":0\}
$ grep -c '"needs_data": true' planned
$ qtool plan "$NANO" --kv 4
> ^nf4 +4\.
$ mkdir bare && cp "$NANO/model.safetensors" bare && qtool plan bare --scheme fp6 --kv 4
? 3
>-
2 bare/config\.json: cannot open
$ qtool plan "$NANO" --scheme fp6 --kv 8
? 2
2 --kv: '8' is not supported, only 4 is

# The kind of the container is the default; each --kv-keys gives another result.
$ for k in static channel token; do qtool eval q --data "$NANO/eval.txt" --windows 2 --kv 4 --kv-keys $k -q >$k; done; qtool eval q --data "$NANO/eval.txt" --windows 2 --kv 4 -q | cmp - static
$ sort -u static channel token | grep -c perplexity
> ^3$
$ qtool eval q --data "$NANO/eval.txt" --windows 2 -q | grep perplexity | grep -qFf - static
? 1
$ qtool quantize "$NANO" -o t --scheme fp6 --kv 4 --kv-keys token -q && qtool eval t --data "$NANO/eval.txt" --windows 1 --kv 4 -q >token && qtool eval plain --data "$NANO/eval.txt" --windows 1 --kv 4 --kv-keys token -q | cmp - token
$ qtool eval c --data "$NANO/eval.txt" --windows 1 --kv 4 --kv-keys static -q
? 2
2 --kv-keys static needs a container with static key scales

# A container without key scales, a checkpoint.
$ qtool eval plain --data "$NANO/eval.txt" --windows 1 --kv 4 -q >default && qtool eval plain --data "$NANO/eval.txt" --windows 1 --kv 4 --kv-keys channel -q | cmp - default
$ qtool inspect plain
>! kv cache
$ qtool eval plain --data "$NANO/eval.txt" --windows 1 --kv 4 --kv-keys static -q
? 2
>-
2 --kv-keys static needs a container with static key scales: make it with 'qtool quantize --kv 4 --kv-keys static --data FILE'
$ qtool eval "$NANO" --data "$NANO/eval.txt" --windows 1 --kv 4 --kv-keys static -q
? 2
2 needs a container with static key scales
$ qtool eval "$NANO" --data "$NANO/eval.txt" --kv 4 --kv-keys chanel -q
? 2
2 did you mean 'channel'
$ qtool eval "$NANO" --data "$NANO/eval.txt" --kv-keys token -q
? 2
2 --kv-keys needs --kv 4

# Only the cache is quantized.
$ qtool quantize "$NANO" -o none --scheme none --kv 4 --data "$NANO/calib.txt" --samples 2 --seqlen 64 -q && qtool eval none --data "$NANO/eval.txt" --windows 1 --kv 4 -q
> ^tensors +0 quantized, 29 copied$
> ^perplexity

# Keys that overflow FP32: 1024 bytes of 7f are 512 weights of 3.4e38 in BF16.
$ cp -r "$MODELS/llama" over && chmod -R u+w over && LC_ALL=C sed -i 's/"pt"/"p"/; s/\(1\.self_attn\.k_proj\.weight":{"dtype":"\)F16/\1BF16/' over/model.safetensors && printf '%1024s' | tr ' ' '\177' | dd of=over/model.safetensors bs=1 seek=39344 conv=notrunc status=none
$ qtool eval over --data "$MODELS/mixtral/ids.u16" --seqlen 40 --kv 4 -q
? 3
>-
2 ^qtool eval: over: tensor model\.layers\.1\.self_attn\.k_proj\.weight: gives keys that are not finite$

# w4ax divides value channels by powers of two, in the cache too, so outlier channels do no harm. (Without the
# division perplexity rises from 18 to 1370. With it, it is 1.00 to 1.05 times that without a cache, and 1.35 to 1.40
# times that of the source, depending on the processor; 8 windows instead of 64 give 1.50 and 1.51.)
need command -v python3
$ python3 "$BAD/../oracle/value_outliers.py" "$NANO" large && qtool quantize large -o w --scheme w4ax --kv 4 --data "$NANO/calib.txt" --samples 64 --seqlen 128 -q
$ qtool eval w --ref large --data "$NANO/eval.txt" --seqlen 128 --windows 4 --kv 4 -q --gate 'ppl_ratio<=1.5'
$ qtool eval w --ref w --data "$NANO/eval.txt" --seqlen 128 --windows 4 --kv 4 -q --gate 'ppl_ratio<=1.1'
