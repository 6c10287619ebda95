"""Mixtures of experts: the operator, transformers and the vLLM plugin, on the CPU."""
import os

import numpy
import pytest
import torch
from conftest import ROOT, run
from torch import nn
from transformers import AutoModelForCausalLM

from qtool_torch import ContainerError, QtoolExperts, load_container, moe, vllm

MODELS = os.path.join(ROOT, "tests", "golden", "models")


def quantize(tmp_path, family, scheme, *options):
    out = tmp_path / "container"
    run("quantize", os.path.join(MODELS, family), "-o", out, "--scheme", scheme, *options)
    return out


def matrices(container):
    """Three lists of (Format, sections) of the mixture."""
    tensors = load_container(container).tensors
    return [[tuple(tensors[f"m.experts.{e}.{name}.weight"]) for e in range(5)]
            for name in ("w1", "w3", "w2")]


def product(parts, x, ids, weights, activation=torch.nn.functional.silu):
    """In FP64, from matrices decoded one by one."""
    from qtool_torch import schemes

    y = torch.zeros(x.shape, dtype=torch.float64)
    for m in range(x.shape[0]):
        for e, w in zip(ids[m].tolist(), weights[m].double()):
            if 0 <= e < len(parts[0]):
                gate, up, down = (schemes.decode(*p[e]).double() for p in parts)
                y[m] += w * (down @ (activation(gate @ x[m].double()) * (up @ x[m].double())))
    return y


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    """Containers of a layer with 5 experts of 64 to 128 channels, by scheme."""
    from safetensors.torch import save_file

    made, source = {}, tmp_path_factory.mktemp("mixture")
    torch.manual_seed(2)
    save_file({f"m.experts.{e}.{n}.weight": torch.randn(*s) / 8 for e in range(5) for n, s in
               (("w1", (256, 64)), ("w3", (256, 64)), ("w2", (64, 256)))},
              source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "none"}')

    def make(scheme, *options):
        if (scheme, *options) not in made:
            out = tmp_path_factory.mktemp("c") / "container"
            run("quantize", source, "-o", out, "--scheme", scheme, *options)
            made[scheme, *options] = out
        return made[scheme, *options]

    return make


@pytest.mark.parametrize("scheme", ["nf4:g=64", "lut3:g=32", "fp6:e=2", "int4:g=32,zero=group",
                                    "int8"])
def test_operator(mixture, scheme):
    parts = matrices(mixture(scheme))
    assert moe.unfused([[f for f, _ in p] for p in parts]) == ""
    experts = moe.stack(parts)
    assert experts.same_tables == (scheme != "lut3:g=32")  # whose matrices have tables of their own
    torch.manual_seed(1)
    x, weights = torch.randn(7, 64), torch.rand(7, 3)
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(7)]).int()  # expert 5: of another rank
    arguments = (x, ids, weights, None, experts.tensors(), experts.numbers())
    got = torch.ops.qtool.moe_matmul(*arguments, "silu", 0)
    assert torch.allclose(got.double(), product(parts, x, ids, weights), atol=1e-4)
    later = torch.ops.qtool.moe_matmul(*arguments[:1], ids + 5, *arguments[2:], "silu", 5)
    assert torch.equal(got, later)
    gelu = torch.ops.qtool.moe_matmul(*arguments, "gelu_tanh", 0)
    want = product(parts, x, ids, weights, lambda v: nn.functional.gelu(v, approximate="tanh"))
    assert torch.allclose(gelu.double(), want, atol=1e-4)
    torch.library.opcheck(torch.ops.qtool.moe_matmul, (*arguments, "silu", 0),
                          test_utils=("test_schema", "test_faketensor"))


@torch.no_grad()
def difference(container, tmp_path):
    """The largest difference of logits from those of `qtool eval`, relative to their range."""
    model = AutoModelForCausalLM.from_pretrained(container, dtype=torch.float32)
    ids = torch.arange(24) * 37 % 50 + 3
    data, out = tmp_path / "ids.u32", tmp_path / "logits.npy"
    ids.to(torch.int32).numpy().tofile(data)
    run("eval", container, "--data", data, "--seqlen", len(ids), "--windows", 1, "--logits", out)
    want = torch.from_numpy(numpy.load(out))
    return model, ((model(ids[None]).logits[0] - want).abs().max() /
                   (want.max() - want.min())).item()


@pytest.mark.parametrize("family, options", [
    ("qwen3_moe", []), ("mixtral", []), ("olmoe", []),
    ("qwen3_moe", ["--tensor", r"layers\.0\.mlp\.experts\.\d\.down_proj=fp6"]),  # not one format
    ("qwen3_moe", ["--tensor", r"layers\.0\.mlp\.experts=none"]),
])
def test_logits(tmp_path, family, options):
    model, worst = difference(quantize(tmp_path, family, "nf4:g=32", *options), tmp_path)
    assert worst < 1e-5
    replaced = [m for m in model.modules() if isinstance(m, QtoolExperts)]
    assert len(replaced) == (1 if "=none" in str(options) else 2)
    before = replaced[0].sections(1, replaced[0].names[0])["plane0"].clone()
    model.to(torch.bfloat16)(torch.arange(9)[None])
    assert torch.equal(replaced[0].sections(1, replaced[0].names[0])["plane0"], before)


