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

# Out of space: a clean error, no output, and nothing half-written under its name.
$ ulimit -f 200; qtool quantize "$NANO" -o big --scheme fp6 -q
? 6
>-
2 ^qtool quantize: big.*: .*(File too large|cannot write)
$ test ! -e big
