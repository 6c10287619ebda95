# Learning needs data to run the model on.
$ qtool quantize "$NANO" -o l --scheme nf3:learn=1 -q
? 2
2 down_proj\.weight: nf3:.*learn=1 needs calibration data \(--data\), because it runs the model

$ qtool quantize "$NANO" -o l --scheme nf3 --tune-norms -q
? 2
2 it needs calibration data

$ qtool quantize "$NANO" -o l --scheme nf3:learn=1 --learn mode=frosen -q
? 2
2 did you mean 'frozen'

$ qtool quantize "$NANO" -o l --scheme nf3:learn=1 --learn lr=0 -q
? 2
2 lr=0: expected a number from

$ test ! -e l && test ! -e l.partial

# Spec and report record the learning; norms are tuned, not copied, and verify accepts that.
$ qtool quantize "$NANO" -o l --scheme nf3:learn=1,method=search --data "$NANO/calib.txt" --samples 4 --seqlen 64 --learn lr=1e-3,batch=1,passes=1 --tune-norms -q
> ^tensors +21 quantized, 8 copied$
$ grep -c '"held_out": 0' l/qtool-report.json
> ^[3-9]$
$ grep -q '"options": "objective=kl,mode=frozen,scope=model,lr=0.001,passes=1,batch=1,held-out=0.125"' l/qtool-report.json
$ test "$(grep -c '"source_crc32"' l/qtool.json)" -gt 21 && grep -q 'nf3:g=128,method=search,learn=1' l/qtool.json && test ! -e l/progress
$ qtool verify l --source "$NANO" -q
> ^container +sound.*copied tensors equal the source$
> ^tensors +21 quantized, 1 copied, 7 tuned$
$ qtool verify l --json -q | grep -A 1 '"copied"' | tr -d ' \n'
> "copied":1,"tuned":7
$ cp -r l claim && chmod -R u+w claim && sed -i 's/"model.embed_tokens.weight": {/&"source_crc32": "89abcdef",/' claim/qtool.json && qtool verify claim --source "$NANO" -q
? 3
2 claim: tensor model\.embed_tokens\.weight: has 'source_crc32', which only norms tuned

# Options without effect are errors.
$ qtool quantize "$NANO" -o l --scheme nf3:learn=1 --data "$NANO/calib.txt" --learn scope=block,objective=nll -q
? 2
2 scope=block takes no objective
