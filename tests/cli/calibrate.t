# Calibration files: calibrate, --merge, inspect, quantize --calib.
$ qtool calibrate "$NANO" --data "$NANO/calib.txt" --samples 8 --seqlen 128 -o a.qcal --progress plain
> ^calibration +a\.qcal$
> ^model +llama: 3 layers, hidden 256$
> ^tokens +1024$
2 ^qtool calibrate: calibrate done in 0:0

$ test ! -e a.qcal.partial && qtool inspect a.qcal
> ^LAYER +INPUT +K +TOKENS +RMS +P99\.9 MAX +ABSMAX +DEAD$
> ^ +0 +attention in +256 +1024 +[0-9.]+ +[0-9.]+ +[0-9.]+ +0$
> ^ +2 +MLP down +512 +1024 +[0-9.]+ +[0-9.]+ +[0-9.]+ +0$
> ^model +llama: 3 layers, hidden 256 \(fingerprint [0-9a-f]{8}\)$
> ^data +8 windows of 128 tokens, seed 0, of calib\.txt$
> ^tokens +1024$
2-

$ qtool inspect a.qcal --json
> "kind": "calibration"
> "sample_crc32": "[0-9a-f]{8}"
> "tokens": 1024
> "bos": false
> "p999_max": [0-9.]+
> "input": "attention out"

# The bytes do not depend on the number of threads, but on the data.
$ qtool calibrate "$NANO" --data "$NANO/calib.txt" --samples 8 --seqlen 128 -o t1.qcal --threads 1 -q && qtool calibrate "$NANO" --data "$NANO/calib.txt" --samples 8 --seqlen 128 -o t4.qcal --threads 4 -q
$ cmp a.qcal t1.qcal && cmp a.qcal t4.qcal
$ qtool calibrate "$NANO" --data "$NANO/calib.txt" --samples 8 --seqlen 128 --seed 5 -o s5.qcal -q && ! cmp -s a.qcal s5.qcal

# An existing file is replaced with --force only.
$ qtool calibrate "$NANO" --data "$NANO/eval.txt" --samples 4 --seqlen 128 -o t1.qcal -q
? 2
>-
2 ^qtool calibrate: t1\.qcal: exists already; --force replaces it
$ cmp a.qcal t1.qcal
$ qtool calibrate "$NANO" --data "$NANO/eval.txt" --samples 4 --seqlen 128 -o t1.qcal -q --force --json
> "tokens": 512
> "parts": 1

# Merging: the order of the files does not matter.
$ mv t1.qcal b.qcal && qtool calibrate --merge a.qcal b.qcal s5.qcal -o m.qcal -q
> ^tokens +2560$
$ qtool calibrate --merge a.qcal b.qcal -o none.qcal --seed 3 -q
? 2
2 --samples, --seqlen, --seed and --bos need --data
$ qtool calibrate s5.qcal --merge -o n.qcal a.qcal b.qcal -q && cmp m.qcal n.qcal
$ qtool inspect m.qcal
> ^data +8 windows of 128 tokens, seed 5, of calib\.txt$
> ^data +4 windows of 128 tokens, seed 0, of eval\.txt$
> ^tokens +2560$
$ qtool calibrate --merge a.qcal t4.qcal -o twice.qcal -q
? 2
2 its windows of calib\.txt are also in another of the files; they would count twice
$ test ! -e twice.qcal && test ! -e twice.qcal.partial

# quantize --calib: more accurate than without, same bytes for any number of threads.
$ qtool quantize "$NANO" -o q --scheme nf3:g=64 --calib m.qcal -q
> ^tensors +21 quantized, 8 copied$
$ qtool quantize "$NANO" -o r --scheme nf3:g=64 -q && qtool eval r --ref "$NANO" --data "$NANO/eval.txt" --windows 4 -q --gate 'kld_mean>=0.5'
$ qtool eval q --ref "$NANO" --data "$NANO/eval.txt" --windows 4 -q --gate 'kld_mean<0.45'
$ qtool quantize "$NANO" -o q1 --scheme nf3:g=64 --calib m.qcal -q --threads 1 && cmp q/model.safetensors q1/model.safetensors && cmp q/qtool.json q1/qtool.json
$ grep -c '"file_crc32"' q/qtool.json
> ^1$
$ qtool verify q -q

