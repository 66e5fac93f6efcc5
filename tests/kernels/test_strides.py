"""Kernels give the same whatever the strides of what they read and write.

Each kind's call runs on operands that lie one after another, and on such with their dimensions
turned over, with gaps between elements, and behind others in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.ir import resolve
from shardwright.ir.operators import flatten_results
from shardwright.ir.values import Input, to_json
from shardwright.kernels.lowered import bind_torch
from shardwright.kernels.native.library import BoundCall, addresses
from shardwright.kernels.torch_kernels import present
from tests.compiler.steps import assert_close
from tests.kernels.kind_calls import CALLS, KindCall, X, f, index
from tests.kernels.native.calls import native_bind, native_library


def turned(tensor: Tensor) -> Tensor:
    """The last dimension of memory is the first."""
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def gapped(tensor: Tensor) -> Tensor:
    """Every second element of a row."""
    if not tensor.dim():
        return tensor.clone()
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    wide[..., ::2] = tensor
    return wide[..., ::2]


def behind(tensor: Tensor) -> Tensor:
    """Rows with others between them, from the middle of memory on."""
    wide = tensor.new_zeros([size + 2 for size in tensor.shape])
    inside = wide[tuple(slice(1, 1 + size) for size in tensor.shape)]
    return inside.copy_(tensor)


def swapped(tensor: Tensor) -> Tensor:
    """The last two dimensions turned over alone."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.clone()


def channels_last(tensor: Tensor) -> Tensor:
    """As images often are."""
    return tensor.clone(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.clone()


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "turned": turned,
    "gapped": gapped,
    "behind": behind,
    "swapped": swapped,
    "channels last": channels_last,
}


ALIKE = {"sgd", "adam", "adamw"}
"""Of these an operand is laid out alike with others."""
KINDS = [kind for kind in CALLS if kind not in ALIKE]


def by_torch(kind: str, call: KindCall) -> None:
    bind_torch(kind, call.attrs, call.inputs, call.outputs)()


def by_kernel(kind: str, call: KindCall) -> None:
    """The native kernel, where it takes the call."""
    bound = native_bind(kind, call.attrs, call.inputs, call.outputs)
    if isinstance(bound, BoundCall):
        operands = [*call.inputs, *call.outputs]
        bases = addresses([None if t is None else t.data_ptr() for t in operands])
        bound.prepare(bases, 1)
        native_library().program([bound]).run(bases, 1)
    else:
        by_torch(kind, call)


def laid(
    call: KindCall, inputs: Callable[[Tensor], Tensor], outputs: Callable[[Tensor], Tensor]
) -> KindCall:
    given = [None if t is None else inputs(t) for t in call.inputs]
    made = [outputs(torch.full_like(t, 7)) for t in call.outputs if t is not None]
    return KindCall(call.attrs, given, made)


