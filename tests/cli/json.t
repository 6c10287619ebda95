# stdout has exactly one document, also on failure.
$ qtool version --json
> ^  "schema": 1,$
> ^  "command": "version",$
> ^  "ok": true,$
2-

$ qtool inspect nowhere --json
? 3
> "ok": false
> "status": "bad_input"
> "exit_code": 3
> "file": "nowhere"
> "tensor": null
2 ^qtool inspect: nowhere: 

$ qtool quantize "$NANO" -o out --scheme fp6 --tensor 'norm=fp6' --json
? 4
> "status": "unsupported"
> "tensor": "model\.layers\.0\.input_layernorm\.weight"

$ qtool eval "$NANO" --dta x --json
? 2
> "status": "usage"
> "message": "unknown option '--dta'; did you mean '--data'\?"

$ qtool inspect "$NANO" --device cuda --json
? 2
> "status": "usage"

# A failed gate keeps the results.
$ qtool eval "$NANO" --data "$NANO/eval.txt" --windows 1 --json -q --gate 'ppl<1'
? 5
> "status": "gate_failed"
> "ppl": 1[0-9]\.
> "scored_tokens": 511

# A path that is not UTF-8 does not break the document.
$ qtool inspect "$(printf 'no\377where')" --json
? 3
> "file": "no\?where"

need jq --version
$ qtool quantize "$NANO" -o nf4 --scheme nf4 --json | jq -e '.ok and .bpw > 4 and .bpw < 4.3 and .bytes > 1e6 and .quantized == 21'
$ qtool inspect "$NANO" --json | jq -e '(.tensors | length) == 29 and .kind == "checkpoint" and .model.layers == 3'
$ qtool inspect nf4 --json | jq -e '(.quantized | length) == 21 and (.copied | length) == 8 and .bpw > 4 and .quantized[0].sqnr_db > 15'
$ qtool plan "$NANO" --json | jq -e '[.schemes[] | select(.scheme == "nf4")][0].bpw < 4.3'
$ qtool plan "$NANO" --scheme nf4 --json | jq -e '(.tensors | length) == 29 and ([.tensors[] | select(.copied)] | length) == 8'
$ qtool verify nf4 --source "$NANO" --json -q | jq -e '.sqnr_min > 15 and .mse_max < 1 and .cosine_min > 0.9 and .bpw > 4 and (.tensors | length) == 21'
$ qtool eval nf4 --ref "$NANO" --data "$NANO/eval.txt" --windows 2 --json -q | jq -e '.ppl > .ref_ppl * 0.9 and .kld_mean > 0 and .kld_median > 0 and .kld_p999 > .kld_mean and .same_top > 0.5 and .rms_dp > 0'
$ for w in schemes kernels archs; do qtool list $w --json | jq -e --arg w $w '.[$w] | length > 0' || exit 1; done
$ qtool plan "$NANO" --scheme none --json | jq -e '.quantized == 0 and .bpw == 0'
$ for c in inspect plan quantize verify eval list; do qtool $c --json | jq -e '.ok == false and .error.exit_code == 2' || exit 1; done
2 is missing
