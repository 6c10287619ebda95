"""Operators and transformers on a GPU, against the reference decoders.

usage: gpu.py QTOOL CHECKPOINT CALIB WORK [matmul] [w4ax] [graphs] [kv4] [moe]
              [model[=SCHEME,...]] [greedy]

CHECKPOINT: a small model of the family llama; CALIB: text for w4ax. greedy makes a model of four
decoder layers in the shapes of Llama 3 8B and compares with `qtool generate`. Prints one line per
check and ends with status 1 if one failed. QTOOL_KERNELS: path of libqtool_kernels.so.
"""
import json
import os
import subprocess
import sys

import torch
from torch.nn import functional as F
from safetensors.torch import save_file

from qtool_torch import LibraryError, QtoolLinear, kv4, load_container, moe, ops, schemes

qtool, checkpoint, calib, work = sys.argv[1:5]
parts = sys.argv[5:] or ["matmul", "w4ax", "graphs", "kv4", "moe", "model", "greedy"]
SHAPES = [(16, 64), (17, 65), (31, 127), (33, 129), (48, 257), (100, 1000), (272, 320), (272, 2080),
          (1040, 2048), (400, 520), (512, 14336), (4112, 1024)]
SCHEMES = ["nf4", "nf4:g=32", "nf3:g=64", "nf2", "lut4", "lut3", "int3", "iq4nl", "mxfp4", "fp8",
           "fp7", "fp6", "fp6:e=2", "fp5", "fp4", "int4", "int4:g=64,zero=group", "int4:g=0",
           "int8", "int8:g=32,zero=group", "mix24", "mix24:outliers=0"]
TOKENS = [1, 2, 8, 16, 17, 33, 64, 129, 300]
# Norm of the error by the norm of the output: rounding to the dtype, and tile kernels that round
# weights (docs/kernels.md).
LIMIT = {torch.float16: 3.5e-4, torch.bfloat16: 3e-3}
failed = 0


def report(name, ok, detail):
    global failed
    failed += not ok
    print(f"{'ok' if ok else 'FAIL'} {name}: {detail}", flush=True)


def quantize(source, out, *options):
    if not os.path.exists(out):
        subprocess.run([qtool, "quantize", source, "-o", out, *options, "-q"], check=True,
                       stdout=subprocess.DEVNULL)
    return out


def linear(packed, dtype):
    """A layer on the GPU with the sections of a matrix."""
    out = QtoolLinear(packed.format, dtype=dtype, device="cuda")
    for name, section in packed.sections.items():
        getattr(out.weight.q, name).copy_(section)
    out.check()
    out.finish()
    return out


def error(y, want):
    return ((y.double() - want).norm() / want.norm()).item()


# ---- operators ----------------------------------------------------------------------------------

def matrices(scheme):
    source = os.path.join(work, "shapes")
    if not os.path.exists(source):
        os.makedirs(source)
        torch.manual_seed(1)
        save_file({f"layers.0.m{i}.weight": 0.03 * torch.randn(n, k)
                   for i, (n, k) in enumerate(SHAPES)}, os.path.join(source, "model.safetensors"))
    method = "order=none,fit=minmax" if scheme.startswith("mix24") else "method=rtn"
    full = scheme + ("," if ":" in scheme else ":") + method
    out = quantize(source, os.path.join(work, "m-" + scheme), "--scheme", "none", "--tensor",
                   "m=" + full)
    return load_container(out, "cuda").tensors


