"""Runs GGUF exports in llama.cpp, and compares with qtool and transformers.

usage: gguf_llama.py QTOOL WORK [CHECKPOINT:TEXT...]

Perplexity: for every checkpoint and scheme, llama.cpp tokenizes TEXT and scores it in the windows
of `qtool eval`; both perplexities have to agree within PPL.

Logits: for random models of every architecture that the format has, llama.cpp with the export
against transformers with the dequantized weights in FP32. First only the embedding is quantized and
everything else is FP32: the logits are equal, or, where the head is the embedding, differ by what
llama.cpp rounds of its inputs (8 bits). Then all linears are quantized, which shows that codes are
in their places; random models magnify the rounding of inputs, and routers choose other experts for
some tokens. A wrong order of rows, norm, frequency or factor gives differences of the size of the
logits.

Needs llama_cpp (llama-cpp-python); for the logits torch and transformers.
"""
import json
import os
import subprocess
import sys

import numpy
from gguf_models import ARCHS, make_model
from llama_cpp import Llama

qtool, work, *models = sys.argv[1:]
SCHEMES = {"int8": [], "int4:g=32": [], "int4:g=128": [], "int4:g=64,zero=group": ["--lossy"],
           "iq4nl": [], "mxfp4": []}
PPL, RMS_EXACT, RMS, RMS_EXPERTS, RMS_LATENT = 5e-3, 0.01, 0.08, 0.25, 0.6
EMBEDDING = ["--scheme", "none", "--tensor", "^(?!.*layers).*embed_tokens=int8:g=32"]
SEQLEN, WINDOWS, IDS = 256, 16, [(7 * i * i + 13 * i + 5) % 1000 + 2 for i in range(96)]
failed = 0


def run(*args):
    r = subprocess.run([qtool, *args, "-q"], capture_output=True, text=True)
    if r.returncode:
        raise RuntimeError(r.stderr.strip())
    return r.stdout


def report(ok, text):
    global failed
    failed += not ok
    print(f"{'ok' if ok else 'FAIL'} {text}", flush=True)


def logits(llm, ids):
    llm.reset()
    llm.eval(ids)
    return numpy.array(llm.scores[:len(ids)], numpy.float64)


# ---- perplexity --------------------------------------------------------------------------------

def perplexity(path, text):
    """Also returns the number of tokens of the text."""
    llm = Llama(path, n_ctx=SEQLEN, n_batch=SEQLEN, logits_all=True, verbose=False)
    ids = llm.tokenize(text, add_bos=False, special=False)
    if llm.metadata["tokenizer.ggml.add_bos_token"] == "true":
        ids.insert(0, llm.token_bos())
    nll = []
    for start in range(0, min(len(ids) // SEQLEN, WINDOWS) * SEQLEN, SEQLEN):
        window = ids[start:start + SEQLEN]
        x = logits(llm, window)
        x -= x.max(axis=1, keepdims=True)
        x -= numpy.log(numpy.exp(x).sum(axis=1, keepdims=True))
        nll.extend(-x[numpy.arange(SEQLEN - 1), window[1:]])
    llm.close()
    return float(numpy.exp(numpy.mean(nll)))


def compare_perplexity(checkpoint, text, scheme, options):
    name = os.path.basename(checkpoint)
    container = os.path.join(work, f"{name}-{scheme}")
    out = container + "-gguf"
    run("quantize", checkpoint, "-o", container, "--scheme", scheme, "--force")
    run("export", container, "-o", out, "--format", "gguf", "--force", *options)
    want = json.loads(run("eval", container, "--data", text, "--seqlen", str(SEQLEN), "--windows",
                          str(WINDOWS), "--json"))["ppl"]
    with open(text, "rb") as f:
        got = perplexity(os.path.join(out, "model.gguf"), f.read(1 << 20))
    report(abs(got / want - 1) <= PPL, f"{name} {scheme}: perplexity {got:.4f} in llama.cpp, "
           f"{want:.4f} in qtool ({100 * (got / want - 1):+.3f} %)")


# ---- architectures -----------------------------------------------------------------------------

def compare_logits(source, schemes):
    """The difference, relative to the standard deviation of the logits."""
    from transformers import AutoModelForCausalLM

    run("quantize", source, "-o", source + "-c", "--force", *schemes)
    for form in ["gguf", "dense"]:
        run("export", source + "-c", "-o", f"{source}-{form}", "--format", form, "--force",
            "--dtype", "float32")
    reference = AutoModelForCausalLM.from_pretrained(source + "-dense", dtype=torch.float32,
                                                     attn_implementation="eager")
    with torch.no_grad():
        want = reference(torch.tensor([IDS])).logits[0].double().numpy()
    llm = Llama(source + "-gguf/model.gguf", n_ctx=len(IDS), n_batch=len(IDS), logits_all=True,
                verbose=False, type_k=0, type_v=0)
    rms = numpy.sqrt(((logits(llm, IDS) - want) ** 2).mean()) / want.std()
    llm.close()
    return rms


def compare_arch(name, kind, options):
    source = os.path.join(work, "arch-" + name)
    make_model(source, kind, options)
    experts = any("expert" in option for option in options)
    for what, schemes, limit in [("embedding", EMBEDDING, RMS_EXACT),
                                 ("linears", ["--scheme", "int8:g=32"],
                                  RMS_LATENT if "kv_lora_rank" in options
                                  else RMS_EXPERTS if experts else RMS)]:
        rms = compare_logits(source, schemes)
        report(rms <= limit, f"{name}, {what}: logits of llama.cpp differ from transformers by "
               f"{rms:.5f} of their standard deviation (<= {limit})")


try:
    import torch
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for arch, (family, extra) in ARCHS.items():
        compare_arch(arch, family, extra)
except ImportError as e:
    print(f"SKIP architectures: {e}")
for model in models:
    for s, o in SCHEMES.items():
        compare_perplexity(*model.split(":"), s, o)
sys.exit(failed > 0)
