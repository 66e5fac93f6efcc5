"""A program traced on fake tensors, so that the model is left as it was and nothing is printed.

Comes in: a flat model and the tensors of a call. Goes out: the ATen calls that it makes, and what
they take beside the arguments, or a CaptureError. What always holds: modules' attributes,
parameters, buffers, hooks and modes are afterwards what they were; captures wait for each other,
since torch's tracing keeps some of its state for all threads, and nothing else waits for them.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import nn
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode

from shardwright.errors import CaptureError
from shardwright.ir.values import Source
from shardwright.torch_internals import (
    DETECTS_CAUSAL_MASK,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    TracingContext,
    compiling_here,
    enable_python_dispatcher,
    never_compiled,
    tracing,
)
from shardwright.tracing.empty_weights import check_buffers
from shardwright.tracing.failures import (
    CONTROL_FLOW,
    FLEX_ATTENTION,
    CaptureWarning,
    explain,
    is_of_program,
    line_before,
)
from shardwright.tracing.flat import FlatModel
from shardwright.tracing.functions import drop_failed_backwards, traces_functions
from shardwright.tracing.memory import Owner
from shardwright.tracing.origins import note_of, refuse_here, take_note
from shardwright.tracing.unchanged import model_unchanged
from shardwright.tracing.wrapped import parts_of, with_parts

# What they say is in the CaptureError.
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
_captures = threading.RLock()


def one_at_a_time() -> AbstractContextManager[object]:
    """Waits until no other thread captures; the thread that captures does not wait for itself."""
    return _captures


class TracedConstant(NamedTuple):
    """A tensor that is neither given nor stored; ``spec`` is what was traced in its place."""

    name: str
    tensor: torch.Tensor
    spec: torch.Tensor


@dataclass(frozen=True)
class TracedProgram:
    """The calls of a flat model.

    The graph's placeholders are the tensors ``stored``, by their paths in the model, then the
    inputs; ``constants`` are what its other tensors are, by the targets of ``get_attr`` nodes.
    ``left_out`` are lines that look at contents only to raise, or for nothing.
    """

    graph: torch.fx.Graph
    stored: tuple[tuple[str, Owner], ...]
    constants: dict[str, TracedConstant]
    left_out: tuple[Source, ...]


def export_flat(
    flat: FlatModel, tensors: list[torch.Tensor], *, stacklevel: int = 2
) -> TracedProgram:
    """The program of ``flat`` on tensors like ``tensors``. Raises CaptureError.

    Warnings are of the line ``stacklevel`` frames up, 1 being the caller's.
    """
    program, failure = None, ""
    with ExitStack() as stack:
        stack.enter_context(one_at_a_time())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(model_unchanged(flat.model))
        stack.enter_context(_quiet())
        stack.enter_context(traces_functions())
        try:
            program = _traced(flat, tensors)
        except CaptureError as error:
            failure = str(error)
        except Exception as error:
            failure = str(explain(error))
    if program is None:  # raised here: a traceback through torch keeps the tracer's tensors alive
        raise CaptureError(failure)
    for source in program.left_out:
        warnings.warn(
            f"{line_before(source)}this looks at the contents of a tensor, of which a graph knows "
            "nothing, and only checks them: the graph goes on without the check",
            CaptureWarning,
            stacklevel=stacklevel + 1,
        )
    return program


def _traced(flat: FlatModel, tensors: list[torch.Tensor]) -> TracedProgram:
    check_buffers(flat.model)
    mode, answers = fake_mode()
    names = _attribute_names(flat.model)
    device = tensors[0].device if tensors else torch.device("cpu")
    stored = _let_stand_in(flat.model, mode, device)
    arguments = [_like(mode, index, tensor) for index, tensor in enumerate(tensors)]
    traced = trace(flat.forward, arguments, [fake for _, _, fake in stored], mode)
    constants = dict(_constants(traced, mode, names))
    return TracedProgram(
        traced.graph,
        tuple((path, owner) for path, owner, _ in stored),
        constants,
        tuple(sorted(traced.looked | answers.left_out, key=str)),
    )


def _let_stand_in(
    model: nn.Module, mode: FakeTensorMode, device: torch.device
) -> list[tuple[str, Owner, torch.Tensor]]:
    """Put a fake tensor in the place of each parameter and buffer; tied ones are one again.

    One that holds several gets fakes of these.
    Those on meta are traced as if they were on ``device``. Gives them by their first paths.
    """
    fakes: dict[int, torch.Tensor] = {}
    found: list[tuple[str, Owner, torch.Tensor]] = []
    owners: tuple[tuple[Owner, str], ...] = (("param", "_parameters"), ("buffer", "_buffers"))
    for owner, holder in owners:
        for path, module in model.named_modules():
            held: dict[str, torch.Tensor | None] = getattr(module, holder)
            for key, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    place = f"{path}.{key}" if path else key
                    parts = [(n, _fake(mode, part, device)) for n, part in parts_of(place, tensor)]
                    found += [(name, owner, fake) for name, fake in parts]
                    fakes[id(tensor)] = with_parts(tensor, iter([fake for _, fake in parts]))
                held[key] = fakes[id(tensor)]
    return found


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
        return fake
    with mode:
        empty = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)


def _like(mode: FakeTensorMode, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """An argument: of its tensor's kind, sharing memory with none. Raises CaptureError."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise CaptureError(
            f"input tensor number {index} has the layout {tensor.layout}; graphs hold dense "
            "tensors only, so pass its dense parts"
        )
    with mode:
        return torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )


