#!/usr/bin/env python3
"""Learning of scales with PyTorch autograd, to time it beside `quantize` with learn=1: the same
passes over the same windows of a dense Llama checkpoint, by torch.compile. Weights are 4-bit codes
with an FP32 scale per 128 channels; Adam tunes the scales by the KL divergence from the unquantized
model, whose last hidden states are computed once, as qtool does it. Needs PyTorch and a GPU.

usage: learn_torch.py CHECKPOINT SAMPLES SEQLEN [--passes N] [--batch N] [--dtype bfloat16|float32]
                      [--checkpoint]

--dtype: of the matrix products; float32 uses TF32 tensor cores. --checkpoint: the backward pass
runs the layers again, as qtool does. Prints a line of JSON: seconds of each pass (two evaluations
of the held-out windows included; the first pass compiles) and of the reference, loss, GPU memory.
"""
import argparse
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

GROUP = 128
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def read_checkpoint(path):
    with open(f"{path}/model.safetensors", "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        start = f.tell()
    data = np.memmap(f"{path}/model.safetensors", np.float16, "r", start)
    tensors = {}
    for name, t in header.items():
        first, end = (at // 2 for at in t["data_offsets"])
        tensors[name] = torch.from_numpy(np.array(data[first:end])).view(t["shape"]).cuda()
    return tensors


class Coded(torch.nn.Module):
    """A matrix of scale * value; values are fixed multiples of 1/8."""

    def __init__(self, w, dtype):
        super().__init__()
        groups = w.float().view(w.shape[0], -1, GROUP)
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-6)
        self.register_buffer("value", (torch.round(groups / scale * 7) / 7).to(dtype))
        self.scale = torch.nn.Parameter(scale)
        self.shape = w.shape

    def forward(self, x):
        w = (self.value * self.scale).to(x.dtype)
        return F.linear(x, w.view(self.shape))


class Layer(torch.nn.Module):
    def __init__(self, tensors, prefix, config, dtype, coded):
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.register_buffer(name, tensors[f"{prefix}{name}.weight"].float())
        for name in LINEARS:
            w = tensors[f"{prefix}{name}.weight"]
            if coded:
                linear = Coded(w, dtype)
            else:
                linear = torch.nn.Linear(w.shape[1], w.shape[0], False, "meta")
                linear.weight = torch.nn.Parameter(w.to(dtype), requires_grad=False)
            setattr(self, name.split(".")[1], linear)
        self.dtype = dtype

    def norm(self, x, w):
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, True) + self.eps) * w).to(self.dtype)

    def rotate(self, x, cos, sin):
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(self.dtype)

    def heads_of(self, x, heads):
        return x.unflatten(-1, (heads, self.dim)).transpose(1, 2)

    @torch.compile
    def forward(self, h, cos, sin):
        x = self.norm(h, self.input_layernorm)
        q = self.rotate(self.heads_of(self.q_proj(x), self.heads), cos, sin)
        k = self.rotate(self.heads_of(self.k_proj(x), self.kv_heads), cos, sin)
        v = self.heads_of(self.v_proj(x), self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + self.o_proj(y.transpose(1, 2).flatten(2))
        x = self.norm(h, self.post_attention_layernorm)
        return h + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(torch.nn.Module):
    def __init__(self, tensors, config, dtype, coded, again):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            Layer(tensors, f"model.layers.{i}.", config, dtype, coded)
            for i in range(config["num_hidden_layers"]))
        self.register_buffer("embed", tensors["model.embed_tokens.weight"].to(dtype))
        self.register_buffer("final_norm", tensors["model.norm.weight"].float())
        self.again = again
        half = config["head_dim"] // 2
        rate = config["rope_theta"] ** -(torch.arange(half, device="cuda").float() / half)
        self.register_buffer("rate", rate)

    def forward(self, ids):
        h = self.embed[ids]
        angle = torch.arange(ids.shape[1], device="cuda")[:, None] * self.rate
        for layer in self.layers:
            if self.again:
                h = checkpoint(layer, h, angle.cos(), angle.sin(), use_reentrant=False)
            else:
                h = layer(h, angle.cos(), angle.sin())
        return h

    def logits(self, h):
        return F.linear(self.layers[0].norm(h, self.final_norm), self.embed).float()

    @torch.compile
    def loss(self, hidden, ref_hidden):
        ref = F.log_softmax(self.logits(ref_hidden), -1).flatten(0, 1)
        own = F.log_softmax(self.logits(hidden), -1).flatten(0, 1)
        return F.kl_div(own, ref, reduction="batchmean", log_target=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("checkpoint_dir")
    p.add_argument("samples", type=int)
    p.add_argument("seqlen", type=int)
    p.add_argument("--passes", type=int, default=2)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--checkpoint", action="store_true")
    a = p.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    dtype = getattr(torch, a.dtype)
    with open(f"{a.checkpoint_dir}/config.json") as f:
        config = json.load(f)
    tensors = read_checkpoint(a.checkpoint_dir)
    ids = np.fromfile(f"{a.checkpoint_dir}/ids.u16", np.uint16)[:a.samples * a.seqlen]
    ids = torch.from_numpy(ids.astype(np.int64).reshape(a.samples, a.seqlen)).cuda()
    held = max(1, round(a.samples / 8))
    student = Model(tensors, config, dtype, True, a.checkpoint)
    teacher = Model(tensors, config, dtype, False, False)

    start = time.time()
    with torch.no_grad():
        ref = torch.cat([teacher(w) for w in ids.split(a.batch)])
    torch.cuda.synchronize()
    reference_s = time.time() - start
    del tensors, teacher

    adam = torch.optim.Adam(student.parameters(), 1e-5, (0.9, 0.99), fused=True)

    def loss_of(i):
        return student.loss(student(ids[i]), ref[i])

    def evaluate():
        parts = torch.arange(held, device="cuda").split(a.batch)
        return sum(loss_of(i).item() * len(i) for i in parts) / held

    seconds, steps = [], 0
    for _ in range(a.passes):
        start = time.time()
        batches = (torch.randperm(a.samples - held, device="cuda") + held).split(a.batch)
        for i, batch in enumerate(batches):
            loss_of(batch).backward()
            adam.step()
            adam.zero_grad()
            steps += 1
            if i + 1 in (len(batches) // 2, len(batches)):
                loss = evaluate()
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
    print(json.dumps({"dtype": a.dtype, "recomputes": a.checkpoint, "reference_s": reference_s,
                      "pass_s": seconds, "steps": steps, "held_out": loss,
                      "gpu_gib": torch.cuda.max_memory_allocated() / 2**30}))


if __name__ == "__main__":
    main()
