"""The one table of kinds: what a lowered call may be, and what its blob holds.

A `Kind` has an id that files and native code use, its schemas by number, and what the planner may
do with its memory. Schema 0 is every kind's call with default attributes and an empty blob.

What always holds: an id never changes its meaning, a schema never its layout; a new need is a new
schema. Operands stand in the order that the table's comments give; an optional operand that is not
there is -1 in a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from shardwright.errors import ExecError
from shardwright.kernels.blobs import Layout

Aliasing = Literal["none", "elementwise", "listed"]
"""What an output may share with an input that nobody reads afterwards.

``elementwise``: any output with any input of the same shape, dtype and strides, since an element is
read before it is written and no other is read. ``listed``: the pairs of
`Kind.pairs`, or of the lists that are `Kind.written`.
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """One row.

    operands
        Inputs and outputs in words, in order, for people; ``?`` marks optional ones, ``…`` lists.
    schemas
        Layout by schema number, 1 and up.
    defaults
        What schema 0 means, by field of schema 1.
    lists
        For multi-tensor kinds, how many lists of equal length the inputs begin with.
    written
        For multi-tensor kinds, which of these lists the outputs renew, in the outputs' order.
    pairs
        Which output may lie in which input's memory, where ``aliasing`` is ``listed``.
    free
        Whether it costs nothing at run time (a view).
    constrains
        What holds of every call of it (`constraints.CONSTRAINTS`).
    """

    id: int
    name: str
    operands: str
    schemas: Mapping[int, Layout] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliasing: Aliasing = "none"
    lists: int = 0
    written: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    free: bool = False
    constrains: tuple[str, ...] = ()

    def takes(self, n_in: int, n_out: int) -> bool:
        """Whether a call may have so many operands, absent ones counted."""
        if self.lists:
            single = 1 if len(self.names(0)) > self.lists else 0
            count, left = divmod(n_in - single, self.lists)
            return count > 0 and left == 0 and n_out == count * len(self.written)
        counts = zip((n_in, n_out), map(self.names, (0, 1)), strict=True)
        return all(len(names) == n or names[:1] in (["x…"], ["y…"]) for n, names in counts)

    def lacks(self, inputs: Sequence[int], outputs: Sequence[int]) -> str:
        """The name of an operand that is absent (-1) and not optional; empty where there is none.

        Operands of multi-tensor kinds may be absent by lists.
        """
        if self.lists:
            return ""
        for names, vids in zip(map(self.names, (0, 1)), (inputs, outputs), strict=True):
            for k, vid in enumerate(vids):
                name = names[min(k, len(names) - 1)]
                if vid < 0 and name[-1] not in "?…":
                    return name
        return ""

    def names(self, side: int) -> list[str]:
        """The inputs (0) or outputs (1) by their names in `operands`."""
        return _names(BY_NAME["adam"].operands if self.name == "adamw" else self.operands)[side]

    def pack(self, attrs: Mapping[str, Any]) -> tuple[int, bytes]:
        """The schema and the blob of these attributes: schema 0 where all are the defaults."""
        if self.has_defaults and dict(attrs) == dict(self.defaults):
            return 0, b""
        return 1, self.layout(1).pack(attrs)

    @property
    def has_defaults(self) -> bool:
        """Whether every attribute has a default, so that schema 0 says what the call is."""
        return all(layout.fields.keys() == self.defaults.keys() for layout in self.schemas.values())

    def unpack(self, schema: int, blob: bytes) -> dict[str, Any]:
        """The attributes. Raises ExecError for an unknown schema or a blob of another length."""
        if schema == 0 and self.has_defaults:
            if blob:
                raise ExecError(f"{self.name}: schema 0 has no blob, found {len(blob)} bytes")
            return dict(self.defaults)
        try:
            return self.layout(schema).unpack(blob)
        except ExecError as error:
            raise ExecError(f"{self.name}, schema {schema}: {error}") from None

    def layout(self, schema: int) -> Layout:
        """A schema's layout. Raises ExecError where the kind has none of this number."""
        if schema not in self.schemas:
            known = ", ".join(map(str, [0] * self.has_defaults + sorted(self.schemas)))
            raise ExecError(f"{self.name} has no attribute schema {schema}; known are {known}")
        return self.schemas[schema]


