#!/usr/bin/env python3
"""Speed of a layer of experts, int4 in groups of 128, in the kernels of others, measured as `qtool
bench --moe` measures qtool's: the same routing, cold weights, CUDA graphs, all kernels of a layer
(sort, gate and up, SiLU, down, weighted sum).

usage: moe_others.py VLLM KIND EXPERTS,TOPK,HIDDEN,INNER TOKENS...      needs a GPU

VLLM is the directory of an installed vLLM (0.22), whose sort, SiLU and sums are used. KIND: marlin
(vLLM's moe_wna16_marlin_gemm, called as its fused_marlin_moe does) or humming (humming-kernels
0.1.20, called as vLLM's HummingIndexedExperts does). Prints a line for each number of tokens: the
experts touched, the median time, and the RMS error relative to products of the decoded weights in
FP32; exit status 1 if it exceeds 0.1 %.
"""
import copy
import importlib.util
import os
import statistics
import sys

import torch
import torch.nn.functional as F

GROUP, COLD, MIN_COPIES, REPLAYS = 128, 5, 2, 25
U4B8 = 1125899907892224  # id of vLLM's scalar type uint4b8


def random(seed, i):
    """gpu_random in verify/gpu/gpu.h"""
    mask = 2**64 - 1
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def routing(experts, topk, m):
    """ids [m][topk], as routing_new in verify/bench/moe.c"""
    every, ids = list(range(experts)), []
    for i in range(m * topk):
        j = i % topk
        k = j + random(11, i) % (experts - j)
        every[j], every[k] = every[k], every[j]
        ids.append(every[j])
    return torch.tensor(ids, dtype=torch.int32, device="cuda").view(m, topk)


