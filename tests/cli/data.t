# The content of a --data file selects its kind. The same text has the same perplexity in all forms.
$ grep -E '.{40}' "$NANO/calib.txt" | head -n 60 | tr -d '\\"' >lines && sed 's/.*/{"text":"&"}/' lines >a.jsonl && qtool eval "$NANO" --data a.jsonl --windows 4 -q >ppl
$ for name in a.txt a.json a; do cp a.jsonl $name; qtool eval "$NANO" --data $name --windows 4 -q | cmp - ppl || exit 9; done
$ { printf ' [\n'; sed 's/.*/ {"text" : "&"},/; $s/,$//' lines; echo ']'; } >b.json && cp b.json b.txt && cp b.json b.jsonl && for x in json txt jsonl; do qtool eval "$NANO" --data b.$x --windows 4 -q | cmp - ppl || exit 9; done
$ { printf '['; sed 's/.*/"&",/; $s/,$//' lines | tr -d '\n'; echo ']'; } >c.json && cp c.json c.txt && for x in json txt; do qtool eval "$NANO" --data c.$x --windows 4 -q | cmp - ppl || exit 9; done
$ sed 's/.*/{\n  "n": [1, 2],\n  "text": "&"\n}/' lines >d.json && qtool eval "$NANO" --data d.json --windows 4 -q | cmp - ppl
$ gzip -c b.json >packed && qtool eval "$NANO" --data packed --windows 4 -q | cmp - ppl

# What Python writes beyond JSON is no obstacle outside of "text".
$ sed 's/.*/{"score":NaN,"low":[-Infinity, Infinity],"who":"\\ud800 \\udc00\\ud800","text":"&"}/' lines >e.jsonl && qtool eval "$NANO" --data e.jsonl --windows 4 -q | cmp - ppl
$ printf '{"text":"ok \\ufffd","a":"\\ud800"}\n{"text":"so \\ud800 so"}\n' >f.jsonl && qtool eval "$NANO" --data f.jsonl
? 3
>-
2 f\.jsonl: line 2: "text" has a lone surrogate
$ printf '{"text":NaN}\n' >f.jsonl && qtool eval "$NANO" --data f.jsonl
? 3
2 f\.jsonl: line 1: "text" must be a string, not NaN
$ printf '{"text":null}\n' >f.jsonl && qtool eval "$NANO" --data f.jsonl
? 3
2 f\.jsonl: line 1: "text" must be a string, not null

# Records of other forms.
$ printf '\n{"messages":[{"role":"user","content":"Hi"}]}\n' >g.jsonl && qtool calibrate "$NANO" --data g.jsonl -o o.qcal
? 3
>-
2 nano-llama: record in line 2 of g\.jsonl: the model has no chat template \(chat_template\.jinja, or "chat_template" in tokenizer_config\.json\)
$ printf '[{"text":"a"},\n{"conversations":[]}]' >g.txt && qtool eval "$NANO" --data g.txt
? 3
2 g\.txt: line 2: "conversations" must be an array with messages, not an empty one
$ printf '{"conversations":[{"from":"ghost","value":"Hu"}]}' >g.txt && qtool eval "$NANO" --data g.txt
? 3
2 g\.txt: line 1: "conversations"\[0\] is "from" 'ghost', which is no known speaker
$ printf '{"messages":[{"content":"Hu"}]}' >g.txt && qtool eval "$NANO" --data g.txt
? 3
2 g\.txt: line 1: "messages"\[0\] has neither "role" and "content" nor "from" and "value"
$ printf '{"prompt":"a","completion":"b"}' >g.txt && qtool eval "$NANO" --data g.txt
? 3
2 g\.txt: line 1: the record has no "text" or "messages", but "prompt", "completion"
$ printf '[1, 2,\n 3]\n' >g.txt && qtool eval "$NANO" --data g.txt
? 3
2 g\.txt: line 1: a record must be a string or an object with "text", not a real number
$ { head -n 2 a.jsonl; echo 'Once upon a time'; } >g.txt && qtool eval "$NANO" --data g.txt
? 3
2 g\.txt: line 3, column
$ printf '["a", "b"]\n"c"\n' >g.json && qtool eval "$NANO" --data g.json
? 3
2 g\.json: line 2: more data after the array
$ printf '["a", "b' >g.json && qtool eval "$NANO" --data g.json
? 3
2 g\.json: line 1, column
$ printf '["a",\n"b"' >g.json && qtool eval "$NANO" --data g.json
? 3
2 g\.json: line 2: the array does not end
$ printf '["a",]' >g.json && qtool eval "$NANO" --data g.json
? 3
2 g\.json: line 1: the array lacks an element
$ printf '["a" "b"]' >g.json && qtool eval "$NANO" --data g.json
? 3
2 g\.json: line 1: ',' or '\]' expected

