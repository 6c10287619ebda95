#!/usr/bin/env python3
"""Exports in vLLM's engine: greedy tokens against `qtool generate`, perplexity against `qtool eval`.

usage: exports_vllm.py QTOOL CHECKPOINT TEXT [NAME...]      needs vLLM and a GPU

For each NAME of CASES: quantizes the checkpoint without data, exports it, and loads the export
unmodified in a process of its own, four at a time. Prints one line per case; exit status 1 if a
token differs where it should not, or perplexity by more than 0.1 %.
"""
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

CASES = {"int4": ("int4", "compressed-tensors"), "int4-g64": ("int4:g=64", "compressed-tensors"),
         "int4-zero": ("int4:zero=group", "compressed-tensors"),
         "int8": ("int8", "compressed-tensors"), "fp8": ("fp8:max=448", "compressed-tensors"),
         "gptq": ("int4", "gptq"), "awq": ("int4:zero=group", "awq")}
PROMPTS = ["Once upon a time", "The king of the country", "In the morning she", "It was a dark and"]
TOKENS, WINDOWS, SEQLEN = 32, 16, 512


def qtool_json(*args):
    out = subprocess.run(list(args) + ["--json", "-q"], check=True, capture_output=True).stdout
    return json.loads(out)


def case(qtool, checkpoint, text, name, directory):
    scheme, form = CASES[name]
    container, export = (os.path.join(directory, p + name) for p in ("c-", "x-"))
    qtool_json(qtool, "quantize", checkpoint, "-o", container, "--scheme", scheme)
    qtool_json(qtool, "export", container, "-o", export, "--format", form)
    want = {"ppl": qtool_json(qtool, "eval", container, "--data", text, "--windows", str(WINDOWS),
                              "--seqlen", str(SEQLEN))["ppl"],
            "ids": [qtool_json(qtool, "generate", container, "-p", p, "--max-tokens", str(TOKENS),
                               "--ignore-eos")["sequences"][0]["ids"] for p in PROMPTS]}
    run = subprocess.run([sys.executable, __file__, "--engine", export, text, json.dumps(want)],
                         capture_output=True, text=True)
    lines = [x for x in run.stdout.splitlines() if x.startswith("tokens ")]
    print("%-10s %s" % (name, lines[0] if lines else "FAILED: " + run.stderr[-300:]), flush=True)
    return run.returncode == 0


def engine(export, text, want):
    """In a process of its own: vLLM frees little before the process ends."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
                      VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_NO_USAGE_STATS="1")
    from tokenizers import Tokenizer
    from vllm import LLM, SamplingParams
    llm = LLM(model=export, dtype="float16", max_model_len=2 * SEQLEN, max_num_seqs=16,
              gpu_memory_utilization=0.07, enforce_eager=True)
    greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    got = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    same = sum(a == b for x, y in zip(got, want["ids"]) for a, b in zip(x, y))
    tokenizer = Tokenizer.from_file(os.path.join(export, "tokenizer.json"))
    with open(text, encoding="utf-8") as f:
        ids = tokenizer.encode(f.read()[:20 * WINDOWS * SEQLEN]).ids
    windows = [ids[i * SEQLEN:(i + 1) * SEQLEN] for i in range(WINDOWS)]
    scored = llm.generate([{"prompt_token_ids": w} for w in windows],
                          SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    nll = -sum(p[t].logprob for w, o in zip(windows, scored)
               for t, p in zip(w[1:], o.prompt_logprobs[1:]))
    ppl = math.exp(nll / (WINDOWS * (SEQLEN - 1)))
    change = ppl / want["ppl"] - 1
    print("tokens equal %d of %d; perplexity %.5f, by qtool %.5f (%+.4f %%)" % (
        same, TOKENS * len(PROMPTS), ppl, want["ppl"], 100 * change), flush=True)
    os._exit(0 if same == TOKENS * len(PROMPTS) and abs(change) < 1e-3 else 1)


def main():
    if len(sys.argv) > 1 and sys.argv[1] == "--engine":
        engine(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    if len(sys.argv) < 4:
        print(__doc__)
        return 2
    names = sys.argv[4:] or list(CASES)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(4) as pool:
        ok = list(pool.map(lambda name: case(*sys.argv[1:4], name, directory), names))
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
