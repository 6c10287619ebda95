# What a run trusts, and what it must not delete or show.
$ cp -r "$NANO" ck && qtool quantize ck -o c --scheme nf4 -q && cp -r c good
> ^container +c$

# eval checks the manifest and side files of a container.
$ sed '0,/"scale_exp2": 0/s//"scale_exp2": 3/' good/qtool.json >c/qtool.json && ! cmp -s good/qtool.json c/qtool.json && qtool eval c --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q
? 3
2 ^qtool eval: c/qtool\.json: differs from its checksum in SHA256SUMS$
$ qtool eval ck --ref c --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q
? 3
2 c/qtool\.json: differs from its checksum
$ qtool quantize --resume ck -o c --scheme nf4 -q
? 3
2 c/qtool\.json: differs from its checksum
$ cp good/qtool.json c && sed 's/"rope_theta": [0-9.]*/"rope_theta": 20000.0/' good/config.json >c/config.json && ! cmp -s good/config.json c/config.json && qtool eval c --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q
? 3
2 c/config\.json: differs from its checksum
$ cp good/config.json c && echo '{}' >c/generation_config.json && qtool eval c --data "$NANO/eval.txt" --windows 1 --seqlen 64 -q
? 3
2 c/generation_config\.json: (is not listed|differs)
$ rm -r c && cp -r good c && rm c/SHA256SUMS && qtool eval c --data "$NANO/eval.txt" --windows 1 --seqlen 64
> ^perplexity
2 c/SHA256SUMS is missing: the manifest and side files cannot be checked

# --force deletes no file that the run reads, whatever links lead to it.
$ rm -r c && cp -r good c && cp ck/model.safetensors c/src.safetensors && mkdir links && ln -s ../c/src.safetensors links/model.safetensors && cp ck/config.json links && qtool quantize links -o c --scheme nf3 --force -q
? 2
2 links/model\.safetensors: would be deleted: it is c/src\.safetensors, and c would be replaced$
$ cmp ck/model.safetensors c/src.safetensors && test ! -e c.partial && rm c/src.safetensors
$ ln -sf ../ck/model.safetensors links/model.safetensors && rm links/config.json && cp ck/config.json c && ln -s ../c/config.json links/config.json && qtool quantize links -o c --scheme nf3 --force -q
? 2
2 links/config\.json: would be deleted
$ cp "$NANO/calib.txt" c/mine.txt && qtool quantize ck -o c --scheme nf3 --data c/mine.txt --samples 1 --seqlen 64 --force -q
? 2
2 c/mine\.txt: would be deleted
$ qtool calibrate ck -o c/x.qcal --data c/mine.txt --samples 1 --seqlen 64 -q >/dev/null && rm c/mine.txt && qtool quantize ck -o c --scheme nf3 --calib c/x.qcal --force -q
? 2
2 c/x\.qcal: would be deleted
$ test -e c/x.qcal && mv c/x.qcal . && qtool quantize ck -o c --scheme nf3 --calib x.qcal --force -q
> ^container
$ qtool calibrate ck -o y.qcal --data "$NANO/eval.txt" --samples 1 --seqlen 64 -q >/dev/null && cp x.qcal keep && qtool calibrate --merge x.qcal y.qcal -o ./x.qcal --force -q
? 2
2 x\.qcal: would be deleted
$ cmp x.qcal keep

# Working files are never written through links.
$ cp ck/config.json before && ln ck/config.json z.qcal.partial && qtool calibrate ck -o z.qcal --data "$NANO/eval.txt" --samples 1 --seqlen 64 -q
? 2
2 z\.qcal\.partial: not replaced: it is not the unfinished file of an earlier run
$ cmp ck/config.json before && rm z.qcal.partial && ln -s ck/config.json z.qcal.partial && qtool calibrate ck -o z.qcal --data "$NANO/eval.txt" --samples 1 --seqlen 64 -q
? 2
$ cmp ck/config.json before && rm z.qcal.partial && cp x.qcal z.qcal.partial && qtool calibrate ck -o z.qcal --data "$NANO/eval.txt" --samples 1 --seqlen 64 -q
? 2
$ cmp x.qcal z.qcal.partial

# Side files keep their permissions, and links out of the checkpoint only lead to text.
$ umask 022; echo mine >secret && chmod 640 secret && printf 'a\0b' >binary && ln -s ../secret ck/LICENSE && ln -s ../binary ck/NOTICE && ln -s LICENSE ck/LICENSE.md && chmod 600 ck/tokenizer.json && qtool quantize ck -o d --scheme nf4 >/dev/null
2 ck/NOTICE is a link out of the checkpoint, to a file that is not text: not copied
$ stat -c '%a %n' d/LICENSE d/LICENSE.md d/tokenizer.json d/config.json && cat d/LICENSE && test ! -e d/NOTICE
> ^640 d/LICENSE$
> ^640 d/LICENSE.md$
> ^600 d/tokenizer.json$
> ^644 d/config.json$
> ^mine$
$ qtool quantize --resume ck -o d --scheme nf4 -q
> already complete
