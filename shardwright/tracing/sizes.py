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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from shardwright.errors import CaptureError, InputError
from shardwright.ir.graph import IRGraph
from shardwright.ir.structure import Tree, leaves
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ir.values import IRValue, Source
from shardwright.ops.independence import Ends
from shardwright.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    never_compiled,
    operator_of,
    schema_of,
    tree_leaves,
)
from shardwright.tracing.failures import explain, line_before
from shardwright.tracing.flat import FlatModel
from shardwright.tracing.origins import line_of_program, refuse_here
from shardwright.tracing.tracer import fake_mode, let_stand_in, on_fakes, undisturbed

Dims = Mapping[str, Sequence[int]]
"""The dimensions of inputs that have a size, by input."""
Size = int | torch.SymInt
Symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
Call = tuple[Any, list[Any], list[Any]]
"""A function of torch, what it took and what it gave; of tensors, dtypes and shapes."""
PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
Guard = tuple[sympy.Basic, Source | None]
EXPANDING = {torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to}
ENDS = {"size", "shape", "end"}
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
    """

    least: int = 1
    ends: Ends = field(default_factory=dict)
    squared: str = ""


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
    if not _is_alike(graph, dims, own, symbolic):
        raise InputError("the model makes other calls where its sizes vary")
    found = {name: SizeTrace() for name in own}
    for name, symbol in symbols.items():
        least = _least(symbolic.guards, symbol, name, own[name])
        if least == 2:
            least = 1 if _is_alike(graph, dims, {**own, name: 1}, symbolic) else 2
        found[name] = SizeTrace(
            least, symbolic.flow.ends_of(symbol), symbolic.flow.squared.get(symbol, "")
        )
    return found


def _is_alike(
    graph: IRGraph, dims: Mapping[str, Dims], sizes: Mapping[str, int], symbolic: SizeRun
) -> bool:
    """Whether the model runs with these sizes, and does what it does with symbols for them."""
    try:
        run = _run(graph, dims, sizes)
    except InputError:
        return False
    numbers = {symbol: sizes[name] for name, symbol in symbolic.symbols.items()}
    same_calls = run.calls_at({}) == symbolic.calls_at(numbers)
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
            raise InputError(f"{line_before(line)}the model asks for the size itself, {text}")
    return least


# --- a run --------------------------------------------------------------------------------------


@dataclass(slots=True)
class SizeRun:
    """What a model did on fake tensors.

    symbols
        Of the sizes that had one.
    guards
        What was asked about them and was true, and by which lines.
    calls
        Functions of torch, with what they took and gave.
    result
        Its structure.
    flow
        Where the symbols went.
    """

    symbols: dict[str, sympy.Symbol]
    guards: Sequence[Guard]
    calls: list[Call]
    result: Tree | None
    flow: _SizeFlow

    def calls_at(self, sizes: Mapping[sympy.Symbol, int]) -> list[Call]:
        """The calls with numbers in the place of symbols, and of tensors in order.

        Those that only expand a tensor to the shape that it has are left out.
        """
        numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        places: dict[int, int] = defaultdict(count().__next__)
        found: list[Call] = []
        for function, taken, made in self.calls:
            taken, made = _at(taken, numbers), _at(made, numbers)
            if function in EXPANDING and made[0].shape == taken[0].shape:
                places[made[0].id] = places[taken[0].id]
            else:
                found.append((function, _placed(taken, places), _placed(made, places)))
        return found


class TensorNote(NamedTuple):
    """A tensor that a call took or gave."""

    id: int
    is_fake: bool
    dtype: torch.dtype
    shape: tuple[Any, ...]


def _at(items: Sequence[Any], numbers: Mapping[sympy.Symbol, sympy.Integer]) -> list[Any]:
    """Items with numbers in the place of symbols."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, TensorNote):
            found.append(item._replace(shape=tuple(_at(item.shape, numbers))))
        else:
            found.append(item.xreplace(numbers) if isinstance(item, sympy.Basic) else item)
    return found


