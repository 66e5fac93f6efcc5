"""From which sizes on a model makes the calls that its graph has.

The model is run on fake tensors in which some sizes are symbols, as `torch.export` does it for
dynamic dimensions, and on those of fixed sizes. Nothing is computed.

From the least size that `trace_sizes` gives up to the graph's own, the model

- takes the same branches: what it asks about a symbol is recorded, and holds. Symbols are 2 at
  least; a run with size 1 makes the same calls, or 1 is left out.
- computes with no symbol: views, factories and slices end where one says, and that is all.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from shardwright.errors import CaptureError, InputError
from shardwright.ir.graph import IRGraph
from shardwright.ir.structure import Tree, leaves
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ir.values import IRValue, Source
from shardwright.ops.independence import Ends
from shardwright.torch_internals import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    operator_of,
    schema_of,
    tree_leaves,
    watch_symbol,
)
from shardwright.tracing.calls import SYMBOLS, CallLog, expression, tensors_in
from shardwright.tracing.failures import explain, is_of_program, line_before
from shardwright.tracing.flat import FlatModel
from shardwright.tracing.origins import line_of_program, refuse_here
from shardwright.tracing.tracer import fake_mode, let_stand_in, on_fakes, undisturbed

Dims = Mapping[str, Sequence[int]]
"""The dimensions of inputs that have a size, by input."""
Size = int | torch.SymInt
Guard = tuple[sympy.Basic, Source | None]
KEYS_DO_NOT_MATTER = {"einops"}
"""Packages that go another way to the same result where a size is no key."""
ENDS = {"size", "shape", "end", "repeats", "N"}
"""Arguments of operators that say how long something is, and no more."""


@dataclass(frozen=True, slots=True)
class SizeTrace:
    """What a model does with a size.

    least
        From it up to the graph's own, the model makes the graph's calls.
    ends
        Where tensors of this size are made, and along which dimensions.
    squared
        Where a tensor has the size in two dimensions, in words.
    outputs
        The dimensions of each output of the graph that have the size.
    """

    least: int = 1
    ends: Ends = field(default_factory=dict)
    squared: str = ""
    outputs: tuple[tuple[int, ...], ...] | None = None


def trace_sizes(graph: IRGraph, dims: Mapping[str, Dims]) -> dict[str, SizeTrace]:
    """What the model that a graph was captured from does with sizes, by their names.

    ``dims`` are the dimensions of the graph's inputs that have each. Raises InputError where the
    model computes with one, or is not what it was.
    """
    own = own_sizes(graph, dims)
    varying = [name for name, size in own.items() if size > 1]
    if not varying:
        return {name: SizeTrace() for name in own}
    symbolic = _run(graph, dims, own, varying)
    symbols = symbolic.symbols
    fixed = check_same_model(graph, graph, dims, own)
    symbolic.check_ends(fixed)
    if not _is_alike(fixed, symbolic, graph, own):
        raise InputError("the model makes other calls where its sizes vary")
    found = {name: SizeTrace() for name in own}
    for name, symbol in symbols.items():
        least = _least(symbolic.guards, symbol, name, own[name])
        if least < own[name] - 1:
            # What asks for the kind of a number, and not for the number, asks nothing of a symbol.
            _check_alike(graph, dims, {**own, name: own[name] - 1}, symbolic)
        if least == 2:
            try:
                _check_alike(graph, dims, {**own, name: 1}, symbolic)
                least = 1
            except InputError:
                least = 2
        found[name] = symbolic.trace(symbol, least)
    return found


def check_same_model(
    first: IRGraph, graph: IRGraph, dims: Mapping[str, Dims], sizes: Mapping[str, int]
) -> SizeRun:
    """Raise InputError where a graph of these sizes is not of the model of a first one."""
    run = _run(first, dims, sizes)
    if graph.captured is None or hash(run.log.calls()) != graph.captured.calls:
        raise InputError("the model does otherwise than when it was captured")
    return run


def _check_alike(
    graph: IRGraph, dims: Mapping[str, Dims], sizes: Mapping[str, int], symbolic: SizeRun
) -> None:
    """Raise InputError where the model does with these sizes not what it does with symbols."""
    if not _is_alike(_run(graph, dims, sizes), symbolic, graph, sizes):
        raise InputError("the model makes other calls where its sizes vary")


def _is_alike(run: SizeRun, symbolic: SizeRun, graph: IRGraph, sizes: Mapping[str, int]) -> bool:
    """Whether a run with numbers is that with symbols for them."""
    numbers = {symbol: sizes[name] for name, symbol in symbolic.symbols.items()}
    same_calls = run.log.calls() == symbolic.log.calls(numbers)
    return same_calls and run.result == symbolic.result == graph.out_structure


def own_sizes(graph: IRGraph, dims: Mapping[str, Dims]) -> dict[str, int]:
    """The sizes that a graph has."""
    assert graph.in_structure is not None
    names = [leaf.name for leaf in leaves(graph.in_structure)]
    shapes = {n: graph.values[v].shape for n, v in zip(names, graph.inputs, strict=True)}
    return {
        name: next(shapes[tensor][those[0]] for tensor, those in of.items())
        for name, of in dims.items()
    }


def _least(guards: Sequence[Guard], symbol: sympy.Symbol, name: str, own: int) -> int:
    """The least size from which on all guards hold. Raises InputError."""
    least = 2
    for asked, line in guards:
        if symbol not in asked.free_symbols:
            continue
        if len(asked.free_symbols) > 1:
            raise InputError(
                f"{line_before(line)}the model asks about several sizes at once, {asked}"
            )
        below = range(own - 1, least - 1, -1)
        failing = (n for n in below if not asked.xreplace({symbol: sympy.Integer(n)}))
        least = max(least, next(failing, least - 1) + 1)
        if least == own > 2:
            text = asked.xreplace({symbol: sympy.Symbol(name)})
            raise InputError(
                f"{line_before(line)}the model asks for the size itself, {text} (as len(x) and "
                "int(x.shape[0]) do; x.shape[0] does not)"
            )
    return least


# --- a run --------------------------------------------------------------------------------------


@dataclass(slots=True)
class SizeRun:
    """What a model did on fake tensors.

    symbols
        Of the sizes that had one.
    guards
        What was asked about them and was true, and by which lines.
    log, flow
        The calls, and where the symbols went.
    result, outputs
        Its structure, and its tensors' dimensions with symbols.
    """

    symbols: dict[str, sympy.Symbol]
    guards: Sequence[Guard]
    log: CallLog
    flow: _SizeFlow
    result: Tree | None
    outputs: Sequence[Mapping[sympy.Symbol, Sequence[int]]]

    def trace(self, symbol: sympy.Symbol, least: int) -> SizeTrace:
        """What was done with one symbol."""
        flow, outputs = self.flow, [tuple(dims.get(symbol, ())) for dims in self.outputs]
        squared = flow.squared.get(symbol, "")
        return SizeTrace(least, flow.ends_of(symbol), squared, tuple(outputs))

    def check_ends(self, fixed: SizeRun) -> None:
        """Raise InputError where numbers make no operator of what ends at a symbol.

        A part of a tensor that is all of it is the tensor.
        """
        for line, by_name in self.flow.ends.items():
            for name, dims in by_name.items():
                counts = [run.flow.counts[line, name] for run in (self, fixed)]
                if dims and counts[0] != counts[1]:
                    raise InputError(
                        f"{line_before(line)}the model takes a part that is all of it for the "
                        f"example alone ({name})"
                    )


def _run(
    graph: IRGraph, dims: Mapping[str, Dims], sizes: Mapping[str, int], varying: Sequence[str] = ()
) -> SizeRun:
    """Run a graph's model with symbols for the sizes that vary. Raises InputError."""
    if graph.captured is None or graph.in_structure is None:
        raise InputError("it is not known from which model the graph was captured")
    model, arguments = graph.captured.model, graph.in_structure
    if model is None:
        raise InputError("the model cannot be copied (copy.deepcopy), to be looked at again")
    failure = ""
    with undisturbed(model), torch.set_grad_enabled(graph.captured.records):
        try:
            return _traced(FlatModel(model, arguments), graph, dims, sizes, varying)
        except InputError:
            raise
        except CaptureError as error:
            failure = str(error)
        except Exception as error:
            failure = str(explain(error))
    raise InputError(failure)  # Out there, as a traceback through torch keeps tensors alive.


