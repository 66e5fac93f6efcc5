"""What is said of plans by search, and what differs between two plans."""

import itertools

import msgspec
import pytest

from shardwright.clusters import CPU_CORE, Cluster, Link, Links
from shardwright.costs.cost import Analytic
from shardwright.ir import Builder
from shardwright.planner import POLICIES, plan
from shardwright.planning import Plan
from shardwright.planning.explain import Change, difference
from shardwright.planning.plan import Alternative, Split, Terms
from shardwright.planning.search import PlanSearch
from shardwright.planning.shapes import PlacedShapes
from shardwright.schedules.make import SEARCHED
from tests.graphs import language_model
from tests.planning.projections import transformer
from tests.planning.test_search import cluster
from tests.steps import image_step, language_step, trained


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
    for kind, chunks in SEARCHED:
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
    """On links so fast that work is all that counts, a batch of eight is split over the devices."""
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


# --- what differs between two plans ---------------------------------------------------------------


STEPS = (
    plan(language_step(), mesh={"pipeline": 2, "tensor": 2}, microbatches=4),
    plan(language_step(), mesh={"pipeline": 4}, microbatches=8, schedule="zb-h1"),
)
MODELS = (
    plan(language_model(), 2),
    plan(language_model(layers=5), 3),
    plan(language_model(), 8, "tensor"),
)


def test_two_ways_to_cut_a_step() -> None:
    assert str(difference(*STEPS)).splitlines()[:18] == [
        "settings",
        "  policy: pipeline 2 × tensor 2 -> pipeline 4",
        "  mesh of a stage: tensor 2 -> one slot",
        "  virtual stages: 2 -> 4",
        "  microbatches: 4 -> 8",
        "  schedule: 1f1b -> zb-h1",
        f"  bubble: {100 * STEPS[0].training.bubble():.1f}% -> "
        f"{100 * STEPS[1].training.bubble():.1f}%",
        "where nodes run",
        "  slice … div (5): stage 1 on d2 d3 -> stage 3 on d3",
        "  embedding … layers.0: add (10): stage 0 on d0 d1 -> stage 0 on d0",
        "  layers.1: layer_norm … layers.2: add (13): stage 0 on d0 d1 -> stage 1 on d1",
        "  layers.2: layer_norm … layers.3: linear (11): stage 1 on d2 d3 -> stage 2 on d2",
        "  layers.3: gelu … div (10): stage 1 on d2 d3 -> stage 3 on d3",
        "how nodes are split",
        "  embedding: tensor by v -> whole",
        "  layers.*: linear (8): tensor by n -> whole",
        "  layers.*: gelu (4): tensor by c -> whole",
        "  layers.*: linear (4): tensor by k -> whole",
    ]


def test_two_models_are_compared_where_they_are_alike() -> None:
    found = difference(MODELS[0], MODELS[1]).sections
    assert Change("slots", "2", "3") in found["settings"]
    assert Change("layers.*: linear", "12", "15") in found["how many nodes there are"]
    assert found["where nodes run"][-1].second == "d2"
    assert found["how nodes are split"] == ()
    assert found["what slots carry"][2].first == "none"


def test_many_slots_that_change_alike_are_one_line() -> None:
    found = difference(plan(language_model(), 2, "tensor"), MODELS[2]).sections
    assert found["where nodes run"] == (
        Change("embedding … linear (40)", "d0 d1", "d0 … d7 (8 slots)"),
    )
    assert [change.what for change in found["what slots carry"]] == ["d0 … d1 (2)", "d2 … d7 (6)"]


@pytest.mark.parametrize("made", [*STEPS, *MODELS], ids=str)
def test_equal_plans_do_not_differ(made: Plan) -> None:
    found = difference(made, made)
    assert not found
    assert str(found) == "the plans are equal"


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations((*STEPS, *MODELS), 2)), ids=str)
def test_the_other_way_round_sides_are_exchanged(a: Plan, b: Plan) -> None:
    there, back = difference(a, b), difference(b, a)
    assert there
    for title in ("settings", "how many nodes there are"):
        assert back.sections[title] == tuple(
            Change(change.what, change.second, change.first) for change in there.sections[title]
        )


def test_units_and_sums_are_told() -> None:
    made = plan(language_model(), 2, "tensor")
    node = made.labels.index("layers.0: linear")
    assignment = made.assignments[made.nodes[node]]
    for split, text in (
        (Split("n", 64), "tensor by n in units of 64"),
        (Terms((0,)), "tensor in terms of a sum"),
    ):
        other = msgspec.structs.replace(assignment, splits=(split,))
        nodes = list(made.nodes)
        nodes[node] = len(made.assignments)
        changed = msgspec.structs.replace(
            made, assignments=(*made.assignments, other), nodes=tuple(nodes)
        )
        assert difference(made, changed).sections["how nodes are split"] == (
            Change("layers.0: linear", "tensor by n", text),
        )


