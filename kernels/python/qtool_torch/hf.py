"""transformers: quant_method "qtool". Importing registers it."""
import os
import re

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import library
from .container import ContainerError, check_version, read_formats, read_manifest
from .experts import QtoolExperts
from .linear import QtoolLinear


@register_quantization_config("qtool")
class QtoolConfig(QuantizationConfigMixin):
    """quantization_config of a container's config.json; what is quantized is in qtool.json."""

    def __init__(self, format_version=1, **kwargs):
        self.quant_method = "qtool"
        self.format_version = format_version
        check_version("config.json", format_version)


@register_quantizer("qtool")
class QtoolQuantizer(HfQuantizer):
    requires_calibration = True  # it loads containers and makes none

    def validate_environment(self, *args, device_map=None, **kwargs):
        """Fails before the weights are read if the kernels cannot run."""
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        for place in places:
            if isinstance(place, int) or str(place).startswith("cuda"):
                device = torch.device("cuda", place) if isinstance(place, int) \
                    else torch.device(place)
                library.require(device.index or 0)

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        directory = _directory(model, checkpoint_files)
        modules = dict(model.named_modules())
        prefix = model.base_model_prefix + "."
        dtype = kwargs.get("dtype") or model.dtype
        renamings = [c for c in get_model_conversion_mapping(model)
                     if isinstance(c, WeightRenaming)]
        experts = {}  # path of the module: {(expert, matrix): Format}

        def find(path):
            """The module of this name, possibly without or with the model's prefix."""
            paths = (path, prefix + path, path.removeprefix(prefix))
            found = next((p for p in paths if p in modules), None)
            return found, modules.get(found)

        for name, f in read_formats(directory).items():
            renamed, _ = rename_source_key(name, renamings, [])
            path, module = find(renamed.removesuffix(".weight"))
            if isinstance(module, (nn.Linear, Conv1D)):
                _replace(modules, path, QtoolLinear(f, module.bias is not None, dtype, "meta"))
                continue
            one = re.fullmatch(r"(.+)\.(\d+)\.(\w+)\.weight", renamed)
            path, module = find(one[1]) if one else (None, None)
            if module is None or not hasattr(module, "down_proj"):
                raise ContainerError(directory, name, "the model has no linear layer of this name: "
                                     "qtool_torch cannot load embeddings")
            experts.setdefault(path, {})[int(one[2]), one[3]] = f
        biased = next((n for n in read_manifest(directory)["copied"]
                       if re.search(r"\.experts\.\d+\.\w+\.bias$", n)), None)
        if biased:
            raise ContainerError(directory, biased, "experts with biases are not supported")
        for path, formats in experts.items():
            try:
                _replace(modules, path, QtoolExperts(modules[path], formats, dtype, "meta"))
            except ValueError as e:
                raise ContainerError(directory, path, e) from None

        self._dtypes = {name: p.dtype for name, p in model.named_parameters()}

    def update_weight_conversions(self, weight_conversions, *args, **kwargs):
        """Keeps the names of experts' sections, which begin like the names of their weights."""
        for converter in weight_conversions:
            if isinstance(converter, WeightConverter):
                converter.compiled_sources = re.compile(
                    f"(?:{converter.compiled_sources.pattern})(?!\\.q\\.)")
        return super().update_weight_conversions(weight_conversions, *args, **kwargs)

    def _process_model_after_weight_loading(self, model, **kwargs):
        for name, p in model.named_parameters():
            # transformers 5.17 keeps the dtype of tensors that it has renamed
            p.data = p.data.to(self._dtypes.get(name, p.dtype))
        for name, module in model.named_modules():
            if isinstance(module, (QtoolLinear, QtoolExperts)):
                try:
                    module.check()
                except ValueError as e:
                    raise ContainerError(model.name_or_path, name, e) from None
                if model.device.type == "cuda" or not torch.cuda.is_available():
                    module.finish()  # else it may move to a GPU yet
        return model

    def is_serializable(self, *args, **kwargs):
        return False

    @property
    def is_trainable(self):
        return False

    @property
    def is_compileable(self):
        return True


def _replace(modules, path, module):
    parent, _, child = path.rpartition(".")
    setattr(modules[parent], child, module)


def _directory(model, checkpoint_files):
    """Where qtool.json is: beside the weights, or on the hub."""
    for file in checkpoint_files or []:
        directory = os.path.dirname(file)
        if os.path.exists(os.path.join(directory, "qtool.json")):
            return directory
    return os.path.dirname(cached_file(model.name_or_path, "qtool.json"))