# Prose may begin with a bracket or a brace.
$ for start in '[1] ' '[1]\n' '["A"] ' '[Once] ' '{Once} ' '{ ' '["A" ' 'GGUF and PAR1 are ' '\0\f'; do { printf "$start"; cat lines; } >h.txt; qtool eval "$NANO" --data h.txt --windows 1 -q >out || exit 9; grep -q perplexity out || exit 9; done

# What is no text is named.
$ for bytes in 'PAR1\1\0\0\0' 'version https://git-lfs.github.com/spec/v1\noid x' '<!DOCTYPE html><html>' '\50\265\57\375' 'BZh91AY\1\2' '\3757zXZ\0' 'PK\3\4\1\1' '%%PDF-1.7' '\200\4\225\1\2' '\377\376a\0b\0' 'a\0b\0c\0d\0e\0' 'ab\377'; do printf "$bytes" >i.txt; qtool eval "$NANO" --data i.txt; echo $?; done
> ^3$
>! perplexity
2 i\.txt: not UTF-8 text, JSON.*, but a Parquet file: convert it to JSON Lines
2 but a Git LFS pointer: fetch the file
2 but an HTML page
2 but a zstd file: decompress it
2 but a bzip2 file: decompress it
2 but an xz file: decompress it
2 but a zip archive
2 but a PDF document
2 but a Python pickle
2 but UTF-16
2 binary data of an unknown kind
2 not UTF-8 at byte 2

# Raw token ids are known by the name only, but nothing else is read as such.
$ head -c 4096 "$NANO/eval.txt" >j.u16 && cp a.jsonl j2.u16 && printf '\223NUMPY\1\0\166\0{' >j3.u16 && head -c 4096 "$NANO/model.safetensors" >j4.u16 && for f in j.u16 j2.u16 j3.u16 j4.u16; do qtool eval "$NANO" --data $f; echo $?; done
> ^3$
>! perplexity
2 j\.u16: not raw token ids, but plain text
2 j2\.u16: not raw token ids, but JSON text
2 j3\.u16: not raw token ids, but a \.npy array
2 j4\.u16: not raw token ids, but a safetensors file$