def matmul():
    for scheme in SCHEMES:
        worst, at, runs = 0.0, "", 0
        for packed in matrices(scheme).values():
            f = packed.format
            w = packed.decode().double()
            for dtype, limit in LIMIT.items():
                layer = linear(packed, dtype)
                for m in TOKENS:
                    x = torch.randn(m, f.k, device="cuda").to(dtype)
                    share = error(layer(x), x.double() @ w.T) / limit
                    runs += 1
                    if not share <= worst:
                        worst, at = share, f"{f.n} x {f.k}, {m} tokens, {dtype}"
        report(f"matmul {scheme}", worst <= 1,
               f"{runs} products, worst {worst:.2f} of the limit ({at})")
    packed = list(matrices("lut4").values())
    same = [p for p in packed if p.format.k == 2048] * 2
    for m in (1, 5):
        x = torch.randn(m, same[0].format.k, device="cuda").half()
        y = torch.ops.qtool.matmul(x, [t for p in same for t in p.sections.values()],
                                   [i for p in same for i in p.format])
        want = x.double() @ torch.cat([p.decode() for p in same]).double().T
        report(f"matmul of two matrices, {m} tokens", error(y, want) < 3.5e-4, error(y, want))
    try:
        layer = linear(packed[0], torch.float16)
        layer(torch.randn(1, layer.format.k, device="cuda"))
        report("float32 is refused", False, "it ran")
    except LibraryError as e:
        report("float32 is refused", True, e)


def w4ax_container(scales):
    return quantize(checkpoint, os.path.join(work, "w4ax-" + scales), "--scheme",
                    "w4ax:scales=" + scales, "--data", calib, "--samples", "8", "--seqlen", "256",
                    "--device", "cuda")


def w4ax():
    for scheme in ["block", "int", "row"]:
        worst, runs = 0.0, 0
        for packed in list(load_container(w4ax_container(scheme), "cuda").tensors.values())[:14]:
            f, s = packed
            prepared = schemes.prepare(f, s, torch.float32)
            for dtype, limit in LIMIT.items():
                layer = linear(packed, dtype)
                for m in TOKENS:
                    x = torch.randn(m, f.k, device="cuda").to(dtype)
                    want = schemes.product(f, x.float(), prepared).double()
                    worst, runs = max(worst, error(layer(x), want) / limit), runs + 1
        report(f"w4ax_matmul {scheme}", worst <= 1,
               f"{runs} products, worst {worst:.2f} of the limit")


# ---- torch.compile and CUDA graphs --------------------------------------------------------------

def graphs():
    for scheme in ["nf4", "int4:g=64,zero=group", "mix24", "fp6"]:
        packed = [p for p in matrices(scheme).values() if p.format.n == 1040][0]
        for dtype in LIMIT:
            layer = linear(packed, dtype)
            for m in (1, 16, 300):
                x = torch.randn(m, 2048, device="cuda").to(dtype)
                layer(x)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(3):
                        y = layer(x)
                equal = True
                for _ in range(3):
                    x.copy_(torch.randn_like(x))
                    graph.replay()
                    equal &= torch.equal(y, layer(x))
                report(f"CUDA graph {scheme}, {m} tokens, {dtype}", equal, "replays equal launches")
        layer = linear(packed, torch.float16)
        compiled = torch.compile(lambda x: torch.relu(layer(x)) * 2, mode="reduce-overhead",
                                 fullgraph=True)
        worst = 0.0
        for m in (1, 1, 1, 16, 16, 16, 1):
            x = torch.randn(m, 2048, device="cuda").half()
            want = torch.relu(layer(x)) * 2
            worst = max(worst, (compiled(x).clone() - want).abs().max().item())
        report(f"torch.compile {scheme}", worst == 0, f"largest difference {worst}")


# ---- 4-bit KV cache -----------------------------------------------------------------------------

