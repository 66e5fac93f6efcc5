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
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch

from shardwright.atomic import read_whole, replacing
from shardwright.ir import IRGraph
from shardwright.pipeline import serialize
from shardwright.pipeline.check import check, check_rules
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.forms import normalize, to_plain
from shardwright.pipeline.paramfiles import format_for, write_paramfile
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import Document, ParamfileFormat, ParamValue, TensorInfo
from shardwright.pipeline.text import format_pipeline
from shardwright.pipeline.weights import Weights


class Origin(NamedTuple):
    """What a pipeline was built from: a graph, and the plan of it."""

    graph: IRGraph
    plan: object
    """A `shardwright.planning.Plan`, which this folder knows nothing of."""


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
        path = Path(path)
        if not path.parent.is_dir():
            raise broken("file", f"the directory {path.parent} does not exist; make it first")
        stored = _StoredTensors(self, path)
        document = msgspec.structs.replace(self, tensors=stored.tensors)
        data = serialize.write(to_plain(document) if plain else document)
        with replacing(path) as temporary:
            temporary.write_bytes(data)
            for format, contents in stored.contents.items():
                write_paramfile(stored.files[format], contents, format)
        self.tensors = stored.tensors
        folders = self.weights.folders
        self.weights = Weights(
            path.parent, folders=None if folders is None else [path.parent, *folders]
        )

    # --- reading the object -----------------------------------------------------------------

    @property
    def connections(self) -> Connections:
        """Who makes and uses each tensor, the groups, and each device's supertasks."""
        return connect(self)

    def tasks_of(self, device: str) -> list[str]:
        """The supertasks that a device runs, in order. Raises KeyError for an unknown device."""
        return self.connections.order[device]

    def __str__(self) -> str:
        return format_pipeline(self)


class _StoredTensors:
    """A pipeline's tensors as a file at ``path`` names them, and what to write beside it.

    tensors
        The pipeline's, with paths from the new file.
    files, contents
        The parameter file to write of each format, and its tensors by name.
    """

    def __init__(self, pipeline: Pipeline, path: Path) -> None:
        self.weights = pipeline.weights
        self.directory = path.parent.resolve()
        self.contents: dict[ParamfileFormat, dict[str, torch.Tensor]] = {}
        self.names: dict[tuple[str, str], str] = {}
        self.files = self._free_files(pipeline, path)
        self.tensors = {name: self._stored(info) for name, info in pipeline.tensors.items()}

    def _free_files(self, pipeline: Pipeline, path: Path) -> dict[ParamfileFormat, Path]:
        """Files that no constant is still to be read from."""
        values = [info.value for info in pipeline.tensors.values() if info.value is not None]
        needed = {
            self.weights.locate(value.path).resolve()
            for value in values
            if self.weights.held(value) is None
        }
        stem = path.name.removesuffix(".json").removesuffix(".pipeline")
        name, k = f"{stem}.weights", 0
        while True:
            ends = _SUFFIXES.items()
            files = {format: self.directory / f"{name}{end}" for format, end in ends}
            if needed.isdisjoint(files.values()):
                return files
            name, k = f"{stem}.weights.{k + 1}", k + 1

    def _stored(self, info: TensorInfo) -> TensorInfo:
        if info.value is None:
            return info
        held = self.weights.held(info.value)
        changes = self._relative(info.value) if held is None else self._written(info.value, held)
        return msgspec.structs.replace(info, value=msgspec.structs.replace(info.value, **changes))

    def _relative(self, value: ParamValue) -> dict[str, Any]:
        """The path from the new file; symbolic links count where ``..`` would step over them."""
        file = self.weights.locate(value.path)
        place = file.parent.resolve() / file.name
        return {"path": Path(os.path.relpath(place, self.directory)).as_posix()}

    def _written(self, value: ParamValue, tensor: torch.Tensor) -> dict[str, Any]:
        key = (value.path, value.name)
        format = format_for(tensor)
        if key not in self.names:
            contents = self.contents.setdefault(format, {})
            name, k = value.name, 1
            while name in contents:
                name, k = f"{value.name}__{k}", k + 1
            self.names[key] = name
            contents[name] = tensor
        return {"path": self.files[format].name, "format": format, "name": self.names[key]}


_SUFFIXES: dict[ParamfileFormat, str] = {"safetensors": ".safetensors", "torch.save": ".pt"}
