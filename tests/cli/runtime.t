# Options of the fused runtime that are refused before a GPU is needed.
$ qtool generate "$NANO" -p x --runtime fused
? 2
2 ^qtool generate: --runtime fused needs --device cuda\[:N\]$
$ qtool eval "$NANO" --data "$NANO/eval.txt" --runtime fused
? 2
2 ^qtool eval: --runtime fused needs --device cuda\[:N\]$
$ qtool eval "$NANO" --data "$NANO/eval.txt" --runtime fused --device cuda --kv 4
? 2
2 .*--kv simulates a cache: it needs --runtime reference
$ qtool eval "$NANO" --data "$NANO/eval.txt" --runtime fast
? 2
2 unknown value of --runtime 'fast'
$ qtool generate "$NANO" -p x --device cuda --kv 4 --kv-keys token
? 4
2 no kernel for a cache with --kv-keys token: use --runtime reference
$ qtool verify none --model
? 2
2 ^qtool verify: --model needs --device cuda$
$ qtool verify none --device cuda --gate 'model_error<=0.01'
? 2
2 .*--gate 'model_error<=0.01' needs --model
$ qtool bench --model 8b --m 1,2
? 2
2 .*--model takes --scheme, --head, --batch, --prompt, --tokens, --kv, --invariant and --price
$ qtool bench --model 8b --scheme kv4
? 2
2 with --model, a 4-bit cache is --kv 4, not --scheme kv4
$ qtool bench --model 8b --scheme nf9
? 2
$ qtool bench --model 8b --batch 1,0
? 2
2 .*--batch
$ qtool bench --model "$NANO" --scheme nf4
? 2
2 .*--scheme needs a shape \(--model 8b, 70b or qwen3-30b\)
$ qtool bench --model "$NANO" --head int8
? 2
2 .*--head needs a shape \(--model 8b, 70b or qwen3-30b\)
$ qtool bench --model 8b --head int9
? 2
$ qtool bench --model missing
? 3
2 missing
# The reference runtime is the CPU's.
$ qtool generate "$NANO" -p 'Once upon a time' --max-tokens 4 --runtime reference -q
> ^[ ,.a-zA-Z]+$