def _traced(
    flat: FlatModel,
    graph: IRGraph,
    dims: Mapping[str, Dims],
    sizes: Mapping[str, int],
    varying: Sequence[str],
) -> SizeRun:
    _check_same(flat.model, graph)
    mode, answers = fake_mode()
    given: dict[str, Any] = {**sizes, **{name: _symbol(mode, sizes[name]) for name in varying}}
    symbols = {name: expression(given[name]) for name in varying}
    written: list[Source] = []
    for name in varying:
        watch_symbol(given[name], partial(_note_text, written))
    inputs = _inputs(mode, graph, dims, given)
    device = inputs[0].device if inputs else torch.device("cpu")
    stored = [fake for _, _, fake in let_stand_in(flat.model, mode, device)]
    log, flow = CallLog(), _SizeFlow()
    log.note("begin", None, (stored, inputs))
    with on_fakes(mode), flow, log:
        results = flat(*inputs)
    log.note("end", results, None)
    if written:
        raise InputError(f"{line_before(written[0])}the model makes a text or a key of a size")
    lines = answers.lines
    guards = [(guard.expr, lines.get(place)) for place, guard in enumerate(answers.guards)]
    return SizeRun(symbols, guards, log, flow, flat.result, [*map(_dims_of, results)])


def _note_text(written: list[Source], frame: FrameType | None) -> None:
    """Note the line of a program that makes a text or a key of a size."""
    if frame is None or not is_of_program(frame.f_code.co_filename):
        return
    if frame.f_globals.get("__name__", "").partition(".")[0] not in KEYS_DO_NOT_MATTER:
        written.append(Source(frame.f_code.co_filename, frame.f_lineno))


