"""The experts of a layer: sections of all experts in one tensor each, as qtool::moe_matmul takes
them."""
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import schemes

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class Experts(NamedTuple):
    """gate, up and down of all experts."""
    formats: tuple  # a Format for each of the three, with exp2 = 0
    exp2: tuple  # [3 E] scale_exp2 of the gates, of the ups, of the downs
    sections: list  # for each of the three {name: tensor [E, ...]}
    same_tables: bool  # gate and up of each expert have the same table, or none

    def numbers(self):
        """The operator's int[]."""
        return [i for f in self.formats for i in f] + list(self.exp2) + [int(self.same_tables)]

    def tensors(self):
        """The operator's Tensor[]."""
        return [t for s in self.sections for t in s.values()]


def unfused(parts):
    """Why the grouped kernels do not take these experts, or "". parts: three lists [E] of
    Formats."""
    for formats in parts:
        f = formats[0]
        name, why = schemes.NAMES[f.scheme], schemes.scheme_of(f).no_kernel(f)
        if any(g._replace(exp2=f.exp2) != f for g in formats):
            return "experts of different formats"
        if name not in ("lut", "fpx", "int") or why:
            return f"{name} {why and 'with ' + why}".strip()
    gate, up, down = (formats[0] for formats in parts)
    if gate._replace(exp2=0) != up._replace(exp2=0) or (down.n, down.k) != (gate.k, gate.n):
        return "gate and up of different formats, or other shapes than a gated MLP"
    return ""


def stack(parts):
    """parts: three lists [E] of (Format, sections), which `unfused` accepts. Copies sections."""
    formats = tuple(p[0][0]._replace(exp2=0) for p in parts)
    exp2 = tuple(f.exp2 for p in parts for f, _ in p)
    sections = [{name: torch.stack([s[name] for _, s in p]) for name in schemes.sections(f)}
                for f, p in zip(formats, parts)]
    gate, up = (s.get("table") for s in sections[:2])
    return Experts(formats, exp2, sections, gate is None or torch.equal(gate, up))


def of_operands(tensors, numbers):
    """The Experts of an operator's arguments."""
    size, at, sections = schemes.FIELDS, 0, []
    formats = tuple(schemes.Format(*numbers[i * size : (i + 1) * size]) for i in range(3))
    for f in formats:
        names = list(schemes.sections(f))
        sections.append(dict(zip(names, tensors[at : at + len(names)], strict=True)))
        at += len(names)
    return Experts(formats, tuple(numbers[3 * size : -1]), sections, bool(numbers[-1]))


def decoded(experts, e):
    """The matrices gate, up and down of expert e, FP32."""
    count = len(experts.exp2) // 3
    return [schemes.decode(f._replace(exp2=experts.exp2[i * count + e]),
                           {name: t[e] for name, t in s.items()})
            for i, (f, s) in enumerate(zip(experts.formats, experts.sections))]


def reference(x, ids, weights, experts, activation, first):
    """The operator in the dtype of x, on any device. It reads the routing on the host."""
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(len(experts.exp2) // 3):
        token, place = torch.where(ids == first + e)
        if not token.numel():
            continue
        gate, up, down = (w.to(x.dtype) for w in decoded(experts, e))
        rows = x[token]
        out = (ACTIVATIONS[activation](rows @ gate.T) * (rows @ up.T)) @ down.T
        y.index_add_(0, token, out.float() * weights[token, place, None].float())
    return y.to(x.dtype)
