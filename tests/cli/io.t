# A pipe whose reader has left (head) is no error. Results that cannot be written are.
$ { sleep 0.3; qtool inspect "$NANO" 2>message; echo $? >status; } | true; cat status message
> ^0$
>! qtool

need test -c /dev/full
$ qtool inspect "$NANO" >/dev/full
? 6
2 ^qtool inspect: cannot write results to standard output: No space left on device$

$ qtool list schemes --json >/dev/full
? 6
2 cannot write results

# Also if a gate fails.
$ qtool eval "$NANO" --data "$NANO/eval.txt" --windows 1 --seqlen 16 -q --gate 'ppl<1' >/dev/full
? 6
2 gate failed

$ qtool --help >/dev/full
? 6

$ qtool inspect "$NANO" >&-
? 6
2 cannot write results

# With all standard descriptors closed, messages do not end up in an output file.
$ qtool quantize "$NANO" -o closed --scheme fp6 <&- >&- 2>&-
? 6
$ qtool verify closed --source "$NANO" -q
> ^container +sound

# Disk full: an error, and no incomplete output. (1 MB, because ThreadSanitizer writes half of that.)
$ ulimit -f 2000; qtool quantize "$NANO" -o big --scheme fp6 -q
? 6
>-
2 ^qtool quantize: big.*: .*(File too large|cannot write)
$ test ! -e big

# The source is truncated while it is read, which takes seconds: an error, and no output.
$ h='{"w.weight":{"dtype":"F16","shape":[65536,8192],"data_offsets":[0,1073741824]}}'; n=${#h}; printf "\\$(printf %03o $n)\\0\\0\\0\\0\\0\\0\\0%s" "$h" >zeros.safetensors; truncate -s $((8 + n + 1073741824)) zeros.safetensors
$ qtool quantize zeros.safetensors -o cut --scheme nf4 --tensor '^w=nf4' -q --json >doc & pid=$!; while kill -0 $pid 2>/dev/null && ! [ -e cut.partial/journal ]; do sleep 0.01; done; truncate -s 200 zeros.safetensors; wait $pid
? 6
2 ^qtool( quantize)?: a file was truncated while qtool was reading it, or its disk failed$
$ grep -q '"exit_code": 6' doc && test ! -e cut

# A second process on the same output is refused and does not disturb the first.
need command -v flock
$ mkdir busy.partial && flock busy.partial qtool quantize "$NANO" -o busy --scheme fp6 -q
? 6
2 busy\.partial: in use by another process$
$ test -d busy.partial && qtool quantize "$NANO" -o busy --scheme fp6 -q && test ! -e busy.partial

# A complete container named OUT.partial is not deleted, and a file of a container is not a checkpoint.
$ qtool quantize "$NANO" -o whole.partial --scheme fp6 -q && qtool quantize "$NANO" -o whole --scheme nf4 -q
? 2
2 whole\.partial: not replaced: it is a complete container; rename or remove it$
$ test ! -e whole && qtool verify whole.partial --source "$NANO" -q
> ^container +sound
$ qtool quantize whole.partial/model.safetensors -o again --scheme nf4 -q
? 4
2 whole\.partial/model\.safetensors: is a file of a qtool container: give the directory
$ cd whole.partial && qtool eval model.safetensors --data "$NANO/eval.txt" --windows 1 -q
? 4
2 model\.safetensors: is a file of a qtool container
$ test ! -e again

# But a run that was killed before the last rename can be resumed.
$ mv whole.partial left.partial && qtool quantize "$NANO" -o left --scheme fp6 -q --resume && test ! -e left.partial && qtool verify left --source "$NANO" -q
> ^container +sound

# A place where not even root can create a directory.
need test -d /proc/self
$ qtool quantize "$NANO" -o /proc/out --scheme fp6 -q
? 6
2 /proc/out\.partial: cannot create directory: 
