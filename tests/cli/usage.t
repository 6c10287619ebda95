# Usage errors: exit status 2, nothing on stdout, and a hint.
$ qtool inspect
? 2
>-
2 ^qtool inspect: PATH is missing
2 Run 'qtool inspect --help' for usage

$ qtool inspect a b
? 2
2 ^qtool inspect: unexpected argument 'b'

$ qtool eval "$NANO" --dta x
? 2
2 unknown option '--dta'; did you mean '--data'\?

$ qtool eval "$NANO"
? 2
2 --data FILE is missing

$ qtool eval "$NANO" --data
? 2
2 --data needs a value \(FILE\)

$ qtool eval "$NANO" --data a --data b
? 2
2 --data is given more than once

$ qtool eval "$NANO" --data a --seqlen 1
? 2
2 --seqlen: '1' is not a number from 2 to

$ qtool eval "$NANO" --data a --seqlen 5x
? 2
2 --seqlen: '5x' is not a number

$ qtool eval "$NANO" --data a --windows=-3
? 2
2 --windows: '-3' is not a number from 1 to

$ qtool eval "$NANO" --data a --windows 99999999999999999999
? 2
2 --windows: '99999999999999999999' is not a number

$ qtool inspect "$NANO" --quiet=yes
? 2
2 --quiet takes no value

$ qtool inspect "$NANO" --progress plan
? 2
2 unknown value of --progress 'plan'; did you mean 'plain'\?

$ qtool inspect "$NANO" --threads 5000
? 2
2 --threads: '5000' is not a number from 0 to 4096

$ qtool eval "$NANO" --data a --bos maybe
? 2
2 unknown value of --bos 'maybe'; known: auto, yes and no$

$ qtool list scheems
? 2
2 unknown list 'scheems'; did you mean 'schemes'\?

$ qtool plan "$NANO" --scheme nf44
? 2
2 unknown scheme 'nf44'; did you mean 'nf4'\?

# Formats by the names of other programs; each suggestion is a scheme.
$ for s in W4A16 w8a16 gptq awq bnb bitsandbytes Q8_0 Q4_0 q4_K_M q4_k q4_k_s e4m3 e5m2 fp8_e5m2 fp8_e4m3 FP8_DYNAMIC; do t=$(qtool plan "$NANO" --scheme $s 2>&1 | sed -n "s/.*did you mean '\\(.*\\)'?/\\1/p"); qtool plan "$NANO" --scheme "$t" -q >/dev/null || exit 9; echo "$s $t"; done
> ^W4A16 int4$
> ^q4_K_M iq4nl$
> ^FP8_DYNAMIC fp8:max=448$

$ qtool plan "$NANO" --scheme fp6:f=2
? 2

$ qtool plan "$NANO" --scheme nf4:g=33
? 2

$ qtool plan "$NANO" --scheme nf4:g=
? 2

$ qtool plan "$NANO" --scheme nf4:method=serch
? 2
2 did you mean 'search'

$ qtool plan "$NANO" --scheme nf4 --tensor down_proj
? 2
2 --tensor 'down_proj' is not of the form REGEX=SCHEME

$ qtool plan "$NANO" --scheme nf4 --tensor '(=fp6'
? 2
2 --tensor '\('

$ qtool plan "$NANO" --scheme nf4 --tensor '(?R)*=fp6'
? 2
2 a regular expression cannot be matched: nested recursion at the same subject position

$ qtool plan "$NANO" --scheme nf4 --tensor '([a-z._0-9]+)+[!?]=fp6'
? 2
2 a regular expression cannot be matched: match limit exceeded

$ qtool plan "$NANO" --scheme nf4 --tensor 'dwon_proj=fp6'
? 2
2 --tensor 'dwon_proj' matches no tensor

$ qtool quantize "$NANO" --scheme nf4
? 2
2 --out OUT is missing

$ qtool quantize "$NANO" -o out
? 2
2 --scheme S is missing; 'qtool help recipes' lists schemes by runtime

# A wrong gate is refused before any work; the message names the option that a figure needs.
$ qtool eval "$NANO" --data "$NANO/eval.txt" --gate 'ppl<=' --progress plain
? 2
2 gate 'ppl<=': expected a number
2! done in

$ qtool eval "$NANO" --data "$NANO/eval.txt" --gate 'pppl<=3'
? 2
2 unknown figure 'pppl'; known figures: ppl, ref_ppl

$ qtool eval "$NANO" --data "$NANO/eval.txt" --gate 'kld_mean<=3'
? 2
2 --gate 'kld_mean<=3' needs --ref

$ qtool verify nowhere --gate 'sqnr_min>=3'
? 2
2 --gate 'sqnr_min>=3' needs --source

$ qtool verify nowhere --gate 'kernel_error<=3e-4'
? 2
2 --gate 'kernel_error<=3e-4' needs --device cuda

$ qtool eval "$NANO" --data "$NANO/eval.txt" --seqlen 4096
? 2
2 windows of 4096 tokens exceed the model's 2048 positions: reduce --seqlen

# Devices.
$ qtool inspect "$NANO" --device cuda
? 2
2 --device cuda: 'inspect' runs on the CPU only

$ qtool inspect "$NANO" --device cuda:1
? 2

$ qtool inspect "$NANO" --device cuda:x
? 2
2 --device cuda:N: 'x' is not a number

$ qtool inspect "$NANO" --device cdua
? 2
2 unknown device 'cdua'; did you mean

$ qtool eval "$NANO" --data x --device GPU
? 2
2 unknown device 'GPU'; did you mean 'cuda'\?

# Options of other tools.
$ qtool quantize "$NANO" -o x --bits 4
? 2
2 unknown option '--bits'; did you mean '--scheme int4'\?
$ qtool plan "$NANO" --wbits=3
? 2
2 did you mean '--scheme nf3'\?
$ qtool plan "$NANO" --group-size 128
? 2
2 did you mean '--scheme nf4:g=128'\?
$ qtool eval "$NANO" --gpu
? 2
2 did you mean '--device cuda'\?

# The environment.
$ QTOOL_ISA=foo qtool inspect "$NANO"
? 2
>-
2 ^qtool inspect: unknown value of QTOOL_ISA 'foo'

$ QTOOL_ISA=axv2 qtool inspect "$NANO"
? 2
2 unknown value of QTOOL_ISA 'axv2'; did you mean 'avx2'\?

$ for i in generic avx2 avx512 ''; do QTOOL_ISA=$i qtool inspect "$NANO" -q || echo $i; done
2-

# Options and arguments in any order, in every form.
$ qtool inspect --threads=1 "$NANO" -q
> ^tensors +29 in 1 file
2-

$ qtool eval --data="$NANO/eval.txt" --windows 1 --seqlen=16 -q -- "$NANO"
> ^data +1 window of 16 tokens, 15 scored$
2-
