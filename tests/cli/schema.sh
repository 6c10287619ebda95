#!/bin/sh
# Validates the --json output of every command against docs/json.schema.json. Skips without Python's
# jsonschema (Debian: python3-jsonschema).
#
#   QTOOL: the binary, default build/qtool; PYTHON: default python3

cd "$(dirname "$0")/../.." || exit 1
QTOOL=${QTOOL:-build/qtool} PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import jsonschema' 2>/dev/null; then
    echo "SKIP: no jsonschema for $PYTHON"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
nano=examples/nano-llama

# doc NAME STATUS ARGUMENT...: stores the document of a command, which must end with this status.
doc() {
    name=$1 expected=$2
    shift 2
    "$QTOOL" "$@" --json >"$tmp/$name.json" 2>"$tmp/err"
    status=$?
    [ $status -eq "$expected" ] || echo "$name: exit status $status" >"$tmp/$name.json"
    echo "$status" >"$tmp/$name.status"
}

doc inspect-checkpoint 0 inspect $nano
doc inspect-file 0 inspect $nano/model.safetensors
doc plan-all 0 plan $nano
doc plan-one 0 plan $nano --scheme nf3:g=64 --tensor 'down_proj=fp6' --tensor '0\.self_attn=none'
doc plan-kv 0 plan $nano --scheme nf4 --kv 4
doc plan-target 0 plan $nano --target-bpw 3.5 --choices nf3,nf4 -q
doc quantize-target 0 quantize $nano -o "$tmp/target" --target-bpw 3.5 --choices nf3,nf4 --data $nano/calib.txt --samples 1 --seqlen 16 -q
doc calibrate 0 calibrate $nano -o "$tmp/x.qcal" --data $nano/calib.txt --samples 1 --seqlen 16 -q
doc inspect-calibration 0 inspect "$tmp/x.qcal"
doc quantize 0 quantize $nano -o "$tmp/free" --scheme fp6 -q
doc quantize-calibrated 0 quantize $nano -o "$tmp/out" --scheme nf4 --calib "$tmp/x.qcal" -q
doc inspect-container 0 inspect "$tmp/out"
doc quantize-experts 0 quantize tests/golden/models/mixtral -o "$tmp/experts" --scheme nf4 --data tests/golden/models/mixtral/ids.u16 --samples 2 --seqlen 16 -q
doc quantize-kv 0 quantize $nano -o "$tmp/kv" --scheme none --kv 4 --data $nano/calib.txt --samples 1 --seqlen 16 -q
doc inspect-kv 0 inspect "$tmp/kv"
doc export-dry-run 0 export "$tmp/out" --format dense --dry-run -q
doc export 0 export "$tmp/out" -o "$tmp/dense" --format dense -q
doc verify 0 verify "$tmp/out" -q
doc verify-source 0 verify "$tmp/out" --source $nano -q
doc verify-gate 5 verify "$tmp/out" --gate 'bpw<1' -q
doc eval 0 eval $nano --data $nano/eval.txt --windows 1 -q
doc generate 0 generate $nano -p Once --max-tokens 2 --batch 2 -q
doc eval-ref 0 eval "$tmp/out" --data $nano/eval.txt --windows 1 --ref $nano -q
doc eval-kv 0 eval "$tmp/kv" --data $nano/eval.txt --windows 1 --kv 4 -q
doc report 0 report "$tmp/out" "$tmp/eval-ref.json" "$tmp/x.qcal" -o "$tmp/report.html"
doc list-schemes 0 list schemes
doc list-kernels 0 list kernels
doc list-archs 0 list archs
doc list-exports 0 list exports
doc version 0 version
doc usage 2 eval $nano
doc bad-input 3 inspect "$tmp/none"
doc unsupported 4 quantize $nano -o "$tmp/no" --scheme fp6 --tensor norm=fp6
doc io 6 quantize $nano -o /proc/no --scheme fp6
doc unknown 2 nonsense
export CUDA_VISIBLE_DEVICES= # hides GPUs
doc bench-no-gpu 7 bench

"$QTOOL" help | sed -n '/^Commands:/,/^$/s/^  \([a-z]\{1,\}\) .*/\1/p' >"$tmp/commands"

"$PYTHON" - docs/json.schema.json "$tmp" <<'PYTHON'
import glob, json, os, sys
import jsonschema

with open(sys.argv[1]) as f:
    schema = json.load(f)
cls = jsonschema.validators.validator_for(schema)
cls.check_schema(schema)
validator, failed, passed = cls(schema), 0, 0
for path in sorted(glob.glob(os.path.join(sys.argv[2], "*.json"))):
    with open(path[:-5] + ".status") as f:
        status = int(f.read())
    try:
        with open(path) as f:
            doc = json.load(f)
        validator.validate(doc)
        code = doc["error"]["exit_code"] if "error" in doc else 0
        assert code == status, f"exit status {status}, {code} in the document"
        passed += 1
    except Exception as e:
        print(f"FAIL {os.path.basename(path)}: {str(e).splitlines()[0]}")
        failed += 1
with open(os.path.join(sys.argv[2], "commands")) as f:
    commands = set(f.read().split()) - {"help"}
if commands != set(schema["properties"]["command"]["enum"]) - {None}:
    print("FAIL: the schema does not have the commands of qtool help")
    failed += 1
# The validator must reject broken documents.
for broken in {}, {**doc, "schema": 2}, {**doc, "ok": not doc["ok"]}:
    if validator.is_valid(broken):
        print("FAIL: a broken document is valid")
        failed += 1
print(f"{passed} passed, {failed} failed, 0 skipped")
sys.exit(failed != 0)
PYTHON
