# A signal stops quantize after the current tensor; --resume completes the run to the same bytes.
# The checkpoint is a sparse file of 24 zero matrices of 1024 x 1024, which take long enough to stop.
$ i=0 end=0; h='{'; while [ $i -lt 24 ]; do next=$((end + 2097152)); h="$h\"m.$i.w.weight\":{\"dtype\":\"F16\",\"shape\":[1024,1024],\"data_offsets\":[$end,$next]},"; end=$next; i=$((i + 1)); done; h="${h%,}}"; n=${#h}; printf "\\$(printf %03o $((n % 256)))\\$(printf %03o $((n / 256)))\\0\\0\\0\\0\\0\\0%s" "$h" >zeros.safetensors; truncate -s $((8 + n + end)) zeros.safetensors
$ qtool quantize zeros.safetensors -o whole --scheme lut3 -q
> ^tensors +24 quantized, 0 copied$

# SIGSTOP, SIGTERM and SIGCONT as soon as OUT.partial exists.
$ qtool quantize zeros.safetensors -o 'a part' --scheme lut3 -q --json >doc & pid=$!; while kill -0 $pid 2>/dev/null && ! [ -d 'a part.partial' ]; do sleep 0.01; done; kill -STOP $pid; kill -TERM $pid; kill -CONT $pid; wait $pid
? 75
2 ^qtool quantize: a part: interrupted after [0-9]+ of 24 tensors$
2 ^To continue: qtool quantize --resume zeros\.safetensors -o 'a part' --scheme lut3 -q --json$
$ grep -q '"status": "interrupted"' doc && grep -q '"exit_code": 75' doc && grep -q "\"resume\": \"qtool quantize --resume" doc
$ test ! -e 'a part' && test -d 'a part.partial'

# argv[0] is repeated, and another run over the unfinished one needs --resume or --force.
$ "$(command -v qtool)" quantize zeros.safetensors -o over1 --scheme lut3 -q & pid=$!; while kill -0 $pid 2>/dev/null && ! [ "$(wc -l <over1.partial/journal)" -ge 2 ]; do sleep 0.01; done 2>/dev/null; kill -TERM $pid; wait $pid
? 75
2 ^To continue: /.*/qtool quantize --resume zeros\.safetensors -o over1 --scheme lut3 -q$
$ qtool quantize zeros.safetensors -o over1 --scheme fp6 -q
? 2
>-
2 over1\.partial: an interrupted run left [1-9][0-9]* finished tensors here: --resume continues that run, --force deletes them$
$ qtool quantize zeros.safetensors -o over1 --scheme lut3 -q
? 2
$ test "$(wc -l <over1.partial/journal)" -ge 2 && qtool quantize zeros.safetensors -o over1 --scheme fp6 -q --force && test ! -e over1.partial && rm -r over1

# OUT.partial and its files are neither a checkpoint nor a container.
$ for c in 'quantize -o other --scheme fp6' plan inspect verify 'calibrate -o x.qcal --data /dev/null' 'eval --data /dev/null'; do qtool $c 'a part.partial' 2>&1 | grep -q "a part\.partial: is an unfinished container: run its 'quantize' command again with --resume" || exit 9; done
$ qtool inspect 'a part.partial/model.safetensors'
? 3
2 is a file of an unfinished container
$ qtool verify "$NANO" --source 'a part.partial'
? 3
$ cp -r "$NANO" mine && echo 'what I have trained' >mine/journal && qtool inspect mine

# A second signal ends the run at once, also if it is another one. Two threads can take the two
# signals in either order: the status is that of the one that was taken last.
$ env --default-signal=INT qtool quantize zeros.safetensors -o second --scheme lut3 -q & pid=$!; while kill -0 $pid 2>/dev/null && ! [ -d second.partial ]; do sleep 0.01; done; kill -STOP $pid; kill -INT $pid; kill -TERM $pid; kill -CONT $pid; wait $pid; status=$?; [ $status = 143 ] || [ $status = 130 ] || (exit $status)
$ rm -r second.partial

# A signal that was ignored at the start (nohup, background jobs) stays ignored.
$ (trap '' TERM; exec qtool quantize zeros.safetensors -o deaf --scheme int8:method=rtn -q) & pid=$!; while kill -0 $pid 2>/dev/null && ! [ -d deaf.partial ]; do sleep 0.01; done; kill -STOP $pid; kill -TERM $pid; kill -CONT $pid; wait $pid
> ^tensors +24 quantized

# The command to continue is complete for long command lines.
$ set -- $(for i in $(seq 90); do echo "--tensor m.$((i % 24)).*(w|quite_another_name.of.$i)=lut3"; done); qtool quantize zeros.safetensors -o long --scheme lut3 -q "$@" --tensor "it's|m=lut3" 2>err & pid=$!; while kill -0 $pid 2>/dev/null && ! [ -d long.partial ]; do sleep 0.01; done; kill -STOP $pid; kill -TERM $pid; kill -CONT $pid; wait $pid
? 75
$ test $(wc -c <err) -gt 4500 && grep -qF "of.90)=lut3' --tensor 'it'\\''s|m=lut3'" err

# --resume refuses other options and continues with the same ones.
$ qtool quantize --resume zeros.safetensors -o 'a part' --scheme fp6 -q
? 8
>-
$ qtool quantize --resume zeros.safetensors -o 'a part' --scheme lut3 -q
$ test ! -e 'a part.partial' && cmp whole/model.safetensors 'a part/model.safetensors' && cmp whole/qtool.json 'a part/qtool.json'

# A complete container stays as it is if this run would have made it.
$ qtool quantize --resume zeros.safetensors -o 'a part' --scheme lut3 -q
> ^container +a part, already complete$
> ^tensors +24 quantized, 0 copied$
$ cmp whole/qtool.json 'a part/qtool.json' && cmp whole/SHA256SUMS 'a part/SHA256SUMS'
$ qtool quantize --resume zeros.safetensors -o 'a part' --scheme fp6 -q
? 8
>-
2 a part: cannot resume: options\.scheme was "lut3.*", is now "fp6.*"
$ qtool quantize --resume zeros.safetensors -o 'a part' --scheme lut3 -q --json | grep -q '"reused": true'
$ echo '{}' >config.json && qtool quantize --resume zeros.safetensors -o 'a part' --scheme lut3 -q
? 8
>-
2 a part/config\.json: cannot resume: the file differs from the one in
$ mv config.json 'a part' && qtool quantize --resume zeros.safetensors -o 'a part' --scheme lut3 -q
? 8
2 a part/config\.json: cannot resume: the file differs from the one in
$ rm 'a part/config.json' && mv 'a part/SHA256SUMS' sums && qtool quantize --resume zeros.safetensors -o 'a part' --scheme lut3 -q
? 3
2 SHA256SUMS: missing: the container is not complete
$ mv sums 'a part/SHA256SUMS' && truncate -s 1M 'a part/model.safetensors' && qtool quantize --resume zeros.safetensors -o 'a part' --scheme lut3 -q
? 3
>-
$ qtool quantize zeros.safetensors -o whole --scheme lut3 -q
? 2
2 whole: exists already
$ qtool quantize --force --resume zeros.safetensors -o 'a part' --scheme lut3 -q && cmp whole/model.safetensors 'a part/model.safetensors'
> ^container +a part$
> ^tensors

# A signal during the choice of activation precisions stops there.
$ qtool quantize "$NANO" -o acts --scheme w4ax --data "$NANO/calib.txt" --samples 32 --seqlen 256 -q --threads 1 2>err & pid=$!; while kill -0 $pid 2>/dev/null && ! [ -e acts.partial/journal ]; do sleep 0.01; done; kill -TERM $pid; wait $pid; rc=$?; cat err >&2; exit $rc
? 75
2 interrupted while the precision of activations was being chosen
$ test ! -e acts

# calibrate cannot be resumed and leaves no file.
$ qtool calibrate "$NANO" -o x.qcal --data "$NANO/calib.txt" --samples 64 --seqlen 512 -q --threads 1 2>err & pid=$!; while kill -0 $pid 2>/dev/null && ! [ -e x.qcal.partial ]; do sleep 0.01; done; kill -TERM $pid; wait $pid; rc=$?; cat err >&2; exit $rc
? 75
2 ^qtool calibrate: x\.qcal: interrupted; no file was written$
$ ! ls | grep x.qcal

# A directory that appeared as OUT during the run stays, and so does OUT.partial.
$ qtool quantize zeros.safetensors -o late --scheme lut3 -q 2>err & pid=$!; while kill -0 $pid 2>/dev/null && ! [ -s late.partial/journal ]; do sleep 0.01; done; mkdir late; wait $pid; rc=$?; cat err >&2; exit $rc
? 6
2 ^qtool quantize: late: exists already; --force replaces it \(since the run began\); move it away, then continue from late\.partial with --resume$
$ rmdir late && qtool quantize --resume zeros.safetensors -o late --scheme lut3 -q && cmp whole/model.safetensors late/model.safetensors
> ^tensors
$ cp -r whole over && { qtool quantize zeros.safetensors -o over --scheme lut3 -q --force 2>err & pid=$!; } && while kill -0 $pid 2>/dev/null && ! [ -s over.partial/journal ]; do sleep 0.01; done; mkdir over/mine; wait $pid; rc=$?; cat err >&2; exit $rc
? 6
2 ^qtool quantize: over: not replaced: it contains a directory 'mine'
$ rmdir over/mine && qtool quantize --resume zeros.safetensors -o over --scheme lut3 -q --force && cmp whole/model.safetensors over/model.safetensors
> ^tensors

# A signal is noticed while data is read and tokenized, and nothing remains.
$ yes | head -c 100000000 >long.txt && gzip -1k long.txt
$ qtool calibrate "$NANO" -o twice.qcal --data long.txt.gz -q & pid=$!; while kill -0 $pid && ! grep -q long.txt.gz /proc/$pid/maps; do sleep 0.01; done; kill -TERM $pid; wait $pid
? 75
2 interrupted while
$ qtool calibrate "$NANO" -o twice.qcal --data long.txt -q & pid=$!; while kill -0 $pid && ! grep -q long.txt /proc/$pid/maps; do sleep 0.01; done; sleep 0.5; kill -TERM $pid; wait $pid
? 75
2 interrupted while
$ qtool quantize "$NANO" -o twice --scheme nf4 --data long.txt -q & pid=$!; while kill -0 $pid && ! grep -q long.txt /proc/$pid/maps; do sleep 0.01; done; sleep 0.5; kill -TERM $pid; wait $pid
? 75
2 interrupted while
$ ! ls | grep twice

# SIGTERM at any moment of any command ends it within 2 seconds, and leaves OUT complete or absent.
$ qtool quantize "$NANO" -o whole4 --scheme nf4 -q >/dev/null; for c in inspect plan 'plan --scheme nf4' 'verify whole4 --source' "eval --data $NANO/eval.txt" "calibrate -o any.qcal --force --data $NANO/calib.txt" 'quantize -o any --force --scheme lut3' "quantize -o any --force --scheme w4ax --samples 32 --seqlen 256 --data $NANO/calib.txt" "quantize -o any --force --scheme nf3 --samples 32 --seqlen 256 --data $NANO/calib.txt" "quantize -o any --force --scheme nf4:learn=1 --samples 16 --seqlen 64 --data $NANO/calib.txt"; do for i in 1 2; do qtool $c "$NANO" --threads 2 >/dev/null 2>&1 & pid=$!; sleep 0.$(od -An -N1 -tu1 /dev/urandom | tr -d ' '); from=$(date +%s%N); kill -TERM $pid 2>/dev/null; { wait $pid; } 2>/dev/null; rc=$?; ms=$((($(date +%s%N) - from) / 1000000)); [ $ms -lt 2900 ] || echo "$c: $ms ms"; case $rc in 0 | 75 | 143) ;; *) echo "$c: status $rc" ;; esac; [ ! -e any ] || qtool verify any -q >/dev/null 2>&1 || echo "$c: OUT is broken"; [ ! -e any.qcal ] || qtool inspect any.qcal >/dev/null || echo "$c: any.qcal is broken"; done; done; rm -rf any any.partial any.qcal*
>-
2-

# A command that writes nothing ends at once, here while it reads the data.
$ qtool eval "$NANO" --data long.txt.gz --json >doc 2>err & pid=$!; while kill -0 $pid && ! grep -q long.txt.gz /proc/$pid/maps; do sleep 0.01; done; kill -TERM $pid; wait $pid; rc=$?; cat err >&2; exit $rc
? 75
2 ^qtool: interrupted$
$ grep -q '"status": "interrupted"' doc && grep -q '"exit_code": 75' doc
