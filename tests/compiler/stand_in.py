"""A recording on the CPU that behaves as a CUDA graph: fixed addresses, and no Python between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.compiler.replay import as_before, warm_up
from shardwright.ir.operators import flatten_results

CPU = torch.device("cpu")


class Tape(TorchDispatchMode):
    """The operators that ran, with their operands; each replay gives them the same memory again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func._opname == "index_put" and any(index.dtype is torch.bool for index in args[1]):
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, made in self._calls:
                again = flatten_results(func(*args, **kwargs))
                for new, old in zip(again, flatten_results(made), strict=True):
                    if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


class StandIn:
    """Records as `GraphMemory` does; counts how often it has."""

    def __init__(self) -> None:
        self.count = 0

    def record(self, run: Callable[[], object], written: Sequence[Tensor]) -> Callable[[], None]:
        warm_up(run, 2, written, CPU)
        tape = Tape()
        with as_before(written, CPU), tape:
            run()
        self.count += 1
        return tape.replay
