"""How each size of a model's inputs may be padded.

`PaddingProbe` gives the shapes of `program_set` with how each size is padded, or why it is not.
`program_set` says which rules there are, `sizes` what is found out about the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardwright.errors import CaptureError, InputError, WeightError
from shardwright.ir.dynamic import DynamicShapes, DynamicSize, Padding, Sizes, padded
from shardwright.ir.execute import run_flat
from shardwright.ir.graph import IRGraph
from shardwright.ir.operators import is_random
from shardwright.ir.structure import leaves
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.independence import RowFlow
from shardwright.tracing.sizes import SizeTrace, own_sizes, trace_sizes

Tensors = Mapping[str, torch.Tensor]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far an output may differ by rounding, of its largest value; that of halves is `OF_HALVES`."""
OF_HALVES = 2e-2


@dataclass(slots=True)
class PaddingProbe:
    """Finds how each size of a model may be padded; ``run`` gives the shapes with that.

    ``capture`` gives the graph for sizes; all that were captured are kept. ``whole`` are the
    sizes that a padding is tried on: the example's, at least two of each.
    """

    capture: Callable[[DynamicShapes, Sizes], IRGraph]
    shapes: DynamicShapes
    example: Tensors
    graphs: dict[tuple[int, ...], IRGraph] = field(default_factory=dict)
    whole: Sizes = field(init=False)
    _trial: Tensors | None = None

    @property
    def sizes(self) -> Sizes:
        """The example's. Raises CaptureError."""
        try:
            return self.shapes.of(shapes_of(self.example))
        except InputError as error:
            raise CaptureError(f"the example: {error}") from None

    def run(self) -> DynamicShapes:
        """The shapes with how each size is padded. Raises CaptureError."""
        self.whole = {name: max(2, size) for name, size in self.sizes.items()}
        try:
            graph = self.graph(self.whole)
        except CaptureError as error:
            if self.whole == self.sizes:
                raise
            return self._exact(f"the model does not take two: {error}")
        traces, reasons = traced_sizes(graph, self.shapes)
        found = {}
        for name, size in self.shapes.sizes.items():
            if name in traces:
                found[name] = self._probed(name, size, graph, traces[name])
            else:
                found[name] = DynamicSize(size.inputs, reason=reasons[name], buckets=size.buckets)
        return DynamicShapes(found, self.shapes.masks)

    def _exact(self, reason: str) -> DynamicShapes:
        """The shapes without padding."""
        sizes = self.shapes.sizes.items()
        exact = {n: DynamicSize(s.inputs, reason=reason, buckets=s.buckets) for n, s in sizes}
        return DynamicShapes(exact, self.shapes.masks)

    def graph(self, sizes: Sizes) -> IRGraph:
        """The graph for sizes."""
        if key_of(sizes) not in self.graphs:
            self.graphs[key_of(sizes)] = self.capture(self.shapes, sizes)
        return self.graphs[key_of(sizes)]

    @property
    def trial(self) -> Tensors:
        """What a padding is tried on: the example, at least two of each size, all of it differing.

        What is the same all along a size has other contents, but for masks.
        """
        if self._trial is None:
            tensors = resized(self.example, self.shapes, self.whole)
            self._trial = self._distinct(self.graph(self.whole), tensors)
        return self._trial

    def _distinct(self, graph: IRGraph, tensors: Tensors) -> Tensors:
        """These, with other contents where one but a mask is the same all along a size."""
        dims: dict[str, tuple[int, ...]] = {}
        for size in self.shapes.sizes.values():
            for name in size.inputs.keys() - {*self.shapes.masks}:
                dims[name] = (*dims.get(name, ()), *size.inputs[name])
        even = [n for n in tensors if n in dims and any(_is_even(tensors[n], [d]) for d in dims[n])]
        numbers = [name for name in even if tensors[name].is_floating_point()]
        for names in (even, numbers):
            made = {**tensors, **{name: _other_contents(tensors[name]) for name in names}}
            if names and _runs(graph, made):
                return made
        return tensors

    def _probed(
        self, name: str, size: DynamicSize, graph: IRGraph, trace: SizeTrace
    ) -> DynamicSize:
        """A size with how it is padded, or why it is not."""
        padding: Padding
        reasons: list[str] = []
        for padding in ("rows", "mask"):
            try:
                if padding == "rows":
                    outputs = row_outputs(graph, size.inputs, self.whole[name], trace)
                else:
                    outputs = self._tried(name, size)
                return DynamicSize(size.inputs, outputs, padding, buckets=size.buckets)
            except InputError as error:
                reasons.append(str(error))
        return DynamicSize(
            size.inputs, reason="; ".join(dict.fromkeys(reasons)), buckets=size.buckets
        )

    def _tried(self, name: str, size: DynamicSize) -> dict[str, tuple[int, ...]]:
        """The dimensions of outputs that a part of the example and all of it differ in.

        Raises InputError where their contents differ too when the part is padded by its mask.
        """
        if not any(mask in size.inputs for mask in self.shapes.masks):
            raise InputError("no input is a mask of it")
        graph = self.graph(self.whole)
        check_runs(graph)
        others = [name for name in size.inputs if name not in self.shapes.masks]
        if others and all(_is_even(self.trial[n], size.inputs[n]) for n in others):
            raise InputError("it was not tried, as the example is the same all along it")
        tried = DynamicShapes({name: DynamicSize(size.inputs, padding="mask")}, self.shapes.masks)
        ends: dict[str, tuple[int, ...]] = {}
        for count in dict.fromkeys((max(1, 2 * self.whole[name] // 3), 1)):
            part = {**self.whole, name: count}
            shorter = self.graph(part)
            check_structure(graph, shorter)
            cut = resized(self.trial, self.shapes, part)
            expected = run_tried(shorter, cut)
            copies = tried.pad(cut, {name: self.whole[name]})
            found = run_tried(graph, copies)
            dims = _longer(found, expected, self.whole[name], count)
            ends = {n: dims[n] for n in graph.output_names}
            check_equal(found, expected, dims)
            masks = {n: t for n, t in copies.items() if n in self.shapes.masks}
            check_equal(run_tried(graph, {**self.trial, **masks}), expected, dims)
        return {output: those for output, those in ends.items() if those}


def traced_sizes(
    graph: IRGraph, shapes: DynamicShapes
) -> tuple[dict[str, SizeTrace], dict[str, str]]:
    """What the model does with the sizes that may vary together, and why others may not."""
    dims = {name: size.inputs for name, size in shapes.sizes.items()}
    try:
        return trace_sizes(graph, dims), {}
    except InputError as error:
        together = str(error)
    reasons = {}
    for name in shapes.sizes:
        try:
            trace_sizes(graph, {name: dims[name]})
        except InputError as error:
            reasons[name] = str(error)
    left = {name: of for name, of in dims.items() if name not in reasons}
    try:
        return trace_sizes(graph, left), reasons
    except InputError as error:
        together = str(error)
    return {}, dict.fromkeys(left, together) | reasons


def _is_even(tensor: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether all slices of a tensor along each of these dimensions are the same."""
    return all(torch.equal(tensor, tensor.narrow(d, 0, 1).expand_as(tensor)) for d in dims)


def _other_contents(tensor: torch.Tensor) -> torch.Tensor:
    """Drawn numbers of the kind and about the range of a tensor's; integers from 0 up."""
    draw = torch.Generator().manual_seed(0)
    has_size = tensor.numel() and tensor.dtype != torch.bool
    most = max(1, float(tensor.abs().max())) if has_size else 1
    if tensor.is_floating_point():
        added = torch.rand(tensor.shape, generator=draw) * most
        return tensor + added.to(tensor.device, tensor.dtype)
    drawn = torch.randint(0, int(most) + 1, tensor.shape, generator=draw)
    return drawn.to(tensor.device, tensor.dtype)


def _runs(graph: IRGraph, tensors: Tensors) -> bool:
    """Whether a graph takes these contents: an index may be out of range."""
    try:
        run_named(graph, tensors)
    except (IndexError, RuntimeError, WeightError):
        return False
    return True


def check_runs(graph: IRGraph) -> None:
    """Raise InputError where a graph gives not the same each time, or cannot be run here."""
    if any(is_random(node) for node in graph.nodes):
        raise InputError("it was not tried, as the model draws numbers (in train mode, dropout)")
    if any(tensor.is_meta for tensor in graph.tensors.values()):
        raise InputError("it was not tried, as the model's weights have no contents")


def check_structure(graph: IRGraph, other: IRGraph) -> None:
    """Raise InputError where two graphs give other structures, or change other buffers."""
    if graph.out_structure != other.out_structure:
        raise InputError("the result has other Python values for other sizes")
    if {graph.values[v].name for v in graph.updates} != {
        other.values[v].name for v in other.updates
    }:
        raise InputError("it changes other buffers for other sizes")


def _longer(found: Tensors, expected: Tensors, whole: int, part: int) -> dict[str, tuple[int, ...]]:
    """The dimensions in which outputs are longer, as ``whole`` is to ``part``."""
    if found.keys() != expected.keys():
        raise InputError(f"other operators make the outputs for {whole} than for {part}")
    dims: dict[str, tuple[int, ...]] = {}
    for name, other in expected.items():
        if found[name].ndim != other.ndim:
            raise InputError(f"the output {name!r} has more dimensions for {whole} than for {part}")
        pairs = [*enumerate(zip(found[name].shape, other.shape, strict=True))]
        dims[name] = tuple(dim for dim, (a, b) in pairs if a != b)
        differing = [(a, b) for _, (a, b) in pairs if a != b]
        if wrong := [(a, b) for a, b in differing if a * part != b * whole]:
            raise InputError(
                f"the output {name!r} has a dimension of {wrong[0][0]} for {whole} and "
                f"{wrong[0][1]} for {part}"
            )
    return dims


def check_equal(found: Tensors, expected: Tensors, dims: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InputError where outputs differ in what both have."""
    for name, other in expected.items():
        made = found[name]
        for dim in dims.get(name, ()):
            made = made.narrow(dim, 0, other.shape[dim])
        if made.shape != other.shape:
            raise InputError(f"the output {name!r} has another shape when padded")
        if other.numel() and made.is_floating_point():
            bound = TOLERANCE.get(made.dtype, OF_HALVES) * float(other.abs().max())
            same = bool(((made - other).abs() <= bound).all())
        else:
            same = torch.equal(made, other)
        if not same:
            raise InputError(f"the output {name!r} is another one when padded")


def row_outputs(
    graph: IRGraph, inputs: Mapping[str, Sequence[int]], rows: int, trace: SizeTrace
) -> dict[str, tuple[int, ...]]:
    """The dimension of each output with the rows that inputs have along theirs.

    Raises InputError where they are mixed, or something depends on how many there are.
    """
    assert graph.in_structure is not None
    if several := [name for name, dims in inputs.items() if len(dims) > 1]:
        raise InputError(f"{several[0]!r} has it in several dimensions")
    places = zip(leaves(graph.in_structure), graph.inputs, strict=True)
    given = {value: inputs[leaf.name][0] for leaf, value in places if leaf.name in inputs}
    flow = RowFlow(graph, rows, trace.ends)
    found = flow.follow(given, [*graph.outputs, *graph.updates.values()])
    for old, changed in graph.updates.items():
        if found.get(changed) is not None:
            raise InputError(f"the buffer {graph.values[old].name!r} is made from all rows")
    if trace.squared:
        raise InputError(trace.squared)
    made: dict[str, tuple[int, ...]] = {}
    for place, (name, value) in enumerate(zip(graph.output_names, graph.outputs, strict=True)):
        dims = () if (dim := found.get(value)) is None else (dim,)
        if trace.outputs is not None and dims != trace.outputs[place]:
            raise InputError(f"the output {name!r} has its size in other dimensions than its rows")
        made |= {name: dims} if dims else {}
    return made


def padded_rows(graph: IRGraph, inputs: Collection[str]) -> tuple[int, dict[str, int]]:
    """From how many rows on a graph may be padded along dimension 0 of inputs; `row_outputs`.

    Raises InputError where it may not.
    """
    dims = dict.fromkeys(inputs, (0,))
    rows = own_sizes(graph, {"rows": dims})["rows"]
    trace = trace_sizes(graph, {"rows": dims})["rows"]
    outputs = row_outputs(graph, dims, rows, trace)
    return trace.least, {name: dim for name, (dim,) in outputs.items()}


def resized(tensors: Tensors, shapes: DynamicShapes, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Tensors like these with other sizes: cut, or with copies of their last slices behind them."""
    found = dict(tensors)
    for name, size in shapes.sizes.items():
        for tensor, dims in size.inputs.items():
            for dim in dims:
                part = found[tensor].narrow(dim, 0, min(sizes[name], found[tensor].shape[dim]))
                found[tensor] = padded(part, dim, sizes[name]).contiguous()
    return found


def key_of(sizes: Sizes) -> tuple[int, ...]:
    """Sizes as the key of their graph."""
    return tuple(sizes.values())


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def run_named(
    graph: IRGraph, tensors: Tensors, inner: Sequence[int] = ()
) -> dict[str, torch.Tensor]:
    """The outputs of a graph by name, then ``inner`` values, and what it makes of buffers."""
    with torch.no_grad():
        results = run_flat(replace(graph, outputs=[*graph.outputs, *inner]), [*tensors.values()])
    others = [f"value {place} before an output of integers" for place in range(len(inner))]
    changed = [f"buffer {graph.values[old].name}" for old in graph.updates]
    return dict(zip([*graph.output_names, *others, *changed], results, strict=True))


def run_tried(graph: IRGraph, tensors: Tensors) -> dict[str, torch.Tensor]:
    """As `run_named`, with the floats that outputs of integers and bools are made from.

    An argmax of logits is the same for most contents, whatever little padding adds to these.
    """
    values, nodes = graph.values, graph.node_by_id()
    found: dict[int, None] = {}
    seen: set[int] = set()
    left = [*reversed(graph.outputs)]
    while left:
        value = values[left.pop()]
        if value.id in seen or value.producer is None:
            continue
        seen.add(value.id)
        if torch_dtype(value.dtype).is_floating_point:
            found |= {} if value.id in graph.outputs else {value.id: None}
        else:
            left.extend(reversed(nodes[value.producer].inputs))
    return run_named(graph, tensors, [*found])
