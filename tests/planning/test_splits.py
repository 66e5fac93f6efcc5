"""The best splits: that nothing is better, that they cost what `build` writes, known answers."""

import itertools
import random
import re
from collections import Counter

import msgspec
import pytest
import torch

from shardwright.building.localize import localize
from shardwright.building.update import localize_step
from shardwright.clusters import Cluster, Link, Links
from shardwright.costs.cost import Analytic, NodeCost
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.planner import plan
from shardwright.planning import Assignment
from shardwright.planning.assemble import make_plan, step_of
from shardwright.planning.elimination import minimise
from shardwright.planning.plan import Split, split_text
from shardwright.planning.rules import split_nodes, take_apart
from shardwright.planning.split_problem import SplitObjective, SplitProblem, node_domains
from shardwright.planning.splits import best_splits, mesh_on
from shardwright.planning.step import as_step
from shardwright.planning.step_graph import forward_view
from shardwright.planning.unfuse import unfuse
from shardwright.sharding.place import outline_of
from tests.planning.projections import linear, stacked, transformer
from tests.steps import finish, language_step, trained

QUICK = Links.of(Link(1e-6, 20e9), Link(1e-6, 20e9), 5e-6)
SLOW = Links.of(Link(1e-3, 1e6), Link(1e-3, 1e6), 1e-3)
CHEAP = Links.of(Link(1e-8, 1e9), Link(1e-8, 1e9))
TENSOR = {"tensor": 2}


class NoCosts:
    """Nodes take no time, so that communication alone counts."""

    def node(self, graph, node, part=None):
        return NodeCost(0.0, 0.0, 0.0)


def options(links=QUICK, devices=8, **more):
    cluster = Cluster.of(devices, inside=links)
    return {"cluster": cluster, "costs": Analytic(cluster.device), "training": False, **more}


def step_view(step):
    return forward_view(as_step(step, 1).graph)


def gpt(layers=1, *, batch=1, width=256):
    return transformer(layers, product=linear, taken=stacked, batch=batch, width=width)


def seconds(view, axes, splits, **given):
    """What given splits take."""
    fixed = {axis: [found[i] for found in splits] for i, axis in enumerate(axes)}
    return best_splits(view, axes, fixed=fixed, **given).seconds


# --- nothing is better ----------------------------------------------------------------------------


def random_graph(seed, *, training):
    """Four nodes or five on two values that may have several readers."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    builder = Builder("random")
    size = rng.choice([4, 6])
    values = [builder.input("x", (4, size), "f32")]
    ops = ["linear", "gelu", "softmax", "add", "matmul", "t"]
    for i in range(4):
        op, x = rng.choice(ops), rng.choice(values)
        same = [v for v in values if v.shape == x.shape]
        if op == "linear":
            weight = builder.param(f"w{i}", torch.randn(size, x.shape[-1]))
            made = builder.call("aten.linear.default", x, weight)
        elif op == "add":
            made = builder.call("aten.add.Tensor", x, rng.choice(same))
        elif op == "matmul":
            weight = builder.param(f"w{i}", torch.randn(x.shape[-1], size))
            made = builder.call("aten.matmul.default", x, weight)
        elif op == "softmax":
            made = builder.call("aten.softmax.int", x, -1)
        else:
            made = builder.call(f"aten.{op}.default", x)
        values.append(made)
    if not training:
        return builder.finish(values[-1])
    head = builder.call("aten.linear.default", values[-1], builder.param("head", torch.ones(1)))
    return step_view(finish(builder, builder.call("aten.sum.default", head)))


def small_step(seed):
    """A step whose last product is summed to the loss."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    builder = Builder("train_step")
    x = builder.input("x", (4, 6), "f32")
    x = builder.call("aten.linear.default", x, builder.param("a", torch.randn(6, 6)))
    if rng.random() < 0.5:
        x = builder.call("aten.add.Tensor", x, builder.call("aten.gelu.default", x))
    x = builder.call("aten.linear.default", x, builder.param("b", torch.randn(4, 6)))
    return step_view(finish(builder, builder.call("aten.sum.default", x)))


def least(view, axes, given):
    """The least of all splits, each by itself."""
    mesh = mesh_on(given["cluster"], axes)
    objective = SplitObjective(given["costs"], given["training"], 1.0)
    domains = node_domains(outline_of(view), mesh.sizes, objective, {})
    ways = [list(dict.fromkeys(s.splits for s in domain.strategies)) for domain in domains]
    found = []
    for splits in itertools.product(*ways):
        try:
            found.append(seconds(view, axes, splits, **given))
        except PlanError:
            continue
    return min(found)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("links", [QUICK, CHEAP])
def test_nothing_is_better_for_a_small_model(seed, links):
    view = random_graph(seed, training=False)
    given = options(links)
    assert best_splits(view, TENSOR, **given).seconds == pytest.approx(
        least(view, TENSOR, given), abs=1e-15
    )


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_better_for_a_small_step(seed):
    view = small_step(seed)
    given = options(CHEAP, training=True)
    assert best_splits(view, TENSOR, **given).seconds == pytest.approx(
        least(view, TENSOR, given), abs=1e-15
    )


# --- what `build` writes --------------------------------------------------------------------------


def localized_of(graph, made):
    if made.training is None:
        return localize(unfuse(graph, made.unfused), made)
    return localize_step(step_of(graph, made), made)


def written(graph, made, links):
    """Seconds of the communication of a built plan, as the first slot sees it."""
    localized = localized_of(graph, made)
    total = 0.0
    for found in localized.communications:
        if any(member.device == made.devices[0] for member in found.members):
            values = [
                localized.slots[member.device].value(value_id).nbytes
                for member in found.members
                for value_id in (member.gives, member.gets)
                if value_id is not None
            ]
            total += links.seconds(found.kind, len(found.members), max(values))
    return total


def foreseen(graph, made, axes, cluster):
    """The same, as the tables have it."""
    apart = step_of(graph, made).graph if made.training else unfuse(graph, made.unfused)
    splits = [made.assignments[index].splits for index in made.nodes]
    given = {"cluster": cluster, "costs": NoCosts(), "training": made.training is not None}
    return seconds(forward_view(apart), axes, splits, **given)


MESHES = [
    {"tensor": 2},
    {"tensor": 4},
    {"sequence": 2},
    {"data": 2},
    {"data": 2, "tensor": 2},
    {"data": 2, "sequence": 2},
    {"tensor": 2, "data": 2},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_model_takes_what_is_foreseen(mesh):
    graph = transformer(2, batch=4, product=linear, taken=stacked)
    made = plan(graph, mesh=mesh)
    cluster = Cluster.of(8, inside=QUICK)
    expected = written(graph, made, QUICK)
    assert foreseen(graph, made, mesh, cluster) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda: trained(transformer(2, batch=4)), id="transformer"),
        pytest.param(lambda: language_step(2, batch=4, tied=True), id="tied"),
        pytest.param(lambda: language_step(2, batch=4, tied=False), id="untied"),
    ],
)
def test_a_training_step_takes_at_most_what_is_foreseen(mesh, step):
    """Gradients that `build` keeps as terms down to the first parameters are counted here."""
    graph = step()
    made = plan(graph, mesh=mesh)
    expected = written(graph, made, QUICK)
    found = foreseen(graph, made, mesh, Cluster.of(8, inside=QUICK))
    assert expected * (1 - 1e-3) <= found <= 1.3 * expected


# --- known answers --------------------------------------------------------------------------------


def communications(graph, axes, **given):
    """The kinds of communication of activations, in a step split in the best way."""
    made = plan(graph, mesh=axes)
    view = forward_view(step_of(graph, made).graph)
    best = best_splits(view, axes, **given)
    mesh = made.assignments[0].mesh
    split = make_plan(view, "best", made.devices, [Assignment(mesh, s) for s in best.splits])
    split = msgspec.structs.replace(
        split, fingerprint=made.fingerprint, unfused=made.unfused, training=made.training
    )
    localized = localized_of(graph, split)
    found = Counter()
    for communication in localized.communications:
        member = communication.members[0]
        found[communication.kind] += (
            len(localized.slots[member.device].value(member.gives).shape) > 1
        )
    return found


def test_a_block_is_split_as_by_megatron():
    """Columns and then rows: two reductions forward and two backward for each layer more."""
    given = options(training=True)
    steps = [trained(transformer(layers, batch=1, width=256)) for layers in (2, 3)]
    few, many = (communications(step, TENSOR, **given) for step in steps)
    many.subtract(few)
    assert +many == {"all_reduce": 4}


def test_nothing_is_sent_where_links_are_slow():
    view = gpt(batch=4)
    given = options(SLOW, costs=NoCosts())
    assert best_splits(view, TENSOR, **given).seconds < 1e-9