@cache
def _names(operands: str) -> tuple[list[str], list[str]]:
    """The names of inputs and outputs, without their shapes."""
    inputs, outputs = (
        [name.strip() for name in side.split(",") if name.strip()]
        for side in re.sub(r"\[[^]]*\]", "", operands).split("→")
    )
    return inputs, outputs


def _schema(**fields: str) -> dict[int, Layout]:
    return {1: Layout(fields)}


_ADAM = {
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": 0,
    "maximize": 0,
}
_ADAM_SCHEMA = _schema(beta1="d", beta2="d", eps="d", weight_decay="d", amsgrad="B", maximize="B")
_CONV = {
    "stride": (1, 1),
    "padding": (0, 0),
    "dilation": (1, 1),
    "groups": 1,
    "activation": 0,
}

KINDS: tuple[Kind, ...] = (
    # What everything else is done by: any operator, called by its name; args as a file's node. It
    # may draw random numbers, so calls keep their order.
    Kind(0, "generic", "x… → y…", _schema(op="s", call="s"), constrains=("ordered",)),
    # Strides, shapes and dtypes are the operands'; x broadcasts to y.
    Kind(1, "copy", "x → y", aliasing="elementwise"),
    Kind(2, "fill", "→ y", _schema(value="d"), {"value": 0.0}),
    Kind(3, "view", "x → y", _schema(offset="q", shape="q*", strides="q*"), free=True),
    Kind(4, "concat", "x… → y", _schema(dim="i"), {"dim": 0}),
    # Elementwise, with broadcasting.
    Kind(8, "add", "a, b → y", _schema(alpha="d"), {"alpha": 1.0}, "elementwise"),
    Kind(9, "bias_add", "x [.., n], bias [n] → y", aliasing="elementwise"),
    Kind(10, "relu", "x → y", aliasing="elementwise"),
    Kind(11, "relu_bwd", "dy, x → dx", _schema(threshold="d"), {"threshold": 0.0}, "elementwise"),
    # A program over one element: see `chains`.
    Kind(12, "chain", "x… → y…", _schema(program="s"), aliasing="elementwise"),
    Kind(
        13,
        "dropout",
        "x, step → y",
        _schema(p="d", seed="q", site="q", offsets="q*", whole_shape="q*"),
        aliasing="elementwise",
    ),
    # y = scale * the sum over dims; dims that are kept have size 1 in y, or are left out.
    Kind(16, "reduce_sum", "x → y", _schema(dims="q*", scale="d")),
    # y = act(alpha * op(a) op(b) + bias + residual); a [.., m, k], b [k, n]; transposed: [k, m],
    # [n, k]. An activation is a row of ACTIVATIONS. With several leading dims, a is not transposed.
    Kind(
        20,
        "gemm",
        "a, b, bias? [n], residual? [.., m, n] → y [.., m, n]",
        _schema(transpose_a="B", transpose_b="B", activation="B", alpha="d"),
        {"transpose_a": 0, "transpose_b": 0, "activation": 0, "alpha": 1.0},
        "listed",
        pairs=((0, 3),),
    ),
    Kind(21, "bmm", "a [b, m, k], b [b, k, n] → y [b, m, n]", _schema(alpha="d"), {"alpha": 1.0}),
    Kind(22, "softmax", "x → y", _schema(dim="i", log="B"), aliasing="elementwise"),
    Kind(23, "softmax_bwd", "dy, y → dx", _schema(dim="i", log="B"), aliasing="elementwise"),
    # dims is how many trailing dimensions are normalized.
    Kind(
        24,
        "layer_norm",
        "x, w?, b? → y, mean?, rstd?",
        _schema(dims="i", eps="d"),
        aliasing="listed",
        pairs=((0, 0),),
    ),
    Kind(
        25,
        "layer_norm_bwd",
        "dy, x, mean, rstd, w?, b? → dx?, dw?, db?",
        _schema(dims="i"),
        {"dims": 1},
        "listed",
        pairs=((0, 0), (0, 1)),
    ),
    # In training the last two outputs are the new running statistics.
    Kind(
        26,
        "batch_norm",
        "x, w?, b?, running_mean?, running_var? → y, mean?, invstd?, new_mean?, new_var?",
        _schema(training="B", momentum="d", eps="d"),
        aliasing="listed",
        pairs=((0, 0), (3, 3), (4, 4)),
    ),
    Kind(
        27,
        "batch_norm_bwd",
        "dy, x, w?, running_mean?, running_var?, mean?, invstd? → dx?, dw?, db?",
        _schema(training="B", eps="d"),
        aliasing="listed",
        pairs=((0, 0), (0, 1)),
    ),
    # q [b, h, l, d], k and v [b, h, s, d]; lse [b, h, l] is the logarithm of the sum of exps.
    Kind(28, "attention", "q, k, v, mask? → y, lse?", _schema(causal="B", scale="d")),
    Kind(
        29,
        "attention_bwd",
        "dy, q, k, v, y, lse, mask? → dq, dk, dv",
        _schema(causal="B", scale="d"),
    ),
    Kind(30, "embedding", "w [v, d], index → y [.., d]"),
    Kind(31, "embedding_bwd", "dy, index → dw [v, d]", _schema(padding="q"), {"padding": -1}),
    # reduction as torch numbers it: 0 none, 1 mean, 2 sum. log_probs [n, c].
    Kind(
        32,
        "cross_entropy",
        "x [n, c], target [n], w? → loss, total_weight, log_probs",
        _schema(reduction="B", ignore="q"),
        {"reduction": 1, "ignore": -100},
        "listed",
        pairs=((2, 0),),
    ),
    Kind(
        33,
        "cross_entropy_bwd",
        "dloss, log_probs, target, total_weight, w? → dx",
        _schema(reduction="B", ignore="q"),
        {"reduction": 1, "ignore": -100},
        "listed",
        pairs=((0, 1),),
    ),
    Kind(34, "mse", "a, b → loss", _schema(reduction="B"), {"reduction": 1}),
    Kind(
        35,
        "mse_bwd",
        "dloss, a, b → da",
        _schema(reduction="B"),
        {"reduction": 1},
        "listed",
        pairs=((0, 1), (0, 2)),
    ),
    # Channels may lie last; the weight is [out, in / groups, kh, kw].
    Kind(
        36,
        "conv",
        "x [b, c, h, w], w, bias?, residual? → y",
        _schema(stride="q*", padding="q*", dilation="q*", groups="q", activation="B"),
        _CONV,
        "listed",
        pairs=((0, 3),),
    ),
    Kind(
        37,
        "pool",
        "x [b, c, h, w] → y",
        _schema(kernel="q*", stride="q*", padding="q*", mean="B", count_padding="B"),
    ),
    # All parameters at once; lr is one element, a step counter one element a parameter. Kernels go
    # through a parameter and what belongs to it in the order of memory.
    Kind(
        40,
        "sgd",
        "params…, grads…, momentums…, lr → params…, momentums…",
        _schema(weight_decay="d", momentum="d", dampening="d", nesterov="B", maximize="B"),
        {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": 0, "maximize": 0},
        "listed",
        lists=3,
        written=(0, 2),
        constrains=("alike",),
    ),
    Kind(
        41,
        "adam",
        "params…, grads…, averages…, squares…, largest…, steps…, lr → params…, averages…, "
        "squares…, largest…",
        _ADAM_SCHEMA,
        _ADAM,
        "listed",
        lists=6,
        written=(0, 2, 3, 4),
        constrains=("alike",),
    ),
    Kind(
        42,
        "adamw",
        "as adam; weight decay acts on the parameter",
        _ADAM_SCHEMA,
        _ADAM,
        "listed",
        lists=6,
        written=(0, 2, 3, 4),
        constrains=("alike",),
    ),
    Kind(43, "step_inc", "steps… → steps…", _schema(by="d"), {"by": 1.0}, "listed", 1, (0,)),
)

BY_ID: Mapping[int, Kind] = {kind.id: kind for kind in KINDS}
BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")
"""What a call's ``activation`` number means; ``gelu`` is by the error function."""


def kind_of(kind_id: int) -> Kind:
    """The row of an id. Raises ExecError."""
    try:
        return BY_ID[kind_id]
    except KeyError:
        raise ExecError(f"kind {kind_id} is unknown; this version has {sorted(BY_ID)}") from None
