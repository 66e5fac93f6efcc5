"""Pieces of tensors in the format of `torch.distributed.checkpoint`.

Input: a directory and pieces, each a part of a named whole. Output: a directory that any torch
program reads with ``dcp.load``, whatever its own slicing, and pieces read from one.

Invariant: no rank talks to another. Which rank writes what is known beforehand, so torch's
planners are not needed: each writer gives a list of where its pieces lie (`WrittenPiece`), and
whoever holds all lists writes the index. Tensors are read without pickles of code; the index, which
is a pickle, is read by an unpickler that knows only the index's own types.

All that is relied on of torch stands here, and `tests/training/test_dcp.py` says what that is:
`FileSystemWriter.write_data` and ``finish``, `FileSystemReader.read_data`, the resharding of
`create_read_items_for_chunk_list`, and the three fields of ``_StorageInfo``.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from shardwright.errors import WeightError, WriteError
from shardwright.ir.tensor_meta import dtype_name, torch_dtype
from shardwright.pipeline.check_tensors import are_parts
from shardwright.pipeline.schema import Placements
from shardwright.torch_internals import storage_info

INDEX = ".metadata"
"""The index's file name, which torch fixes."""


class TensorPiece(msgspec.Struct, frozen=True):
    """A part of a named whole: half-open ranges of each dimension, and the whole's shape."""

    name: str
    placements: Placements
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> TensorPiece:
        """All of a tensor."""
        shape = tuple(tensor.shape)
        return cls(name, tuple((0, size) for size in shape), shape, dtype_name(tensor.dtype))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(end - start for start, end in self.placements)


class WrittenPiece(msgspec.Struct, frozen=True):
    """Where a piece lies: bytes ``offset`` to ``offset + length`` of a file of the directory."""

    piece: TensorPiece
    file: str
    offset: int
    length: int


class CheckpointTensor(NamedTuple):
    """What a checkpoint holds under a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def write_pieces(
    directory: Path, writer: int, pieces: Mapping[TensorPiece, Tensor]
) -> list[WrittenPiece]:
    """Write pieces to a file of their own; ``writer`` is a number that no other writer has.

    Raises WriteError.
    """
    if not pieces:
        return []
    by_index = {_index_of(piece): piece for piece in pieces}
    assert len(by_index) == len(pieces), "pieces that are written begin at different places"
    items = [_write_item(piece) for piece in pieces]
    storage = FileSystemWriter(directory)
    storage.set_up_storage_writer(is_coordinator=False)
    plan = storage.prepare_local_plan(SavePlan(items))
    plan = storage.prepare_global_plan([plan] * (writer + 1))[writer]
    with _writing(directory):
        results = storage.write_data(plan, _Giving(pieces, by_index)).wait()
    return [_written(by_index[result.index], result.storage_data) for result in results]


def write_index(
    directory: Path, written: Iterable[WrittenPiece], aliases: Mapping[str, str] | None = None
) -> None:
    """Write the index over all pieces of a checkpoint; with it the checkpoint can be read.

    ``aliases`` gives a further name to the name of a whole that was written: tied parameters
    have several and are stored once. Raises WriteError.
    """
    found = list(written)
    storage = FileSystemWriter(directory)
    storage.set_up_storage_writer(is_coordinator=True)
    further: dict[str, list[str]] = {}
    for alias, name in (aliases or {}).items():
        further.setdefault(name, []).append(alias)
    wholes: dict[str, TensorStorageMetadata] = {}
    results = []
    for entry in found:
        for name in (entry.piece.name, *further.get(entry.piece.name, ())):
            piece = msgspec.structs.replace(entry.piece, name=name)
            wholes.setdefault(name, _whole(piece)).chunks.append(_chunk(piece))
            info = storage_info(entry.file, entry.offset, entry.length)
            results.append(WriteResult(_index_of(piece), entry.length, info))
    index = Metadata({**wholes}, planner_data={name: (name,) for name in wholes})
    with _writing(directory):
        storage.finish(index, [results])


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Raise WriteError for what torch raises where nothing more can be written."""
    try:
        yield
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(directory)) from error
    except RuntimeError as error:
        reason = f"{str(error).splitlines()[0]}; is the disk full?"
        raise WriteError(None, reason, str(directory)) from error


def read_pieces(directory: Path, wanted: Mapping[TensorPiece, Tensor]) -> None:
    """Fill tensors with their pieces, put together from however they were sliced when written.

    Pieces of one whole may overlap, or begin at the same place. Raises WeightError where the
    checkpoint lacks one, holds it in another shape or dtype, or only a part of it.
    """
    index = _read_index(directory)
    requests: list[ReadItem] = []
    with _reading(directory):
        for number, piece in enumerate(wanted):
            stored = _checked(directory, index, piece)
            items = create_read_items_for_chunk_list(piece.name, stored, [_chunk(piece)])
            _check_covered(directory, piece, items)
            # An index of torch's is a name and where the piece begins, which two may share.
            requests += [replace(i, dest_index=replace(i.dest_index, index=number)) for i in items]
        reader = FileSystemReader(directory)
        reader.set_up_storage_reader(index, is_coordinator=True)
        reader.read_data(LoadPlan(requests), _PieceReader(list(wanted.values()))).wait()


@contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """Raise WeightError for whatever reading a damaged checkpoint runs into."""
    try:
        yield
    except WeightError:
        raise
    except Exception as error:
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        raise WeightError(
            f"the checkpoint {directory} cannot be read: {reason[:300]}; it is damaged, or was not "
            "written whole: resume from another"
        ) from error