def test_refused_in_transformers(tmp_path):
    container = quantize(tmp_path, "gpt_oss_moe", "nf4:g=32")
    with pytest.raises(ContainerError, match="experts with biases"):
        AutoModelForCausalLM.from_pretrained(container, dtype=torch.float32)


# ---- vLLM ---------------------------------------------------------------------------------------

class Layer(nn.Module):
    """What a layer of experts of vLLM has. local: numbers of the experts of this rank."""

    def __init__(self, rank=0, local=None):
        super().__init__()
        self.tp_rank, self.local, self.expert_map = rank, local, None
        if local is not None:
            self.expert_map = torch.tensor([local.index(e) if e in local else -1 for e in range(8)])

    def _map_global_expert_id_to_local_expert_id(self, expert):
        return expert if self.local is None else int(self.expert_map[expert])


def loaded(container, layer, count, inner):
    """create_weights, the loaders as a model calls them, process_weights_after_loading."""
    tensors = load_container(container).tensors
    parts = vllm.experts_of({n: t.format for n, t in tensors.items()}, "m.experts")
    method = vllm.MoeMethod("m.experts", parts)
    method.create_weights(layer, count, 64, inner, torch.float32)
    parameters = dict(layer.named_parameters())
    for name, packed in tensors.items():
        expert, shard = name.split(".")[2:4]
        for section, tensor in packed.sections.items():
            full = ("w2" if shard == "w2" else "w13") + "_weight.q." + section
            success = parameters[full].weight_loader(
                parameters[full], tensor, full, shard_id=shard, expert_id=int(expert),
                return_success=True)
            assert success == (layer.local is None or int(expert) in layer.local)
    method.process_weights_after_loading(layer)
    return method


@pytest.mark.parametrize("scheme", ["nf4:g=64", "lut4:g=64", "fp6:e=2", "int4:g=64,zero=group",
                                    "int8"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards(mixture, scheme, size):
    parts = matrices(mixture(scheme))
    x, weights = torch.randn(6, 64), torch.rand(6, 2)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(6)])
    total = 0
    for rank in range(size):
        layer = Layer(rank)
        method = loaded(mixture(scheme), layer, 5, 256 // size)
        total = total + method.apply(layer, x, weights, ids, None, None)
    assert torch.allclose(total.double(), product(parts, x, ids, weights), atol=1e-4)


def test_expert_parallel(mixture):
    parts = matrices(mixture("nf4:g=64"))
    x, weights = torch.randn(6, 64), torch.rand(6, 2)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(6)])
    total = 0
    for local in ([0, 1, 2], [3, 4]):
        layer = Layer(local=local)
        method = loaded(mixture("nf4:g=64"), layer, len(local), 256)
        total = total + method.apply(layer, x, weights, ids, None, None)
    assert torch.allclose(total.double(), product(parts, x, ids, weights), atol=1e-4)


def test_refused_in_vllm(mixture):
    with pytest.raises(ContainerError, match="no grouped kernel takes mix24"):
        loaded(mixture("mix24"), Layer(), 5, 256)
    with pytest.raises(ContainerError, match="experts of different formats"):
        loaded(mixture("nf4:g=64", "--tensor", r"experts\.3\.w1=fp6"), Layer(), 5, 256)
    with pytest.raises(ContainerError, match="multiples of 64"):
        loaded(mixture("nf4:g=64"), Layer(1), 5, 32)
    formats = {n: t.format for n, t in load_container(mixture("int8")).tensors.items()}
    assert vllm.experts_of(formats, "other.experts") == []
    del formats["m.experts.3.w1.weight"]
    with pytest.raises(ContainerError, match="all or none"):
        vllm.experts_of(formats, "m.experts")


def test_layer_of_vllm(mixture):
    """The method in the quantization config of an installed vLLM."""
    fused = pytest.importorskip("vllm.model_executor.layers.fused_moe")
    from vllm.model_executor.layers.quantization import get_quantization_config

    vllm.register()
    config = get_quantization_config("qtool").from_config({"quant_method": "qtool"})
    config.maybe_update_config(str(mixture("nf4:g=64")))

    class Experts(fused.RoutedExperts):
        def __init__(self):
            nn.Module.__init__(self)
            self.moe_config = self.activation = None

    layer = Experts()
    method = config.get_quant_method(layer, "m.experts")
    assert isinstance(method, fused.FusedMoEMethodBase) and len(method.parts[2]) == 5
    assert config.get_quant_method(layer, "other.experts") is None
