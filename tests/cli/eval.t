$ qtool eval "$NANO" --data "$NANO/eval.txt" --windows 4 --progress plain
> ^data +4 windows of 512 tokens, 2044 scored$
> ^perplexity +1[0-9]\.[0-9]{4} \+- [0-9.]+$
>! reference
2 ^qtool eval: eval done in

$ qtool quantize "$NANO" -o nf4 --scheme nf4:g=64 -q
$ qtool eval nf4 --ref "$NANO" --data "$NANO/eval.txt" --windows 4 -q --gate 'ppl_ratio<1.5,ppl_ratio>1.01,same_top>0.5'
> ^perplexity +1[0-9]\.
> ^reference +1[0-9]\.[0-9]{4} \([+-][0-9.]+ \+- [0-9.]+ %\)$
> ^KL divergence +0\.[0-9]{6} \+- 0\.[0-9]{6} mean, 0\.[0-9]{6} median, [0-9.]+ at 99\.9 % \(nats\)$
> ^same top token +[0-9.]+ %$
> ^gate  passed ppl_ratio < 1\.5: 1\.[0-9]+$
> ^gate  passed ppl_ratio > 1\.01: 1\.[0-9]+$
> ^gate  passed same_top > 0\.5: 0\.[0-9]+$
2-

$ qtool eval nf4 --ref "$NANO" --data "$NANO/eval.txt" --windows 4 -q --gate 'kld_mean<1e-9,ppl<100'
? 5
> ^perplexity
> ^gate  failed kld_mean < 1e-09: 0\.
> ^gate  passed ppl < 100: 1
2 ^qtool eval: gate failed: kld_mean is 0\.[0-9]+, required < 1e-09$

$ qtool eval "$NANO" --ref "$NANO" --data "$NANO/eval.txt" --windows 2 -q --gate 'kld_p999<=0,same_top>=1,rms_dp<=0,ppl_ratio<=1,ppl_ratio>=1'

# Logits: a .npy file of 128 + 4 x 8 x 1024 bytes, never over an existing file.
$ printf '\001\000\002\000\003\000\004\000\005\000\006\000\007\000\010\000' >eight.u16
$ qtool eval "$NANO" --data eight.u16 --seqlen 4 -q --logits logits.npy && wc -c <logits.npy && head -c 6 logits.npy | tail -c 5
> ^data
> ^perplexity
> ^16512$
> ^NUMPY$

$ qtool eval "$NANO" --data eight.u16 --seqlen 4 -q --logits logits.npy
? 2
>-
2 logits\.npy: exists already

# A file that cannot be written completely does not exist.
$ trap '' XFSZ; ulimit -f 4; qtool eval "$NANO" --data eight.u16 --seqlen 4 -q --logits large.npy
? 6
2 large\.npy\.[0-9]+\.partial: cannot write: File too large
$ ls
>! large
$ qtool eval "$NANO" --data eight.u16 --seqlen 4 -q --logits nowhere/logits.npy
? 2
2 ^qtool eval: nowhere: does not exist

# A gate that needs --ref is refused before any work.
$ qtool eval nf4 --data "$NANO/eval.txt" --windows 4 -q --gate 'ppl<100,kld_mean<1'
? 2
>-
2 --gate 'ppl<100,kld_mean<1' needs --ref

# A container has all files that eval needs.
$ cp nf4/tokenizer.json nf4/config.json . && qtool eval nf4 --data "$NANO/eval.txt" --windows 1 -q
> ^perplexity

# Token ids: the first 12 of a file, little-endian.
$ printf '\001\000\002\000\003\000\004\000\005\000\006\000\007\000\010\000\011\000\012\000\013\000\014\000' >ids.u16
$ qtool eval "$NANO" --data ids.u16 --seqlen 4 -q
> ^data +3 windows of 4 tokens, 9 scored$

$ printf '\001\000\377\377\003\000\004\000' >big.u16 && qtool eval "$NANO" --data big.u16 --seqlen 4 -q
? 3
>-
2 big\.u16.*65535

$ qtool eval "$NANO" --data ids.u16 -q
? 3
2 ids\.u16: the data has 12 tokens, less than one window of 512

$ printf 'ab\377cd' >bad.txt && qtool eval "$NANO" --data bad.txt -q
? 3
2 bad\.txt: .*UTF-8

$ : >empty.txt && qtool eval "$NANO" --data empty.txt -q
? 3
2 empty\.txt: the data has

$ qtool eval "$NANO" --data nowhere.txt -q
? 3
2 nowhere\.txt: 

# Windows are as short as the models need, unless --seqlen is given.
$ head -c 256 /dev/zero >zeros.u16 && qtool eval $MODELS/llama --data zeros.u16 -q
> ^data +2 windows of 64 tokens, 126 scored$
$ cp -r $MODELS/llama short && chmod -R u+w short && sed '/max_position_embeddings/s/64/32/' $MODELS/llama/config.json >short/config.json && qtool eval $MODELS/llama --ref short --data zeros.u16 -q
> ^data +4 windows of 32 tokens, 124 scored$
$ qtool eval $MODELS/llama --ref short --data zeros.u16 --seqlen 64 -q
? 2
2 short: windows of 64 tokens exceed the model's 32 positions

