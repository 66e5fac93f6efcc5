"""A model's graphs for inputs whose sizes vary.

    dynamic = {"tokens": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"}}
    programs = sw.capture(model, (tokens, mask), dynamic=dynamic)

Each graph has fixed sizes; there is one for each combination that was asked for. A size is padded
up to a bucket where that is proved, or was tried, to change nothing:

rows
    Dimension annotations say that every operator keeps the rows of this dimension apart, and no
    buffer is made from them.
mask
    An input with ``mask`` in its name has this dimension. It was tried: the model was run on parts
    of the example, one of size 1 among them, and on each part padded to all of it, twice, with
    other content in what the mask leaves out. Outputs and changed buffers are the same where both
    have some. So is each further graph, against the first. Inputs that are the same all along a
    size get other contents for that: copies of theirs would pad without a difference.

For both, the model makes the same calls for the size of the call as for the one that it is padded
to, and does not compute with it (`sizes`). Any other call has a graph of its own sizes.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.errors import CaptureError, InputError
from shardwright.ir.dynamic import (
    DynamicShapes,
    DynamicSize,
    Sizes,
    fits,
    sizes_text,
)
from shardwright.ir.graph import IRGraph
from shardwright.ir.structure import (
    Arguments,
    flatten_call,
    leaves,
    rebuild,
    rebuild_call,
)
from shardwright.tracing.padding import (
    PaddingProbe,
    Tensors,
    check_equal,
    check_structure,
    key_of,
    resized,
    row_outputs,
    run_named,
    shapes_of,
)
from shardwright.tracing.sizes import check_same_model, trace_sizes

Dynamic = Mapping[str, Mapping[int, Any] | Sequence[Any]] | Sequence[Any]
"""Names of sizes by input and dimension; or other calls, the sizes that differ in them varying."""
LARGEST_BUCKET = 1 << 40
"""A `torch.export.Dim` with no largest size has a number above this."""


class ProgramSet:
    """The graphs of a model for inputs of varying sizes; `capture` with ``dynamic`` makes it.

    model
        It stays as it was at the first capture: the same parameters, in the same mode.
    shapes
        Which sizes vary, and how they are padded.
    graphs
        By the sizes, in the order of ``shapes.sizes``.
    least
        The sizes of the calls that each graph runs: from these up to its own.
    first
        The graph that a plan is made for; its sizes are the example's, rounded up.
    """

    def __init__(
        self,
        capture: Callable[..., IRGraph],
        model: nn.Module,
        arguments: Arguments,
        example: Sequence[torch.Tensor],
        dynamic: Dynamic,
        buckets: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.model = model
        self._capture = capture
        self._growing = threading.Lock()
        self._arguments = arguments
        names = [leaf.name for leaf in leaves(arguments)]
        self._example: Tensors = dict(zip(names, example, strict=True))
        named = DynamicShapes(
            _with_buckets(_named_sizes(self._arguments, self._example, dynamic), dynamic, buckets),
            tuple(name for name in names if "mask" in name.lower()),
        )
        probe = PaddingProbe(self._captured, named, self._example)
        self.shapes = probe.run()
        self._probe = probe
        self._made = made = self.shapes.rounded(probe.sizes)
        self.first = probe.graph(made)
        self.graphs: dict[tuple[int, ...], IRGraph] = {}
        self.least: dict[tuple[int, ...], Sizes] = {}
        self._is_copied = False  # Whether its copy does what the model did, which tells a change.
        self._keep(key_of(made), self.first)

    @property
    def name(self) -> str:
        """The first graph's."""
        return self.first.name

    def at(self, **sizes: int) -> IRGraph:
        """The graph for exactly these sizes, captured where there is none. Raises CaptureError."""
        key = tuple(sizes[name] for name in self.shapes.sizes)
        with self._growing:
            if key not in self.graphs:
                self._check_mode()
                self._keep(key, self._captured(self.shapes, sizes))
        return self.graphs[key]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph for a call's sizes, as the model would; see `IRGraph.run`."""
        tensors = dict(zip(self._example, flatten_call(self._arguments, args, kwargs), strict=True))
        sizes = self.shapes.of(shapes_of(tensors))
        made = self.shapes.rounded(sizes)
        graph = self.at(**made)
        if not fits(sizes, self.least[key_of(made)]):
            made = sizes
            graph = self.at(**made)
        outputs = self.shapes.cut(run_named(graph, self.shapes.pad(tensors, made)), sizes, made)
        assert graph.out_structure is not None
        return rebuild(graph.out_structure, [*outputs.values()])

    def _captured(self, shapes: DynamicShapes, sizes: Sizes) -> IRGraph:
        """The graph of the example with these sizes. Raises CaptureError."""
        try:
            tensors = resized(self._example, shapes, sizes)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise CaptureError(f"inputs of {sizes_text(sizes)} cannot be made: {first}") from None
        call = rebuild_call(self._arguments, [*tensors.values()])
        return self._capture(self.model, call.args, call.kwargs)

    def _keep(self, key: tuple[int, ...], graph: IRGraph) -> None:
        """Add a graph, its stored values named as in the first. Raises CaptureError."""
        _check_same_tensors(graph, self.first)
        sizes = dict(zip(self.shapes.sizes, key, strict=True))
        dims = {name: size.inputs for name, size in self.shapes.sizes.items()}
        try:
            check_same_model(self.first, graph, dims, sizes)
        except InputError as error:
            if self._is_copied:
                raise CaptureError(f"{error}; capture it for all sizes again") from None
        else:
            self._is_copied |= graph is self.first
        try:
            self.least[key] = self._least(graph, sizes)
        except InputError:
            self.least[key] = sizes
        self.graphs[key] = share_names(graph, self.first)

    def _check_mode(self) -> None:
        """Raise CaptureError where the model is in another mode than at the first capture."""
        if self.first.training != self.model.training:
            mode = "train" if self.first.training else "eval"
            raise CaptureError(
                f"the model was in {mode} mode for its other sizes; call {mode}() before"
            )

    def _least(self, graph: IRGraph, sizes: Sizes) -> Sizes:
        """The least sizes that are padded to a graph's. Raises InputError where none are."""
        rules = {name: size for name, size in self.shapes.sizes.items() if size.padding}
        traces = trace_sizes(graph, {name: size.inputs for name, size in rules.items()})
        for name, size in rules.items():
            if size.padding == "mask" or sizes[name] == 1:
                continue
            if size.outputs != row_outputs(graph, size.inputs, sizes[name], traces[name]):
                raise InputError(f"the rows of {name} are in other dimensions of outputs")
        if any(size.padding == "mask" for size in rules.values()):
            self._check_mask(graph, sizes)
        return sizes | {name: trace.least for name, trace in traces.items()}

    def _check_mask(self, graph: IRGraph, sizes: Sizes) -> None:
        """Raise InputError where a graph, padded by masks, gives not what the first one does."""
        exact = [name for name, size in self.shapes.sizes.items() if size.padding is None]
        if graph is self.first or any(sizes[n] != self._made[n] for n in exact):
            return  # Nothing that was captured has the same sizes, but for those that are padded.
        asked = {name: min(sizes[name], own) for name, own in self._probe.sizes.items()}
        call = resized(self._probe.trial, self.shapes, asked)
        found, expected = (
            self.shapes.cut(run_named(each, self.shapes.pad(call, made)), asked, made)
            for each, made in ((graph, sizes), (self.first, self._made))
        )
        check_structure(graph, self.first)
        check_equal(found, expected, {})

    def __str__(self) -> str:
        lines = [f"programs of {self.name}", *str(self.shapes).split("\n")]
        for key, graph in self.graphs.items():
            sizes = dict(zip(self.shapes.sizes, key, strict=True))
            lines.append(f"{sizes_text(sizes)}: {len(graph.nodes)} nodes")
        return "\n  ".join(lines)


