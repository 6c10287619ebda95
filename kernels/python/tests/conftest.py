"""Fixtures: containers of the example checkpoint and of a matrix of odd shape, made by QTOOL."""
import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import save_file

ROOT = os.path.normpath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
QTOOL = os.environ.get("QTOOL", os.path.join(ROOT, "build", "qtool"))
NANO = os.path.join(ROOT, "examples", "nano-llama")

SCHEMES = ["nf4", "nf3", "nf2", "lut4", "int3", "int2:zero=group", "int3:g=32,zero=group",
           "iq4nl", "mxfp4", "nvfp4", "fp8", "fp7", "fp6:e=2", "fp5", "fp4", "fp8:e=6", "int4", "int4:g=0,zero=group", "int8", "int8:g=32,zero=group",
           "mix24", "mix24:g=8,g2=8", "w4ax", "w4ax:rotate=none",
           "w4ax:scales=int", "w4ax:scales=row"]


def run(*arguments):
    subprocess.run([QTOOL, *map(str, arguments), "-q"], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def container(tmp_path_factory):
    """Of the example checkpoint, by scheme."""
    made = {}

    def make(scheme):
        if scheme not in made:
            out = tmp_path_factory.mktemp("c") / "container"
            data = ["--data", os.path.join(NANO, "calib.txt"), "--samples", "4", "--seqlen", "64"]
            run("quantize", NANO, "-o", out, "--scheme", scheme,
                *(data if scheme.startswith("w4ax") else []))
            made[scheme] = out
        return made[scheme]

    return make


@pytest.fixture
def ids():
    return torch.arange(64) * 37 % 1000 + 3


@pytest.fixture(scope="session")
def odd(tmp_path_factory):
    """A checkpoint of matrices whose shapes are no multiples of anything, values from 2^-20 up."""
    directory = tmp_path_factory.mktemp("odd")
    torch.manual_seed(1)
    shapes = [(16, 64), (17, 65), (37, 328), (130, 1000)]
    save_file({f"layers.0.m{i}.weight": torch.randn(n, k) * 0.05 + 0.2 * torch.randn(n, 1)
               for i, (n, k) in enumerate(shapes)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "none"}))
    return directory
