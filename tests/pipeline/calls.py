"""What the calls of a lowered task compute: the table of kinds read once more, in plain torch.

It knows JSON, base64 and torch, and nothing of the package, like `interpreter`. A kind is the codes
of its blob's fields and a function of them, of what the call reads and of how many results it has;
every call computes values of its own, with the strides that the file says.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Given = Sequence[Tensor | None]
Made = Sequence[Tensor | None]
Said = Sequence[tuple[list[int], torch.dtype] | None]
aten = torch.ops.aten


class Kind(NamedTuple):
    """How a call's attributes are packed, what schema 0 means, and what the call makes."""

    codes: str
    function: Callable[..., Made]
    defaults: tuple[Any, ...] | None = None


def unpacked(codes: str, blob: bytes) -> list[Any]:
    """The attributes of a blob; all of it."""
    values: list[Any] = []
    at = 0
    for code in codes.split():
        if code[-1] in "*s":
            (count,) = struct.unpack_from("<I", blob, at)
            form = f"<{count}s" if code == "s" else f"<{count}{code[0]}"
            found = struct.unpack_from(form, blob, at + 4)
            values.append(found[0].decode() if code == "s" else list(found))
            at += 4 + struct.calcsize(form)
        else:
            values += struct.unpack_from(f"<{code}", blob, at)
            at += struct.calcsize(f"<{code}")
    if at != len(blob):
        raise ValueError(f"{len(blob) - at} bytes are left over")
    return values


def calculate(
    text: str, inputs: Sequence[Tensor], dtypes: Mapping[str, torch.dtype]
) -> list[Tensor]:
    """The results of a task."""
    task = json.loads(text)
    specs = [(v["shape"], dtypes[v["dtype"]], v.get("strides")) for v in task["values"]]
    if len(inputs) != task["inputs"]:
        raise ValueError("inputs of a task")
    values: dict[int, Tensor] = {}

    def keep(number: int, made: Tensor) -> None:
        shape, dtype, strides = specs[number]
        if (list(made.shape), made.dtype) != (shape, dtype):
            raise ValueError(f"value {number} is {shape} {dtype}, found {made.shape} {made.dtype}")
        room = torch.empty(shape, dtype=dtype)
        room = room if strides is None else torch.empty_strided(shape, strides, dtype=dtype)
        values[number] = room.copy_(made)

    for number, tensor in enumerate(inputs):
        keep(number, tensor)
    for call in task["calls"]:
        kind, blob = KINDS[call["kind"]], base64.b64decode(call.get("blob", ""))
        packed = call["schema"] == 1
        attrs = unpacked(kind.codes, blob) if packed else list(kind.defaults or ())
        given = [None if k == -1 else values[k] for k in call["inputs"]]
        if call["kind"] == VIEW:
            offset, shape, strides = attrs
            (x,) = given
            assert x is not None
            values[call["outputs"][0]] = x.as_strided(shape, strides, x.storage_offset() + offset)
            continue
        said = [None if k == -1 else specs[k][:2] for k in call["outputs"]]
        results = kind.function(given, said, *attrs)
        for number, made in zip(call["outputs"], results, strict=True):
            if number != -1:
                keep(number, made)
    return [values[number] for number in task["outputs"]]


VIEW = 3

# --- calls by name, and programs over one element -------------------------------------------------

TAGS: Mapping[str, Callable[[Any], Any]] = {
    "layout": lambda name: getattr(torch, name),
    "memory_format": lambda name: getattr(torch, name),
    "device": lambda name: torch.device("cpu"),
    "float": float,
    "complex": lambda parts: complex(*parts),
}
SHORT = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "bool": "bool"}


def by_name(given: Given, said: Said, op: str, call: str) -> Made:
    def argument(item: Any) -> Any:
        if isinstance(item, list):
            return [argument(one) for one in item]
        if not isinstance(item, dict):
            return item
        ((tag, value),) = item.items()
        if tag == "input":
            return given[value]
        if tag == "dtype":
            long = SHORT.get(value) or f"{'u' * (value[0] == 'u')}int{value[1:]}"
            return getattr(torch, long)
        return TAGS[tag](value)

    namespace, name, overload = op.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    text = json.loads(call)
    args = [argument(item) for item in text["args"]]
    return flat(function(*args, **{key: argument(item) for key, item in text["kwargs"].items()}))