def _check_same(model: nn.Module, graph: IRGraph) -> None:
    """Raise InputError where a model is not what it was when it was captured."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    changed = [
        name
        for value in graph.stored()
        for name in value.names
        if name in held and (tuple(held[name].shape), held[name].dtype) != _shape_and_dtype(value)
    ]
    if changed or model.training != graph.training:
        what = f"its {changed[0]!r}" if changed else "its mode"
        raise InputError(f"the model was changed after it was captured: {what}")


def _shape_and_dtype(value: IRValue) -> tuple[tuple[int, ...], torch.dtype]:
    return value.shape, torch_dtype(value.dtype)


def _symbol(mode: FakeTensorMode, size: int) -> torch.SymInt:
    """A new symbol that stands for a size of 2 or more."""
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[None]
    )
    made: Any = mode.from_tensor(torch.empty(size, device="meta"), symbolic_context=context).shape[
        0
    ]
    return made  # type: ignore[no-any-return]


def _inputs(
    mode: FakeTensorMode, graph: IRGraph, dims: Mapping[str, Dims], sizes: Mapping[str, Size]
) -> list[torch.Tensor]:
    """Fake inputs of these sizes."""
    assert graph.in_structure is not None
    made = []
    for leaf, value_id in zip(leaves(graph.in_structure), graph.inputs, strict=True):
        value = graph.values[value_id]
        shape: list[Size] = [*value.shape]
        for name, of in dims.items():
            for dim in of.get(leaf.name, ()):
                shape[dim] = sizes[name]
        with mode:
            made.append(torch.empty(shape, dtype=torch_dtype(value.dtype), device=value.device))
    return made


# --- what a run notes -----------------------------------------------------------------------------


class _SizeFlow(TorchDispatchMode):
    """Notes where sizes that vary go, and refuses to compute with them.

    ``ends`` are the dimensions with symbols of what each line's operators make of these.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ends: dict[Source | None, dict[str, dict[sympy.Symbol, set[int]]]] = {}
        self.squared: dict[sympy.Symbol, str] = {}
        self.counts: Counter[tuple[Source | None, str]] = Counter()

    def ends_of(self, symbol: sympy.Symbol) -> Ends:
        """The dimensions with one symbol."""
        return {
            line: {name: frozenset(dims.get(symbol, ())) for name, dims in by_name.items()}
            for line, by_name in self.ends.items()
        }

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {a.name: v for a, v in zip(schema_of(func).arguments, args, strict=False)}
        given |= kwargs or {}
        ends = _symbolic([given.pop(name) for name in ENDS & given.keys()])
        if not all(map(_is_length, ends)) or _symbolic(given):
            raise refuse_here(f"the model computes with a size that varies, in {func}")
        result = func(*args, **(kwargs or {}))
        line = line_of_program(sys._getframe(1))
        self.counts[line, operator_of(func)] += 1
        noted = self.ends.setdefault(line, {}).setdefault(operator_of(func), defaultdict(set))
        for tensor in tensors_in(result):
            for symbol, dims in _dims_of(tensor).items():
                if len(dims) > 1:
                    where = f"{line_before(line)}{func} makes a tensor that has the size twice"
                    self.squared.setdefault(symbol, where)
                if ends:
                    noted[symbol].update(dims)
        return result


def _symbolic(items: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(items) if isinstance(leaf, SYMBOLS)]


def _is_length(number: Any) -> bool:
    """Whether a number is a polynomial of sizes: nothing is rounded."""
    return isinstance(number, torch.SymInt) and bool(number.node.expr.is_polynomial())


def _dims_of(tensor: torch.Tensor) -> dict[sympy.Symbol, list[int]]:
    """The dimensions of a tensor that have each symbol; one with a square of it has it twice."""
    found: dict[sympy.Symbol, list[int]] = defaultdict(list)
    for dim, size in enumerate(tensor.shape):
        for number in _symbolic([size]):
            for symbol in number.node.expr.free_symbols:
                power = sympy.degree(number.node.expr, symbol) if _is_length(number) else 1
                found[symbol] += [dim] * power
    return found