def _check_same_tensors(graph: IRGraph, first: IRGraph) -> None:
    """Raise CaptureError where the model has other tensors than when ``first`` was captured."""
    held = {
        name: first.tensors.get(value.id)
        for value in first.stored()
        for name in value.names
        if value.role in ("param", "buffer")
    }
    for value in graph.stored():
        tensor, name = graph.tensors.get(value.id), value.names[0]
        if value.role in ("param", "buffer") and held.get(name, tensor) is not tensor:
            raise CaptureError(
                f"{name!r} is another tensor than when the model was captured for its other "
                "sizes; capture it for all of them again"
            )


# --- names of stored values -----------------------------------------------------------------------


def share_names(graph: IRGraph, first: IRGraph) -> IRGraph:
    """``graph``, its stored values named as in ``first`` where they are the same tensors.

    States without a tensor yet, as an optimizer's before its first step, keep their names.
    """
    known = {id(tensor): first.values[value].names for value, tensor in first.tensors.items()}
    taken = {name for value in (*first.stored(), *graph.stored()) for name in value.names}
    theirs = {name for value in first.stored() for name in value.names}
    for value in graph.stored():
        tensor = graph.tensors.get(value.id)
        if tensor is None:
            continue
        if id(tensor) in known:
            value.names = known[id(tensor)]
        elif not theirs.isdisjoint(value.names):
            value.names = tuple(_free(name, taken) for name in value.names)
    return graph


