#!/usr/bin/env python3
"""Plain GPTQ (arXiv 2210.17323) of a mixture of experts, as a baseline for docs/accuracy.md: no
search of scales, no coordinate descent, no order of columns. Shares no code with qtool.

usage: gptq_mixture.py MIXTRAL IDS.u16 WINDOWS SEQLEN SCHEME OUT      SCHEME: int4 or nf3, g = 128

Decoder layers are quantized one after the other on the first WINDOWS windows of the token ids, with
the layers before them quantized; within a layer first q, k, v, then o, gate and up, down. The
Hessian of an expert's matrix is that of the tokens that the router sends to it (none: round to
nearest). Damping 1 %, blocks of 128 columns, absmax scales of groups when their turn comes, in
FP16. OUT is the model with the quantized weights in FP32: `qtool eval OUT --ref MIXTRAL`. Needs
torch, transformers and numpy.
"""
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

GROUP, DAMPING = 128, 0.01


def values(scheme):
    """The values of the codes; the largest has the group's absmax."""
    if scheme == "int4":
        return torch.arange(-8, 8).float()
    delta = (1 / 30 + 1 / 32) / 2  # NormalFloat, docs/schemes.md
    q = torch.distributions.Normal(0, 1).icdf
    low, high = q(torch.linspace(delta, 0.5, 4)), q(torch.linspace(0.5, 1 - delta, 5))
    return torch.cat([low[:-1], high]) / high[-1]


def nearest(x, table):
    return table[(x[:, None] - table).abs().argmin(1)]


def gptq(w, h, table):
    """w[n][k] rounded under the Hessian h[k][k]."""
    w, out = w.clone(), torch.empty_like(w)
    k = w.shape[1]
    dead = h.diagonal() == 0
    h = h + torch.diag(dead.float())
    w[:, dead] = 0
    h += DAMPING * h.diagonal().mean() * torch.eye(k)
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h.double())),
                              upper=True).float()
    for first in range(0, k, GROUP):
        block = slice(first, first + GROUP)
        scale = (w[:, block].abs().amax(1) / table[-1]).half().float().clamp(min=1e-12)
        errors = torch.zeros_like(w[:, block])
        for j in range(first, min(first + GROUP, k)):
            out[:, j] = scale * nearest(w[:, j] / scale, table)
            errors[:, j - first] = (w[:, j] - out[:, j]) / u[j, j]
            w[:, j:first + GROUP] -= errors[:, j - first, None] * u[j, j:first + GROUP]
        w[:, first + GROUP:] -= errors @ u[block, first + GROUP:]
    return out


class Sums:
    """Hessians of the inputs of modules, and of experts."""

    def __init__(self):
        self.h = {}

    def add(self, key, x):
        x = x.reshape(-1, x.shape[-1]).float()
        self.h[key] = self.h.get(key, 0) + x.T @ x

    def of_linear(self, key):
        return lambda module, args: self.add(key, args[0])

    def of_experts(self, module, args):
        x, index, _ = args
        x = x.reshape(-1, x.shape[-1])
        for e in range(module.gate_up_proj.shape[0]):
            rows = x[torch.where(index == e)[0]]
            if len(rows):
                self.add(("gate_up", e), rows)
                gate, up = (rows @ module.gate_up_proj[e].T).chunk(2, 1)
                self.add(("down", e), F.silu(gate) * up)


@torch.no_grad()
def main():
    source, ids, windows, seqlen, scheme, out = sys.argv[1:]
    windows, seqlen, table = int(windows), int(seqlen), values(scheme)
    ids = torch.from_numpy(np.fromfile(ids, "<u2").astype(np.int64))[:windows * seqlen]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32,
                                                 experts_implementation="eager").eval()
    for layer in model.model.layers:
        attention, experts = layer.self_attn, layer.mlp.experts
        stages = [("q", attention, ("q_proj", "k_proj", "v_proj")), ("o", attention, ("o_proj",)),
                  ("gate_up", experts, ("gate_up_proj",)), ("down", experts, ("down_proj",))]
        for key, module, names in stages:
            sums = Sums()
            hook = experts.register_forward_pre_hook(sums.of_experts) if module is experts else \
                getattr(module, names[0]).register_forward_pre_hook(sums.of_linear(key))
            model.model(ids.view(windows, seqlen))
            hook.remove()
            for name in names:
                if module is attention:
                    weight = getattr(module, name).weight
                    weight.copy_(gptq(weight, sums.h[key], table))
                    continue
                for e, weight in enumerate(getattr(module, name)):
                    h = sums.h.get((key, e), torch.eye(weight.shape[1]))
                    for rows in weight.chunk(2) if name == "gate_up_proj" else (weight,):
                        rows.copy_(gptq(rows, h, table))
    model.save_pretrained(out)
    for file in Path(source).glob("tokenizer*.json"):
        shutil.copy(file, out)


if __name__ == "__main__":
    main()
