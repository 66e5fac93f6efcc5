"""Programs from plans: stage by stage they compute what the graph does, to the last bit."""

import time

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwright as sw
from shardwright.codegenerate.codegen import program_of, program_of_plan
from shardwright.errors import CodegenError, PlanError
from shardwright.ir import Builder
from shardwright.planner import plan
from shardwright.planning.plan import Assignment
from tests.building.small_models import batch_of, loss_of, made
from tests.building.step_files import StepRun
from tests.codegenerate.program_runs import ProgramRun, check_program, same, stages
from tests.graphs import language_model, tokens
from tests.steps import image_step, language_step


def checked(graph, planned):
    program = program_of_plan(graph, planned)
    check_program(program)
    return program


@pytest.mark.parametrize("policy", ["pipeline", "metis", "memory"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_compute_what_the_graph_does(policy, tied):
    graph = language_model(layers=4, tied=tied)
    program = checked(graph, plan(graph, 3, policy))
    assert len(program.partitions) > 1
    assert torch.equal(ProgramRun(program)(tokens()), graph.run(tokens()))


def test_a_tied_weight_stands_in_each_stage_that_reads_it():
    graph = language_model(layers=4, tied=True)
    holders = [
        stage.name
        for stage in stages(checked(graph, plan(graph, 3)))
        if any(value.names == ("embed.weight",) for value in stage.graph.stored())
    ]
    assert holders == ["Stage0", "Stage2"]


def test_nodes_keep_their_modules_lines_and_order():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.GELU()).eval()
    graph = sw.capture(model, (torch.randn(2, 4),))
    program = checked(graph, plan(graph, 2))
    found = [(n.op, n.scopes, n.source) for stage in stages(program) for n in stage.graph.nodes]
    assert found == [(n.op, n.scopes, n.source) for n in graph.nodes]
    assert all(scopes for _, scopes, _ in found)
    assert not program.training
    model.train()
    assert program_of_plan(sw.capture(model, (torch.randn(2, 4),)), plan(graph, 2)).training


def test_ports_are_named_by_the_module_that_makes_them():
    graph = language_model(layers=4)
    program = checked(graph, plan(graph, 2))
    first, second = stages(program)
    assert [port.name for port in first.inputs] == ["tokens"]
    (between,) = first.outputs
    assert between.name == "layers.1/add_1"
    assert [port.name for port in second.inputs] == [between.name]
    assert [port.name for port in second.outputs] == ["output"] == list(program.outputs)


def ends():
    """Inputs and stored values that are returned, and a value that is returned twice."""
    builder = Builder("ends")
    x, y = builder.input("x", (2, 2)), builder.input("y", (2, 2))
    w, v = (builder.param(name, torch.randn(2, 2)) for name in ("w", "v"))
    unread = builder.param("unread", torch.randn(2, 2))
    a = builder.call("aten.linear.default", x, w)
    b = builder.call("aten.linear.default", a, v)
    c = builder.call("aten.add.Tensor", b, x)
    return builder.finish([x, a, c, y, w, unread, c, x])


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_returned_inputs_stored_values_and_repeats(devices):
    graph = ends()
    program = checked(graph, plan(graph, devices))
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    assert same(ProgramRun(program, graph)(x, y), graph.run(x, y))
    assert program.inputs == ("x", "y")
    names = [f"output_{i}" for i in (1, 2)]
    assert program.outputs == ("x", *names, "y", "output_4", "output_5", names[1], "x")
    assert not any(port.name == "y" for stage in stages(program) for port in stage.inputs)


def test_an_input_read_in_several_stages_enters_each():
    graph = ends()
    reading = [
        stage.name
        for stage in stages(checked(graph, plan(graph, 2)))
        if "x" in {port.name for port in stage.inputs}
    ]
    assert reading == ["Stage0", "Stage1"]


def test_an_output_by_the_name_of_an_input_gets_another_name():
    class Model(nn.Module):
        def forward(self, x):
            return {"x": x.sin(), "y": x}

    graph = sw.capture(Model(), (torch.randn(3),))
    program = checked(graph, plan(graph, 1))
    assert program.outputs == ("x__1", "x")
    x = torch.randn(3)
    assert same(ProgramRun(program, graph)(x), {"x": x.sin(), "y": x})


# --- places ---------------------------------------------------------------------------------------


def test_a_slot_that_is_left_and_entered_again_is_several_partitions():
    graph = language_model(layers=4)
    slots = iter(range(10**6))

    def there_and_back(policy_graph, resource):
        for node in policy_graph.nodes():
            policy_graph.assign(node, next(slots) // 15 % 2)
        return policy_graph

    planned = plan(graph, 2, there_and_back)
    program = checked(graph, planned)
    assert len(program.partitions) == 3
    assert torch.equal(ProgramRun(program)(tokens()), graph.run(tokens()))


def test_slots_in_another_order_are_as_many_partitions():
    graph = language_model(layers=4)
    planned = plan(graph, 2)
    swapped = tuple(Assignment.on(d) for d in ("d1", "d0"))
    program = checked(graph, msgspec.structs.replace(planned, assignments=swapped))
    assert len(program.partitions) == 2
    assert torch.equal(ProgramRun(program)(tokens()), graph.run(tokens()))


def test_a_table_that_the_plan_cuts_is_whole_where_it_is_read():
    graph = language_model(layers=2, vocabulary=3000, classes=5)
    planned = plan(graph, 2)
    assert planned.notes
    program = checked(graph, planned)
    first, second = stages(program)
    assert any(value.name == "embed.weight" for value in first.graph.stored())
    assert not any(value.name == "embed.weight" for value in second.graph.stored())
    assert all(value.placements is None for value in first.graph.stored())
    assert program.notes == ("embedding: cut over d0, d1 in the plan, whole in partition 0 here",)
    assert torch.equal(ProgramRun(program)(tokens(3000)), graph.run(tokens(3000)))


def test_stages_that_go_back_are_refused():
    graph = language_model(layers=2)
    planned = plan(graph, 2, "metis")
    backwards = msgspec.structs.replace(planned, stages=tuple(1 - s for s in planned.stages))
    with pytest.raises(CodegenError, match="needs what a later partition makes"):
        program_of_plan(graph, backwards)


def test_a_plan_for_another_graph_is_refused():
    with pytest.raises(PlanError, match="plan again"):
        program_of_plan(language_model(layers=3), plan(language_model(layers=2), 2))


# --- buffers --------------------------------------------------------------------------------------


def test_batch_norm_in_training_changes_its_buffers():
    model = made("resnet").train()
    images = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    graph = sw.capture(model, (images,))
    program = checked(graph, plan(graph, 2))
    assert program.training
    run = ProgramRun(program)
    before = {name: t.clone() for name, t in run.buffers().items()}
    found = run(images)
    assert torch.equal(found, model(images))
    buffers = dict(model.named_buffers())
    assert run.buffers().keys() == buffers.keys()
    assert all(torch.equal(run.buffers()[name], t) for name, t in buffers.items())
    assert not any(torch.equal(before[name], t) for name, t in buffers.items())


class Counting(nn.Module):
    """A buffer that is read, changed, read again, and returned as it was."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        before = self.mean.view(2, 2)
        old = before.clone()
        y = self.first(x) + self.mean
        self.mean.mul_(0.5).add_(y.mean(0))
        z = self.second(y) + old.flatten()
        return z, before, old


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_buffer_that_changes_is_read_elsewhere_as_it_was(devices):
    model = Counting()
    x = torch.randn(3, 4)
    graph = sw.capture(model, (x,))
    run = ProgramRun(checked(graph, plan(graph, devices)), graph)
    for _ in range(2):
        assert same(run(x), model(x))
        assert torch.equal(run.buffers()["mean"], model.mean)


def test_new_contents_that_a_later_partition_makes_are_refused():
    builder = Builder("late")
    x, mean = builder.input("x", (2,)), builder.buffer("mean", torch.zeros(2))
    y = builder.call("aten.add.Tensor", x, mean)
    w = builder.param("w", torch.ones(2, 2))
    y = builder.call("aten.linear.default", y, w)
    z = builder.call("aten.linear.default", y, w)
    graph = builder.finish([y, z], updates={mean.id: z.id})
    message = "partition 0 reads the buffer 'mean', and its new contents are made by aten.linear"
    with pytest.raises(CodegenError, match=message):
        program_of_plan(graph, plan(graph, 3))


# --- steps ----------------------------------------------------------------------------------------

SCHEDULES = {
    "1f1b": ({"devices": 2}, 2),
    "gpipe": ({"devices": 3, "schedule": "gpipe"}, 3),
    "interleaved": ({"devices": 2, "schedule": "interleaved"}, 4),
    "zb-v": ({"devices": 2, "schedule": "zb-v"}, 4),
    "metis": ({"devices": 2, "policy": "metis"}, 2),
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_forward_of_a_step_gives_the_loss_of_its_batch(name, microbatches):
    graph = language_step(layers=4)
    options, count = SCHEDULES[name]
    program = checked(graph, plan(graph, **options, microbatches=microbatches))
    assert len(program.partitions) == count
    assert program.inputs == ("tokens", "labels")
    assert program.training
    assert program.outputs == ("output_0",)
    run = ProgramRun(program)
    for seed in range(2):
        torch.manual_seed(seed)
        batch, labels = torch.randint(50, (2, 4, 6))
        labels[seed:, 4:] = -100
        given = {"tokens": batch, "labels": labels, "lr": torch.zeros((), dtype=torch.float64)}
        wanted = StepRun(sw.build(graph, plan(graph, 1))).step(given)["output_0"]
        assert torch.allclose(run(batch, labels), wanted, rtol=1e-14)


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet"])
def test_the_forward_of_a_captured_step_is_eagers(name):
    model = made(name).train()
    inputs, labels = batch_of(name, 4, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs, labels):
        loss = loss_of(model, inputs, labels)
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "weight": model.head.weight.sum()}

    graph = sw.compile_ir(step, inputs, labels)
    program = checked(graph, plan(graph, 2, microbatches=2))
    found = ProgramRun(program)(inputs, labels)
    assert torch.equal(found, loss_of(model, inputs, labels))
    assert program.outputs == ("loss",)
    ops = [node.op for stage in stages(program) for node in stage.graph.nodes]
    assert ops.count("aten.cross_entropy_loss.default") == 1
    assert not any("div" in op for op in ops)


def test_a_step_that_returns_nothing_gives_its_loss():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4, dtype=torch.float64)

    def step(x):
        model(x).square().mean().backward()
        optimizer.step()

    graph = sw.compile_ir(step, x)
    program = checked(graph, plan(graph, 2, microbatches=2))
    assert (program.inputs, program.outputs) == (("x",), ("loss",))
    torch.manual_seed(0)
    found = ProgramRun(program)(x)
    torch.manual_seed(0)
    assert torch.equal(found, model(x).square().mean())


def test_what_a_step_returns_besides_its_loss_comes_behind_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    x = torch.randn(3, 4, dtype=torch.float64)

    def step(x):
        y = model(x)
        (y.square().mean() / 2).backward()
        return y

    graph = sw.compile_ir(step, x)
    loss, y = ProgramRun(checked(graph, plan(graph, 2)))(x)
    assert torch.equal(y, model(x))
    assert torch.equal(loss, model(x).square().mean() / 2)


def test_batch_norm_of_a_step_changes_its_buffers():
    graph = image_step()
    program = checked(graph, plan(graph, 2, microbatches=2))
    run = ProgramRun(program)
    run(torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.arange(4))
    assert run.buffers().keys() == {"norm.mean", "norm.var"}


# --- plans that split nodes -----------------------------------------------------------------------

MESHES = [{"tensor": 2}, {"data": 2}, {"pipeline": 2, "tensor": 2}]


@pytest.mark.parametrize("mesh", MESHES)
def test_partitions_have_a_stage_a_slot(mesh):
    graph = language_model(layers=4)
    program = program_of_plan(graph, plan(graph, mesh=mesh))
    assert len(program.partitions) == mesh.get("pipeline", 1)
    for number, partition in enumerate(program.partitions):
        assert [(s.name, s.index) for s in partition] == [
            (f"Stage{number}", index) for index in range(2)
        ]


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_that_split_nodes_are_refused(mesh):
    graph = language_step(layers=4)
    with pytest.raises(CodegenError, match="the plan for the training step 'train_step' splits"):
        program_of_plan(graph, plan(graph, mesh=mesh))


# --- how long it takes ----------------------------------------------------------------------------


def test_a_deep_model_takes_no_longer_than_its_length():
    graph = language_model(layers=192)
    planned = plan(graph, 4)
    start = time.process_time()
    program_of_plan(graph, planned)
    assert time.process_time() - start < 2


# --- where a program comes from: a plan with its graph, or a pipeline that was built  -------------


def classes(program):
    """The classes of the modules of a program's nodes."""
    return {node.scope_class for stage in stages(program) for node in stage.graph.nodes}


def test_a_plan_with_its_graph():
    graph = language_model()
    program = program_of(plan(graph, 2), graph)
    check_program(program)
    assert classes(program) == {"", "tests.Block"}


def test_a_plan_without_its_graph_is_refused():
    graph = language_model()
    with pytest.raises(CodegenError, match="give the graph that it was made for"):
        program_of(plan(graph, 2))


def test_something_else_is_refused():
    with pytest.raises(CodegenError, match="from a Pipeline or a Plan, found a str"):
        program_of("model.pipeline.json")


def test_a_pipeline_that_was_built_here_knows_its_modules():
    graph = language_model()
    pipeline = sw.build(graph, plan(graph, 2))
    program = program_of(pipeline)
    check_program(program)
    assert classes(program) == {"", "tests.Block"}
    assert torch.equal(ProgramRun(program)(tokens()), graph.run(tokens()))


def test_a_pipeline_that_was_built_of_another_graph_is_refused():
    graph = language_model()
    pipeline = sw.build(graph, plan(graph, 2))
    assert len(program_of(pipeline, graph).partitions) == 2
    with pytest.raises(PlanError, match="plan was made for the graph"):
        program_of(pipeline, language_model(layers=1))


def test_what_it_was_built_from_is_no_part_of_a_pipeline(tmp_path):
    graph = language_model()
    planned = plan(graph, 2)
    pipeline = sw.build(graph, planned)
    assert pipeline.origin is not None
    assert pipeline.origin[:2] == (graph, planned)
    pipeline.save(tmp_path / "model.pipeline.json")
    again = sw.Pipeline.load(tmp_path / "model.pipeline.json")
    assert again.origin is None
    assert again == pipeline
    assert again.to_json() == pipeline.to_json()
    assert str(again) == str(pipeline)
    assert repr(again) == repr(pipeline)


def test_a_pipeline_from_a_file_is_refused(tmp_path):
    graph = language_model()
    sw.build(graph, plan(graph, 2)).save(tmp_path / "model.pipeline.json")
    with pytest.raises(CodegenError, match="give codegen the plan and the graph"):
        program_of(sw.Pipeline.load(tmp_path / "model.pipeline.json"), graph)


def test_a_built_pipeline_keeps_the_models_names_whatever_its_files_say(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    graph = sw.capture(model, (x,))
    file = tmp_path / "weights.safetensors"
    save_file({f"model.{name}": t for name, t in model.state_dict().items()}, file)
    pipeline = sw.build(graph, plan(graph, 2), weights=file, rename=lambda name: f"model.{name}")
    program = program_of(pipeline)
    names = {v.names[0] for stage in stages(program) for v in stage.graph.stored()}
    assert names == model.state_dict().keys()
    assert torch.equal(ProgramRun(program)(x), model(x))
