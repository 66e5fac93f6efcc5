"""Parameter files: the three formats, read and written behind one interface.

    safetensors     read in slices, straight from the mapped file
    torch.save      a dict from names to tensors; mapped, with weights_only=True
    torch.export    a .pt2 archive's weights and constants (see `archive`)

Invariant: reading a slice brings only the slice into memory, gives contiguous memory of
its own (nothing refers to the file afterwards), and never unpickles an object. Every failure is a
WeightError that names file and tensor.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardwright.atomic import read_whole, replacing
from shardwright.errors import WeightError
from shardwright.ir.tensor_meta import dtype_name
from shardwright.pipeline.archive import ArchivedTensor, check_stored, read_archive, write_archive
from shardwright.pipeline.schema import ParamfileFormat

Range = tuple[int, int]


class Paramfile:
    """Named tensors that can be read in parts. ``label`` is what messages call it.

    ``refused`` says of tensors that cannot be read why.
    """

    def __init__(
        self,
        label: str,
        names: Collection[str],
        find: Callable[[str], ArchivedTensor],
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.label = label
        self._names = names
        self._find = find
        self._refused = refused or {}

    def names(self) -> Sequence[str]:
        """The names of the tensors, in the file's order."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape. Raises WeightError where there is no such tensor."""
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        """The tensor's dtype by its short name. Raises WeightError."""
        return self._stored(name).dtype

    def read(self, name: str, placements: Sequence[Range] | None = None) -> torch.Tensor:
        """The tensor, or the part of it that ``placements`` takes, in memory of its own.

        Raises WeightError where there is no such tensor or no such part.
        """
        stored = self._stored(name)
        shape = stored.shape
        ranges = [(0, size) for size in shape] if placements is None else list(placements)
        inside = len(ranges) == len(shape) and all(
            0 <= start <= end <= size for (start, end), size in zip(ranges, shape, strict=True)
        )
        if not inside:
            raise WeightError(
                f"{self.label}: tensor {name!r} has the shape {list(shape)}, which has no part "
                f"{[list(part) for part in ranges]}"
            )
        try:
            found = stored.read(tuple(slice(start, end) for start, end in ranges))
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise WeightError(f"{self.label}: tensor {name!r} cannot be read: {error}") from error
        return found.detach().clone(memory_format=torch.contiguous_format)

    def _stored(self, name: str) -> ArchivedTensor:
        if name in self._refused:
            raise WeightError(f"{self.label}: tensor {name!r}: {self._refused[name]}")
        if name not in self._names:
            names = self.names()
            some = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
            raise WeightError(
                f"{self.label}: there is no tensor {name!r}; the file has {len(names)}: "
                f"{some or 'none'}"
            )
        return self._find(name)


def tensors_in_memory(label: str, tensors: Mapping[str, torch.Tensor]) -> Paramfile:
    """Tensors that are in memory, or mapped, behind the interface of a file."""

    def find(name: str) -> ArchivedTensor:
        tensor = tensors[name]

        def read(ranges: tuple[slice, ...]) -> torch.Tensor:
            if tensor.is_meta:
                raise _no_contents(name)
            return tensor[ranges]

        return ArchivedTensor(tuple(tensor.shape), dtype_name(tensor.dtype), read)

    return Paramfile(label, tensors.keys(), find)


def _open_safetensors(path: Path) -> Paramfile:
    file = cast("Any", safe_open(path, framework="pt"))  # its stubs say too little

    def find(name: str) -> ArchivedTensor:
        stored = file.get_slice(name)

        def read(ranges: tuple[slice, ...]) -> torch.Tensor:
            tensor: torch.Tensor = stored[ranges] if ranges else file.get_tensor(name)
            return tensor

        dtype = str(stored.get_dtype())
        return ArchivedTensor(tuple(stored.get_shape()), SAFETENSORS_DTYPES.get(dtype, dtype), read)

    return Paramfile(str(path), dict.fromkeys(file.keys()), find)


