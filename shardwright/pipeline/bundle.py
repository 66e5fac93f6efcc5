"""Bundle: a pipeline for each combination of sizes of a model's inputs, over one set of weights.

    bundle = sw.build(programs, plan)
    bundle.save("model")                      # a folder
    bundle = sw.Bundle.load("model")

The folder has a pipeline file for each combination, of which each is a pipeline by itself, one
parameter file of each format with what all of them store, and ``bundle.json``: which sizes vary,
how they are padded, and which file has which sizes, the first one first. It is written beside the
place where it will be and renamed when it is whole.

Invariant: all pipelines have the same devices, inputs and outputs, and their inputs have the shapes
that their sizes say.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self
from uuid import uuid4

import msgspec

from shardwright.atomic import exchange, read_whole
from shardwright.errors import InputError, WeightError, WriteError
from shardwright.ir.dynamic import DynamicShapes, Sizes, sizes_text
from shardwright.pipeline.check import check
from shardwright.pipeline.pipeline import Pipeline, StoredContents
from shardwright.pipeline.rules import broken

INDEX = "bundle.json"
BUNDLE_VERSION = 1

Grow = Callable[[Sizes], tuple[Pipeline, Sizes]]
"""Makes the pipeline for sizes that there is none for yet, and says which least ones it runs."""
FileMark = tuple[int, ...]
"""Device, inode, size and time of a file: another one in its place has another mark."""


class BundleMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pipeline file of a bundle's folder, its sizes, and the least that are padded to them.

    Without ``least``, as folders of before have it, nothing is padded to them.
    """

    file: str
    sizes: Sizes
    least: Sizes = {}


class BundleIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``bundle.json`` holds."""

    version: int
    shapes: DynamicShapes
    members: tuple[BundleMember, ...]


class Bundle:
    """Pipelines by their sizes, which are in the order of ``shapes.sizes``.

    shapes
        Which sizes vary, and how they are padded.
    pipelines
        At least one; the first has the weights that the others share.
    least
        The least sizes of a call that each pipeline runs, padded to its own.
    grow
        Makes further ones; there is none where the bundle was loaded from a folder.
    files
        What its folder and parameter files were when it was loaded.
    """

    def __init__(
        self,
        shapes: DynamicShapes,
        pipelines: Mapping[tuple[int, ...], Pipeline],
        least: Mapping[tuple[int, ...], Sizes],
        grow: Grow | None = None,
        files: Mapping[Path, FileMark | None] | None = None,
    ) -> None:
        self.shapes = shapes
        self.pipelines = dict(pipelines)
        self.least = dict(least)
        self.grow = grow
        self.files = dict(files or {})
        self._growing = threading.Lock()

    @property
    def first(self) -> Pipeline:
        """The one whose constants the others use."""
        return next(iter(self.pipelines.values()))

    @property
    def name(self) -> str:
        """The first pipeline's."""
        return self.first.name

    def at(self, **sizes: int) -> Pipeline:
        """The pipeline for these sizes, made where there is none yet.

        Raises InputError where it cannot be made, and the errors of `capture`, `plan` and `build`.
        """
        key = tuple(sizes.get(name, 0) for name in self.shapes.sizes)
        if key not in self.pipelines:
            if self.grow is None:
                known = "; ".join(sizes_text(each) for each in self.sizes())
                raise InputError(
                    f"there is no program for {sizes_text(sizes)}; those there are: {known}. Build "
                    "one for it (at), before the bundle is saved"
                )
            with self._growing:
                if key not in self.pipelines:
                    pipeline, self.least[key] = self.grow(
                        dict(zip(self.shapes.sizes, key, strict=True))
                    )
                    self.pipelines[key] = pipeline
        return self.pipelines[key]

    def fitting(self, sizes: Sizes) -> Sizes:
        """The sizes of the pipeline that runs a call: those it is padded to, or larger ones.

        Larger ones only where there is no pipeline for these, and none can be made; the call's own
        where the model does otherwise for these than for those. Raises the errors of `at`.
        """
        made = self.shapes.rounded(sizes)
        if self.grow is not None:
            self.at(**made)
        if self._runs(sizes, made):
            return made
        fitting = (each for each in self.sizes() if self._runs(sizes, each))
        otherwise = sizes if tuple(made.values()) in self.pipelines else made
        return min(fitting, key=lambda other: math.prod(other.values()), default=otherwise)

    def _runs(self, sizes: Sizes, made: Sizes) -> bool:
        """Whether there is a pipeline for these sizes that a call can be padded to."""
        rules, least = self.shapes.sizes, self.least.get(tuple(made.values()))
        return least is not None and all(
            least[name] <= size <= made[name] if rules[name].padding else size == made[name]
            for name, size in sizes.items()
        )

    def sizes(self) -> Iterator[Sizes]:
        """The sizes of each pipeline."""
        return (dict(zip(self.shapes.sizes, key, strict=True)) for key in [*self.pipelines])

    def check(self) -> None:
        """Check every pipeline, and that all are of one model. Raises PipelineError."""
        for key, pipeline in [*self.pipelines.items()]:
            check(pipeline)
            sizes = dict(zip(self.shapes.sizes, key, strict=True))
            _check_alike(self.shapes, sizes, pipeline, self.first)

    def check_unchanged(self) -> None:
        """Raise WeightError where other files are in the place of those that were loaded."""
        for path, mark in self.files.items():
            if _mark(path) != mark:
                raise WeightError(
                    f"{path} was replaced after the bundle was loaded, so that the weights there "
                    "may be of another model; load the bundle again"
                )

    # --- files ------------------------------------------------------------------------------

    def save(self, path: str | Path, *, plain: bool = False) -> None:
        """Check the bundle and write it as a folder, in the place of another bundle or of nothing.

        With ``plain`` the pipeline files have only the specification's keys. The object stays as it
        is; the folder has the pipelines that there are when it begins. Raises WriteError,
        PipelineError where another thing than a bundle is at ``path``, or what this one reads its
        weights from, and the errors of `Pipeline.save`.
        """
        now = Bundle(self.shapes, self.pipelines, self.least)
        now.check()
        path = Path(path).resolve()  # The folder that a link names, not the link, is replaced.
        _check_place(path, now.pipelines.values())
        temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
        members = [
            BundleMember(f"{sizes_text(sizes)}.pipeline.json", sizes, now.least[key])
            for key, sizes in zip(now.pipelines, now.sizes(), strict=True)
        ]
        try:
            temporary.mkdir()
            contents = StoredContents(temporary / "bundle")
            for member, pipeline in zip(members, now.pipelines.values(), strict=True):
                pipeline.write(temporary / member.file, contents, plain=plain)
            contents.write()
            index = BundleIndex(BUNDLE_VERSION, self.shapes, tuple(members))
            (temporary / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)) + b"\n")
            _put(temporary, path)
        except OSError as error:
            raise WriteError(error.errno, error.strerror or str(error), str(path)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def load(cls, path: str | Path, *, weights_in: str | Path | None = None) -> Self:
        """Load and check a folder that `save` wrote.

        Raises PipelineError, and WeightError where the folder is replaced meanwhile. Parameter
        files are those beside the pipelines, as in `Pipeline.load`.
        """
        path = Path(path)
        index_file = (path / INDEX).absolute()  # A link may name another folder later.
        files = {index_file: _mark(index_file)}
        try:
            index = msgspec.json.decode(read_whole(path / INDEX), type=BundleIndex)
        except OSError as error:
            raise broken("file", f"{path} is no bundle: {INDEX}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise broken("bundle", f"{path / INDEX} is damaged: {error}; save it again") from None
        _check_index(index, path / INDEX)
        pipelines = {
            tuple(member.sizes[name] for name in index.shapes.sizes): Pipeline.load(
                path / member.file, weights_in=weights_in
            )
            for member in index.members
        }
        if len(pipelines) < len(index.members):
            raise broken("bundle", f"{path / INDEX} names two pipelines for the same sizes")
        for pipeline in pipelines.values():
            files.update((file, _mark(file)) for file in _parameter_files(pipeline))
        members = zip(pipelines, index.members, strict=True)
        least = {key: each.least or each.sizes for key, each in members}
        made = cls(index.shapes, pipelines, least, files=files)
        made.check_unchanged()
        for sizes, pipeline in zip(made.sizes(), pipelines.values(), strict=True):
            _check_alike(made.shapes, sizes, pipeline, made.first)
        return made

    def __str__(self) -> str:
        lines = [f"bundle of {self.name}, {len(self.first.devices)} device slots"]
        lines += str(self.shapes).split("\n")
        lines += [sizes_text(sizes) for sizes in self.sizes()]
        return "\n  ".join(lines)


def _mark(path: Path) -> FileMark | None:
    """What a file is now; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _parameter_files(pipeline: Pipeline) -> set[Path]:
    """The files that a pipeline reads contents from."""
    stored = (info.value for info in pipeline.tensors.values() if info.value is not None)
    names = {value.path for value in stored if pipeline.weights.held(value) is None}
    return {pipeline.weights.locate(name).absolute() for name in names}


def is_bundle(path: Path) -> bool:
    """Whether a path is that of a bundle's folder."""
    return (path / INDEX).is_file()


def load_either(path: str | Path, *, weights_in: str | Path | None = None) -> Pipeline | Bundle:
    """The pipeline of a file, or the bundle of a folder. Raises PipelineError."""
    kind = Bundle if is_bundle(Path(path)) else Pipeline
    return kind.load(path, weights_in=weights_in)


def first_of(given: Pipeline | Bundle | str | Path) -> Pipeline:
    """The pipeline itself, or a bundle's first. Raises PipelineError."""
    found = given if isinstance(given, Pipeline | Bundle) else load_either(given)
    return found.first if isinstance(found, Bundle) else found


def _check_place(path: Path, pipelines: Iterable[Pipeline]) -> None:
    """Raise PipelineError where the bundle cannot be written."""
    if not path.parent.is_dir():
        raise broken("file", f"the directory {path.parent} does not exist; make it first")
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not is_bundle(path)):
        raise broken(
            "file", f"{path} holds something else than a bundle; give another folder, or remove it"
        )
    for pipeline in pipelines:
        for file in _parameter_files(pipeline):
            if file.resolve().parent == path.resolve():
                raise broken(
                    "file",
                    f"the bundle reads {file.name} in {path}, which would be replaced; save it in "
                    "another folder",
                )


def _put(made: Path, path: Path) -> None:
    """Rename a folder, in the place of the one that is there, which is then at ``made``."""
    if not path.is_dir():
        made.rename(path)
    elif not exchange(made, path):
        old = path.with_name(f".{path.name}.{uuid4().hex[:8]}.old")
        path.rename(old)
        try:
            made.rename(path)
        except OSError:
            old.rename(path)
            raise
        old.rename(made)


def _check_index(index: BundleIndex, path: Path) -> None:
    """Raise PipelineError where an index contradicts itself."""
    if index.version != BUNDLE_VERSION:
        raise broken(
            "version",
            f"{path} has version {index.version}; this shardwright reads {BUNDLE_VERSION}",
        )
    if not index.members or not index.shapes.sizes:
        raise broken("bundle", f"{path} names no pipeline, or no size that varies")
    for member in index.members:
        if Path(member.file).name != member.file or not member.file.endswith(".json"):
            raise broken("bundle", f"{path} names {member.file!r}, which is no file beside it")
        for sizes in (member.sizes, member.least or member.sizes):
            if sizes.keys() != index.shapes.sizes.keys() or min(sizes.values()) < 1:
                raise broken(
                    "bundle",
                    f"{path}: {member.file} has {sizes_text(sizes)}; expected are numbers from 1 "
                    f"up for {', '.join(index.shapes.sizes)}",
                )


def _check_alike(shapes: DynamicShapes, sizes: Sizes, pipeline: Pipeline, first: Pipeline) -> None:
    """Raise PipelineError where a pipeline is not the first one for other sizes."""
    try:
        _check_ends(shapes, sizes, pipeline, first)
    except (InputError, KeyError, IndexError) as error:
        raise broken("bundle", f"the pipeline for {sizes_text(sizes)}: {error}") from None


def _check_ends(shapes: DynamicShapes, sizes: Sizes, pipeline: Pipeline, first: Pipeline) -> None:
    if pipeline.devices != first.devices:
        raise InputError("it has other devices than the first")
    for ends in ("inputs", "outputs"):
        own, others = (getattr(p.metadata.tensors, ends) for p in (pipeline, first))
        if {n: (t.idx, t.dtype) for n, t in own.items()} != {
            n: (t.idx, t.dtype) for n, t in others.items()
        }:
            raise InputError(f"it has other {ends} than the first")
    inputs, outputs = pipeline.metadata.tensors.inputs, pipeline.metadata.tensors.outputs
    if (found := shapes.of({name: info.shape for name, info in inputs.items()})) != sizes:
        raise InputError(f"its inputs are of {sizes_text(found)}")
    for name, size in shapes.sizes.items():
        for output, dims in size.outputs.items():
            for dim in dims:
                if outputs[output].shape[dim] % sizes[name]:
                    raise InputError(
                        f"dimension {dim} of {output!r} is {outputs[output].shape[dim]}, no "
                        f"multiple of the {name} of {sizes[name]}"
                    )