def stored_in(directory: Path) -> dict[str, CheckpointTensor]:
    """What a checkpoint holds, by name. Raises WeightError where its index cannot be read."""
    index = _read_index(directory)
    return {
        name: CheckpointTensor(tuple(entry.size), entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def is_complete(directory: Path) -> bool:
    """Whether the index can be read and each file is as long as the index says."""
    try:
        places = _read_index(directory).storage_data.values()
    except WeightError:
        return False
    needed: dict[str, int] = {}
    for place in places:
        end = place.offset + place.length
        needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
    return all(_size_of(directory / file) >= size for file, size in needed.items())


def _size_of(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


# --- torch's types --------------------------------------------------------------------------


def _index_of(piece: TensorPiece) -> MetadataIndex:
    return MetadataIndex(piece.name, _chunk(piece).offsets)


def _chunk(piece: TensorPiece) -> ChunkStorageMetadata:
    offsets = torch.Size([start for start, _ in piece.placements])
    return ChunkStorageMetadata(offsets, torch.Size(piece.sizes))


def _whole(piece: TensorPiece) -> TensorStorageMetadata:
    properties = TensorProperties(torch_dtype(piece.dtype))
    return TensorStorageMetadata(properties, torch.Size(piece.shape), [])


def _write_item(piece: TensorPiece) -> WriteItem:
    properties = TensorProperties(torch_dtype(piece.dtype))
    data = TensorWriteData(_chunk(piece), properties, torch.Size(piece.shape))
    return WriteItem(_index_of(piece), WriteItemType.SHARD, tensor_data=data)


def _written(piece: TensorPiece, info: Any) -> WrittenPiece:
    return WrittenPiece(piece, info.relative_path, info.offset, info.length)


def _checked(directory: Path, index: Metadata, piece: TensorPiece) -> TensorStorageMetadata:
    stored = index.state_dict_metadata.get(piece.name)
    if not isinstance(stored, TensorStorageMetadata):
        raise WeightError(
            f"the checkpoint {directory} holds no {piece.name!r}; it is of another program"
        )
    found = (tuple(stored.size), dtype_name(stored.properties.dtype))
    if found != (piece.shape, piece.dtype):
        raise WeightError(
            f"the checkpoint {directory} holds {piece.name!r} as {found[1]}{list(found[0])}, the "
            f"program has {piece.dtype}{list(piece.shape)}; resume with the model that was saved"
        )
    parts = {
        tuple((start, start + size) for start, size in zip(c.offsets, c.sizes, strict=True))
        for c in stored.chunks
    }
    if parts and not are_parts([*parts], None):
        raise WeightError(
            f"the parts of {piece.name!r} in the checkpoint {directory} lie on one another; it is "
            "damaged: resume from another"
        )
    return stored


def _check_covered(directory: Path, piece: TensorPiece, items: Sequence[ReadItem]) -> None:
    """Raise WeightError where what is stored, whose parts are even, is less than a piece."""
    found, size = sum(math.prod(item.lengths) for item in items), math.prod(piece.sizes)
    if found != size:
        raise WeightError(
            f"the checkpoint {directory} holds {found} of the {size} elements of {piece.name!r} "
            "that are needed; it is damaged, or was not written whole: resume from another"
        )


class _Giving(DefaultSavePlanner):
    """Hands tensors to torch's writer."""

    def __init__(
        self, pieces: Mapping[TensorPiece, Tensor], by_index: Mapping[MetadataIndex, TensorPiece]
    ) -> None:
        super().__init__()
        self._pieces = pieces
        self._by_index = by_index

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._pieces[self._by_index[write_item.index]].contiguous()


class _PieceReader(DefaultLoadPlanner):
    """Hands torch's reader the places to write to."""

    def __init__(self, targets: Sequence[Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        number = read_item.dest_index.index
        assert number is not None, "each request has the number of its tensor"
        target = self._targets[number]
        for dim, start in enumerate(read_item.dest_offsets):
            target = target.narrow(dim, start, read_item.lengths[dim])
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: `resolve_tensor` gave the place itself."""


# --- reading the index ----------------------------------------------------------------------

_TYPES = {
    f"torch.distributed.checkpoint.{place}"
    for place in (
        "metadata.Metadata",
        "metadata.MetadataIndex",
        "metadata.ChunkStorageMetadata",
        "metadata.TensorStorageMetadata",
        "metadata.BytesStorageMetadata",
        "metadata.TensorProperties",
        "metadata.StorageMeta",
        "metadata._MEM_FORMAT_ENCODING",
        "filesystem._StorageInfo",
    )
} | {"torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib.WindowsPath"}


class _IndexUnpickler(pickle.Unpickler):
    """Knows the types of an index and dtypes, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if f"{module}.{name}" in _TYPES or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")


def _read_index(directory: Path) -> Metadata:
    try:
        with (directory / INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
    except Exception as error:  # a damaged pickle raises whatever it runs into
        reason = str(error) or type(error).__name__
        raise WeightError(f"the checkpoint {directory} has no index to read: {reason}") from None
    if not isinstance(index, Metadata):
        raise WeightError(f"{directory / INDEX} is no index of a checkpoint")
    try:
        for entry in index.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                msgspec.convert([*entry.size], list[_Count])
                dtype_name(entry.properties.dtype)
        for place in index.storage_data.values():
            msgspec.convert([place.offset, place.length], list[_Count])
            if {"..", "/"}.intersection(Path(place.relative_path).parts):
                raise ValueError(f"{place.relative_path} is no file of it")
    except Exception as error:
        raise WeightError(f"the index of the checkpoint {directory} is damaged: {error}") from None
    return index


_Count = Annotated[int, msgspec.Meta(ge=0)]
