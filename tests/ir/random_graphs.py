"""Random graphs with odd names, beside what torch gives for the same calls, for tests with laws.

Every value in play is a 4 x 4 float64 matrix, so that any step can follow any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from shardwright.ir import Builder, IRGraph, IRValue, Scope, Source, resolve
from shardwright.ir.operators import split_call
from shardwright.ir.structure import describe_arguments, describe_result

N = 4
NAMES = st.text('ab0._/-% "\\:,>#\n\u2028é', max_size=6)
SCOPES = st.lists(st.builds(Scope, NAMES, NAMES, st.none()), max_size=2).map(tuple)
SOURCES = st.none() | st.builds(Source, NAMES, st.integers(0, 10**6))


@dataclass
class Pair:
    """A value of the graph and the tensor it must hold."""

    value: IRValue
    tensor: torch.Tensor


@dataclass
class RandomGraph:
    """A graph, tensors to run it on, and what must come out."""

    graph: IRGraph
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    updates: list[torch.Tensor]


class Writer:
    """Calls operators on pairs: on the values in the graph, on the tensors at once."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.builder = Builder(draw(NAMES))

    def stored(self, tensor: torch.Tensor) -> Pair:
        role = self.draw(st.sampled_from(["param", "buffer", "state", "constant"]))
        names = self.draw(st.lists(NAMES, min_size=1, max_size=2))
        placements = self.draw(st.none() | st.just([(2, size + 2) for size in tensor.shape]))
        return Pair(
            self.builder.stored(role, names[0], tensor, names=names, placements=placements), tensor
        )

    def call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """One Pair, or a list of them."""
        inputs, attrs = split_call(
            resolve(op), args, kwargs, is_tensor=lambda item: isinstance(item, Pair)
        )
        made = self.builder.emit(
            op,
            [pair.value for pair in inputs],
            attrs,
            name=self.draw(st.none() | NAMES),
            scopes=self.draw(SCOPES),
            source=self.draw(SOURCES),
        )
        tensors = resolve(op)(*_tensors(args), **_tensors(kwargs))
        if isinstance(made, list):
            return [v and Pair(v, t) for v, t in zip(made, tensors, strict=True)]
        return Pair(made, tensors)


def _tensors(value: Any) -> Any:
    if isinstance(value, Pair):
        return value.tensor
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tensors(item) for item in value]
    return value


def _matrix(seed: int) -> torch.Tensor:
    return torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _normalize(w: Writer, x: Pair, y: Pair) -> Pair:
    weight = w.stored(torch.ones(N, dtype=torch.float64))
    return w.call("aten.layer_norm.default", x, [N], weight, eps=1e-05)


def _normalize_backward(w: Writer, x: Pair, y: Pair) -> Pair:
    """An operator with an output mask: of three results it returns the first alone."""
    _, *statistics = w.call("aten.native_layer_norm.default", x, [N], None, None, 1e-05)
    mask = [True, False, False]
    return w.call(
        "aten.native_layer_norm_backward.default", y, x, [N], *statistics, None, None, mask
    )[0]


def _linear(w: Writer, x: Pair, y: Pair) -> Pair:
    return w.call("aten.linear.default", x, w.stored(_matrix(1)))