def test_heads_that_do_not_come_out_even_are_cut_between_heads():
    view, _ = take_apart(transformer(1, product=linear, heads=5, width=640), TENSOR)
    given = options(Links.of(Link(1e-4, 20e9), Link(1e-4, 20e9)))
    best = best_splits(view, TENSOR, **given)
    units = {
        split.unit
        for node, (split,) in zip(view.nodes, best.splits, strict=True)
        if node.op == "aten.linear.default" and isinstance(split, Split)
    }
    assert 128 in units


@pytest.mark.parametrize("axes", [TENSOR, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_best_is_no_worse_than_the_policies(axes, training):
    graph = gpt(2, batch=4)
    view = step_view(trained(graph)) if training else graph
    given = options(training=training)
    policy = seconds(view, axes, split_nodes(view, axes)[0], **given)
    assert best_splits(view, axes, **given).seconds <= policy + 1e-12


def test_an_axis_that_is_fixed_stays():
    view = step_view(language_step(1, batch=4))
    axes = {"data": 2, "tensor": 2}
    fixed = {"data": [split for (split,) in split_nodes(view, {"data": 2})[0]]}
    best = best_splits(view, axes, fixed=fixed, **options(training=True))
    assert [splits[0] for splits in best.splits] == fixed["data"]


@pytest.mark.parametrize("axes", [{}, {"tensor": 1}, {"data": 1, "tensor": 1}], ids=str)
def test_one_slot_does_everything_whole(axes):
    view = gpt()
    best = best_splits(view, axes, **options())
    assert best.splits == [(None,) * len(axes)] * len(view.nodes)


def test_layers_more_take_few_steps_more():
    def steps(layers):
        view, given = transformer(layers), options()
        mesh, nodes = mesh_on(given["cluster"], TENSOR), outline_of(view)
        objective = SplitObjective(given["costs"], training=False, once=1.0)
        domains = node_domains(nodes, mesh.sizes, objective, {})
        problem = SplitProblem(nodes, domains, mesh.sizes, given["cluster"].links(mesh), objective)
        known = {}
        minimise(problem.sizes, problem.factors, known)
        return len(known), len(view.nodes)

    (few, nodes), (many, more) = steps(6), steps(12)
    assert many - few < (more - nodes) / 4


# --- questions that have no answer ----------------------------------------------------------------


def test_a_mesh_larger_than_the_cluster_is_refused():
    with pytest.raises(PlanError, match="needs 16 slots, but the cluster has 8"):
        best_splits(gpt(), {"tensor": 16}, **options())


def test_an_axis_that_the_mesh_lacks_cannot_be_fixed():
    with pytest.raises(PlanError, match="'data' is fixed"):
        best_splits(gpt(), TENSOR, fixed={"data": []}, **options())


# --- reasons --------------------------------------------------------------------------------------


def test_the_next_best_costs_what_it_says():
    torch.manual_seed(0)
    builder = Builder("chain")
    x = builder.input("x", (1, 256), "f32")
    for name in ("a", "b"):
        weight = builder.param(name, torch.randn(256, 256))
        x = builder.call("aten.linear.default", x, weight)
    view = builder.finish(x)
    best = best_splits(view, TENSOR, **options(devices=2))
    found = re.fullmatch(r"(.+): ([\d.]+) µs; next best (.+): ([\d.]+) µs", best.reasons[1])
    assert found is not None
    own, spent, other, more = found.groups()
    assert split_text([*TENSOR], best.splits[1]) == own
    identifier = other.removeprefix("tensor by ")
    split = None if other == "whole" else Split(identifier)
    changed = seconds(view, TENSOR, [best.splits[0], (split,)], **options(devices=2))
    assert changed - best.seconds == pytest.approx((float(more) - float(spent)) * 1e-6, abs=2e-7)


def test_no_split_alone_is_better():
    view = transformer(2, product=linear, taken=stacked, batch=4, width=64)
    for reason in best_splits(view, TENSOR, **options(devices=2)).reasons:
        spent = [float(number) for number in re.findall(r"([\d.]+) µs", reason)]
        assert spent == sorted(spent)


def test_what_has_no_annotation_says_so():
    builder = Builder("cumulative")
    x = builder.input("x", (4, 4), "f32")
    view = builder.finish(builder.call("aten.nonzero_static.default", x, size=3))
    (reason,) = best_splits(view, TENSOR, **options(devices=2)).reasons
    assert "nonzero_static" in reason
