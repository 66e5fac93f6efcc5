"""Safety of replays: what is ignored, what goes on, what nothing disturbs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.compiler.bind import Binder, BoundPlan
from shardwright.compiler.memory.plan import ARENA
from shardwright.compiler.program import CompiledProgram
from shardwright.compiler.replay import Replaying
from shardwright.compiler.sources import ModuleSource, Prepared
from shardwright.errors import ExecError, InputError, WeightError
from tests.compiler.steps import OPTIMIZERS, Program, assert_close, batches, network, program

ADAM = OPTIMIZERS["adamw"]


def compiled(made: Program, batch: Any = None, replay: Replaying | None = None) -> CompiledProgram:
    return sw.compile(made.step, *(batch or batches(1)[0]), replay=replay)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# --- training ------------------------------------------------------------------------------------


def test_feeds_of_weights_state_and_step_are_ignored_in_training() -> None:
    plain, fed = program(ADAM), program(ADAM)
    run, other = compiled(plain), compiled(fed)
    for x, y in batches(3):
        loss = run.run({"x": x, "y": y})
        junk = {
            "0.weight": torch.full((16, 6), 9.0),
            "optimizer.0.weight.exp_avg": torch.full((16, 6), 9.0),
            "optimizer.0.weight.step": torch.tensor(77.0),
        }
        assert same(loss, other.run({"x": x, "y": y, **junk}))
    assert same(plain.state(), fed.state())


def test_the_step_advances_once_a_replay() -> None:
    made = program(ADAM)
    run = compiled(made)
    assert not made.optimizer.state, "compiling makes no state"
    for count, (x, y) in enumerate(batches(4), 1):
        run(x, y)
        steps = {state["step"].item() for state in made.optimizer.state.values()}
        assert steps == {float(count)}


def test_warming_up_and_compiling_change_nothing() -> None:
    made = program(ADAM, lambda: network(dropout=0.5))
    made.step(*batches(1)[0])
    before, rng = made.state(), torch.get_rng_state()
    run = compiled(made, replay=Replaying("train", warm_up=3))
    assert same(made.state(), before)
    assert torch.equal(torch.get_rng_state(), rng)
    cold = program(ADAM, lambda: network(dropout=0.5))
    cold.step(*batches(1)[0])
    cold.model.load_state_dict(made.model.state_dict())
    torch.manual_seed(0)
    expected = compiled(cold)(*batches(1)[0])
    torch.manual_seed(0)
    assert torch.equal(run(*batches(1)[0]), expected), "the first draws are not used up"


def test_dropout_differs_at_each_replay() -> None:
    made = program(lambda p: torch.optim.SGD(p, lr=0.0), lambda: network(dropout=0.5, norm=False))
    run = compiled(made)
    x, y = batches(1)[0]
    losses = [run(x, y).item() for _ in range(4)]
    assert len(set(losses)) == 4
    again = compiled(program(lambda p: torch.optim.SGD(p, lr=0.0), made_of(made)))
    assert [again(x, y).item() for _ in range(4)] == losses, "and is the same in each run"


def made_of(made: Program) -> Any:
    def model() -> nn.Module:
        found = network(dropout=0.5, norm=False)
        found.load_state_dict(made.model.state_dict())
        return found

    return model


def test_a_second_program_does_not_disturb_the_first() -> None:
    first, second, alone = program(ADAM), program(OPTIMIZERS["momentum"]), program(ADAM)
    run, other, reference = compiled(first), compiled(second), compiled(alone)
    for x, y in batches(3):
        assert torch.equal(run(x, y), reference(x, y))
        other(x, y)
    assert same(first.state(), alone.state())


def test_another_shape_gets_a_capture_of_its_own_up_to_the_bound() -> None:
    made, eager = program(ADAM), program(ADAM)
    run = compiled(made, replay=Replaying("train", bound=2))
    sizes = [8, 4, 8, 5, 4, 8]
    for size in sizes:
        x, y = batches(1, size)[0]
        found, expected = run(x, y), eager.step(x, y)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
        assert run.captures <= 2
    steps = {state["step"].item() for state in made.optimizer.state.values()}
    assert steps == {float(len(sizes))}, "all captures train one program"


def test_eviction_keeps_results() -> None:
    model = network().eval()
    run = sw.compile(model, torch.randn(8, 6), replay=Replaying(bound=1))
    xs = [torch.randn(rows, 6) for rows in (8, 3, 8)]
    first = run(xs[0])
    kept = first.clone()
    run(xs[1])
    assert torch.equal(first, kept)
    assert torch.equal(run(xs[0]), kept)
    assert run.captures == 1


# --- feeds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({"x": torch.ones(8, 6), "q": torch.ones(1)}, "'q'.*inputs are x, y, lr"),
        ({"x": torch.ones(8, 6)}, "'y' is not in the feed"),
        ({"x": torch.ones(8, 6).double(), "y": torch.ones(8).long()}, "'x' is f64"),
        ({"x": torch.ones(8, 6, device="meta"), "y": torch.ones(8).long()}, "'x' is on meta"),
    ],
)
def test_a_wrong_feed_is_refused_by_name(feed: dict[str, Tensor], message: str) -> None:
    run = compiled(program(ADAM))
    with pytest.raises(InputError, match=message):
        run.run(feed)


def test_a_wrong_call_is_refused_by_name() -> None:
    run = compiled(program(ADAM))
    x, y = batches(1)[0]
    with pytest.raises(InputError, match="'x' is f64"):
        run(x.double(), y)
    with pytest.raises(InputError, match="'x' is on meta"):
        run(x.to("meta"), y)
    with pytest.raises(InputError, match="missing a required argument"):
        run(x)


def test_a_graph_has_one_shape() -> None:
    model = network().eval()
    run = sw.compile(sw.capture(model, (torch.randn(8, 6),)), torch.randn(8, 6))
    with pytest.raises(InputError, match=r"'input' is f32\[4, 6\].*f32\[8, 6\]"):
        run(torch.randn(4, 6))
    with pytest.raises(InputError, match=r"'input' is f32\[4, 6\].*f32\[8, 6\]"):
        run.run({"input": torch.randn(4, 6)})


def test_a_rate_may_be_fed() -> None:
    made, eager = program(OPTIMIZERS["sgd"]), program(lambda p: torch.optim.SGD(p, lr=0.5))
    x, y = batches(1)[0]
    compiled(made).run({"x": x, "y": y, "lr": torch.tensor(0.5, dtype=torch.float64)})
    eager.step(x, y)
    for name, tensor in made.state().items():
        assert torch.allclose(tensor, eager.state()[name], rtol=1e-5, atol=1e-7), name


# --- results, weights ----------------------------------------------------------------------------


def test_results_are_memory_of_their_own_unless_slots_are_asked_for() -> None:
    model = network().eval()
    x, other = torch.randn(8, 6), torch.randn(8, 6)
    run = sw.compile(model, x)
    first = run(x)
    kept = first.clone()
    run(other)
    assert torch.equal(first, kept)
    slots = run.run({"input": x}, slots=True)["output"]
    assert torch.equal(slots, kept)
    again = run.run({"input": other}, slots=True)["output"]
    assert again.data_ptr() == slots.data_ptr()
    assert torch.equal(slots, again)


def test_a_change_that_torch_does_not_count_is_seen_after_refresh() -> None:
    model = network().eval()
    x = torch.randn(8, 6)
    run = sw.compile(model, x)
    run(x)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    run.refresh()
    assert torch.allclose(run(x), model(x), rtol=1e-5, atol=1e-6)


def test_roles_that_are_copied_are_taken_from_the_feed() -> None:
    model = nn.Linear(6, 2)
    x, weight = torch.randn(3, 6), torch.randn(2, 6)
    before = model.weight.detach().clone()
    replay = Replaying(copy_roles=frozenset({"input", "param"}))
    run = sw.compile(model, x, replay=replay)
    found = run.run({"input": x, "weight": weight})["output"]
    expected = nn.functional.linear(x, weight, model.bias)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.weight, before), "the model keeps its own"


def test_weights_that_are_fed_reach_all_captures_and_stay() -> None:
    model = nn.Linear(6, 2)
    x, other, weight = torch.randn(3, 6), torch.randn(5, 6), torch.randn(2, 6)
    run = sw.compile(model, x, replay=Replaying(copy_roles=frozenset({"input", "param"})))
    run(other)
    run.run({"input": x, "weight": weight})
    model.weight.detach().zero_()
    model.bias.detach().add_(1)
    expected = nn.functional.linear(other, weight, model.bias).detach()
    assert_close(run(other), expected, 1e-5)
    run(torch.randn(4, 6))
    run.refresh()
    assert_close(run(other), expected, 1e-5)
    assert run.captures == 3


class Typed(nn.Module):
    def forward(self, x: Tensor, k: Any) -> Tensor:
        return x / k if isinstance(k, float) else x + k if isinstance(k, bool) else x * k


def test_scalars_of_other_types_have_captures_of_their_own() -> None:
    model, x = Typed(), torch.arange(1, 4)
    scalars = [1, 1.0, True, 0.0, -0.0]
    run = sw.compile(model, x, 1)
    for k in [*scalars, *reversed(scalars)]:
        found, expected = run(x, k), model(x, k)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), k
    assert run.captures == len(scalars)


def test_a_capture_that_fails_leaves_the_one_before() -> None:
    model, x = network().eval(), torch.randn(8, 6)
    run = sw.compile(model, x)
    expected, weight, plan = run(x), model[0].weight, run.plan
    model[0].weight = nn.Parameter(torch.empty(16, 6, device="meta"))
    for ask in (run.refresh, lambda: run(x)):
        with pytest.raises(WeightError):
            ask()
    model[0].weight = weight
    assert torch.equal(run(x), expected)
    assert run.plan is plan


def test_a_refresh_that_cannot_be_bound_leaves_the_capture() -> None:
    model, device, fails = network().eval(), torch.device("cpu"), False
    binder = Binder(device)

    def bind(prepared: Prepared, replaying: Replaying) -> BoundPlan:
        if fails:
            raise ZeroDivisionError
        return binder(prepared, replaying)

    run = CompiledProgram(ModuleSource(model), bind, device, Replaying())
    run.capture(torch.randn(8, 6))
    graph, plan, fails = run.graph, run.plan, True
    with pytest.raises(ZeroDivisionError):
        run.refresh()
    assert run.graph is graph
    assert run.plan is plan


@pytest.mark.parametrize("inside", [False, True], ids=["captured outside", "captured inside"])
def test_autocast_around_a_call_changes_nothing(inside: bool) -> None:
    model, x = nn.Conv3d(1, 2, 3), torch.randn(2, 1, 4, 4, 4)
    with torch.autocast("cpu", enabled=inside):
        run = sw.compile(model, x)
    expected = model(x).detach()
    with torch.autocast("cpu"):
        found = run(x)
    assert found.dtype == torch.float32
    assert_close(found, expected, 1e-5)


class Scaled(nn.Module):
    """A norm to fold, a product of weights to fold, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.scale = torch.full((6,), 2.0)
        self.factor = torch.tensor(3.0)

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm(self.first(x)) * (self.first.weight.exp().sum(0) * self.scale.exp())
        return made * self.factor


