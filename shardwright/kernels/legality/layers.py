"""Rules of softmax, norms, cross-entropy and embeddings, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.kernels.legality.call import (
    Call,
    Made,
    Makes,
    Operand,
    Table,
    flag,
    like,
    need,
    of_rank,
    one_float,
    ranged,
    shaped,
)


def _softmax(call: Call) -> Makes:
    one_float(call)
    x = call["x"]
    ranged(call, "dim", 0, len(x.shape))
    flag(call, "log")
    return [[like(x)]]


def _softmax_backward(call: Call) -> Makes:
    one_float(call)
    y = call["y"]
    shaped(call, "dy", y.shape)
    ranged(call, "dim", 0, len(y.shape))
    flag(call, "log")
    return [[like(y)]]


# --- norms -----------------------------------------------------------------------------------


def _rows(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of rows' figures, and that of a row, whose weight and bias fit it."""
    x = call["x"]
    split = len(x.shape) - ranged(call, "dims", 1, len(x.shape) + 1)
    for name in ("w", "b"):
        shaped(call, name, x.shape[split:])
    return (*x.shape[:split], *[1] * (len(x.shape) - split)), x.shape[split:]


def _layer_norm(call: Call) -> Makes:
    dtype = one_float(call)
    figures, _ = _rows(call)
    statistics = [Made(figures, found) for found in dict.fromkeys((dtype, "f32"))]
    return [[like(call["x"])], statistics, statistics]


def _layer_norm_backward(call: Call) -> Makes:
    dtype, x = one_float(call), call["x"]
    figures, row = _rows(call)
    shaped(call, "dy", x.shape)
    for name in ("mean", "rstd"):
        shaped(call, name, figures)
    return [[like(x)], _of(call.get("w"), row, dtype), _of(call.get("b"), row, dtype)]


def _of(parameter: Operand | None, shape: tuple[int, ...], dtype: str) -> Sequence[Made]:
    """The gradient of a parameter, where there is one."""
    return [Made(shape, dtype)] if parameter is not None else []


def _channels(call: Call, *names: str) -> tuple[int]:
    """The shape of a channel's figures, which these inputs have."""
    x = call["x"]
    need(len(x.shape) >= 2, f"x is {x}", "[batch, channels, ..]")
    for name in names:
        shaped(call, name, x.shape[1:2])
    return (x.shape[1],)


def _are_given(call: Call, *names: str) -> bool:
    """Whether two inputs are there; there are both or none."""
    given = [call.get(name) is not None for name in names]
    need(given[0] == given[1], f"one of {' and '.join(names)} is absent", "both or none")
    return given[0]


def _batch_norm(call: Call) -> Makes:
    dtype, (training,) = one_float(call), flag(call, "training")
    shape = _channels(call, "w", "b", "running_mean", "running_var")
    renewed = _are_given(call, "running_mean", "running_var")
    need(training or renewed, "no running statistics", "those that an evaluation reads")
    figures = [Made(shape, dtype)]
    saved, new = figures if training else [], figures if training and renewed else []
    return [[like(call["x"])], saved, saved, new, new]


def _batch_norm_backward(call: Call) -> Makes:
    dtype, x, (training,) = one_float(call), call["x"], flag(call, "training")
    shape = _channels(call, "w", "running_mean", "running_var", "mean", "invstd")
    shaped(call, "dy", x.shape)
    running = _are_given(call, "running_mean", "running_var")
    saved = _are_given(call, "mean", "invstd")
    needed = "the batch's statistics" if training else "running statistics"
    need(saved if training else running, f"no {needed}", f"those with training={int(training)}")
    figures = [Made(shape, dtype)]
    return [[like(x)], figures, figures]


# --- losses and embeddings -------------------------------------------------------------------


def _classes(call: Call, scores: str) -> tuple[tuple[int, ...], str]:
    """The shape of the loss, and the dtype, of classes that fit the scores."""
    names = [name for name in ("dloss", scores, "total_weight", "w") if _has(call, name)]
    dtype, (rows, classes) = one_float(call, *names), of_rank(call, scores, 2)
    need(classes > 0, f"{scores} is {call[scores]}", "one class at least")
    target = call["target"]
    need(target[:2] == ((rows,), "i64"), f"target is {target}", f"i64[{rows}]")
    shaped(call, "w", (classes,))
    return () if ranged(call, "reduction", 0, 3) else (rows,), dtype


def _has(call: Call, name: str) -> bool:
    return name in (given.rstrip("?") for given in call.kind.names(0))


def _cross_entropy(call: Call) -> Makes:
    shape, dtype = _classes(call, "x")
    return [[Made(shape, dtype)], [Made((), dtype)], [like(call["x"])]]


def _cross_entropy_backward(call: Call) -> Makes:
    shape, _ = _classes(call, "log_probs")
    shaped(call, "dloss", shape)
    shaped(call, "total_weight", ())
    return [[like(call["log_probs"])]]


def _index(call: Call) -> Operand:
    index = call["index"]
    need(index.dtype in ("i64", "i32"), f"index is {index}", "i64 or i32")
    return index


def _embedding(call: Call) -> Makes:
    rows, depth = of_rank(call, "w", 2)
    index = _index(call)
    need(rows > 0 or 0 in index.shape, f"w is {call['w']} and index is {index}", "a row to take")
    return [[Made((*index.shape, depth), call["w"].dtype)]]


def _embedding_backward(call: Call) -> Makes:
    dtype, dy, index, said = one_float(call, "dy"), call["dy"], _index(call), call.outputs[0]
    assert said is not None, "a call has the operands that its kind needs"
    need(len(said.shape) == 2, f"dw is {said}", "[rows, numbers a row]")
    shaped(call, "dy", (*index.shape, said.shape[1]))
    rows, padding = said.shape[0], call.attrs["padding"]
    need(padding < rows, f"padding={padding} of dw {said}", "one of its rows, or -1 for none")
    need(dy.shape[-1] == said.shape[1], f"dw is {said}", f"rows of {dy.shape[-1]} numbers")
    return [[Made(said.shape, dtype)]]


TABLE: Table = {
    "softmax": _softmax,
    "softmax_bwd": _softmax_backward,
    "layer_norm": _layer_norm,
    "layer_norm_bwd": _layer_norm_backward,
    "batch_norm": _batch_norm,
    "batch_norm_bwd": _batch_norm_backward,
    "cross_entropy": _cross_entropy,
    "cross_entropy_bwd": _cross_entropy_backward,
    "embedding": _embedding,
    "embedding_bwd": _embedding_backward,
}
