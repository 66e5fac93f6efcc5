"""The automatic planner: as fast as other plans, and legal."""

import math
import random

import pytest
import torch

from shardwright.building import build
from shardwright.clusters import Cluster, DeviceModel, Link, Links, Mesh
from shardwright.costs.cost import Analytic
from shardwright.costs.predict import estimate, least_memory
from shardwright.costs.step_time import order_of
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.planner import auto_plan, plan, write_plan
from shardwright.planning.candidates import Setting
from shardwright.planning.options import StepOptions
from shardwright.planning.predict import forward_of, placed_costs, predict
from shardwright.planning.search import PlanSearch
from shardwright.planning.shapes import PlacedShapes, Shape, shapes, variants
from shardwright.schedules.make import SEARCHED
from tests.graphs import language_model
from tests.planning.projections import transformer
from tests.steps import finish, image_step, language_step, trained

FAST = Links.of(Link(1e-6, 50e9), Link(1e-6, 50e9), 1e-6)


def cluster(devices, *, memory=10**9, links=FAST, per_host=None):
    device = DeviceModel("small", "cpu", memory, flops=1e9, bandwidth=1e9, overhead=1e-6)
    return Cluster.of(devices, per_host, device=device, inside=links, between=links)


def random_step(seed, most):
    """A step of a few products of random widths, each of one or two that stand before it."""
    chance = random.Random(seed)
    builder = Builder(f"random{seed}")
    made = [builder.input("x", (chance.choice((2, 8)), 16), "f64")]
    for i in range(chance.randint(2, most)):
        (of, other) = chance.choices(made, k=2)
        width = chance.choice((16, 16, 64, 256))
        weight = builder.param(f"w{i}", torch.zeros(width, of.shape[1], dtype=torch.float64))
        y = builder.call("aten.linear.default", of, weight)
        if other.shape == y.shape and chance.random() < 0.7:
            y = builder.call("aten.add.Tensor", y, other)
        made.append(y)
    sums = [builder.call("aten.sum.default", value) for value in made[1:] if not value.users]
    loss = sums[0]
    for other in sums[1:]:
        loss = builder.call("aten.add.Tensor", loss, other)
    return finish(builder, loss)


def by_prediction(graph, machines, **asked):
    """The plan that is predicted to be the fastest, where nobody builds those that are close."""
    return auto_plan(graph, machines, given=asked)


def partitions(view, stages):
    """All of them, one after another: as slow as can be."""
    position = {node.id: i for i, node in enumerate(view.nodes)}

    def extend(found):
        if len(found) == len(view.nodes):
            if set(found) == set(range(stages)):
                yield found
            return
        producers = (view.values[v].producer for v in view.nodes[len(found)].inputs)
        first = max((found[position[p]] for p in producers if p is not None), default=0)
        for stage in range(first, stages):
            yield from extend([*found, stage])

    return extend([])


def placed_whole(graph, machines, microbatches):
    source = forward_of(graph, plan(graph, 1, microbatches=microbatches))
    splits = [()] * len(source.view.nodes)
    mesh = Mesh((), (), machines.devices[:1])
    return placed_costs(source, mesh, splits, machines, Analytic(machines.device))


def orders(machines, microbatches, nodes):
    """All numbers of ranks with all schedules."""
    for ranks in range(1, len(machines.devices) + 1):
        slots = [(device,) for device in machines.devices[:ranks]]
        for schedule, chunks in SEARCHED if ranks > 1 else [("1f1b", 1)]:
            if ranks * chunks <= nodes:
                yield order_of(schedule, ranks, microbatches, chunks), slots


def slowly(graph, machines, microbatches):
    """The least time of a step over all partitions and schedules, one estimated after another."""
    whole = placed_whole(graph, machines, microbatches)
    view = whole.source.view
    assert not whole.source.prepare
    return min(
        estimate(
            whole,
            stages,
            StepOptions(microbatches, order.schedule.kind, order.schedule.chunks),
            machines,
            slots,
        ).step_time
        for order, slots in orders(machines, microbatches, len(view.nodes))
        for stages in partitions(view, order.schedule.stages)
    )


