"""Tracing a function of tensors to ATen calls before autograd, in this thread alone.

Comes in: a function, and fake tensors that stand for its arguments. Goes out: an fx graph of the
ATen calls that it makes, with a note of its origin on each node. What always holds: nothing that
another thread can see is changed, but for `torch.compiler.is_compiling`, which is true in this
thread and false in every other.

torch.export traces with the same modes, but while it does `nn.Module.__call__` and `__getattr__`,
builtins and flags of the compiler are replaced for all threads, and optimizers that step in one of
them compute otherwise. The modes are of a thread; what reads modules and lines is `origins`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

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
from torch.overrides import TorchFunctionMode

from shardwright.ir.values import Source
from shardwright.torch_internals import (
    FakeTensorMode,
    HigherOrderOperator,
    TracingContext,
    compiling_here,
    enable_python_dispatcher,
    never_compiled,
    tracing,
)
from shardwright.tracing.failures import CONTROL_FLOW, FLEX_ATTENTION
from shardwright.tracing.functions import drop_failed_backwards
from shardwright.tracing.origins import note_of, refuse_here, take_note


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
    return Traced(tracer.graph, dict(_constants(tracer.root)), looked)


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


def _constants(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
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
