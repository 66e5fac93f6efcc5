"""Communications to try: the operation, what members give, and what they should get.

What should come out is written here in the plainest way, independent of `collectives`. Values are
small whole numbers, so that a sum is exact in every dtype and in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.comm.transport import Operation, TensorSpec
from shardwright.comm.wire import flat_bytes
from shardwright.ir.tensor_meta import DTYPES, torch_dtype
from shardwright.pipeline.rules import UNDEFINED

Shape = tuple[int, ...]

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
KINDS = ("send", "broadcast", "all_gather", "all_to_all", *REDUCTIONS)


@dataclass(frozen=True)
class Case:
    """``sizes`` are the pieces along ``dim``, and ``src_sizes`` those of all_to_all's source."""

    kind: str
    dtype: str = "f32"
    shape: Shape = (4, 6)
    ranks: tuple[int, ...] = (0, 1)
    reduce_op: str = "sum"
    dim: int = 0
    sizes: tuple[int, ...] = (2, 2)
    src_dim: int = 1
    src_sizes: tuple[int, ...] = (3, 3)
    root: int = 0
    strides: Shape | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


def with_size(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def given(case: Case, seed: int = 0) -> list[Tensor | None]:
    """What each member gives."""
    generator = torch.Generator().manual_seed(seed)
    tensors: list[Tensor | None] = []
    for member in range(case.size):
        shape = case.shape
        if case.kind in ("all_gather", "all_to_all"):
            shape = with_size(shape, case.dim, case.sizes[member])
        if case.kind == "all_to_all":
            shape = with_size(shape, case.src_dim, sum(case.src_sizes))
        source = case.root if case.kind == "broadcast" else 0
        if case.kind in ("send", "broadcast") and member != source:
            tensors.append(None)
            continue
        dtype = torch_dtype(case.dtype)
        low = -3 if dtype.is_signed else 0
        whole = torch.randint(low, 2 if case.dtype == "bool" else 4, shape, generator=generator)
        if dtype.is_complex:
            whole = torch.complex(whole.double(), whole.flip(-1).double())
        tensors.append(laid_out(whole.to(dtype), case.strides))
    return tensors


def laid_out(tensor: Tensor, strides: Shape | None) -> Tensor:
    if strides is None:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def wanted(case: Case, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What each member should get."""
    tensors = [tensor for tensor in inputs if tensor is not None]
    if case.kind == "send":
        return [None, tensors[0]]
    if case.kind == "broadcast":
        return [tensors[0]] * case.size
    if case.kind == "all_gather":
        return [torch.cat(tensors, case.dim)] * case.size
    if case.kind == "all_to_all":
        cut = [tensor.split(case.src_sizes, case.src_dim) for tensor in tensors]
        return [torch.cat([row[i] for row in cut], case.dim) for i in range(case.size)]
    total = reduced(tensors, case.reduce_op)
    if case.kind == "reduce":
        return [total if member == case.root else None for member in range(case.size)]
    if case.kind == "all_reduce":
        return [total] * case.size
    return list(total.split(case.sizes, case.dim))


def reduced(tensors: Sequence[Tensor], reduce_op: str) -> Tensor:
    dtype = tensors[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(reduced([torch.view_as_real(t) for t in tensors], reduce_op))
    wide = torch.stack([tensor.to(torch.float64) for tensor in tensors])
    if reduce_op == "avg":
        return wide.mean(0).to(torch.float32 if dtype.itemsize < 4 else dtype).to(dtype)
    total = {"sum": wide.sum(0), "max": wide.amax(0), "min": wide.amin(0)}[reduce_op]
    return total.to(dtype)


def operation(case: Case, tag: int = 0) -> Operation:
    """The case as the operation that all its members know."""
    inputs = given(case)
    outputs = wanted(case, inputs)
    return Operation(
        kind=case.kind,
        group=f"g{tag}",
        tag=tag,
        ranks=case.ranks,
        tasks=tuple(f"task{rank}" for rank in case.ranks),
        inputs=tuple(spec(tensor, case.strides) for tensor in inputs),
        outputs=tuple(spec(tensor, case.strides) for tensor in outputs),
        metadata=metadata(case),
        root=case.root if case.kind in ("broadcast", "reduce") else None,
    )


def metadata(case: Case) -> dict[str, int | str]:
    """What a file says of the case, except its root."""
    found: dict[str, int | str] = {}
    if case.kind in REDUCTIONS:
        found["reduce_op"] = case.reduce_op
    if case.kind in ("all_gather", "reduce_scatter"):
        found["dim"] = case.dim
    if case.kind == "all_to_all":
        found |= {"src_dim": case.src_dim, "dst_dim": case.dim}
    return found


def spec(tensor: Tensor | None, strides: Shape | None) -> TensorSpec | None:
    if tensor is None:
        return None
    return TensorSpec(tuple(tensor.shape), tensor.dtype, strides)


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    """Equal in presence, shape, dtype and bits."""
    if found is None or expected is None:
        return found is expected
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(flat_bytes(found.contiguous()), flat_bytes(expected.contiguous()))


def _sizes(count: int, *, uneven: bool) -> tuple[int, ...]:
    """2 each, or 3, 2, 2, 1 cut to the count."""
    return (3, 2, 2, 1)[:count] if uneven else (2,) * count


def _case(kind: str, dtype: str, ranks: tuple[int, ...], *, uneven: bool, **fields: object) -> Case:
    sizes = _sizes(len(ranks), uneven=uneven)
    shape = (sum(sizes), 2 * sum(sizes), 2)
    return Case(
        kind,
        dtype,
        shape,
        ranks,
        sizes=sizes,
        src_sizes=tuple(2 * size for size in sizes),
        **fields,  # type: ignore[arg-type]
    )


def table() -> list[Case]:
    """Every kind with every dtype, in groups of two to four, even and uneven, and odd ones."""
    cases = [
        _case(kind, dtype, ranks[:2] if kind == "send" else ranks, uneven=uneven)
        for kind in KINDS
        for dtype in DTYPES
        for ranks, uneven in (((0, 1), False), ((2, 0, 1), True), ((0, 1, 2, 3), True))
    ]
    cases += [
        _case(kind, dtype, (3, 1, 0), uneven=True, reduce_op=reduce_op, root=2)
        for kind in REDUCTIONS
        for dtype in DTYPES
        for reduce_op in ("avg", "max", "min")
        if dtype not in UNDEFINED.get(reduce_op, ())
    ]
    cases += [
        Case("broadcast", shape=(), ranks=(1, 3, 2), root=1),
        Case("all_reduce", shape=(), ranks=(1, 3, 2)),
        Case("all_reduce", "bf16", shape=(2,), ranks=(0, 1, 2, 3)),
        Case("send", shape=(0, 3), ranks=(3, 0)),
        Case("all_gather", ranks=(0, 1, 2), shape=(3, 2), sizes=(2, 1, 0)),
        Case("reduce_scatter", ranks=(0, 1, 2), shape=(3, 2), sizes=(2, 1, 0)),
        Case("all_to_all", ranks=(3, 2), dim=0, src_dim=0, shape=(4, 2), sizes=(4, 4),
             src_sizes=(2, 2)),
        Case("send", "f16", ranks=(1, 2), strides=(1, 4)),
        Case("send", ranks=(1, 2), strides=(12, 2)),
        Case("send", ranks=(1, 2), shape=(2, 3, 4), strides=(1, 8, 2)),
        Case("broadcast", ranks=(0, 1, 2, 3), strides=(1, 4), root=3),
        Case("all_reduce", ranks=(0, 1, 2), strides=(1, 4)),
    ]  # fmt: skip
    return cases