# --- constants -------------------------------------------------------------------------------


def _attribute_names(model: nn.Module) -> dict[int, str]:
    """Paths of the tensors that modules hold as plain attributes, by id."""
    return {
        id(item): f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, item in vars(module).items()
        if isinstance(item, torch.Tensor)
    }


def _constants(
    traced: Traced, mode: FakeTensorMode, names: dict[int, str]
) -> Iterator[tuple[str, TracedConstant]]:
    numbers = itertools.count()
    for target, tensor in traced.constants.items():
        name = names.get(id(tensor)) or f"lifted_tensor_{next(numbers)}"
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} was taken past torch's operators, as by "
                "`x.data`: use x.detach()"
            )
        yield target, TracedConstant(name, tensor, mode.from_tensor(tensor, static_shapes=True))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines that torch writes in this thread about what a CaptureError says."""
    here = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != here

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_of_another_thread)


# --- tracing --------------------------------------------------------------------------------------
#
# Nothing that another thread can see is changed, but for `torch.compiler.is_compiling`, which is
# true in this thread and false in every other.
#
# torch.export traces with the same modes, but while it does `nn.Module.__call__` and `__getattr__`,
# builtins and flags of the compiler are replaced for all threads, and optimizers that step in one
# of them compute otherwise. The modes are of a thread; what reads modules and lines is `origins`.


@dataclass(frozen=True)
class Traced:
    """The calls of one run.

    ``constants`` are tensors that it used and was not given, by name; ``looked`` are the lines
    that took a number out of a tensor which nothing in the graph needs.
    """

    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    looked: frozenset[Source]


def trace(
    function: Callable[..., Sequence[torch.Tensor]],
    arguments: Sequence[torch.Tensor],
    stored: Iterable[torch.Tensor],
    mode: FakeTensorMode,
) -> Traced:
    """The calls that ``function(*arguments)`` makes.

    ``arguments`` and the tensors ``stored``, which the function reaches in its own ways, are fake
    ones of ``mode``; the graph has a placeholder for each, the stored ones first.
    """
    tracer = _Tracer()
    given = [*stored, *arguments]
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(mode)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(compiling_here())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(PreDispatchTorchFunctionMode(tracer))
        stack.enter_context(_WithoutControlFlow())
        stack.enter_context(ProxyTorchDispatchMode(tracer, "real", pre_dispatch=True))
        stack.enter_context(disable_autocast_cache())
        with disable_proxy_modes_tracing():
            proxies = [
                tracer.create_proxy("placeholder", f"given_{index}", (), {})
                for index in range(len(given))
            ]
            track_tensor_tree(given, proxies, constant=None, tracer=tracer)
        made = function(*arguments)
        nodes = [get_proxy_slot(tensor, tracer, tensor, _proxy_of) for tensor in made]
        tracer.create_node("output", "output", (tracer.create_arg(nodes),), {})
    drop_failed_backwards(tracer.graph)
    looked = frozenset(_drop_unused_numbers(tracer.graph))
    return Traced(tracer.graph, dict(_constants_of_tracer(tracer.root)), looked)


class _WithoutControlFlow(TorchFunctionMode):
    """Refuses functions that run others under control of a tensor."""

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            is_flex = func.name().startswith("flex_attention")
            raise refuse_here(f"torch.{func.name()}: {FLEX_ATTENTION if is_flex else CONTROL_FLOW}")
        return func(*args, **(kwargs or {}))


class _Tracer(PythonKeyTracer):
    """Makes the nodes of one graph, and takes a note on each."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Module()
        self.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
        self.tensor_attrs: dict[Any, str] = {}

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        if node.op == "call_function":
            take_note(node, sys._getframe(1))
        return node


