"""vLLM: the plugin that loads containers (entry point vllm.general_plugins).

Parameters are named as the sections in the container (qkv_proj.weight.q.plane0), so nothing is
renamed. Each rank keeps its slice of each section; parts of a fused layer (q, k, v; gate, up) keep
tables of their own and are merged where they have none. The experts of a layer become one tensor
per section.
"""
import os

import torch
from torch import nn

from . import moe, ops, schemes, slices
from .container import ContainerError, check_version, read_formats
from .experts import NAMES

_registered = False


def register():
    """Called by vLLM in each of its processes, and more than once."""
    global _registered
    if not _registered:
        _define()
        _registered = True


def _define():
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
    from vllm.model_executor.layers.linear import (LinearBase, LinearMethodBase,
                                                   UnquantizedLinearMethod)
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    @register_quantization_config("qtool")
    class QtoolConfig(QuantizationConfig):
        def __init__(self, formats=None):
            super().__init__()
            self.formats = formats or {}

        def get_name(self):
            return "qtool"

        def get_supported_act_dtypes(self):
            return [torch.float16, torch.bfloat16]

        @classmethod
        def get_min_capability(cls):
            return 80

        @staticmethod
        def get_config_filenames():
            return []

        @classmethod
        def from_config(cls, config):
            check_version("config.json", config.get("format_version", 1))
            return cls()

        def maybe_update_config(self, model_name, hf_config=None, revision=None):
            self.formats = read_formats(_directory(model_name, revision))

        def apply_vllm_mapper(self, hf_to_vllm_mapper):
            self.formats = hf_to_vllm_mapper.apply_dict(self.formats)

        def get_quant_method(self, layer, prefix):
            if isinstance(layer, RoutedExperts):
                parts = experts_of(self.formats, prefix)
                return QtoolMoeMethod(layer.moe_config, prefix, parts) if parts else None
            if not isinstance(layer, LinearBase):
                if any(name.startswith(prefix + ".") for name in self.formats):
                    raise ContainerError("qtool.json", prefix, "the plugin has no method for "
                                         "quantized embeddings and heads")
                return None
            parts = parts_of(self.formats, prefix, self.packed_modules_mapping)
            return QtoolLinearMethod(prefix, parts) if parts else UnquantizedLinearMethod()

    class QtoolLinearMethod(Method, LinearMethodBase):
        pass

    class QtoolMoeMethod(MoeMethod, FusedMoEMethodBase):
        def __init__(self, config, prefix, parts):
            FusedMoEMethodBase.__init__(self, config)
            MoeMethod.__init__(self, prefix, parts)

        def get_fused_moe_quant_config(self, layer):
            return None

    return QtoolConfig


def _directory(model_name, revision):
    if os.path.isdir(model_name):
        return model_name
    from huggingface_hub import hf_hub_download

    return os.path.dirname(hf_hub_download(model_name, "qtool.json", revision=revision))


def parts_of(formats, prefix, packed):
    """Formats of the matrices of a layer: one, or those that the layer fuses. [] if it is not
    quantized."""
    if prefix + ".weight" in formats:
        return [formats[prefix + ".weight"]]
    parent, _, name = prefix.rpartition(".")
    found = [formats.get(f"{parent}.{part}.weight") for part in packed.get(name, [])]
    if any(found) and not all(found):
        raise ContainerError("qtool.json", prefix, "some matrices of this layer are quantized and "
                             "others are not: vLLM fuses them, so all or none must be")
    return [f for f in found if f]


def experts_of(formats, prefix):
    """Formats of the gates, ups and downs of all experts: three lists. [] if none is quantized."""
    found = {name: f for name, f in formats.items() if name.startswith(prefix + ".")}
    for names in NAMES:
        parts = []
        for part in names:
            each = []
            while f"{prefix}.{len(each)}.{part}.weight" in found:
                each.append(found[f"{prefix}.{len(each)}.{part}.weight"])
            parts.append(each)
        if len(found) == sum(map(len, parts)) and len({len(p) for p in parts}) == 1:
            return parts if found else []
    raise ContainerError("qtool.json", prefix, "some matrices of the experts are quantized and "
                         "others are not: vLLM fuses them, so all or none must be")