def _free(name: str, taken: set[str]) -> str:
    number = 1
    while f"{name}__{number}" in taken:
        number += 1
    taken.add(f"{name}__{number}")
    return f"{name}__{number}"


# --- which sizes vary -----------------------------------------------------------------------------


def _named_sizes(
    arguments: Arguments, tensors: Tensors, dynamic: Dynamic
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The dimensions of inputs that have each size. Raises CaptureError."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    places = (
        _of_names(tensors, dynamic)
        if isinstance(dynamic, Mapping)
        else _of_calls(arguments, tensors, dynamic)
    )
    for name, tensor, dim in places:
        dims = found.setdefault(name, {})
        dims[tensor] = (*dims.get(tensor, ()), dim)
    if not found:
        raise CaptureError(
            'no size varies; name some, as in dynamic={"x": {0: "batch"}}, or give calls of other '
            "sizes, dynamic=[(x2,)]"
        )
    return found


def _of_names(
    tensors: Tensors, dynamic: Mapping[str, Mapping[int, Any] | Sequence[Any]]
) -> Iterator[tuple[str, str, int]]:
    """Name, input and dimension of each size that is named."""
    for tensor, dims in dynamic.items():
        if tensor not in tensors:
            raise CaptureError(
                f"dynamic names the input {tensor!r}; the inputs are {', '.join(tensors)}"
            )
        ndim = tensors[tensor].ndim
        pairs = dims.items() if isinstance(dims, Mapping) else enumerate(dims)
        for dim, name in pairs:
            if name is None:
                continue
            text = name if isinstance(name, str) else getattr(name, "__name__", "")
            if not re.fullmatch(r"[\w.-]+", text):
                raise CaptureError(
                    f"dynamic names dimension {dim} of {tensor!r} {name!r}; a name is a word, or a "
                    "torch.export.Dim"
                )
            if type(dim) is not int or not -ndim <= dim < ndim:
                raise CaptureError(f"{tensor!r} has {ndim} dimensions, and dynamic names {dim!r}")
            yield text, tensor, dim % ndim


def _of_calls(
    arguments: Arguments, tensors: Tensors, calls: Sequence[Any]
) -> Iterator[tuple[str, str, int]]:
    """Name, input and dimension of each size that differs in one of several calls."""
    examples = [list(tensors.values())]
    for call in calls:
        args = () if isinstance(call, dict) else call if isinstance(call, tuple) else (call,)
        try:
            examples.append(flatten_call(arguments, args, call if isinstance(call, dict) else {}))
        except InputError as error:
            raise CaptureError(f"a call of dynamic is not like the first: {error}") from None
    names: dict[tuple[int, ...], str] = {}
    for tensor, found in zip(tensors, zip(*examples, strict=True), strict=True):
        if len({each.ndim for each in found}) > 1:
            raise CaptureError(f"{tensor!r} has not as many dimensions in each call of dynamic")
        for dim, sizes in enumerate(zip(*(each.shape for each in found), strict=True)):
            if len({*sizes}) > 1:
                yield names.setdefault(sizes, f"{tensor}_{dim}"), tensor, dim


def _with_buckets(
    named: Mapping[str, dict[str, tuple[int, ...]]],
    dynamic: Dynamic,
    buckets: Mapping[str, Sequence[int]] | None,
) -> dict[str, DynamicSize]:
    """The sizes with the buckets that are given for them. Raises CaptureError."""
    given = _limits(dynamic) | {name: tuple(sizes) for name, sizes in (buckets or {}).items()}
    for name, sizes in given.items():
        if name not in named:
            raise CaptureError(f"buckets names {name!r}; the sizes are {', '.join(named)}")
        if not all(type(size) is int and size > 0 for size in sizes):
            raise CaptureError(f"the buckets of {name!r} are {sizes}; give numbers from 1 up")
    return {
        name: DynamicSize(inputs, buckets=tuple(sorted({*given.get(name, ())})))
        for name, inputs in named.items()
    }


def _limits(dynamic: Dynamic) -> dict[str, tuple[int, ...]]:
    """Powers of two up to the largest size of each `torch.export.Dim` that has one."""
    found = {}
    for dims in dynamic.values() if isinstance(dynamic, Mapping) else ():
        for dim in dims.values() if isinstance(dims, Mapping) else dims:
            most = getattr(dim, "max", None)
            if type(most) is int and most < min(LARGEST_BUCKET, sys.maxsize):
                powers = (1 << power for power in range(most.bit_length()))
                found[dim.__name__] = (*powers, most)
    return found
