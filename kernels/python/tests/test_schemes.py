"""Containers decoded by PyTorch against `qtool export --format dense`, bit for bit."""
import pytest
import torch
from conftest import SCHEMES, run
from safetensors.torch import load_file

from qtool_torch import load_container, ops, schemes
from qtool_torch.schemes import layout

DATA_FREE = [s for s in SCHEMES if not s.startswith("w4ax")]


def check(container, dense):
    run("export", container, "-o", dense, "--format", "dense", "--dtype", "float32")
    want = load_file(dense / "model.safetensors")
    tensors = load_container(container).tensors
    assert tensors
    for name, packed in tensors.items():
        assert torch.equal(packed.decode(), want[name]), name
    return tensors


@pytest.mark.parametrize("scheme", SCHEMES)
def test_example(container, tmp_path, scheme):
    check(container(scheme), tmp_path / "dense")


@pytest.mark.parametrize("scheme", DATA_FREE)
def test_odd_shapes(odd, tmp_path, scheme):
    run("quantize", odd, "-o", tmp_path / "c", "--scheme", "none", "--tensor", f"m={scheme}")
    tensors = check(tmp_path / "c", tmp_path / "dense")
    assert len(tensors) == 4


@pytest.mark.parametrize("scheme", ["nf3", "int4:g=0,zero=group", "mix24", "w4ax:scales=int"])
def test_operator(container, scheme):
    """The operators on the CPU, with torch.compile, and their fake implementations."""
    name, packed = next(iter(load_container(container(scheme)).tensors.items()))
    f, s = packed
    x = torch.randn(2, 3, f.k)
    if "w4ax" in scheme:
        operands, clip = ops.w4ax_operands(f, s)
        operator, arguments = torch.ops.qtool.w4ax_matmul, (operands, list(f), clip)
        columns = torch.empty(f.k)  # the operator takes x times 2^-col_exp2
        columns[s["col_order"].long()] = torch.exp2(s["col_exp2"].float())
        inside = x * columns
        want = schemes.product(f, inside, schemes.prepare(f, s, torch.float32))
        want = want[..., s["row_order"].long()] / torch.exp2(s["row_exp2"].float())
    else:
        operator, arguments = torch.ops.qtool.matmul, (list(s.values()), list(f))
        want = schemes.product(f, x, schemes.prepare(f, s, torch.float32))
    assert torch.allclose(operator(x, *arguments), want, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(lambda x: 2 * operator(x, *arguments), fullgraph=True)
    assert torch.allclose(compiled(x), 2 * want, rtol=1e-5, atol=2e-5)
    torch.library.opcheck(operator, (x, *arguments))


def test_parts(container):
    """One call for the rows of several matrices with tables of their own."""
    packed = [p for n, p in load_container(container("lut4")).tensors.items()
              if n.startswith("model.layers.1.self_attn.") and p.format.k == 256][:3]
    x = torch.randn(4, 256)
    y = torch.ops.qtool.matmul(x, [t for p in packed for t in p.sections.values()],
                               [i for p in packed for i in p.format])
    assert torch.allclose(y, x @ torch.cat([p.decode() for p in packed]).T, atol=1e-5)


def test_half_rounds_once():
    """Scales below FP32's normal range are rounded once."""
    stored = torch.full((1, 1, 16), 2.0**-24 * 3, dtype=torch.float16)
    assert layout.scales(stored, -125, 16)[0, 0].item() == 3 * 2.0**-149
