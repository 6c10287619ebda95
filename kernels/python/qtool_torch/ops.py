"""Operators torch.ops.qtool.*: fused kernels on CUDA, the reference on the CPU.

    matmul(x, sections, format) -> y      y = x W^T. sections: those of one or more matrices, in the
                                          order of schemes.sections; format: their Formats, one
                                          after the other. y has the rows of all of them
    w4ax_matmul(x, operands, format, clip) -> y
                                          operands: w4ax_operands; x in the order of the source,
                                          divided by 2^col_exp2; rows of y in packed order
    moe_matmul(x, ids, weights, table, sections, format, activation, first) -> y
                                          a layer of gated experts: x [m][hidden], ids and weights
                                          [m][topk] (int32, FP32) of the router; sections and
                                          format: moe.Experts; table: moe_table (on the CPU:
                                          None); first: number of the first expert in ids
    kv4_append(cache, table, k, v, sequence, position)
    kv4_attention(q, cache, table, length, max_length, scale) -> out
                                          cache, table: see kv4.py

A launch only enqueues kernels on the current stream and can be captured into a CUDA graph. Plans
are made once per format and number of tokens.
"""
import ctypes
import functools
import threading
from ctypes import byref

import torch

from . import kv4, library, moe, schemes
from .library import LibraryError
from .schemes import w4ax

_library = torch.library.Library("qtool", "DEF")
_library.define("matmul(Tensor x, Tensor[] sections, int[] format) -> Tensor")
_library.define("w4ax_matmul(Tensor x, Tensor[] operands, int[] format, float clip) -> Tensor")
_library.define("moe_matmul(Tensor x, Tensor ids, Tensor weights, Tensor? table, "
                "Tensor[] sections, int[] format, str activation, int first) -> Tensor")
_library.define("kv4_append(Tensor(a!)[] cache, Tensor? table, Tensor k, Tensor v, "
                "Tensor sequence, Tensor position) -> ()")
_library.define("kv4_attention(Tensor q, Tensor[] cache, Tensor? table, Tensor length, "
                "int max_length, float scale) -> Tensor")

KINDS = {"lut": 0, "fpx": 1, "int": 2, "mix24": 3}


# ---- what launches share ------------------------------------------------------------------------

_workspaces = {}  # (device, stream; None: captured launches): tensor
_captured = []  # workspaces that CUDA graphs may still use
_plans = {}


def _zeroed(size, device):
    out = torch.empty(size, dtype=torch.uint8, device=device)
    out[: library.ZEROED].zero_()
    return out


def _lasting(size, device):
    """Memory that outlives the launch, zeroed on return. It is allocated in another thread: while
    torch.compile prepares CUDA graphs, all that this thread allocates belongs to the graphs."""
    out = []

    def make():
        with torch.cuda.device(device):
            out.append(_zeroed(size, device))
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not out:
        raise LibraryError(f"no workspace of {size} bytes on GPU {device}")
    return out[0]


def _workspace(size, device, stream):
    """Memory of the stream. Captured launches have a workspace of their own, which is made by a
    launch before the capture: one that is made during it would only be zeroed by the graph. If it
    is too small, the launch gets memory that the graph zeroes each time."""
    if size == 0:
        return None
    size = max(size, library.ZEROED)
    capturing = torch.cuda.is_current_stream_capturing()
    found = _workspaces.get((device, None if capturing else stream))
    if found is not None and found.numel() >= size:
        return found
    if capturing:
        return _zeroed(size, device)
    size += size // 2
    shared = _workspaces.get((device, None))
    if shared is None or shared.numel() < size:
        _workspaces[device, None] = _lasting(size, device)
        _captured.append(_workspaces[device, None])
    _workspaces[device, stream] = _lasting(size, device)
    return _workspaces[device, stream]


def _pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def _rows(x, k):
    """x as an aligned matrix [m][k]."""
    if x.dtype not in library.DTYPES:
        raise LibraryError(f"activations are {x.dtype}: kernels take float16 and bfloat16")
    x = x.reshape(-1, k).contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@functools.cache
def _names(f):
    return tuple(schemes.sections(f))


@functools.lru_cache(maxsize=4096)
def _split(numbers):
    """The Formats of an operator's int[]."""
    size = schemes.FIELDS
    return [schemes.Format(*numbers[i : i + size]) for i in range(0, len(numbers), size)]


