#!/usr/bin/env python3
"""Writes the hostile files of tests/bad: python3 tests/oracle/make_bad.py

Each is one step away from a file that is accepted; tests/cli/hostile.t says what qtool has to answer.
Files that fuzzing found are there as well, and not made here.
"""
import io
import json
import os
import pickle
import struct
import zipfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bad")


def write(target, name, data):
    path = os.path.join(ROOT, target, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode())


# ---- safetensors --------------------------------------------------------------------------------

def entry(dtype="U8", shape=(4,), begin=0, end=4, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def safetensors(header, data=b"\0" * 4, size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def make_safetensors():
    def put(name, *args, **more):
        write("safetensors", name + ".safetensors", safetensors(*args, **more))

    good = {"a": entry()}
    write("safetensors", "empty.safetensors", b"")
    write("safetensors", "nine_bytes.safetensors", b"\x02\0\0\0\0\0\0\0{")
    put("header_huge", good, size=2**63)
    put("header_100mb", good, size=100_000_001)
    put("header_beyond_file", good, size=1000)
    put("header_one_byte", good, size=1)
    put("header_array", b"[]")
    put("header_cut", b'{"a":')
    put("header_utf8", b'{"\xff":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}')
    put("header_nested", b'{"a":' + b"[" * 100 + b"]" * 100 + b"}")
    put("duplicate", b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
                     b'"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}')
    put("dtype_unknown", {"a": entry("F7")})
    put("dtype_number", {"a": entry(7)})
    put("dtype_half_byte", {"a": entry("F4", (3,), 0, 4)})
    put("shape_negative", {"a": entry(shape=(-4,))})
    put("shape_real", b'{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}')
    put("shape_product", {"a": entry(shape=(2**32, 2**32))})
    put("shape_product_bits", {"a": entry("F64", shape=(2**61,))})
    put("shape_wide", {"a": entry(shape=(1,) * 9, end=1)})
    put("shape_integer", b'{"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,4]}}')
    put("offsets_backwards", {"a": entry(begin=4, end=0)})
    put("offsets_beyond", {"a": entry(shape=(8,), end=8)})
    put("offsets_huge", {"a": entry(begin=2**62, end=2**62 + 4)})
    put("offsets_short", {"a": entry(shape=(2,))})
    put("offsets_three", b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}}')
    put("hole", {"a": entry(shape=(1,), end=1), "b": entry(shape=(2,), begin=2)})
    put("overlap", {"a": entry(shape=(3,), end=3), "b": entry(shape=(2,), begin=2)})
    put("trailing", good, b"\0" * 9)
    put("member_missing", b'{"a":{"dtype":"U8","shape":[4]}}')
    put("member_more", {"a": entry(more=1)})
    put("entry_string", {"a": "U8"})
    put("metadata_number", {"__metadata__": {"format": 1}, "a": entry()})
    put("name_empty", {"": entry()})
    put("name_control", {"a\x1b[2J": entry()})
    put("name_nul", b'{"a\\u0000b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}')
    put("name_long", {"n" * 513: entry()})


# ---- index --------------------------------------------------------------------------------------

def make_index():
    for name, tensors in {"one": "ab", "two": "c", "three": "d", "outside": "e"}.items():
        header = {t: entry(shape=(1,), begin=i, end=i + 1) for i, t in enumerate(tensors)}
        write("beside", name + ".safetensors", safetensors(header, tensors.encode()))

    def put(name, weight_map, **more):
        write("index", name + ".json", json.dumps({"weight_map": weight_map, **more}))

    put("parent", {"e": "../outside.safetensors"})
    put("absolute", {"e": "/etc/passwd"})
    put("folder", {"a": "x/one.safetensors"})
    put("dots", {"a": ".."})
    put("other_ending", {"a": "config.json"})
    put("missing_file", {"a": "four.safetensors"})
    put("missing_tensor", {"a": "one.safetensors", "b": "one.safetensors", "z": "two.safetensors"})
    put("wrong_file", {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    put("not_listed", {"a": "one.safetensors"})
    put("number", {"a": 1})
    put("empty", {})
    put("name_escape", {"a": "one\x1b.safetensors"})
    write("index", "array.json", "[]")
    write("index", "no_map.json", "{}")
    write("index", "duplicate.json",
          '{"weight_map":{"a":"one.safetensors","a":"../outside.safetensors"}}')


# ---- PyTorch ------------------------------------------------------------------------------------

class Call:
    """Pickles as a call of module.name(*args)."""

    def __init__(self, module, name, *args):
        self.function, self.args = (module, name), args


class Pickler(pickle._Pickler):
    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Call):
            self.write(b"c%s\n%s\n" % tuple(part.encode() for part in obj.function))
            pickle._Pickler.save(self, obj.args)
            self.write(b"R")
        elif isinstance(obj, Storage):
            self.save(("storage", Global("torch", obj.kind), obj.key, "cpu", obj.count))
            self.write(b"Q")
        elif isinstance(obj, Global):
            self.write(b"c%s\n%s\n" % (obj.module.encode(), obj.name.encode()))
        else:
            pickle._Pickler.save(self, obj)


class Global:
    def __init__(self, module, name):
        self.module, self.name = module, name


class Storage:
    def __init__(self, count=4, key="0", kind="FloatStorage"):
        self.kind, self.key, self.count = kind, key, count


def tensor(storage, shape=(4,), stride=(1,), offset=0):
    ordered = Call("collections", "OrderedDict")
    return Call("torch._utils", "_rebuild_tensor_v2", storage, offset, shape, stride, False, ordered)


def archive(obj, files=None, raw=None):
    text = io.BytesIO()
    if raw is None:
        Pickler(text, 2).dump(obj)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, data in {"m/data.pkl": raw if raw is not None else text.getvalue(),
                           "m/data/0": b"\0" * 16, **(files or {})}.items():
            z.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def make_torch():
    def put(name, *args, **more):
        write("torch", name + ".bin", archive(*args, **more))

    good = archive({"w": tensor(Storage())})
    put("system", {"w": Call("os", "system", "touch owned")})
    put("eval", {"w": Call("builtins", "eval", "1")})
    put("storage_missing", {"w": tensor(Storage(key="7"))})
    put("storage_outside", {"w": tensor(Storage(key="../data.pkl"))})
    put("storage_short", {"w": tensor(Storage(5), (5,))})
    put("view_beyond", {"w": tensor(Storage(), (4,), (2,))})
    put("view_offset", {"w": tensor(Storage(), offset=1)})
    put("view_overflow", {"w": tensor(Storage(), (2, 2), (2**62, 2**63 - 1))})
    put("view_expanded", {"w": tensor(Storage(), (2**40,), (0,))})
    put("shape_product", {"w": tensor(Storage(), (2**33, 2**33), (0, 0))})
    put("shape_negative", {"w": tensor(Storage(), (-4,))})
    put("name_metadata", {"__metadata__": tensor(Storage())})
    put("not_a_dict", [1, 2])
    put("empty_pickle", None, raw=b"")
    put("no_stop", None, raw=b"\x80\x02}")
    put("underflow", None, raw=b"\x80\x020.")
    put("memo", None, raw=b"\x80\x02h\x09.")
    put("protocol", None, raw=b"\x80\x09}.")
    put("opcode", None, raw=b"\x80\x02\xff.")
    put("string_beyond", None, raw=b"\x80\x02X\xff\xff\xff\x7fabc.")
    put("big_endian", {"w": tensor(Storage())}, {"m/byteorder": b"big"})
    write("torch", "not_zip.bin", b"\x80\x02}q\0.")
    write("torch", "cut.bin", good[:-30])
    write("torch", "no_pickle.bin", archive_without_pickle())
    flipped = bytearray(good)
    flipped[flipped.index(b"OrderedDict")] ^= 1
    write("torch", "crc.bin", bytes(flipped))
    write("torch", "encrypted.bin", patch_central(good, 8, struct.pack("<H", 1)))
    write("torch", "method.bin", patch_central(good, 10, struct.pack("<H", 14)))
    write("torch", "bomb.bin", patch_central(patch_central(good, 10, struct.pack("<H", 8)), 24,
                                             struct.pack("<I", 2**31)))
    write("torch", "deflated_damaged.bin", deflated_damaged())
    write("torch", "overlap.bin", overlapping(good))


def archive_without_pickle():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr(zipfile.ZipInfo("m/data/0"), b"\0" * 16)
    return out.getvalue()


def deflated_damaged():
    """16 KB that claim to inflate to 16 MB, and do not: found by fuzz_torch. Giving up on them gave as
    many bytes back to the kernel, most of them beyond the mapped file."""
    out, body = io.BytesIO(), b"\xff" * 16000
    with zipfile.ZipFile(out, "w") as z:
        z.writestr(zipfile.ZipInfo("m/data.pkl"), body)
    data = out.getvalue()
    for field, value in (10, struct.pack("<H", 8)), (24, struct.pack("<I", 1000 * len(body))):
        data = patch_central(data, field, value)
    return data


def patch_central(data, offset, value):
    out, at = bytearray(data), data.index(b"PK\1\2")
    out[at + offset:at + offset + len(value)] = value
    return bytes(out)


def overlapping(data):
    """The second entry's local header is the first's."""
    out, first = bytearray(data), data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", first + 4)
    out[second + 42:second + 46] = struct.pack("<I", 0)
    return bytes(out)


# ---- npy ----------------------------------------------------------------------------------------

def make_npy():
    def put(name, literal, data=b"\0" * 8, version=1, size=None):
        text = literal.encode() + b"\n"
        head = b"\x93NUMPY" + bytes([version, 0])
        head += struct.pack("<H" if version == 1 else "<I", len(text) if size is None else size)
        write("npy", name + ".npy", head + text + data)

    good = "{'descr':'<u4','fortran_order':False,'shape':(2,)}"
    write("npy", "magic.npy", b"\x93NUMPX\1\0")
    put("version", good, version=9)
    put("header_beyond", good, size=60000)
    put("header_huge", good, version=2, size=2**31)
    put("short", good, b"\0" * 7)
    put("long", good, b"\0" * 9)
    put("fortran", "{'descr':'<u4','fortran_order':True,'shape':(1,2)}")
    put("object", "{'descr':'|O','fortran_order':False,'shape':(1,)}")
    put("big_endian", good.replace("<u4", ">u4"))
    put("records", "{'descr':[('a','<u4')],'fortran_order':False,'shape':(2,)}")
    put("shape_product", good.replace("(2,)", "(4294967296,4294967296)"))
    put("shape_digits", good.replace("(2,)", "(99999999999999999999,)"))
    put("shape_negative", good.replace("(2,)", "(-2,)"))
    put("code", "{'descr':'<u4','fortran_order':False,'shape':(__import__('os'),)}")
    put("two_dimensions", good.replace("(2,)", "(1,2)"))
    put("floats", good.replace("<u4", "<f4"))
    put("id_too_large", good, struct.pack("<II", 1, 2**31))
    put("id_negative", good.replace("<u4", "<i4"), struct.pack("<ii", 1, -1))


# ---- JSON beside a model ------------------------------------------------------------------------

NANO = os.path.join(ROOT, "..", "..", "examples", "nano-llama")


def make_config():
    with open(os.path.join(NANO, "config.json")) as f:
        good = json.load(f)

    def put(name, **changes):
        text = json.dumps({**good, **changes}, indent=1)
        write("config", name + ".json", text)

    write("config", "array.json", "[]")
    write("config", "cut.json", '{"model_type": "llama",')
    put("model_type", model_type="../llama")
    put("layers_none", num_hidden_layers=0)
    put("layers_many", num_hidden_layers=10**6)
    put("layers_more", num_hidden_layers=good["num_hidden_layers"] + 1)
    put("layers_fewer", num_hidden_layers=good["num_hidden_layers"] - 1)
    put("heads", num_attention_heads=0)
    put("heads_uneven", num_key_value_heads=5)
    put("hidden", hidden_size=2**62)
    put("hidden_negative", hidden_size=-1)
    put("hidden_text", hidden_size="256")
    put("eps", rms_norm_eps=0)
    put("positions", max_position_embeddings=2**40)
    put("rope", rope_scaling={"rope_type": "dynamic", "factor": 4})
    put("activation", hidden_act="swish7")


def make_tokenizer():
    vocab = {"a": 0, "b": 1, "ab": 2}

    def put(name, model=None, **changes):
        t = {"added_tokens": [], "normalizer": None,
             "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
             "post_processor": None,
             "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"], **(model or {})}}
        t.update(changes)
        write("tokenizer", name + ".json", "{}\n" + json.dumps(t))

    put("merge_unknown", {"merges": ["a z"]})
    put("merge_three", {"merges": ["a b c"]})
    put("merge_number", {"merges": [1]})
    put("id_negative", {"vocab": {"a": -1}, "merges": []})
    put("id_huge", {"vocab": {"a": 2**40}, "merges": []})
    put("id_twice", {"vocab": {"a": 0, "b": 0}, "merges": []})
    put("unigram", {"type": "Unigram"})
    put("regex", pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a"},
                                "behavior": "Isolated", "invert": False})
    put("normalizer", normalizer={"type": "Nmt"})
    put("added_without_id", added_tokens=[{"content": "<s>"}])


def main():
    make_safetensors()
    make_index()
    make_torch()
    make_npy()
    make_config()
    make_tokenizer()


main()
