from shardwright.ir import Builder
from shardwright.pipeline.fxtext import encode_part
from shardwright.planning import Assignment, make_plan, plan
from shardwright.transform.localize import localize
from shardwright.transform.segments import Segment, tasks
from tests.graphs import language_model


def named(made):
    """Segments by name, communications by kind and slots."""
    return [
        task.name
        if isinstance(task, Segment)
        else f"{task.kind} {' '.join(member.device for member in task.members)}"
        for task in made
    ]


def test_layers_are_tasks_of_their_own():
    graph = language_model(layers=3)
    found = tasks(localize(graph, plan(graph, 1)))
    assert named(found) == ["d0.0", "d0.1", "d0.2", "d0.3", "d0.4"]
    assert [len(task.nodes) for task in found] == [2, 9, 9, 9, 2]


def test_what_a_stage_needs_from_others_comes_before_its_first_task():
    """A mask that is read late does not cut the layer that reads it."""
    builder = Builder("masked")
    x = builder.input("x", (4, 4))
    mask = builder.call("aten.sin.default", x)
    y = builder.call("aten.cos.default", x)
    for op in ("exp", "tanh"):
        y = builder.call(f"aten.{op}.default", y)
    graph = builder.finish(builder.call("aten.mul.Tensor", y, mask))
    assigned = [Assignment.on("d0")] * 2 + [Assignment.on("d1")] * 3
    found = tasks(localize(graph, make_plan(graph, "by hand", ("d0", "d1"), assigned)))
    assert named(found) == ["d0.0", "send d0 d1", "send d0 d1", "d1.0"]


def test_a_communication_stands_behind_what_its_members_do_before_it():
    graph = language_model(layers=1)
    found = named(tasks(localize(graph, plan(graph, 2, policy="tensor"))))
    for at, name in enumerate(found):
        if name == "all_reduce d0 d1":
            assert {name.split(".")[0] for name in found[at - 2 : at]} == {"d0", "d1"}
    assert found.count("all_reduce d0 d1") >= 2


def test_equal_layers_have_equal_graphs_on_all_slots():
    """All but the lookup, whose part knows which rows it has."""
    graph = language_model(layers=4)
    localized = localize(graph, plan(graph, 2, policy="tensor"))
    segments = [task for task in tasks(localized) if isinstance(task, Segment)]

    def texts(device):
        whole = localized.slots[device].builder.graph
        mine = [segment for segment in segments if segment.device == device]
        return [encode_part(whole, s.nodes, s.inputs, s.outputs) for s in mine]

    first, second = texts("d0"), texts("d1")
    assert first[1:] == second[1:]
    assert len(set(first)) < len(first)