def test_what_is_not_static_is_read_at_each_run() -> None:
    model, x = Scaled().eval(), torch.randn(3, 6)
    run = sw.compile(model, x, replay=Replaying(static_roles=frozenset()))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), model.scale, model.factor):
            tensor.add_(1)
        assert_close(run(x), model(x), 1e-5)


def test_constants_are_taken_from_the_feed() -> None:
    model, x = Scaled().eval(), torch.randn(3, 6)
    roles: frozenset[Any] = frozenset({"input", "constant"})
    run = sw.compile(model, x, replay=Replaying(copy_roles=roles))
    names = {len(v.shape): v.name for v in run.graph.stored() if v.role == "constant"}
    fed = {names[1]: torch.ones(6), names[0]: torch.tensor(0.5)}
    (found,) = run.run({"x": x, **fed}).values()
    with torch.no_grad():
        model.scale, model.factor = fed[names[1]], fed[names[0]]
        assert_close(found, model(x), 1e-5)


def test_captures_lie_in_one_arena_and_slots_keep_their_results() -> None:
    model = network().eval()
    run = sw.compile(model, torch.randn(8, 6))
    slots = []
    for rows in (8, 128, 16, 64, 8):
        x = torch.randn(rows, 6)
        (slot,) = run.run({"input": x}, slots=True).values()
        slots.append((slot, slot.clone()))
    assert run.captures == 4
    found = [capture.bound for capture in run._captures.values()]
    assert len({bound.plan.arena_bytes for bound in found}) == 4
    arenas = {bound.executor.memory.bases[ARENA] for bound in found}  # type: ignore[attr-defined]
    assert len(arenas) == 1
    for slot, kept in slots[1:]:
        assert torch.equal(slot, kept)
    for rows in (16, 128, 8, 64):
        x = torch.randn(rows, 6)
        assert_close(run(x), model(x).detach(), 1e-5)


