"""The records of a ``torch.save`` file, held to what its pickle says of them.

``torch.load(mmap=True)`` takes from the mapped file, where a record begins, as many bytes as the
pickle says that the tensor has: not as many as the record has, nor does it see that it is packed.
Of a damaged file that is the memory behind it. So the pickle is read here once, by an unpickler
that knows no object at all, for the storages that it names.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, NoReturn

from shardwright.errors import WeightError

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
        reader = _Storages(io.BytesIO(archive.read(entries["data.pkl"])))
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

    def __setstate__(self, state: Any) -> None:
        """Nothing."""

    def append(self, item: Any) -> None:
        """Nothing."""

    def extend(self, items: Any) -> None:
        """Nothing."""

    def add(self, item: Any) -> None:
        """Nothing."""


class _Storages(pickle.Unpickler):
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
