"""Cross entropy, mean squares and embeddings, with their gradients."""

from __future__ import annotations

import torch

from shardwright.ir.tensor_meta import TensorMeta
from shardwright.kernels.attributes import attributes
from shardwright.kernels.normalization import softmax_torch
from shardwright.kernels.row import (
    Emission,
    KernelCall,
    KernelRow,
    Makes,
    NodeCall,
    broadcast,
    emits,
    like,
    need,
)
from shardwright.kernels.torch_kernels import (
    Attrs,
    Closure,
    Tensors,
    bind_operator,
    by_operator,
    present,
    rows_of,
)

_aten = torch.ops.aten

# --- cross entropy; reduction as torch numbers it: 0 none, 1 mean, 2 sum --------------------------


def _classes(call: KernelCall, scores: str) -> tuple[tuple[int, ...], str]:
    """The shape of the loss, and the dtype, of classes that fit the scores."""
    dtype = call.float_dtype("dloss", scores, "total_weight", "w")
    rows, classes = call.shape_of(scores, 2)
    need(classes > 0, f"{scores} is {call[scores]}", "one class at least")
    target = call["target"]
    need(like(target) == TensorMeta((rows,), "i64"), f"target is {target}", f"i64[{rows}]")
    call.need_shape((classes,), "w")
    return () if call.number("reduction", 0, 3) else (rows,), dtype


def _cross_entropy_makes(call: KernelCall) -> Makes:
    shape, dtype = _classes(call, "x")
    return [[TensorMeta(shape, dtype)], [TensorMeta((), dtype)], [like(call["x"])]]


def _cross_entropy_backward_makes(call: KernelCall) -> Makes:
    shape, _ = _classes(call, "log_probs")
    call.need_shape(shape, "dloss")
    call.need_shape((), "total_weight")
    return [[like(call["log_probs"])]]


def _cross_entropy_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, *classes = ins
    *losses, log_probs = outs
    probs = softmax_torch({"dim": 1, "log": 1}, [x], [log_probs])
    args = [log_probs, *classes, attrs["reduction"], attrs["ignore"]]
    nll = bind_operator(_aten.nll_loss_forward.default, args, {}, losses)

    def run() -> None:
        probs()
        nll()

    return run


def _cross_entropy_backward_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    dloss, log_probs, target, total, weight = ins
    (dx,), reduction, ignore = present(outs), attrs["reduction"], attrs["ignore"]
    nll = _aten.nll_loss_backward.default

    def run() -> None:
        inner = nll(dloss, log_probs, target, weight, reduction, ignore, total)
        softmax_torch({"dim": 1, "log": 1}, [inner, log_probs], [dx])()

    return run


# --- mean squares --------------------------------------------------------------------------------


def _mse_makes(call: KernelCall) -> Makes:
    dtype, a = call.float_dtype(), call["a"]
    call.need_shape(a.shape, "b")
    return [[TensorMeta(() if call.number("reduction", 0, 3) else a.shape, dtype)]]


def _mse_backward_makes(call: KernelCall) -> Makes:
    call.float_dtype()
    a, dloss = call["a"], call["dloss"]
    call.need_shape(a.shape, "b")
    call.number("reduction", 0, 3)
    fits = broadcast(dloss, a) == a.shape
    need(fits, f"dloss is {dloss}", f"a shape that broadcasts to {list(a.shape)}")
    return [[like(a)]]


# --- embeddings ----------------------------------------------------------------------------------


def _index(call: KernelCall) -> TensorMeta:
    index = call["index"]
    need(index.dtype in ("i64", "i32"), f"index is {index}", "i64 or i32")
    return index


def _embedding_makes(call: KernelCall) -> Makes:
    rows, depth = call.shape_of("w", 2)
    index = _index(call)
    need(rows > 0 or 0 in index.shape, f"w is {call['w']} and index is {index}", "a row to take")
    return [[TensorMeta((*index.shape, depth), call["w"].dtype)]]


def _embedding_backward_makes(call: KernelCall) -> Makes:
    dtype, index, said = call.float_dtype("dy"), _index(call), call.said
    need(len(said.shape) == 2, f"dw is {said}", "[rows, numbers a row]")
    call.need_shape((*index.shape, said.shape[1]), "dy")
    rows, padding = said.shape[0], call.attrs["padding"]
    need(padding < rows, f"padding={padding} of dw {said}", "one of its rows, or -1 for none")
    return [[TensorMeta(said.shape, dtype)]]


def _embedding(call: NodeCall) -> Emission:
    given = call.arguments
    if given["sparse"] or given["scale_grad_by_freq"]:
        return None
    return call.emit("embedding", call.given("weight indices"))


def _embedding_backward(call: NodeCall) -> Emission:
    dy, index, padding, scale = call.given("grad_output indices padding_idx scale_grad_by_freq")
    return None if scale else call.emit("embedding_bwd", [dy, index], padding=padding)


def _embedding_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    w, index, y = present((*ins, *outs))
    rows = rows_of(y)
    if rows is None or not index.is_contiguous():
        return lambda: y.copy_(_aten.embedding.default(w, index))
    flat = index.view(-1)
    return lambda: torch.index_select(w, 0, flat, out=rows)


def _embedding_backward_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (dy, index, dw), padding = present((*ins, *outs)), attrs["padding"]

    def run() -> None:
        dw.zero_().index_add_(0, index.reshape(-1), dy.reshape(-1, dw.shape[1]))
        if padding >= 0:
            dw[padding].zero_()

    return run


_REDUCED = attributes(reduction=("B", 1), ignore=("q", -100))

ROWS = (
    KernelRow(
        30,
        "embedding",
        "w [v, d], index → y [.., d]",
        _embedding_torch,
        _embedding_makes,
        {"aten.embedding.default": _embedding},
    ),
    KernelRow(
        31,
        "embedding_bwd",
        "dy, index → dw [v, d]",
        _embedding_backward_torch,
        _embedding_backward_makes,
        {"aten.embedding_dense_backward.default": _embedding_backward},
        attributes(padding=("q", -1)),
    ),
    KernelRow(
        32,
        "cross_entropy",
        "x [n, c], target [n], w? → loss, total_weight, log_probs",
        _cross_entropy_torch,
        _cross_entropy_makes,
        {
            "shardwright.cross_entropy.default": emits(
                "cross_entropy", "x target weight", "reduction ignore"
            )
        },
        _REDUCED,
        pairs=((2, 0),),
    ),
    KernelRow(
        33,
        "cross_entropy_bwd",
        "dloss, log_probs, target, total_weight, w? → dx",
        _cross_entropy_backward_torch,
        _cross_entropy_backward_makes,
        {
            "shardwright.cross_entropy_bwd.default": emits(
                "cross_entropy_bwd",
                "dloss log_probs target total_weight weight",
                "reduction ignore",
            )
        },
        _REDUCED,
        pairs=((0, 1),),
    ),
    KernelRow(
        34,
        "mse",
        "a, b → loss",
        by_operator(_aten.mse_loss.default, "reduction"),
        _mse_makes,
        {"aten.mse_loss.default": emits("mse", "self target", "reduction")},
        attributes(reduction=("B", 1)),
    ),
    KernelRow(
        35,
        "mse_bwd",
        "dloss, a, b → da",
        by_operator(_aten.mse_loss_backward.default, "reduction"),
        _mse_backward_makes,
        {
            "aten.mse_loss_backward.default": emits(
                "mse_bwd", "grad_output self target", "reduction"
            )
        },
        attributes(reduction=("B", 1)),
        pairs=((0, 1), (0, 2)),
    ),
)