SAFETENSORS_DTYPES = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "f8",
    "BOOL": "bool",
    **{f"{sign}{size}": f"{sign}{size}".lower() for sign in "IU" for size in (8, 16, 32, 64)},
    "C64": "c64",
}


def format_for(tensor: torch.Tensor) -> ParamfileFormat:
    """The format in which a tensor is written: safetensors where it has the dtype."""
    known = dtype_name(tensor.dtype) in SAFETENSORS_DTYPES.values()
    return "safetensors" if known else "torch.save"


def _open_archive(path: Path) -> Paramfile:
    tensors, refused = read_archive(path)
    return Paramfile(str(path), tensors, tensors.__getitem__, refused)


# --- opening and writing -----------------------------------------------------------------------


def open_paramfile(path: str | Path, format: ParamfileFormat) -> Paramfile:
    """The parameter file at ``path``. Raises WeightError where it is missing or of no such format.

    The file is mapped, not read, and let go when the object is.
    """
    path = Path(path)
    try:
        is_file, is_other = path.is_file(), path.exists()
    except (OSError, ValueError) as error:  # A name that is too long, say.
        raise WeightError(f"{str(path)[:200]!r} is no path of a file: {error}") from None
    if not is_file:
        what = "does not exist"
        if is_other:
            what = "is a directory" if path.is_dir() else "is no regular file"
        raise WeightError(
            f"{path} {what}; put the parameter file there, or build the pipeline again with "
            "weights= naming it"
        )
    try:
        return OPEN[format](path)
    except WeightError:
        raise
    except Exception as error:  # readers of a damaged file raise whatever they run into
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        raise WeightError(f"{path} cannot be read as {format}: {reason}") from error


def _open_torch_save(path: Path) -> Paramfile:
    check_stored(path)
    check_records(path)
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(loaded, Mapping):
        raise WeightError(
            f"{path} holds a {type(loaded).__name__}, expected a dict from names to tensors, as "
            "torch.save(model.state_dict(), path) writes"
        )
    tensors = {str(k): item for k, item in loaded.items() if isinstance(item, torch.Tensor)}
    nested = [str(key) for key, item in loaded.items() if isinstance(item, Mapping)]
    if nested and not tensors:
        raise WeightError(
            f"{path} holds the dicts {', '.join(nested)}, expected a dict from names to tensors; "
            "save the state dict alone"
        )
    return tensors_in_memory(str(path), tensors)


