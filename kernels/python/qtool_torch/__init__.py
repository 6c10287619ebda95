"""qtool containers in PyTorch (docs/python.md). Importing registers the operators qtool::* and, if
transformers is installed, its quant_method "qtool"."""
from importlib.util import find_spec

from . import kv4, ops, schemes
from .container import Container, ContainerError, PackedTensor, load_container
from .experts import QtoolExperts
from .library import LibraryError
from .linear import QtoolLinear

if find_spec("transformers"):
    from . import hf
