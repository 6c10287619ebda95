"""The experts of a layer on the sections of a container, in place of a module of transformers."""
import torch
from torch import nn

from . import moe, ops, schemes
from .linear import _Sections

# Names of gate, up and down in checkpoints.
NAMES = [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")]
ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "PytorchGELUTanh": "gelu_tanh",
               "GELUTanh": "gelu_tanh"}


class QtoolExperts(nn.Module):
    """Takes what the experts modules of transformers take: hidden states [m][hidden], and the
    numbers and routing weights [m][topk] of the chosen experts. On CUDA by the grouped kernels; on
    the CPU, and for formats without such kernels, by the module itself with decoded matrices."""

    def __init__(self, module, formats, dtype=torch.float16, device=None):
        """formats: {(expert, name of the matrix): Format}. ValueError: unknown names, or a module
        that has more than gated matrices."""
        super().__init__()
        count = 1 + max(e for e, _ in formats)
        names = [n for n in NAMES if formats.keys() == {(e, p) for e in range(count) for p in n}]
        if not names:
            raise ValueError("the experts are not gate, up and down matrices, or not all of these "
                             "are quantized")
        if not all(hasattr(module, p) for p in ("gate_up_proj", "down_proj")) \
                or len(list(module.parameters())) != 2 or module.gate_up_proj.shape[0] != count:
            raise ValueError("experts with biases, without gates, or of another number than in the "
                             "container, are not supported")
        self.names, self.formats, self.dtype = names[0], formats, dtype
        self.count = count
        for e in range(count):
            expert = nn.Module()
            for name in self.names:
                matrix = nn.Module()
                matrix.weight = _Sections(formats[e, name], device)
                expert.add_module(name, matrix)
            self.add_module(str(e), expert)
        parts = [[formats[e, name] for e in range(count)] for name in self.names]
        self.activation = ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
        plain = type(module).__dict__.get("_apply_gate") in (None, _default_gate())
        self.fused = not moe.unfused(parts) and self.activation is not None and plain
        del module.gate_up_proj, module.down_proj
        self._module = [module]  # in a list: it is no submodule, whose weights would be loaded
        self._ready = self._experts = self._table = None

    def _matrices(self):
        """(expert, name, module with the sections)."""
        return [(e, name, self.get_submodule(f"{e}.{name}").weight)
                for e in range(self.count) for name in self.names]

    def _device(self):
        return next(self.buffers()).device

    def sections(self, e, name):
        q = self.get_submodule(f"{e}.{name}").weight.q
        return {key: getattr(q, key) for key in schemes.sections(self.formats[e, name])}

    def check(self):
        """ValueError if sections have values that their scheme does not allow."""
        for e, name, _ in self._matrices():
            schemes.check(self.formats[e, name], self.sections(e, name))

    def finish(self):
        """Prepares sections for the device that they are on. The first forward pass does so too,
        but cannot while it is being compiled."""
        device = self._device()
        self._experts = self._table = None
        if self.fused and device.type == "cuda":
            self._stack()
        else:
            self._decode()
        self._ready = device

    def _stack(self):
        self._experts = moe.stack([[(self.formats[e, name], self.sections(e, name))
                                    for e in range(self.count)] for name in self.names])
        for i, name in enumerate(self.names):  # the modules keep views, not a second copy
            for key, whole in self._experts.sections[i].items():
                for e in range(self.count):
                    setattr(self.get_submodule(f"{e}.{name}").weight.q, key, whole[e])
        self._table = ops.moe_table(self._experts)

    def _decode(self):
        """Gives the module its matrices, in the order and orientation that it expects."""
        module = self._module[0]
        gate, up, down = (
            torch.stack([schemes.decode(self.formats[e, name], self.sections(e, name))
                         .to(self.dtype) for e in range(self.count)]) for name in self.names)
        if getattr(module, "is_concatenated", True):
            both = torch.cat([gate, up], 1)
        else:
            both = torch.stack([gate, up], 2).flatten(1, 2)
        if getattr(module, "is_transposed", False):
            both, down = both.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        module.gate_up_proj, module.down_proj = both, down

    def _apply(self, fn, recurse=True):
        device = self._device()
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
        super()._apply(fn, recurse)
        self._ready = None
        if self._device().type == "cuda":
            self.finish()
        return self

    def forward(self, hidden_states, top_k_index, top_k_weights):
        if self._ready != hidden_states.device:
            self.finish()
        if self._experts is None:
            return self._module[0](hidden_states, top_k_index, top_k_weights)
        return torch.ops.qtool.moe_matmul(
            hidden_states, top_k_index, top_k_weights, self._table, self._experts.tensors(),
            self._experts.numbers(), self.activation, 0)

    def extra_repr(self):
        f = self.formats[0, self.names[0]]
        return f"{self.count}, {f.k}, {f.n}, {schemes.NAMES[f.scheme]}"


def _default_gate():
    try:
        from transformers.integrations.moe import _default_apply_gate
    except ImportError:
        return None
    return _default_apply_gate