def write_paramfile(
    path: str | Path, tensors: Mapping[str, torch.Tensor], format: ParamfileFormat = "safetensors"
) -> None:
    """Write a parameter file; it is there whole or not at all.

    Tensors that share memory, or are parts of others, are written each on its own.
    Raises WeightError where a tensor has no contents or the format cannot hold it.
    """
    path = Path(path)
    plain = _plain(tensors)
    with replacing(path) as temporary:
        try:
            WRITE[format](temporary, plain)
        except (SafetensorError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise WeightError(f"{path} cannot be written as {format}: {error}") from error


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, contiguous, each the only owner of exactly its memory."""
    found: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise _no_contents(name)
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage()
        if storage.nbytes() != own.nbytes or (own.nbytes and storage.data_ptr() in storages):
            own = own.clone()
        storages.add(own.untyped_storage().data_ptr())
        found[name] = own
    return found


def _no_contents(name: str) -> WeightError:
    return WeightError(
        f"tensor {name!r} has no contents: the model was built on the meta device; pass weights= "
        "to build, or capture a model that holds its weights"
    )


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def _write_torch_save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, path)


OPEN: dict[ParamfileFormat, Callable[[Path], Paramfile]] = {
    "safetensors": _open_safetensors,
    "torch.save": _open_torch_save,
    "torch.export": _open_archive,
}
WRITE: dict[ParamfileFormat, Callable[[Path, dict[str, torch.Tensor]], None]] = {
    "safetensors": _write_safetensors,
    "torch.save": _write_torch_save,
    "torch.export": write_archive,
}


# --- checkpoints -------------------------------------------------------------------------------


class _Index(msgspec.Struct):
    """``model.safetensors.index.json``: which file holds which tensor."""

    weight_map: dict[str, str]


def find_weights(path: str | Path) -> dict[str, Path]:
    """The safetensors file of each tensor of a checkpoint.

    ``path`` is a safetensors file, or the index of one in shards (``….index.json``), whose files
    lie beside it, or the folder of one or the other. Raises WeightError where a file is missing or
    is neither.
    """
    path = _in_folder(Path(path))
    if not path.name.endswith(".index.json"):
        return dict.fromkeys(open_paramfile(path, "safetensors").names(), path)
    try:
        index = msgspec.json.decode(read_whole(path), type=_Index)
    except OSError as error:
        raise WeightError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WeightError(f"{path} is no index of a checkpoint: {error}") from None
    for file in dict.fromkeys(index.weight_map.values()):
        if not file.endswith(".safetensors"):
            raise WeightError(
                f"{path} lists {file!r}; only safetensors files are read: save the checkpoint "
                "with safe_serialization=True"
            )
        if not (path.parent / file).is_file():
            raise WeightError(f"{path} lists {file!r}, which is not beside it")
    return {name: path.parent / file for name, file in index.weight_map.items()}


def _in_folder(path: Path) -> Path:
    """The one checkpoint of a folder, its index before its shards; another path as it is."""
    if not path.is_dir():
        return path
    indices = sorted(path.glob("*.safetensors.index.json"))
    files = indices or sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise WeightError(
            f"{path} is to hold one checkpoint, a safetensors file or the index of one in shards; "
            f"found {found}: name the file"
        )
    return files[0]


# --- records of torch.save ------------------------------------------------------------------------
#
# ``torch.load(mmap=True)`` takes from the mapped file, where a record begins, as many bytes as the
# pickle says that the tensor has: not as many as the record has, nor does it see that it is packed.
# Of a damaged file that is the memory behind it. So the pickle is read here once, by an unpickler
# that knows no object at all, for the storages that it names.


ITEMSIZES = {
    **dict.fromkeys(("UntypedStorage", "ByteStorage", "CharStorage", "BoolStorage"), 1),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("FloatStorage", "IntStorage"), 4),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
    "QInt32Storage": 4,
}
"""Bytes of an element, by the type that a pickle names."""


def check_records(path: Path) -> None:
    """Raise WeightError where a storage's record is not there, is packed, or has another size.

    Raises whatever a damaged zip file or pickle leads to.
    """
    with zipfile.ZipFile(path) as archive:
        entries = {item.filename.partition("/")[2]: item for item in archive.infolist()}
        if len(entries) != len(archive.infolist()):
            _refuse(path, "has entries of one name")
        if "data.pkl" not in entries:
            _refuse(path, "has no data.pkl")
        reader = _StorageUnpickler(io.BytesIO(archive.read(entries["data.pkl"])))
        reader.load()
        for key, size in reader.sizes:
            entry = entries.get(f"data/{key}")
            if entry is None:
                _refuse(path, f"has no record data/{key}, which a tensor lies in")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                _refuse(path, f"was compressed after torch wrote it: data/{key} is packed")
            if entry.file_size != size:
                _refuse(path, f"has {entry.file_size} bytes in data/{key}, expected {size}")
            archive.open(entry).close()  # its own header must say the same, as it tells the place


def _refuse(path: Path, reason: str) -> NoReturn:
    raise WeightError(f"{path} {reason}; it is damaged: save it again")


class _Anything(dict[Any, Any]):
    """What stands for every object of a pickle: whatever is done to one, it does nothing."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def ignore(self, *args: Any) -> None:
        """Nothing."""

    __setstate__ = append = extend = add = ignore


class _StorageUnpickler(pickle.Unpickler):
    """Finds keys and bytes of the storages, and makes nothing."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.sizes: list[tuple[str, int]] = []

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Anything,), {})

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, count = pid
        self.sizes.append((str(key), ITEMSIZES[kind.__name__] * int(count)))
        return _Anything()