def _placed(items: Sequence[Any], places: dict[int, int]) -> list[Any]:
    """Items, fake tensors by when they were seen first; others are the same in each run."""
    return [
        item._replace(id=places[item.id]) if isinstance(item, TensorNote) and item.is_fake else item
        for item in items
    ]


def _run(
    graph: IRGraph, dims: Mapping[str, Dims], sizes: Mapping[str, int], varying: Sequence[str] = ()
) -> SizeRun:
    """Run a graph's model with symbols for the sizes that vary. Raises InputError."""
    model, arguments = graph.model, graph.in_structure
    if model is None or arguments is None:
        raise InputError("it is not known from which model the graph was captured")
    failure = ""
    with undisturbed(model):
        try:
            return _traced(FlatModel(model, arguments), graph, dims, sizes, varying)
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
    given: dict[str, Size] = {**sizes, **{name: _symbol(mode, sizes[name]) for name in varying}}
    symbols = {name: _expression(given[name]) for name in varying}
    inputs = _inputs(mode, graph, dims, given)
    device = inputs[0].device if inputs else torch.device("cpu")
    stored = [fake for _, _, fake in let_stand_in(flat.model, mode, device)]
    calls, flow = _CallLog(), _SizeFlow()
    calls.note("begin", None, (stored, inputs))
    with on_fakes(mode), flow, calls:
        results = flat(*inputs)
    calls.note("end", results, None)
    lines = answers.lines
    guards = [(guard.expr, lines.get(place)) for place, guard in enumerate(answers.guards)]
    return SizeRun(symbols, guards, calls.calls, flat.result, flow)


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


class _CallLog(TorchFunctionMode):
    """Notes the calls of torch that a program makes, as it writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._kept: list[Any] = []

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if result is None or _tensors(result):  # Others ask something about a tensor.
            self.note(func, (args, kwargs), result)
        return result

    def note(self, function: Any, taken: Any, made: Any) -> None:
        """Note a call."""
        self.calls.append((function, [*_noted(taken)], [*_noted(made)]))
        self._kept.append((taken, made))  # Other tensors could have the ids of these.


def _noted(items: Any) -> Iterator[Any]:
    """What calls are compared by."""
    for item in tree_leaves(items):
        if isinstance(item, torch.Tensor):
            shape = tuple(map(_expression, item.shape))
            yield TensorNote(id(item), isinstance(item, FakeTensor), item.dtype, shape)
        elif isinstance(item, torch.Size):
            yield from map(_expression, item)
        elif isinstance(item, slice):
            yield from _noted((item.start, item.stop, item.step))
        elif isinstance(item, (*Symbols, *PLAIN)):
            yield _expression(item)
        else:
            yield type(item)


def _expression(number: Any) -> Any:
    """A symbol's expression; another number itself."""
    return number.node.expr if isinstance(number, Symbols) else number


class _SizeFlow(TorchDispatchMode):
    """Notes where sizes that vary go, and refuses to compute with them.

    ``ends`` are the dimensions with symbols of what each line's operators make of these.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ends: dict[Source | None, dict[str, dict[sympy.Symbol, set[int]]]] = {}
        self.squared: dict[sympy.Symbol, str] = {}

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
        noted = self.ends.setdefault(line, {}).setdefault(operator_of(func), defaultdict(set))
        for tensor in _tensors(result):
            for symbol, dims in _dims_of(tensor).items():
                if len(dims) > 1:
                    where = f"{line_before(line)}{func} makes a tensor that has the size twice"
                    self.squared.setdefault(symbol, where)
                if ends:
                    noted[symbol].update(dims)
        return result


def _tensors(items: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(items) if isinstance(leaf, torch.Tensor)]


def _symbolic(items: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(items) if isinstance(leaf, Symbols)]


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