def _split(w: Writer, x: Pair, y: Pair) -> Pair:
    first, second = w.call("aten.split.Tensor", x, N // 2, -1)
    return w.call("aten.cat.default", [second, first], dim=1)


def _pick(w: Writer, x: Pair, y: Pair) -> Pair:
    indices = w.call("aten.topk.default", x, N)[1]
    row = w.call("aten.select.int", indices, 0, 1)
    return w.call("aten.index.Tensor", y, [None, row])


def _put(w: Writer, x: Pair, y: Pair) -> Pair:
    index = w.stored(torch.tensor([2, 0]))
    values = w.call("aten.narrow.default", y, 0, 1, 2)
    return w.call("aten.index_put.default", x, [index], values, True)


def _fill(w: Writer, x: Pair, y: Pair) -> Pair:
    full = w.call("aten.full.default", [N, N], float("-inf"), dtype=torch.float64)
    lower = w.call("aten.tril.default", x)
    return w.call("aten.maximum.default", full, lower)


def _repair(w: Writer, x: Pair, y: Pair) -> Pair:
    return w.call("aten.nan_to_num.default", x, nan=0.5, posinf=None, neginf=-1.5)


def _cast(w: Writer, x: Pair, y: Pair) -> Pair:
    half = w.call("aten.to.dtype", x, torch.float32)
    return w.call("aten.softmax.int", half, -1, dtype=torch.float64)


def _recurrent(w: Writer, x: Pair, y: Pair) -> Pair:
    state = [w.stored(torch.zeros(1, 1, N, dtype=torch.float64)) for _ in range(2)]
    weights = [w.stored(_matrix(i).repeat(4, 1) / 4) for i in (2, 3)]
    batch = w.call("aten.unsqueeze.default", x, 0)
    made = w.call("aten.lstm.input", batch, state, weights, False, 1, 0.0, False, False, True)
    return w.call("aten.squeeze.dim", made[0], 0)


STEPS: dict[str, Callable[[Writer, Pair, Pair], Pair]] = {
    "add": lambda w, x, y: w.call("aten.add.Tensor", x, y, alpha=-0.5),
    "scale": lambda w, x, y: w.call("aten.mul.Tensor", x, 1e-07),
    "transpose": lambda w, x, y: w.call("aten.t.default", x),
    "copy": lambda w, x, y: w.call("aten.clone.default", x, memory_format=torch.contiguous_format),
    "einsum": lambda w, x, y: w.call("aten.einsum.default", "ij,jk->ik", [x, y]),
    "stack": lambda w, x, y: w.call("aten.select.int", w.call("aten.stack.default", [x, y]), 0, 1),
    "gelu": lambda w, x, y: w.call("aten.gelu.default", x, approximate="tanh"),
    "max": lambda w, x, y: w.call(
        "aten.sub.Tensor", x, w.call("aten.max.dim", x, 0, keepdim=True)[0]
    ),
    "normalize": _normalize,
    "normalize_backward": _normalize_backward,
    "linear": _linear,
    "split": _split,
    "pick": _pick,
    "put": _put,
    "fill": _fill,
    "repair": _repair,
    "cast": _cast,
    "recurrent": _recurrent,
}


@st.composite
def random_graphs(draw: Any) -> RandomGraph:
    w = Writer(draw)
    inputs = []
    for i in range(draw(st.integers(1, 2))):
        tensor = _matrix(10 + i).t() if draw(st.booleans()) else _matrix(10 + i)
        device = draw(st.sampled_from(["cpu", "cuda", "cuda:1"]))
        value = w.builder.input(
            draw(NAMES), tensor.shape, "f64", strides=tensor.stride(), device=device
        )
        inputs.append(Pair(value, tensor))
    buffer = w.stored(_matrix(20))
    pool = [*inputs, buffer]
    for step in draw(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=6)):
        x, y = draw(st.sampled_from(pool)), draw(st.sampled_from(pool[-3:]))
        pool.append(STEPS[step](w, x, y))
    outputs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    update = draw(st.none() | st.sampled_from(pool))
    graph = _finish(w, inputs, outputs, {} if update is None else {buffer.value.id: update})
    return RandomGraph(
        graph,
        [pair.tensor for pair in inputs],
        [pair.tensor for pair in outputs],
        [] if update is None else [update.tensor],
    )


def _finish(
    w: Writer, inputs: list[Pair], outputs: list[Pair], updates: dict[int, Pair]
) -> IRGraph:
    """The graph, with structures of a person's call or those that the builder makes."""
    structures: dict[str, Any] = {}
    if w.draw(st.booleans()):

        def function(tensors: Any, flag: Any, **others: Any) -> None: ...

        given = {"tensors": [pair.tensor for pair in inputs], "flag": float("inf"), "é": "\u2028"}
        structures["in_structure"] = describe_arguments(function, (), given)[0]
        result = {"out": tuple(pair.tensor for pair in outputs), "none": None}
        structures["out_structure"] = describe_result(result)[0]
    return w.builder.finish(
        [pair.value for pair in outputs],
        updates={old: new.value.id for old, new in updates.items()},
        **structures,
    )
