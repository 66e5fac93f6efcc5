"""Real models, made tiny: every one of the zoo, by every way to split it, against eager.

Models are captured once a dtype, with two layers where none is cut in stages. Splits change the
order of additions and are held to rounding in float64; a cut in stages changes nothing and is held
to the last bit in float32. Some models compute norms and positions in float32 whatever their dtype;
they are held to float32's rounding.
"""

import pytest

import shardwright as sw
from tests.rounding import BITS
from tests.turns import rotated
from tests.zoo.captures import SHALLOW, single, widest
from zoo.models import BY_NAME

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]

NAMES = list(BY_NAME)
POLICIES = ("data", "tensor", "sequence")
SPLITS = [(policy, slots) for policy in POLICIES for slots in (2, 3, 4)]
SLICES_CROSS = {"mamba"}
"""Models of which half of a tensor goes to the next stage: there its rows stand close together, in
eager they are twice as far apart, which a product may round otherwise."""
ON_PROCESSES = [
    ("gpt2", {"pipeline": 3}),
    ("t5", {"pipeline": 4}),
    ("bert", {"data": 2}),
    ("resnet", {"data": 2}),
    ("llama", {"sequence": 2}),
    ("qwen3", {"pipeline": 2, "tensor": 2}),
    ("mixtral", {"pipeline": 2, "tensor": 2}),
]
"""A sample that runs on worker processes, beside two stages and two tensor slots."""


def check(found, plan_of, *, tolerance, in_process=True):
    pipeline = sw.build(found.graph, plan_of(found.graph))
    report = sw.verify(
        pipeline,
        found.model,
        (),
        found.kwargs,
        in_process=in_process,
        tolerance=tolerance,
        modules=BY_NAME[found.graph.name].modules,
    )
    assert report.equal
    return pipeline


def bits(name):
    """The tolerance of a model that is cut in stages."""
    return BITS if name in SLICES_CROSS else 0.0


@pytest.mark.parametrize(("name", "stages"), rotated(NAMES, (2, 3, 4)))
def test_a_cut_in_stages_is_equal_to_the_last_bit(name, stages):
    pipeline = check(single(name), lambda g: sw.plan(g, stages), tolerance=bits(name))
    stored = {info.value.name for info in pipeline.tensors.values() if info.value is not None}
    aliases = {}
    for path, parameter in single(name).model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), set()).add(path)
    assert all(len(names & stored) <= 1 for names in aliases.values())


@pytest.mark.parametrize(("name", "split"), rotated(NAMES, SPLITS))
def test_a_split_is_equal_up_to_rounding(name, split):
    policy, slots = split
    found = widest(name, SHALLOW)
    tolerance = 1e-12 if found.double else 1e-5
    check(found, lambda g: sw.plan(g, slots, policy=policy), tolerance=tolerance)


def test_most_models_are_held_to_double_precision():
    assert sum(widest(name, SHALLOW).double for name in NAMES) >= 11


@pytest.mark.parametrize("name", NAMES)
def test_stages_of_splits_are_equal_up_to_rounding(name):
    mesh = {"pipeline": 2, "tensor": 2}
    check(single(name), lambda g: sw.plan(g, mesh=mesh), tolerance=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_split_in_single_precision_is_equal_up_to_rounding(name, policy):
    check(single(name), lambda g: sw.plan(g, 2, policy=policy), tolerance=1e-5)


@pytest.mark.workers
@pytest.mark.parametrize(
    ("name", "policy", "tolerance"),
    [
        *((name, "pipeline", 0.0) for name in NAMES[::4]),
        *((name, "tensor", 1e-5) for name in NAMES[2::4]),
    ],
)
def test_worker_processes_give_the_same(name, policy, tolerance):
    check(
        single(name),
        lambda g: sw.plan(g, 2, policy=policy),
        tolerance=tolerance,
        in_process=False,
    )


@pytest.mark.workers
@pytest.mark.parametrize(("name", "mesh"), ON_PROCESSES, ids=str)
def test_worker_processes_give_the_same_on_other_meshes(name, mesh):
    tolerance = 0.0 if set(mesh) == {"pipeline"} else 1e-5
    check(
        single(name),
        lambda g: sw.plan(g, mesh=mesh),
        tolerance=tolerance,
        in_process=False,
    )