def test_replays_of_another_mode_are_refused() -> None:
    model, x = network().eval(), torch.randn(8, 6)
    with pytest.raises(ExecError, match="mode 'train', but the program is for inference"):
        sw.compile(model, x, replay=Replaying("train"))
    made = program(OPTIMIZERS["adamw"])
    with pytest.raises(ExecError, match="mode 'inference', but the program is for train"):
        sw.compile(made.step, *batches(1)[0], replay=Replaying("inference"))


def test_roles_of_a_program_come_in_any_collection() -> None:
    model, x = network().eval(), torch.randn(8, 6)
    run = sw.compile(model, x, replay=Replaying(copy_roles={"input", "param"}))
    assert_close(run(x), model(x).detach(), 1e-5)


def test_a_trace_is_of_a_run_that_trains() -> None:
    made, eager = program(OPTIMIZERS["adamw"]), program(OPTIMIZERS["adamw"])
    (x, y), other = batches(2)
    run = sw.compile(made.step, x, y)
    trace = run.trace(x, y)
    assert [call.index for call in trace.calls] == list(range(len(run.plan.calls)))
    assert trace.counts["adamw"] == 1
    eager.step(x, y)
    assert_close(run(*other), eager.step(*other), 1e-5)


def test_a_program_that_does_not_call_what_it_planned_is_seen() -> None:
    model, x = network().eval(), torch.randn(8, 6)
    run = sw.compile(model, x)
    bound = run._latest.bound  # type: ignore[union-attr]
    executor = bound.executor  # type: ignore[attr-defined]
    executor.segments = (*executor.segments, *executor.segments)
    with pytest.raises(ExecError, match=r"has \d+ calls, but \d+ were made"):
        run.trace(x)


def test_contiguity_is_no_part_of_a_capture() -> None:
    model = network().eval()
    x = torch.randn(6, 8).t()
    run = sw.compile(model, torch.randn(8, 6))
    assert torch.allclose(run(x), model(x), rtol=1e-5, atol=1e-6)
    assert run.captures == 1
