# Golden bytes, made after the package gguf had decoded them to the weights of the container, and
# llama.cpp had run them (tests/oracle).
$ for s in int4:g=32 int4:g=128 int8 int4:g=32,zero=group; do qtool quantize "$NANO" -o "$s" --scheme "$s" -q >/dev/null; qtool export "$s" -o "out-$s" --format gguf --lossy -q >/dev/null; sha256sum <"out-$s/model.gguf"; done
> ^d6e9c780ad02d5ca961cb407e6d042bb7202e4b47a9b173d5b51609cc0a3d973
> ^0115bce2e5a1901a6ee6d17e7959f9ae3ffd099b2977effa544610665c0fc275
> ^834904c65903b5941b20c976354188aabda878b1b514ee6fa352e4c58dc90e71
> ^c8d62f0c50f1fb7e9cbe3125c432d712a83b7a8b23ea19d1911f61db6e0fdd13
2-
$ cd out-int8 && sha256sum -c SHA256SUMS && ls
> ^model\.gguf: OK
>! config\.json
$ qtool export int4:g=32,zero=group -o x --format gguf
? 4
2 gguf cannot hold int4:.*zero=group.* exactly: zero-points become offsets of 16 bits; --lossy rounds once
$ qtool export int4:g=32,zero=group -o x --format gguf --lossy -q
> ^rounded +21 tensors, at most 0\.000[0-9]* of their norm

