"""The model of a graph's splits: it says of any choice what a walk finds."""

import random

import numpy as np
import pytest

from shardwright.clusters import Cluster
from shardwright.costs.cost import Analytic
from shardwright.errors import PlanError
from shardwright.planning.forward import forward_view
from shardwright.planning.splitting.chosen import mesh_on, price_splits
from shardwright.planning.splitting.domains import Domains
from shardwright.planning.splitting.elimination import CostFactor, EliminationMemory, minimise
from shardwright.planning.splitting.model import Objective, SplitModel
from shardwright.planning.step import as_step
from shardwright.sharding.place import outline_of
from tests.planning.projections import linear, stacked, transformer
from tests.steps import image_step, language_step

BYTE_PRICE, MICROBATCHES = 1e-9, 2


def step_view(step):
    return forward_view(as_step(step, MICROBATCHES).graph)


def modelled(view, axes, *, training):
    cluster = Cluster.of(4)
    outline, mesh = outline_of(view), mesh_on(cluster, axes)
    head = len(view.nodes) if len(axes) == 1 else 6
    costs = Analytic(cluster.device)
    domains = Domains(outline, mesh.sizes, costs, training, head=head).run()
    objective = Objective(training, BYTE_PRICE, 1 / MICROBATCHES)
    return SplitModel(outline, domains, mesh.sizes, cluster.links(mesh), objective).build()


def walked(view, axes, splits, *, training):
    cluster = Cluster.of(4)
    found = price_splits(
        view,
        axes,
        splits,
        cluster=cluster,
        costs=Analytic(cluster.device),
        training=training,
        microbatches=MICROBATCHES,
    )
    once = sum(found.once) / MICROBATCHES
    return sum(c.total for c in found.nodes) + once + BYTE_PRICE * found.stored_bytes


def only(domain, variable, splits):
    """A factor that leaves a node the strategies of one split."""
    allowed = [found.splits == splits for found in domain.strategies]
    return CostFactor((variable,), np.where(allowed, 0.0, np.inf))


VIEWS = [
    (lambda: transformer(1, product=linear, taken=stacked, batch=4), False),
    (lambda: step_view(language_step(1, tied=True)), True),
    (lambda: step_view(image_step()), True),
]


@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 2, "b": 2}], ids=str)
@pytest.mark.parametrize(("make", "training"), VIEWS, ids=["model", "tied", "norms"])
def test_any_choice_costs_what_a_walk_finds(make, training, axes):
    view = make()
    model = modelled(view, axes, training=training)
    rng = random.Random(0)
    chosen, _ = minimise(model.sizes, model.factors)
    compared = 0
    for _ in range(8):
        picks = [
            domain.strategies[chosen[v] if rng.random() < 0.8 else rng.randrange(model.sizes[v])]
            for domain, v in zip(model.domains, model.nodes, strict=True)
        ]
        given = [
            only(domain, v, pick.splits)
            for domain, v, pick in zip(model.domains, model.nodes, picks, strict=True)
        ]
        try:
            _, cost = minimise(model.sizes, [*model.factors, *given])
        except PlanError:
            continue  # terms where there are none
        compared += 1
        splits = [pick.splits for pick in picks]
        assert cost == pytest.approx(walked(view, axes, splits, training=training), abs=1e-9)
    assert compared > 2


def test_layers_more_take_few_steps_more():
    def steps(layers):
        model = modelled(transformer(layers), {"a": 2}, training=False)
        memory = EliminationMemory()
        minimise(model.sizes, model.factors, memory)
        return len(memory.steps), len(model.nodes)

    (few, nodes), (many, more) = steps(6), steps(12)
    assert many - few < (more - nodes) / 4