# Few tokens give a warning.
$ qtool quantize "$NANO" -o few --scheme nf3:g=64 --calib a.qcal
> ^tensors +21 quantized, 8 copied$
2 warning: 1024 calibration tokens for up to 512 channels: with fewer than 4 per channel

# A stopped run resumes with the same calibration only, and then gives the same bytes.
$ qtool quantize "$NANO" -o p --scheme nf3:g=64 --calib m.qcal -q --threads 1 2>err & pid=$!; while kill -0 $pid 2>/dev/null && ! [ "$(wc -l <p.partial/journal)" -ge 2 ]; do sleep 0.01; done 2>/dev/null; kill -TERM $pid; wait $pid
? 75
$ qtool quantize --resume "$NANO" -o p --scheme nf3:g=64 --calib a.qcal -q
? 8
2 cannot resume: calibration\.file_crc32 was "[0-9a-f]{8}", is now "[0-9a-f]{8}"
$ qtool quantize --resume "$NANO" -o p --scheme nf3:g=64 -q
? 8
2 cannot resume: calibration
$ qtool quantize --resume "$NANO" -o p --scheme nf3:g=64 --data "$NANO/calib.txt" --samples 4 --seqlen 64 -q
? 8
2 cannot resume: calibration
$ qtool quantize --resume "$NANO" -o p --scheme nf3:g=64 --calib m.qcal -q && cmp q/model.safetensors p/model.safetensors && cmp q/qtool.json p/qtool.json

# With --data, the windows must be the same too.
$ qtool quantize "$NANO" -o d --scheme nf3:g=64 --data "$NANO/calib.txt" --samples 4 --seqlen 64 -q --threads 1 2>err & pid=$!; while kill -0 $pid 2>/dev/null && ! [ "$(wc -l <d.partial/journal)" -ge 2 ]; do sleep 0.01; done 2>/dev/null; kill -TERM $pid; wait $pid
? 75
$ qtool quantize --resume "$NANO" -o d --scheme nf3:g=64 --data "$NANO/calib.txt" --samples 5 --seqlen 64 -q
? 8
2 cannot resume: calibration\.samples was 4, is now 5
$ qtool quantize --resume "$NANO" -o d --scheme nf3:g=64 --data "$NANO/eval.txt" --samples 4 --seqlen 64 -q
? 8
2 cannot resume: calibration\.ids_crc32

# config.json must be the same: it says how the model runs.
$ cp -r "$NANO" changed && chmod -R u+w changed && sed 's/"rms_norm_eps": [^,]*/"rms_norm_eps": 0.01/' "$NANO/config.json" >changed/config.json && touch -r "$NANO/model.safetensors" changed/model.safetensors && qtool quantize --resume changed -o d --scheme nf3:g=64 --data "$NANO/calib.txt" --samples 4 --seqlen 64 -q
? 8
2 cannot resume: calibration\.config_crc32

