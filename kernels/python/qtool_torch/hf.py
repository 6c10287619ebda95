"""transformers: quant_method "qtool". Importing registers it."""
import os

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import library
from .container import ContainerError, check_version, read_formats
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
        for name, f in read_formats(directory).items():
            path = name.removesuffix(".weight")
            found = [p for p in (path, prefix + path, path.removeprefix(prefix)) if p in modules]
            module = modules[found[0]] if found else None
            if not isinstance(module, (nn.Linear, Conv1D)):
                raise ContainerError(directory, name, "the model has no linear layer of this name: "
                                     "qtool_torch cannot load stacked experts and embeddings")
            parent, _, child = found[0].rpartition(".")
            setattr(modules[parent], child, QtoolLinear(f, module.bias is not None, dtype, "meta"))

    def _process_model_after_weight_loading(self, model, **kwargs):
        for name, module in model.named_modules():
            if isinstance(module, QtoolLinear):
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


def _directory(model, checkpoint_files):
    """Where qtool.json is: beside the weights, or on the hub."""
    for file in checkpoint_files or []:
        directory = os.path.dirname(file)
        if os.path.exists(os.path.join(directory, "qtool.json")):
            return directory
    return os.path.dirname(cached_file(model.name_or_path, "qtool.json"))
