"""Pipeline: the user's object. A document, with the weights that its constants name.

    pipeline = sw.build(graph, plan)
    pipeline.save("model.pipeline.json")
    pipeline = sw.Pipeline.load("model.pipeline.json")

Invariant of a pipeline that was loaded: it is right (`check`), and nothing was imported,
evaluated or unpickled to read it. Files are written to a temporary name and renamed, weights
before the file that names them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch

from shardwright.atomic import read_whole, replacing
from shardwright.errors import InputError
from shardwright.ir import IRGraph
from shardwright.pipeline import serialize
from shardwright.pipeline.check import check, check_rules
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.forms import normalize, to_plain
from shardwright.pipeline.paramfiles import format_for, write_paramfile
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import (
    BatchRows,
    Document,
    ParamfileFormat,
    ParamValue,
    TensorInfo,
)
from shardwright.pipeline.text import format_pipeline
from shardwright.pipeline.weights import Weights


class Origin(NamedTuple):
    """What a pipeline was built from: a graph, and the plan of it.

    ``rows`` says from how many rows on the graph may be padded along dimension 0 of some of its
    inputs, and which dimension of outputs has them. It raises InputError where that would change a
    result.
    """

    graph: IRGraph
    plan: object
    """A `shardwright.planning.Plan`, which this folder knows nothing of."""
    rows: Callable[[tuple[str, ...]], tuple[int, dict[str, int]]]


class Pipeline(Document, dict=True):
    """A pipeline: the fields of the format, and ``weights``, which are no field of it."""

    @cached_property
    def weights(self) -> Weights:
        """Where the contents of the constants are."""
        return Weights()

    @cached_property
    def origin(self) -> Origin | None:
        """What the pipeline was built from, if that was in this process; it is in no file."""
        return None

    # --- files ------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, *, weights_in: str | Path | None = None) -> Self:
        """Load and check a pipeline file. Raises PipelineError if it breaks a rule.

        Parameter files are not opened; ``pipeline.weights.check(pipeline.tensors)`` opens them.
        They must be in the file's folder or below it, or in ``weights_in``, which defaults to the
        environment variable ``SHARDWRIGHT_WEIGHTS_IN``. Files elsewhere are not read.
        """
        path = Path(path)
        try:
            data = read_whole(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise broken("file", f"{path} cannot be read: {reason}") from None
        try:
            return cls.from_json(data, directory=path.parent, weights_in=weights_in)
        except Exception as error:
            error.add_note(f"in {path}")
            raise

    @classmethod
    def from_json(
        cls,
        data: bytes,
        *,
        directory: str | Path | None = None,
        weights_in: str | Path | None = None,
    ) -> Self:
        """The pipeline of a file's bytes; paths of parameter files begin at ``directory``.

        They stay in it, or in ``weights_in``. Raises PipelineError where the bytes break a rule.
        """
        pipeline = serialize.read(data, cls)
        normalize(pipeline)
        check_rules(pipeline)
        more = weights_in or os.environ.get("SHARDWRIGHT_WEIGHTS_IN")
        folders = [Path(directory or "."), *([Path(more)] if more else [])]
        pipeline.weights = Weights(directory, folders=folders)
        return pipeline

    def to_json(self) -> bytes:
        """The bytes of the file, a line for each device, tensor and supertask."""
        return serialize.write(self)

    def save(self, path: str | Path, *, plain: bool = False) -> None:
        """Check the pipeline and write it, with the weights that are in memory next to it.

        For ``model.pipeline.json`` weights go to ``model.weights.safetensors``. Weights in files
        stay there; the new file refers to them by relative paths. Afterwards the object is as if
        loaded from ``path``.

        With ``plain`` the file has only the specification's keys; the object keeps its optional
        ones. Raises WeightError, and PipelineError, also if a plain file would not mean the same.
        """
        check(self)
        if not plain:
            self.metadata = msgspec.structs.replace(self.metadata, rows=self.batches())
        path = Path(path)
        if not path.parent.is_dir():
            raise broken("file", f"the directory {path.parent} does not exist; make it first")
        stem = path.name.removesuffix(".json").removesuffix(".pipeline")
        contents = StoredContents(path.with_name(stem))
        with replacing(path) as temporary:
            tensors = self.write(temporary, contents, plain=plain)
            contents.write()
        self.tensors = tensors
        folders = self.weights.folders
        self.weights = Weights(
            path.parent, folders=None if folders is None else [path.parent, *folders]
        )

    def write(
        self, path: Path, contents: StoredContents, *, plain: bool = False
    ) -> dict[str, TensorInfo]:
        """Write the file, and note in ``contents`` what has to be stored beside it.

        Returns the tensors as the file names them.
        """
        tensors = contents.stored(self)
        document = msgspec.structs.replace(self, tensors=tensors)
        path.write_bytes(serialize.write(to_plain(document) if plain else document))
        return tensors

    # --- reading the object -----------------------------------------------------------------

    def rows_of(self, inputs: Collection[str]) -> BatchRows:
        """What a call with fewer rows of these inputs, along dimension 0, needs to know.

        Raises InputError where such a call would get another result, or where nothing is known.
        """
        for rows in self.metadata.rows:
            if {*inputs} == {*rows.inputs}:
                return rows
        if self.origin is not None:
            names = tuple(sorted(inputs))
            least, outputs = self.origin.rows(names)
            return BatchRows(names, outputs, least)
        known = " or ".join(", ".join(rows.inputs) for rows in self.metadata.rows)
        raise InputError(
            f"the file does not say that the rows of {', '.join(sorted(inputs))} are independent "
            f"(metadata.rows){f', but those of {known}' if known else ''}"
        )

    def batches(self) -> tuple[BatchRows, ...]:
        """What is known of the inputs of one first size, for each size."""
        if self.metadata.rows or self.origin is None or self.training is not None:
            return self.metadata.rows
        inputs = self.metadata.tensors.inputs
        sizes = dict.fromkeys(whole.shape[0] for whole in inputs.values() if whole.shape)
        found = []
        for size in (each for each in sizes if each > 1):
            with suppress(InputError):
                batched = [name for name, whole in inputs.items() if whole.shape[:1] == (size,)]
                found.append(self.rows_of(batched))
        return tuple(found)

    @property
    def connections(self) -> Connections:
        """Who makes and uses each tensor, the groups, and each device's supertasks."""
        return connect(self)

    def tasks_of(self, device: str) -> list[str]:
        """The supertasks that a device runs, in order. Raises KeyError for an unknown device."""
        return self.connections.order[device]

    def __repr__(self) -> str:
        return (
            f"Pipeline(devices={len(self.devices)}, supertasks={len(self.supertasks)}, "
            f"tensors={len(self.tensors)})"
        )

    def __str__(self) -> str:
        return format_pipeline(self)


