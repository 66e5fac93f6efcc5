"""Tensors of a ``torch.export`` archive (``.pt2``), read in place and written.

torch has no way to read one tensor of an archive without building the whole program, so this
module knows the layout: a zip file, not compressed, with ``data/weights/model_weights_config.json``
and ``data/constants/model_constants_config.json``, which say for each tensor which entry holds its
bytes, and its shape, strides and dtype (a number of `DTYPES`). It is the one place that does.
Entries that torch pickled are refused, never read.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from shardwright.errors import WeightError
from shardwright.ir.tensor_meta import torch_dtype

DTYPES = {
    1: "u8",
    2: "i8",
    3: "i16",
    4: "i32",
    5: "i64",
    6: "f16",
    7: "f32",
    8: "f64",
    10: "c64",
    11: "c128",
    12: "bool",
    13: "bf16",
    28: "u16",
    29: "f8",
    34: "u32",
    35: "u64",
}
"""torch.export's numbers of dtypes."""
STRIDED = 7
"""torch.export's number of the layout that has strides."""

CONFIGS = ("weights/model_weights_config.json", "constants/model_constants_config.json")


class _Int(msgspec.Struct):
    as_int: int


class _Meta(msgspec.Struct):
    dtype: int
    sizes: list[_Int]
    strides: list[_Int]
    storage_offset: _Int
    layout: int


class _Payload(msgspec.Struct):
    path_name: str
    use_pickle: bool
    tensor_meta: _Meta | None


class _Config(msgspec.Struct):
    config: dict[str, _Payload]


class ArchivedTensor(NamedTuple):
    """A tensor of a file: its shape, its dtype by short name, and what reads a part of it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice, ...]], torch.Tensor]


def check_stored(path: Path) -> None:
    """Raise WeightError where what a zip file unpacks to is larger than the file.

    torch packs nothing. What is packed can be a thousand times as large, and would be unpacked
    into memory.
    """
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > path.stat().st_size:
        raise WeightError(
            f"{path} unpacks to {unpacked} bytes, more than the {path.stat().st_size} that it has; "
            "it was compressed, or changed, after torch wrote it: save it again"
        )


def read_archive(path: Path) -> tuple[dict[str, ArchivedTensor], dict[str, str]]:
    """The tensors of an archive by name, none read yet; and why others cannot be read.

    Raises WeightError where it is another kind of zip file, zipfile.BadZipFile where it is none.
    """
    found: dict[str, ArchivedTensor] = {}
    refused: dict[str, str] = {}
    check_stored(path)
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        entries = {name.partition("/data/")[2]: name for name in archive.namelist()}
        if CONFIGS[0] not in entries:
            raise WeightError(
                f"{path} is no archive of torch.export.save: it has no {CONFIGS[0]}; save it "
                "again with torch 2.13"
            )
        for config in CONFIGS:
            if config not in entries:
                continue
            folder = config.partition("/")[0]
            listed = msgspec.json.decode(archive.read(entries[config]), type=_Config)
            for name, payload in listed.config.items():
                place = f"{folder}/{payload.path_name}"
                if place not in entries:
                    raise WeightError(f"{path} is damaged: it has no {place}, where {name!r} lies")
                entry = archive.getinfo(entries[place])
                if reason := _refusal(payload, entry):
                    refused[name] = reason
                else:
                    archive.open(entry).close()  # its own header must be one, and of this entry
                    found[name] = _locate(path, file, payload, entry)
    return found, refused


def _refusal(payload: _Payload, entry: zipfile.ZipInfo) -> str:
    """Why the tensor cannot be read; empty where it can."""
    meta = payload.tensor_meta
    if payload.use_pickle or meta is None:
        return "it is pickled, and nothing is unpickled here; save it as a plain tensor"
    if meta.layout != STRIDED:
        return "it is no strided tensor"
    if meta.dtype not in DTYPES:
        return f"torch.export's dtype number {meta.dtype} is none that is known"
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        return "the archive was compressed after torch wrote it"
    return ""


def _locate(
    path: Path, file: BinaryIO, payload: _Payload, entry: zipfile.ZipInfo
) -> ArchivedTensor:
    """The tensor whose storage an entry holds; a write to what is read stays in memory.

    Reading raises RuntimeError or ValueError where the file is shorter than it says.
    """
    meta = payload.tensor_meta
    assert meta is not None
    file.seek(entry.header_offset)
    name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    shape = tuple(size.as_int for size in meta.sizes)
    strides = tuple(stride.as_int for stride in meta.strides)
    dtype = torch_dtype(DTYPES[meta.dtype])

    def read(ranges: tuple[slice, ...]) -> torch.Tensor:
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)[ranges]
        data = np.memmap(path, dtype=np.uint8, mode="c", offset=start, shape=entry.file_size)
        storage = torch.from_numpy(data).view(dtype)
        return torch.as_strided(storage, shape, strides, meta.storage_offset.as_int)[ranges]

    return ArchivedTensor(shape, DTYPES[meta.dtype], read)


_LOCAL_HEADER = struct.Struct("<26xHH")
"""The fixed part of a zip entry's header; it ends with the lengths of name and extra field."""


# --- writing -------------------------------------------------------------------------------


class _Holder(nn.Module):
    """A program that does nothing; it is there for its state dict."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0


def write_archive(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as the state dict of an exported program.

    Raises ValueError where the names cannot be those of a state dict, or where this release of
    torch has no number for a dtype (2.9 for u32 and u64).
    """
    holder = _Holder()
    for name, tensor in tensors.items():
        *modules, last = name.split(".")
        owner: nn.Module = holder
        for part in modules:
            owner = owner._modules.setdefault(part, nn.Module()) or owner
        owner._buffers[last] = tensor
    program = torch.export.export(holder, (torch.zeros(1),))
    if lost := tensors.keys() - program.state_dict.keys():
        raise ValueError(f"{min(lost)!r} cannot be the name of a tensor in a state dict")
    with path.open("wb") as file:
        try:
            torch.export.save(program, file)
        except KeyError as error:
            raise ValueError(
                f"torch {torch.__version__} writes no tensors of {error} to archives; write "
                "safetensors, or use a newer torch"
            ) from None
