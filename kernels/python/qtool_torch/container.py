"""Containers (docs/format.md): the manifest, and the tensors of the safetensors files."""
import json
import os
import zlib
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from . import schemes

FORMAT_VERSIONS = (1, 2)
DTYPES = {"U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "U32": torch.uint32,
          "F16": torch.float16, "F32": torch.float32}


class ContainerError(ValueError):
    """A file of a container violates docs/format.md, or is not supported."""

    def __init__(self, file, tensor, reason):
        super().__init__(": ".join(str(part) for part in (file, tensor, reason) if part))


class PackedTensor(NamedTuple):
    format: schemes.Format
    sections: dict  # name: tensor, in the order of operator arguments

    def decode(self):
        """The matrix, FP32 [n][k]."""
        return schemes.decode(self.format, self.sections)


class Container(NamedTuple):
    tensors: dict  # name in the source: PackedTensor
    copied: dict  # name: tensor


def check_version(path, version):
    if type(version) is not int or version not in FORMAT_VERSIONS:
        raise ContainerError(path, "", f"format version {version}: this package reads 1 and 2")


def _no_duplicates(pairs):
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("duplicate keys")
    return out


def _integer(value, low, high):
    return type(value) is int and low <= value <= high


def read_manifest(directory) -> dict:
    """qtool.json of a container, as far as its version is known."""
    path = os.path.join(directory, "qtool.json")
    try:
        with open(path, encoding="utf-8") as f:
            manifest = json.load(f, object_pairs_hook=_no_duplicates)
    except (OSError, ValueError, RecursionError) as e:
        raise ContainerError(path, "", getattr(e, "strerror", None) or e) from None
    if not isinstance(manifest, dict) or manifest.get("format") != "qtool":
        raise ContainerError(path, "", "not the manifest of a qtool container")
    version = manifest.get("format_version")
    check_version(path, version)
    for member in ("tensors", "copied"):
        if not isinstance(manifest.get(member), dict):
            raise ContainerError(path, "", f"'{member}' is no object")
    return manifest


def read_formats(directory) -> dict:
    """{name: Format} of the quantized tensors, from the manifest alone."""
    path = os.path.join(directory, "qtool.json")
    formats = {}
    manifest = read_manifest(directory)
    for name, entry in manifest["tensors"].items():
        try:
            formats[name] = _format(entry, manifest["format_version"])
        except KeyError as e:
            raise ContainerError(path, name, f"{e} is missing") from None
        except (TypeError, ValueError, AttributeError, IndexError) as e:
            raise ContainerError(path, name, e) from None
    return formats


def _format(entry, version):
    n, k = entry["shape"]
    exp2 = entry["scale_exp2"]
    if not all(_integer(x, 1, 1 << 32) for x in (n, k)) or not _integer(exp2, -1000, 1000):
        raise ValueError(f"shape {entry['shape']} or scale_exp2 {exp2} is out of range")
    stored = {}
    for s in entry["sections"]:
        if s["dtype"] not in DTYPES or not all(_integer(x, 0, 1 << 48) for x in s["shape"]):
            raise ValueError(f"section {s['name']}: {s['dtype']} {s['shape']}")
        stored[s["name"]] = (DTYPES[s["dtype"]], s["shape"])
    f = schemes.parse(entry["scheme"], n, k, exp2, stored)
    scheme = schemes.scheme_of(f)
    if hasattr(scheme, "version") and scheme.version(f) != version:
        raise ValueError(f"'{entry['scheme']}' in format version {version}")
    layout = scheme.stored_layout(f)
    if entry["layout"] != layout:
        raise ValueError(f"layout '{entry['layout']}' instead of '{layout}'")
    wanted = schemes.sections(f)
    if wanted != stored:
        raise ValueError(f"sections {stored} instead of {wanted}")
    return f


class _Files:
    """The safetensors files of a directory as one mapping."""

    def __init__(self, directory, device):
        index = os.path.join(directory, "model.safetensors.index.json")
        names = ["model.safetensors"]
        if os.path.exists(index):
            try:
                with open(index, encoding="utf-8") as f:
                    names = sorted(set(json.load(f)["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise ContainerError(index, "", f"not an index: {e}") from None
        self.at = {}
        for name in names:
            path = os.path.join(directory, os.path.basename(name))
            try:
                file = safe_open(path, "pt", device=str(device))
            except (OSError, SafetensorError) as e:
                raise ContainerError(path, "", e) from None
            for key in file.keys():
                self.at[key] = (path, file)

    def get(self, name, dtype, shape, crc32, verify):
        if name not in self.at:
            raise ContainerError("model.safetensors", name, "the tensor is missing")
        path, file = self.at[name]
        view = file.get_slice(name)
        if view.get_dtype() != dtype or view.get_shape() != shape:
            raise ContainerError(path, name, f"{view.get_dtype()} {view.get_shape()} where the "
                                             f"manifest has {dtype} {shape}")
        tensor = file.get_tensor(name)
        if verify and f"{_crc32(tensor):08x}" != crc32:
            raise ContainerError(path, name, "the data does not have the manifest's CRC-32")
        return tensor


def _crc32(tensor):
    if tensor.numel() == 0:
        return 0
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def load_container(directory, device="cpu", verify=True) -> Container:
    """Reads a container into memory of `device`. verify: compares CRC-32s. ContainerError."""
    formats = read_formats(directory)
    manifest = read_manifest(directory)
    path = os.path.join(directory, "qtool.json")
    files = _Files(directory, device)

    def get(name, entry):
        try:
            return files.get(name, entry["dtype"], entry["shape"], entry["crc32"], verify)
        except (KeyError, TypeError) as e:
            raise ContainerError(path, name, f"{e} is missing") from None

    tensors = {}
    for name, f in formats.items():
        entries = {s["name"]: s for s in manifest["tensors"][name]["sections"]}
        sections = {s: get(f"{name}.q.{s}", entries[s]) for s in schemes.sections(f)}
        try:
            schemes.check(f, sections)
        except ValueError as e:
            raise ContainerError(path, name, e) from None
        tensors[name] = PackedTensor(f, sections)
    return Container(tensors, {n: get(n, e) for n, e in manifest["copied"].items()})
