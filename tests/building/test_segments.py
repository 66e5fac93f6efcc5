from shardwright.building.localize import localize
from shardwright.building.segments import ComputeSegment, tasks
from shardwright.building.slots import PhaseStage
from shardwright.ir import Builder
from shardwright.pipeline.fxtext import encode_part
from shardwright.planner import plan
from shardwright.planning import Assignment
from shardwright.planning.assemble import make_plan
from tests.building.written_slots import B0, B1, F0, F1, UPDATE, Slots, part
from tests.graphs import language_model


def slots(communication):
    return [member.device for member in communication.members]


def named(made):
    """Segments by name, communications by kind and slots."""
    return [
        task.name
        if isinstance(task, ComputeSegment)
        else " ".join((task.communication.kind, *slots(task.communication)))
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
    segments = [task for task in tasks(localized) if isinstance(task, ComputeSegment)]

    def texts(device):
        whole = localized.slots[device].builder.graph
        mine = [segment for segment in segments if segment.device == device]
        return [encode_part(whole, s.nodes, s.inputs, s.outputs) for s in mine]

    first, second = texts("d0"), texts("d1")
    assert first[1:] == second[1:]
    assert len(set(first)) < len(first)


# --- training steps, written by hand ------------------------------------------------------------


def two_stages():
    """Two layers on each of two stages, with the backward of each, and one step of descent."""
    made = Slots(2)
    x = made.input("d0")
    weights = {(d, i): made.stored(d, f"w{i}") for d in ("d0", "d1") for i in range(2)}
    saved = {}
    for device, place in (("d0", F0), ("d1", F1)):
        for i in range(2):
            made.border(device, place)
            saved[device, i] = x
            x = made.call(device, place, "mm.default", x, weights[device, i])
            x = made.call(device, place, "relu.default", x)
        made.border(device, place)
        if device == "d0":
            x = made.send(x, "d0", F0, "d1", F1)
    gradient = made.call("d1", B1, "ones_like.default", x)
    for device, place in (("d1", B1), ("d0", B0)):
        for i in (1, 0):
            made.border(device, place)
            inside = made.call(device, place, "t.default", saved[device, i])
            total = made.call(device, place, "mm.default", inside, gradient)
            transposed = made.call(device, place, "t.default", weights[device, i])
            gradient = made.call(device, place, "mm.default", gradient, transposed)
            accumulated = made.slots[device].zeros(f"grad{i}", (4, 4), "f32")
            added = made.call(device, place, "add.Tensor", accumulated, total)
            made.update(device, accumulated, added)
            saved[device, f"total{i}"] = added
        if device == "d1":
            gradient = made.send(gradient, "d1", B1, "d0", B0)
    for device in ("d0", "d1"):
        for i in range(2):
            weight = weights[device, i]
            new = made.call(device, UPDATE, "sub.Tensor", weight, saved[device, f"total{i}"])
            made.update(device, weight, new)
    return made.localized()


def test_phases_and_stages_are_tasks_in_the_files_order():
    found = named(tasks(two_stages()))
    assert found == [
        *("d0.F0.0", "d0.F0.1", "send d0 d1", "d1.F1.0", "d1.F1.1"),
        *("d1.B1.0", "d1.B1.1", "d1.W1.0", "d1.B1.2", "send d1 d0"),
        *("d0.W0.0", "d0.W0.1", "d1.W1.1"),
        *("d0.U.0", "d1.U.0"),
    ]


def test_weight_gradients_are_apart_from_what_others_wait_for():
    """Stage 0 gives nothing to others, so all of its backward is for weights."""
    found = {task.name: task for task in tasks(two_stages()) if isinstance(task, ComputeSegment)}
    assert [node.op for node in found["d1.B1.1"].nodes] == ["aten.t.default", "aten.mm.default"]
    assert [node.op for node in found["d1.W1.0"].nodes] == [
        *("aten.t.default", "aten.mm.default", "aten.add.Tensor")
    ]
    assert found["d1.W1.0"].place == PhaseStage("backward_weight", 1)
    assert found["d0.W0.0"].place == PhaseStage("backward_weight", 0)


def test_what_the_backward_reads_leaves_the_forward():
    localized = two_stages()
    found = {task.name: task for task in tasks(localized) if isinstance(task, ComputeSegment)}
    assert set(found["d1.W1.1"].inputs) & set(found["d1.F1.0"].inputs), "what came from d0"
    read_later = set(found["d1.W1.0"].inputs) & set(found["d1.F1.0"].outputs)
    assert len(read_later) == 1


def test_equal_layers_have_equal_graphs_in_the_backward_too():
    localized = two_stages()

    def text(task):
        graph = localized.slots[task.device].builder.graph
        return encode_part(graph, task.nodes, task.inputs, task.outputs)

    found = {task.name: text(task) for task in tasks(localized) if isinstance(task, ComputeSegment)}
    assert found["d0.F0.0"] == found["d1.F1.0"]
    assert found["d1.B1.1"] == found["d1.B1.2"]
    assert found["d1.W1.0"] == found["d1.W1.1"]


def test_what_another_stage_of_the_slot_reads_is_waited_for():
    """Though it leads to nothing but weights there: their work comes in any order."""
    made = Slots(2)
    y = made.call("d0", F1, "relu.default", made.input("d0"))
    gradient = made.call("d0", B1, "neg.default", y)
    got = made.send(made.call("d0", B1, "exp.default", y), "d0", B1, "d1", B0)
    made.outputs.append([part("d1", made.call("d1", B0, "neg.default", got))])
    accumulated = made.slots["d0"].zeros("grad", (4, 4), "f32")
    added = made.call("d0", B0, "add.Tensor", accumulated, gradient)
    made.update("d0", accumulated, added)
    found = {
        task.name: task for task in tasks(made.localized()) if isinstance(task, ComputeSegment)
    }
    assert [node.op for node in found["d0.B1.0"].nodes] == ["aten.neg.default", "aten.exp.default"]
    assert [node.op for node in found["d0.W0.0"].nodes] == ["aten.add.Tensor"]


def test_without_messages_the_backward_is_one():
    made = Slots(1)
    x = made.input("d0")
    y = made.call("d0", F0, "relu.default", x)
    z = made.call("d0", B0, "neg.default", y)
    made.outputs.append([part("d0", z)])
    assert named(tasks(made.localized())) == ["d0.F0.0", "d0.B0.0"]


def test_what_nobody_reads_is_not_done():
    """A message whose receiver does nothing with it goes with all that leads to it."""
    made = Slots(2)
    x = made.input("d0")
    y = made.call("d0", F0, "relu.default", x)
    got = made.send(made.call("d0", F0, "neg.default", y), "d0", F0, "d1", F1)
    made.call("d1", F1, "exp.default", got)
    made.outputs.append([part("d0", y)])
    (segment,) = tasks(made.localized())
    assert (segment.name, [node.op for node in segment.nodes]) == ("d0.F0.0", ["aten.relu.default"])


def test_other_places_do_not_cut_a_run():
    """A stage that makes something for another in passing goes on with its own."""
    made = Slots(2)
    x = made.input("d0")
    first = made.call("d0", F0, "relu.default", x)
    y = made.call("d0", F1, "neg.default", first)
    piece = made.call("d0", F0, "slice.Tensor", first, 0, 0, 2)
    got = made.send(piece, "d0", F0, "d1", F1)
    z = made.call("d0", F1, "exp.default", y)
    made.outputs += [[part("d0", z)], [part("d1", made.call("d1", F1, "exp.default", got))]]
    assert named(tasks(made.localized())) == ["d0.F0.0", "send d0 d1", "d0.F1.0", "d1.F1.0"]


def test_a_message_stands_where_the_later_of_its_members_does():
    """d0 sends as part of its forward what d1 asks for in its backward."""
    made = Slots(2)
    y = made.call("d0", F0, "relu.default", made.input("d0"))
    z = made.call("d1", F1, "relu.default", made.input("d1"))
    got = made.send(y, "d0", F0, "d1", B1)
    z = made.call("d1", B1, "mm.default", z, got)
    made.outputs.append([part("d1", z)])
    found = tasks(made.localized())
    assert named(found) == ["d0.F0.0", "d1.F1.0", "send d0 d1", "d1.B1.0"]
    assert found[2].places == (F0, B1)
