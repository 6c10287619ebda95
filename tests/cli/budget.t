# --target-bpw and --target-size: a scheme for each tensor.

# By the errors of weights.
$ qtool plan "$NANO" --target-bpw 3.5 --choices nf3,nf4,fp6
> ^chosen +3\.4[5-9][0-9]+ bits per quantized weight, .*, 12 groups$
> ^options +--scheme nf[34]$
>! ^predicted
2 warning: without --data schemes are chosen by the errors of the weights alone
$ qtool plan "$NANO" --target-bpw 3.5 --choices nf3,nf4,fp6 -q | grep -v ^memory >a && qtool plan "$NANO" --target-bpw 3.5 --choices nf3,nf4,fp6 -q --threads 3 | grep -v ^memory | cmp - a

# Measured. The file of measurements serves other targets; it is the same whatever the threads.
$ qtool plan "$NANO" --target-bpw 3.4 --choices nf3,nf4,fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 64 --sensitivity s.json
> ^predicted +KL divergence 0\.[0-9]+ \(nats\)$
> ^measured +KL divergence 0\.[0-9]+ \+- 0\.[0-9]+, on calibration data$
$ grep -c '"model.layers.[0-2]' s.json; grep -c '"model.layers.\*' s.json
> ^48$
> ^4$
# Kinds are measured with the next larger choice.
$ jq -rc '.scheme, (.kinds | keys)' s.json
> ^nf3$
> ^\["nf4"\]$
$ cp s.json one.json && sed -i '/down_proj/d' s.json && qtool plan "$NANO" --target-bpw 3.4 --choices nf3,nf4,fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 64 --sensitivity s.json --threads 3 -q >/dev/null && cmp s.json one.json
$ qtool plan "$NANO" --target-bpw 4.5 --choices nf3,nf4,fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 64 --sensitivity s.json --json -q | grep -A3 '"predicted_kld": 0'
$ cmp s.json one.json
$ qtool plan "$NANO" --target-bpw 3.4 --choices nf3,nf4 --data "$NANO/calib.txt" --samples 3 --seqlen 64 --sensitivity s.json
? 2
2 s\.json: was made for another checkpoint, data or version: 'ids_crc32' differs
$ qtool plan "$NANO" --target-bpw 4.5 --choices nf4,fp6 --data "$NANO/calib.txt" --samples 2 --seqlen 64 --sensitivity s.json
? 2
2 s\.json: has measurements with nf3: add it to --choices

# Without calibration, as the choices say; q, k and v may differ.
$ qtool plan "$NANO" --target-bpw 3.4 --choices nf3:method=search,nf4:method=search --untied --data "$NANO/calib.txt" --samples 2 --seqlen 64 -q >out; cat out
> ^chosen .* 21 groups$
$ test $(grep -c 'q_proj.*=nf4' out) != $(grep -c 'v_proj.*=nf4' out)

# quantize gives what the printed options give, and resumes.
$ qtool quantize "$NANO" -o target --target-size 1300kB --choices nf3,nf4,fp6 --tensor 'layers.1.*k_proj=fp8' -q >out && cat out
> ^size +1\.2[0-9] MiB
> ^chosen
$ sed -n 's/^.* --scheme \(.*\)$/--scheme \1/p; s/^.*--tensor/--tensor/p' out >options && eval "qtool quantize '$NANO' -o same --tensor 'layers.1.*k_proj=fp8' -q $(tr '\n' ' ' <options)" && cmp target/model.safetensors same/model.safetensors
$ test $(sed -n 's/^size.*(\([0-9]*\) bytes).*/\1/p' out) -le 1300000
$ qtool quantize "$NANO" -o target --target-size 1300kB --choices nf3,nf4,fp6 --tensor 'layers.1.*k_proj=fp8' -q --resume
> already complete

