"""libqtool_kernels by ctypes: the structs of kernels/include/*.h and where the library is found."""
import ctypes
import functools
import os
import subprocess
from ctypes import POINTER, Structure, Union, byref, c_float, c_int, c_size_t, c_uint, c_void_p

import torch

VERSION = 200  # QTOOL_KERNELS_VERSION: structs of other versions may differ
OK, ZEROED = 0, 2 << 20
DTYPES = {torch.float16: 0, torch.bfloat16: 1}


class LibraryError(RuntimeError):
    """libqtool_kernels or a GPU that it can use is missing, or it refuses a request."""


def _opaque(size):
    return type("Opaque", (Union,), {"_fields_": [
        ("bytes", ctypes.c_ubyte * size), ("integer", ctypes.c_longlong),
        ("real", ctypes.c_double), ("pointer", c_void_p)]})


class Mix24(Structure):
    _fields_ = [("twos", c_size_t), ("fours", c_size_t), ("stream", c_void_p), ("perm", c_void_p),
                ("csr_ptr", c_void_p), ("csr_col", c_void_p), ("csr_val", c_void_p),
                ("csr_rows", c_size_t), ("outliers", c_size_t)]


class Weight(Structure):
    _fields_ = [("kind", c_int), ("bits", c_uint), ("exp_bits", c_uint), ("n", c_size_t),
                ("k", c_size_t), ("group", c_size_t), ("scale_exp2", c_int),
                ("plane", c_void_p * 3), ("scale", c_void_p), ("table", c_void_p),
                ("zero", c_void_p), ("pitch_blocks", c_size_t), ("pitch_groups", c_size_t),
                ("mix24", Mix24)]


class Options(Structure):
    _fields_ = [("dtype", c_int), ("device", c_int), ("dependent_launch", c_int),
                ("batch_invariant", c_int), ("dense", c_void_p), ("dense_context", c_void_p),
                ("compute", c_int), ("gated", c_int)]


class Plan(Structure):
    _fields_ = [("m", c_size_t), ("n", c_size_t), ("k", c_size_t), ("kind", c_int),
                ("options", Options), ("config", c_int * 9), ("workspace_bytes", c_size_t),
                ("rounded", c_int), ("rounded_exp2", c_int), ("reason", ctypes.c_char * 160),
                ("internal", _opaque(160))]


class W4axActs(Structure):
    _fields_ = [("codes", c_void_p), ("scale", c_void_p), ("sum", c_void_p)]


class W4axInput(Structure):
    _fields_ = [("scales", c_int), ("k", c_size_t), ("blocks", c_void_p), ("perm", c_void_p),
                ("clip4", c_float), ("clip8", c_float), ("packed", c_int),
                ("rotation", c_int), ("dependent_launch", c_int)]


class W4axWeight(Structure):
    _fields_ = [("scales", c_int), ("n", c_size_t), ("k", c_size_t), ("plane", c_void_p),
                ("scale", c_void_p), ("row_scale", c_void_p), ("scale_exp2", c_int),
                ("blocks", c_void_p), ("pitch_blocks", c_size_t)]


class W4axOptions(Structure):
    _fields_ = [("output", c_int), ("device", c_int), ("packed", c_int),
                ("dependent_launch", c_int), ("kernel", c_int)]


class W4axPlan(Structure):
    _fields_ = [("m", c_size_t), ("n", c_size_t), ("k", c_size_t), ("scales", c_int),
                ("options", W4axOptions), ("config", c_int * 7), ("workspace_bytes", c_size_t),
                ("reason", ctypes.c_char * 160), ("internal", _opaque(640))]


class KvCache(Structure):
    _fields_ = [("format", c_int), ("heads", c_size_t), ("head_dim", c_size_t),
                ("page_tokens", c_size_t), ("table", c_void_p), ("table_pitch", c_size_t),
                ("k", c_void_p), ("v", c_void_p), ("k_param", c_void_p), ("v_param", c_void_p),
                ("k_first", c_void_p), ("k_tail", c_void_p)]


class KvOptions(Structure):
    _fields_ = [("batch", c_size_t), ("heads", c_size_t), ("max_length", c_size_t),
                ("scale", c_float), ("dtype", c_int), ("device", c_int),
                ("dependent_launch", c_int)]


class KvPlan(Structure):
    _fields_ = [("options", KvOptions), ("split_tokens", c_size_t), ("splits", c_size_t),
                ("workspace_bytes", c_size_t), ("reason", ctypes.c_char * 160),
                ("internal", _opaque(64))]


class MoeLayer(Structure):
    _fields_ = [("experts", c_size_t), ("gate", POINTER(Weight)), ("up", POINTER(Weight)),
                ("down", POINTER(Weight)), ("bias", POINTER(c_void_p) * 3), ("w4ax", c_void_p)]


