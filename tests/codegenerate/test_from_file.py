"""Programs from pipeline files: what the file's forward computes, with modules by their names."""

import msgspec
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.codegenerate.sources.from_file import program_of_file
from shardwright.errors import CodegenError
from shardwright.ir import Builder, IRGraph
from shardwright.planning import plan
from tests.codegenerate.program_runs import ProgramRun, check_program, same, stages
from tests.graphs import language_model, tokens
from tests.pipeline.documents import two_stages
from tests.steps import image_step, language_step
from tests.transform.small_models import batch_of, loss_of, made


def loaded(graph, planned, path) -> sw.Pipeline:
    """The pipeline as another process would see it."""
    sw.build(graph, planned).save(path / "model.pipeline.json")
    return sw.Pipeline.load(path / "model.pipeline.json")


def contents(pipeline):
    """Whole stored tensors by name."""
    whole = {}
    for info in pipeline.tensors.values():
        if info.value is not None:
            place = tuple((0, size) for size in info.value.shape)
            taken = msgspec.structs.replace(info.value, placements=place)
            alone = msgspec.structs.replace(info, value=taken, shape=info.value.shape)
            whole[info.value.name] = pipeline.weights.read(taken, alone)
    return whole


def checked(pipeline, known=None):
    program = program_of_file(pipeline, known)
    check_program(program)
    return program, ProgramRun(program, contents(pipeline))