def flat(results: Any) -> list[Any]:
    """What a call returns, lists in it opened."""
    if isinstance(results, tuple | list):
        return [one for part in results for one in flat(part)]
    return [results]


def _backward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The gradient, of an operand that is not the function's result."""

    def run(dy: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.broadcast_to(torch.broadcast_shapes(dy.shape, x.shape)).clone()
            (found,) = torch.autograd.grad(
                function(leaf.requires_grad_()), leaf, dy.expand_as(leaf)
            )
        return found

    return run


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


OPERATORS: Mapping[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("neg", "abs", "sign", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt"),
            *("reciprocal", "square", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "floor"),
            *("ceil", "round", "trunc", "isnan", "add", "sub", "mul", "div", "pow"),
            *("gt", "ge", "lt", "le", "eq", "ne"),
        )
    },
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _tanh_gelu,
    "not": lambda x: x == 0,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": lambda a, b: (a != 0) & (b != 0),
    "or": lambda a, b: (a != 0) | (b != 0),
    "where": lambda c, a, b: torch.where(c != 0, a, b),
    "tanh_bwd": lambda dy, y: dy * (1 - y * y),
    "sigmoid_bwd": lambda dy, y: dy * y * (1 - y),
    "relu_bwd": lambda dy, x: torch.where(x <= 0, 0.0, dy),
    "silu_bwd": _backward(F.silu),
    "gelu_bwd": _backward(F.gelu),
    "gelu_tanh_bwd": _backward(_tanh_gelu),
}


def chain(given: Given, said: Said, program: str) -> Made:
    body, _, ends = program.rpartition("->")
    tensors = [tensor for tensor in given if tensor is not None]
    kept = [spec[1] for spec in said if spec is not None]
    wide = torch.float64 in (*(tensor.dtype for tensor in tensors), *kept)
    dtype = torch.float64 if wide else torch.float32
    found: list[Tensor] = []

    def operand(token: str) -> Tensor:
        if token[0] == "x":
            return tensors[int(token[1:])].to(dtype)
        if token[0] == "%":
            return found[int(token[1:])]
        return torch.tensor(float(token), dtype=torch.float64).to(dtype)

    for instruction in body.split(";"):
        op, *tokens = instruction.split()
        found.append(OPERATORS[op](*map(operand, tokens)).to(dtype))
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return [
        found[int(end[1:])].to(to).expand(shape) for end, to in zip(ends.split(), kept, strict=True)
    ]


# --- elementwise, sums, products ----------------------------------------------------------------


def copied(given: Given, said: Said) -> Made:
    (x,), ((shape, dtype),) = given, said
    return [x.expand(shape).to(dtype)]


def summed(given: Given, said: Said, dims: list[int], scale: float) -> Made:
    (x,), ((shape, _),) = given, said
    total = x.double() if x.dtype.is_floating_point else x
    total = total.sum(dims, len(shape) == x.dim()) if dims else total
    return [(total if scale == 1 else total * scale).to(x.dtype)]


ACTIVATIONS = (
    *(lambda y: y, torch.relu, F.gelu, _tanh_gelu, F.silu),
    *(torch.tanh, torch.sigmoid),
)


def gemm(given: Given, said: Said, left: int, right: int, act: int, alpha: float) -> Made:
    a, b, bias, residual = given
    made = (a.t() if left else a) @ (b.t() if right else b) * alpha
    for summand in (bias, residual):
        made = made if summand is None else made + summand
    return [ACTIVATIONS[act](made)]


def softmax(given: Given, said: Said, dim: int, log: int) -> Made:
    return [(torch.log_softmax if log else torch.softmax)(given[0], dim)]


def softmax_backward(given: Given, said: Said, dim: int, log: int) -> Made:
    dy, y = given
    total = (dy if log else dy * y).sum(dim, keepdim=True)
    return [dy - y.exp() * total if log else (dy - total) * y]


# --- layers ------------------------------------------------------------------------------------


def layer_norm(given: Given, said: Said, dims: int, eps: float) -> Made:
    x, w, b = given
    over = [*range(x.dim() - dims, x.dim())]
    mean = x.mean(over, keepdim=True)
    rstd = (x.var(over, correction=0, keepdim=True) + eps).rsqrt()
    made = [F.layer_norm(x, x.shape[x.dim() - dims :], w, b, eps), mean, rstd]
    return [
        made_ if spec is None else made_.reshape(spec[0])
        for made_, spec in zip(made, said, strict=True)
    ]


