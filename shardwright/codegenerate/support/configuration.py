"""What generated files call: to make their stages, and for a Function's own backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def tensor_of(model: nn.Module, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The model's parameter or buffer of a name. Raises ValueError where it has none like that."""
    owner, _, name = key.rpartition(".")
    try:
        found: Tensor = getattr(model.get_submodule(owner), name)
    except AttributeError:
        raise ValueError(f"the model has no {key!r}; give the model that was partitioned") from None
    if (found.shape, found.dtype) != (shape, dtype):
        raise ValueError(
            f"the model's {key!r} is {found.dtype}{list(found.shape)}, expected "
            f"{dtype}{list(shape)}; give the model that was partitioned"
        )
    return found


def share_tensors(stage: nn.Module, model: nn.Module) -> None:
    """Give a stage the parameters and buffers of the model: the very same, not copies."""
    for path, module in stage.named_modules():
        for name in (*module._parameters, *module._buffers):
            own = getattr(module, name)
            if own is not None and own.is_meta:  # what is not on meta is the stage's own
                key = f"{path}.{name}" if path else name
                setattr(module, name, tensor_of(model, key, own.shape, own.dtype))


def follow_modes(stage: nn.Module, model: nn.Module) -> None:
    """Put the modules of a stage in the modes of the model's."""
    modes = {path: module.training for path, module in model.named_modules(remove_duplicate=False)}
    for path, module in stage.named_modules():
        module.training = modes.get(path, model.training)


def tie_parameters(stages: Sequence[nn.Module]) -> None:
    """Give stages the parameters that earlier ones have under the same names, or slices alike."""
    known: dict[object, nn.Parameter] = {}
    for stage in stages:
        pieces: dict[str, Any] = getattr(stage, "pieces", dict)()
        for path, parameter in list(stage.named_parameters(remove_duplicate=False)):
            owner, _, name = path.rpartition(".")
            first = known.setdefault(pieces.get(path, path), parameter)
            setattr(stage.get_submodule(owner), name, first)


def move_to_gpus(stages: Sequence[nn.Module], first: int = 0, step: int = 1) -> None:
    """Move stages to GPUs, each tensor once and in place, so that the model has it too."""
    moved = set()
    for number, stage in enumerate(stages):
        device = f"cuda:{(first + number * step) % torch.cuda.device_count()}"
        for tensor in (*stage.parameters(), *stage.buffers()):
            if id(tensor) not in moved:
                moved.add(id(tensor))
                tensor.data = tensor.data.to(device)
                if tensor.is_leaf and tensor.grad is not None:
                    tensor.grad.data = tensor.grad.data.to(device)


def warn_of_dropout(model: nn.Module) -> None:
    """Say that the model drops in training, and that what was captured in evaluation does not."""
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    for path, module in model.named_modules():
        drops = isinstance(module, (*dropouts, nn.FeatureAlphaDropout))
        if drops and module.training and module.p > 0:
            warnings.warn(
                f"the model is in training mode and has dropout ({path}), but these stages have "
                "none: it was captured in evaluation; capture it in training mode",
                UserWarning,
                stacklevel=3,
            )
            return


# --- tensors with a backward of their own, as a `torch.autograd.Function` gave them ---------------


class WithBackward(torch.autograd.Function):
    """The identity, with a backward of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Callable[..., Sequence[Tensor]],
        fills: bool,
        counts: tuple[int, int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """The first of the tensors; then come those that get gradients, then what is saved."""
        made, inputs = counts
        ctx.function, ctx.counts = backward, counts
        ctx.set_materialize_grads(fills)
        ctx.save_for_backward(*tensors[made + inputs :])
        return tuple(tensor.view_as(tensor) for tensor in tensors[:made])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """What the function makes of the gradients and of what is saved."""
        if any(gradient is None for gradient in gradients):
            raise RuntimeError("the loss does not depend on all that the function returns")
        found = ctx.function(*gradients, *ctx.saved_tensors)
        made, saved = (None,) * ctx.counts[0], (None,) * len(ctx.saved_tensors)
        return (None, None, None, *made, *found, *saved)


def with_backward(
    backward: Callable[..., Sequence[Tensor]],
    made: Sequence[Tensor],
    inputs: Sequence[Tensor],
    saved: Sequence[Tensor] = (),
    *,
    fills: bool = True,
) -> tuple[Tensor, ...]:
    """``made``, whose gradients ``backward`` takes to ``inputs``; it reads ``saved`` too."""
    counts = (len(made), len(inputs))
    apply: Callable[..., tuple[Tensor, ...]] = WithBackward.apply
    return apply(backward, fills, counts, *made, *inputs, *saved)