@pytest.mark.parametrize("policy", ["pipeline", "metis"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_computes_what_its_graph_does(policy, tied, tmp_path):
    graph = language_model(layers=4, tied=tied)
    pipeline = loaded(graph, plan(graph, 2, policy), tmp_path)
    program, run = checked(pipeline)
    assert program.inputs == ("tokens",)
    assert program.outputs == ("output",)
    assert torch.equal(run(tokens()), graph.run(tokens()))
    assert not program.training


def test_a_file_in_memory_has_its_weights():
    graph = language_model(layers=2)
    program = program_of_file(sw.build(graph, plan(graph, 2)))
    assert torch.equal(ProgramRun(program)(tokens()), graph.run(tokens()))


def test_a_file_as_the_specification_has_it(tmp_path):
    document = two_stages()
    document.metadata.structure = None
    for info in document.tensors.values():
        if info.value is not None:
            info.value.shape = None
    fields = {name: getattr(document, name) for name in document.__struct_fields__}
    program = program_of_file(sw.Pipeline(**fields))
    check_program(program)
    assert [stage.name for stage in stages(program)] == ["Stage0", "Stage1"]
    assert (program.inputs, program.outputs) == (("x",), ("output",))
    weights = {n: torch.randn(*s) for n, s in (
        ("layers.0.weight", (8, 8)), ("layers.1.weight", (8, 8)), ("head.weight", (2, 8)),
    )}  # fmt: skip
    x = torch.randn(4, 8)
    wanted = x
    for weight in weights.values():
        wanted = nn.functional.linear(wanted, weight)
    assert torch.equal(ProgramRun(program, weights)(x), wanted)


def test_a_table_that_is_cut_over_slots_is_whole_again(tmp_path):
    graph = language_model(layers=2, vocabulary=3000, classes=5)
    planned = plan(graph, 3)
    pipeline = loaded(graph, planned, tmp_path)
    parts = [info.value for info in pipeline.tensors.values() if info.value is not None]
    columns = {part.placements[1] for part in parts if part.name == "embed.weight"}
    assert columns == {(0, 3), (3, 6), (6, 8)}
    program, run = checked(pipeline)
    assert len(program.partitions) == 3
    first, *others = stages(program)
    (table,) = (value for value in first.graph.stored() if value.name == "embed.weight")
    assert (table.shape, table.placements) == ((3000, 8), None)
    assert not any(v.name == "embed.weight" for stage in others for v in stage.graph.stored())
    assert torch.equal(run(tokens(3000)), graph.run(tokens(3000)))


def test_returned_inputs_stored_values_and_repeats(tmp_path):
    builder = Builder("ends")
    x, y = builder.input("x", (2, 2)), builder.input("y", (2, 2))
    w = builder.param("w", torch.randn(2, 2))
    a = builder.call("aten.linear.default", x, w)
    b = builder.call("aten.add.Tensor", a, x)
    graph = builder.finish([x, w, a, b, b, y])
    program, run = checked(loaded(graph, plan(graph, 2), tmp_path))
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    assert same(run(x, y), graph.run(x, y))
    assert program.outputs == ("x", "output_1", "output_2", "output_3", "output_3", "y")


def test_keyword_arguments_and_results_fold_as_the_originals_do(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, *, flag=True, more=None):
            y = self.one(x)
            return {"out": self.two(y) + more["a"][0], "flag": flag, "none": None, "y": [y]}

    model, x, more = Model(), torch.randn(2, 4), {"a": [torch.randn(4)]}
    graph = sw.capture(model, (x,), {"more": more})
    _, run = checked(loaded(graph, plan(graph, 2), tmp_path))
    assert same(run(x, more=more), model(x, more=more))


def test_buffers_that_change(tmp_path):
    model = made("resnet").train()
    images = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    graph = sw.capture(model, (images,))
    program, run = checked(loaded(graph, plan(graph, 2), tmp_path))
    assert program.training
    assert torch.equal(run(images), model(images))
    assert all(torch.equal(run.buffers()[name], t) for name, t in model.named_buffers())
    stored = {v.names[0]: v.role for stage in stages(program) for v in stage.graph.stored()}
    assert {name for name, role in stored.items() if role == "buffer"} == {
        name for name, _ in model.named_buffers()
    }


# --- steps ----------------------------------------------------------------------------------------

STEPS = {
    "1f1b": ({"devices": 2, "microbatches": 1}, 2),
    "1f1b, 4 microbatches": ({"devices": 2, "microbatches": 4}, 2),
    "gpipe": ({"devices": 3, "microbatches": 2, "schedule": "gpipe"}, 3),
    "interleaved": ({"devices": 2, "microbatches": 2, "schedule": "interleaved"}, 4),
    "zb-v": ({"devices": 2, "microbatches": 4, "schedule": "zb-v", "recompute": "full"}, 4),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_forward_of_a_step_gives_the_loss_of_a_microbatch(name, tmp_path):
    graph = language_step(layers=4)
    options, count = STEPS[name]
    program, run = checked(loaded(graph, plan(graph, **options), tmp_path))
    assert len(program.partitions) == count
    assert program.inputs == ("tokens", "labels")
    assert program.training
    assert program.outputs == (program.loss,) == ("output_0",)
    ops = [node.op for stage in stages(program) for node in stage.graph.nodes]
    assert not any("backward" in op or "div" in op or "ne." in op for op in ops)
    batch, labels = torch.randint(50, (2, 4, 6))
    labels[1:, 4:] = -100
    known = program_of_file(sw.build(graph, plan(graph, 1)))
    assert torch.equal(run(batch, labels)[0], ProgramRun(known)(batch, labels)[0])


def test_a_captured_step_is_eagers(tmp_path):
    model = made("llama").train()
    inputs, labels = batch_of("llama", 4, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs, labels):
        scores = model(inputs)
        loss = nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach(), scores

    graph = sw.compile_ir(step, inputs, labels)
    pipeline = loaded(graph, plan(graph, 2, microbatches=2), tmp_path)
    program, run = checked(pipeline)
    loss, scores = run(inputs, labels)
    assert torch.equal(loss, loss_of(model, inputs, labels))
    assert torch.equal(scores, model(inputs))
    assert program.loss == program.outputs[0]


def test_batch_norm_of_a_step_changes_its_buffers(tmp_path):
    graph = image_step()
    _, run = checked(loaded(graph, plan(graph, 2, microbatches=2), tmp_path))
    run(torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.arange(4))
    assert run.buffers().keys() == {"norm.mean", "norm.var"}


def test_a_step_draws_its_dropout_from_torch(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    x = torch.randn(3, 4, dtype=torch.float64)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    graph = sw.compile_ir(step, x)
    program, run = checked(loaded(graph, plan(graph, 2, microbatches=2), tmp_path))
    assert program.inputs == ("x",)
    torch.manual_seed(0)
    found = run(x)
    torch.manual_seed(0)
    assert torch.equal(found, model(x).square().mean())


# --- where nodes come from ------------------------------------------------------------------------


def scopes_of(program):
    """The innermost module of each node that reads or stands between, with its class."""
    return [
        (node.op.split(".")[1], node.scope, node.scope_class)
        for stage in stages(program)
        for node in stage.graph.nodes
    ]


def test_modules_follow_from_the_names_of_parameters(tmp_path):
    graph = language_model(layers=3)
    program, _ = checked(loaded(graph, plan(graph, 2), tmp_path))
    found = scopes_of(program)
    assert found[:2] == [("embedding", "embed", ""), ("mul", "", "")]
    for i in range(3):
        path = f"layers.{i}"
        assert found[2 + 9 * i : 11 + 9 * i] == [
            ("layer_norm", f"{path}.norm1", ""),
            ("linear", f"{path}.mix", ""),
            ("softmax", path, "Layer"),
            ("add", path, "Layer"),
            ("layer_norm", f"{path}.norm2", ""),
            ("linear", f"{path}.up", ""),
            ("gelu", path, "Layer"),
            ("linear", f"{path}.down", ""),
            ("add", path, "Layer"),
        ]
    assert found[-1] == ("linear", "head", "")


def origins(program):
    return [
        (node.op, node.scopes, node.source)
        for stage in stages(program)
        for node in stage.graph.nodes
    ]


def test_modules_and_lines_come_from_the_graph_where_it_is_given(tmp_path):
    model = made("translator")
    inputs, _ = batch_of("translator", 2, 0)
    graph = sw.capture(model, (inputs,))
    pipeline = loaded(graph, plan(graph, 2), tmp_path)
    program, run = checked(pipeline, graph)
    assert sorted(map(repr, origins(program))) == sorted(
        repr((node.op, node.scopes, node.source)) for node in graph.nodes
    )
    names = {v.names for stage in stages(program) for v in stage.graph.stored()}
    assert names == {value.names for value in graph.stored()}
    assert torch.equal(run(inputs), model(inputs))


def test_the_graph_of_something_else_is_refused(tmp_path):
    graph = language_model(layers=2)
    pipeline = loaded(graph, plan(graph, 2), tmp_path)
    other = sw.capture(nn.Linear(2, 2), (torch.randn(1, 2),))
    with pytest.raises(CodegenError, match="give the graph that the pipeline was built from"):
        program_of_file(pipeline, other)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tensor": 2}, "splits nodes over slots"),
        ({"data": 2}, "cuts the input 'tokens' over several slots"),
        ({"pipeline": 2, "tensor": 2}, "splits nodes over slots"),
    ],
)
def test_files_of_split_nodes(mesh, message):
    graph = language_model(layers=4)
    pipeline = sw.build(graph, plan(graph, mesh=mesh))
    with pytest.raises(CodegenError, match=message) as caught:
        program_of_file(pipeline)
    assert "codegen(plan, path, graph=graph)" in str(caught.value)


def test_lowered_files():
    graph = language_model(layers=2)
    with pytest.raises(CodegenError, match="generate code from the pipeline before lowering"):
        program_of_file(sw.lower(sw.build(graph, plan(graph, 2))))


def test_a_step_that_returns_nothing():
    model = nn.Linear(4, 1).double()

    def step(x):
        model(x).sum().backward()

    graph = sw.compile_ir(step, torch.randn(3, 4, dtype=torch.float64))
    assert isinstance(graph, IRGraph)
    with pytest.raises(CodegenError, match="nothing says what its loss is"):
        program_of_file(sw.build(graph, plan(graph, 1)))
