# The manual page has all commands and options, and groff accepts it.
$ qtool manual
> ^\.TH QTOOL 1 
> ^\.SS qtool quantize CKPT
> ^\.B \\-\-tensor|^\.B \\-\\-tensor
> ^interrupted
2-
need command -v groff
$ qtool manual >qtool.1 && groff -man -Tutf8 -ww qtool.1 >/dev/null
2-
$ qtool manual --json
? 2

# Completion offers commands, options and values.
$ qtool completion tcsh
? 2
2 unknown shell 'tcsh'
$ qtool completion bash >rc && bash -c '. ./rc; COMP_WORDS=(qtool quantize --sch); COMP_CWORD=2; _qtool; echo "${COMPREPLY[@]}"'
> ^--scheme$
$ bash -c '. ./rc; COMP_WORDS=(qtool plan --scheme nf); COMP_CWORD=3; _qtool; echo "${COMPREPLY[@]}"'
> ^nf4 nf3 nf2$
$ bash -c '. ./rc; COMP_WORDS=(qtool plan --scheme no); COMP_CWORD=3; _qtool; echo "${COMPREPLY[@]}"'
> ^none$
$ bash -c '. ./rc; COMP_WORDS=(qtool bench --scheme kv); COMP_CWORD=3; _qtool; echo "${COMPREPLY[@]}"'
> ^kv4$
$ bash -c '. ./rc; COMP_WORDS=(qtool bench --scheme no); COMP_CWORD=3; _qtool; echo "[${COMPREPLY[@]}]"'
> ^\[\]$
$ bash -c '. ./rc; COMP_WORDS=(qtool eval --progress p); COMP_CWORD=3; _qtool; echo "${COMPREPLY[@]}"'
> ^plain$
$ bash -c '. ./rc; COMP_WORDS=(qtool list k); COMP_CWORD=2; _qtool; echo "${COMPREPLY[@]}"'
> ^kernels$
$ bash -c '. ./rc; COMP_WORDS=(qtool list --js); COMP_CWORD=2; _qtool; echo "${COMPREPLY[@]}"'
> ^--json$
$ bash -c '. ./rc; COMP_WORDS=(qtool ver); COMP_CWORD=1; _qtool; echo "${COMPREPLY[@]}"'
> ^verify version$
$ touch "c d.safetensors" && bash -c '. ./rc; COMP_WORDS=(qtool inspect c); COMP_CWORD=2; _qtool; printf "<%s>" "${COMPREPLY[@]}"'
> ^<c d\.safetensors>$
$ for o in $(qtool calibrate --help | grep -o -e '--[a-z]*' | sort -u); do grep -q -e " $o[ ']" rc || echo "$o"; done
>-
# fish: every option of a command, with a description in single quotes.
$ qtool completion fish >rc.fish && for o in data device force json merge out progress quiet samples seed seqlen threads; do grep -q -e "from calibrate' -l $o .*-d '" rc.fish || echo "$o"; done
>-
$ grep -c "__fish_use_subcommand -f -a quantize -d 'make a container" rc.fish && grep "from list' -f -a 'schemes kernels archs exports'" rc.fish && ! grep -v -e '^#' -e '^complete -c qtool ' rc.fish
> ^1$
need command -v zsh
$ qtool completion zsh >_qtool && zsh -n _qtool
