"""Malformed containers, and what a machine may lack: one clear exception each."""
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import run
from safetensors.torch import load_file, save_file

from qtool_torch import ContainerError, LibraryError, library, load_container


def edited(container, tmp_path, edit):
    """A copy with another manifest."""
    out = tmp_path / "c"
    shutil.copytree(container, out)
    manifest = json.loads((out / "qtool.json").read_text())
    edit(manifest)
    (out / "qtool.json").write_text(json.dumps(manifest))
    return out


def first(manifest):
    return next(iter(manifest["tensors"].values()))


@pytest.mark.parametrize("edit, message", [
    (lambda m: m.update(format_version=3), "format version 3"),
    (lambda m: m.update(format="other"), "not the manifest"),
    (lambda m: m.pop("tensors"), "'tensors' is no object"),
    (lambda m: first(m).update(scheme="nf5:g=128"), "scheme 'nf5' is not known"),
    (lambda m: first(m).update(scheme="nf4"), "'g' is missing"),
    (lambda m: first(m).update(scheme="nf4:g=7"), "groups of 7"),
    (lambda m: first(m).update(layout="frag16x64/pair"), "layout 'frag16x64/pair'"),
    (lambda m: first(m).update(shape=[256, 1 << 40]), "out of range"),
    (lambda m: first(m).update(shape=[256]), "not enough values"),
    (lambda m: first(m).update(shape=[512, 512]), "sections"),
    (lambda m: first(m).update(scale_exp2=1001), "out of range"),
    (lambda m: first(m).pop("sections"), "'sections' is missing"),
    (lambda m: first(m)["sections"][0].update(dtype="F8_E4M3"), "F8_E4M3"),
    (lambda m: first(m)["sections"][0].update(crc32="00000000"), "CRC-32"),
    (lambda m: m["copied"].update(more={"dtype": "F16", "shape": [1], "crc32": ""}), "is missing"),
    (lambda m: m["copied"]["model.norm.weight"].update(shape=[255]), "where the manifest has"),
])
def test_manifest(container, tmp_path, edit, message):
    with pytest.raises(ContainerError, match=message.replace("(", r"\(")):
        load_container(edited(container("nf4"), tmp_path, edit))


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"a": 1, "a": 2}', "[" * 100000])
def test_no_manifest(tmp_path, text):
    if text is not None:
        (tmp_path / "qtool.json").write_text(text)
    with pytest.raises(ContainerError, match="qtool.json"):
        load_container(tmp_path)


def test_cut_file(container, tmp_path):
    out = edited(container("nf4"), tmp_path, lambda m: None)
    os.truncate(out / "model.safetensors", 1000)
    with pytest.raises(ContainerError, match="model.safetensors"):
        load_container(out)


@pytest.mark.parametrize("scheme, section, change, message", [
    ("nf4", "table", lambda t: t.neg_(), "not ascending"),
    ("nf4", "scale", lambda t: t.view(-1)[:1].fill_(float("nan")), "not finite"),
    ("mix24", "perm", lambda t: t[:1].fill_(3), "perm"),
    ("mix24", "csr_ptr", lambda t: t.view(-1)[1:2].fill_(1 << 20), "csr_ptr"),
    ("mix24", "csr_col", lambda t: t.fill_(65535), "csr_col"),
    ("w4ax", "bits", lambda t: t[:1].fill_(5), "neither 4 nor 8"),
    ("w4ax", "col_order", lambda t: t[:1].fill_(1), "col_order"),
    ("w4ax", "row_order", lambda t: t[:1].fill_(1 << 30), "row_order"),
])
def test_values(container, tmp_path, scheme, section, change, message):
    """Values that would lead a kernel out of its memory; transformers refuses them too."""
    from transformers import AutoModelForCausalLM

    out = edited(container(scheme), tmp_path, lambda m: None)
    tensors = load_file(out / "model.safetensors")
    change(tensors["model.layers.1.self_attn.v_proj.weight.q." + section])
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ContainerError, match=message):
        load_container(out, verify=False)
    with pytest.raises(ContainerError, match=message):
        AutoModelForCausalLM.from_pretrained(out)


def test_embedding(tmp_path):
    """What the model has no linear layer for is refused, not ignored."""
    from conftest import NANO
    from transformers import AutoModelForCausalLM

    run("quantize", NANO, "-o", tmp_path / "c", "--scheme", "nf4", "--tensor", "embed_tokens=fp8")
    with pytest.raises(ContainerError, match="embed_tokens.*no linear layer"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "c")


