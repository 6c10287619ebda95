#!/usr/bin/env python3
"""Exports and containers in vLLM's engine: greedy tokens against `qtool generate`, perplexity
against `qtool eval`.

usage: exports_vllm.py QTOOL CHECKPOINT TEXT [NAME...]      needs vLLM and a GPU

For each NAME of CASES: quantizes the checkpoint without data, exports it, and loads the export
unmodified in a process of its own, all at the same time. Cases without a format load the container
itself: they need the package qtool-torch (docs/python.md). NAME+graphs runs with torch.compile and
CUDA graphs, as vLLM does by default. Prints one line per case; exit status 1 if a token differs or
perplexity by more than 0.1 %.

The inputs of `fp8-inputs` are rounded to FP8, which qtool does not compute: transformers does, in
FP32 on the CPU. An input on the boundary of two FP8 numbers decides otherwise in FP16, so tokens
may differ, and perplexity by 0.5 %.
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
         "int4-zero-g64": ("int4:g=64,zero=group", "compressed-tensors"),
         "mxfp4": ("mxfp4", "compressed-tensors"), "nvfp4": ("nvfp4", "compressed-tensors"),
         "int8": ("int8", "compressed-tensors"), "fp8": ("fp8:max=448", "compressed-tensors"),
         "fp8-inputs": ("fp8:max=448", "compressed-tensors", "--fp8-inputs"),
         "gptq": ("int4", "gptq"), "awq": ("int4:zero=group", "awq"),
         "container-nf4": ("nf4", None), "container-nf3": ("nf3", None),
         "container-lut3": ("lut3", None), "container-fp6": ("fp6", None),
         "container-int4": ("int4", None), "container-int8": ("int8", None),
         "container-mix24": ("mix24:order=none,fit=minmax", None)}
PROMPTS = ["Once upon a time", "The king of the country", "In the morning she", "It was a dark and"]
TOKENS, WINDOWS, SEQLEN = 32, 16, 512


def qtool_json(*args):
    out = subprocess.run(list(args) + ["--json", "-q"], check=True, capture_output=True).stdout
    return json.loads(out)


def prepare(qtool, checkpoint, text, name, directory):
    """The directory that vLLM loads, and what it should compute."""
    scheme, form, *options = CASES[name.partition("+")[0]]
    container, export, dense = (os.path.join(directory, p + name) for p in ("c-", "x-", "d-"))
    qtool_json(qtool, "quantize", checkpoint, "-o", container, "--scheme", scheme)
    if form:
        qtool_json(qtool, "export", container, "-o", export, "--format", form, *options)
    if options:
        qtool_json(qtool, "export", container, "-o", dense, "--format", "dense", "--dtype",
                   "float32")
    ppl = qtool_json(qtool, "eval", container, "--data", text, "--windows", str(WINDOWS),
                     "--seqlen", str(SEQLEN))["ppl"]
    ids = [qtool_json(qtool, "generate", container, "-p", p, "--max-tokens", str(TOKENS),
                      "--ignore-eos")["sequences"][0]["ids"] for p in PROMPTS]
    return export if form else container, dense if options else None, ids, ppl


def encode(path, text):
    """Token ids of the windows, and of the prompts."""
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(os.path.join(path, "tokenizer.json"))
    with open(text, encoding="utf-8") as f:
        tokens = tokenizer.encode(f.read()[:20 * WINDOWS * SEQLEN]).ids
    return ([tokens[i * SEQLEN:(i + 1) * SEQLEN] for i in range(WINDOWS)],
            [tokenizer.encode(p).ids for p in PROMPTS])


def with_fp8_inputs(dense, text):
    """Greedy tokens and perplexity of a model whose linear layers round their inputs to FP8."""
    import torch
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(1)  # forked

    def rounded(module, args):
        scale = args[0].abs().amax(-1, keepdim=True) / 448
        return (args[0] / scale).to(torch.float8_e4m3fn).float() * scale
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)
    windows, ids = encode(dense, text)
    with torch.no_grad():
        nll = [torch.nn.functional.cross_entropy(model(torch.tensor([w])).logits[0, :-1],
                                                 torch.tensor(w[1:])).item() for w in windows]
        for _ in range(TOKENS):
            ids = [p + [model(torch.tensor([p])).logits[0, -1].argmax().item()] for p in ids]
    return [p[-TOKENS:] for p in ids], math.exp(sum(nll) / WINDOWS)


def check(path, dense, text, ids, ppl, eager=True):
    """One model in vLLM. Returns a line of text, and whether all is as it should be."""
    from vllm import LLM, SamplingParams
    note, tolerance = "", 1e-3
    if dense:
        note, tolerance = " (weights alone %.5f)" % ppl, 5e-3
        ids, ppl = with_fp8_inputs(dense, text)
    llm = LLM(model=path, dtype="float16", max_model_len=2 * SEQLEN, max_num_seqs=16,
              gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 30,
              **{"enforce_eager": True} if eager else
              {"compilation_config": {"cudagraph_capture_sizes": [1, 4, 16]}})
    greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    got = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    same = sum(a == b for x, y in zip(got, ids) for a, b in zip(x, y))
    windows, _ = encode(path, text)
    scored = llm.generate([{"prompt_token_ids": w} for w in windows],
                          SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    nll = -sum(p[t].logprob for w, o in zip(windows, scored)
               for t, p in zip(w[1:], o.prompt_logprobs[1:]))
    found = math.exp(nll / (WINDOWS * (SEQLEN - 1)))
    return ("tokens equal %d of %d; perplexity %.5f, expected %.5f (%+.4f %%)%s" % (
        same, TOKENS * len(PROMPTS), found, ppl, 100 * (found / ppl - 1), note),
        (dense or same == TOKENS * len(PROMPTS)) and abs(found / ppl - 1) < tolerance)


def child(name, log, *args):
    """Forked, since vLLM frees little before its process ends."""
    out, fd = os.dup(1), os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    try:
        line, ok = check(*args)
    except BaseException as e:
        line, ok = f"FAILED: {type(e).__name__}: {e}"[:300], False
    os.write(out, ("%-15s %s\n" % (name, line)).encode())
    os._exit(not ok)


def main():
    if len(sys.argv) < 4:
        print(__doc__)
        return 2
    names, bad = sys.argv[4:] or list(CASES), 0
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
                      VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_NO_USAGE_STATS="1")
    with tempfile.TemporaryDirectory() as directory:
        with ThreadPoolExecutor(8) as pool:
            ready = list(pool.map(lambda name: prepare(*sys.argv[1:4], name, directory), names))
        import vllm  # noqa: F401, which takes half a minute, once
        for name, (path, dense, ids, ppl) in zip(names, ready):
            if os.fork() == 0:
                child(name, os.path.join(directory, name + ".log"), path, dense, sys.argv[3], ids,
                      ppl, not name.endswith("+graphs"))
        for _ in names:
            bad += os.wait()[1] != 0
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