# The embedding takes part: it is one more group, and always named, as the default leaves it out.
$ qtool plan "$NANO" --target-size 1MB --choices nf3,nf4,fp6 --tensor 'embed=choice' --data "$NANO/calib.txt" --samples 2 --seqlen 64 --sensitivity e.json -q >out; cat out
> ^chosen .* 13 groups$
> --tensor '\^model\\\.embed_tokens\\\.weight\$=(nf3|nf4|fp6)'$
$ sed -n '/"groups"/,$p' e.json | grep -c '"model.embed_tokens.weight": 0\.[0-9]*[1-9]'
> ^2$
$ sed -n 's/^.* --scheme \(.*\)$/--scheme \1/p; s/^.*--tensor/--tensor/p' out >options && eval "qtool quantize '$NANO' -o small -q $(tr '\n' ' ' <options)" >made && test $(sed -n 's/^size.*(\([0-9]*\) bytes).*/\1/p' made) -le 1000000
$ qtool plan "$NANO" --scheme nf4 --tensor 'embed=choice'
? 2
2 choice

# Refusals, before any work.
$ qtool quantize "$NANO" -o target --target-bpw 4 --choices nf3,nf4
? 2
2! warning
2 ^qtool quantize: target: exists already; --force replaces it$
$ mkdir part.partial && printf '%s\n' '{"format":"qtool-journal",' 1 2 >part.partial/journal && qtool quantize "$NANO" -o part --target-bpw 4 --choices nf3,nf4
? 2
2! warning
2 part\.partial: an interrupted run left 2 finished tensors here: --resume continues that run, --force deletes them$
$ flock part.partial/journal qtool quantize "$NANO" -o part --target-bpw 4 --choices nf3,nf4 --force
? 6
2! warning
2 part\.partial: in use by another process$
$ ls part.partial && qtool quantize "$NANO" -o part --target-bpw 4 --choices nf3,nf4 --force -q
> ^journal$
> ^chosen
$ qtool plan "$NANO" --target-bpw 3.0 --choices nf3,nf4
? 2
2 the target of 3 bits per weight is below the smallest possible, 3\.12
$ qtool plan "$NANO" --target-size 1MB --choices nf3,nf4
? 2
2 the target of 1000000 bytes is below the smallest possible size, 1[0-9]{6} bytes
$ qtool quantize "$NANO" -o x
? 2
2 --scheme S is missing
$ qtool quantize "$NANO" -o x --scheme nf4 --target-bpw 4
? 2
2 --scheme nf4 and a target cannot be used together
$ qtool plan "$NANO" --target-bpw 4 --target-size 1GB
? 2
$ qtool plan "$NANO" --target-bpw four
? 2
2 --target-bpw must be a number of bits from 0 to 32, not 'four'
$ qtool plan "$NANO" --target-size 5XB
? 2
2 --target-size must be a size like 5GB
$ qtool plan "$NANO" --target-bpw 4 --choices nf4
? 2
2 choices must be 2 to 16 schemes
$ qtool plan "$NANO" --target-bpw 4 --choices nf4,w4ax
? 2
2 w4ax cannot be a choice
$ qtool plan "$NANO" --target-bpw 4 --choices nf4:g=64,method=rtn,nf3,nf3
? 2
2 nf3 is a choice twice
$ qtool plan "$NANO" --choices nf4,nf3
? 2
2 --choices needs --target-bpw or --target-size
$ qtool plan "$NANO" --untied
? 2
2 --untied needs --target-bpw or --target-size
$ qtool plan "$NANO" --target-bpw 4 --data "$NANO/calib.txt" --samples 1 --seqlen 16 --sensitivity nowhere/s.json
? 2
2! done
2 nowhere: does not exist
$ qtool plan "$NANO" --target-bpw 4 --data "$NANO/calib.txt" --samples 1 --seqlen 16 --sensitivity "$NANO/config.json"
? 2
2 config\.json: is not a file that --sensitivity has written$
2! errors

$ qtool plan "$NANO" --target-bpw 4 --sensitivity s.json
? 2
2 it needs --data
$ qtool plan "$NANO" --target-bpw 4 --choices nf3,nf4 --tensor '.*=nf4'
? 4
2 there is no tensor to choose a scheme for
$ ls
>! partial
