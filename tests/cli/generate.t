# The example model continues a text; the same command gives the same text.
$ qtool generate "$NANO" --prompt 'Once upon a time' --max-tokens 12 >a 2>err && cat a
> ^[ ,.a-zA-Z]+$
$ qtool generate "$NANO" -p 'Once upon a time' --max-tokens 12 --threads 1 -q | cmp - a
2-
$ cat err
> ^qtool generate: [0-9]+ tokens of prompt in [0-9.]+ s; 12 tokens in [0-9.]+ s: [0-9.]+ tokens/s$
$ printf 'Once upon a time' | qtool generate "$NANO" --prompt-file - --max-tokens 12 -q | cmp - a

# A longer run begins with the same text.
$ qtool generate "$NANO" -p 'Once upon a time' --max-tokens 20 -q | head -c 20 >b && head -c 20 a | cmp - b

# Sampling: each sequence has random numbers of its own, and a seed repeats them.
$ qtool generate "$NANO" -p 'The' --max-tokens 8 --temperature 1 --batch 3 --seed 5 -q >c && cat c
> ^---- 1 ----$
> ^---- 3 ----$
$ qtool generate "$NANO" -p 'The' --max-tokens 8 --temperature 1 --batch 3 --seed 5 -q | cmp - c
$ qtool generate "$NANO" -p 'The' --max-tokens 8 --temperature 1 --batch 3 --seed 6 -q | cmp -s - c
? 1
# One candidate is the most probable one, whatever the temperature.
$ qtool generate "$NANO" -p 'Once upon a time' --max-tokens 12 --temperature 9 --top-k 1 -q | cmp - a
$ qtool generate "$NANO" -p 'Once upon a time' --max-tokens 12 --temperature 9 --top-p 0 -q | cmp - a

# Containers, with the cache that they were made for or another one.
$ qtool quantize "$NANO" -o nf4 --scheme nf4 -q
$ qtool generate nf4 -p 'Once upon a time' --max-tokens 12 -q
> ^[ ,.a-zA-Z]+$
$ qtool generate nf4 -p 'Once upon a time' --max-tokens 12 --kv 4 -q
> ^[ ,.a-zA-Z]+$
$ qtool generate "$NANO" -p 'Once' --max-tokens 3 --batch 2 --ignore-eos --json -q
> ^  "command": "generate",$
> ^  "prompt_tokens": [1-9]
> ^      "end": "length"$
2-

# Chat templates.
$ cp -r "$NANO" chat && chmod -R u+w chat && printf '{{ messages[0].content }}' >chat/chat_template.jinja
$ qtool generate chat --chat -p 'Once upon a time' --max-tokens 12 -q | cmp - a
$ qtool generate "$NANO" --chat -p 'x' -q
? 3
2 chat template

# Ends of texts: of generation_config.json, or else of config.json.
$ qtool generate "$NANO" -p 'Once upon a time' --max-tokens 1 --json -q | tr -d ' \n' | sed 's/.*"ids":\[\([0-9]*\)\].*/{"eos_token_id":[7,\1]}/' >chat/generation_config.json
$ qtool generate chat -p 'Once upon a time' --max-tokens 12 --json -q
> ^      "end": "eos"$
> ^      "text": "",$
$ printf '{"eos_token_id": "x"}' >chat/generation_config.json; qtool generate chat -p x -q
? 3
2 generation_config.json: eos_token_id is not a token id$

# The text ends with a newline before the next message.
$ qtool generate "$NANO" -p 'Once upon a time' --max-tokens 2 2>&1 | grep -c '^qtool generate: .* tokens/s$'
> ^1$

$ qtool generate "$NANO" -p a --max-tokens 2000 --ignore-eos 2>err | head -c 1 && grep -v ' 2000 tokens in' err
2-

# Wrong uses.
$ qtool generate "$NANO"
? 2
2 give --prompt or --prompt-file$
$ qtool generate none
? 2
2 give --prompt or --prompt-file$
$ qtool generate "$NANO" -p a --prompt-file b
? 2
2 --prompt and --prompt-file cannot be used together$
$ qtool generate "$NANO" --prompt-file chat
? 3
2 chat: not a regular file$
$ qtool generate "$NANO" -p a --top-k 5
? 2
2 --top-k and --top-p need --temperature
$ qtool generate "$NANO" -p a --temperature x
? 2
2 --temperature 'x' is not a number from 0 to 100$
$ qtool generate "$NANO" -p a --top-p 1.5
? 2
2 --top-p '1\.5' is not a number from 0 to 1$
$ qtool generate "$NANO" -p a --top-p nan
? 2
2 --top-p 'nan' is not a number
$ head -c 100000 /dev/zero | tr '\0' 'a' >long && qtool generate "$NANO" --prompt-file long -q
? 2
2 the prompt has [0-9]+ tokens, but the model has [0-9]+ positions$
$ qtool generate "$NANO" --prompt-file none -q
? 3
2 none: cannot open: No such file or directory$
$ qtool generate "$NANO" -p '' -q
? 3
2 --prompt: has no tokens$
$ printf '\377' | qtool generate "$NANO" --prompt-file - -q
? 3
2 UTF-8
$ rm chat/generation_config.json && tr -d '\n' <"$NANO/tokenizer.json" | sed 's/"decoder": *{ *"type": *"[A-Za-z]*"/"decoder":{"type":"CTC"/' >chat/tokenizer.json && qtool generate chat -p x -q
? 4
2 tokenizer.json: decoder 'CTC' is not supported$
