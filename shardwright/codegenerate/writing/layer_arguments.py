"""What the constructors of layers take: the arguments whose layer, called, is captured as a node.

Comes in: a node of a module. Goes out: the texts of the constructor's arguments, but for the dtype;
None where no such layer has that call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.codegenerate.spelling.literals import listed
from shardwright.codegenerate.spelling.table import REDUCTIONS
from shardwright.codegenerate.writing.layer_part import Part, affine, short, unless, unlike

Write = Callable[[Part], list[str] | None]
"""What writes them for layers of one class."""

# --- products -----------------------------------------------------------------------------------


def linear(part: Part) -> list[str] | None:
    """``3, 4``: features in and out."""
    weight = part.shape("weight")
    if len(weight) != 2:
        return None
    return [str(weight[1]), str(weight[0]), *unless(part.has("bias"), "bias=False")]


def bilinear(part: Part) -> list[str] | None:
    """``2, 3, 4``: features of both inputs and of the output."""
    out, first, second = part.shape("weight")
    return [str(first), str(second), str(out), *unless(part.has("bias"), "bias=False")]


def embedding(part: Part) -> list[str] | None:
    """``50257, 768, padding_idx=0``."""
    defaults = {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
    return [*map(str, part.shape("weight")), *unlike(part, defaults)]


def convolution(part: Part) -> list[str] | None:
    """``3, 64, kernel_size=7, stride=2, bias=False``."""
    out, into, *kernel = part.shape("weight")
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    return _convolution(part, into * part.arguments["groups"], out, kernel, defaults)


def transposed(part: Part) -> list[str] | None:
    """``64, 3, kernel_size=4, stride=2``."""
    into, out, *kernel = part.shape("weight")
    defaults = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    return _convolution(part, into, out * part.arguments["groups"], kernel, defaults)


def _convolution(
    part: Part, into: int, out: int, kernel: list[int], defaults: Mapping[str, Any]
) -> list[str] | None:
    lists = [part.arguments[name] for name in defaults if name != "groups"]
    if any(isinstance(item, list) and len(item) != len(kernel) for item in lists):
        return None
    size = f"kernel_size={short(kernel)}"
    bias = unless(part.has("bias"), "bias=False")
    return [str(into), str(out), size, *unlike(part, defaults), *bias]


# --- normalization ------------------------------------------------------------------------------


def layer_norm(part: Part) -> list[str] | None:
    """``768, eps=1e-06``."""
    rest = affine(part, "elementwise_affine")
    if rest is None:
        return None
    return [_normalized(part), *unlike(part, {"eps": 1e-5}), *rest]


def rms_norm(part: Part) -> list[str] | None:
    """``768, eps=1e-06``."""
    rest = unless(part.has("weight"), "elementwise_affine=False")
    return [_normalized(part), *unlike(part, {"eps": None}), *rest]


def _normalized(part: Part) -> str:
    shape = part.arguments["normalized_shape"]
    return str(shape[0]) if len(shape) == 1 else listed([str(size) for size in shape])


def group_norm(part: Part) -> list[str] | None:
    """``32, 128``: groups and channels."""
    rest = affine(part)
    if rest is None:
        return None
    sizes = [str(part.arguments["num_groups"]), str(part.shape("input")[1])]
    return [*sizes, *unlike(part, {"eps": 1e-5}), *rest]


def batch_norm(*ranks: int) -> Write:
    """``64, momentum=0.01``, of inputs of so many dimensions."""

    def write(part: Part) -> list[str] | None:
        tracked = part.has("running_mean")
        if part.arguments["training"] == tracked or len(part.shape("input")) not in ranks:
            return None
        return statistical(part, tracked, affine(part), ["track_running_stats=False"])

    return write


def instance_norm(*ranks: int) -> Write:
    """``64, affine=True``: unlike batch norms, plain unless it is said."""

    def write(part: Part) -> list[str] | None:
        tracked = part.has("running_mean")
        if part.arguments["use_input_stats"] == tracked or len(part.shape("input")) not in ranks:
            return None
        own = {"bias=False": ["affine=True", "bias=False"], "affine=False": []}
        rest = affine(part)
        if rest is not None:
            rest = own[rest[0]] if rest else ["affine=True"]
        return statistical(part, not tracked, rest, ["track_running_stats=True"])

    return write


def statistical(
    part: Part, usual: bool, rest: list[str] | None, tracks: list[str]
) -> list[str] | None:
    """``64, eps=0.001``; ``tracks`` where it is not ``usual`` whether statistics are kept."""
    if rest is None:
        return None
    said = [*unlike(part, {"eps": 1e-5, "momentum": 0.1}), *rest]
    return [str(part.shape("input")[1]), *said, *([] if usual else tracks)]


# --- layers without parameters ------------------------------------------------------------------


def plain(**defaults: Any) -> Write:
    """Numbers under the schema's own names, and none that the layer does not take."""

    def write(part: Part) -> list[str] | None:
        return unlike(part, defaults) if part.is_plain(*defaults) else None

    return write


def by_place(*names: str) -> Write:
    """Numbers by place."""

    def write(part: Part) -> list[str] | None:
        if not part.is_plain(*names):
            return None
        return [short(part.arguments[name]) for name in names]

    return write


def relu6(part: Part) -> list[str] | None:
    """Nothing: a hardtanh between 0 and 6."""
    ends = part.arguments["min_val"], part.arguments["max_val"]
    return [] if ends == (0, 6) else None


def dropout(part: Part) -> list[str] | None:
    """``0.1``; only what drops in training is a call at all."""
    return [short(part.arguments["p"])] if part.arguments["train"] else None


def pool(**defaults: Any) -> Write:
    """``3, stride=2``; a stride that is the kernel is not said."""

    def write(part: Part) -> list[str] | None:
        kernel, stride = part.arguments["kernel_size"], part.arguments["stride"]
        if not stride:
            return None
        step = [] if stride == kernel else [f"stride={short(stride)}"]
        return [short(kernel), *step, *unlike(part, defaults)]

    return write


def unflatten(part: Part) -> list[str] | None:
    """``1, (2, 3)``."""
    sizes = [str(size) for size in part.arguments["sizes"]]
    return [str(part.arguments["dim"]), listed(sizes)]


def padding(mode: str, *, valued: bool = False) -> Write:
    """``1``, ``(1, 0), 0.5``."""

    def write(part: Part) -> list[str] | None:
        value = part.arguments["value"]
        if part.arguments["mode"] != mode or (value is None) == (mode == "constant"):
            return None
        if not valued and value:
            return None
        return [short(part.arguments["pad"]), *([short(value)] if valued else [])]

    return write


def loss(**defaults: Any) -> Write:
    """``reduction="sum"``, of losses without weights."""

    def write(part: Part) -> list[str] | None:
        reduction = part.arguments["reduction"]
        if any(part.has(name) for name in ("weight", "pos_weight") if name in part.arguments):
            return None
        word = [] if reduction == 1 else [f'reduction="{REDUCTIONS[reduction]}"']
        return unlike(part, defaults) + word

    return write
