# A GGUF file is read like the checkpoint that it was made from: the dense export of the same
# container has the same weights. TMPDIR is empty after each command.
$ mkdir tmp && qtool quantize "$NANO" -o c --scheme none --tensor 'layers.0.*=int8' -q >/dev/null && qtool export c -o g --format gguf -q >/dev/null && qtool export c -o dense --format dense -q >/dev/null
$ export TMPDIR=$PWD/tmp; qtool inspect g/model.gguf
> ^model\.layers\.0\.self_attn\.q_proj\.weight +F16 from Q8_0 +256x256
> ^model\.layers\.1\.self_attn\.q_proj\.weight +F16 +256x256
> ^model +llama: 3 layers, hidden 256, vocabulary 1024, heads 4 \(2 key/value\)$
$ export TMPDIR=$PWD/tmp; for m in g/model.gguf dense; do qtool quantize $m -o q-${m%/*} --scheme nf4 -q >/dev/null; qtool verify q-${m%/*} --source $m -q; qtool eval q-${m%/*} --data "$NANO/eval.txt" --windows 4 -q; done >both; grep -c 'tensors .*21 quantized' both; sort both | uniq -c | grep -v '^ *2 .*' ; ls tmp
> ^2$
> ^ *1 size
>! perplexity
>! sqnr
$ export TMPDIR=$PWD/tmp; qtool quantize g -o again --scheme nf4 -q --threads 1 >/dev/null && diff -r -x qtool-report.json again q-g && qtool verify again --source g/model.gguf -q >/dev/null && qtool quantize g/model.gguf -o again --scheme nf4 -q --resume | grep -c 'already complete'
> ^1$
$ export TMPDIR=$PWD/tmp; qtool quantize g -o cal --scheme nf3 --data "$NANO/calib.txt" --samples 4 --seqlen 64 -q && ls cal
> ^tokenizer_config\.json$
> ^config\.json$
$ grep -c . q-g/config.json >/dev/null && grep '"rms_norm_eps": 1e-5,' q-g/config.json && grep -c '"model_type": "llama"' q-g/config.json
> rms_norm_eps
> ^1$
$ ls tmp | wc -l
> ^0$

# Files in numbers; the directory; other files.
$ qtool export c -o many --format gguf --max-shard 1 -q >/dev/null && qtool plan many --scheme nf4 >1 && qtool plan many/model-00002-of-*.gguf --scheme nf4 | diff 1 - && rm many/model-00003-of-* && qtool plan many --scheme nf4
? 3
2 only [0-9] of the [0-9] files to which model-00001-of-0000[0-9]\.gguf belongs
$ mkdir two && cp g/model.gguf two/a.gguf && cp g/model.gguf two/b.gguf && qtool plan two --scheme nf4
? 3
2 two: has several GGUF files: give the name of one, such as two/a\.gguf$
$ cp g/model.gguf x.safetensors && qtool inspect x.safetensors
? 3
2 not a safetensors file, but a GGUF file: a checkpoint of this kind has a name that ends in \.gguf
$ cp "$NANO/model.safetensors" x.gguf && qtool inspect x.gguf
? 3
2 x\.gguf: not a GGUF file, but a safetensors file
$ head -c 100000 g/model.gguf >cut.gguf && qtool inspect cut.gguf
? 3
2 its data reaches beyond the end of the file \(100000 bytes\): the file is incomplete
$ qtool inspect none.gguf
? 3
2 none\.gguf: cannot open: No such file or directory
$ TMPDIR=$PWD/nowhere qtool inspect g/model.gguf
? 6
2 nowhere/qtool-.*: cannot create a temporary directory: No such file or directory

# A tokenizer.json beside the file is used; one that is not known has to be there.
$ cp g/model.gguf other.gguf && LC_ALL=C sed -i 's/gpt-2/nines/' other.gguf && qtool inspect other.gguf
? 4
2 the splitting tokenizer\.ggml\.pre = 'nines' is not supported: put the tokenizer\.json of the original model beside
$ cp "$NANO/tokenizer.json" . && qtool eval other.gguf --data "$NANO/eval.txt" --windows 4 -q >a && qtool eval g --data "$NANO/eval.txt" --windows 4 -q | diff a - && rm tokenizer.json

# SentencePiece: merges from scores.
$ mkdir src && cp "$NANO"/*.json "$NANO/model.safetensors" src && awk 'BEGIN { printf "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"▁\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"▁\"}]},\"pre_tokenizer\":null,\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":[1],\"tokens\":[\"<s>\"]}}},\"added_tokens\":[{\"id\":1,\"content\":\"<s>\",\"special\":true,\"normalized\":false}],\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"byte_fallback\":true,\"fuse_unk\":true,\"vocab\":{\"<unk>\":0,\"<s>\":1"; for (i = 0; i < 256; i++) printf ",\"<0x%02X>\":%d", i, 3 + i; printf ",\"▁\":259,\"t\":260,\"h\":261,\"th\":262,\"▁th\":263,\"▁t\":264},\"merges\":[\"t h\",\"▁ t\",\"▁t h\",\"▁ th\"]}}" }' >src/tokenizer.json && qtool quantize src -o spm --scheme none --tensor 'layers.0.*=int8' -q >/dev/null && qtool export spm -o spm-g --format gguf -q >/dev/null && qtool export spm -o spm-d --format dense -q >/dev/null
$ for m in spm-g spm-d; do qtool eval $m --data "$NANO/eval.txt" --windows 4 -q >$m.txt; done; diff spm-g.txt spm-d.txt && grep bos spm-g.txt
> ^bos +before every document

# A signal leaves no temporary directory.
$ export TMPDIR=$PWD/tmp; qtool eval g --data "$NANO/eval.txt" -q & pid=$!; while kill -0 $pid 2>/dev/null && ! ls tmp | grep -q .; do sleep 0.01; done; kill -TERM $pid; wait $pid
? 75
2 ^qtool: interrupted$
$ ls tmp | wc -l
> ^0$