def test_other_links_are_told() -> None:
    here = plan(language_model(), 2, "tensor")
    link = Link(1e-3, 1e9)
    there = plan(language_model(), Cluster.of(2, 1, between=Links.of(link, link)), "tensor")
    assert str(difference(here, there)).splitlines()[:2] == [
        "settings",
        "  machines: 1 host, cpu-core, shared-memory inside -> 2 hosts (2 × 1 slots), cpu-core, "
        "shared-memory inside, {latency: 1 ms, bandwidth: 1 GB/s} between",
    ]


@pytest.mark.parametrize("field", Plan.__struct_fields__)
def test_a_field_alone_makes_plans_differ(field: str) -> None:
    made = plan(language_step(layers=4, width=128, batch=8), 2, "auto", microbatches=2)
    assert len(made.assignments) == 2
    found = getattr(made, field)
    others: dict[str, object] = {
        "assignments": (*found, found[0]) if field == "assignments" else None,
        "nodes": (1 - found[0], *found[1:]) if field == "nodes" else None,
        "devices": ("d1", "d0"),
        "notes": ("said by hand",),
        "labels": made.labels[::-1],
        "stages": (1,) * len(made.nodes),
        "loads": made.loads[::-1],
        "unfused": (2,),
        "inputs": ("x f32[1]",),
    }
    for name in ("graph", "fingerprint", "policy"):
        others[name] = "another"
    changed = msgspec.structs.replace(made, **{field: others.get(field)})
    assert difference(made, made).sections == {}
    assert difference(made, changed), f"{field} is not told of"
    assert str(difference(made, changed)) != "the plans are equal"


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        (
            Cluster.of(4, 2),
            Cluster((("d0",), ("d1", "d2", "d3"))),
            "2 hosts (2 × 2 slots), cpu-core, shared-memory inside, ethernet between -> "
            "2 hosts (1 + 3 slots), cpu-core, shared-memory inside, ethernet between",
        ),
        (
            Cluster.of(2),
            Cluster.of(2, device=msgspec.structs.replace(CPU_CORE, memory=10**9)),
            "1 host, cpu-core, shared-memory inside -> 1 host, {name: cpu-core, kind: cpu, "
            "memory: 1 GB, flops: 165 GFLOP/s, half_flops: 1.1 TFLOP/s, bandwidth: 25 GB/s, "
            "overhead: 3 us}, shared-memory inside",
        ),
    ],
    ids=["slots a host", "memory"],
)
def test_other_machines_are_told(one: Cluster, other: Cluster, line: str) -> None:
    made = plan(language_model(), one)
    changed = msgspec.structs.replace(made, cluster=other)
    assert str(difference(made, changed)).splitlines() == ["settings", f"  machines: {line}"]


def test_notes_and_reasons_are_told() -> None:
    made = plan(language_model(), 2, "auto")
    why = msgspec.structs.replace(made.explanation, refused=("tensor 2: too large",))
    changed = msgspec.structs.replace(made, notes=("by hand",), explanation=why)
    assert set(difference(made, changed).sections["what is said"]) >= {
        *(Change(f"note: {note}", "there", "not there") for note in made.notes),
        Change("note: by hand", "not there", "there"),
        Change("not possible: tensor 2: too large", "not there", "there"),
    }


def test_what_no_line_tells_of_is_told_by_its_place() -> None:
    made = STEPS[0]
    slots = (made.training.slots[0][::-1], *made.training.slots[1:])
    training = msgspec.structs.replace(made.training, slots=slots)
    assert str(difference(made, msgspec.structs.replace(made, training=training))).splitlines() == [
        "what else is not the same",
        "  training.slots[0][0]: d0 -> d1",
        "  training.slots[0][1]: d1 -> d0",
    ]


def test_what_is_predicted_is_compared() -> None:
    one, two = (plan(language_step(), 2, "auto", microbatches=count) for count in (2, 8))
    by_hand = plan(language_step(), 2, microbatches=2)
    found = {change.what: change for change in difference(one, two).sections["what is predicted"]}
    assert found["a step"].first == f"{1e3 * one.prediction.step_time:.3f} ms"
    assert found["a step"].second == f"{1e3 * two.prediction.step_time:.3f} ms"
    changes = difference(by_hand, two).sections["what is predicted"]
    assert changes[0] == Change("a step", "unknown", found["a step"].second)
    memory = str(two.prediction.slots[0].memory)
    assert any(change.first == "none" and change.second == memory for change in changes)
    assert difference(by_hand, by_hand).sections == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_of_any_policy_are_comparable(policy: str) -> None:
    made, other = plan(language_model(), 2, policy), plan(language_model(tied=True), 3)
    assert not difference(made, made)
    settings = {change.what for change in difference(made, other).sections["settings"]}
    assert {"graph", "policy" if policy != "pipeline" else "slots"} <= settings


def test_plans_without_labels_are_told_by_number() -> None:
    a, b = (msgspec.structs.replace(plan(language_model(), n), labels=()) for n in (1, 2))
    assert "  node 20 … node 39 (20): d0 -> d1" in str(difference(a, b)).splitlines()
