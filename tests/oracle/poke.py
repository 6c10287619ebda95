"""Overwrites one element of a section of a container, and the manifest's checksum of that section.
  poke.py CONTAINER TENSOR SECTION INDEX VALUE      INDEX may be negative
"""
import json
import pathlib
import struct
import sys
import zlib

SIZES = {"U8": "B", "U16": "H", "F16": "H", "BF16": "H", "U32": "I", "F32": "I"}


def vouch(manifest, tensor, section, crc):
    doc = json.loads(manifest.read_text())
    for entry in doc["tensors"][tensor]["sections"]:
        if entry["name"] == section:
            entry["crc32"] = f"{crc:08x}"
    manifest.write_text(json.dumps(doc))


def main():
    container, tensor, section, index, value = sys.argv[1:]
    name = f"{tensor}.q.{section}"
    for path in pathlib.Path(container).glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        length = struct.unpack_from("<Q", data)[0]
        entry = json.loads(data[8 : 8 + length]).get(name)
        if entry is None:
            continue
        code = "<" + SIZES[entry["dtype"]]
        size = struct.calcsize(code)
        first, end = entry["data_offsets"]
        at = (first if int(index) >= 0 else end) + int(index) * size
        struct.pack_into(code, data, 8 + length + at, int(value, 0))
        path.write_bytes(data)
        vouch(pathlib.Path(container) / "qtool.json", tensor, section,
              zlib.crc32(data[8 + length + first : 8 + length + end]))
        return
    sys.exit(f"no {name} in {container}")


main()