def align(ids, experts, block):
    """Pairs sorted by expert, in blocks of `block`."""
    pairs = ids.numel()
    most = pairs + experts * (block - 1)
    if pairs < experts:
        most = min(pairs * block, most)
    out = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (most, -(-most // block), 1)]
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, *out, None)
    return out


class Marlin:
    def __init__(self, experts, hidden, inner):
        self.experts, self.shapes = experts, ((2 * inner, hidden), (hidden, inner))
        self.codes, self.scales, self.packed = [], [], []
        for n, k in self.shapes:
            codes = torch.randint(16, (experts, k, n), dtype=torch.uint8, device="cuda")
            scale = (0.5 + torch.rand(experts, k // GROUP, n, device="cuda")).half() / k**0.5 / 4
            self.codes.append(codes)
            self.scales.append(scale)
            self.packed.append(torch.stack([self._repack(c, n, k) for c in codes]))
            self.packed.append(scale.view(-1, 8, 8).transpose(1, 2).reshape(scale.shape)
                               .contiguous())
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.workspace = torch.zeros(4 * processors, dtype=torch.int32, device="cuda")

    @staticmethod
    def _repack(codes, n, k):
        words = codes.view(k // 8, 8, n).int()
        words = sum(words[:, i] << 4 * i for i in range(8))
        none = torch.empty(0, dtype=torch.int32, device="cuda")
        return torch.ops._C.gptq_marlin_repack(words.contiguous(), none, k, n, 4, False)

    def decoded(self, i, e):
        scale = self.scales[i][e].float().repeat_interleave(GROUP, 0)
        return ((self.codes[i][e].float() - 8) * scale).T

    def another(self):
        out = copy.copy(self)
        out.packed = [t.clone() for t in self.packed]
        return out

    def _product(self, i, x, weights, rows, topk, weighted, block, sort):
        n, k = self.shapes[i]
        y = torch.empty(rows * topk, n, dtype=torch.float16, device="cuda")
        return torch.ops._moe_C.moe_wna16_marlin_gemm(
            x, y, self.packed[2 * i], None, self.packed[2 * i + 1], None, None, None, None, None,
            self.workspace, *sort, weights, block, topk, weighted, U4B8, rows, n, k, True, False,
            True, False, -1, -1, -1)

    def run(self, x, ids, weights):
        m, topk = ids.shape
        block = next((b for b in (8, 16, 32, 48) if m * topk / self.experts / b < 0.9), 64)
        sort = align(ids, self.experts, block)
        both = self._product(0, x, weights, m, topk, False, block, sort)
        h = torch.empty(m * topk, both.shape[1] // 2, dtype=torch.float16, device="cuda")
        torch.ops._C.silu_and_mul(h, both)
        down = self._product(1, h, weights, m * topk, 1, True, block, sort)
        y = torch.empty_like(x)
        torch.ops._moe_C.moe_sum(down.view(m, topk, -1), y)
        return y


class Humming:
    def __init__(self, experts, hidden, inner):
        from humming.layer import HummingLayer

        self.experts, self.layers, self.plain = experts, [], []
        for n, k in ((2 * inner, hidden), (hidden, inner)):
            layer = HummingLayer(n, k, {"b_dtype": "uint4", "weight_scale_group_size": GROUP},
                                 num_experts=experts, torch_dtype=torch.float16).cuda()
            w = torch.randn(experts, n, k, dtype=torch.float16, device="cuda") / k**0.5
            schema = layer.weight_schema
            tensors = schema.quant_tensor(w, schema, torch.float16)
            self.plain.append(schema.dequant_tensors(tensors))
            layer.load_from_tensors(tensors)
            layer.transform()
            self.layers.append(layer)

    def decoded(self, i, e):
        return self.plain[i][e].float()

    def another(self):
        out = copy.copy(self)
        out.layers = copy.deepcopy(self.layers)
        return out

    def _tuned(self, i, pairs):
        from humming.layer import HummingMethod

        return next(config for least, most, config in HummingMethod.get_default_tuning_configs(
            self.layers[i], gemm_type="indexed") if least < pairs <= most)

    def run(self, x, ids, weights):
        m, topk = ids.shape
        tuned = [self._tuned(i, ids.numel()) for i in range(2)]
        blocks = [t["block_shape"][0] for t in tuned]
        sort = {b: align(ids, self.experts, b) for b in set(blocks)}
        h = x
        for i, k in enumerate((topk, 1)):
            y = self.layers[i](h, top_k=k, valid_shape_m=ids.numel(),
                               tuning_config=[[0, 1 << 30, tuned[i]]],
                               compute_config={"gemm_type": "indexed"},
                               **dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"),
                                          sort[blocks[i]])))
            if i == 0:
                h = torch.empty(m * topk, y.shape[1] // 2, dtype=torch.float16, device="cuda")
                torch.ops._C.silu_and_mul(h, y)
        return weighted_sum(y.view(m, topk, -1), weights)


def error(layer, x, ids, weights, y):
    want = torch.zeros(x.shape, device="cuda")
    for e in ids.unique().tolist():
        token, place = torch.where(ids == e)
        gate, up = (x[token].float() @ layer.decoded(0, e).T).chunk(2, 1)
        h = (F.silu(gate) * up).half().float() @ layer.decoded(1, e).T
        want.index_add_(0, token, h * weights[token, place, None])
    return ((y - want).norm() / want.norm()).item()


def microseconds(layers, x, ids, weights):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer.run(x, ids, weights)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(layers))
    return statistics.median(times)


def main():
    if len(sys.argv) < 5:
        print(__doc__)
        return 2
    global weighted_sum
    vllm, kind, shape, bad = sys.argv[1], sys.argv[2], sys.argv[3], 0
    for name in ("_C", "_C_stable_libtorch", "_moe_C"):
        torch.ops.load_library(os.path.join(vllm, "vllm", name + ".abi3.so"))
    spec = importlib.util.spec_from_file_location(
        "weighted_sum", os.path.join(vllm, "humming", "ops", "moe.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weighted_sum = module.moe_fused_mul_sum
    experts, topk, hidden, inner = map(int, shape.split(","))
    torch.manual_seed(1)
    first = {"marlin": Marlin, "humming": Humming}[kind](experts, hidden, inner)
    layers = [first]
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    for m in map(int, sys.argv[4:]):
        ids = routing(experts, topk, m)
        touched = ids.unique().numel()
        x = torch.randn(m, hidden, device="cuda").half()
        weights = torch.full((m, topk), 1 / topk, device="cuda")
        wrong = error(first, x, ids, weights, first.run(x, ids, weights).float())
        count = max(MIN_COPIES, -(-COLD * l2 // (touched * 3 * hidden * inner // 2)))
        while len(layers) < count:
            layers.append(first.another())
        us = microseconds(layers[:count], x, ids, weights)
        bad += not wrong < 1e-3
        print(f"{kind} {shape}, {m} tokens: {touched} experts, {us:.1f} us, error {wrong:.1e}",
              flush=True)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
