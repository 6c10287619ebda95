# Before any command.
$ qtool
? 2
>-
2 ^  qtool quantize CKPT -o OUT --scheme int4 --data TEXT$
2 ^  qtool eval OUT
2 ^  qtool export OUT -o DIR --format compressed-tensors$
2 ^usage: qtool COMMAND

# Ten recipes, as in docs/recipes.md. Each scheme exists, and its format holds it exactly.
$ qtool help recipes >recipes && head -n 11 recipes | tail -n 10
> ^ 4\.5  llama\.cpp, Ollama, LM Studio +iq4nl +--data +gguf$
>! .{91}
$ head -n 11 recipes | tail -n 10 | sed 's/^ *//; s/   */|/g; s/  /|/g' | while IFS='|' read -r bits runtime scheme data format; do [ -n "$format" ] || { format=$data; data=; }; grep -q -F "| $bits | $runtime | \`$scheme\` |" "$NANO/../../docs/recipes.md" || echo "$scheme is not in docs/recipes.md"; qtool quantize "$NANO" -o r --force --scheme $scheme --progress none >/dev/null 2>said || cat said; [ "$format" = - ] || grep -q -e "--format .*$format" said || echo "$scheme: $format"; done
>-

$ qtool --help
> ^usage: qtool COMMAND
> ^  quantize +make a container
> ^  75  interrupted; 'quantize --resume' continues, other commands start again$
2-

$ qtool help
> ^usage: qtool COMMAND

$ qtool -h
> ^usage: qtool COMMAND

$ qtool help eval
> ^usage: qtool eval PATH --data FILE

$ qtool help evall
? 2
2 unknown command 'evall'; did you mean 'eval'\?

$ qtool version
> ^qtool [0-9]+\.[0-9]+\.[0-9]+$
> ^container format 2$

$ qtool -V
> ^qtool [0-9]

$ qtool --version
> ^qtool [0-9]

$ qtool quantise
? 2
>-
2 ^qtool: unknown command 'quantise'; did you mean 'quantize'\?$
2 Run 'qtool --help' for usage

$ qtool xyzzyxyzzy
? 2
2 ^qtool: unknown command 'xyzzyxyzzy'$

$ qtool --json
? 2
> "ok": false
2 unknown command '--json'

$ qtool vresion --json
? 2
> "command": null
> "ok": false
> "message": "unknown command 'vresion'; did you mean 'version'\?"

# Threads spin only briefly while they wait for each other, unless the environment is set.
need OMP_DISPLAY_ENV=verbose qtool version 2>&1 | grep -q GOMP_SPINCOUNT
$ env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT OMP_DISPLAY_ENV=verbose qtool version
2 GOMP_SPINCOUNT = '10000'
$ env -u GOMP_SPINCOUNT OMP_WAIT_POLICY=passive OMP_DISPLAY_ENV=verbose qtool version
2! GOMP_SPINCOUNT = '10000'

# With too little address space OpenBLAS threads would retry forever to get their buffers.
need sh -c 'ulimit -v 150000; OPENBLAS_NUM_THREADS=1 timeout 20 qtool version'
$ sh -c 'unset OPENBLAS_NUM_THREADS; ulimit -v 150000; exec timeout 20 qtool version'
> qtool

# Threads start before large allocations: if they cannot start, OpenMP ends the process.
$ h='{"w.weight":{"dtype":"F16","shape":[8192,8192],"data_offsets":[0,134217728]}}'; n=${#h}; printf "\\$(printf %03o $n)\0\0\0\0\0\0\0%s" "$h" >zeros.safetensors; truncate -s $((8 + n + 134217728)) zeros.safetensors; (ulimit -v 350000; exec qtool quantize zeros.safetensors -o x --scheme none --tensor w=none -q --threads 32)
? 6
2 cannot map: Cannot allocate memory

# If OpenBLAS takes a new processor for an old one, OPENBLAS_CORETYPE is set.
# (LD_PRELOAD does not work with sanitizers.)
need grep fma.*avx2 /proc/cpuinfo && cc --version && ldd "$(command -v qtool)" | grep openblas && ! ldd "$(command -v qtool)" | grep asan
$ printf '%s\n' '#include <stdio.h>' '#include <stdlib.h>' 'char *openblas_get_corename(void) { return "Prescott"; }' '__attribute__((constructor)) static void say(void) { char *core = getenv("OPENBLAS_CORETYPE"); if (core) fprintf(stderr, "core: %s\n", core); }' >old.c && cc -shared -fPIC -o old.so old.c
$ env -u OPENBLAS_CORETYPE LD_PRELOAD=./old.so qtool version
2 ^core: (Haswell|SkylakeX)$
$ env OPENBLAS_CORETYPE=Nehalem LD_PRELOAD=./old.so qtool version
2! ^core: (Haswell|SkylakeX)$
