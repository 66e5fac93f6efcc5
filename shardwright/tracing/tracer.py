"""A program traced on fake tensors: the ATen calls that it makes, and what they take.

The model is left as it was, and nothing is printed. Captures wait for each other, since torch's
tracing keeps some of its state for all threads, and nothing else waits for them.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
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
from shardwright.tracing.calls import CallLog
from shardwright.tracing.closures import model_unchanged
from shardwright.tracing.failures import (
    CONTROL_FLOW,
    FLEX_ATTENTION,
    CaptureWarning,
    explain,
    harmless_answer,
    is_of_program,
    line_before,
)
from shardwright.tracing.flat import FlatModel, parts_of, with_parts
from shardwright.tracing.functions import drop_failed_backwards, traces_functions
from shardwright.tracing.memory import Owner
from shardwright.tracing.origins import line_of_program, note_of, refuse_here, take_note

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
    ``left_out`` are lines that look at contents only to raise, or for nothing; ``calls`` is the
    hash of the calls of torch that it writes (`CallLog`).
    """

    graph: torch.fx.Graph
    stored: tuple[tuple[str, Owner], ...]
    constants: dict[str, TracedConstant]
    left_out: tuple[Source, ...]
    calls: int


def trace_program(
    flat: FlatModel, tensors: list[torch.Tensor], *, stacklevel: int = 2
) -> TracedProgram:
    """The program of ``flat`` on tensors like ``tensors``. Raises CaptureError.

    Warnings are of the line ``stacklevel`` frames up, 1 being the caller's.
    """
    program, failure = None, ""
    with undisturbed(flat.model):
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


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """While this thread traces ``model``: no other one does, and the model stays as it is."""
    with ExitStack() as stack:
        stack.enter_context(one_at_a_time())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(model_unchanged(model))
        stack.enter_context(_quiet())
        stack.enter_context(traces_functions())
        yield


def _traced(flat: FlatModel, tensors: list[torch.Tensor]) -> TracedProgram:
    _check_buffers(flat.model)
    mode, answers = fake_mode()
    names = _attribute_names(flat.model)
    device = tensors[0].device if tensors else torch.device("cpu")
    stored = let_stand_in(flat.model, mode, device)
    arguments = [_like(mode, index, tensor) for index, tensor in enumerate(tensors)]
    tracer, log = _Tracer(), CallLog()
    _trace(tracer, flat.forward, [fake for _, _, fake in stored], arguments, mode, log)
    drop_failed_backwards(tracer.graph)
    looked = _drop_unused_numbers(tracer.graph)
    return TracedProgram(
        tracer.graph,
        tuple((path, owner) for path, owner, _ in stored),
        dict(_constants(tracer.root, mode, names)),
        tuple(sorted(looked | answers.left_out, key=str)),
        hash(log.calls()),
    )


def _check_buffers(model: nn.Module) -> None:
    """Raise CaptureError where a buffer is on meta: nothing could fill it later."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise CaptureError(
            f"buffer {empty[0]!r} is on the meta device and has no contents"
            f"{f' (and {len(empty) - 1} more)' if len(empty) > 1 else ''}; build the model inside "
            "`with sw.empty_weights():`, which empties parameters only"
        )


def let_stand_in(
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


# --- constants ------------------------------------------------------------------------------------


def _attribute_names(model: nn.Module) -> dict[int, str]:
    """Paths of the tensors that modules hold as plain attributes, by id."""
    return {
        id(item): f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, item in vars(module).items()
        if isinstance(item, torch.Tensor)
    }


def _constants(
    root: nn.Module, mode: FakeTensorMode, names: dict[int, str]
) -> Iterator[tuple[str, TracedConstant]]:
    """Tensors that were used and not given, as a tracer has put them into ``root``."""
    numbers = itertools.count()
    held = {**root._parameters, **root._buffers, **vars(root)}
    for target, tensor in held.items():
        if not isinstance(tensor, torch.Tensor):
            continue
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


@contextmanager
def on_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """The modes that a program runs in on fake tensors, as `torch.export` runs it."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(mode)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(compiling_here())
        stack.enter_context(enable_python_dispatcher())
        yield


def _trace(
    tracer: _Tracer,
    function: Callable[..., Sequence[torch.Tensor]],
    stored: Sequence[torch.Tensor],
    arguments: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    log: CallLog,
) -> None:
    """Record the calls that ``function(*arguments)`` makes.

    ``arguments`` and the tensors ``stored``, which the function reaches in its own ways, are fake
    ones of ``mode``; the graph has a placeholder for each, the stored ones first.
    """
    given = [*stored, *arguments]
    with ExitStack() as stack:
        stack.enter_context(on_fakes(mode))
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
        log.note("begin", None, (stored, arguments))
        with log:
            made = function(*arguments)
        log.note("end", made, None)
        nodes = [get_proxy_slot(tensor, tracer, tensor, attrgetter("proxy")) for tensor in made]
        tracer.create_node("output", "output", (tracer.create_arg(nodes),), {})


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


def _drop_unused_numbers(graph: torch.fx.Graph) -> set[Source]:
    """Drop numbers taken out of tensors, and what is computed with them, where nothing needs it.

    Gives the lines of which all are dropped.
    """
    dropped, kept = set(), set()
    for node in reversed(graph.nodes):
        number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
        if node.op != "call_function" or not number:
            continue
        note = note_of(node)
        source = None if note is None else note.source
        if node.users:
            kept.add(source)
        else:
            dropped.add(source)
            graph.erase_node(node)
    return {source for source in dropped - kept if source is not None}


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
        super().__init__(tracked_fakes=[], duck_shape=False)
        self.left_out: set[Source] = set()
        self.lines: dict[int, Source | None] = {}
        """Which line asked what became a guard, by the guard's place."""

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """The value of an expression. Raises GuardOnDataDependentSymNode."""
        known = len(self.guards)
        try:
            found = super().evaluate_expr(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            answer = self._answer(sys._getframe(1))
            if answer is None:
                raise
            return answer
        if len(self.guards) > known:
            line = line_of_program(sys._getframe(1))
            self.lines |= dict.fromkeys(range(known, len(self.guards)), line)
        return found

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
