"""verify: a pipeline computes what the model it came from computes.

Input: a pipeline, the model (or its graph) and arguments; both are run, with the same number of
threads, and their outputs compared tensor by tensor. Output: a `Report` of the differences, or a
VerifyError that lists them.

Invariant: the model is left as it was, its buffers too, and so are the arguments; both
runs begin with the same ones, and the model's tensors want no gradients, as a pipeline's do. Its
weights are its own: where the file has others, the error says so, and `other_weights` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from shardwright.errors import VerifyError
from shardwright.ir import IRGraph
from shardwright.ir.operators import is_random
from shardwright.ir.structure import Tree, describe_result, leaves
from shardwright.pipeline import Bundle, Pipeline
from shardwright.pipeline.bundle import first_of
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.profiling.clock import computing_threads
from shardwright.runtime.contents import Contents
from shardwright.runtime.runner import Runner
from shardwright.torch_internals import tree_map_only


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """One output: the largest ``|a - b|``, the largest ``|b|``, and whether it is within bounds."""

    output: str
    largest: float
    scale: float
    equal: bool

    @property
    def relative(self) -> float:
        """The largest difference as a part of the largest value; infinite where that is 0."""
        if not self.largest:
            return 0.0
        return self.largest / self.scale if self.scale else float("inf")

    def __str__(self) -> str:
        verdict = "equal" if self.equal and not self.largest else f"differs by {self.largest:.3g}"
        return f"{self.output}: {verdict} (largest value {self.scale:.3g})"


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found; prints as a line an output."""

    outputs: tuple[OutputDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether every output is within bounds."""
        return all(difference.equal for difference in self.outputs)

    @property
    def relative(self) -> float:
        """The largest difference, as a part of its output's largest value."""
        return max((difference.relative for difference in self.outputs), default=0.0)

    def __str__(self) -> str:
        return "\n".join(map(str, self.outputs))


def verify(
    pipeline: Pipeline | Bundle | str | Path,
    model: Callable[..., Any] | IRGraph,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    in_process: bool = True,
    tolerance: float = 0.0,
    threads: int = 1,
    timeout: float = 60.0,
    modules: Sequence[str] = (),
    npu_as_cpu: bool = False,
) -> Report:
    """Compare a pipeline, or the one of a bundle for the call's sizes, with a model on one call.

    With ``tolerance`` 0 every output must be bitwise equal (NaN equals NaN); otherwise
    ``max|a - b| <= tolerance * max|b|`` for each, where ``b`` is the model's output. Raises
    VerifyError if an output differs more, or has another shape, dtype or structure, and the errors
    of `Runner`. If the difference comes from rounding of this machine's matrix products
    (`rounding`), the error says what to do.
    """
    given = (tuple(args), dict(kwargs or {}))
    tree, wanted = _reference(model, *_copied(*given), threads)
    with Runner(
        pipeline,
        in_process=in_process,
        threads=threads,
        timeout=timeout,
        modules=modules,
        npu_as_cpu=npu_as_cpu,
    ) as runner:
        args, kwargs = _copied(*given)
        found = runner(*args, **kwargs)
        told = runner.pipeline.metadata.structure is not None
    found_tree, tensors = describe_result(found)
    if tree != found_tree if told else len(tensors) != len(wanted):
        raise VerifyError(
            f"the pipeline returns another structure than the model:\n{found_tree}\n"
            f"expected\n{tree}"
        )
    names = [leaf.name for leaf in leaves(tree)]
    report = Report(
        tuple(
            compare(name, a, b, tolerance)
            for name, a, b in zip(names, tensors, wanted, strict=True)
        )
    )
    if not report.equal:
        advice = _about_weights(pipeline, model) + _about_random_numbers(pipeline)
        if not advice and tolerance == 0:
            advice = remedy(report.relative, rounding())
        raise VerifyError(
            f"the pipeline's outputs are not the model's (tolerance {tolerance:g}):\n{report}"
            f"{advice}"
        )
    return report


def other_weights(pipeline: Pipeline | Bundle | str | Path, model: object) -> dict[str, Tensor]:
    """The file's parameters and buffers that are not the model's of the same name.

    Of the same shape and dtype, that is: what is stored under another name is not compared.
    """
    if not isinstance(model, torch.nn.Module):
        return {}
    document = first_of(pipeline)
    named = Contents(document)
    stored = document.weights.load(document.tensors)
    found = {
        slot: {tensor: stored[tensor] for tensor in parts} for slot, parts in named.parts.items()
    }
    wholes, state = named.join(found), model.state_dict()
    own = {name: state[name].detach().cpu() for name in wholes if name in state}
    return {
        name: whole
        for name, whole in wholes.items()
        if name in own
        and (whole.shape, whole.dtype) == (own[name].shape, own[name].dtype)
        and not bool(_equal(_real(whole), _real(own[name])).all())
    }


def _about_weights(pipeline: Pipeline | Bundle | str | Path, model: object) -> str:
    """What there is to say where outputs differ since weights do."""
    names = list(other_weights(pipeline, model))
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"\nthe file's weights are not the model's ({names[0]!r}{more}): it was built from other "
        "ones; load those into the model, or seed what makes it (torch.manual_seed)"
    )