class Method:
    """The methods of a LinearMethodBase, without vLLM."""

    def __init__(self, prefix, parts):
        self.prefix, self.parts = prefix, parts

    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, input_size,
                       output_size, params_dtype, **extra):
        layer.qtool = _Loading(self, layer, input_size_per_partition, output_partition_sizes,
                               input_size)
        holder = layer.weight = nn.Module()
        holder.q = nn.Module()
        for name in {name: 0 for f in self.parts for name in schemes.sections(f)}:
            place = nn.Parameter(torch.empty(0), requires_grad=False)
            place.weight_loader = layer.qtool.loader(name)
            holder.q.register_parameter(name, place)

    def process_weights_after_loading(self, layer):
        if not hasattr(layer, "qtool"):
            return
        loading = layer.qtool
        del layer.qtool, layer.weight
        parts = slices.stacked(loading.finished())
        layer.qtool_formats = [list(f) for f, _ in parts]
        layer.qtool_w4ax = None
        count = 0
        for f, s in parts:
            tensors = list(s.values())
            if schemes.NAMES[f.scheme] == "w4ax":
                tensors, clip = ops.w4ax_operands(f, s)
                around = schemes.w4ax.around(f, s, layer.params_dtype)
                layer.qtool_w4ax = (layer.qtool_w4ax or []) + [(len(tensors), clip, around)]
            for t in tensors:
                layer.register_parameter(f"qtool_{count}", nn.Parameter(t, requires_grad=False))
                count += 1
        layer.qtool_count = count

    def apply(self, layer, x, bias=None):
        tensors = [getattr(layer, f"qtool_{i}") for i in range(layer.qtool_count)]
        if layer.qtool_w4ax is None:
            y = torch.ops.qtool.matmul(x, tensors, [i for f in layer.qtool_formats for i in f])
        else:
            y = self._w4ax(layer, x, tensors)
        return y if bias is None else y + bias

    def _w4ax(self, layer, x, tensors):
        out, at = [], 0
        for f, (count, clip, around) in zip(layer.qtool_formats, layer.qtool_w4ax):
            columns, rows, factors = around
            v = x if columns is None else x * columns
            y = torch.ops.qtool.w4ax_matmul(v, tensors[at : at + count], f, clip)
            y = y if rows is None else y[..., rows]
            out.append(y if factors is None else y * factors)
            at += count
        return torch.cat(out, -1)


def checked(prefix, f, sections):
    """The sections in the order of the scheme; ContainerError if they are not what it needs."""
    s = {name: sections[name] for name in schemes.sections(f)}
    for name, (dtype, shape) in schemes.sections(f).items():
        if s[name].dtype != dtype or list(s[name].shape) != shape:
            raise ContainerError("model.safetensors", f"{prefix}: {name}",
                                 f"{s[name].dtype} {list(s[name].shape)} where the manifest has "
                                 f"{dtype} {shape}")
    try:
        schemes.check(f, s)
    except ValueError as e:
        raise ContainerError("model.safetensors", prefix, e) from None
    return s


