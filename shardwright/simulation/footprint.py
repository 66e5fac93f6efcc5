"""What the run of a compute supertask needs of memory, found without computing anything.

In comes a graph, and what its program may overwrite; out comes a `Footprint`. The program that the
runtime compiles is run on fake tensors, which have shapes, strides and storages but no contents, so
views, in-place operators and what composite operators make on the way are what they are in a run.
What the kernels take for themselves, such as the workspace of a convolution, is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.ir import IRGraph, IRValue, compile_graph
from shardwright.ir.dtypes import torch_dtype
from shardwright.ir.values import contiguous_strides
from shardwright.torch_internals import (
    FakeTensorMode,
    TorchDispatchMode,
    is_fused_step,
    schema_of,
    storage_key,
)


class Home(NamedTuple):
    """Where an output lies: in the memory of the input ``input``, or in new memory.

    Outputs of one supertask with the same ``storage`` share new memory of ``nbytes``.
    """

    input: int | None
    storage: int = 0
    nbytes: int = 0


class Footprint(NamedTuple):
    """``most`` bytes at once beyond the inputs, outputs included; where each output lies."""

    most: int
    homes: tuple[Home, ...]

    @property
    def left(self) -> int:
        """Bytes of new memory that the outputs keep."""
        return sum(
            {home.storage: home.nbytes for home in self.homes if home.input is None}.values()
        )


def footprint(
    graph: IRGraph,
    donated: Mapping[int, int],
    zeros: Collection[int] = (),
    fresh: Collection[int] = (),
) -> Footprint:
    """The footprint of a graph's program.

    ``donated`` and ``zeros`` are what `compile_graph` takes; the outputs at the positions ``fresh``
    get memory of their own.
    """
    program = compile_graph(graph, donated=donated, zeros=zeros)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        inputs = [_fake(graph.values[value_id]) for value_id in program.arguments]
        with _Storages(inputs) as storages:
            outputs = program(inputs)
            outputs = [t.clone() if k in fresh else t for k, t in enumerate(outputs)]
        del fake
        return Footprint(storages.most, tuple(_homes(inputs, outputs)))


def _fake(value: IRValue) -> Tensor:
    strides = value.strides or contiguous_strides(value.shape)
    return torch.empty_strided(value.shape, strides, dtype=torch_dtype(value.dtype))


def _homes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Home]:
    given = {storage_key(tensor): k for k, tensor in enumerate(inputs)}
    made: dict[int, int] = {}
    found = []
    for tensor in outputs:
        storage = storage_key(tensor)
        if storage in given:
            found.append(Home(given[storage]))
        else:
            number = made.setdefault(storage, len(made))
            found.append(Home(None, number, tensor.untyped_storage().nbytes()))
    return found


class _Storages(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, as long as something shows them."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._known = {storage_key(tensor) for tensor in inputs}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and note new storages among its results."""
        if is_fused_step(func) and schema_of(func).is_mutable:
            return None  # it has no fake kernel, the real one would run, and it makes nothing
        results = func(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, (list, tuple)) else (results,):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return results

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage_key(tensor), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._now += nbytes
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes
