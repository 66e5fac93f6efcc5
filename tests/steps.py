"""Training steps written by hand, as `compile_ir` would give them."""

import math

import torch

from shardwright.ir import Builder, IRGraph
from shardwright.ir.tensor_meta import torch_dtype
from tests.graphs import block


def adamw(builder, parameters, grads, lr=None, **hyper):
    """An ``adamw_step`` node of all parameters, with the updates it makes."""
    attrs = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    attrs |= {"amsgrad": False, "maximize": False, **hyper}
    return optimizer(
        builder, "adamw_step", parameters, grads, lr, attrs, ("exp_avg", "exp_avg_sq", "step")
    )


def optimizer(builder, marker, parameters, grads, lr, attrs, keys):
    """A node of an optimizer whose state, by these keys, does not exist before the step."""
    lr = lr or builder.input("lr", (), "f64")
    states, renewed = [], []
    for key in keys:
        for parameter in parameters:
            like = ((), "f32") if key == "step" else (parameter.shape, parameter.dtype)
            empty = torch.zeros(like[0], dtype=torch_dtype(like[1]))
            name = f"optimizer.{parameter.names[0]}.{key}"
            states.append(builder.zeros("state", name, empty))
            renewed.append(builder.value(name, *like))
    new = [builder.value(f"new.{p.name}", p.shape, p.dtype) for p in parameters]
    builder.emit(
        marker,
        [lr, *parameters, *grads, *states],
        {"parameters": [p.names[0] for p in parameters], **attrs},
        outputs=[*new, *renewed],
    )
    old = [*parameters, *states]
    return {a.id: b.id for a, b in zip(old, [*new, *renewed], strict=True)}


def backward(builder, loss, parameters):
    """The ``Backward`` node of a loss; the gradients."""
    grads = [builder.value(f"grad.{p.names[0]}", p.shape, p.dtype) for p in parameters]
    attrs = {"parameters": [p.names[0] for p in parameters], "accumulate": False}
    made = builder.emit("Backward", [loss], attrs, outputs=grads)
    return made if isinstance(made, list) else [made]


def clip_norm(builder, grads, max_norm=1.0, norm_type=2.0):
    """A ``clip_grad_norm`` node; the norm and the clipped gradients."""
    values = [builder.value(grad.name, grad.shape, grad.dtype) for grad in grads]
    norm = builder.value("total_norm", (), grads[0].dtype)
    attrs = {"max_norm": max_norm, "norm_type": norm_type}
    norm, *clipped = builder.emit("clip_grad_norm", grads, attrs, outputs=[norm, *values])
    return norm, clipped


def finish(builder, loss, updates=(), *, clip=False, halve=False):
    """The step of a loss in which all parameters are updated by AdamW."""
    parameters = [value for value in builder.graph.stored() if value.role == "param"]
    grads = backward(builder, loss, parameters)
    if halve:
        grads = [builder.call("aten.mul.Scalar", grad, 0.5) for grad in grads]
    if clip:
        _, grads = clip_norm(builder, grads, 0.1)
    updates = dict(updates) | adamw(builder, parameters, grads)
    return builder.finish([loss], updates=updates)


def language_step(
    layers=4, width=8, vocabulary=50, *, batch=4, length=6, tied=False, weighted=False
) -> IRGraph:
    """A language model's step: labels are the tokens shifted by one, some ignored."""
    torch.manual_seed(0)
    builder = Builder("train_step")
    tokens = builder.input("tokens", (batch, length), "i64")
    labels = builder.input("labels", (batch, length), "i64")
    builder.emit("zero_grad", [], {"parameters": [], "set_to_none": True})
    table = builder.param("embed.weight", torch.randn(vocabulary, width, dtype=torch.float64))
    x = builder.call("aten.embedding.default", table, tokens)
    for i in range(layers):
        x = block(builder, x, f"layers.{i}", width)
    head = torch.randn(vocabulary, width, dtype=torch.float64)
    weight = table if tied else builder.param("head.weight", head)
    scores = builder.call("aten.linear.default", x, weight)
    scores = builder.call("aten.slice.Tensor", scores, 1, 0, length - 1)
    scores = builder.call("aten.reshape.default", scores, [batch * (length - 1), vocabulary])
    targets = builder.call("aten.slice.Tensor", labels, 1, 1, length)
    targets = builder.call("aten.reshape.default", targets, [batch * (length - 1)])
    classes = None
    if weighted:
        classes = builder.buffer("classes", torch.rand(vocabulary, dtype=torch.float64))
    return finish(
        builder, builder.call("aten.cross_entropy_loss.default", scores, targets, classes)
    )


def image_step(batch=4) -> IRGraph:
    """Convolution and batch norm in training, whose running statistics are updated."""
    torch.manual_seed(0)
    builder = Builder("train_step")
    x = builder.input("x", (batch, 3, 8, 8), "f64")
    labels = builder.input("labels", (batch,), "i64")

    def stored(role, name, *shape):
        return builder.stored(role, name, torch.rand(*shape, dtype=torch.float64))

    y = builder.call("aten.conv2d.default", x, stored("param", "conv.weight", 6, 3, 3, 3))
    mean, var = stored("buffer", "norm.mean", 6), stored("buffer", "norm.var", 6)
    y, _, _, new_mean, new_var = builder.call(
        "aten._native_batch_norm_legit_functional.default",
        y, stored("param", "norm.weight", 6), stored("param", "norm.bias", 6),
        mean, var, True, 0.1, 1e-5,
    )  # fmt: skip
    y = builder.call("aten.mean.dim", builder.call("aten.relu.default", y), [2, 3])
    y = builder.call("aten.linear.default", y, stored("param", "head.weight", 10, 6))
    loss = builder.call("aten.cross_entropy_loss.default", y, labels)
    return finish(builder, loss, {mean.id: new_mean.id, var.id: new_var.id})


def trained(graph, **options) -> IRGraph:
    """The step of a model that gives scores, its first input's batch in front, against labels."""
    builder = Builder("train_step")
    given = [
        builder.input(value.name, value.shape, value.dtype)
        for value in (graph.values[value_id] for value_id in graph.inputs)
    ]
    (scores,) = builder.inline(graph, given)
    rows, classes = scores.shape[:-1], scores.shape[-1]
    labels = builder.input("labels", rows, "i64")
    flat = builder.call("aten.reshape.default", scores, [math.prod(rows), classes])
    targets = builder.call("aten.reshape.default", labels, [math.prod(rows)])
    loss = builder.call("aten.cross_entropy_loss.default", flat, targets)
    return finish(builder, loss, **options)