def _proxy_of(tracked: Any) -> Any:
    return tracked.proxy


def _constants_of_tracer(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for held in (root._parameters, root._buffers, vars(root)):
        yield from ((k, v) for k, v in held.items() if isinstance(v, torch.Tensor))


def _drop_unused_numbers(graph: torch.fx.Graph) -> set[Source]:
    """Drop numbers taken out of tensors, and what is computed with them, where nothing needs it.

    Gives the lines of which all are dropped.
    """
    dropped, kept = set(), set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not _is_number(node.meta.get("val")):
            continue
        note = note_of(node)
        source = None if note is None else note.source
        if node.users:
            kept.add(source)
        else:
            dropped.add(source)
            graph.erase_node(node)
    return {source for source in dropped - kept if source is not None}


def _is_number(made: Any) -> bool:
    return isinstance(made, (torch.SymInt, torch.SymFloat, torch.SymBool))


# --- branches on values ---------------------------------------------------------------------------
#
# A question about the contents of a fake tensor, asked by Python (``if``, ``assert``), gets the
# answer that lets the program go on, where the other one only raises; torch's own error where both
# go on, since a graph has one path. A check that is left out so is among `Answers.left_out`.
#
#     if not torch.isfinite(loss).all(): raise ...     as if it were finite
#     assert labels.max() < 10                         as if it held
#     nn.Transformer looking whether a mask is causal  as if it were not: the mask is used as it is


_ANSWERS: dict[CodeType, bool] = {DETECTS_CAUSAL_MASK: False}
"""torch's questions of which either answer gives the same result."""


class Answers(ShapeEnv):
    """What a `FakeTensorMode` knows of numbers, with answers where contents decide nothing."""

    def __init__(self) -> None:
        super().__init__(tracked_fakes=[])
        self.left_out: set[Source] = set()

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """The value of an expression. Raises GuardOnDataDependentSymNode."""
        try:
            return super().evaluate_expr(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            answer = self._answer(sys._getframe(1))
            if answer is None:
                raise
            return answer

    def _answer(self, asked: FrameType | None) -> bool | None:
        frame = asked
        while frame is not None:
            if frame.f_code in _ANSWERS:
                return _ANSWERS[frame.f_code]
            if is_of_program(frame.f_code.co_filename):
                source = Source(frame.f_code.co_filename, frame.f_lineno)
                answer = harmless_answer(source)
                if answer is not None:
                    self.left_out.add(source)
                return answer
            frame = frame.f_back
        return None


def fake_mode() -> tuple[FakeTensorMode, Answers]:
    """A mode that makes fake tensors of a program, and what it answers about their contents."""
    answers = Answers()
    mode = FakeTensorMode(shape_env=answers, allow_non_fake_inputs=True, export=True)
    return mode, answers


def harmless_answer(source: Source) -> bool | None:
    """What a truth value at a line must be for the program not to raise there.

    None where the line is no such check: both of its ways go on.
    """
    for statement in _statements(source.file):
        test = getattr(statement, "test", None)
        if test is None or not test.lineno <= source.line <= (test.end_lineno or 0):
            continue
        wanted = _wanted(statement)
        signs = set(_signs(test))
        if wanted is None or len(signs) != 1:
            return None
        return wanted is signs.pop()
    return None


def _statements(file: str) -> Iterator[ast.stmt]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook's cell with magic, or no Python at all
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.Assert)))


def _wanted(statement: ast.stmt) -> bool | None:
    """What the test must be for the statement not to raise; None where it may go on either way."""
    if isinstance(statement, ast.Assert):
        return True
    assert isinstance(statement, ast.If)
    if _only_raises(statement.body):
        return False
    return True if _only_raises(statement.orelse) else None


def _only_raises(body: list[ast.stmt]) -> bool:
    leaves = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Try)
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    return not any(isinstance(node, leaves) for part in body for node in ast.walk(part))


def _signs(test: ast.expr, sign: bool = True) -> Iterator[bool]:
    """For each truth value that a test is made of, whether the test is true where it is."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _signs(part, sign)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _signs(test.operand, not sign)
    else:
        yield sign
