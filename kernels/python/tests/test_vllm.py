"""The vLLM plugin on CPU tensors: shards of ranks against slices of the decoded matrices."""
import pytest
import torch
from torch import nn

from qtool_torch import ContainerError, load_container, schemes
from qtool_torch.vllm import Method, parts_of

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEADS, KV_HEADS, HEAD = 4, 2, 64
COLUMN = ["nf4", "lut4", "fp6:e=2", "int4:g=0,zero=group", "int8:g=32,zero=group", "mix24"]


class Layer(nn.Module):
    """What a LinearBase of vLLM has."""

    def __init__(self, rank, size, kv=False):
        super().__init__()
        self.tp_rank, self.tp_size, self.params_dtype = rank, size, torch.float32
        if kv:
            self.num_kv_head_replicas = max(1, size // KV_HEADS)


def load(container, prefix, layer, k, sizes, k_whole):
    """create_weights, the loaders as a model calls them, process_weights_after_loading."""
    tensors = load_container(container).tensors
    formats = {name: t.format for name, t in tensors.items()}
    parts = parts_of(formats, prefix, PACKED)
    method = Method(prefix, parts)
    method.create_weights(layer, k, sizes, k_whole, sum(sizes) * layer.tp_size, torch.float32)
    parent, _, name = prefix.rpartition(".")
    names = [f"{parent}.{n}.weight" for n in PACKED.get(name, [name])]
    shards = {3: ["q", "k", "v"], 2: [0, 1], 1: [None]}[len(names)]
    parameters = dict(layer.named_parameters())
    for full, shard in zip(names, shards):
        for section, tensor in tensors[full].sections.items():
            parameter = parameters["weight.q." + section]
            parameter.weight_loader(parameter, tensor, *([] if shard is None else [shard]))
    method.process_weights_after_loading(layer)
    return method, [tensors[n].decode() for n in names]


@pytest.mark.parametrize("scheme", COLUMN)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_fused_columns(container, scheme, size):
    x = torch.randn(3, 256)
    heads, kv_heads = HEADS // size, max(1, KV_HEADS // size)
    sizes = [heads * HEAD, kv_heads * HEAD, kv_heads * HEAD]
    for rank in range(size):
        layer = Layer(rank, size, kv=True)
        method, (q, k, v) = load(container(scheme), "model.layers.1.self_attn.qkv_proj", layer, 256,
                                 sizes, 256)
        at = rank // max(1, size // KV_HEADS) * sizes[1]
        want = torch.cat([q[rank * sizes[0] :][: sizes[0]], k[at:][: sizes[1]], v[at:][: sizes[2]]])
        assert torch.allclose(method.apply(layer, x), x @ want.T, atol=2e-5)
        # One matrix, unless tables, permutations or scale_exp2 differ.
        assert len(layer.qtool_formats) == (1 if scheme in ("nf4", "fp6:e=2") else 3) \
            or "int" in scheme
        layer = Layer(rank, size)
        method, (gate, up) = load(container(scheme), "model.layers.1.mlp.gate_up_proj", layer, 256,
                                  [512 // size] * 2, 256)
        want = torch.cat([w[rank * 512 // size :][: 512 // size] for w in (gate, up)])
        assert torch.allclose(method.apply(layer, x), x @ want.T, atol=2e-5)


@pytest.mark.parametrize("scheme", [s for s in COLUMN if s != "mix24"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_channels(container, scheme, size):
    x, total = torch.randn(3, 512), 0
    for rank in range(size):
        layer = Layer(rank, size)
        method, (w,) = load(container(scheme), "model.layers.1.mlp.down_proj", layer, 512 // size,
                            [256], 512)
        total = total + method.apply(layer, x[:, rank * 512 // size :][:, : 512 // size])
    assert torch.allclose(total, x @ w.T, atol=2e-5)


def test_one_matrix_of_fused_parts(container):
    """Models such as Phi-3 store qkv_proj as one matrix: it is divided within each part."""
    packed = load_container(container("nf4")).tensors["model.layers.1.mlp.gate_proj.weight"]
    x = torch.randn(2, 256)
    for rank in range(2):
        layer = Layer(rank, 2)
        method = Method("m", [packed.format])
        method.create_weights(layer, 256, [128, 64, 64], 256, 512, torch.float32)
        for section, tensor in packed.sections.items():
            parameter = getattr(layer.weight.q, section)
            parameter.weight_loader(parameter, tensor)
        method.process_weights_after_loading(layer)
        w = packed.decode()
        want = torch.cat([w[a + rank * n :][:n] for a, n in ((0, 128), (256, 64), (384, 64))])
        assert torch.allclose(method.apply(layer, x), x @ want.T, atol=2e-5)


@pytest.mark.parametrize("scheme", ["w4ax", "w4ax:scales=int"])
def test_w4ax(container, scheme):
    layer = Layer(0, 1)
    method, _ = load(container(scheme), "model.layers.1.mlp.gate_up_proj", layer, 256, [512] * 2,
                     256)
    tensors = load_container(container(scheme)).tensors
    x = torch.randn(3, 256)
    want = torch.cat([schemes.product(p.format, x, schemes.prepare(*p, torch.float32)) for p in (
        tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))], 1)
    assert torch.allclose(method.apply(layer, x), want, atol=1e-4)


@pytest.mark.parametrize("scheme, prefix, k, message", [
    ("mix24", "model.layers.1.mlp.down_proj", 256, "divided along channels"),
    ("w4ax", "model.layers.1.mlp.down_proj", 256, "divided along channels"),
    ("nf4", "model.layers.1.mlp.down_proj", 32, "multiples of 128"),
    ("nvfp4", "model.layers.1.mlp.down_proj", 512, "no kernel takes lut"),
])
def test_refused(container, scheme, prefix, k, message):
    with pytest.raises(ContainerError, match=message):
        load(container(scheme), prefix, Layer(1, 512 // k), k, [256], 512)


def test_mixed_parts(container):
    formats = {n: t.format for n, t in load_container(container("nf4")).tensors.items()}
    del formats["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ContainerError, match="all or none"):
        parts_of(formats, "model.layers.1.self_attn.qkv_proj", PACKED)
    assert parts_of(formats, "model.layers.9.self_attn.o_proj", PACKED) == []


def test_layers_of_vllm(container, monkeypatch):
    """The plugin in the layers of an installed vLLM, on the CPU."""
    pytest.importorskip("vllm.model_executor.layers.linear")
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.quantization import get_quantization_config

    from qtool_torch import vllm

    vllm.register()
    vllm.register()
    config_class = get_quantization_config("qtool")
    with pytest.raises(ContainerError, match="format version 3"):
        config_class.from_config({"quant_method": "qtool", "format_version": 3})
    config = config_class.from_config({"quant_method": "qtool", "format_version": 1})
    config.maybe_update_config(str(container("lut4")))
    config.packed_modules_mapping = PACKED
    tensors = load_container(container("lut4")).tensors
    name, x = "model.layers.1.self_attn.", torch.randn(2, 256)
    q, k, v = (tensors[f"{name}{part}_proj.weight"] for part in "qkv")
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        for rank in range(2):
            monkeypatch.setattr(linear, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: 2)
            layer = linear.QKVParallelLinear(256, HEAD, HEADS, KV_HEADS, bias=False,
                                             params_dtype=torch.float32, quant_config=config,
                                             prefix=name + "qkv_proj")
            parameters = dict(layer.named_parameters())
            for shard, packed in zip("qkv", (q, k, v)):
                for section, tensor in packed.sections.items():
                    parameter = parameters["weight.q." + section]
                    parameter.weight_loader(parameter, tensor, shard)
            layer.quant_method.process_weights_after_loading(layer)
            want = torch.cat([t.decode()[rank * t.format.n // 2 :][: t.format.n // 2]
                              for t in (q, k, v)])
            assert torch.allclose(layer(x)[0], x @ want.T, atol=2e-5)
    plain = config.get_quant_method(layer, "model.layers.9.self_attn.o_proj")
    assert isinstance(plain, linear.UnquantizedLinearMethod)
    with pytest.raises(ContainerError, match="no method for"):
        config.get_quant_method(nn.Embedding(1, 1), "model.layers.1.mlp")
