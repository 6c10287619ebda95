"""Decode speed in transformers: a model of random weights in the shapes of Llama 3 8B.

usage: speed.py QTOOL WORK LAYERS SCHEME...

Four decoder layers are made and quantized (method=rtn); the model that is measured has copies of
them, in memory of their own, up to LAYERS, and LAYERS / 32 of the vocabulary, so that the share of
the head is that of all 32 layers. Static cache of 1024 tokens, 512 of them used,
torch.compile(mode="reduce-overhead"), batches of 1 and 16. SCHEME none is FP16. Needs 8 GB of disk.
Processes with the same WORK measure one after the other.
"""
import copy
import fcntl
import os
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

import qtool_torch  # noqa: F401, registers the quantizer

qtool, work, layers = sys.argv[1], sys.argv[2], int(sys.argv[3])
CONTEXT, USED, STEPS = 1024, 512, 100


def lock():
    """Held until the result is closed."""
    file = open(os.path.join(work, "lock"), "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def make():
    path = os.path.join(work, "llama")
    if not os.path.exists(path):
        torch.manual_seed(1)
        config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=4,
                             num_attention_heads=32, num_key_value_heads=8, rope_theta=500000.0,
                             vocab_size=128256 * layers // 32, max_position_embeddings=8192,
                             dtype="float16")
        with torch.device("cuda"):
            LlamaForCausalLM(config).half().save_pretrained(path)
    return path


def load(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).to("cuda")
    body = model.model
    for i in range(len(body.layers), layers):
        layer = copy.deepcopy(body.layers[i % 4])
        layer.self_attn.layer_idx = i
        body.layers.append(layer)
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:1] * layers
    return model.eval()


@torch.no_grad()
def tokens_per_second(model, batch):
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT)
    prompt = torch.randint(0, model.config.vocab_size, (batch, USED), device="cuda")
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    token = prompt[:, -1:].clone()
    at = torch.tensor([USED], device="cuda")  # the cache counts by itself

    def advance():
        logits = step(token, past_key_values=cache, position_ids=at[None], use_cache=True).logits
        token.copy_(logits[:, -1:].argmax(-1))
        at.add_(1)

    start = time.time()
    for _ in range(5):
        advance()
    torch.cuda.synchronize()
    compiled, best = time.time() - start, 1e9
    held = lock()
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.time()
        for _ in range(STEPS):
            advance()
        torch.cuda.synchronize()
        best = min(best, (time.time() - start) / STEPS)
    held.close()
    return batch / best, compiled


with lock():
    path = make()
base = {}
for scheme in sys.argv[4:]:
    source = path
    if scheme != "none":
        source = os.path.join(work, "c-" + scheme)
        start = time.time()
        subprocess.run([qtool, "quantize", path, "-o", source, "--scheme", scheme + ":method=rtn",
                        "-q"], check=True, stdout=subprocess.DEVNULL)
        print(f"quantize {scheme}: {time.time() - start:.1f} s", flush=True)
    model = load(source)
    for batch in (1, 16):
        torch._dynamo.reset()
        speed, seconds = tokens_per_second(model, batch)
        base[batch] = speed if scheme == "none" else base.get(batch, float("nan"))
        memory = torch.cuda.memory_allocated() / 2**30
        print(f"{scheme:8} batch {batch:3}: {speed:8.1f} tokens/s, {speed / base[batch]:.2f} x "
              f"FP16 (compiled in {seconds:.0f} s, {memory:.2f} GiB)", flush=True)
    del model
    torch.cuda.empty_cache()