def check(kind: str, call: KindCall, run: Callable[[str, KindCall], None]) -> None:
    """The call in all layouts of its inputs, and of its outputs, beside the plain one of torch."""
    plain = laid(call, Tensor.clone, Tensor.clone)
    by_torch(kind, plain)
    for name, layout in LAYOUTS.items():
        for side, other in (
            ("inputs", laid(call, layout, Tensor.clone)),
            ("outputs", laid(call, Tensor.clone, layout)),
            ("both", laid(call, layout, layout)),
        ):
            strides = [tensor.stride() for tensor in present(other.outputs)]
            run(kind, other)
            assert strides == [tensor.stride() for tensor in present(other.outputs)]
            for k, (found, wanted) in enumerate(
                zip(present(other.outputs), present(plain.outputs), strict=True)
            ):
                assert_close(found, wanted, 1e-5, f"{kind}, output {k}, {side} {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_kernel_writes_where_the_strides_say(kind: str) -> None:
    check(kind, CALLS[kind], by_torch)


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_kernel_writes_where_the_strides_say(kind: str) -> None:
    check(kind, CALLS[kind], by_kernel)


# --- operators of torch --------------------------------------------------------------------------

P, M, IMAGES = f(3, 4, 5).abs() + 0.1, f(4, 4), f(2, 3, 6, 8)
OPERATORS: dict[str, tuple[Any, ...]] = {
    "aten.exp.default": (f(*X),),
    "aten.pow.Tensor_Tensor": (P, P),
    "aten.where.self": (f(*X) > 0, f(*X), f(*X)),
    "aten.clamp.default": (f(*X), -0.5, 0.5),
    "aten.addcmul.default": (f(*X), f(*X), f(*X)),
    "aten.lerp.Scalar": (f(*X), f(*X), 0.3),
    "aten.cumsum.default": (f(*X), 1),
    "aten.cumprod.default": (f(*X), 2),
    "aten.cummax.default": (f(*X), 1),
    "aten.logcumsumexp.default": (f(*X), 2),
    "aten.sum.dim_IntList": (f(*X), [1]),
    "aten.mean.dim": (f(*X), [0, 2]),
    "aten.prod.dim_int": (f(*X), 1),
    "aten.amax.default": (f(*X), [1]),
    "aten.max.dim": (f(*X), 1),
    "aten.argmax.default": (f(*X), 2),
    "aten.any.dim": (f(*X) > 1, 1),
    "aten.var.correction": (f(*X), [1]),
    "aten.logsumexp.default": (f(*X), [1]),
    "aten.linalg_vector_norm.default": (f(*X), 2, [1]),
    "aten.sort.default": (f(*X), 1),
    "aten.topk.default": (f(*X), 3, 1),
    "aten.kthvalue.default": (f(*X), 2, 1),
    "aten.gather.default": (f(*X), 1, index(6, 2, 4, 11)),
    "aten.scatter.src": (f(*X), 1, index(6, 2, 1, 11), f(2, 1, 11)),
    "aten.scatter_add.default": (f(*X), 1, index(6, 2, 1, 11), f(2, 1, 11)),
    "aten.index_select.default": (f(*X), 1, index(6, 4)),
    "aten.index.Tensor": (f(*X), [None, index(6, 4)]),
    "aten.index_add.default": (f(*X), 1, index(6, 3), f(2, 3, 11)),
    "aten.tril.default": (f(*X),),
    "aten.triu.default": (f(*X), 1),
    "aten.roll.default": (f(*X), [2], [1]),
    "aten.flip.default": (f(*X), [1]),
    "aten._softmax.default": (f(*X), 2, False),
    "aten._log_softmax.default": (f(*X), 1, False),
    "aten._softmax_backward_data.default": (f(*X), f(*X), 2, torch.float32),
    "aten._log_softmax_backward_data.default": (f(*X), f(*X), 1, torch.float32),
    "aten.glu.default": (f(2, 6, 4), 1),
    "aten.elu.default": (f(*X),),
    "aten.softplus.default": (f(*X),),
    "aten.leaky_relu.default": (f(*X), 0.2),
    "aten.gelu_backward.default": (f(*X), f(*X)),
    "aten.mm.default": (f(3, 4), f(4, 5)),
    "aten.addmm.default": (f(5), f(3, 4), f(4, 5)),
    "aten.addmv.default": (f(3), f(3, 4), f(4)),
    "aten.baddbmm.default": (f(2, 3, 5), f(2, 3, 4), f(2, 4, 5)),
    "aten.addbmm.default": (f(3, 5), f(2, 3, 4), f(2, 4, 5)),
    "aten.addr.default": (f(3, 4), f(3), f(4)),
    "aten.avg_pool2d.default": (IMAGES, [2, 2]),
    "aten.max_pool2d_with_indices.default": (IMAGES, [2, 2]),
    "aten._adaptive_avg_pool2d.default": (IMAGES, [2, 3]),
    "aten.adaptive_max_pool2d.default": (IMAGES, [2, 3]),
    "aten.upsample_nearest2d.default": (IMAGES, [12, 16]),
    "aten.upsample_bilinear2d.default": (IMAGES, [12, 16], False),
    "aten.upsample_bicubic2d.default": (IMAGES, [12, 16], False),
    "aten._upsample_bilinear2d_aa.default": (IMAGES, [3, 4], False),
    "aten.reflection_pad2d.default": (IMAGES, [1, 1, 2, 2]),
    "aten.replication_pad2d.default": (IMAGES, [1, 1, 2, 2]),
    "aten.im2col.default": (IMAGES, [2, 2], [1, 1], [0, 0], [2, 2]),
    "aten.col2im.default": (f(2, 12, 12), [6, 8], [2, 2], [1, 1], [0, 0], [2, 2]),
    "aten.native_layer_norm.default": (f(*X), [11], f(11), f(11), 1e-5),
    "aten.convolution.default": (
        IMAGES,
        f(4, 3, 2, 2),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
    ),
    "aten.nll_loss_forward.default": (f(4, 5), index(5, 4), None, 0, -100),
    "aten.huber_loss.default": (f(*X), f(*X), 1),
    "aten.smooth_l1_loss.default": (f(*X), f(*X), 1),
    "aten.mse_loss.default": (f(*X), f(*X), 1),
    "aten.binary_cross_entropy.default": (P / 9, P / 9, None, 2),
    "aten.soft_margin_loss.default": (f(*X), f(*X), 1),
    "aten.multi_margin_loss.default": (f(4, 5), index(5, 4)),
    "aten.nll_loss2d_forward.default": (f(2, 5, 3, 4), index(5, 2, 3, 4), None, 1, -100),
    "aten.searchsorted.Tensor": (f(3, 9).sort()[0], f(3, 4)),
    "aten.bucketize.Tensor": (f(3, 4), f(9).sort()[0]),
    "aten.bitwise_and.Tensor": (index(9, 3, 4), index(9, 3, 4)),
    "aten.linalg_cholesky_ex.default": (M @ M.T + 4 * torch.eye(4),),
    "aten.linalg_inv_ex.default": (M + 4 * torch.eye(4),),
    "aten.linalg_cross.default": (f(2, 4, 3), f(2, 4, 3)),
    "aten.linalg_solve_triangular.default": (M + 4 * torch.eye(4), f(4, 3)),
    "aten.cat.default": ([f(2, 3), f(2, 4)], 1),
    "aten.stack.default": ([f(2, 3), f(2, 3)], 1),
    "aten.renorm.default": (f(*X), 2.0, 1, 1.0),
    "aten.bernoulli.p": (f(*X), 1.0),
    "aten._fft_r2c.default": (f(4, 8), [1], 0, True),
}
if hasattr(torch.ops.aten, "cholesky"):  # torch 2.14 has it no more
    OPERATORS["aten.cholesky.default"] = (M @ M.T + 4 * torch.eye(4),)


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_of_torch_writes_where_the_strides_say(op: str) -> None:
    overload, args = resolve(op), OPERATORS[op]
    given: list[Tensor] = []

    def named(item: Any) -> Any:
        if isinstance(item, list):
            return [named(part) for part in item]
        if not isinstance(item, Tensor):
            return item
        given.append(item)
        return Input(len(given) - 1)

    kwargs = {"upper": True} if "triangular" in op else {}
    text = {"args": [to_json(named(item)) for item in args], "kwargs": kwargs}
    attrs = {"op": op, "call": json.dumps(text)}
    expected = flatten_results(overload(*args, **kwargs))
    for name, layout in LAYOUTS.items():
        for side, inputs, outputs in (
            ("inputs", layout, Tensor.clone),
            ("outputs", Tensor.clone, layout),
            ("both", layout, layout),
        ):
            made = [
                None
                if t is None
                else outputs(torch.zeros_like(t, memory_format=torch.contiguous_format))
                for t in expected
            ]
            before = [None if t is None else (t.data_ptr(), t.stride()) for t in made]
            run = bind_torch("generic", attrs, [inputs(t) for t in given], made)
            run()
            run()
            assert before == [None if t is None else (t.data_ptr(), t.stride()) for t in made]
            for k, (found, wanted) in enumerate(zip(made, expected, strict=True)):
                if found is not None and wanted is not None:
                    close = torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
                    assert close, (k, side, name)