# Split files: the first has all keys. The bytes do not depend on the number of threads.
$ qtool export int8 -o many --format gguf --max-shard 1 -q --threads 1 >/dev/null && qtool export int8 -o many2 --format gguf --max-shard 1 -q --threads 4 >/dev/null && diff -r many many2 && ls many && cat many/*.gguf | sha256sum && grep -c tokenizer.ggml.tokens many/*.gguf
> ^model-00001-of-00003\.gguf$
> ^model-00003-of-00003\.gguf$
> ^b7a48313db3b39a5d66120239dfe32a3b4d9a9c65f5b65b697e514ce1a61c3a9
> ^many/model-00001-of-00003\.gguf:1$
> ^many/model-00002-of-00003\.gguf:0$
$ qtool export int8 --format gguf --dry-run --json
> "dry_run": true
> "quantized": 21

# Other dtypes of what is copied; experts are stacked, rows of heads reordered.
$ qtool export int8 -o bf --format gguf --dtype bfloat16 -q >/dev/null && qtool export int8 -o f32 --format gguf --dtype float32 -q >/dev/null && du -b bf/model.gguf f32/model.gguf
> ^2440320\s
> ^2964608\s

# Refusals come before any work.
$ mkdir src && cp "$NANO"/*.json "$NANO/model.safetensors" src && echo 'd=$1; shift; rm -rf c; qtool quantize $d -o c --scheme none --tensor "layers.0.self_attn.k_proj=${SCHEME:-int8}" -q >/dev/null && qtool export c -o x3 --format gguf -q' >try
$ SCHEME=nf4 sh ./try src
? 4
2 tensor model\.layers\.0\.self_attn\.k_proj\.weight: gguf cannot hold nf4:.*: it has no such type; int4, int8
$ SCHEME=int8:zero=group sh ./try src
? 4
2 no zero-points of 8 bits; int8 without them fits
$ qtool quantize "$MODELS/llama" -o odd --scheme int8 -q >/dev/null && qtool export odd -o x3 --format gguf
? 4
2 mlp\.down_proj\.weight: gguf cannot hold int8.*: 48 channels are no multiple of 32
$ cp -r src notok && rm notok/tokenizer.json && sh ./try notok
? 4
2 c/tokenizer\.json: gguf files have the tokenizer in them, but this file is missing
$ cp -r src alpaca && sed -i 's/"llama"/"alpaca"/' alpaca/config.json && sh ./try alpaca
? 4
2 'model_type': alpaca is not supported
$ cp -r src helium && sed -i 's/"llama"/"helium"/' helium/config.json && sh ./try helium
? 4
2 gguf: the model_type 'helium' is not in the table of architectures \(llama, mistral, .*\)
$ cp -r src gelu && sed -i 's/"silu"/"gelu"/' gelu/config.json && sh ./try gelu
? 4
2 llama\.cpp computes 'llama' with another activation function
$ cp -r src small && sed -i 's/"vocab_size": 1024/"vocab_size": 1023/' small/config.json && sh ./try small
? 3
2 model\.embed_tokens\.weight: shape is
$ qtool export int8 -o many --format gguf
? 2
2 exists already; --force replaces it
$ qtool export int8 -o many --format gguf --force -q >/dev/null && cmp many/model.gguf out-int8/model.gguf && ls many
>! 00001
2-
$ cp -r int8 bad && printf '\377' | dd of=bad/model.safetensors bs=1 seek=1000000 conv=notrunc 2>/dev/null && qtool export bad -o x3 --format gguf
? 3
2 the data differs from the manifest's CRC-32

# The chat template: a file, or a member of tokenizer_config.json.
$ cp -r src chat && printf '{{ bos }}' >chat/chat_template.jinja && sh ./try chat >/dev/null && grep -ac 'tokenizer.chat_template.*{{ bos }}' x3/model.gguf && rm -rf x3
> ^1$
$ rm chat/chat_template.jinja && sed -i 's/"backend"/"chat_template":[{"name":"tool","template":"no"},{"name":"default","template":"{{ eos }}"}],"backend"/' chat/tokenizer_config.json && sh ./try chat >/dev/null && grep -ac 'tokenizer.chat_template.*{{ eos }}' x3/model.gguf && rm -rf x3
> ^1$
$ printf '\377' >chat/chat_template.jinja && sh ./try chat
? 3
2 chat_template\.jinja: the chat template is not UTF-8 text

# ignore_merges, where llama.cpp does not have it, makes no difference if merges make all tokens.
$ mkdir im && cp src/*.json src/model.safetensors im && printf '{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"model":{"type":"BPE","ignore_merges":true,"vocab":{"a":0,"b":1,"ab":2,"aba":3},"merges":["a b","ab a"]}}' >im/tokenizer.json && sh ./try im >/dev/null && rm -rf x3
$ sed -i 's/"aba":3/"aba":3,"abb":4/' im/tokenizer.json && sh ./try im
? 4
2 its pre-tokenizer is not in the table of those that llama\.cpp has \(ignore_merges true; words;\)
$ sed -i 's/"BPE"/"WordLevel"/; s/,"merges":.*\]//' im/tokenizer.json && sh ./try im
? 4
2 llama\.cpp has no tokenizer model but BPE in these files

# Tokenizers that llama.cpp does not have.
$ cp -r src pre && sed 's/"use_regex": *true/"use_regex":false/' src/tokenizer.json >pre/tokenizer.json && sh ./try pre
? 4
2 its pre-tokenizer is not in the table of those that llama\.cpp has \(ignore_merges false; bytes;\)
$ cp -r src low && sed 's/"normalizer": *null/"normalizer":{"type":"Lowercase"}/' src/tokenizer.json >low/tokenizer.json && sh ./try low
? 4
2 llama\.cpp has no normalizer 'Lowercase'
$ ls -d x3* 2>/dev/null | wc -l
> ^0$

# The BPE of SentencePiece: scores from merges, if these are all ways to make a token.
$ cp -r src spm && awk 'BEGIN { printf "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"▁\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"▁\"}]},\"pre_tokenizer\":null,\"added_tokens\":[{\"id\":1,\"content\":\"<s>\",\"special\":true,\"normalized\":false},{\"id\":2,\"content\":\"▁▁\",\"special\":false,\"normalized\":false}],\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"byte_fallback\":true,\"fuse_unk\":true,\"vocab\":{\"<unk>\":0,\"<s>\":1,\"▁▁\":2"; for (i = 0; i < 256; i++) printf ",\"<0x%02X>\":%d", i, 3 + i; printf ",\"▁\":259,\"t\":260,\"h\":261,\"th\":262,\"▁th\":263,\"▁t\":264},\"merges\":[\"t h\",\"▁ t\",\"▁t h\",\"▁ th\"]}}" }' >spm/tokenizer.json && sh ./try spm && mv x3 spm-out && grep -c 'tokenizer.ggml.scores' spm-out/model.gguf && tail -c +1 spm-out/model.gguf | tr '\0' '\n' | grep -a '^tokenizer.ggml.add_space_prefix'
> ^[0-9]+$
> add_space_prefix
$ cp -r spm less && sed -i 's/,"▁t h"//' less/tokenizer.json && sh ./try less
? 4
2 llama\.cpp has no BPE with U\+2581 whose merges are not those of SentencePiece
$ cp -r spm bytes && sed -i 's/"<0x41>"/"A"/' bytes/tokenizer.json && sh ./try bytes
? 4
2 llama\.cpp has no BPE with U\+2581 without tokens for all bytes
$ cp -r spm split && sed -i 's/"pre_tokenizer":null/"pre_tokenizer":{"type":"Digits"}/' split/tokenizer.json && sh ./try split
? 4
2 llama\.cpp has no such normalizers and pre-tokenizers

# A file is read as the checkpoint that the dense export of the same container is. Models with
# windows are read in windows of the context length that the file has.
$ printf '%s\n' 'm=$MODELS/$1; rm -rf m c g d; mkdir m; cp "$m/config.json" "$m/model.safetensors" m' "printf '{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}' >m/tokenizer.json" 'qtool quantize m -o c --scheme none --tensor "^(?!.*layers).*embed_tokens=int8:g=32" -q >/dev/null && qtool export c -o g --format gguf -q >/dev/null && qtool export c -o d --format dense --dtype float16 -q >/dev/null && for i in g d; do qtool eval $i --data "$m/ids.u16" --seqlen ${2:-40} -q; done | grep perplexity | uniq -c' >back
$ for m in llama llama3 llama_longrope llama_yarn mistral_full "mistral_window 7" mixtral qwen2 qwen3 qwen2_moe qwen3_moe gpt_oss_moe glm4_moe glm4_moe_all ministral3 mistral3_images "phi3 9" phi3_long_old_keys olmo2 granite seed_oss ernie4_5_plain exaone4_full; do sh ./back $m | grep -c '^ *2 ' || echo "differs: $m"; done | sort | uniq -c
> ^ *23 1$
>! differs

$ sh ./back gpt_oss_moe >/dev/null; cp -r m gpt && sed -i 's/"rope_theta": 200.0/"rope_theta": 10.0/' gpt/config.json && qtool quantize gpt -o gpt-c --scheme none --tensor embed_tokens=int8:g=32 -q >/dev/null && qtool export gpt-c --format gguf --dry-run
> ^rounded +none
2 llama\.cpp ignores "truncate": false of YaRN, in every GGUF file of this model: frequencies of the rotary embedding differ by up to [0-9.]+ %

$ sh ./back glm4_moe >/dev/null; qtool export c --format gguf --dry-run
> ^rounded +none
2 [0-9]+ tensors of MTP layers are left out
$ sh ./back glm4_moe_groups
? 4
2 llama\.cpp computes 'glm4moe' with experts that are not in groups

# Latent attention: kv_b_proj becomes two tensors, decoded. The bytes are those of files that
# llama.cpp computed the logits of transformers with.
$ for r in 'kv_b_proj=int8:g=32' '^(?!.*layers).*embed_tokens=int8:g=32'; do rm -rf m; cp -r "$MODELS/deepseek_v3_wide" m && cp gpt/tokenizer.json m && qtool quantize m -o c --scheme none --tensor "$r" --force -q >/dev/null && qtool export c -o g --format gguf --force -q >/dev/null; sha256sum <g/model.gguf; done
> ^0d123fcf963a35f2df3412dba342668d7de6f1b131e5e780d37fe90122b44efc 
> ^312e7c61c1dfa8a087aa10d9986c2334072193673b56a48c55ae2729294bf21d 
$ sed -i 's/"mscale": *1.0/"mscale": 0.5/' m/config.json && qtool quantize m -o c --scheme none --tensor kv_b_proj=int8 --force -q >/dev/null; qtool export c --format gguf --dry-run
? 4
2 llama\.cpp computes 'deepseek2' with YaRN whose mscale and mscale_all_dim are equal

# Llama 4: attention within chunks, whose sizes llama.cpp has in its code.
$ rm -rf m; cp -r "$MODELS/llama4_wide" m && cp gpt/tokenizer.json m && qtool quantize m -o c --scheme none --tensor feed_forward=int8:g=32 --force -q >/dev/null && qtool export c -o g --format gguf --force -q >/dev/null && sha256sum <g/model.gguf
> ^865015cb8b4f0c78ec45138aff946868470ea21d4f8c39b3683eab875224e68b 
$ for e in 's/"floor_scale": 8192/"floor_scale": 4096/' 's/"attention_chunk_size": 8192/"attention_chunk_size": 4096/' 's/"use_qk_norm": true/"use_qk_norm": false/'; do cp "$MODELS/llama4_wide/config.json" m && sed -i "$e" m/config.json && rm -rf c && qtool quantize m -o c --scheme none --tensor layers.0.self_attn.v_proj=int8 --force -q >/dev/null && qtool export c --format gguf --dry-run; done 2>&1
? 4
> computes 'llama4' with attn_scale 0\.1 and floor_scale 8192$
> computes 'llama4' with attention within chunks of 8192 tokens$
> computes 'llama4' with norms of queries and keys$

# EXAONE 4: llama.cpp has windows in models of 64 layers. Seed-OSS: no bias but of queries, keys, values.
$ sh ./back exaone4
? 4
2 llama\.cpp computes 'exaone4' with a rotary embedding in all layers
$ sh ./back seed_oss_biased
? 4
2 _proj\.bias: gguf has no place for this tensor

# Gated DeltaNet as llama.cpp computes it.
$ cp -r "$MODELS/qwen3_5" q35 && cp m/tokenizer.json q35 && qtool quantize q35 -o q35-c --scheme none --tensor 'layers.0.self_attn.o_proj=int8:g=32' -q >/dev/null && qtool export q35-c -o x3 --format gguf
? 4
2 llama\.cpp computes 'qwen35' with keys and values of gated DeltaNet that have one size

# OLMo 3: a window in three of four layers, one base of both rotary embeddings.
$ cp "$MODELS/olmo3/config.json" olmo.json && mkdir olmo3 && cp "$MODELS/olmo3/model.safetensors" "$MODELS/olmo3/ids.u16" olmo3 && sed 's/"full_attention",/"sliding_attention",/; s/300.0/200.0/' olmo.json >olmo3/config.json && MODELS=$PWD sh ./back olmo3 | grep -c '^ *2 '; qtool inspect g | grep '^model  '
> ^1$
> ^model +olmo3: 
$ sed 's/"full_attention",/"sliding_attention",/' olmo.json >olmo3/config.json && MODELS=$PWD sh ./back olmo3
? 4
2 llama\.cpp computes 'olmo2' with one base of all rotary embeddings
$ cp olmo.json olmo3/config.json && MODELS=$PWD sh ./back olmo3
? 4
2 llama\.cpp computes 'olmo2' with a sliding window in

# The decoder of a multimodal model: names, options in text_config. It is read as a decoder alone.
$ for m in qwen2_5_vl qwen3_vl; do sh ./back $m | grep -c '^ *2 ' || echo "differs: $m"; grep -ac 'rope.dimension_sections' g/model.gguf; qtool inspect g | grep '^model  '; done
> ^1$
> ^model +qwen2: 
> ^model +qwen3: 
>! differs
$ qtool export c -o g --format gguf --dry-run
> ^rounded +none
2 [0-9]+ vision and audio tensors are left out: llama\.cpp reads these from another file \(mmproj\)

# The output is a directory.
$ qtool quantize src -o dir-q --scheme int8 -q >/dev/null && qtool export dir-q -o x.gguf --format gguf
? 2
2 ^qtool export: x\.gguf: this will be a directory, in which files are written: choose a name that does not end in \.gguf$
$ test ! -e x.gguf && qtool quantize src -o x.safetensors --scheme int8
? 2
2 x\.safetensors: this will be a directory
