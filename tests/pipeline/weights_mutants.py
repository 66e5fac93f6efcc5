"""Mutants of parameter files, and what such a file says when it is read in the plainest way."""

from __future__ import annotations

import json
import math
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.pipeline.damage import spoil, spoil_bytes, spoil_zip

SUFFIXES = {"safetensors": ".safetensors", "torch.save": ".pt", "torch.export": ".pt2"}


def mutated(format: str, data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Change a parameter file: its bytes, its header or index, one of its entries; says how."""
    if draw.random() < 0.3:
        return spoil_bytes(data, draw)
    if format == "safetensors":
        return _safetensors(data, draw)
    return spoil_zip(data, draw, ("_config.json",) if format == "torch.export" else ("data.pkl",))


_LENGTHS = (0, 1, 7, 8, 100, 2**31, 2**40, 2**63, 2**64 - 1)
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X")


def _safetensors(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    header, contents = data[8 : 8 + length], data[8 + length :]
    kind = draw.choice(("length", "contents", "dtype", "offsets", *("header",) * 4))
    if kind == "length":
        other = draw.choice((*_LENGTHS, length - 1, length + 1, len(data)))
        return f"length {other}", struct.pack("<Q", other) + data[8:]
    if kind == "contents":
        what, contents = spoil_bytes(contents, draw)
        return f"contents {what}", data[:8] + header + contents
    tree = json.loads(header)
    names = [name for name in tree if name != "__metadata__"]
    one, other = draw.choice(names), draw.choice(names)
    if kind == "dtype":
        tree[one]["dtype"] = draw.choice(_DTYPES)
    elif kind == "offsets":
        tree[one]["data_offsets"] = tree[other]["data_offsets"]
    else:
        kind = spoil(tree, draw)
    written = json.dumps(tree).encode()
    return kind, struct.pack("<Q", len(written)) + written + contents


# --- read plainly ----------------------------------------------------------------------------


def read_plainly(path: Path, format: str) -> dict[str, Tensor]:
    """The tensors of a parameter file."""
    if format == "safetensors":
        found: dict[str, Tensor] = load_file(path)
        return found
    if format == "torch.save":
        loaded: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return loaded
    tensors = {}
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entries = {item.filename.partition("/data/")[2]: item for item in archive.infolist()}
        for part in ("weights", "constants"):
            config = entries.get(f"{part}/model_{part}_config.json")
            text = _stored(data, config) if config else b'{"config": {}}'
            for name, entry in json.loads(text.decode(errors="replace"), strict=False)[
                "config"
            ].items():
                content = _stored(data, entries[f"{part}/{entry['path_name']}"])
                tensors[name] = _tensor(content, entry["tensor_meta"])
    return tensors


def _stored(data: bytes, entry: zipfile.ZipInfo) -> bytes:
    """An entry's bytes as they lie, whatever its checksum is."""
    name, extra = struct.unpack_from("<HH", data, entry.header_offset + 26)
    begin = entry.header_offset + 30 + name + extra
    return data[begin : begin + entry.compress_size]


_NUMBERS = {1: "uint8", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 13: "bfloat16"}


def _tensor(content: bytes, meta: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, _NUMBERS[meta["dtype"]])
    shape, strides = ([item["as_int"] for item in meta[key]] for key in ("sizes", "strides"))
    offset = meta["storage_offset"]["as_int"]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    count = len(content) // dtype.itemsize
    if not count:
        raise ValueError("no bytes")
    storage = torch.frombuffer(bytearray(content), dtype=dtype, count=count)
    return storage.as_strided(shape, strides, offset)
