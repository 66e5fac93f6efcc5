"""`torch.autograd.Function`s: their backward, traced where they are applied.

The traced program has a Function's forward, run without gradients as torch runs it, then between
two calls (`BEGIN`, `END`) its backward on gradients that are any; in the graph a call of
`with_backward`, which names that backward as a graph. A gradient that reaches a Function's outputs
goes through its own backward, and where that cannot be traced, whoever differentiates gets an
error.

Torch offers no hook for `Function.apply`. While any thread captures it is replaced by one that asks
whether the calling thread does, and does what it did where not.

A reentrant checkpoint is a Function too. Its backward is by definition the gradient of its forward,
so that is what the graph has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from shardwright.errors import CaptureError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.operators import resolve
from shardwright.ir.with_backward import WITH_BACKWARD, name_backward
from shardwright.torch_internals import backward_class, never_compiled, set_backward_class
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.failures import line_before
from shardwright.tracing.memory import ProgramMemory, TensorView, TracedStorage

AUTOCAST_DEVICES = ("cpu", "cuda")

_LIBRARY = torch.library.Library("shardwright_function", "DEF")
_LIBRARY.define("begin(Tensor[] made) -> Tensor[]")
_LIBRARY.define(
    "end(Tensor[] made, Tensor[] inputs, Tensor[] gradients, str name, bool fills, str failure)"
    " -> ()"
)


def _begin(made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in made]


def _end(*args: Any) -> None:
    return None


for _name, _function in (("begin", _begin), ("end", _end)):
    torch.library.register_fake(f"shardwright_function::{_name}", _function, lib=_LIBRARY)
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")

BEGIN = torch.ops.shardwright_function.begin.default
END = torch.ops.shardwright_function.end.default
torch.fx.node.has_side_effect(BEGIN)
torch.fx.node.has_side_effect(END)


# --- while the program is traced ------------------------------------------------------------------

_OPERATORS_WITH_BACKWARD = "torch._library.autograd"
"""The module of the Functions that torch makes for operators: the graph has the operator."""


class _Thread(threading.local):
    """Whether this thread captures, and its checkpoints: whether gradients were recorded there."""

    capturing = False
    checkpoints: tuple[bool, ...] = ()


_thread = _Thread()
_lock = threading.Lock()
_apply = Function.__dict__["apply"]
_captures = 0


@contextmanager
def traces_functions() -> Iterator[None]:
    """Inside, this thread traces the backward of each Function that it applies."""
    global _captures
    with _lock:
        _captures += 1
        Function.apply = classmethod(_applied)  # type: ignore[method-assign,assignment]
    before, _thread.capturing = _thread.capturing, True
    try:
        yield
    finally:
        _thread.capturing = before
        with _lock:
            _captures -= 1
            if not _captures:
                Function.apply = _apply  # type: ignore[method-assign]


def records_gradients() -> bool:
    """Whether the program records gradients here; a checkpoint's forward does as it was called."""
    return _thread.checkpoints[0] if _thread.checkpoints else torch.is_grad_enabled()


