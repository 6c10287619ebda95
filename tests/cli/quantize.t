$ qtool quantize "$NANO" -o fp6 --scheme fp6 --progress plain
> ^container +fp6$
> ^tensors +21 quantized, 8 copied$
> ^bpw +6\.0556 bits per quantized weight$
> ^size +1\.78 MiB \([0-9]+ bytes\), source 3\.88 MiB$
2 ^qtool quantize: quantize done in 0:0

$ test ! -e fp6.partial && cmp fp6/tokenizer.json "$NANO/tokenizer.json" && sed -e 's/"vocab_size": 1024$/&,/' -e '$d' "$NANO/config.json" >config && printf '  "quantization_config": {\n    "quant_method": "qtool",\n    "format_version": 1\n  }\n}\n' >>config && cmp fp6/config.json config

# The commands that may come next can be pasted.
$ ln -s "$NANO" 'a source' && qtool quantize 'a source' -o "it's" --scheme nf3
2 ^qtool quantize: next: qtool verify 'it'\\''s' --source 'a source'; qtool eval 'it'\\''s' --data TEXT --ref 'a source'; qtool export 'it'\\''s' -o DIR --format dense$

# License files are copied; other files are not.
$ mkdir licensed && cp "$NANO"/*.json "$NANO"/model.safetensors licensed && echo terms >licensed/LICENSE.txt && echo names >licensed/NOTICE && echo x >licensed/notes.txt
$ qtool quantize licensed -o carried --scheme fp6 -q && cmp carried/LICENSE.txt licensed/LICENSE.txt && cmp carried/NOTICE licensed/NOTICE && test ! -e carried/notes.txt && grep -c NOTICE carried/SHA256SUMS
> ^bpw
> ^1$
$ mkdir licensed/LICENSE && ln -s nowhere licensed/NOTICE.txt && qtool quantize licensed -o carried --scheme fp6 --force --progress none
> ^container
2 ^qtool quantize: warning: licensed/LICENSE is not a file: not copied$
2 licensed/NOTICE\.txt is a link to a file that does not exist: not copied$
$ test ! -e carried/LICENSE && test ! -e carried/NOTICE.txt && qtool quantize licensed -o carried --scheme fp6 -q --resume
> already complete

# An existing output is replaced with --force only.
$ cp fp6/qtool.json before && qtool quantize "$NANO" -o fp6 --scheme fp5 -q
? 2
>-
2 fp6: exists already; --force

$ cmp before fp6/qtool.json
$ qtool quantize "$NANO" -o fp6 --scheme fp5 --force -q
> ^bpw +5\.

$ qtool inspect fp6
> fp5 

# The same input and options give the same bytes for any number of threads.
$ qtool quantize "$NANO" -o t1 --scheme nf4 --threads 1 -q && qtool quantize "$NANO" -o t3 --scheme nf4 --threads 3 -q
$ cmp t1/model.safetensors t3/model.safetensors && cmp t1/qtool.json t3/qtool.json

# Totals of the manifest: weights of the quantized tensors, bytes of all tensors.
$ tr -d '\n ' <t1/qtool.json | grep -o '"totals":{[^}]*}'
> ^"totals":\{"bpw":4\.128[0-9]*,"quantized_weights":1769472,"bytes":1440928\}$

# The checkpoint itself is never replaced.
$ cp -r "$NANO" copy && chmod -R u+w copy && qtool quantize copy -o copy --scheme fp6 --force
? 2
2 is the checkpoint itself: choose another output directory

$ qtool quantize copy/model.safetensors -o ./copy/ --scheme fp6 --force
? 2
2 is the checkpoint itself: choose another output directory

$ cmp copy/model.safetensors "$NANO/model.safetensors"

# Nothing is written if the plan fails.
$ qtool quantize "$NANO" -o bad --scheme fp6 --tensor 'norm=fp6'
? 4
>-
2 tensor model\.layers\.0\.input_layernorm\.weight

$ test ! -e bad && test ! -e bad.partial

$ qtool quantize nowhere -o bad --scheme fp6
? 3
2 ^qtool quantize: nowhere: 

$ qtool quantize "$NANO" -o no/such/place/ --scheme fp6
? 2
2 ^qtool quantize: no/such: does not exist: create this directory first$

$ qtool calibrate "$NANO" -o no/x.qcal --data "$NANO/calib.txt"
? 2
2 ^qtool calibrate: no: does not exist: create this directory first$

# SHA256SUMS has all files except the report, in the format of sha256sum.
$ qtool quantize "$NANO" -o summed --scheme fp6 -q && cd summed && sha256sum --strict --quiet -c SHA256SUMS && ls | grep -vx -e SHA256SUMS -e qtool-report.json | xargs sha256sum | cmp - SHA256SUMS

# Side files are copied: exactly those that docs/format.md names.
$ names=$(sed -n 's/^| \(`config.json`.*\) | side files: .*/\1/p' "$NANO/../../docs/format.md" | tr -d '`,') && mkdir sides && cp "$NANO/model.safetensors" sides && for f in $names other.json; do echo "{\"$f\":0}" >sides/$f; done && qtool quantize sides -o beside --scheme fp6 -q && rm beside/qtool* beside/SHA256SUMS sides/other.json && cp sides/model.safetensors beside && grep -q quant_method beside/config.json && cp sides/config.json beside && diff -r sides beside && ls beside
> ^config\.json$
> ^video_preprocessor_config\.json$

# The manifest records the origin of the container.
$ qtool quantize "$NANO" -o traced --scheme nf3:g=64 --data "$NANO/calib.txt" --samples 2 --seqlen 64 -q && cat traced/qtool.json
> "name": "qtool"
> "sample_crc32": "[0-9a-f]{8}"
> "bytes": [0-9]+
> "scheme": "nf3:g=64
> "ids_crc32": "[0-9a-f]{8}"
> "source_crc32": "[0-9a-f]{8}"

# Linears that share an input may have different group sizes, which do not affect each other.
$ for q in none nf4:g=256; do qtool quantize "$NANO" -o q-$q --scheme none --tensor '0\..*k_proj=nf4:g=32' --tensor "0\..*q_proj=$q" --data "$NANO/calib.txt" --samples 2 --seqlen 64 -q && grep -A 50 '"model.layers.0.self_attn.k_proj.weight": {' q-$q/qtool.json | grep -m 3 crc32 >$q; done; cmp none nf4:g=256 && cat none
> crc32
# A tensor that is not a linear of a decoder layer has no Hessian: search, as the manifest says.
$ qtool quantize "$NANO" -o head --scheme none --tensor 'embed_tokens=nf4' --tensor '1\.mlp\.up=nf4' --data "$NANO/calib.txt" --samples 2 --seqlen 64
> ^tensors    2 quantized
2 model\.embed_tokens\.weight: not a linear of a decoder layer, so there is no Hessian; quantized by search
$ tr -d '\n ' <head/qtool.json
> "model\.embed_tokens\.weight":\{"scheme":"nf4:g=128,method=search"
> "model\.layers\.1\.mlp\.up_proj\.weight":\{"scheme":"nf4:g=128,method=gptq"
$ qtool quantize "$NANO" -o strict --scheme none --tensor 'embed_tokens=nf4' --data "$NANO/calib.txt" --samples 2 --seqlen 64 --strict -q
? 4
2 model\.embed_tokens\.weight: not a linear of a decoder layer.*without --strict

# A container is not a checkpoint.
$ qtool quantize head -o again --scheme nf4
? 4
2 ^qtool quantize: head: is a qtool container
$ qtool plan head
? 4
2 ^qtool plan: head: is a qtool container

# A tensor with the name of a section is refused; the check is not quadratic in the tensors.
$ mkdir clash && printf '%-128s' '{"a.weight":{"dtype":"F32","shape":[16,16],"data_offsets":[0,1024]},"a.weight.q.scale":{"dtype":"F32","shape":[1],"data_offsets":[1024,1028]}}' >header && { printf "\\$(printf %o $(wc -c <header))\0\0\0\0\0\0\0"; cat header; head -c 1028 /dev/zero; } >clash/model.safetensors && qtool plan clash --scheme none --tensor 'a.weight$=nf4'
? 4
>-
2 tensor a\.weight\.q\.scale: its name collides with a section of a\.weight
$ awk 'BEGIN { printf "{"; for (i = 0; i < 200000; i++) printf "%s\"b.%d.q.w\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}", i ? "," : "", i; printf "}" }' >header && n=$(wc -c <header) && { for s in 0 8 16 24; do printf "\\$(printf %03o $((n >> s & 255)))"; done; printf '\0\0\0\0'; cat header; } >many.safetensors && timeout 60 qtool plan many.safetensors --scheme none --json | tail -n 1
> ^}$

$ qtool plan "$NANO" --scheme nf4 --tensor 'q_proj=none:g=2'
? 2
2 none takes no parameters

# Options without effect are errors.
$ qtool quantize "$NANO" -o idle --scheme nf4 --learn lr=0.1
? 2
2 --learn tunes tensors whose scheme has learn=1, but no scheme has it
$ qtool quantize "$NANO" -o idle --scheme nf4 --samples 8
? 2
2 --samples, --seqlen, --seed and --bos need --data
$ qtool quantize "$NANO" -o idle --scheme nf4 --seed 3
? 2
$ test ! -e idle && test ! -e idle.partial

# --strict is not part of a container's identity.
$ qtool quantize "$NANO" -o lax --scheme nf4 --tensor embed=fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 32 -q
> ^tensors +22 quantized
$ qtool quantize "$NANO" -o lax --scheme nf4 --tensor embed=fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 32 -q --resume
> already complete
$ qtool quantize "$NANO" -o lax --scheme nf4 --tensor embed=fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 32 -q --resume --strict
? 8
2 tensor model\.embed_tokens\.weight: cannot resume with --strict: the earlier run fell back: not a linear of a decoder layer

# A file name may have any bytes.
$ name=$(printf 'm\377.safetensors') && cp "$NANO/model.safetensors" "$name" && qtool quantize "$name" -o bytes --scheme nf4 -q && qtool verify bytes -q && cat bytes/qtool.json
> "name": "m\?\.safetensors"

# Calibration data that no scheme uses.
$ qtool quantize "$NANO" -o unused --scheme fp6:method=rtn --data "$NANO/calib.txt" --samples 2 --seqlen 32
2 warning: no scheme uses the calibration data

# A head that is tied to the embedding but stored needs the embedding's scheme.
need command -v python3
$ cp -r "$NANO" tied && python3 -c 'import json,struct;p="tied/model.safetensors";d=open(p,"rb").read();n=struct.unpack("<Q",d[:8])[0];h=json.loads(d[8:8+n]);b=d[8+n:];e=h["model.embed_tokens.weight"];s,t=e["data_offsets"];h["lm_head.weight"]=dict(e,data_offsets=[len(b),len(b)+t-s]);j=json.dumps(h).encode();j+=b" "*(-len(j)%8);open(p,"wb").write(struct.pack("<Q",len(j))+j+b+b[s:t])'
$ qtool quantize tied -o t --scheme nf4 --tensor embed_tokens=int8 -q
? 4
2 tied/model\.safetensors: tensor lm_head\.weight: has scheme none, but model\.embed_tokens\.weight has int8.*both need the same
$ qtool plan tied --scheme nf4 --tensor lm_head=int8
? 4
2 tensor lm_head\.weight: has scheme int8.* has none: both need the same
$ test ! -e t && qtool quantize tied -o t --scheme nf4 --tensor 'embed_tokens|lm_head=int8' -q && qtool eval t --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q

# Weights that exceed the FP32 range after rounding of the scale.
$ mkdir huge && python3 -c 'import json,struct;j=json.dumps({"model.layers.0.mlp.up_proj.weight":{"dtype":"F32","shape":[16,256],"data_offsets":[0,16384]}}).encode();j+=b" "*(-len(j)%8);open("huge/model.safetensors","wb").write(struct.pack("<Q",len(j))+j+struct.pack("<4096f",3.4028234663852886e38,*[i%9-4 for i in range(4095)]))'
$ qtool quantize huge -o h --scheme nf4 -q
? 3
2 huge/model\.safetensors: tensor model\.layers\.0\.mlp\.up_proj\.weight: weights near the FP32 maximum become infinite
$ test ! -e h && test ! -e h.partial

# Tiny weights that all become 0: the figures show it.
$ mkdir tiny && python3 -c 'import json,struct;j=json.dumps({"model.layers.0.mlp.up_proj.weight":{"dtype":"F32","shape":[16,256],"data_offsets":[0,16384]}}).encode();j+=b" "*(-len(j)%8);open("tiny/model.safetensors","wb").write(struct.pack("<Q",len(j))+j+struct.pack("<4096I",*[1+i%7 for i in range(4096)]))'
$ qtool quantize tiny -o t0 --scheme int8 -q && grep '"cosine"' t0/qtool.json
> "cosine": 0[,.} ]