# Refused: a file of another checkpoint, a missing file, both --data and --calib.
$ cp -r "$NANO" other && chmod -R u+w other && printf '\0\1' | dd of=other/model.safetensors bs=1 seek=4069902 conv=notrunc 2>err && qtool quantize other -o x --scheme nf3 --calib a.qcal -q
? 3
>-
2 a\.qcal: made from another model than other: the weights differ \(fingerprint
$ qtool plan other --scheme nf3 --calib a.qcal
? 3
2 a\.qcal: made from another model than other: the weights differ \(fingerprint
$ test ! -e x && test ! -e x.partial

$ qtool quantize "$NANO" -o x --scheme nf3 --calib a.qcal --data "$NANO/calib.txt"
? 2
2 --data and --calib cannot be used together

$ qtool quantize "$NANO" -o x --scheme nf3 --calib nowhere.qcal
? 3
2 nowhere\.qcal: 

$ qtool quantize "$NANO" -o x --scheme nf3 --calib "$NANO/model.safetensors"
? 3
2 the name of a calibration file must end in \.qcal

$ cp "$NANO/model.safetensors" fake.qcal && qtool inspect fake.qcal
? 3
2 fake\.qcal: not a calibration file

$ cp a.qcal bad.qcal && printf '\1' | dd of=bad.qcal bs=1 seek=50000 conv=notrunc 2>err && qtool inspect bad.qcal
? 3
2 bad\.qcal: tensor layers\.0\.input\.0\.hist: the data's CRC-32 is

$ cp a.qcal bad.qcal && printf '\377\377' | dd of=bad.qcal bs=1 seek=100000 conv=notrunc 2>err && qtool quantize "$NANO" -o x --scheme nf3 --calib bad.qcal -q
? 3
2 bad\.qcal: tensor layers\.0\.input\.0\.h: the data's CRC-32 is
$ test ! -e x && test ! -e x.partial

$ head -c 500000 a.qcal >cut.qcal && qtool inspect cut.qcal
? 3
2 cut\.qcal: tensor layers

# A full disk is found before the work; it leaves no partial file, and the existing file stays.
$ cp a.qcal full.qcal && (ulimit -f 2000; qtool calibrate "$NANO" --data "$NANO/calib.txt" --samples 1 --seqlen 16 -o full.qcal -q --force)
? 6
2 full\.qcal\.partial: no room for the [0-9]+ bytes needed
2! layer|calibrate 0
$ cmp a.qcal full.qcal && test ! -e full.qcal.partial

# Usage errors.
$ qtool calibrate "$NANO" -o x.qcal
? 2
2 --data FILE is missing

$ qtool calibrate "$NANO" --data "$NANO/calib.txt"
? 2
2 --out X\.qcal is missing

$ qtool calibrate --data "$NANO/calib.txt" -o x.qcal
? 2
2 PATH\.\.\. is missing

$ qtool calibrate "$NANO" --data "$NANO/calib.txt" -o x.safetensors --samples 8 --seqlen 64
? 2
2 x\.safetensors: the name of a calibration file must end in \.qcal

$ qtool calibrate "$NANO" "$NANO" --data "$NANO/calib.txt" -o x.qcal
? 2
2 unexpected argument

$ qtool calibrate --merge a.qcal -o x.qcal
? 2
2 --merge needs at least two calibration files

$ qtool calibrate --merge a.qcal b.qcal --data "$NANO/calib.txt" -o x.qcal
? 2
2 --merge and --data cannot be used together

$ qtool calibrate "$NANO" --data "$NANO/calib.txt" -o x.qcal --samples 100000
? 3
2 --samples
$ qtool calibrate "$NANO" --data "$NANO/calib.txt" -o x.qcal --samples 1 --seqlen 4096
? 2
2 windows of 4096 tokens; the model takes 2048

$ : >empty.txt && qtool quantize "$NANO" -o x --scheme nf4 --data empty.txt -q
? 3
2 empty\.txt: 0 tokens make 0 windows
$ qtool quantize "$NANO" -o x --scheme nf4 --data "$NANO/calib.txt" --samples 1 --seqlen 4096 -q
? 2
2 windows of 4096 tokens exceed the model's 2048 positions

$ ls | grep -c '^x'
? 1
> ^0$

# A resumed run must have the same source weights, even if its finished tensors are intact.
need command -v python3
$ cp -r "$NANO" k && qtool quantize k -o mixed --scheme nf3 --data "$NANO/calib.txt" --samples 4 --seqlen 64 -q --threads 1 2>err & pid=$!; while kill -0 $pid 2>/dev/null && ! grep -q q_proj mixed.partial/journal; do sleep 0.01; done 2>/dev/null; kill -TERM $pid; wait $pid
? 75
$ python3 -c 'import json,struct;p="k/model.safetensors";f=open(p,"r+b");n=struct.unpack("<Q",f.read(8))[0];a,b=json.loads(f.read(n))["model.embed_tokens.weight"]["data_offsets"];f.seek(8+n+(a+b)//2);f.write(b"\0"*64)'
$ qtool quantize k -o mixed --scheme nf3 --data "$NANO/calib.txt" --samples 4 --seqlen 64 -q --threads 1 --resume
? 8
2 mixed\.partial/journal: cannot resume: calibration\.weights_crc32 was "[0-9a-f]{8}", is now "[0-9a-f]{8}"
