# report: one HTML file about containers and saved results.

$ qtool report --help
> ^usage: qtool report PATH\.\.\.
> --out FILE +file to write \(default report\.html\)
>!  .{81}
2-

$ qtool quantize "$NANO" -o nf4 --scheme nf4 -q && qtool quantize "$NANO" -o mixed --scheme nf3 --tensor 'down_proj=fp6' -q && qtool calibrate "$NANO" -o nano.qcal --data "$NANO/calib.txt" --samples 2 --seqlen 64 -q
$ for c in nf4 mixed; do qtool eval $c --data "$NANO/eval.txt" --windows 2 --ref "$NANO" --json -q >$c.json || exit 1; done
$ qtool verify nf4 --source "$NANO" --gate 'sqnr_min>=99' --json -q >verify.json
? 5
$ grep -c -e '"path": "nf4"' -e '"manifest_crc32": "[0-9a-f]*"' -e '"bytes": [0-9]*' nf4.json verify.json
> ^nf4.json:3$
> ^verify.json:3$

# The documents belong to the containers, whatever the order.
$ qtool report nf4.json nf4 mixed verify.json mixed.json nano.qcal
> ^report  report\.html, [0-9.]+ KiB, from 6 inputs$
2-
$ cat report.html
> Best of their size
> >nf4</th><td>best of its size</td><td>nf4</td>
> >mixed</th><td>best of its size</td><td>fp6, nf3</td>|>mixed</th><td>nf4 is better</td><td>fp6, nf3</td>
> <td>0 of 1</td>
> <h3>nano\.qcal: llama, 128 tokens</h3>
> Content-Security-Policy" content="default-src 'none'
>! src="|url\(|@import
$ grep -c '</th><td>best of its size' report.html
> ^[12]$

# The same inputs give the same bytes; a report is replaced only if told to, other files never.
$ qtool report nf4.json nf4 mixed verify.json mixed.json nano.qcal -o again.html --threads 3 --json
> "sections": \[
> "choice"
> "inputs": 6
$ cmp report.html again.html
$ qtool report nf4
? 2
2 ^qtool report: report\.html: exists already; --force replaces it$
$ qtool report nf4 --force && ! cmp -s report.html again.html
$ qtool report nf4 nf4.json -o nf4.json --force
? 2
2 ^qtool report: nf4\.json: not replaced: it is not a report of qtool$
$ qtool report nf4 -o no/report.html
? 2
$ mkdir d && qtool report nf4 -o d --force
? 3
$ ls
>! partial

# Calibrated containers have the inputs of their linears: those of the first layer are in a
# calibration file of the same windows too.
$ qtool quantize "$NANO" -o cal --scheme nf4 --data "$NANO/calib.txt" --samples 2 --seqlen 64 -q && qtool quantize "$NANO" -o file --scheme nf4 --calib nano.qcal -q
$ for c in cal file; do awk '/layers.0.self_attn.q_proj/ { own = 1 } own && /"input"/ { on = 1 } on && /"ms"/ { exit } on' $c/qtool-report.json >$c.input; done; cmp cal.input file.input && wc -l <cal.input
> ^[3-9][0-9]$
$ grep -c '"input"' cal/qtool-report.json cal/qtool.json
> ^cal/qtool-report\.json:12$
> ^cal/qtool\.json:0$
$ qtool report cal -o cal.html && cat cal.html
> <caption>Inputs of tensors</caption>
> <h2.*>Activations<

# Inputs that are none.
$ qtool report "$NANO" -o x.html
? 3
2 is a directory, but not a container; a report takes containers, calibration files, and saved --json
$ qtool report "$NANO/model.safetensors" -o x.html
? 3
2 is a safetensors file, but not a calibration file
$ qtool report "$NANO/eval.txt" -o x.html
? 3
2 is plain text; a report takes
$ qtool report "$NANO/config.json" -o x.html
? 3
2 is JSON, but not a document that 'qtool eval'
$ qtool report nf4 nf4 -o x.html
? 2
2 nf4: is the same container as nf4
$ qtool report nowhere -o x.html
? 3
$ qtool report -o x.html
? 2
2 PATH\.\.\. is missing
$ test ! -e x.html

# A checkpoint may have tensors with names of any kind.
$ sed 's/model\.layers\.0\.mlp\.up_proj\.weight/model.layers.0.<img src=x>.weight/' "$NANO/model.safetensors" >h.safetensors && ! cmp -s h.safetensors "$NANO/model.safetensors"
$ mkdir h && mv h.safetensors h/model.safetensors && cp "$NANO/config.json" h
$ qtool quantize h -o '<b>&"c' --scheme nf4 -q
$ qtool report '<b>&"c' -o h.html && grep -c '&lt;b&gt;&amp;&quot;c' h.html && grep -o 'layers.0.&lt;img src=x&gt;.weight' h.html
> layers
$ grep -c -e '<img' -e '<b>' h.html
? 1