# Models that cannot be run.
$ cp -r "$NANO" odd && chmod -R u+w odd && sed 's/"llama"/"alpaca"/' "$NANO/config.json" >odd/config.json && qtool eval odd --data ids.u16
? 4
2 alpaca

$ cp "$NANO/config.json" odd && rm odd/tokenizer.json && qtool eval odd --data "$NANO/eval.txt"
? 3
2 ^qtool eval: odd: there is no tokenizer: tokenizer\.json, .* or tokenizer\.model; only data that is token ids
$ touch odd/vocab.json odd/merges.txt && qtool eval odd --data "$NANO/eval.txt"; rc=$?; rm odd/vocab.json odd/merges.txt; exit $rc
? 3
2 ^qtool eval: odd: the tokenizer is in vocab\.json and merges\.txt, which qtool does not read; make tokenizer\.json

$ qtool eval odd --data ids.u16 --seqlen 4 -q
> ^perplexity

# The tokenizer has a token that the model lacks.
$ cp "$NANO/tokenizer.json" odd && sed -i 's/"added_tokens": \[/&{"id":1024,"content":"<more>"},/' odd/tokenizer.json && echo 'once <more>' >more.txt && qtool eval odd --data more.txt --seqlen 2 -q
? 3
2 more\.txt: the tokenizer gives id 1024, but the model's vocabulary has 1024 ids

# same A B: two documents that differ in the name of the data at most.
$ printf 'for f; do grep -v "^  .data.: " $f >$f.same; done; cmp $1.same $2.same\n' >same

# The same text with a BOM, and compressed.
$ head -c 3000 "$NANO/eval.txt" >part.txt && printf '\357\273\277' | cat - part.txt >bom.txt && qtool eval "$NANO" --data part.txt --seqlen 64 -q --json >a && qtool eval "$NANO" --data bom.txt --seqlen 64 -q --json >b && sh same a b
$ head -c 3000 "$NANO/eval.txt" >part.txt && gzip -k part.txt && qtool eval "$NANO" --data part.txt --seqlen 64 -q --json >a && qtool eval "$NANO" --data part.txt.gz --seqlen 64 -q --json >b && sh same a b

# .jsonl: the "text" of every line; other members are ignored; U+0000 is an ordinary character.
$ printf 'The\000 old man,\nsaid: \303\251' >doc.txt && qtool eval "$NANO" --data doc.txt --seqlen 5 -q --json >c
$ printf '\357\273\277\r\n \n{"id":98765432109876543210,"text":"The\\u0000 old man,\\nsaid: \\u00e9"}\r\n{"text":""}' >doc.jsonl && qtool eval "$NANO" --data doc.jsonl --seqlen 5 -q --json >d && sh same c d
$ (cat doc.jsonl; printf '\n{"text":7}') >seven.jsonl && qtool eval "$NANO" --data seven.jsonl --seqlen 5 -q
? 3
>-
2 seven\.jsonl: line 5: "text" must be a string, not a real number
$ printf 'Once upon a time there was a girl named Lily.' >whole.txt && printf '{"text":"Once upon a time"}\r\n \t\r\n\n{"id":7,"text":" there was a girl"}\n{"text":" named Lily."}' >lines.jsonl && qtool eval "$NANO" --data whole.txt --seqlen 4 -q --json >one && qtool eval "$NANO" --data lines.jsonl --seqlen 4 -q --json >two && sh same one two
$ printf '{"text":"Once"}\n{"text":"upon}\n' >lines.jsonl && qtool eval "$NANO" --data lines.jsonl -q
? 3
2 lines\.jsonl: line 2, column

# Members of a .gz are concatenated; other data between or after them is an error.
$ (head -c 1000 part.txt | gzip; tail -c +1001 part.txt | gzip) >members.txt.gz && qtool eval "$NANO" --data members.txt.gz --seqlen 64 -q --json >b && sh same a b
$ cp part.txt plain.txt.gz && qtool eval "$NANO" --data plain.txt.gz --seqlen 64 -q
? 3
>-
2 plain\.txt\.gz: not a gzip file, but plain text that begins with
$ (cat part.txt.gz; echo junk) >junk.txt.gz && qtool eval "$NANO" --data junk.txt.gz --seqlen 64 -q
? 3
>-
2 junk\.txt\.gz: gzip: incorrect header check
$ (cat part.txt.gz; printf '\000') >zero.txt.gz && qtool eval "$NANO" --data zero.txt.gz --seqlen 64 -q
? 3
2 zero\.txt\.gz: gzip: ends too early
$ head -c 500 part.txt.gz >short.txt.gz && qtool eval "$NANO" --data short.txt.gz --seqlen 64 -q
? 3
2 short\.txt\.gz: gzip: ends too early
$ : >none.txt.gz && qtool eval "$NANO" --data none.txt.gz --seqlen 64 -q
? 3
2 none\.txt\.gz: the file is empty

