"""A linear layer on the sections of a container."""
import torch
from torch import nn

from . import ops, schemes
from .schemes import w4ax


class _Sections(nn.Module):
    """Buffers with the names of sections, so that a state dict has the names of the container:
    q_proj.weight.q.plane0."""

    def __init__(self, f, device):
        super().__init__()
        self.q = nn.Module()
        for name, (dtype, shape) in schemes.sections(f).items():
            self.q.register_buffer(name, torch.empty(shape, dtype=dtype, device=device))

    def _apply(self, fn, recurse=True):
        """Moves between devices, but never changes a dtype: model.half() is about activations."""
        for name, t in self.q.named_buffers():
            moved = fn(t)
            setattr(self.q, name, moved if moved.dtype == t.dtype else t.to(moved.device))
        return self


class QtoolLinear(nn.Module):
    """y = x W^T + bias. On CUDA by the fused kernels; on the CPU, and for formats without a kernel,
    with the decoded matrix, in the dtype of the layer."""

    def __init__(self, f: schemes.Format, bias=False, dtype=torch.float16, device=None):
        super().__init__()
        self.format, self.dtype = f, dtype
        self.in_features, self.out_features = f.k, f.n
        self.weight = _Sections(f, device)
        self.register_parameter("bias", nn.Parameter(
            torch.empty(f.n, dtype=dtype, device=device), requires_grad=False) if bias else None)
        self.fused = not schemes.scheme_of(f).no_kernel(f)
        self._ready = None  # device of:
        self._operands = self._clip = None  # CUDA
        self._decoded = None  # else

    def sections(self):
        return {name: getattr(self.weight.q, name) for name in schemes.sections(self.format)}

    def check(self):
        """ValueError if sections have values that the scheme does not allow."""
        schemes.check(self.format, self.sections())

    def finish(self):
        """Prepares sections for the device that they are on. The first forward pass does so too,
        but cannot while it is being compiled."""
        f, s = self.format, self.sections()
        device = next(iter(s.values())).device
        self._operands = self._decoded = None
        if not self.fused or device.type != "cuda":
            self._decoded = schemes.prepare(f, s, self.dtype)
        elif schemes.NAMES[f.scheme] == "w4ax":
            self._operands, self._clip = ops.w4ax_operands(f, s)
            self._around = w4ax.around(f, s, self.dtype)
        else:
            self._operands = list(s.values())
        self._ready = device

    def _apply(self, fn, recurse=True):
        device = next(iter(self.sections().values())).device
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
        super()._apply(fn, recurse)
        self._ready = None
        if next(iter(self.sections().values())).device.type == "cuda":
            self.finish()
        return self

    def forward(self, x):
        if self._ready != x.device:
            self.finish()
        f = self.format
        if self._decoded is not None:
            y = schemes.product(f, x, self._decoded)
        elif schemes.NAMES[f.scheme] == "w4ax":
            columns, rows, row_scale = self._around
            x = x if columns is None else x * columns
            y = torch.ops.qtool.w4ax_matmul(x, self._operands, list(f), self._clip)
            y = y if rows is None else y[..., rows]
            y = y if row_scale is None else y * row_scale
        else:
            y = torch.ops.qtool.matmul(x, self._operands, list(f))
        return y if self.bias is None else y + self.bias

    def extra_repr(self):
        f = self.format
        return f"{f.k}, {f.n}, {schemes.NAMES[f.scheme]}, bias={self.bias is not None}"