def _matrices(sections, numbers):
    """Pairs of Format and {name: section}."""
    at = 0
    for f in _split(tuple(numbers)):
        names = _names(f)
        yield f, dict(zip(names, sections[at : at + len(names)], strict=True))
        at += len(names)


def _output(x, numbers):
    return x.new_empty((*x.shape[:-1], sum(f.n for f in _split(tuple(numbers)))))


# ---- matmul -------------------------------------------------------------------------------------

def _weight(f, s):
    scheme = schemes.NAMES[f.scheme]
    address = {name: tensor.data_ptr() for name, tensor in s.items()}
    w = library.Weight(kind=KINDS[scheme], bits=f.bits, exp_bits=f.exp_bits, n=f.n, k=f.k,
                       scale_exp2=f.exp2)
    if scheme == "mix24":
        w.mix24 = library.Mix24(twos=-(-f.k // 128) - f.fours, fours=f.fours, outliers=f.outliers,
                                **address)
        return w
    w.group = f.group
    w.scale, w.table, w.zero = address["scale"], address.get("table"), address.get("zero")
    for i in range(3):
        w.plane[i] = address.get(f"plane{i}")
    return w


def _plan(f, w, m, dtype, device):
    key = (f, m, dtype, device, (w.zero or 0) % 16)
    if key not in _plans:
        why = schemes.scheme_of(f).no_kernel(f)
        if why:
            raise LibraryError(f"no kernel takes {schemes.NAMES[f.scheme]} with {why}")
        options = library.Options(dtype=library.DTYPES[dtype], device=device, dependent_launch=1)
        _plans[key] = library.planned(library.require(device).qtool_matmul_plan, library.Plan(),
                                      byref(w), m, byref(options))
    return _plans[key]


def _launch(f, s, x, y, stream):
    """y: the address of [m][n]."""
    device = x.device.index
    w = _weight(f, s)
    plan = _plan(f, w, x.shape[0], x.dtype, device)
    workspace = _workspace(plan.workspace_bytes, device, stream)
    library.ran(library.require(device).qtool_matmul_run(
        byref(plan), byref(w), y, x.data_ptr(), _pointer(workspace), stream), "qtool_matmul_run")


def _matmul_cuda(x, sections, format):
    parts = list(_matrices(sections, format))
    y = _output(x, format)
    x = _rows(x, parts[0][0].k)
    if not x.shape[0]:
        return y
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream().cuda_stream
        if len(parts) == 1 or x.shape[0] == 1:
            at = y.data_ptr()
            for f, s in parts:
                _launch(f, s, x, at, stream)
                at += f.n * y.element_size()
            return y
        each = [x.new_empty(x.shape[0], f.n) for f, _ in parts]
        for (f, s), out in zip(parts, each):
            _launch(f, s, x, out.data_ptr(), stream)
        return torch.cat(each, 1, out=y.view(x.shape[0], -1)).view_as(y)


def _matmul_cpu(x, sections, format):
    return torch.cat([schemes.product(f, x, schemes.prepare(f, s, x.dtype))
                      for f, s in _matrices(sections, format)], -1)


_library.impl("matmul", _matmul_cuda, "CUDA")
_library.impl("matmul", _matmul_cpu, "CPU")
torch.library.register_fake("qtool::matmul", lambda x, sections, format: _output(x, format),
                            lib=_library)


# ---- w4ax ---------------------------------------------------------------------------------------

def w4ax_operands(f, s):
    """Tensors of a w4ax matrix that the operator takes, from its sections, and the clip ratio."""
    bits = s["bits"].cpu().contiguous()
    words = torch.empty(bits.numel(), dtype=torch.int32)
    for i, b in enumerate(bits.tolist()):  # qtool_w4ax_blocks with rows of 128 bytes
        words[i] = 4 * i + 1 - (1 << 31 if b == 4 else 0)
    scales = w4ax.SCALES[f.scales]
    scale = [] if scales == "row" else [s["scale" if scales == "block" else "sub"]]
    row_scale = [] if scales == "block" else [s["scale"]]
    perm = s["col_order"].view(torch.int32)
    return [s["plane0"], *scale, *row_scale, words.to(perm.device), perm], float(s["clip"])


def _w4ax_named(f, operands):
    scales = w4ax.SCALES[f.scales]
    names = ["plane", *([] if scales == "row" else ["scale"]),
             *([] if scales == "block" else ["row_scale"]), "blocks", "perm"]
    return dict(zip(names, operands, strict=True))


def _w4ax_cuda(x, operands, format, clip):
    (f,) = _split(tuple(format))
    y, x = _output(x, format), _rows(x, f.k)
    m, device, blocks = x.shape[0], x.device.index, -(-f.k // 128)
    if not m:
        return y
    address = {name: t.data_ptr() for name, t in _w4ax_named(f, operands).items()}
    perm = address.pop("perm")
    w = library.W4axWeight(scales=f.scales, n=f.n, k=f.k, scale_exp2=f.exp2,
                           pitch_blocks=operands[0].shape[1], **address)
    library_ = library.require(device)
    with torch.cuda.device(x.device):
        key = (f, m, x.dtype, device)
        if key not in _plans:
            options = library.W4axOptions(output=library.DTYPES[x.dtype], device=device,
                                          dependent_launch=1)
            _plans[key] = library.planned(library_.qtool_w4ax_plan, library.W4axPlan(), byref(w),
                                          m, byref(options))
        plan = _plans[key]
        stream = torch.cuda.current_stream().cuda_stream
        # Behind the plan's workspace: scales, sums, codes.
        wide = -(-m // 4) * 4
        sizes = [-(-max(plan.workspace_bytes, library.ZEROED) // 256) * 256,
                 -(-4 * wide * (blocks if f.scales == 0 else 1) // 256) * 256,
                 -(-4 * m // 256) * 256, 128 * blocks * m]
        workspace = _workspace(sum(sizes), device, stream)
        scale = workspace.data_ptr() + sizes[0]
        acts = library.W4axActs(scale=scale, sum=scale + sizes[1],
                                codes=scale + sizes[1] + sizes[2])
        given = library.W4axInput(scales=f.scales, k=f.k, blocks=address["blocks"], perm=perm,
                                  clip4=clip, clip8=1.0, rotation=f.rotate,
                                  dependent_launch=1)
        library.ran(library_.qtool_w4ax_quantize(
            byref(acts), byref(given), None, x.data_ptr(), m, library.DTYPES[x.dtype], stream),
            "qtool_w4ax_quantize")
        library.ran(library_.qtool_w4ax_run(
            byref(plan), byref(w), byref(acts), y.data_ptr(), workspace.data_ptr(), stream),
            "qtool_w4ax_run")
    return y


def _w4ax_cpu(x, operands, format, clip):
    (f,) = _split(tuple(format))
    s = _w4ax_named(f, operands)
    stored = {"plane0": s["plane"], "scale": s["row_scale" if f.scales else "scale"],
              "sub": s.get("scale")}
    bits = torch.where(s["blocks"] < 0, 4, 8)
    v = x.reshape(-1, f.k).float()[:, s["perm"].long()]
    y = w4ax.quantize(f, v, bits, clip) @ w4ax.packed(f, stored).T
    return y.to(x.dtype).reshape(*x.shape[:-1], f.n)


_library.impl("w4ax_matmul", _w4ax_cuda, "CUDA")
_library.impl("w4ax_matmul", _w4ax_cpu, "CPU")
torch.library.register_fake("qtool::w4ax_matmul",
                            lambda x, operands, format, clip: _output(x, format), lib=_library)


# ---- experts ------------------------------------------------------------------------------------

def _moe_layer(experts, count):
    """The descriptors of the first `count` experts. They hold addresses: the sections must live."""
    each = len(experts.exp2) // 3
    arrays = [(library.Weight * count)(*(
        _weight(f._replace(exp2=experts.exp2[i * each + e]), {name: t[e] for name, t in s.items()})
        for e in range(count))) for i, (f, s) in enumerate(zip(experts.formats, experts.sections))]
    return library.MoeLayer(each, *arrays)


def moe_table(experts):
    """Descriptors of the experts in GPU memory: addresses of their sections, which must not move.
    LibraryError if the kernels do not take them."""
    device = experts.tensors()[0].device
    count = len(experts.exp2) // 3
    layer = _moe_layer(experts, count)
    table = torch.empty(count * library.MOE_TABLE_EXPERT, dtype=torch.uint8)
    reason = (ctypes.c_char * 160)()
    if library.require(device.index).qtool_moe_table(table.data_ptr(), byref(layer),
                                                     reason) != library.OK:
        raise LibraryError(reason.value.decode(errors="replace"))
    return table.to(device)


def _moe_cuda(x, ids, weights, table, sections, format, activation, first):
    y, device = torch.empty_like(x), x.device.index
    if not x.shape[0]:
        return y
    x = _rows(x, x.shape[1])
    ids, weights = ids.to(torch.int32).contiguous(), weights.float().contiguous()
    library_ = library.require(device)
    with torch.cuda.device(x.device):
        key = ("moe", tuple(format[: 3 * schemes.FIELDS]), len(format), format[-1], x.shape[0],
               ids.shape[1], x.dtype, device, activation, first)
        if key not in _plans:
            experts = moe.of_operands(sections, format)
            layer = _moe_layer(experts, 1)
            options = library.MoeOptions(
                dtype=library.DTYPES[x.dtype], device=device, topk=ids.shape[1],
                activation=list(moe.ACTIVATIONS).index(activation), first_expert=first,
                same_tables=experts.same_tables, dependent_launch=1)
            _plans[key] = library.planned(library_.qtool_moe_plan, library.MoePlan(), byref(layer),
                                          x.shape[0], byref(options))
        plan, stream = _plans[key], torch.cuda.current_stream().cuda_stream
        workspace = _workspace(plan.workspace_bytes, device, stream)
        library.ran(library_.qtool_moe_run(
            byref(plan), table.data_ptr(), y.data_ptr(), x.data_ptr(), ids.data_ptr(),
            weights.data_ptr(), _pointer(workspace), stream), "qtool_moe_run")
    return y


def _moe_cpu(x, ids, weights, table, sections, format, activation, first):
    return moe.reference(x, ids, weights, moe.of_operands(sections, format), activation, first)


_library.impl("moe_matmul", _moe_cuda, "CUDA")
_library.impl("moe_matmul", _moe_cpu, "CPU")
torch.library.register_fake("qtool::moe_matmul", lambda x, *arguments: torch.empty_like(x),
                            lib=_library)


# ---- 4-bit KV cache -----------------------------------------------------------------------------

def _kv_cache(cache, table):
    names = ["k", "v", "k_param", "v_param", "k_first", "k_tail"]
    pages, heads, page_tokens, words = cache[0].shape
    pitch = 0 if table is None else table.shape[1]
    return library.KvCache(format=0, heads=heads, head_dim=8 * words, page_tokens=page_tokens,
                           table=_pointer(table), table_pitch=pitch,
                           **{name: t.data_ptr() for name, t in zip(names, cache, strict=True)})


def _kv4_append_cuda(cache, table, k, v, sequence, position):
    k, v = k.contiguous(), v.contiguous()
    with torch.cuda.device(k.device):
        described = _kv_cache(cache, table)
        library.ran(library.require(k.device.index).qtool_kv_append(
            byref(described), k.data_ptr(), v.data_ptr(), sequence.data_ptr(), position.data_ptr(),
            k.shape[0], library.DTYPES[k.dtype], 0, torch.cuda.current_stream().cuda_stream),
            "qtool_kv_append")


def _kv4_attention_cuda(q, cache, table, length, max_length, scale):
    q = q.contiguous()
    out, device = torch.empty_like(q), q.device.index
    library_ = library.require(device)
    described = _kv_cache(cache, table)
    with torch.cuda.device(q.device):
        key = ("kv4", tuple(q.shape), described.heads, described.page_tokens, table is None,
               max_length, scale, q.dtype, device)
        if key not in _plans:
            options = library.KvOptions(batch=q.shape[0], heads=q.shape[1], max_length=max_length,
                                        scale=scale, dtype=library.DTYPES[q.dtype], device=device,
                                        dependent_launch=0)
            _plans[key] = library.planned(library_.qtool_kv_attention_plan, library.KvPlan(),
                                          byref(described), byref(options), 0)
        plan, stream = _plans[key], torch.cuda.current_stream().cuda_stream
        workspace = _workspace(plan.workspace_bytes, device, stream)
        library.ran(library_.qtool_kv_attention_run(
            byref(plan), byref(described), out.data_ptr(), q.data_ptr(), length.data_ptr(),
            _pointer(workspace), stream), "qtool_kv_attention_run")
    return out


_library.impl("kv4_append", _kv4_append_cuda, "CUDA")
_library.impl("kv4_append", kv4.append, "CPU")
_library.impl("kv4_attention", _kv4_attention_cuda, "CUDA")
_library.impl("kv4_attention", lambda q, cache, table, length, max_length, scale:
              kv4.attention(q, cache, table, length.clamp(max=max_length), scale), "CPU")
torch.library.register_fake("qtool::kv4_append", lambda *arguments: None, lib=_library)
torch.library.register_fake("qtool::kv4_attention", lambda q, *arguments: torch.empty_like(q),
                            lib=_library)