def _about_random_numbers(pipeline: Pipeline | Bundle | str | Path) -> str:
    """What there is to say where outputs differ since operators draw random numbers."""
    document = first_of(pipeline)
    graphs = TaskGraphs(document)
    tasks = [name for name, task in document.supertasks.items() if task.kind == "FX"]
    drawing = [node.op for name in tasks for node in graphs.of(name).nodes if is_random(node)]
    if not drawing:
        return ""
    return (
        f"\nthe pipeline draws random numbers ({drawing[0]}), which differ in each run: the model "
        "was in train mode; call model.eval() before capture"
    )


def compare(name: str, found: Tensor, expected: Tensor, tolerance: float) -> OutputDifference:
    """Hold one tensor against another. Raises VerifyError for another shape or dtype."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise VerifyError(
            f"output {name!r} is {found.dtype}{list(found.shape)}, the model's is "
            f"{expected.dtype}{list(expected.shape)}"
        )
    own = [_real(tensor.detach().cpu()) for tensor in (found, expected)]
    a, b = (tensor.to(torch.float64) for tensor in own)
    same = _equal(*own)
    gap = torch.where(same, 0.0, (a - b).abs())
    gap = torch.where(gap.isnan(), torch.inf, gap)
    largest = float(gap.max()) if gap.numel() else 0.0
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    within = bool(same.all()) if tolerance == 0 else largest <= tolerance * scale
    return OutputDifference(name, largest, scale, within)


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as two real ones each."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Where elements are equal; NaN equals NaN. Integers are compared as they are."""
    if not a.is_floating_point():
        return a == b
    a, b = a.to(torch.float64), b.to(torch.float64)
    return (a == b) | (a.isnan() & b.isnan())


def _reference(
    model: Callable[..., Any] | IRGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    threads: int,
) -> tuple[Tree, list[Tensor]]:
    """What the model returns, with the workers' number of threads: its structure and tensors."""
    call = model.run if isinstance(model, IRGraph) else model
    with computing_threads(threads), torch.no_grad(), _unchanged(model), _AsCaptured():
        tree, tensors = describe_result(call(*args, **kwargs))
        return tree, [tensor.clone() for tensor in tensors]


class _AsCaptured(TorchFunctionMode):
    """Calls with the kernels that a graph's operators take: for tensors without gradients.

    torch folds a product in one matrix where the weight wants a gradient, even while none are
    recorded, and multiplies in batches where it does not. `nn.MultiheadAttention` and
    `nn.TransformerEncoderLayer` have a fused kernel of their own for evaluation, which they leave
    while there is a mode like this one, as there is during capture.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in ("__get__", "__set__"):  # an attribute is its own
            args, kwargs = tree_map_only(Tensor, _without_gradient, (args, kwargs))
        return func(*args, **kwargs)


def _without_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments in memory of their own, which they share as the given ones do."""
    memo: dict[int, Any] = {}
    for tensor in describe_result((args, kwargs))[1]:
        if not tensor.is_leaf:  # torch copies no tensor with a history
            memo[id(tensor)] = deepcopy(tensor.detach(), memo)
    args, kwargs = deepcopy((args, kwargs), memo)
    return args, kwargs