class _Loading:
    """The slices of a layer's matrices, as they come."""

    def __init__(self, method, layer, k, sizes, k_whole):
        self.prefix, self.formats = method.prefix, method.parts
        self.layer, self.k, self.sizes, self.k_whole = layer, k, sizes, k_whole
        self.whole = [{} for _ in method.parts]  # sections of each part
        self.done = [None] * len(method.parts)
        for f in method.parts:
            why = schemes.scheme_of(f).no_kernel(f)
            if why:
                raise ContainerError("qtool.json", self.prefix,
                                     f"no kernel takes {schemes.NAMES[f.scheme]} with {why}")

    def loader(self, name):
        def load(param, tensor, shard=None):
            part = {None: 0, "q": 0, "k": 1, "v": 2}.get(shard, shard)
            self.whole[part][name], self.device = tensor, param.device
            if len(self.whole[part]) == len(schemes.sections(self.formats[part])):
                self._slice(part)
                self.whole[part] = {}

        return load

    def _slice(self, part):
        """Checks a whole matrix and keeps this rank's share of it."""
        f = self.formats[part]
        s = checked(self.prefix, f, self.whole[part])
        try:
            self.done[part] = [self._share(f, s, *rows) for rows in self._rows(part)]
        except ValueError as e:
            raise ContainerError("model.safetensors", self.prefix, e) from None

    def _rows(self, part):
        """First row and number of rows of this rank; several if one matrix holds fused parts."""
        n, rank, each = self.formats[part].n, self.layer.tp_rank, len(self.formats) > 1
        if self.k != self.k_whole or n == (self.sizes[part] if each else sum(self.sizes)):
            return [(0, n)]  # divided along channels, or not at all
        replicas = [1] * len(self.sizes)
        if hasattr(self.layer, "num_kv_head_replicas"):
            replicas[1:] = [self.layer.num_kv_head_replicas] * (len(self.sizes) - 1)
        if each or len(self.sizes) == 1:
            return [(rank // replicas[part] * self.sizes[part], self.sizes[part])]
        out, at = [], 0
        for size, copies in zip(self.sizes, replicas):
            out.append((at + rank // copies * size, size))
            at += size * self.layer.tp_size // copies
        return out

    def _share(self, f, s, first, count):
        f, s = slices.rows(f, s, first, count)
        if self.k != self.k_whole:
            f, s = slices.columns(f, s, self.layer.tp_rank * self.k, self.k)
        return f, {name: t.to(self.device, copy=True) for name, t in s.items()}

    def finished(self):
        if not all(self.done):
            raise ContainerError("model.safetensors", self.prefix, "a section is missing")
        return [share for part in self.done for share in part]


SHARDS = {"w1": 0, "w3": 1, "w2": 2}  # gate, up, down in vLLM


class MoeMethod:
    """The methods of a FusedMoEMethodBase, without vLLM."""

    def __init__(self, prefix, parts):
        self.prefix, self.parts = prefix, parts

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition,
                       params_dtype, **extra):
        why = moe.unfused(self.parts)
        if why:
            raise ContainerError("qtool.json", self.prefix, f"no grouped kernel takes {why}")
        if self.parts[0][0].k != hidden_size:
            raise ContainerError("qtool.json", self.prefix, f"the model has hidden size "
                                 f"{hidden_size}, the container {self.parts[0][0].k}")
        name = getattr(layer, "activation", "silu")
        self.activation = getattr(name, "value", name)
        if self.activation not in moe.ACTIVATIONS \
                or getattr(layer, "apply_router_weight_on_input", False):
            raise ContainerError("qtool.json", self.prefix, f"no grouped kernel computes experts "
                                 f"with the activation {self.activation}, or with weighted inputs")
        layer.qtool = _LoadingExperts(self, layer, num_experts, intermediate_size_per_partition)
        for name, parts in (("w13_weight", self.parts[:2]), ("w2_weight", self.parts[2:])):
            holder = nn.Module()
            holder.q = nn.Module()
            for section in schemes.sections(parts[0][0]):
                place = nn.Parameter(torch.empty(0), requires_grad=False)
                place.weight_loader = layer.qtool.loader(section)
                holder.q.register_parameter(section, place)
            setattr(layer, name, holder)

    def process_weights_after_loading(self, layer):
        if not hasattr(layer, "qtool"):
            return
        try:
            experts = moe.stack(layer.qtool.finished())
        except ValueError as e:
            raise ContainerError("qtool.json", self.prefix, e) from None
        del layer.qtool, layer.w13_weight, layer.w2_weight
        layer.qtool_numbers = experts.numbers()
        tensors = experts.tensors()
        for i, t in enumerate(tensors):
            layer.register_parameter(f"qtool_{i}", nn.Parameter(t, requires_grad=False))
        layer.qtool_count = len(tensors)
        on_gpu = tensors[0].device.type == "cuda"
        layer.qtool_table = ops.moe_table(experts) if on_gpu else None

    def apply(self, layer, x, topk_weights, topk_ids, *extra, **more):
        if getattr(layer, "expert_map", None) is not None:  # -1: the expert of another rank
            topk_ids = layer.expert_map[topk_ids.long()]
        tensors = [getattr(layer, f"qtool_{i}") for i in range(layer.qtool_count)]
        return torch.ops.qtool.moe_matmul(x, topk_ids, topk_weights, layer.qtool_table, tensors,
                                          layer.qtool_numbers, self.activation, 0)


class _LoadingExperts:
    """The slices of the experts' matrices, as they come."""

    def __init__(self, method, layer, count, inner):
        self.prefix, self.parts, self.layer, self.inner = (method.prefix, method.parts, layer,
                                                           inner)
        self.whole = {}  # (part, expert): its sections so far
        self.done = [[None] * count for _ in method.parts]

    def loader(self, section):
        def load(param, tensor, name=None, shard_id=None, expert_id=0, return_success=False):
            part = SHARDS[shard_id]
            local = self._local(expert_id)
            if local < 0:
                return False if return_success else None
            sections = self.whole.setdefault((part, local), {})
            sections[section], device = tensor, param.device
            f = self.parts[part][expert_id]
            if len(sections) == len(schemes.sections(f)):
                del self.whole[part, local]
                self.done[part][local] = self._share(part, f, sections, device)
            return True if return_success else None

        return load

    def _local(self, expert):
        find = getattr(self.layer, "_map_global_expert_id_to_local_expert_id", None)
        return find(expert) if find else expert

    def _share(self, part, f, sections, device):
        """Checks a whole matrix and keeps this rank's share of it."""
        s = checked(self.prefix, f, sections)
        rank = getattr(self.layer, "tp_rank", None)
        if rank is None:
            rank = self.layer.moe_config.moe_parallel_config.tp_rank
        first = rank * self.inner if (f.k if part == 2 else f.n) > self.inner else 0
        try:
            f, s = (slices.columns if part == 2 else slices.rows)(f, s, first, self.inner)
        except ValueError as e:
            raise ContainerError("model.safetensors", self.prefix, e) from None
        return f, {name: t.to(device, copy=True) for name, t in s.items()}

    def finished(self):
        if not all(all(p) for p in self.done):
            raise ContainerError("model.safetensors", self.prefix, "a section is missing")
        return self.done