# ---- the library --------------------------------------------------------------------------------

@pytest.fixture
def fresh(monkeypatch):
    """library.load and require without what earlier calls found."""
    monkeypatch.setattr(library, "load", functools.cache(library.load.__wrapped__))
    monkeypatch.setattr(library, "require", functools.cache(library.require.__wrapped__))
    return monkeypatch


def test_no_library(fresh, tmp_path):
    fresh.setenv("QTOOL_KERNELS", str(tmp_path / "none.so"))
    with pytest.raises(LibraryError, match="not found.*QTOOL_KERNELS"):
        library.load()


@pytest.fixture
def fake(tmp_path):
    """Builds a library with the functions of PROTOTYPES."""
    def build(version, compute):
        source = tmp_path / "fake.c"
        source.write_text(f"int qtool_kernels_version(void) {{ return {version}; }}\n" + "".join(
            f"int {name}(void) {{ return {compute}; }}\n" for name in library.PROTOTYPES))
        out = tmp_path / "fake.so"
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", out], check=True)
        return str(out)

    return build


def test_wrong_version(fresh, fake):
    fresh.setenv("QTOOL_KERNELS", fake(100, 90))
    with pytest.raises(LibraryError, match=f"version 100, qtool_torch needs {library.VERSION}"):
        library.load()


def test_no_gpu(fresh):
    fresh.setattr(torch.cuda, "is_available", lambda: False)
    fresh.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(LibraryError, match="no usable NVIDIA GPU"):
        library.require(0)


def test_torch_without_cuda(fresh):
    fresh.setattr(torch.version, "cuda", None)
    with pytest.raises(LibraryError, match="no CUDA"):
        library.require(0)


def test_old_gpu(fresh, fake):
    fresh.setenv("QTOOL_KERNELS", fake(library.VERSION, 0))
    fresh.setattr(torch.version, "cuda", "13.0")
    fresh.setattr(torch.cuda, "is_available", lambda: True)
    fresh.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    fresh.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    fresh.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(LibraryError, match="Tesla T4, compute capability 7.5"):
        library.require(0)


def test_structs(tmp_path):
    """The structs have the sizes and offsets of the headers."""
    names = {"Mix24": "qtool_matmul_mix24", "Weight": "qtool_matmul_weight",
             "Options": "qtool_matmul_options", "Plan": "qtool_matmul_plan",
             "W4axActs": "qtool_w4ax_acts", "W4axInput": "qtool_w4ax_input",
             "W4axWeight": "qtool_w4ax_weight", "W4axOptions": "qtool_w4ax_options",
             "W4axPlan": "qtool_w4ax_plan", "KvCache": "qtool_kv_cache",
             "KvOptions": "qtool_kv_options", "KvPlan": "qtool_kv_plan",
             "MoeLayer": "qtool_moe_layer", "MoeOptions": "qtool_moe_options",
             "MoePlan": "qtool_moe_plan"}
    lines, want = [], []
    for ours, theirs in names.items():
        struct = getattr(library, ours)
        lines.append(f'printf("%zu ", sizeof(struct {theirs}));')
        want.append(ctypes.sizeof(struct))
        for field, _ in struct._fields_:
            lines.append(f'printf("%zu ", offsetof(struct {theirs}, {field}));')
            want.append(getattr(struct, field).offset)
    source = tmp_path / "sizes.c"
    source.write_text('#include <stddef.h>\n#include <stdio.h>\n#include "qtool_w4ax.h"\n'
                      '#include "qtool_kv4.h"\n#include "qtool_moe.h"\n'
                      "int main(void)\n{" + "\n".join(lines) +
                      'printf("%d", QTOOL_KERNELS_VERSION); }')
    include = os.path.join(os.path.dirname(__file__), "..", "..", "include")
    subprocess.run(["cc", "-I", include, source, "-o", tmp_path / "sizes"], check=True)
    got = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout
    assert [int(x) for x in got.split()] == [*want, library.VERSION]


def test_import_alone():
    """Without transformers the operators and load_container work."""
    code = ("import sys; sys.modules['transformers'] = None\n"
            "import importlib.util, qtool_torch\nprint(qtool_torch.load_container.__name__)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                         env=environment)
    assert out.stdout == "load_container\n", out.stderr
