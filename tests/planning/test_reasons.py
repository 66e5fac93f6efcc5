"""Why a plan was chosen, in words: what it was compared with, splits, memory."""

import msgspec
import pytest

from shardwright.clusters import Cluster
from shardwright.costs.cost import Analytic
from shardwright.ir import Builder
from shardwright.planner import plan
from shardwright.planning import Plan
from shardwright.planning.plan import Alternative
from shardwright.planning.search import SCHEDULES, PlanSearch
from shardwright.planning.shapes import PlacedShapes
from tests.planning.projections import transformer
from tests.planning.test_search import cluster
from tests.steps import image_step, trained


@pytest.fixture(scope="module")
def made():
    return plan(trained(transformer(2)), cluster(4), "auto", microbatches=2)


def test_it_says_what_was_chosen_and_against_what(made):
    text = made.explain()
    lines = text.splitlines()
    assert lines[0].startswith("chosen: ")
    assert "ms a captured batch of 2 rows" in text
    assert "plans are compared by this" in text
    assert 1 <= len(made.explanation.others) <= 4
    seconds = [other.seconds for other in made.explanation.others]
    assert seconds == sorted(seconds)
    best = made.prediction.per_microbatch
    for other in made.explanation.others:
        assert other.seconds >= best or "built and simulated" in other.why
        assert other.plan in text
        assert other.why


def test_the_others_are_the_fastest_whatever_tells_them_apart():
    """The plan of each schedule is among them, or slower, as far as the search tells them apart."""
    graph, machines = trained(transformer(2)), cluster(2)
    made = plan(graph, machines, "auto", microbatches=8, zero=0)
    others = [other.seconds for other in made.explanation.others]
    assert len(others) >= 3
    listed = [made.prediction.per_microbatch, *others]
    for kind, chunks in SCHEDULES:
        given = {"microbatches": 8, "schedule": kind, "chunks": chunks, "zero": 0}
        graphs = PlacedShapes(graph, machines, Analytic(machines.device), 8)
        seconds = PlanSearch(graphs, machines, given).run()[0].seconds
        slower = seconds > max(listed)
        assert slower or any(seconds == pytest.approx(one, rel=1e-3) for one in listed)


def test_no_other_is_said_to_take_less():
    """What is done once a step is priced anew for all alike, where there are many microbatches."""
    made = plan(image_step(), cluster(4), "auto", microbatches=64)
    best = made.prediction.per_microbatch
    assert all(other.seconds >= best for other in made.explanation.others)


def test_it_gives_the_memory_of_each_slot_item_by_item(made):
    text = made.explain()
    for item in ("total", "parameters", "gradients", "optimizer", "activations", "temporaries"):
        assert f"{item} " in text[text.index("memory of the slots") :]
    assert all(device in text for device in made.devices)


def test_it_gives_a_reason_for_each_split():
    """On links so fast that work is all that counts, a batch of eight is dealt out."""
    graph = image_step(batch=8)
    made = plan(graph, cluster(2), "auto", microbatches=1)
    if made.assignments[0].mesh.ndim:
        counts = sum(found.count for found in made.explanation.splits)
        assert counts == len(made.nodes)
        assert all(found.reason for found in made.explanation.splits)
    else:
        assert "a stage is one slot" in made.explain()


def test_it_is_saved_with_the_plan(made, tmp_path):
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


def test_meshes_that_cannot_be_are_named():
    made = plan(trained(transformer(2)), Cluster.of(3), "auto", microbatches=2)
    assert any("data 3: " in reason for reason in made.explanation.refused)


def test_another_policy_compares_nothing():
    assert "not compared with others" in plan(transformer(2), 2).explain()


def test_what_takes_no_time_is_compared_with_no_share():
    builder = Builder("view")
    x = builder.input("x", (8, 64))
    graph = builder.finish(builder.call("aten.view.default", x, [512]))
    made = plan(graph, 2, "auto")
    other = Alternative("another", 1.0, 0, "it is slower")
    explanation = msgspec.structs.replace(made.explanation, others=(other,))
    prediction = msgspec.structs.replace(made.prediction, step_time=0.0)
    assert "another: 1000.000 ms a captured batch, 0.00 MB" in explanation.text(prediction)