EXHAUSTIVE = pytest.mark.exhaustive


# Of 6 and 11 thirty thousand partitions are estimated.
@pytest.mark.parametrize(
    "seed",
    [*range(6), *range(7, 11), 27, 29, *(pytest.param(seed, marks=EXHAUSTIVE) for seed in (6, 11))],
)
def test_no_partition_of_a_tiny_graph_is_faster(seed):
    """Each is estimated by itself; inner axes of the mesh, which only the search tries, help."""
    graph, machines = random_step(seed, 3), cluster(4)
    microbatches = 1 + seed % 3
    made = by_prediction(graph, machines, microbatches=microbatches, zero=0)
    best = slowly(graph, machines, microbatches)
    assert made.prediction.step_time <= best * (1 + 1e-9)


@pytest.fixture(scope="module")
def step():
    return language_step(layers=4, width=16, vocabulary=40)


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"data": 2}, {"tensor": 2}])
def test_it_is_not_worse_than_a_plan_over_a_given_mesh(step, mesh):
    machines = cluster(2)
    made = by_prediction(step, machines, microbatches=4)
    assert made.prediction.step_time == pytest.approx(predict(step, made, machines).step_time, 1e-9)
    other = plan(step, mesh=mesh, microbatches=4)
    assert made.prediction.step_time <= predict(step, other, machines).step_time * (1 + 1e-9)


@pytest.mark.parametrize("policy", ["metis", "pipedream"])
def test_partitioners_are_not_better(step, policy):
    machines = cluster(2)
    made = by_prediction(step, machines, microbatches=4)
    other = plan(step, 2, policy, microbatches=4)
    assert made.prediction.step_time <= predict(step, other, machines).step_time * (1 + 1e-9)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_its_plans_build(step, devices):
    for graph in (step, image_step(), language_model()):
        made = plan(graph, cluster(devices), "auto")
        pipeline = build(graph, made)
        assert set(pipeline.devices) == set(made.devices)


def test_slow_links_leave_slots_idle(step):
    slow = Links.of(Link(1.0, 1e3), Link(1.0, 1e3), 1.0)
    made = plan(step, cluster(2, links=slow), "auto", microbatches=2)
    assert made.devices == ("d0",)
    assert "1 slot has nothing to do" in made.notes


def test_what_is_given_is_kept(step):
    made = plan(step, cluster(2), "auto", microbatches=3, schedule="gpipe", zero=0).training
    assert (made.microbatches, made.schedule, made.zero) == (3, "gpipe", 0)
    again = plan(step, cluster(2), "auto", microbatches=2, recompute="full").training
    assert again.recompute == "full"


def test_little_memory_has_activations_computed_again():
    graph = trained(transformer(4))
    plenty = plan(graph, cluster(1), "auto", microbatches=2).prediction
    held = plenty.slots[0].memory
    memory = held.total - held.activations // 2
    made = plan(graph, cluster(1, memory=memory), "auto", microbatches=2)
    assert made.training.recompute in ("auto", "full")
    assert made.prediction.peak_memory <= memory
    assert made.prediction.step_time > plenty.step_time
    build(graph, made)


def test_where_nothing_fits_it_says_what_lacks(step):
    with pytest.raises(PlanError) as caught:
        plan(step, cluster(2, memory=1000), "auto", microbatches=2)
    message = str(caught.value)
    assert "no plan for 'train_step' fits: the nearest (" in message
    assert "bytes more than its 1000" in message
    assert "slots instead of 2" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"data": 2}}, "policy 'auto' chooses the mesh"),
        ({"microbatches": 0}, "microbatches must be a number from 1 up"),
        ({"schedule": "magic"}, "no schedule is called 'magic'"),
        ({"recompute": "auto"}, "give both, or neither"),
        ({"chunks": 0}, "chunks must be a number from 1 up"),
        ({"chunks": -1}, "chunks must be a number from 1 up"),
        ({"chunks": 50}, "virtual stages, more than the .* take fewer chunks or slots"),
    ],
)
def test_bad_questions_are_refused(step, options, message):
    with pytest.raises(PlanError, match=message):
        plan(step, 2, "auto", **options)