# w4ax activations and a 4-bit KV cache.
$ qtool quantize "$NANO" -o w4ax --scheme w4ax -q
? 2
2 calibration data \(--data\)

$ qtool quantize "$NANO" -o w4ax --scheme w4ax --data "$NANO/calib.txt" --samples 2 --seqlen 64 -q && qtool eval w4ax --data "$NANO/eval.txt" --windows 1 --kv 4 -q
> ^bpw
> ^perplexity

$ qtool eval "$NANO" --data ids.u16 --kv 5 -q
? 2
2 kv

# A damaged container is refused: its figures would look plausible.
$ cp -r nf4 bad && printf 'damage' | dd of=bad/model.safetensors bs=1 seek=$(($(wc -c <nf4/model.safetensors) - 100000)) conv=notrunc status=none && qtool eval bad --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q
? 3
2 bad/model\.safetensors: tensor [^ ]+: the data's CRC-32 is [0-9a-f]{8}, the manifest's [0-9a-f]{8}: the file is damaged
$ qtool eval "$NANO" --ref bad --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q
? 3
2 the file is damaged

# With too little address space OpenBLAS would retry forever to get its buffers.
need sh -c 'ulimit -v 150000; timeout 20 qtool version'
$ (ulimit -v 190000; exec timeout 20 qtool eval "$NANO" --data "$NANO/eval.txt" --windows 1 --seqlen 64 --threads 1 -q)
? 6
2 OpenBLAS needs 128 MB of address space
$ (ulimit -v 900000; exec timeout 20 qtool eval "$NANO" --data "$NANO/eval.txt" --windows 1 --seqlen 64 --threads 2 -q)
> ^perplexity
$ for v in 300000 350000 400000 500000 700000; do for t in 1 2 4; do (ulimit -v $v; timeout 20 qtool quantize "$NANO" -o limited --scheme nf3 --data "$NANO/calib.txt" --samples 2 --seqlen 64 --threads $t -q --force >/dev/null 2>&1); echo "status $?"; done; done
>! ^status [^06]
> ^status 0
> ^status 6

# OpenMP would end the program if its threads had too small a stack.
$ OMP_STACKSIZE=16k qtool eval "$NANO" --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q
? 2
2 ^qtool eval: OMP_STACKSIZE=16k: threads need stacks of 1 MB or more
$ OMP_STACKSIZE=' 2 m ' qtool eval "$NANO" --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q

# A perplexity that is infinite or undefined is printed with the reason. (A head of huge numbers; logits that overflow.)
$ cp -r "$MODELS/granite" loud && chmod -R u+w loud && sed -i 's/"logits_scaling": [0-9.]*/"logits_scaling": 1e-6/' loud/config.json && qtool eval loud --data loud/ids.u16 --seqlen 16 -q
> ^perplexity  inf: exp of the mean loss, 1\.3[0-9]*e\+07 nats per token, overflows$
$ qtool eval loud --ref "$MODELS/granite" --data loud/ids.u16 --seqlen 16 -q --gate 'ppl<=1e300'
? 5
2 ppl is inf
$ cp -r "$MODELS/llama" huge && chmod -R u+w huge && sed -i 's/"format":"pt"/"format":"p"/;s/\("lm_head.weight":{"dtype":"\)F16/\1BF16/' huge/model.safetensors && n=$(od -An -tu8 -N8 huge/model.safetensors) && for i in $(seq 32); do printf '\177\177'; done | dd of=huge/model.safetensors bs=1 seek=$((n + 8)) conv=notrunc status=none && qtool eval huge --data huge/ids.u16 --seqlen 16 -q
? 3
> ^perplexity  nan: the logits are not finite at token [0-9]+ of the data$
2 huge: the logits are not finite at token

# An encoder without a head has no perplexity.
$ mkdir bert && cp $MODELS/bert/config.json bert && LC_ALL=C sed 's/"cls\./"xyz./g' $MODELS/bert/model.safetensors >bert/model.safetensors
$ qtool quantize bert -o encoder --scheme fp6:e=2 --tensor 'layer.*(dense|query|key|value).weight=fp6:e=2' --data $MODELS/bert/ids.u16 --seqlen 20 -q
$ qtool inspect encoder
> encoder.layer.1.output.dense.weight .*method=gptq
$ qtool eval encoder --ref bert --data $MODELS/bert/ids.u16 --seqlen 20 -q --gate 'hidden_error<=0.05,hidden_error>0'
> ^data +2 windows of 20 tokens, 40 compared$
> ^hidden states +relative error 0\.0[0-9]+ \+- 0\.
>! perplexity
$ qtool eval encoder --ref bert --data $MODELS/bert/ids.u16 --seqlen 20 -q --json | jq -e '.ppl == null and .hidden_error > 0 and .hidden_error_se > 0'
$ qtool eval encoder --data $MODELS/bert/ids.u16 -q
? 4
2 has no perplexity: compare its hidden states with --ref
$ qtool eval encoder --ref bert --data $MODELS/bert/ids.u16 --seqlen 20 -q --gate 'ppl<=3'
? 5
2 ppl is undefined