def layer_norm_backward(given: Given, said: Said, dims: int) -> Made:
    dy, x, mean, rstd, w, _ = given
    lead = x.shape[: x.dim() - dims]
    narrow = (*lead, *[1] * dims)
    normal = (x - mean.reshape(narrow)) * rstd.reshape(narrow)
    g, over, rows = dy if w is None else dy * w, [*range(len(lead), x.dim())], [*range(len(lead))]
    mean_g = g.mean(over, keepdim=True)
    dx = (g - mean_g - normal * (g * normal).mean(over, keepdim=True)) * rstd.reshape(narrow)
    dw, db = dy * normal, dy
    return [dx, dw.sum(rows) if rows else dw, db.sum(rows) if rows else db]


def batch_norm(given: Given, said: Said, training: int, momentum: float, eps: float) -> Made:
    x, w, b, mean, var = given
    if not training:
        return [F.batch_norm(x, mean, var, w, b, False, momentum, eps), None, None, None, None]
    over = [dim for dim in range(x.dim()) if dim != 1]
    here, spread = x.mean(over), x.var(over, correction=0)
    news = [None if old is None else old.clone() for old in (mean, var)]
    made = F.batch_norm(x, *news, w, b, True, momentum, eps)
    return [made, here, (spread + eps).rsqrt(), *news]


def batch_norm_backward(given: Given, said: Said, training: int, eps: float) -> Made:
    mask = [spec is not None for spec in said]
    dy, x, w, *rest = given
    return flat(aten.native_batch_norm_backward(dy, x, w, *rest, bool(training), eps, mask))


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: int, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores if mask is None else scores + mask


def attention(given: Given, said: Said, causal: int, scale: float) -> Made:
    q, k, v, mask = given
    scores = _scores(q, k, mask, causal, scale)
    return [torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)]


def attention_backward(given: Given, said: Said, causal: int, scale: float) -> Made:
    dy, q, k, v, y, lse, mask = given
    weights = (_scores(q, k, mask, causal, scale) - lse[..., None]).exp()
    ds = weights * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) * scale
    return [ds @ k, ds.mT @ q, weights.mT @ dy]


def embedding_backward(given: Given, said: Said, padding: int) -> Made:
    (dy, index), ((shape, dtype),) = given, said
    made = torch.zeros(shape, dtype=dtype)
    made.index_add_(0, index.reshape(-1), dy.reshape(-1, shape[1]))
    if padding >= 0:
        made[padding] = 0
    return [made]


def cross_entropy(given: Given, said: Said, reduction: int, ignore: int) -> Made:
    x, target, w = given
    logs = torch.log_softmax(x, 1)
    return [*aten.nll_loss_forward(logs, target, w, reduction, ignore), logs]


def cross_entropy_backward(given: Given, said: Said, reduction: int, ignore: int) -> Made:
    dloss, logs, target, total, w = given
    inner = aten.nll_loss_backward(dloss, logs, target, w, reduction, ignore, total)
    return [inner - logs.exp() * inner.sum(1, keepdim=True)]


def mse_backward(given: Given, said: Said, reduction: int) -> Made:
    dloss, a, b = given
    return [2 * (a - b) * dloss / (max(a.numel(), 1) if reduction == 1 else 1)]


def conv(
    given: Given, said: Said, stride: Any, padding: Any, dilation: Any, groups: int, act: int
) -> Made:
    x, w, bias, residual = given
    made = torch.convolution(x, w, bias, stride, padding, dilation, False, [0, 0], groups)
    return [ACTIVATIONS[act](made if residual is None else made + residual)]


def pool(
    given: Given, said: Said, kernel: Any, stride: Any, padding: Any, mean: int, counted: int
) -> Made:
    if mean:
        return [F.avg_pool2d(given[0], kernel, stride, padding, False, bool(counted))]
    return [F.max_pool2d(given[0], kernel, stride, padding)]


# --- optimizers --------------------------------------------------------------------------------


def _lists(given: Given, count: int) -> list[Given]:
    size = len(given) // count
    return [given[k * size : (k + 1) * size] for k in range(count)]


