"""Decode speed in vLLM's engine: a model of random weights in the shape of Llama 3 8B.

usage: vllm_speed.py QTOOL WORK KIND...

KIND: fp16 and w4 (compressed-tensors, int4 in groups of 128) are vLLM's own kernels; any other is a
scheme, whose container is loaded by the plugin. Four decoder layers are made, quantized
(method=rtn, on the GPU) and repeated eight times under other names. Prompts of 512 tokens, batches
of 1, 16 and 64, CUDA graphs; a step is the difference of 97 tokens and 1. Needs 20 GB of disk and
of GPU memory for each KIND. All kinds load at the same time and are measured one after the other.
"""
import fcntl
import json
import os
import random
import re
import subprocess
import sys
import time

LAYERS, VOCABULARY, MADE = 32, 128256, 4
CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
              hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS,
              num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=VOCABULARY,
              max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0,
              tie_word_embeddings=False, torch_dtype="float16", bos_token_id=1, eos_token_id=2,
              attention_bias=False)
W4 = {"quant_method": "compressed-tensors", "format": "pack-quantized",
      "quantization_status": "compressed", "kv_cache_scheme": None, "ignore": ["lm_head"],
      "config_groups": {"group_0": {
          "targets": ["Linear"], "input_activations": None, "output_activations": None,
          "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                      "group_size": 128, "dynamic": False}}}}


def make(path):
    """In a process of its own, so that the parent has no CUDA context when it forks."""
    if os.path.exists(path):
        return
    code = ("import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
            f"c = {CONFIG!r}\nc['num_hidden_layers'] = {MADE}\n"
            "with torch.device('cuda'):\n"
            f"    LlamaForCausalLM(LlamaConfig(**c)).half().save_pretrained({path!r})\n")
    subprocess.run([sys.executable, "-c", code], check=True)


def repeat(source, out):
    """A container of LAYERS decoder layers, of one that has MADE."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    def renamed(name, copy):
        return re.sub(r"layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) + MADE * copy}.", name)

    copies = range(LAYERS // MADE)
    os.makedirs(out)
    with open(os.path.join(source, "config.json")) as f:
        config = json.load(f)
    config["num_hidden_layers"] = LAYERS
    with open(os.path.join(source, "qtool.json")) as f:
        manifest = json.load(f)
    for part in ("tensors", "copied"):
        manifest[part] = {renamed(n, c): entry for n, entry in manifest[part].items()
                          for c in copies if c == 0 or "layers." in n}
    where = {}
    for c in copies:
        tensors, name = {}, f"model-{c + 1:05}-of-{len(copies):05}.safetensors"
        for shard in os.listdir(source):
            if shard.endswith(".safetensors"):
                with safe_open(os.path.join(source, shard), "pt") as file:
                    tensors.update({renamed(k, c): file.get_tensor(k) for k in file.keys()
                                    if c == 0 or "layers." in k})
        save_file(tensors, os.path.join(out, name), metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))
    for name, content in (("config.json", config), ("qtool.json", manifest),
                          ("model.safetensors.index.json",
                           {"metadata": {"total_size": 0}, "weight_map": where})):
        with open(os.path.join(out, name), "w") as f:
            json.dump(content, f)


def prepare(qtool, work, kind):
    if kind in ("fp16", "w4"):
        path = os.path.join(work, kind)
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, "config.json"), "w") as f:
            json.dump(CONFIG | ({"quantization_config": W4} if kind == "w4" else {}), f)
        return path
    made, container = os.path.join(work, "llama"), os.path.join(work, "c-" + kind)
    out = container + "-repeated"
    if not os.path.exists(out):
        make(made)
        subprocess.run([qtool, "quantize", made, "-o", container, "--scheme", kind + ":method=rtn",
                        "--device", "cuda", "-q"], check=True, stdout=subprocess.DEVNULL)
        repeat(container, out)
    return out


def measure(work, kind, path, kinds):
    os.environ["VLLM_CACHE_ROOT"] = os.path.join(work, "cache-" + kind)
    from vllm import LLM, SamplingParams
    own = kind in ("fp16", "w4")
    llm = LLM(model=path, load_format="dummy" if own else "auto", skip_tokenizer_init=True,
              dtype="float16", max_model_len=2048, max_num_seqs=64,
              gpu_memory_utilization=0.25 if kind == "fp16" else 0.15,
              kv_cache_memory_bytes=8 << 30,
              compilation_config={"cudagraph_capture_sizes": [1, 16, 64]})

    def seconds(batch, tokens):
        prompts = [{"prompt_token_ids": [random.randrange(10, VOCABULARY) for _ in range(512)]}
                   for _ in range(batch)]
        start = time.time()
        llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0,
                                             detokenize=False), use_tqdm=False)
        return time.time() - start

    seconds(1, 8)
    open(os.path.join(work, "ready-" + kind), "w").close()
    end = time.time() + 120
    while time.time() < end and not all(
            os.path.exists(os.path.join(work, "ready-" + k)) for k in kinds):
        time.sleep(0.2)
    with open(os.path.join(work, "lock"), "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        return [(batch, (seconds(batch, 97) - seconds(batch, 1)) / 96) for batch in (1, 16, 64)]


def main():
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0",
                      HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    qtool, work, kinds = sys.argv[1], os.path.abspath(sys.argv[2]), sys.argv[3:]
    os.makedirs(work, exist_ok=True)
    paths, bad = [prepare(qtool, work, kind) for kind in kinds], 0
    import vllm  # noqa: F401, which takes half a minute, once
    for kind, path in zip(kinds, paths):
        if os.fork() == 0:
            out, log = os.dup(1), os.open(os.path.join(work, kind + ".log"), os.O_CREAT | os.O_RDWR)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                lines = [f"{kind:8} batch {batch:3}: {step * 1e3:7.3f} ms a step, "
                         f"{batch / step:8.1f} tokens/s" for batch, step in
                         measure(work, kind, path, kinds)]
            except BaseException as e:
                lines = [f"{kind:8} FAILED: {type(e).__name__}: {e}"[:300]]
            os.write(out, ("\n".join(lines) + "\n").encode())
            os._exit("FAILED" in lines[0])
    for _ in kinds:
        bad += os.wait()[1] != 0
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
