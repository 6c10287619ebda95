# The pipeline of examples/ci succeeds, or stops with qtool's exit status.
$ head -c 10000 "$NANO/calib.txt" >calib.txt
$ QTOOL=qtool CALIB=calib.txt WINDOWS=2 SCHEME=fp6:e=2 "$RELEASE" "$NANO" ship
> ^quantize: qtool quantize 
> ^ship: 6\.[0-9]+ bits per weight, perplexity x [01]\.[0-9]+, sha256 of SHA256SUMS [0-9a-f]{64}$
$ grep -q '"ok": true' ship.logs/verify.json && grep -q '"kld": ' ship.logs/eval.json
$ QTOOL=qtool WINDOWS=4 BPW=4 "$RELEASE" "$NANO" wide
? 5
2 plan: more than 4 bits per weight
$ test ! -e wide
$ QTOOL=qtool CALIB=calib.txt SCHEME=nf2 BPW=9 SQNR=20 "$RELEASE" "$NANO" coarse
? 5
2 gate failed: sqnr is [0-9.]+, required >= 20; sqnr of model\.layers\.
$ QTOOL=qtool SCHEME=fp99 "$RELEASE" "$NANO" none
? 2
# A second run checks the existing container, and refuses one of other data.
$ sha256sum ship/* >before; QTOOL=qtool CALIB=calib.txt WINDOWS=2 SCHEME=fp6:e=2 "$RELEASE" "$NANO" ship
> ^ship: 6\.[0-9]+ bits per weight
$ sha256sum ship/* | cmp - before && grep -q '"reused": true' ship.logs/quantize.json
$ QTOOL=qtool "$RELEASE" "$NANO" ship
? 8
2 ship: cannot resume: calibration\.
# A signal reaches qtool, and the same arguments resume; a slash after OUT is ignored.
$ QTOOL=qtool CALIB=calib.txt WINDOWS=2 "$RELEASE" "$NANO" cut & pid=$!; while kill -0 $pid && ! [ -e cut.partial/journal ]; do sleep 0.01; done; kill -TERM $pid; wait $pid
? 75
$ test ! -e cut && QTOOL=qtool CALIB=calib.txt WINDOWS=2 "$RELEASE" "$NANO" cut/ && test -d cut.logs && test ! -e cut/.logs
> ^cut: 6\.[0-9]+ bits per weight
$ QTOOL=qtool DATA=nowhere.txt "$RELEASE" "$NANO" late
? 3
2 nowhere\.txt: cannot be read
$ test ! -e late.logs
