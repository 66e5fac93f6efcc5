"""Where a node of an exported graph came from: its modules and its line of the program.

Comes in: what torch.export notes on a node. Goes out: `Scope` and `Source`. What always holds:
the flat module around the model is in neither, and equal notes are read once, since a model of
many layers has the same ones again and again.
"""

from __future__ import annotations

import torch.fx

from shardwright.ir.values import Scope, Source
from shardwright.tracing.failures import is_of_program
from shardwright.tracing.flat import PREFIX


class Origins:
    """Reads scopes and sources, each distinct one once."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[str, ...], tuple[Scope, ...]] = {}
        self._sources: dict[str, Source | None] = {}

    def scopes(self, node: torch.fx.Node) -> tuple[Scope, ...]:
        """The modules around a node, outermost first, the model itself left out."""
        stack = node.meta.get("nn_module_stack") or {}
        key = tuple(stack)
        if key not in self._scopes:
            self._scopes[key] = tuple(
                Scope(path.removeprefix(f"{PREFIX}.").split("@")[0], _class_name(cls))
                for path, cls in stack.values()
                if path.startswith(f"{PREFIX}.")
            )
        return self._scopes[key]

    def source(self, node: torch.fx.Node) -> Source | None:
        """The deepest line of the program that is neither torch's nor ours."""
        trace = node.meta.get("stack_trace") or ""
        if trace not in self._sources:
            self._sources[trace] = _deepest_line(trace)
        return self._sources[trace]


def _class_name(cls: str | type) -> str:
    return cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"


def _deepest_line(trace: str) -> Source | None:
    """Read ``File "model.py", line 7, in forward`` from the end of a printed traceback."""
    end = len(trace)
    while (start := trace.rfind('File "', 0, end)) >= 0:
        file, _, rest = trace[start + 6 :].partition('", line ')
        number = rest.partition(",")[0]
        if is_of_program(file) and number.isdigit():
            return Source(file, int(number))
        end = start
    return None