@contextmanager
def _unchanged(model: object) -> Iterator[None]:
    """Undo what a call changes in a module's buffers."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


# --- rounding of this machine ---------------------------------------------------------------------
#
# On most processors none differs. On some, AMD's among them, MKL takes another kernel where an
# array begins at an odd address or stands by columns, and so adds in another order: one program run
# twice, or a program and what was made of it, then differ by rounding. The environment variable
# ``MKL_CBWR=AUTO``, set before torch is imported, cures the first at no cost in speed, and leaves
# the second.
#
# No global generator is drawn from.


SHAPES = ((3, 8, 8), (60, 64, 10))
"""Rows, terms and columns of products for which kernels were seen to differ."""
BOUNDARY = 16
"""Elements of float32 between the addresses at which torch lets arrays begin."""
TOLERANCES = (1e-7, 1e-6, 1e-5)
"""What is called rounding: so much of the largest value, at most."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a product's last bits depend on, beside its numbers."""

    by_alignment: bool
    by_layout: bool


@lru_cache(maxsize=1)
def rounding() -> Rounding:
    """Try products of float32 on the CPU, once a process; it takes two milliseconds."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), computing_threads(1):
        return Rounding(
            by_alignment=_differs(lambda x: _placed(x, offset=1)),
            by_layout=_differs(lambda x: _placed(x.T).T) or _differs(lambda x: _placed(x, wider=8)),
        )


def remedy(largest: float, found: Rounding) -> str:
    """A line that says what to do about a difference of so much of the largest value.

    It is empty where the difference is more than rounding, or products are alike on this machine.
    """
    tolerance = next((bound for bound in TOLERANCES if largest <= bound), None)
    if tolerance is None or not (found.by_alignment or found.by_layout):
        return ""
    causes = ["where in memory their arrays lie"] if found.by_alignment else []
    causes += ["how their arrays are laid out"] if found.by_layout else []
    steps = ["set MKL_CBWR=AUTO before Python starts"] if found.by_alignment else []
    steps += [f"give tolerance={tolerance:g}"]
    between = ", and where that is not enough, " if found.by_layout else ", or "
    return (
        "\nThis is of the size of rounding, and here matrix products round by "
        f"{' and by '.join(causes)}: {between.join(steps)}"
    )


def _differs(place: Callable[[Tensor], Tensor]) -> bool:
    """Whether a product is another where one of its two matrices is placed otherwise."""
    return any(
        not torch.equal(linear(_placed(x), _placed(weight)), product)
        for x, weight in _matrices()
        for product in (linear(place(x), _placed(weight)), linear(_placed(x), place(weight)))
    )


def _matrices() -> Iterator[tuple[Tensor, Tensor]]:
    """What a linear layer multiplies, in each of `SHAPES`: numbers whose sums are rounded."""
    for rows, terms, columns in SHAPES:
        numbers = torch.arange(terms * (rows + columns), dtype=torch.float32, device="cpu").sin()
        x, weight = numbers.view(-1, terms).split([rows, columns])
        yield x, weight


def _placed(matrix: Tensor, *, offset: int = 0, wider: int = 0) -> Tensor:
    """A copy by rows, so many elements behind a boundary, its rows so much further apart."""
    rows, columns = matrix.shape
    pitch = columns + wider
    buffer = matrix.new_empty(BOUNDARY + offset + rows * pitch)
    begin = -buffer.data_ptr() // buffer.element_size() % BOUNDARY + offset
    return buffer.as_strided((rows, columns), (pitch, 1), begin).copy_(matrix)
