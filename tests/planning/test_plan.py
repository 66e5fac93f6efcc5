"""Plans as files: what comes back, and what is refused."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from shardwright.clusters import GLOO, Cluster
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.planner import POLICIES, plan
from shardwright.planning import Assignment, Plan
from shardwright.planning.plan import (
    assignments,
    check_belongs,
    cluster_of,
    fingerprint_graph,
    read_plan,
    write_plan,
)
from tests.clean_process import printed_by
from tests.graphs import language_model
from tests.steps import language_step, trained


def test_a_plan_reads_at_a_glance():
    assert str(plan(language_model(layers=2, vocabulary=4), 2)) == (
        "plan for language_model: pipeline, 2 slots\n"
        "  d0: 11 nodes, 51.6% of the work, 0.00 MB stored (50.0%), receives 0.000 MB\n"
        "  d1: 11 nodes, 48.4% of the work, 0.00 MB stored (50.0%), receives 0.000 MB"
    )


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_every_node_is_in_one_stage_and_stages_follow_the_data(devices):
    graph = language_model()
    made = plan(graph, devices)
    slots = [assignment.mesh.devices for assignment in assignments(made, len(graph.nodes))]
    assert slots == sorted(slots)
    assert set(slots) == {(f"d{i}",) for i in range(devices)}


def test_a_plan_is_a_value_that_can_be_written_down():
    made = plan(language_model(), 3)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made


def test_the_fingerprint_is_of_what_is_computed_not_of_names():
    graph, same = language_model(), language_model()
    for value in same.values.values():
        value.name = f"other_{value.id}"
    assert fingerprint_graph(graph) == fingerprint_graph(same)
    assert fingerprint_graph(graph) != fingerprint_graph(language_model(layers=3))
    assert fingerprint_graph(graph) != fingerprint_graph(language_model(tied=True))


def test_a_plan_of_another_graph_is_refused():
    with pytest.raises(PlanError, match="plan again for this graph"):
        check_belongs(plan(language_model(), 2), language_model(layers=3))


@pytest.mark.parametrize(
    ("devices", "policy", "message"),
    [
        (0, "pipeline", "devices must be a number of slots from 1 up, found 0"),
        (True, "pipeline", "found True"),
        (2, "magic", "unknown policy 'magic'; known are pipeline"),
        (100, "pipeline", "100 stages, but the graph 'language_model' has only 40 nodes"),
    ],
)
def test_what_cannot_be_planned_is_refused(devices, policy, message):
    with pytest.raises(PlanError, match=message):
        plan(language_model(), devices, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_without_nodes_has_no_plan(policy):
    builder = Builder("empty")
    graph = builder.finish(builder.input("x", (2,), "f32"))
    with pytest.raises(PlanError, match="'empty' has no nodes, it gives back its inputs"):
        plan(graph, 2, policy)


def test_a_policy_and_a_mesh_are_not_both_given():
    with pytest.raises(PlanError, match="policy 'tensor' and a mesh are both given"):
        plan(language_model(), policy="tensor", mesh={"data": 2})


def test_a_plan_for_another_number_of_nodes_is_refused():
    made = plan(language_model(), 2)
    with pytest.raises(PlanError, match="the plan assigns 40 nodes, the graph has 39"):
        list(assignments(made, 39))


def test_an_assignment_to_a_slot_that_the_plan_lacks_is_refused():
    graph = language_model()
    assigned = [Assignment.on("d0")] * 39 + [Assignment.on("d7")]
    made = msgspec.structs.replace(
        plan(graph, 1), assignments=tuple(assigned), nodes=tuple(range(40))
    )
    with pytest.raises(PlanError, match="node 39 is assigned to one slot: d7"):
        list(assignments(made, 40))


def test_a_profile_is_no_path():
    with pytest.raises(PlanError, match=r"read a file with Profile\.load"):
        plan(language_model(), 2, "auto", profile="profile.json")


# --- files ----------------------------------------------------------------------------------------


def interleaved() -> Plan:
    mesh = {"pipeline": 2, "tensor": 2}
    return plan(language_step(), mesh=mesh, microbatches=4, schedule="interleaved", chunks=2)


@pytest.mark.parametrize(
    "made",
    [
        plan(language_model(), 3),
        plan(language_model(), mesh={"pipeline": 2, "tensor": 2}),
        plan(trained(language_model()), mesh={"data": 2}, microbatches=2, zero=1),
        interleaved(),
    ],
    ids=str,
)
def test_what_is_read_is_what_was_written(made: Plan, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == made
    again.save(str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "plan.json"]


def test_a_file_has_a_line_a_field_and_a_line_an_assignment(tmp_path: Path) -> None:
    made = plan(language_model(), 3)
    made.save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert lines[1] == '"version": 1,'
    assert sum(line.startswith('{"mesh": ') for line in lines) == len(made.assignments)
    assert '"devices": ["d0", "d1", "d2"],' in lines


def test_the_hash_of_a_graph_is_the_same_in_another_process() -> None:
    code = "from tests.planning.test_plan import *; print(interleaved().fingerprint)"
    found = printed_by("python", "-c", code, folder=Path(__file__).parents[2])
    assert found.strip() == interleaved().fingerprint


def changed(folder: Path, made: Plan, **fields: object) -> Path:
    """The file of a plan, with these fields instead; ``training.x`` is written ``training__x``."""
    path = folder / "plan.json"
    made.save(path)
    found = json.loads(path.read_text())
    for name, value in fields.items():
        holder, _, inside = name.rpartition("__")
        (found[holder] if holder else found)[inside] = value
    path.write_text(json.dumps(found))
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, "is a plan of version 2, this shardwright reads 1; upgrade shardwright"),
        ({"version": None}, "is no plan: its version is None"),
        ({"version": True}, "is no plan: its version is True"),
        ({"policy": 3}, "plan.json at policy: Expected `str`, got `int`; plan again"),
        ({"polcy": "data"}, "plan.json: Object contains unknown field `polcy`"),
        ({"training__schedul": "x"}, "plan.json at training: Object contains unknown field"),
        (
            {"cluster__hosts": [["d0", "d1", "d2"]]},
            "devices names 'd3', which cluster.hosts lacks; plan again, or mend the file",
        ),
        ({"nodes": [0, 99]}, "plan.json: node 1 has the assignment 99, which the plan lacks"),
        ({"training__stages": [0]}, r"training.stages has 1 entries, expected \d+"),
        ({"training__work": [1]}, "training.work has 1 entries, expected 4"),
        ({"training__placement": [0, 1, 0, 2]}, "training.placement holds 2; .* below 2"),
        ({"training__slots": [["d0", "d1"], ["d2", "d9"]]}, "names 'd9', which devices lacks"),
        (
            {"assignments": [{"mesh": {"axes": ["a"], "sizes": [2], "devices": ["d0"]}}]},
            "a mesh of a 2 needs 2 device slots, found 1; plan again, or mend the file",
        ),
    ],
    ids=str,
)
def test_a_file_that_is_not_right_is_refused(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.load(changed(tmp_path, interleaved(), **fields))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"version": 1, "graph"', "is no plan, or was cut short"),
        (b"\xff\xfe", "is no plan, or was cut short"),
        (b"[1]", "is no plan: it holds a list"),
        (b'{"version": 1}', "Object missing required field `graph`"),
        (
            b'{"version": 1, "name": "x", "supertasks": {}}',
            "is a pipeline file, no plan: it is run",
        ),
    ],
)
def test_what_is_no_plan_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=f"^{re.escape(str(tmp_path))}.*{message}"):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no plan can be read from .*none\.json: No such file"):
        Plan.load(tmp_path / "none.json")


class Numbers(msgspec.Struct):
    seconds: tuple[float, ...]


def test_a_number_that_json_lacks_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the plan.seconds\[1\] holds inf"):
        write_plan(tmp_path / "plan.json", Numbers((1.0, float("inf"))))
    assert list(tmp_path.iterdir()) == []


def test_every_digit_of_a_number_comes_back(tmp_path: Path) -> None:
    numbers = Numbers((0.1 + 0.2, 1e-300, 5e-324))
    write_plan(tmp_path / "plan.json", numbers)
    assert read_plan(tmp_path / "plan.json", Numbers) == numbers


def test_a_plan_read_from_a_file_belongs_to_its_graph_alone(tmp_path: Path) -> None:
    plan(language_model(), 2).save(tmp_path / "plan.json")
    made = Plan.load(tmp_path / "plan.json")
    check_belongs(made, language_model())
    with pytest.raises(PlanError, match=r"plan was made for the graph 'language_model' \(\w+\), "):
        check_belongs(made, language_model(layers=3))


def test_inputs_of_another_shape_are_told() -> None:
    made = plan(language_step(batch=4), 2, microbatches=2)
    with pytest.raises(
        PlanError,
        match=r"were tokens i64\[4, 6\], .* here they are tokens i64\[8, 6\], .* of one microbatch;"
        " the plan has 2; plan again",
    ):
        check_belongs(made, language_step(batch=8))


def test_a_plan_says_of_each_node_where_it_stands() -> None:
    made = plan(language_model(), 2)
    assert made.inputs == ("tokens i64[2, 3]",)
    assert made.labels[:4] == ("embedding", "mul", "layers.0: layer_norm", "layers.0: linear")
    assert len(made.labels) == len(made.nodes)


def test_a_plan_holds_the_machines_that_it_is_for() -> None:
    machines = Cluster.of(4, 2, inside=GLOO)
    assert plan(language_model(), machines).cluster == machines
    assert plan(language_model(), 2, "auto").cluster == Cluster.of(2)


def test_a_file_from_before_plans_held_machines_is_read(tmp_path: Path) -> None:
    made = interleaved()
    path = changed(tmp_path, made)
    fields = json.loads(path.read_text())
    del fields["cluster"]
    path.write_text(json.dumps(fields))
    again = Plan.load(path)
    assert again == msgspec.structs.replace(made, cluster=None)
    assert cluster_of(again) == made.cluster


def test_a_plan_by_hand_has_a_file_too(tmp_path: Path) -> None:
    made = Plan("g", "", "by hand", ("d0",), (Assignment.on("d0"),), (0, 0))
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