class MoeOptions(Structure):
    _fields_ = [("dtype", c_int), ("device", c_int), ("activation", c_int), ("topk", c_size_t),
                ("first_expert", c_size_t), ("same_tables", c_int), ("dependent_launch", c_int)]


class MoePlan(Structure):
    _fields_ = [("tokens", c_size_t), ("experts", c_size_t), ("hidden", c_size_t),
                ("intermediate", c_size_t), ("options", MoeOptions),
                ("workspace_bytes", c_size_t), ("reason", ctypes.c_char * 160),
                ("internal", _opaque(768))]


MOE_TABLE_EXPERT = 192  # QTOOL_MOE_TABLE_EXPERT

PROTOTYPES = {
    "qtool_w4ax_blocks": [c_void_p, c_void_p, c_size_t, c_int],
    "qtool_kernels_compute": [c_int],
    "qtool_matmul_plan": [POINTER(Plan), POINTER(Weight), c_size_t, POINTER(Options)],
    "qtool_matmul_run": [POINTER(Plan), POINTER(Weight), c_void_p, c_void_p, c_void_p, c_void_p],
    "qtool_w4ax_quantize": [POINTER(W4axActs), POINTER(W4axInput), c_void_p, c_void_p, c_size_t,
                            c_int, c_void_p],
    "qtool_w4ax_plan": [POINTER(W4axPlan), POINTER(W4axWeight), c_size_t, POINTER(W4axOptions)],
    "qtool_w4ax_run": [POINTER(W4axPlan), POINTER(W4axWeight), POINTER(W4axActs), c_void_p,
                       c_void_p, c_void_p],
    "qtool_moe_table": [c_void_p, POINTER(MoeLayer), ctypes.c_char * 160],
    "qtool_moe_plan": [POINTER(MoePlan), POINTER(MoeLayer), c_size_t, POINTER(MoeOptions)],
    "qtool_moe_run": [POINTER(MoePlan), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
                      c_void_p],
    "qtool_kv_append": [POINTER(KvCache), c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_int,
                        c_int, c_void_p],
    "qtool_kv_attention_plan": [POINTER(KvPlan), POINTER(KvCache), POINTER(KvOptions), c_size_t],
    "qtool_kv_attention_run": [POINTER(KvPlan), POINTER(KvCache), c_void_p, c_void_p, c_void_p,
                               c_void_p, c_void_p],
}


def _candidates():
    """Paths in the order in which they are tried."""
    name = "libqtool_kernels.so"
    if os.environ.get("QTOOL_KERNELS"):
        return [os.environ["QTOOL_KERNELS"]]
    paths = []
    try:
        found = subprocess.run(["pkg-config", "--variable=libdir", "qtool-kernels"],
                               capture_output=True, text=True, check=True)
        paths.append(os.path.join(found.stdout.strip(), name))
    except (OSError, subprocess.CalledProcessError):
        pass
    checkout = os.path.join(os.path.dirname(__file__), "..", "..", "..", "build", name)
    return [p for p in [*paths, os.path.normpath(checkout)] if os.path.exists(p)] + [name]


@functools.cache
def load():
    """The library. LibraryError: not found, or of another version."""
    errors = []
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
            version = library.qtool_kernels_version()
        except (OSError, AttributeError) as e:
            errors.append(str(e))
            continue
        if version != VERSION:
            raise LibraryError(f"{path} has version {version}, qtool_torch needs {VERSION}: "
                               "install the library and the package from the same source tree")
        for function, arguments in PROTOTYPES.items():
            getattr(library, function).argtypes = arguments
        library.qtool_w4ax_blocks.restype = c_size_t
        return library
    raise LibraryError("libqtool_kernels.so is not found: install it (make install, which needs "
                       "nvcc) or set QTOOL_KERNELS to its path (" + "; ".join(errors) + ")")


@functools.cache
def require(device: int):
    """The library, if it can use CUDA device number `device`. LibraryError."""
    if not torch.version.cuda:
        raise LibraryError("this PyTorch has no CUDA: install a build with CUDA, or run on the CPU")
    if not torch.cuda.is_available():
        raise LibraryError("PyTorch finds no usable NVIDIA GPU")
    library = load()
    with torch.cuda.device(device):
        if library.qtool_kernels_compute(device) == 0:
            name = torch.cuda.get_device_name(device)
            major, minor = torch.cuda.get_device_capability(device)
            raise LibraryError(f"GPU {device} ({name}, compute capability {major}.{minor}) cannot "
                               "run the kernels: they need 8.0 or higher")
    return library


def planned(function, plan, *arguments):
    """Calls a planning function; LibraryError with its reason if it refuses."""
    if function(byref(plan), *arguments) != OK:
        raise LibraryError(plan.reason.decode(errors="replace"))
    return plan


def ran(status, what):
    if status != OK:
        raise LibraryError(f"{what} failed with status {status}")
