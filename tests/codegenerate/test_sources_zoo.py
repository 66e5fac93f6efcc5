"""Programs of the zoo: stage by stage they give what eager gives, to the last bit."""

import pytest
import torch

import shardwright as sw
from shardwright.codegenerate.sources.program import program_of
from tests.codegenerate.program_runs import ProgramRun, check_program, same
from tests.codegenerate.test_from_file import contents, loaded
from zoo.models import BY_NAME, MODELS
from zoo.training import trained

pytestmark = pytest.mark.filterwarnings("ignore::Warning:transformers")

FAST = {("gpt2", 2), ("t5", 4), ("resnet", 2)}


def tiers(rows):
    """The rows; those that are not few are of the tier of whole models."""
    return [pytest.param(*row, marks=() if row in FAST else pytest.mark.zoo) for row in rows]


@pytest.mark.parametrize(
    ("name", "devices"), tiers((entry.name, count) for entry in MODELS for count in (2, 4))
)
def test_stages_give_what_eager_gives(name, devices):
    model, args, kwargs = BY_NAME[name].make()
    graph = sw.capture(model, args, kwargs)
    program = program_of(sw.plan(graph, devices), graph)
    check_program(program)
    assert len(program.partitions) == devices
    assert not program.training
    with torch.no_grad():
        assert same(ProgramRun(program)(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.zoo
@pytest.mark.parametrize("name", [entry.name for entry in MODELS])
@pytest.mark.parametrize("policy", ["metis", "memory"])
def test_partitioners(name, policy):
    model, args, kwargs = BY_NAME[name].make()
    graph = sw.capture(model, args, kwargs)
    program = program_of(sw.plan(graph, 3, policy), graph)
    check_program(program)
    with torch.no_grad():
        assert same(ProgramRun(program)(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param(name, 2, marks=() if name == "bert" else pytest.mark.zoo)
        for name in ("gpt2", "bert", "t5", "resnet", "vit", "llama", "clip", "whisper")
    ],
)
def test_files_give_what_eager_gives(name, devices, tmp_path):
    model, args, kwargs = BY_NAME[name].make()
    graph = sw.capture(model, args, kwargs)
    pipeline = loaded(graph, sw.plan(graph, devices), tmp_path)
    with torch.no_grad():
        wanted = model(*args, **kwargs)
        for known in (None, graph):
            program = program_of(pipeline, known)
            check_program(program)
            run = ProgramRun(program, contents(pipeline))
            assert same(run(*args, **kwargs), wanted)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "resnet", "vit", "llama"])
@pytest.mark.parametrize("from_file", [False, True])
def test_the_forward_of_a_step(name, from_file, tmp_path):
    training = trained(name)
    first, second = training.microbatches(2)
    graph = sw.compile_ir(training.step, **first)
    planned = sw.plan(graph, 2, microbatches=2)
    if from_file:
        pipeline = loaded(graph, planned, tmp_path)
        program, stored = program_of(pipeline), contents(pipeline)
    else:
        program, stored = program_of(planned, graph), {}
    check_program(program)
    assert program.training
    for batch in (first, second):
        loss = ProgramRun(program, stored)(**batch)
        with torch.no_grad():
            assert torch.allclose(loss, training.model(**batch).loss, rtol=1e-6)
