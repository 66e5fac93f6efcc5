"""Where a node of an exported graph came from: its modules and its line of the program.

Comes in: torch.export at work. Goes out: `Scope` and `Source` of its nodes. What always holds: the
flat module around the model is in neither; a line is the deepest that is neither torch's nor
ours, inside the model's forward; and equal notes are read once, since a model of many layers has
the same ones again and again.

torch.export notes a line by formatting the whole stack of every call, and keeps frames of
functions named ``forward`` only. `notes_lines` walks the stack up to the line itself: that is
faster, and finds the line in a function that ``forward`` calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.fx
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

from shardwright.ir.values import Scope, Source
from shardwright.tracing.failures import is_of_program, is_ours
from shardwright.tracing.flat import PREFIX

_LINE = "shardwright_line"


@contextmanager
def notes_lines() -> Iterator[None]:
    """Note lines on the nodes that torch.export makes inside, in place of torch's own way."""
    config = torch.fx.config.do_not_emit_stack_traces
    create_node = _ModuleStackTracer.create_node

    def create_node_with_line(self: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = create_node(self, *args, **kwargs)
        node.meta[_LINE] = _line_of_program(sys._getframe(1))
        return node

    _ModuleStackTracer.create_node = create_node_with_line  # type: ignore[method-assign]
    torch.fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        _ModuleStackTracer.create_node = create_node  # type: ignore[method-assign]
        torch.fx.config.do_not_emit_stack_traces = config


def _line_of_program(frame: FrameType | None) -> Source | None:
    while frame is not None and not is_ours(frame.f_code.co_filename):
        if is_of_program(frame.f_code.co_filename):
            return Source(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def source_of(node: torch.fx.Node) -> Source | None:
    """The line of the program that made a node, where there is one."""
    source: Source | None = node.meta.get(_LINE)
    return source


class Scopes:
    """Reads the modules around nodes, each distinct chain once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], tuple[Scope, ...]] = {}

    def of(self, node: torch.fx.Node) -> tuple[Scope, ...]:
        """The modules around a node, outermost first, the model itself left out."""
        stack = node.meta.get("nn_module_stack") or {}
        key = tuple(stack)
        if key not in self._known:
            self._known[key] = tuple(
                Scope(path.removeprefix(f"{PREFIX}.").split("@")[0], cls)
                for path, cls in stack.values()
                if path.startswith(f"{PREFIX}.")
            )
        return self._known[key]