class StoredContents:
    """The weights in memory of one or several pipelines, and the parameter files they go to.

    Files begin with ``stem``, a path in their directory. A tensor is stored once, whichever
    pipelines and names it is stored for.
    """

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._directory = stem.parent.resolve()
        self._contents: dict[ParamfileFormat, dict[str, torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        self._files: dict[ParamfileFormat, Path] | None = None

    def stored(self, pipeline: Pipeline) -> dict[str, TensorInfo]:
        """A pipeline's tensors as a file in the directory names them."""
        values = [info.value for info in pipeline.tensors.values() if info.value is not None]
        if self._files is None:
            self._files = self._free_files(pipeline.weights, values)
        return {
            name: self._stored(pipeline.weights, info) for name, info in pipeline.tensors.items()
        }

    def write(self) -> None:
        """Write the parameter files."""
        for format, contents in self._contents.items():
            assert self._files is not None
            write_paramfile(self._files[format], contents, format)

    def _free_files(
        self, weights: Weights, values: Sequence[ParamValue]
    ) -> dict[ParamfileFormat, Path]:
        """Files that no constant is still to be read from."""
        needed = {
            weights.locate(value.path).resolve() for value in values if weights.held(value) is None
        }
        name, k = f"{self._stem.name}.weights", 0
        while True:
            ends = _SUFFIXES.items()
            files = {format: self._directory / f"{name}{end}" for format, end in ends}
            if needed.isdisjoint(files.values()):
                return files
            name, k = f"{self._stem.name}.weights.{k + 1}", k + 1

    def _stored(self, weights: Weights, info: TensorInfo) -> TensorInfo:
        if info.value is None:
            return info
        held = weights.held(info.value)
        changes = (
            self._relative(weights, info.value) if held is None else self._written(info.value, held)
        )
        return msgspec.structs.replace(info, value=msgspec.structs.replace(info.value, **changes))

    def _relative(self, weights: Weights, value: ParamValue) -> dict[str, Any]:
        """The path from the new file; symbolic links count where ``..`` would step over them."""
        file = weights.locate(value.path)
        place = file.parent.resolve() / file.name
        return {"path": Path(os.path.relpath(place, self._directory)).as_posix()}

    def _written(self, value: ParamValue, tensor: torch.Tensor) -> dict[str, Any]:
        assert self._files is not None
        format = format_for(tensor)
        if id(tensor) not in self._names:
            contents = self._contents.setdefault(format, {})
            name, k = value.name, 1
            while name in contents:
                name, k = f"{value.name}__{k}", k + 1
            self._names[id(tensor)] = name
            contents[name] = tensor
        return {
            "path": self._files[format].name,
            "format": format,
            "name": self._names[id(tensor)],
        }


_SUFFIXES: dict[ParamfileFormat, str] = {"safetensors": ".safetensors", "torch.save": ".pt"}
