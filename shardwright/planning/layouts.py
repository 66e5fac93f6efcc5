"""The splits of a graph's nodes that take the least time on a mesh, found exactly.

Comes in: a forward view, the axes of a mesh, machines, and costs of nodes. Goes out: a `Chosen`.
Every node may be split by any identifier of its dimension annotation along each axis that is free.
What that takes is the sum of tables over the strategies of a node, and of those that exchange
values with it: computing, bringing values to where they are wanted, gradients back, and those of
parameters together once a step (`domains`, `exchange`, `model`). Eliminating one node after another
gives the least sum (`elimination`); equal layers are solved once.

This is the inner problem of Alpa (Zheng et al., OSDI 2022), there an integer program, with what
several readers share and what one step's gradients share counted once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.layout import Cluster
from shardwright.planning.chosen import Chosen, mesh_on, price_splits
from shardwright.planning.domains import Domains
from shardwright.planning.elimination import minimise
from shardwright.planning.model import Model, Terms
from shardwright.planning.outline import outline_of
from shardwright.planning.strategies import Choice
from shardwright.profiling.cost import Costs

__all__ = ["Chosen", "best_splits", "price_splits"]


def best_splits(
    view: IRGraph,
    axes: Mapping[str, int],
    *,
    cluster: Cluster,
    costs: Costs,
    training: bool,
    fixed: Mapping[str, Sequence[Choice]] | None = None,
    byte_price: float = 0.0,
    microbatches: int = 1,
) -> Chosen:
    """The splits of least seconds for the nodes of a forward view.

    view
        The forward of a model, or of a training step (`forward_view`).
    axes
        The sizes of a mesh's axes by name, the outermost first, without a pipeline. It stands on
        the first slots of ``cluster``.
    fixed
        By axis: what an axis that is not free does with each node, such as a batch's split.
    byte_price
        Seconds that a byte of stored values on a slot is worth.
    microbatches
        How many share what is done once a step.

    Raises PlanError where the cluster is too small, or fixed splits cannot be.
    """
    fixed = fixed or {}
    outline = outline_of(view)
    mesh = mesh_on(cluster, axes)
    names = list(axes)
    if unknown := [axis for axis in fixed if axis not in axes]:
        raise PlanError(
            f"the axis {unknown[0]!r} is fixed, but the mesh has only {', '.join(axes) or 'none'}"
        )
    by_number = {names.index(axis): splits for axis, splits in fixed.items()}
    domains = Domains(outline, mesh.sizes, costs, training, by_number).run()
    terms = Terms(training, byte_price, 1.0 / microbatches)
    model = Model(outline, domains, mesh.sizes, cluster.links(mesh), terms).build()
    chosen, _ = minimise(model.sizes, model.factors)
    splits = [
        tuple(
            by_number[axis][position] if axis in by_number else choice
            for axis, choice in enumerate(domain.strategies[chosen[variable]].splits)
        )
        for position, (domain, variable) in enumerate(zip(domains, model.nodes, strict=True))
    ]
    return price_splits(
        view,
        axes,
        splits,
        cluster=cluster,
        costs=costs,
        training=training,
        microbatches=microbatches,
    )