# A pattern that backtracks without end is named, with the place.
$ mkdir slow && cp "$NANO"/* slow && sed 's/"pre_tokenizer": *{/"pre_tokenizer":{"type":"Split","pattern":{"Regex":"(?:.|.|.|.){9}\\\\x{10ffff}|."},"behavior":"Isolated","invert":false},"x":{/' "$NANO/tokenizer.json" >slow/tokenizer.json && qtool eval slow --data "$NANO/calib.txt"
? 3
2 slow/tokenizer\.json: the regex '.*' takes too many steps at byte [0-9]* of the text

# No advice about weights.
$ { printf 'PK\003\004' && head -c 22 /dev/zero && printf '\005\000\000\000a.npy'; } >a.npz && qtool eval "$NANO" --data a.npz
? 3
2 but an \.npz archive of NumPy arrays$

# --windows reads no more than it needs, with the same result.
$ for i in 1 2 3 4 5 6 7 8 9; do cat "$NANO/calib.txt"; done >k.txt && qtool eval "$NANO" --data k.txt --windows 3 -q >first && qtool eval "$NANO" --data "$NANO/calib.txt" --windows 3 -q | cmp - first

# Otherwise memory would grow with the text. A sanitizer's build cannot run with little address space.
need sh -c 'ulimit -v 800000; timeout 20 qtool version'
$ head -c 30000000 /dev/zero | tr '\0' a | gzip -1 >k.gz && (ulimit -v 800000; qtool eval "$NANO" --data k.gz --windows 1 -q --threads 1)
> perplexity

# Conversations are written by the chat template of the model, as the same text would be read.
$ cp -r "$NANO" chat && chmod -R u+w chat && printf '%s\n' '{%- for m in messages %}[{{ m.role }}] {{ m.content | trim }}' '{% endfor %}' >chat/chat_template.jinja && printf '%s\n' '{"messages":[{"role":"user","content":" Hi \n"},{"role":"assistant","content":"Once upon a time"}]}' '{"conversations":[{"from":"human","value":"Go on"},{"from":"gpt","value":"there was a \"girl\"."}]}' >chats.jsonl && printf '%s\n' '{"text":"[user] Hi\n[assistant] Once upon a time\n"}' '{"text":"[user] Go on\n[assistant] there was a \"girl\".\n"}' >texts.jsonl && qtool eval chat --data chats.jsonl --seqlen 8 -q >by_chat; cat by_chat
> ^bos +as the chat template writes it$
> ^perplexity
$ qtool eval chat --data texts.jsonl --seqlen 8 -q | grep -c "$(grep perplexity by_chat)"
> ^1$
$ qtool calibrate chat --data chats.jsonl -o chat.qcal --samples 2 --seqlen 8 -q --json
> "conversations": 2
# Members that are null count as absent, and reasoning has the names that templates ask for.
$ echo '{% for m in messages %}{% if "tool_calls" in m %}{{ m.tool_calls | length }}{% endif %}[{{ m.role }}] {{ m.thinking }}{{ m.reasoning_content }}{{ m.content }}{% endfor %}' >chat/chat_template.jinja && echo '{"messages":[{"role":"user","content":"Once upon a time","tool_calls":null,"thinking":null},{"role":"assistant","tool_calls":null,"content":null,"reasoning":"there was"}]}' >nulls.jsonl && echo '{"text":"[user] Once upon a time[assistant] there wasthere was"}' >texts.jsonl && qtool eval chat --data nulls.jsonl --seqlen 8 -q | grep -c "$(qtool eval chat --data texts.jsonl --seqlen 8 -q | grep perplexity)"
> ^1$
$ echo '{{ messages | groupby("role") }}' >chat/chat_template.jinja && qtool eval chat --data chats.jsonl --seqlen 8
? 4
2 ^qtool eval: chat/chat_template\.jinja: record in line 1 of chats\.jsonl: chat template, line 1: not supported: filter 'groupby'$
$ echo '{{ raise_exception("roles must alternate") }}' >chat/chat_template.jinja && qtool eval chat --data chats.jsonl --seqlen 8
? 3
2 line 1: the template refuses the conversation: roles must alternate$

# Standard input and pipes.
$ head -c 4000 "$NANO/eval.txt" >part.txt && qtool eval "$NANO" --data part.txt --windows 2 --seqlen 64 -q >one && for d in - /dev/stdin; do cat part.txt | qtool eval "$NANO" --data $d --windows 2 --seqlen 64 -q | cmp - one || exit 9; qtool eval "$NANO" --data $d --windows 2 --seqlen 64 -q <part.txt | cmp - one || exit 9; gzip -c part.txt | qtool eval "$NANO" --data $d --windows 2 --seqlen 64 -q | cmp - one || exit 9; done
$ cat part.txt | { sleep 0.1; head -c 1; sleep 0.1; cat; } | qtool eval "$NANO" --data - --windows 2 --seqlen 64 -q | cmp - one
$ : | qtool eval "$NANO" --data -
? 3
2 ^qtool eval: standard input: the data has 0 tokens
$ gzip -c part.txt | head -c 300 | qtool eval "$NANO" --data -
? 3
2 ^qtool eval: standard input: gzip: ends too early$
$ printf 'PAR1\25\4\25\20\25\24\114\25\2\25\0\22\0\0\0\0' >x.parquet && qtool eval "$NANO" --data x.parquet
? 3
2 a Parquet file: convert it to JSON Lines, for example with DuckDB

# --bos: the rule that was used is printed.
$ qtool eval "$NANO" --data part.txt --windows 2 --seqlen 64 -q
> ^bos +none, by tokenizer\.json$
$ qtool eval "$NANO" --data part.txt --windows 2 --seqlen 64 -q --bos no | grep perplexity | cmp - one; qtool eval "$NANO" --data part.txt --windows 2 --seqlen 64 -q --bos yes --json
> "bos": true
> "bos_by": "--bos yes"
$ cp -r "$NANO" old && chmod -R u+w old && printf '{"tokenizer_class":"LlamaTokenizer","add_bos_token":true,"bos_token":"<s>"}' >old/tokenizer_config.json && qtool calibrate old --data part.txt --samples 1 --seqlen 8 -o old.qcal -q
> ^bos +before every document, by tokenizer_config\.json$
$ for b in auto yes no; do qtool eval old --data part.txt --windows 2 --seqlen 64 -q --bos $b | sed -n 's/^perplexity *//p'; done | uniq -c | tr -s ' ' | cut -d ' ' -f 2 | tr '\n' ' '
> ^2 1 $
$ printf '{}' >old/tokenizer_config.json && qtool quantize old -o oq --scheme nf3 --data part.txt --samples 1 --seqlen 8 --bos yes
? 3
2 old/tokenizer_config\.json: the tokenizer has no BOS token: "bos_token" is missing or no single token
$ qtool quantize old -o oq --scheme nf3 --bos yes
? 2
2 --samples, --seqlen, --seed and --bos need --data
