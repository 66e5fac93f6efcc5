"""Partitioners' plans beside those of the search: none is faster than the plan that is chosen."""

import pytest
import torch

from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.layout import Link, Links
from shardwright.planning import Plan, plan
from shardwright.planning.automatic.candidates import Asked
from shardwright.planning.automatic.rivals import MOST_SLOTS, Rivals
from shardwright.planning.automatic.spreads import Spreads
from shardwright.planning.partitions import partition_task
from shardwright.planning.partitions.partitioners import PARTITIONERS
from shardwright.planning.partitions.workload import workload_of
from shardwright.planning.prediction.predict import predict
from shardwright.profiling.cost import Analytic
from shardwright.schedule import KINDS
from shardwright.transform import build
from tests.graphs import language_model, tokens
from tests.planning.automatic.test_auto import (
    EXHAUSTIVE,
    FAST,
    by_prediction,
    cluster,
    random_step,
)
from tests.planning.projections import transformer
from tests.steps import language_step, trained
from tests.transform.small_models import MODELS
from tests.transform.test_training_steps import compiled
from tests.turns import rotated
from tests.walk import walk

LINKS = {"fast": FAST, "slow": Links.of(Link(20e-6, 1e9), Link(20e-6, 1e9), 20e-6)}
MACHINES = [(2, "fast"), (4, "fast"), (4, "slow"), (2, "slow")]


def by_policy(graph, machines, policy, **options):
    """What a partitioner's plan takes; None where it makes none, or none that fits."""
    try:
        made = plan(graph, machines, policy, **options)
    except PlanError:
        return None
    found = predict(graph, made, machines)
    return found if found.peak_memory <= machines.device.memory else None


def check_none_is_faster(graph, machines, **options):
    made = by_prediction(graph, machines, **options)
    best = predict(graph, made, machines)
    assert made.prediction.step_time == pytest.approx(best.step_time, rel=1e-9)
    training = made.training
    same = {**options, "microbatches": training.microbatches} if training else options
    for policy in PARTITIONERS:
        if (found := by_policy(graph, machines, policy, **same)) is not None:
            assert best.step_time <= found.step_time * (1 + 1e-9), policy
    return made


