"""All slots of a mesh in one process: tensors laid out, steps and messages carried out.

Collectives are those of `shardwright.comm.collectives`, which is what pipelines run.
"""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardwright.clusters import Mesh
from shardwright.comm.rounds import combine
from shardwright.comm.transport import Operation, TensorSpec
from shardwright.sharding import (
    Layout,
    Partial,
    Redistribution,
    RedistributionStep,
    Replicate,
    Shard,
    Transfer,
)
from shardwright.sharding.layout import cuts
from shardwright.sharding.ranges import Ranges, within

UNITS = (1, 2, 6)
REDUCTIONS = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}


def cut(tensor: Tensor, box: Ranges) -> Tensor:
    return tensor[tuple(slice(*span) for span in box)]


def draw_terms(layout: Layout, mesh: Mesh, shape: tuple[int, ...], seed: int) -> Tensor:
    """A whole tensor for each coordinate along the axes that are partial; 1 along the others."""
    generator = torch.Generator().manual_seed(seed)
    axes = layout.partial_axes(mesh)
    grid = [size if axis in axes else 1 for axis, size in enumerate(mesh.sizes)]
    return torch.randint(-9, 10, (*grid, *shape), generator=generator).double()


def reduce_terms(terms: Tensor, source: Layout, target: Layout, mesh: Mesh) -> Tensor:
    """The terms, reduced along the axes that are partial in the source and not in the target."""
    for axis in set(source.partial_axes(mesh)) - set(target.partial_axes(mesh)):
        placement = source.placements[axis]
        assert isinstance(placement, Partial)
        terms = REDUCTIONS[placement.op](terms, dim=axis, keepdim=True)
    return terms


def lay_out(terms: Tensor, layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> list[Tensor]:
    """What each slot holds."""
    held = []
    for coordinate, box in zip(mesh.coordinates(), layout.slices(mesh, shape), strict=True):
        at = tuple(min(c, n - 1) for c, n in zip(coordinate, terms.shape, strict=False))
        held.append(cut(terms[at], box))
    return held


def run(conversion: Redistribution, tensors: list[Tensor]) -> list[Tensor]:
    for step in conversion.steps:
        tensors = take(step, conversion.mesh, conversion.shape, tensors)
    return tensors


def take(
    step: RedistributionStep, mesh: Mesh, shape: tuple[int, ...], tensors: list[Tensor]
) -> list[Tensor]:
    """What each slot holds after a step."""
    after = step.after.slices(mesh, shape)
    if step.kind == "slice":
        before = step.before.slices(mesh, shape)
        boxes = [within(a, b) for a, b in zip(after, before, strict=True)]
        return [cut(tensor, box) for tensor, box in zip(tensors, boxes, strict=True)]
    taken = list(tensors)
    for group in mesh.groups(step.axis):
        ranks = tuple(mesh.devices.index(device) for device in group)
        operation = Operation(
            kind=step.kind,
            group="g",
            tag=0,
            ranks=ranks,
            tasks=group,
            inputs=tuple(TensorSpec(tuple(tensors[i].shape), torch.float64) for i in ranks),
            outputs=tuple(
                TensorSpec(tuple(end - start for start, end in after[i]), torch.float64)
                for i in ranks
            ),
            metadata=step.metadata,
        )
        for i, tensor in zip(ranks, combine(operation, [tensors[i] for i in ranks]), strict=True):
            assert tensor is not None
            taken[i] = tensor
    return taken


def deliver(transfer: Transfer, held: dict[str, tuple[Ranges, Tensor]]) -> list[Tensor]:
    """What each slot assembles, when slots hold these slices."""
    return [_assemble(assembly, held, transfer.shape) for assembly in transfer.assemblies]


def _assemble(assembly, held, shape) -> Tensor:
    parts = []
    for piece in assembly.pieces:
        box, tensor = held[piece.source]
        parts.append(cut(tensor, within(piece.ranges, box)))
    for dim, count in assembly.joins:
        parts = [torch.cat(parts[i : i + count], dim) for i in range(0, len(parts), count)]
    if not parts:
        return torch.empty([end - start for start, end in assembly.ranges], dtype=torch.float64)
    (tensor,) = parts
    return tensor


def tuples(choices, max_length):
    """All tuples of these choices, each as likely as another, so that long ones are common."""
    lengths = range(max_length + 1)
    return st.sampled_from([t for n in lengths for t in product(choices, repeat=n)])


def shapes(max_dims=3):
    return tuples([5, 8, 11, 12, 6, 3, 2, 1, 0], max_dims)


@st.composite
def meshes(draw, names="d", max_axes=3):
    sizes = draw(tuples([2, 3, 4, 1], max_axes))
    mesh = Mesh.of(dict(zip("xyz", sizes, strict=False)))
    order = draw(st.permutations(mesh.devices))
    return Mesh(mesh.axes, mesh.sizes, tuple(device.replace("d", names) for device in order))


@st.composite
def layouts(draw, mesh, shape, ops=("sum",)):
    """Layouts of a shape; ``ops`` are the reductions that may stand in one layout together."""
    shards = [Shard(dim, unit) for dim, n in enumerate(shape) for unit in UNITS if n % unit == 0]
    choices = [Replicate(), *shards, *map(Partial, ops)]
    drawn = st.sampled_from(list(product(choices, repeat=mesh.ndim))).map(Layout)
    return draw(drawn.filter(lambda layout: fits(layout, mesh, shape)))


def fits(layout, mesh, shape):
    """Whether a tensor of this shape can have this layout."""
    return all(cut.fits for cut in cuts(layout.placements, mesh.sizes, shape))
