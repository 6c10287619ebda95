$ qtool quantize "$NANO" -o fp6 --scheme fp6 --progress plain
> ^container +fp6$
> ^tensors +21 quantized, 8 copied$
> ^bpw +6\.0556 bits per quantized weight$
> ^size +1\.78 MiB \([0-9]+ bytes\), source 3\.88 MiB$
2 ^qtool quantize: quantize done in 0:0

$ test ! -e fp6.partial && cmp fp6/tokenizer.json "$NANO/tokenizer.json" && cmp fp6/config.json "$NANO/config.json"

# What a licence asks to go along does; other files stay.
$ mkdir licensed && cp "$NANO"/*.json "$NANO"/model.safetensors licensed && echo terms >licensed/LICENSE.txt && echo names >licensed/NOTICE && echo x >licensed/notes.txt
$ qtool quantize licensed -o carried --scheme fp6 -q && cmp carried/LICENSE.txt licensed/LICENSE.txt && cmp carried/NOTICE licensed/NOTICE && test ! -e carried/notes.txt && grep -c NOTICE carried/SHA256SUMS
> ^bpw
> ^1$
$ mkdir licensed/LICENSE && ln -s nowhere licensed/NOTICE.txt && qtool quantize licensed -o carried --scheme fp6 --force --progress none
> ^container
2 ^qtool quantize: warning: licensed/LICENSE is not a file: not copied$
2 licensed/NOTICE\.txt is not a file: not copied$
$ test ! -e carried/LICENSE && test ! -e carried/NOTICE.txt && qtool quantize licensed -o carried --scheme fp6 -q --resume
> complete already

# An existing output is only replaced on request.
$ cp fp6/qtool.json before && qtool quantize "$NANO" -o fp6 --scheme fp5 -q
? 2
>-
2 fp6: exists already; --force

$ cmp before fp6/qtool.json
$ qtool quantize "$NANO" -o fp6 --scheme fp5 --force -q
> ^bpw +5\.

$ qtool inspect fp6
> fp5:

# The same input and options give the same bytes, whatever the number of threads.
$ qtool quantize "$NANO" -o t1 --scheme nf4 --threads 1 -q && qtool quantize "$NANO" -o t3 --scheme nf4 --threads 3 -q
$ cmp t1/model.safetensors t3/model.safetensors && cmp t1/qtool.json t3/qtool.json

# What the manifest says of the whole: weights of the quantized tensors, bytes of all.
$ tr -d '\n ' <t1/qtool.json | grep -o '"totals":{[^}]*}'
> ^"totals":\{"bpw":4\.128[0-9]*,"quantized_weights":1769472,"bytes":1440928\}$

# The checkpoint itself is never replaced.
$ cp -r "$NANO" copy && chmod -R u+w copy && qtool quantize copy -o copy --scheme fp6 --force
? 2
2 the output would replace the checkpoint

$ qtool quantize copy/model.safetensors -o ./copy/ --scheme fp6 --force
? 2
2 the output would replace the checkpoint

$ cmp copy/model.safetensors "$NANO/model.safetensors"

# Nothing is written when the plan fails.
$ qtool quantize "$NANO" -o bad --scheme fp6 --tensor 'norm=fp6'
? 4
>-
2 tensor model\.layers\.0\.input_layernorm\.weight

$ test ! -e bad && test ! -e bad.partial

$ qtool quantize nowhere -o bad --scheme fp6
? 3
2 ^qtool quantize: nowhere: 

$ qtool quantize "$NANO" -o no/such/place --scheme fp6
? 6
2 no/such/place

# Checksums of all files but the report, as sha256sum has them.
$ qtool quantize "$NANO" -o summed --scheme fp6 -q && cd summed && sha256sum --strict --quiet -c SHA256SUMS && ls | grep -vx -e SHA256SUMS -e qtool-report.json | xargs sha256sum | cmp - SHA256SUMS

# What else a model needs goes along: exactly the files that docs/format.md names.
$ names=$(sed -n 's/^| \(`config.json`.*\) | those of them .*/\1/p' "$NANO/../../docs/format.md" | tr -d '`,') && mkdir sides && cp "$NANO/model.safetensors" sides && for f in $names other.json; do echo $f >sides/$f; done && qtool quantize sides -o beside --scheme fp6 -q && rm beside/qtool* beside/SHA256SUMS sides/other.json && cp sides/model.safetensors beside && diff -r sides beside && ls beside
> ^config\.json$
> ^video_preprocessor_config\.json$

# Where it comes from is in the manifest.
$ qtool quantize "$NANO" -o traced --scheme nf3:g=64 --data "$NANO/calib.txt" --samples 2 --seqlen 64 -q && cat traced/qtool.json
> "name": "qtool"
> "sample_crc32": "[0-9a-f]{8}"
> "bytes": [0-9]+
> "scheme": "nf3:g=64
> "ids_crc32": "[0-9a-f]{8}"
> "source_crc32": "[0-9a-f]{8}"

# Linears that share an input may have groups of different lengths: none has those of another.
$ for q in none nf4:g=256; do qtool quantize "$NANO" -o q-$q --scheme none --tensor '0\..*k_proj=nf4:g=32' --tensor "0\..*q_proj=$q" --data "$NANO/calib.txt" --samples 2 --seqlen 64 -q && grep -A 50 '"model.layers.0.self_attn.k_proj.weight": {' q-$q/qtool.json | grep -m 3 crc32 >$q; done; cmp none nf4:g=256 && cat none
> crc32
# What is no linear of a block has no Hessian: quantized by search, which the manifest says.
$ qtool quantize "$NANO" -o head --scheme none --tensor 'embed_tokens=nf4' --tensor '1\.mlp\.up=nf4' --data "$NANO/calib.txt" --samples 2 --seqlen 64
> ^tensors    2 quantized
2 model\.embed_tokens\.weight: is no linear of a decoder block, so there is no Hessian; quantized by search
$ tr -d '\n ' <head/qtool.json
> "model\.embed_tokens\.weight":\{"scheme":"nf4:g=128,method=search"
> "model\.layers\.1\.mlp\.up_proj\.weight":\{"scheme":"nf4:g=128,method=gptq"
$ qtool quantize "$NANO" -o strict --scheme none --tensor 'embed_tokens=nf4' --data "$NANO/calib.txt" --samples 2 --seqlen 64 --strict -q
? 4
2 model\.embed_tokens\.weight: is no linear of a decoder block.*without --strict

# A container is no checkpoint.
$ qtool quantize head -o again --scheme nf4
? 4
2 ^qtool quantize: head: is a qtool container
$ qtool plan head
? 4
2 ^qtool plan: head: is a qtool container

# A tensor whose name a section would get, and many that only might: not all are compared with all.
$ mkdir clash && printf '%-128s' '{"a.weight":{"dtype":"F32","shape":[16,16],"data_offsets":[0,1024]},"a.weight.q.scale":{"dtype":"F32","shape":[1],"data_offsets":[1024,1028]}}' >header && { printf "\\$(printf %o $(wc -c <header))\0\0\0\0\0\0\0"; cat header; head -c 1028 /dev/zero; } >clash/model.safetensors && qtool plan clash --scheme none --tensor 'a.weight$=nf4'
? 4
>-
2 tensor a\.weight\.q\.scale: is named like a section of a\.weight
$ awk 'BEGIN { printf "{"; for (i = 0; i < 200000; i++) printf "%s\"b.%d.q.w\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}", i ? "," : "", i; printf "}" }' >header && n=$(wc -c <header) && { for s in 0 8 16 24; do printf "\\$(printf %03o $((n >> s & 255)))"; done; printf '\0\0\0\0'; cat header; } >many.safetensors && timeout 60 qtool plan many.safetensors --scheme nf4 --json | tail -n 1
> ^}$

$ qtool plan "$NANO" --scheme nf4 --tensor 'q_proj=none:g=2'
? 2
2 none takes no parameters

# Options without effect are mistakes.
$ qtool quantize "$NANO" -o idle --scheme nf4 --learn lr=0.1
? 2
2 learn=1, and there is none
$ qtool quantize "$NANO" -o idle --scheme nf4 --samples 8
? 2
2 --samples, --seqlen and --seed choose windows of --data
$ qtool quantize "$NANO" -o idle --scheme nf4 --seed 3
? 2
$ qtool quantize "$NANO" -o idle --scheme nf4 --strict
? 2
2 --strict: there is no Hessian without --data or --calib
$ test ! -e idle && test ! -e idle.partial

# --strict is no part of a container's identity.
$ qtool quantize "$NANO" -o lax --scheme nf4 --tensor embed=fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 32 -q
> ^tensors +22 quantized
$ qtool quantize "$NANO" -o lax --scheme nf4 --tensor embed=fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 32 -q --resume
> complete already
$ qtool quantize "$NANO" -o lax --scheme nf4 --tensor embed=fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 32 -q --resume --strict
? 8
2 tensor model\.embed_tokens\.weight: cannot resume: the earlier run was without --strict: is no linear of a decoder block

# A file name can be any bytes.
$ name=$(printf 'm\377.safetensors') && cp "$NANO/model.safetensors" "$name" && qtool quantize "$name" -o bytes --scheme nf4 -q && qtool verify bytes -q && cat bytes/qtool.json
> "name": "m\?\.safetensors"

# Data that nothing uses.
$ qtool quantize "$NANO" -o unused --scheme fp6:method=rtn --data "$NANO/calib.txt" --samples 2 --seqlen 32
2 warning: no scheme here uses calibration data

# A head that is tied to the embedding and stored all the same needs the embedding's scheme.
need command -v python3
$ cp -r "$NANO" tied && python3 -c 'import json,struct;p="tied/model.safetensors";d=open(p,"rb").read();n=struct.unpack("<Q",d[:8])[0];h=json.loads(d[8:8+n]);b=d[8+n:];e=h["model.embed_tokens.weight"];s,t=e["data_offsets"];h["lm_head.weight"]=dict(e,data_offsets=[len(b),len(b)+t-s]);j=json.dumps(h).encode();j+=b" "*(-len(j)%8);open(p,"wb").write(struct.pack("<Q",len(j))+j+b+b[s:t])'
$ qtool quantize tied -o t --scheme nf4 --tensor embed_tokens=int8 -q
? 4
2 tied/model\.safetensors: tensor lm_head\.weight: scheme none, but model\.embed_tokens\.weight.* ties it, has int8
$ qtool plan tied --scheme nf4 --tensor lm_head=int8
? 4
2 tensor lm_head\.weight: scheme int8.* has none: both need the same
$ test ! -e t && qtool quantize tied -o t --scheme nf4 --tensor 'embed_tokens|lm_head=int8' -q && qtool eval t --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q

# Weights that a rounded scale takes beyond the largest FP32 number.
$ mkdir huge && python3 -c 'import json,struct;j=json.dumps({"model.layers.0.mlp.up_proj.weight":{"dtype":"F32","shape":[16,256],"data_offsets":[0,16384]}}).encode();j+=b" "*(-len(j)%8);open("huge/model.safetensors","wb").write(struct.pack("<Q",len(j))+j+struct.pack("<4096f",3.4028234663852886e38,*[i%9-4 for i in range(4095)]))'
$ qtool quantize huge -o h --scheme nf4 -q
? 3
2 huge/model\.safetensors: tensor model\.layers\.0\.mlp\.up_proj\.weight: values are so near the largest FP32 number
$ test ! -e h && test ! -e h.partial

# And such small ones that all become 0: no figure calls that good.
$ mkdir tiny && python3 -c 'import json,struct;j=json.dumps({"model.layers.0.mlp.up_proj.weight":{"dtype":"F32","shape":[16,256],"data_offsets":[0,16384]}}).encode();j+=b" "*(-len(j)%8);open("tiny/model.safetensors","wb").write(struct.pack("<Q",len(j))+j+struct.pack("<4096I",*[1+i%7 for i in range(4096)]))'
$ qtool quantize tiny -o t0 --scheme int8 -q && grep '"cosine"' t0/qtool.json
> "cosine": 0[,.} ]