@pytest.mark.parametrize(("name", "machines"), rotated(list(MODELS), MACHINES, 2))
def test_no_partitioner_is_faster(name, machines):
    devices, links = machines
    check_none_is_faster(compiled(name, 2), cluster(devices, links=LINKS[links]), microbatches=2)


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=EXHAUSTIVE) for seed in range(10, 20))]
)
def test_of_random_steps_no_partitioner_is_faster(seed):
    machines = cluster(2 + seed % 3, links=LINKS["slow" if seed % 2 else "fast"])
    check_none_is_faster(random_step(seed, 10), machines, microbatches=1 + seed % 5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_schedule_that_is_asked_for_is_kept(kind):
    graph = language_step(layers=4)
    made = check_none_is_faster(graph, cluster(3), schedule=kind, microbatches=4)
    assert made.training.schedule == kind
    assert made.training.microbatches == 4


def test_microbatches_that_are_free_are_those_of_the_search():
    check_none_is_faster(language_step(layers=2), cluster(2))


@pytest.mark.parametrize("devices", [2, 3])
def test_of_models_none_is_faster(devices):
    check_none_is_faster(language_model(layers=6), cluster(devices))


@pytest.mark.parametrize("part", [0.85, 0.95])
def test_where_memory_is_short_none_that_fits_is_faster(part):
    graph = trained(transformer(4))
    plenty = plan(graph, cluster(2), "auto", microbatches=4, zero=0).prediction.peak_memory
    check_none_is_faster(graph, cluster(2, memory=round(part * plenty)), microbatches=4)


def test_they_are_listed_by_name():
    made = plan(language_step(layers=4), cluster(2), "auto", microbatches=2)
    text = made.explain()
    for policy in PARTITIONERS:
        assert f"{policy}: pipeline 2" in text or f"{policy}: one slot" in text
    every = [made.explanation.plan, *(other.plan for other in made.explanation.others)]
    assert len(every) == len(set(every))


def test_what_a_partitioner_has_no_plan_for_is_named():
    graph = language_step(layers=4)
    made = plan(graph, cluster(2), "auto", microbatches=2, schedule="gpipe")
    assert not any(other.plan.startswith("mixed: ") for other in made.explanation.others)
    device = cluster(2, memory=plan(graph, cluster(2), "auto").prediction.peak_memory // 2)
    assert Rivals(Spreads(graph, device, Analytic(device.device)), device, Asked(), 4).run().refused


def test_what_nodes_take_is_worked_out_once_for_all_partitioners(monkeypatch):
    calls = []

    def counted(view, *args, **options):
        calls.append(view)
        return workload_of(view, *args, **options)

    monkeypatch.setattr(partition_task, "workload_of", counted)
    machines = cluster(2)
    spreads = Spreads(language_step(layers=2), machines, Analytic(machines.device))
    assert len(Rivals(spreads, machines, Asked(), 2).run().best) > 1
    assert len(calls) == 1


def test_on_many_slots_a_note_says_that_they_are_left_out():
    made = plan(language_step(layers=2), cluster(MOST_SLOTS + 1), "auto", microbatches=1)
    note = next(note for note in made.notes if note.startswith("not compared with metis, memory"))
    assert f"{MOST_SLOTS + 1} slots" in note
    assert note in made.explain()


def interleaved_branches(layers=8, size=50_000):
    """Two branches side by side, each of which reads one large vector over and over."""
    builder = Builder("branches")
    x = builder.input("x", (1, 4), "f64")
    ends = [x, x]
    vectors = [builder.param(f"w{i}", torch.rand(size, dtype=torch.float64)) for i in range(2)]
    for _ in range(layers):
        for branch, vector in enumerate(vectors):
            total = builder.call("aten.sum.default", vector)
            ends[branch] = builder.call("aten.mul.Tensor", ends[branch], total)
    return builder.finish(builder.call("aten.add.Tensor", *ends))


def test_where_the_search_finds_nothing_that_fits_a_partitioner_may(tmp_path):
    """Ranges of nodes have both vectors somewhere, and a slot has room for one."""
    graph = interleaved_branches()
    vector = 8 * 50_000
    made = plan(graph, cluster(2, memory=round(1.5 * vector)), "auto")
    assert made.prediction.peak_memory < 1.5 * vector
    assert made.explanation.plan.partition(":")[0] in PARTITIONERS
    x = torch.rand(1, 4, dtype=torch.float64)
    assert torch.equal(walk(build(graph, made), {"x": x})["output"], graph.run(x))
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    with pytest.raises(PlanError, match="no plan for 'branches' fits: the nearest"):
        plan(graph, cluster(2, memory=vector // 2), "auto")


def test_a_plan_of_a_partitioner_that_is_chosen_computes_what_the_graph_does():
    """The parts of a mask that all layers read are made again in each stage."""
    graph = language_model(layers=6)
    for devices in (2, 3):
        made = plan(graph, cluster(devices), "auto")
        found = walk(build(graph, made), {"tokens": tokens()})["output"]
        assert torch.allclose(found, graph.run(tokens()))


def test_of_a_large_graph_metis_and_pipedream_are_not_faster():
    graph = trained(transformer(10))
    made = plan(graph, cluster(2), "auto", microbatches=4)
    assert any(note.startswith("not compared with memory, exact, mixed: ") for note in made.notes)
    best = predict(graph, made, cluster(2)).step_time
    for policy in ("metis", "pipedream"):
        other = plan(graph, cluster(2), policy, microbatches=4)
        assert best <= predict(graph, other, cluster(2)).step_time * (1 + 1e-9)