def test_one_chunk_may_be_asked_for(step):
    assert plan(step, 2, "auto", chunks=1).training.chunks == 1


def test_a_state_that_shall_be_dealt_out_needs_data_shards(step):
    with pytest.raises(PlanError, match="zero=1 needs a mesh axis 'data'"):
        plan(step, 1, "auto", zero=1)
    for devices in (2, 4):
        made = plan(step, devices, "auto", zero=1, microbatches=4)
        assert made.training.zero == 1
        build(step, made)


def search_of(graph, machines, microbatches=1, **given):
    graphs = PlacedShapes(graph, machines, Analytic(machines.device), microbatches)
    return PlanSearch(graphs, machines, given)


def test_splits_that_were_searched_for_build():
    graph = trained(transformer(2))
    machines = cluster(4)
    search = search_of(graph, machines, 2)
    search._look(Setting(Shape(2, (("tensor", 2),), best=True), "1f1b", 1, 0), math.inf)
    found = search.best
    made = write_plan(search, found)
    assert "with the best splits" in str(found)
    assert predict(graph, made, machines).step_time == pytest.approx(found.seconds * 2, rel=1e-3)
    build(graph, made)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "make", [lambda: trained(transformer(2)), lambda: random_step(3, 8), image_step]
)
def test_no_bound_is_above_what_a_plan_takes(make, microbatches):
    """Of time and of memory, of every shape and schedule, and of each of its cuts."""
    graph, machines = make(), cluster(4)
    every, search = (search_of(graph, machines, microbatches) for _ in range(2))
    for shape in [one for s in shapes(machines) for one in (s, *variants(s))]:
        for setting in every._settings(shape):
            bound = every.bound(setting)
            if not math.isinf(bound):
                placed = every.graphs.on(shape)
                for mode in ("none", "full"):
                    again = mode == "full"
                    for found in every._in_mode(setting, mode, math.inf, fitting=False):
                        every.candidates.append(found)
                        least = every._least(placed, found.stages, setting, again=again)
                        assert max(bound, least) <= found.estimate.step_time * (1 + 1e-9)
                        tasks = every._tasks_of(placed, found.stages, setting.stages, again=again)
                        order = order_of(
                            setting.schedule, shape.pipeline, microbatches, setting.chunks
                        )
                        shards = shape.shards if setting.zero else 1
                        assert least_memory(tasks, order, shards) <= found.peak * (1 + 1e-6) + 8
    best = min(one.seconds for one in every.candidates if one.fits)
    assert search.run()[0].seconds <= best * (1 + 1e-9)


def test_the_captured_batch_is_the_batch_of_a_step(step):
    """None is planned in microbatches that the batch cannot be cut in."""
    assert plan(step, cluster(4), "auto").training.microbatches == 1


def test_what_fits_with_all_done_again_is_found():
    """Where no budget for activations is left, cuts are tried that keep nothing but boundaries."""
    graph = language_step(layers=4, width=64, vocabulary=100, batch=8, length=64)
    asked = {"microbatches": 8, "schedule": "1f1b"}
    full = plan(graph, cluster(2), "auto", recompute="full", **asked)
    memory = max(slot.memory.total for slot in full.prediction.slots)
    machines = cluster(2, memory=round(1.02 * memory))
    made = plan(graph, machines, "auto", **asked)
    assert made.training.recompute != "none"
    assert max(slot.memory.total for slot in made.prediction.slots) <= machines.device.memory