def sgd(
    given: Given, said: Said, decay: float, momentum: float, damp: float, nesterov: int, up: int
) -> Made:
    news: list[Tensor | None] = []
    kept: list[Tensor | None] = []
    rate = float(given[-1])
    for p, g, m in zip(*_lists(given[:-1], 3), strict=True):
        g = (-g if up else g) + decay * p
        m = None if m is None else momentum * m + (1 - damp) * g
        g = g if m is None else g + momentum * m if nesterov else m
        news.append(p - rate * g)
        kept.append(m)
    return [*news, *kept]


def adam(apart: bool) -> Callable[..., Made]:
    def step(
        given: Given,
        said: Said,
        b1: float,
        b2: float,
        eps: float,
        decay: float,
        largest: int,
        up: int,
    ) -> Made:
        made: list[list[Tensor | None]] = [[], [], [], []]
        rate = float(given[-1])
        for p, g, m, v, top, count in zip(*_lists(given[:-1], 6), strict=True):
            g = -g if up else g
            p, g = (p * (1 - rate * decay), g) if apart else (p, g + decay * p)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            top = torch.maximum(top, v) if largest else None
            one, two = 1 - b1 ** float(count), 1 - b2 ** float(count)
            below = (v if top is None else top).sqrt() / math.sqrt(two) + eps
            for items, item in zip(made, (p - rate / one * m / below, m, v, top), strict=True):
                items.append(item)
        return [item for items in made for item in items]

    return step


ADAM = "d d d d B B"
KINDS: Mapping[int, Kind] = {
    0: Kind("s s", by_name),
    1: Kind("", copied, ()),
    2: Kind(
        "d", lambda given, said, value: [torch.full(*said[0][:1], value, dtype=said[0][1])], (0.0,)
    ),
    VIEW: Kind("q q* q*", lambda *_: []),
    4: Kind("i", lambda given, said, dim: [torch.cat([*given], dim)], (0,)),
    8: Kind("d", lambda given, said, alpha: [_added(*given, alpha)], (1.0,)),
    9: Kind("", lambda given, said: [given[0] + given[1]], ()),
    10: Kind("", lambda given, said: [torch.relu(given[0])], ()),
    11: Kind("d", lambda given, said, least: [torch.where(given[1] <= least, 0, given[0])], (0.0,)),
    12: Kind("s", chain),
    16: Kind("q* d", summed),
    20: Kind("B B B d", gemm, (0, 0, 0, 1.0)),
    21: Kind("d", lambda given, said, alpha: [given[0] @ given[1] * alpha], (1.0,)),
    22: Kind("i B", softmax),
    23: Kind("i B", softmax_backward),
    24: Kind("i d", layer_norm),
    25: Kind("i", layer_norm_backward, (1,)),
    26: Kind("B d d", batch_norm),
    27: Kind("B d", batch_norm_backward),
    28: Kind("B d", attention),
    29: Kind("B d", attention_backward),
    30: Kind("", lambda given, said: [given[0][given[1]]], ()),
    31: Kind("q", embedding_backward, (-1,)),
    32: Kind("B q", cross_entropy, (1, -100)),
    33: Kind("B q", cross_entropy_backward, (1, -100)),
    34: Kind("B", lambda given, said, reduction: [aten.mse_loss(*given, reduction)], (1,)),
    35: Kind("B", mse_backward, (1,)),
    36: Kind("q* q* q* q B", conv, ([1, 1], [0, 0], [1, 1], 1, 0)),
    37: Kind("q* q* q* B B", pool),
    40: Kind("d d d B B", sgd, (0.0, 0.0, 0.0, 0, 0)),
    41: Kind(ADAM, adam(False), (0.9, 0.999, 1e-8, 0.0, 0, 0)),
    42: Kind(ADAM, adam(True), (0.9, 0.999, 1e-8, 0.0, 0, 0)),
    43: Kind(
        "d",
        lambda given, said, by: [x + (int(by) if not x.is_floating_point() else by) for x in given],
        (1.0,),
    ),
}
"""All but dropout, whose mask is a generator of its own: no subject of `mutants` has it."""


def _added(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    whole = not torch.result_type(a, b).is_floating_point
    return torch.add(a, b, alpha=int(alpha) if whole else alpha)
