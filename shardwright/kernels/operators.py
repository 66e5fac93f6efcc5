"""Operators that passes write and native kernels run, defined in plain torch.

    gemm               act(alpha * op(a) op(b) + bias + residual)
    chain              a program over one element (see `chains`)
    cross_entropy      log-softmax and negative log-likelihood of classes, and its gradient
    conv               act(convolution + bias + residual)

Each is functional and has a fake; every kernel of the kind of the same name is compared with it.
Activations are numbers of `row.ACTIVATIONS`. Every process that imports the package has them; no
file has to require a module for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from shardwright.errors import ExecError
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ir.with_backward import WITH_BACKWARD
from shardwright.kernels.chains import evaluate, parse_chain
from shardwright.kernels.row import ACTIVATIONS
from shardwright.kernels.strides import result_strides

GEMM = "shardwright.gemm.default"
CHAIN = "shardwright.chain.default"
CROSS_ENTROPY = "shardwright.cross_entropy.default"
CROSS_ENTROPY_BACKWARD = "shardwright.cross_entropy_bwd.default"
CONV = "shardwright.conv.default"

F = TypeVar("F", bound=Callable[..., Any])
_aten = torch.ops.aten
_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": lambda x: _aten.gelu.default(x),
    "gelu_tanh": lambda x: _aten.gelu.default(x, approximate="tanh"),
    "silu": _aten.silu.default,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def activate(x: torch.Tensor, activation: int) -> torch.Tensor:
    """``x`` through the activation of this number. Raises ExecError where there is none."""
    if not 0 <= activation < len(ACTIVATIONS):
        known = ", ".join(f"{i} {name}" for i, name in enumerate(ACTIVATIONS))
        raise ExecError(f"activation {activation} is unknown; known are {known}")
    return _FUNCTIONS[ACTIVATIONS[activation]](x)


def _operator(function: F) -> F:
    """The function as an operator of its name, whose fake is its run on fake tensors."""
    defined = torch.library.custom_op(f"shardwright::{function.__name__}", mutates_args=())(
        function
    )
    defined.register_fake(function)
    return cast(F, defined)


# --- gemm ------------------------------------------------------------------------------------


@_operator
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    transpose_a: bool,
    transpose_b: bool,
    activation: int,
    alpha: float,
) -> torch.Tensor:
    """``a`` [.., m, k] times ``b`` [k, n], with what follows it; contiguous [.., m, n].

    Transposed, ``a`` is [k, m] and ``b`` is [n, k]. ``bias`` is [n], ``residual`` of the result's
    shape.
    """
    left = a.t() if transpose_a else a
    right = b.t() if transpose_b else b
    rows = left.flatten(0, -2)
    if bias is None:
        product = torch.mm(rows, right)
        product = product if alpha == 1 else product * alpha
    else:
        product = torch.addmm(bias, rows, right, alpha=alpha)
    product = product.reshape(*left.shape[:-1], right.shape[1])
    made = activate(product if residual is None else product + residual, activation)
    return made.contiguous()


# --- elementwise chains ----------------------------------------------------------------------


@torch.library.custom_op("shardwright::chain", mutates_args=())
def chain(inputs: Sequence[torch.Tensor], program: str, dtypes: str) -> list[torch.Tensor]:
    """The outputs of a chain's program, stored as the short names in ``dtypes`` say."""
    stored = [torch_dtype(name) for name in dtypes.split()]
    made = evaluate(parse_chain(program), inputs, stored)
    return [empty.copy_(tensor) for empty, tensor in zip(_empty(inputs, dtypes), made, strict=True)]


@chain.register_fake
def _(inputs: Sequence[torch.Tensor], program: str, dtypes: str) -> list[torch.Tensor]:
    return _empty(inputs, dtypes)


def _empty(inputs: Sequence[torch.Tensor], dtypes: str) -> list[torch.Tensor]:
    """Where the outputs go, in the layout of an elementwise operator's result."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in inputs))
    strides = result_strides(shape, [(tensor.shape, tensor.stride()) for tensor in inputs])
    return [
        inputs[0].new_empty_strided(shape, strides, dtype=torch_dtype(name))
        for name in dtypes.split()
    ]


# --- cross entropy ---------------------------------------------------------------------------


@_operator
def cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, total weight and log-probabilities of ``x`` [n, c] for classes ``target`` [n].

    ``reduction`` is 0 (none), 1 (mean) or 2 (sum); rows whose class is ``ignore`` do not count.
    """
    log_probs = _aten._log_softmax.default(x, 1, False).contiguous()
    loss, total = _aten.nll_loss_forward.default(log_probs, target, weight, reduction, ignore)
    return loss, total, log_probs


@_operator
def cross_entropy_bwd(
    dloss: torch.Tensor,
    log_probs: torch.Tensor,
    target: torch.Tensor,
    total_weight: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore: int,
) -> torch.Tensor:
    """The gradient of `cross_entropy`'s loss with respect to ``x``."""
    inner = _aten.nll_loss_backward.default(
        dloss, log_probs, target, weight, reduction, ignore, total_weight
    )
    made: torch.Tensor = _aten._log_softmax_backward_data.default(
        inner, log_probs, 1, log_probs.dtype
    )
    return made.contiguous()


# --- convolution -----------------------------------------------------------------------------


@_operator
def conv(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: int,
) -> torch.Tensor:
    """A convolution of ``x`` [b, c, ..] with ``w`` [out, c / groups, ..], and what follows it."""
    made: torch.Tensor = torch.convolution(
        x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups
    )
    return activate(made if residual is None else made + residual, activation)


OPERATORS = frozenset(
    (GEMM, CHAIN, CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, CONV, DROPOUT, WITH_BACKWARD)
)
"""What this package defines in the namespace ``shardwright``, and every process has."""