def kv4_cache():
    torch.manual_seed(2)
    for heads, query_heads, dim, paged in [(2, 6, 64, False), (8, 32, 128, False),
                                           (8, 32, 128, True)]:
        page = 64 if paged else 256
        pages, table = 3, None
        if paged:
            pages = 12
            table = torch.randperm(12).reshape(3, 4).int()
        caches = [kv4.new_cache(pages, page, heads, dim, 3, device) for device in ("cpu", "cuda")]
        tables = [table, None if table is None else table.cuda()]
        position, lengths = [0, 0, 0], [200, 65, 1]
        for step in [64, 1, 70, 1, 64]:
            sequence, at = [], []
            for b in range(3):
                count = min(step, lengths[b] - position[b])
                sequence += [b] * count
                at += range(position[b], position[b] + count)
                position[b] += count
            if not at:
                continue
            k, v = (torch.randn(len(at), heads, dim).half() for _ in range(2))
            sequence, at = (torch.tensor(x, dtype=torch.int32) for x in (sequence, at))
            for cache, t, device in zip(caches, tables, ("cpu", "cuda")):
                torch.ops.qtool.kv4_append(cache, t, k.to(device), v.to(device),
                                           sequence.to(device), at.to(device))
        want, got = (used(cache, table, lengths) for cache in caches)
        equal = [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
        report(f"kv4_append {heads} x {dim}, paged {paged}", all(equal),
               f"{sum(equal)} of {len(equal)} arrays equal")
        for dtype, limit in ((torch.float16, 1.5e-3), (torch.bfloat16, 4e-3)):
            q = torch.randn(3, query_heads, dim).to(dtype)
            length = torch.tensor(lengths, dtype=torch.int32)
            want = kv4.attention(q.float(), caches[0], table, length, dim**-0.5)
            out = torch.ops.qtool.kv4_attention(q.cuda(), caches[1], tables[1], length.cuda(), 256,
                                                dim**-0.5)
            report(f"kv4_attention {heads} x {dim}, paged {paged}, {dtype}",
                   error(out.cpu(), want.double()) <= limit, error(out.cpu(), want.double()))


def used(cache, table, lengths):
    """The parts of a cache that have a meaning: codes of token 0 and old tails do not."""
    codes_k, codes_v, k_param, v_param, k_first, k_tail = (t.cpu() for t in cache)
    page_tokens, out = codes_k.shape[2], [k_first]
    for b, length in enumerate(lengths):
        for token in range(length):
            page = b if table is None else int(table[b, token // page_tokens])
            row = token % page_tokens
            out += [codes_v[page, :, row], v_param[page, :, row // 8, row % 4, :, row // 4 % 2]]
            if token:
                out += [codes_k[page, :, row], k_param[page, :, row // kv4.GROUP]]
        out.append(k_tail[b, :, : (length - 1) % kv4.GROUP + 1])
    return out


# ---- experts ------------------------------------------------------------------------------------

EXPERTS = {"a": (8, 64, 128), "b": (5, 200, 328), "c": (32, 1024, 768)}  # number, hidden, inner


def experts_of(scheme, name):
    """The experts of a layer on the GPU, and their matrices in FP64."""
    source = os.path.join(work, "experts")
    if not os.path.exists(source):
        os.makedirs(source)
        torch.manual_seed(3)
        save_file({f"layers.0.{key}{e}.{part}.weight": torch.randn(*shape) / shape[1] ** 0.5
                   for key, (count, hidden, inner) in EXPERTS.items() for e in range(count)
                   for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)),
                                       ("down", (hidden, inner)))},
                  os.path.join(source, "model.safetensors"))
    full = scheme + ("," if ":" in scheme else ":") + "method=rtn"
    out = quantize(source, os.path.join(work, "e-" + scheme), "--scheme", "none", "--tensor",
                   "gate|up|down=" + full)
    packed = load_container(out, "cuda", verify=False).tensors
    parts = [[packed[f"layers.0.{name}{e}.{part}.weight"] for e in range(EXPERTS[name][0])]
             for part in ("gate", "up", "down")]
    return moe.stack(parts), [[p.decode().double() for p in part] for part in parts]


def routing(m, count, topk):
    """Experts without the last one, some of which no token chooses; ids that are out of range."""
    ids = torch.stack([torch.randperm(count)[:topk] for _ in range(m)]).cuda()
    return torch.where(ids == count - 1, -1, ids).int(), torch.rand(m, topk, device="cuda")


def gated(matrices, x, ids, weights):
    y = torch.zeros_like(x, dtype=torch.float64)
    for e, (gate, up, down) in enumerate(zip(*matrices)):
        token, place = torch.where(ids == e)
        rows = x[token].double()
        out = (F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
        y.index_add_(0, token, out * weights[token, place, None].double())
    return y


def moe_matmul():
    for scheme in ["nf4", "nf3:g=64", "lut2", "fp6:e=2", "fp5", "int4", "int4:g=64,zero=group",
                   "int8"]:
        worst, at, runs = 0.0, "", 0
        for name, (count, _, _) in EXPERTS.items():
            experts, matrices = experts_of(scheme, name)
            table = ops.moe_table(experts)
            for dtype, limit in LIMIT.items():
                for m in (1, 3, 17, 64, 300):
                    x = torch.randn(m, experts.formats[0].k, device="cuda").to(dtype)
                    ids, weights = routing(m, count, 4)
                    want = gated(matrices, x, ids, weights)
                    for same in {experts.same_tables, False}:  # gate and up in one launch, two
                        y = torch.ops.qtool.moe_matmul(
                            x, ids, weights, table, experts.tensors(),
                            experts._replace(same_tables=same).numbers(), "silu", 0)
                        # twice the limit: the activations between the products are rounded, too
                        share = error(y, want) / (2 * limit)
                        runs += 1
                        if not share <= worst:
                            worst, at = share, f"layer {name}, {m} tokens, {dtype}, same={same}"
        report(f"moe_matmul {scheme}", worst <= 1, f"{runs} layers, worst {worst:.2f} of the limit "
                                                   f"({at})")
    experts, _ = experts_of("nf4", "c")
    table = ops.moe_table(experts)

    def layer(x, ids, weights):
        return torch.ops.qtool.moe_matmul(x, ids, weights, table, experts.tensors(),
                                          experts.numbers(), "silu", 0)

    for m in (1, 16, 300):
        x, (ids, weights) = torch.randn(m, 1024, device="cuda").half(), routing(m, 32, 4)
        layer(x, ids, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                y = layer(x, ids, weights)
        equal = True
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            ids.copy_(routing(m, 32, 4)[0])
            graph.replay()
            equal &= torch.equal(y, layer(x, ids, weights))
        report(f"CUDA graph of experts, {m} tokens", equal, "replays equal launches")
    compiled = torch.compile(lambda *a: torch.relu(layer(*a)) * 2, mode="reduce-overhead",
                             fullgraph=True)
    worst = 0.0
    for m in (1, 1, 1, 16, 16, 16):
        x, (ids, weights) = torch.randn(m, 1024, device="cuda").half(), routing(m, 32, 4)
        want = torch.relu(layer(x, ids, weights)) * 2
        worst = max(worst, (compiled(x, ids, weights).clone() - want).abs().max().item())
    report("torch.compile of experts", worst == 0, f"largest difference {worst}")


# ---- transformers -------------------------------------------------------------------------------

def mixture():
    """A mixture of experts, made of the checkpoint (its router prefers some experts)."""
    out = os.path.join(work, "mixture")
    if not os.path.exists(out):
        script = os.path.join(os.path.dirname(__file__), *[".."] * 3, "tests", "bench",
                              "skewed_mixture.py")
        subprocess.run([sys.executable, script, checkpoint, out], check=True)
    return out


def spread(got, want):
    """The difference of logits (RMS) as a share of their standard deviation."""
    return ((got - want).norm() / (want - want.mean()).norm()).item()


def limit_of(name, exact, ids, want):
    """Bound of the difference of a model's logits in FP16 from `want`, those of FP32."""
    if "moe" in name:  # where two scores of a router are nearly equal, another expert is chosen
        return 0.1
    if "w4ax" not in name:
        return 5e-3
    # Activations near the boundary of two 4-bit codes take the other code in FP16: as much changes
    # in FP32 if only the embeddings are rounded to FP16.
    embeddings = exact.get_input_embeddings()(ids)
    noise = 2**-12 * torch.randn_like(embeddings)
    return 1.25 * spread(exact(inputs_embeds=embeddings * (1 + noise)).logits, want)


def model(names="nf4,nf3,lut3,fp6,int4,int8,mix24,nvfp4,w4ax-block,w4ax-int,moe-nf4,moe-int4"):
    from transformers import AutoModelForCausalLM

    ids = (torch.arange(96) * 37 % 1000 + 3)[None].cuda()
    for name in names.split(","):
        scheme = "mix24:order=none,fit=minmax" if name == "mix24" else name
        path = w4ax_container(name[5:]) if name.startswith("w4ax") else \
            quantize(mixture() if name.startswith("moe-") else checkpoint,
                     os.path.join(work, "t-" + name), "--scheme", scheme.removeprefix("moe-"))
        fused = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).to("cuda")
        exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            got, want = fused(ids).logits.float().cpu(), exact(ids.cpu()).logits
            limit = limit_of(name, exact, ids.cpu(), want)
        step = fused.generate(ids[:, :16], max_new_tokens=24, do_sample=False, use_cache=True)
        again = fused.generate(ids[:, :16], max_new_tokens=24, do_sample=False,
                               cache_implementation="static")
        agree = (got.argmax(-1) == want.argmax(-1)).double().mean().item()
        share, same = spread(got, want), (step[0, 16:] == again[0, 16:]).double().mean().item()
        report(f"transformers {name}", share <= limit and step.shape[1] == 40,
               f"logits differ by {share:.1e} of their spread (limit {limit:.1e}), same top token "
               f"{100 * agree:.1f} %; "
               f"generated {step.shape[1] - 16} tokens, {100 * same:.0f} % the same with a static "
               "cache and torch.compile")


@torch.no_grad()
def greedy(scheme="int4"):
    """A random model in the shapes of Llama 3 8B: every token of `qtool generate` is the most
    probable one here, or nearly as probable."""
    import shutil

    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = os.path.join(work, "llama")
    if not os.path.exists(path):
        torch.manual_seed(1)
        config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=4,
                             num_attention_heads=32, num_key_value_heads=8, rope_theta=500000.0,
                             vocab_size=16032, max_position_embeddings=8192, dtype="float16")
        with torch.device("cuda"):
            LlamaForCausalLM(config).half().save_pretrained(path)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(os.path.join(checkpoint, file), path)
    out = quantize(path, os.path.join(work, "g-" + scheme), "--scheme", scheme + ":method=rtn",
                   "--device", "cuda")
    prompt = "Once upon a time there was a quantized model"
    result = subprocess.run([qtool, "generate", out, "-p", prompt, "--max-tokens", "64",
                             "--ignore-eos", "--device", "cuda", "--json", "-q"], check=True,
                            capture_output=True, text=True)
    told = json.loads(result.stdout)["sequences"][0]["ids"]
    ids = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt").input_ids.cuda()
    fused = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16).to("cuda")
    whole = torch.cat([ids, torch.tensor([told], device="cuda")], 1)
    logits = fused(whole).logits[0, ids.shape[1] - 1 : -1].float()
    own = fused.generate(ids, max_new_tokens=64, do_sample=False, pad_token_id=0,
                         eos_token_id=None)[0, ids.shape[1]:].tolist()
    chosen = logits.gather(1, whole[0, ids.shape[1]:, None])[:, 0]
    gap = ((logits.max(1).values - chosen) / logits.std(1)).max().item()
    same = next((i for i, (a, b) in enumerate(zip(own, told)) if a != b), len(told))
    report(f"greedy {scheme}, 8B shapes", gap < 2e-2 and len(told) == 64,
           f"first {same} of {len(told)} tokens are those of qtool generate; its tokens are at "
           f"most {gap:.1e} standard deviations below the most probable")


for part in parts:
    part, *names = part.split("=")
    {"matmul": matmul, "w4ax": w4ax, "graphs": graphs, "kv4": kv4_cache, "moe": moe_matmul,
     "model": model, "greedy": greedy}[part](*names)
print(json.dumps({"failed": failed, "torch": torch.__version__,
                  "device": torch.cuda.get_device_name()}))
sys.exit(failed > 0)
