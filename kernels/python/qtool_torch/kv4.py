"""The 4-bit KV cache of kernels/include/qtool_kv4.h: its tensors, and a reference in PyTorch.

A cache is the list [k, v, k_param, v_param, k_first, k_tail] of that header, codes as int32.
Without a table sequence b is page b; with a table [sequences][entries], int32, token i of sequence
b is on page table[b][i / page tokens].
"""
import torch

GROUP, CHANNELS = 64, 16
KEY_SHIFTS = [4 * i + 16 * h for i in range(4) for h in range(2)]
SHIFTS = [4 * c for c in range(8)]


def new_cache(pages, page_tokens, heads, head_dim, sequences=None, device="cpu"):
    """An empty cache. page_tokens is a multiple of 64; sequences: as many as pages by default."""
    def zeros(*shape, dtype=torch.float16):
        return torch.zeros(shape, dtype=dtype, device=device)

    sequences = pages if sequences is None else sequences
    codes = (pages, heads, page_tokens, head_dim // 8)
    return [zeros(*codes, dtype=torch.int32), zeros(*codes, dtype=torch.int32),
            zeros(pages, heads, page_tokens // GROUP, head_dim),
            zeros(pages, heads, page_tokens // 8, 4, head_dim // CHANNELS, 2),
            zeros(sequences, heads, head_dim), zeros(sequences, heads, GROUP, head_dim)]


def _quantize_keys(x):
    """Codes and FP16 parameters of keys x FP32 [heads][tokens][head_dim] of a KV group."""
    low, high = x.amin(1), x.amax(1)
    middle = (low + high) / 2

    def zero(bits):
        scale = bits.short().view(torch.float16).float()
        return torch.round(7.5 - middle * (1 / scale)).clamp(-63, 63).int()

    length = torch.maximum(high - low, middle.abs() * (9 / 32))
    want = (length / 15).half().view(torch.int16).int().clamp(min=96)
    first = zero(want).abs()
    base = (want + 32 - first) & ~63
    last = zero(base + first)
    scale = (base + last.abs()).short().view(torch.float16)
    code = torch.round(x * (1 / scale.float())[:, None] + last[:, None]).clamp(0, 15).int()
    return code, torch.where(last < 0, -scale, scale)


def _keys(codes, param):
    """Keys FP32 from codes and parameters."""
    zero = (param.view(torch.int16) & 63).float().copysign(param.float())
    return (codes - zero) * param.float().abs()


def _quantize_value(x):
    """Codes and FP16 parameters of values x FP32 [heads][head_dim]."""
    x = x.unflatten(1, (-1, CHANNELS))
    low, high = x.amin(2).clamp(max=0), x.amax(2).clamp(min=0)
    length = torch.where(high == low, 1.0, high - low)
    zero = torch.round(low * -60 / length).int()
    near = ((high - low) / 15).half().view(torch.int16) + 32 - zero
    param = (near & ~63).clamp(min=0) + zero
    param = torch.where(param == 0, 0x3C00, param).short().view(torch.float16)
    per, zero = 1 / param.float()[..., None], _zero(param)[..., None]
    return torch.round(x * per + zero).clamp(0, 15).int().flatten(1), param


def _zero(param):
    """Zero-points of FP16 parameters of values."""
    return (param.view(torch.int16) & 63).float() / 4


def _value_order(codes, groups):
    """Codes in the order of nibbles from that of channels."""
    return codes.unflatten(-1, (groups, -1, 2)).transpose(-3, -2).flatten(-3)


def _channel_order(codes, groups):
    """The inverse of _value_order."""
    return codes.unflatten(-1, (-1, groups, 2)).transpose(-3, -2).flatten(-3)


def _pack(codes, shifts):
    words = codes.unflatten(-1, (-1, 8)).long() << torch.tensor(shifts, device=codes.device)
    words = words.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _unpack(words, shifts):
    return (words[..., None] >> torch.tensor(shifts, device=words.device) & 15).flatten(-2).float()


def _page(table, sequence, token, page_tokens):
    return sequence if table is None else int(table[sequence, token // page_tokens])


def append(cache, table, k, v, sequence, position):
    """Reference of qtool_kv_append, one token after the other."""
    codes_k, codes_v, k_param, v_param, k_first, k_tail = cache
    page_tokens, limit = codes_k.shape[2], 65504.0
    for i, (b, token) in enumerate(zip(sequence.tolist(), position.tolist())):
        page, row = _page(table, b, token, page_tokens), token % page_tokens
        key = k[i].float().clamp(-limit, limit).half()
        code, param = _quantize_value(v[i].float().clamp(-limit, limit))
        codes_v[page, :, row] = _pack(_value_order(code, param.shape[1]), SHIFTS)
        v_param[page, :, row // 8, row % 4, :, row // 4 % 2] = param
        k_tail[b, :, token % GROUP] = key
        if token == 0:
            k_first[b] = key
        first = 1 if token < GROUP else 0  # token 0 belongs to no group
        tail = k_tail[b, :, first : token % GROUP + 1].float()
        if tail.shape[1]:
            code, param = _quantize_keys(tail)
            at = row - token % GROUP
            codes_k[page, :, at + first : row + 1] = _pack(code, KEY_SHIFTS)
            k_param[page, :, at // GROUP] = param


def attention(q, cache, table, length, scale):
    """Reference of qtool_kv_attention_run, in FP32."""
    codes_k, codes_v, k_param, v_param, k_first, _ = cache
    heads, page_tokens = codes_k.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for b, count in enumerate(length.tolist()):
        if not count:
            continue
        pages = [_page(table, b, t, page_tokens) for t in range(0, count, page_tokens)]
        key = _keys(_unpack(codes_k[pages], KEY_SHIFTS),
                    k_param[pages].repeat_interleave(GROUP, 2))
        param = v_param[pages].permute(0, 1, 2, 5, 3, 4).flatten(2, 4)  # [pages][heads][tokens]
        value = _channel_order(_unpack(codes_v[pages], SHIFTS), param.shape[-1])
        value = value.unflatten(-1, (-1, CHANNELS))
        value = ((value - _zero(param)[..., None]) * param.float()[..., None]).flatten(-2)
        key, value = (t.transpose(0, 1).flatten(1, 2)[:, :count] for t in (key, value))
        key[:, 0] = k_first[b].float()
        query = q[b].float().unflatten(0, (heads, -1))
        p = (scale * query @ key.transpose(1, 2)).softmax(-1)
        out[b] = (p @ value).flatten(0, 1)
    return out.to(q.dtype)