def _unpatched(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """What `Function.apply` is by itself: a class method, in newer releases one written in C."""
    return _apply.__get__(None, cls)(*args, **kwargs)


def _applied(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """What `Function.apply` is while any thread captures."""
    if not _thread.capturing or cls.__module__ == _OPERATORS_WITH_BACKWARD:
        return _unpatched(cls, *args, **kwargs)
    if cls is CheckpointFunction:
        before, _thread.checkpoints = (
            _thread.checkpoints,
            (*_thread.checkpoints, torch.is_grad_enabled()),
        )
        try:
            return _unpatched(cls, *args, **kwargs)
        finally:
            _thread.checkpoints = before
    if not torch.is_grad_enabled():
        return _unpatched(cls, *args, **kwargs)
    return _traced(cls, args, kwargs)


def _traced(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a Function, and trace its backward behind it."""
    known = type(cls.__name__, (cls,), {"__module__": cls.__module__})
    context = type(f"{cls.__name__}Backward", (_Context, backward_class(known)), {})
    set_backward_class(known, context)
    made = _unpatched(known, *args, **kwargs)
    results = made if isinstance(made, tuple) else (made,)
    wanted = [item for item in results if isinstance(item, torch.Tensor) and item.requires_grad]
    if not wanted:
        return made
    if not all(isinstance(item.grad_fn, context) for item in wanted):
        raise CaptureError(
            f"{cls.__qualname__} writes to a view of another tensor (ctx.mark_dirty), through "
            "which a graph has no gradient; let it return a new tensor"
        )
    ctx: Any = wanted[0].grad_fn
    given = _bound(cls, args, kwargs)
    inputs: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    failure = ""
    with torch.no_grad(), _no_autocast():
        seeds = iter(BEGIN(wanted))
        handed = [
            next(seeds) if any(item is one for one in wanted) else _without(item, fills=ctx.fills)
            for item in results
        ]
        try:
            with _TracedBackward():
                found = ctx.apply(*handed)
                fitting = list(_pairs(ctx, given, found))
            inputs, gradients = [x for x, _ in fitting], [g for _, g in fitting]
        except Exception as error:  # whatever a user's function raises
            failure = " ".join(str(error).split())[:300] or type(error).__name__
            pairs = zip(given, ctx.needs_input_grad, strict=False)
            inputs, gradients = [x for x, needed in pairs if needed], []
        fills = ctx.fills or len(wanted) == 1
        END(wanted, inputs, gradients, cls.__qualname__, fills, failure)
    ctx.kept = ()
    return made


class _Context:
    """What a Function's ``ctx`` has while a capture runs: tensors come back as they were saved."""

    kept: tuple[torch.Tensor | None, ...] = ()
    fills = True

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """As torch's."""
        self.kept = tensors
        super().save_for_backward(*tensors)  # type: ignore[misc]

    def set_materialize_grads(self, value: bool) -> None:
        """As torch's."""
        self.fills = value
        super().set_materialize_grads(value)  # type: ignore[misc]

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The very tensors; torch's own may be others that torch.export has not seen."""
        return self.kept

    saved_variables = saved_tensors


class _TracedBackward(TorchFunctionMode):
    """Refuses a backward that differentiates something itself."""

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            raise CaptureError(
                "it runs torch.autograd inside; write the gradient out, or use torch.utils."
                "checkpoint where that is what it is for"
            )
        return func(*args, **(kwargs or {}))


def _bound(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments as torch numbers them: defaults are filled in beside a ``setup_context``."""
    if cls.setup_context is Function.setup_context:
        return args
    found = signature(cls.forward).bind(*args, **kwargs)
    found.apply_defaults()
    return found.args


def _without(item: Any, *, fills: bool) -> torch.Tensor | None:
    """What a backward is given for an output that has no gradient."""
    return torch.zeros_like(item) if fills and isinstance(item, torch.Tensor) else None


def _pairs(
    ctx: Any, given: Sequence[Any], found: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and their gradients, made as autograd makes them fit. Raises ValueError."""
    found = found if isinstance(found, tuple) else (found,)
    count = len(ctx.needs_input_grad)
    if len(found) < count or any(item is not None for item in found[count:]):
        raise ValueError(f"it gives {len(found)} gradients for {count} arguments")
    for x, gradient, needed in zip(given, found, ctx.needs_input_grad, strict=False):
        if needed and gradient is not None:
            if gradient.shape != x.shape:
                gradient = gradient.sum_to_size(x.shape)
            yield x, gradient if gradient.dtype == x.dtype else gradient.to(x.dtype)


@contextmanager
def _no_autocast() -> Iterator[None]:
    """A backward runs where ``backward()`` is called, which is outside of an autocast."""
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                torch.set_autocast_enabled(device, False)
                stack.callback(torch.set_autocast_enabled, device, True)
        yield


def drop_failed_backwards(graph: torch.fx.Graph) -> None:
    """Take what was traced of backwards that failed out of a graph."""
    failed = False
    for node in reversed(graph.nodes):
        if node.target is END:
            failed = bool(node.args[5])
        elif node.target is BEGIN:
            failed = False
        elif failed and not node.users:
            graph.erase_node(node)


# --- while it is functionalized -------------------------------------------------------------------


class Backwards:
    """Turns the calls between `BEGIN` and `END` into the graph of a backward."""

    def __init__(self, emitter: GraphEmitter, memory: ProgramMemory) -> None:
        self._emitter = emitter
        self._memory = memory
        self._start = 0
        self._seeds: list[IRValue] = []
        self._versions: dict[TracedStorage, int] = {}
        self._made_up: list[tuple[int, str]] = []
        """Nodes in place of gradients, which nothing may need in the end, and of what."""
        self._inside = False
        self._failure = ""

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Inside, a node of the program is emitted; in a backward it may fail."""
        try:
            yield
        except CaptureError as error:
            if not self._inside:
                raise
            self._failure = str(error)

    def passes_by(self, node: torch.fx.Node) -> bool:
        """Whether a node belongs to a backward that has failed already."""
        return bool(self._failure) and node.target is not END

    def begin(self, specs: Sequence[torch.Tensor]) -> list[TensorView]:
        """Zeros in place of the gradients of what a Function made."""
        self._inside, self._failure = True, ""
        self._start = len(self._emitter.builder.graph.nodes)
        self._versions = self._memory.versions()
        self._seeds = []
        zeros = resolve("aten.zeros.default")
        options = dict.fromkeys(("layout", "device", "pin_memory"))
        for spec in specs:
            attrs = {"size": list(spec.shape), "dtype": spec.dtype, **options}
            self._seeds += self._emitter.emit(zeros, [], attrs, outputs=[spec], name="gradient")
        pairs = zip(specs, self._seeds, strict=True)
        return [self._memory.root(spec, value) for spec, value in pairs]

    def end(self, node: torch.fx.Node, result_of: Callable[[Any], Any]) -> None:
        """Let the tensors that a Function made have the backward that was traced.

        ``result_of`` gives the results of the program's nodes.
        """
        emitter, memory, graph = self._emitter, self._memory, self._emitter.builder.graph
        name, fills = node.args[3:5]
        failure = str(node.args[5]) or self._failure
        self._failure, self._inside = "", False
        made, inputs = result_of(node.args[0]), result_of(node.args[1])
        gradients = [] if failure else result_of(node.args[2])
        found = [memory.read(tensor) for tensor in gradients]
        changed = memory.versions()
        if any(changed[storage] != before for storage, before in self._versions.items()):
            raise emitter.refuse(
                f"the backward of {name} writes to a tensor that it did not make; let it return "
                "gradients alone"
            )
        nodes = graph.nodes[self._start :]
        self._made_up += [
            (node.id, f"{line_before(emitter.source)}the backward of {name}")
            for node in nodes[: len(self._seeds)]
        ]
        emitter.records = True  # as it did where the Function was applied
        backward, saved = _extract(graph, nodes, [value.id for value in self._seeds], found)
        after = emitter.call(
            WITH_BACKWARD,
            [_dense(emitter, memory.read(tensor)) for tensor in made],
            [memory.read(tensor) for tensor in inputs],
            [graph.values[value_id] for value_id in saved],
            name,
            name_backward(backward),
            fills,
            failure,
        )
        if not inputs:  # nothing gets a gradient, but the program goes on as if
            emitter.let_flow(*after)
        for tensor, value in zip(made, after, strict=True):
            memory.settle(tensor, value)

    def check(self) -> None:
        """Raise CaptureError where what is left of the graph needs a gradient as a number."""
        left = {node.id for node in self._emitter.builder.graph.nodes}
        for node_id, what in self._made_up:
            if node_id in left:
                raise CaptureError(
                    f"{what} draws random numbers, or hands on what it computes by another way "
                    "than its result; a graph has gradients in the backward alone"
                )


def _dense(emitter: GraphEmitter, value: IRValue) -> IRValue:
    """The value, copied where its elements are apart or share memory."""
    if value.meta.is_dense:
        return value
    return emitter.one("aten.clone.default", value, memory_format=torch.contiguous_format)


def _extract(
    graph: IRGraph, nodes: Sequence[IRNode], seeds: Sequence[int], found: Sequence[IRValue]
) -> tuple[IRGraph, list[int]]:
    """A backward as a graph, and what it reads beside gradients: values made before ``nodes``."""
    live = {value.id for value in found}
    needed = []
    for node in reversed(nodes[len(seeds) :]):
        if not live.isdisjoint(node.outputs):
            needed.append(node)
            live.difference_update(node.outputs)
            live.update(node.inputs)
    saved = sorted(live.difference(seeds))
    builder = Builder("backward")
    mapping: dict[int, IRValue] = {}
    for name, value_ids in (("g", seeds), ("s", saved)):
        for value_id in value_ids:
            meta = graph.values[value_id].meta
            mapping[value_id] = builder.input(name, meta.shape, meta.dtype, strides=meta.strides)
    for node in reversed(needed):
        for value_id in node.outputs:
            meta = graph.values[value_id].meta
            mapping[value_id] = builder.value("v", meta.shape, meta.dtype, strides=meta.strides)
        outputs = [None if value_id is None else mapping[value_id] for value_id in node.results]
        builder.emit(node.op, [mapping[v] for v in node.inputs], node.attrs, outputs=outputs)
    return builder.finish([mapping[value.id] for value in found]), saved
