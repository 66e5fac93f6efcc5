"""Weights: the contents of a pipeline's constants, in memory or in parameter files.

Input: `ParamValue`s, which say path, name and placements, and `TensorInfo`s, which say what a
constant must be. Output: tensors of exactly that shape, dtype and strides, each in memory of its
own, of which only the part that is asked for was read. What differs is a WeightError that names
file and tensor. Contents in memory go before files.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardwright.errors import WeightError
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.pipeline.check_tensors import are_parts, format_ranges, is_inside, stored_wholes
from shardwright.pipeline.paramfiles import Paramfile, open_paramfile, tensors_in_memory
from shardwright.pipeline.schema import ParamfileFormat, ParamValue, TensorInfo


class Weights:
    """Where contents are found: in memory, and in files under ``directory``.

    Relative paths begin at ``directory``, or where the process runs if that is None. Files are
    opened only in ``folders`` and below, links followed; anywhere if that is None, as for
    pipelines that this process built.
    """

    def __init__(
        self, directory: str | Path | None = None, *, folders: Sequence[Path] | None = None
    ) -> None:
        self.directory = Path(directory) if directory is not None else None
        self.folders = folders
        self._memory: dict[str, dict[str, torch.Tensor]] = {}
        self._open: dict[tuple[Path, ParamfileFormat], Paramfile] = {}

    def put(self, path: str, name: str, tensor: torch.Tensor) -> None:
        """Keep contents for the constants that have this path and name, until they are saved."""
        self._memory.setdefault(path, {})[name] = tensor

    def held(self, value: ParamValue) -> torch.Tensor | None:
        """The whole stored tensor where it is in memory."""
        return self._memory.get(value.path, {}).get(value.name)

    def locate(self, path: str) -> Path:
        """Where a file of this path lies."""
        return (self.directory or Path.cwd()) / path

    # --- reading ----------------------------------------------------------------------------

    def read(self, value: ParamValue, info: TensorInfo) -> torch.Tensor:
        """The contents of a constant. Raises WeightError.

        The file stays open for the next one; `close` lets go of it.
        """
        source = self._source(value)
        _check(source, value, info)
        found = source.read(value.name, value.placements)
        return found if info.strides is None else _with_strides(found, info.strides)

    def load(self, tensors: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
        """The contents of every constant among ``tensors``, by name; files are closed after.

        Constants with ``init`` begin with zeros. Raises WeightError.
        """
        try:
            return {
                name: self._load(name, info) for name, info in tensors.items() if info.is_constant
            }
        finally:
            self.close()

    def _load(self, name: str, info: TensorInfo) -> torch.Tensor:
        if info.value is None:
            zeros = torch.zeros(info.shape, dtype=torch_dtype(info.dtype))
            return zeros if info.strides is None else _with_strides(zeros, info.strides)
        try:
            return self.read(info.value, info)
        except WeightError as error:
            raise WeightError(f"constant {name!r}: {error}") from error

    def check(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Raise WeightError where a constant's contents are missing or are not what it says.

        Reads names, shapes and dtypes, no contents. Where no constant says the shape of the whole,
        as in a plain file, what is stored does: a part of it that no constant is, is warned of.
        """
        try:
            for name, info in tensors.items():
                if info.value is not None:
                    self._check_one(name, info.value, info)
            if all(info.value is None or info.value.shape is None for info in tensors.values()):
                self._warn_of_gaps(tensors)
        finally:
            self.close()

    def _check_one(self, name: str, value: ParamValue, info: TensorInfo) -> None:
        try:
            _check(self._source(value), value, info)
        except WeightError as error:
            raise WeightError(f"constant {name!r}: {error}") from error

    def _warn_of_gaps(self, tensors: Mapping[str, TensorInfo]) -> None:
        for (path, name), values in stored_wholes(tensors).items():
            value = next(iter(values.values()))
            shape = self._source(value).shape(name)
            parts = [*dict.fromkeys(value.placements for value in values.values())]
            if not are_parts(parts, shape):
                warnings.warn(
                    f"of {name!r} in {path}, of the shape {list(shape)}, the pipeline has "
                    f"{'; '.join(map(format_ranges, parts))} only, and does not say (value.shape) "
                    "whether all of it is needed: build it again if it is",
                    stacklevel=4,
                )

    def close(self) -> None:
        """Let go of the files that `read` opened."""
        self._open.clear()

    def _source(self, value: ParamValue) -> Paramfile:
        if self.held(value) is not None:
            return tensors_in_memory("tensors in memory", self._memory[value.path])
        key = (self.locate(value.path), value.format)
        if key not in self._open:
            self._check_place(key[0])
            self._open[key] = open_paramfile(*key)
        return self._open[key]

    def _check_place(self, path: Path) -> None:
        """Raise WeightError where a file is in none of the folders that may be read."""
        if self.folders is None:
            return
        try:
            place = path.resolve()
            folders = [folder.resolve() for folder in self.folders]
        except (OSError, ValueError, RuntimeError) as error:
            raise WeightError(f"{str(path)[:200]!r} is no path of a file: {error}") from None
        if not any(place.is_relative_to(folder) for folder in folders):
            raise WeightError(
                f"{place} lies outside of {', '.join(map(str, folders))}, and a pipeline file "
                "reads parameter files beside it or below; put it there, or allow its folder: "
                f"Pipeline.load(path, weights_in={str(place.parent)!r}), or in the environment "
                "SHARDWRIGHT_WEIGHTS_IN"
            )


def _check(source: Paramfile, value: ParamValue, info: TensorInfo) -> None:
    """Raise WeightError where the stored tensor has no such part, or another dtype."""
    found, dtype = source.shape(value.name), source.dtype(value.name)
    where = f"{source.label}: tensor {value.name!r}"
    if dtype != info.dtype:
        raise WeightError(
            f"{where} is {dtype}, the pipeline expects {info.dtype}; give the file that the "
            "pipeline was built from, or build it again"
        )
    if value.shape is not None:
        if found != value.shape:
            raise _wrong_shape(where, found, f"expects {list(value.shape)}")
    elif not is_inside(value.placements, found):
        raise _wrong_shape(where, found, f"takes {format_ranges(value.placements)} of it")


def _wrong_shape(where: str, found: tuple[int, ...], expected: str) -> WeightError:
    return WeightError(
        f"{where} has the shape {list(found)}, the pipeline {expected}; give the file that the "
        "pipeline was built from, or build it again"
    )


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
