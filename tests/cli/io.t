# Results that do not reach their reader are no success.
$ { sleep 0.3; qtool inspect "$NANO" 2>message; echo $? >status; } | true; cat status message
> ^6$
> ^qtool inspect: cannot write results to standard output: Broken pipe$

need test -c /dev/full
$ qtool inspect "$NANO" >/dev/full
? 6
2 ^qtool inspect: cannot write results to standard output: No space left on device$

$ qtool list schemes --json >/dev/full
? 6
2 cannot write results

# Nor are they a gate that has failed.
$ qtool eval "$NANO" --data "$NANO/eval.txt" --windows 1 --seqlen 16 -q --gate 'ppl<1' >/dev/full
? 6
2 gate failed

$ qtool --help >/dev/full
? 6

$ qtool inspect "$NANO" >&-
? 6
2 cannot write results

# Even with all standard descriptors closed nothing is written into a file of ours.
$ qtool quantize "$NANO" -o closed --scheme fp6 <&- >&- 2>&-
? 6
$ qtool verify closed --source "$NANO" -q
> ^container +sound

# Out of space: a clean error, no output, and nothing half-written under its name. (1 MB, as
# ThreadSanitizer writes half of that for itself.)
$ ulimit -f 2000; qtool quantize "$NANO" -o big --scheme fp6 -q
? 6
>-
2 ^qtool quantize: big.*: .*(File too large|cannot write)
$ test ! -e big

# The source is cut while it is read, which takes seconds: a clean end, nothing under the output's name.
$ h='{"w.weight":{"dtype":"F16","shape":[65536,8192],"data_offsets":[0,1073741824]}}'; n=${#h}; printf "\\$(printf %03o $n)\\0\\0\\0\\0\\0\\0\\0%s" "$h" >zeros.safetensors; truncate -s $((8 + n + 1073741824)) zeros.safetensors
$ qtool quantize zeros.safetensors -o cut --scheme nf4 -q --json >doc & pid=$!; while kill -0 $pid 2>/dev/null && ! [ -e cut.partial/journal ]; do sleep 0.01; done; truncate -s 200 zeros.safetensors; wait $pid
? 6
2 ^qtool( quantize)?: a file that is being read became shorter, or its disk failed$
$ grep -q '"exit_code": 6' doc && test ! -e cut

# A second process on the same output is refused, and does no harm to the first.
need command -v flock
$ mkdir busy.partial && flock busy.partial qtool quantize "$NANO" -o busy --scheme fp6 -q
? 6
2 busy\.partial: in use by another process$
$ test -d busy.partial && qtool quantize "$NANO" -o busy --scheme fp6 -q && test ! -e busy.partial

# What only has the name of an unfinished run is not deleted, and a container's file is no checkpoint.
$ qtool quantize "$NANO" -o whole.partial --scheme fp6 -q && qtool quantize "$NANO" -o whole --scheme nf4 -q
? 2
2 whole\.partial: not replaced: it is a complete container; rename or remove it$
$ test ! -e whole && qtool verify whole.partial --source "$NANO" -q
> ^container +sound
$ qtool quantize whole.partial/model.safetensors -o again --scheme nf4 -q
? 4
2 whole\.partial/model\.safetensors: is a file of a qtool container
$ cd whole.partial && qtool eval model.safetensors --data "$NANO/eval.txt" --windows 1 -q
? 4
2 model\.safetensors: is a file of a qtool container
$ test ! -e again

# But what the same run left when it was killed before the last step is.
$ mv whole.partial left.partial && qtool quantize "$NANO" -o left --scheme fp6 -q --resume && test ! -e left.partial && qtool verify left --source "$NANO" -q
> ^container +sound

# A place where nothing can be made, not even by root.
need test -d /proc/self
$ qtool quantize "$NANO" -o /proc/out --scheme fp6 -q
? 6
2 /proc/out\.partial: cannot create directory: 
