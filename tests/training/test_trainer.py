"""`train` in one process: what it computes, evaluates, writes back, and how it goes on."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LinearLR, LRScheduler, OneCycleLR

from shardwright.errors import InputError, RunError
from shardwright.runtime import TrainingRunner
from shardwright.training import TrainResult, state_dict, train
from tests.runtime.programs import Trained, gpt, perceptron, rows, tokens, trained

MESHES = [
    {"mesh": {"pipeline": 2}},
    {"mesh": {"pipeline": 2}, "microbatches": 4},
    {"mesh": {"data": 2}, "microbatches": 2},
    {"mesh": {"tensor": 2}},
    {"mesh": {"pipeline": 2, "data": 2}, "microbatches": 2, "zero": 1},
]


def quietly(program: Trained, data, **options) -> TrainResult:
    return train(program.step, data, in_process=True, quiet=True, **options)


def assert_close(found: list[float], expected: list[float], tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected)
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert worst <= tolerance, (found, expected)


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


@pytest.mark.parametrize("options", MESHES, ids=str)
def test_losses_are_those_of_a_loop(options) -> None:
    program, reference = gpt(), gpt()
    result = quietly(program, tokens(6), epochs=1, **options)
    assert_close(result.losses, reference.loop(tokens(6)))
    assert_alike(result.state_dict(), reference.model.state_dict())
    assert_alike(program.model.state_dict(), reference.model.state_dict())
    more = tokens(2, seed=1)
    assert_close(program.loop(more), reference.loop(more), 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"pipeline": 2}, "microbatches": 2},
        {"mesh": {"data": 2}, "microbatches": 2},
        {"mesh": {"data": 2}},
    ],
    ids=str,
)
def test_an_input_that_is_by_chance_as_long_as_a_microbatch_is_not_cut(options) -> None:
    def stepper() -> Callable[..., torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) * factors).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    torch.manual_seed(1)
    batches = [{"factors": torch.rand(2), "x": torch.randn(rows, 3)} for rows in (4, 4, 2)]
    step = stepper()
    expected = [step(**batch).item() for batch in batches]
    result = train(stepper(), batches, epochs=1, in_process=True, quiet=True, **options)
    assert_close(result.losses, expected)


def test_without_a_mesh_one_slot_does_it_all_bit_for_bit() -> None:
    program, reference = perceptron(), perceptron()
    assert quietly(program, rows(4), epochs=1).losses == reference.loop(rows(4))


def test_a_program_that_is_left_alone() -> None:
    program, untouched = perceptron(), perceptron()
    result = quietly(program, rows(3), epochs=1, write_back=False)
    before = untouched.model.state_dict()
    assert all(torch.equal(t, before[name]) for name, t in program.model.state_dict().items())
    assert not program.optimizer.state
    assert not torch.equal(result.state_dict()["0.weight"], before["0.weight"])


def test_dropout_is_the_same_on_every_mesh() -> None:
    expected = quietly(perceptron(0.3), rows(4), epochs=1, microbatches=2)
    found = quietly(perceptron(0.3), rows(4), epochs=1, **MESHES[4])
    assert_close(found.losses, expected.losses)
    other = quietly(perceptron(0.3), rows(1), epochs=1, microbatches=2, seed=1)
    assert other.losses[0] != pytest.approx(found.losses[0], rel=1e-4)


def test_rates_follow_a_scheduler() -> None:
    program, reference = perceptron(), perceptron()
    for item in (program, reference):
        item.scheduler = LinearLR(item.optimizer, 0.1, total_iters=4)
    found = quietly(program, rows(6), epochs=1, scheduler=program.scheduler)
    assert_close(found.losses, reference.loop(rows(6)))
    assert [report.rates["lr"] for report in found.reports][-1] == 0.01
    assert program.scheduler.state_dict() == reference.scheduler.state_dict()
    by_function = quietly(
        perceptron(), rows(6), epochs=1, scheduler=lambda step: 0.1 + 0.9 * min(step, 4) / 4
    )
    assert_close(by_function.losses, found.losses)


SCHEDULES = {
    "one cycle": lambda optimizer, **more: OneCycleLR(optimizer, 0.1, total_steps=10, **more),
    "cyclic": lambda optimizer, **more: CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, **more),
}
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
}


def scheduled(optimizer: str, schedule: str, *, inside: bool, **more) -> Trained:
    """A program with a scheduler, which the step itself steps if it is ``inside``."""
    model = perceptron().model
    found = trained(model, OPTIMIZERS[optimizer](model.parameters()))
    found.scheduler = SCHEDULES[schedule](found.optimizer, **more)
    if inside:
        update, scheduler, found.scheduler = found.step, found.scheduler, None

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = update(x, y)
            scheduler.step()
            return loss

        found.step = step
    return found


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedulers_that_would_cycle_momentum(optimizer, schedule, inside) -> None:
    """The default is refused before the first step; without it losses are those of a loop."""
    cycling = scheduled(optimizer, schedule, inside=inside)
    before = copy.deepcopy(cycling.model.state_dict())
    for options in (MESHES[1], MESHES[2]):
        with pytest.raises(InputError, match=r"moves .* with cycle_momentum=False"):
            quietly(cycling, rows(6), scheduler=cycling.scheduler, epochs=1, **options)
        program, reference = (
            scheduled(optimizer, schedule, inside=inside, cycle_momentum=False) for _ in range(2)
        )
        found = quietly(program, rows(6), scheduler=program.scheduler, epochs=1, **options)
        assert_close(found.losses, reference.loop(rows(6)))
    for name, tensor in cycling.model.state_dict().items():
        assert torch.equal(tensor, before[name])


class DecayAfter(LRScheduler):
    """Sets the weight decay to 0.5 behind a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.steps = steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch == self.steps:
            self.optimizer.param_groups[0]["weight_decay"] = 0.5
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("options", [MESHES[1], MESHES[2]], ids=str)
def test_a_weight_decay_that_changes_in_a_run(options, tmp_path: Path) -> None:
    """It is an error before the step; a run resumed with the new value trains as a loop does."""
    reference = perceptron()
    reference.scheduler = DecayAfter(reference.optimizer, 4)
    expected = reference.loop(rows(6))
    program = perceptron()
    changes = DecayAfter(program.optimizer, 4)
    kept = {"checkpoint": tmp_path, "log": tmp_path / "log.jsonl", **options}
    message = r"before step 5: 'weight_decay' .* is 0.5, .* with 0.01"
    with pytest.raises(InputError, match=message):
        quietly(program, rows(6), scheduler=changes, epochs=1, **kept)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4
    same = perceptron()
    changes = DecayAfter(same.optimizer, 4)
    with pytest.raises(InputError, match=message):
        quietly(same, rows(6), scheduler=changes, epochs=1, resume=True, **kept)
    assert (tmp_path / "step_000004").is_dir()
    assert_alike(state_dict(tmp_path), state_dict(quietly(perceptron(), rows(4), epochs=1)))
    again = perceptron()
    again.optimizer.param_groups[0]["weight_decay"] = 0.5
    resumed = quietly(
        again, rows(6), scheduler=DecayAfter(again.optimizer, 4), epochs=1, resume=True, **kept
    )
    assert_close(resumed.losses, expected[4:])
    assert_alike(resumed.state_dict(), reference.model.state_dict())


def test_a_weight_decay_that_the_data_changes() -> None:
    program = perceptron()

    def batches(epoch: int):
        for number, batch in enumerate(rows(6)):
            if number == 3:
                program.optimizer.param_groups[0]["weight_decay"] = 0.5
            yield batch

    with pytest.raises(InputError, match=r"before step [34]: 'weight_decay'"):
        quietly(program, batches, epochs=1)


@pytest.mark.parametrize("options", [{}, MESHES[3], MESHES[4]], ids=str)
def test_evaluation_is_that_of_the_trained_model(options) -> None:
    program, reference = perceptron(0.2), perceptron(0.2)
    eval_data = [*rows(2, seed=5), tuple(item[:6] for item in rows(1, seed=6)[0])]
    found = quietly(
        program,
        rows(4),
        epochs=1,
        evaluate=program.evaluate,
        eval_data=eval_data,
        eval_every=2,
        **options,
    )
    assert list(found.evaluations) == [2, 4]
    reference.model.load_state_dict(found.state_dict())
    reference.model.eval()
    with torch.no_grad():
        results = [(reference.evaluate(*batch), len(batch[0])) for batch in eval_data]
    for name, number in found.evaluations[4].items():
        expected = sum(result[name].item() * size for result, size in results) / 22
        assert number == pytest.approx(expected, rel=1e-5)
    assert program.model.training


@pytest.mark.parametrize("options", [{}, MESHES[1], MESHES[4]], ids=str)
def test_lowered_it_is_the_same_run(options) -> None:
    runs = []
    for lower in (False, True):
        program = perceptron(0.2)
        runs.append(
            quietly(
                program,
                rows(4),
                epochs=1,
                evaluate=program.evaluate,
                eval_data=rows(2, seed=5),
                lower=lower,
                **options,
            )
        )
    plain, lowered = runs
    assert {task.kind for task in lowered.pipeline.supertasks.values()}.isdisjoint({"FX"})
    assert_close(lowered.losses, plain.losses)
    assert_alike(lowered.state_dict(), plain.state_dict())
    for name, number in plain.evaluations[4].items():
        assert lowered.evaluations[4][name] == pytest.approx(number, rel=1e-4)


@pytest.mark.parametrize("options", [{}, MESHES[4]], ids=str)
def test_a_run_goes_on_bit_for_bit(options, tmp_path: Path) -> None:
    options = {**options, "epochs": 3, "log": tmp_path / "log.jsonl"}
    whole = quietly(perceptron(0.3), rows(4), **options)
    kept = {"checkpoint": tmp_path / "kept", "checkpoint_every": 2}
    first = quietly(perceptron(0.3), rows(4), **options, **kept, steps=5)
    program = perceptron(0.3)
    torch.nn.init.zeros_(program.model[0].weight)
    second = quietly(program, rows(4), **options, **kept, resume=True)
    assert first.losses + second.losses == whole.losses
    assert second.steps == 12
    assert all(map(torch.equal, second.state_dict().values(), whole.state_dict().values()))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == whole.losses
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert names == ["step_000010", "step_000012"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MESHES[1], {"mesh": {"tensor": 2}, "microbatches": 4}),
        (MESHES[4], {"microbatches": 2}),
    ],
    ids=str,
)
def test_a_run_goes_on_on_another_mesh(before, after, tmp_path: Path) -> None:
    def program() -> Trained:
        found = perceptron(0.2)
        found.scheduler = LinearLR(found.optimizer, 0.1, total_iters=8)
        return found

    def run(options, **more) -> TrainResult:
        made = program()
        return quietly(made, rows(4), scheduler=made.scheduler, **options, **more)

    whole = run(before, steps=8)
    first = run(before, steps=5, checkpoint=tmp_path)
    second = run(after, steps=8, checkpoint=tmp_path, resume=True)
    assert_close(first.losses + second.losses, whole.losses)
    assert_alike(second.state_dict(), whole.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_is_read_by_torch_and_by_state_dict(tmp_path: Path) -> None:
    program = gpt()
    program.model.unused = torch.nn.Linear(2, 2)
    result = quietly(program, tokens(2), epochs=1, checkpoint=tmp_path, **MESHES[4])
    plain = gpt().model
    plain.unused = torch.nn.Linear(2, 2)
    contents = plain.state_dict()
    dcp.load(contents, checkpoint_id=tmp_path / "step_000002")
    for found in (contents, state_dict(tmp_path), state_dict(result), program.model.state_dict()):
        assert list(found) == list(plain.state_dict())
        for name, tensor in result.state_dict().items():
            assert torch.equal(found[name], tensor), name


def test_a_run_that_is_over_stays_so(tmp_path: Path) -> None:
    first = quietly(perceptron(), rows(3), epochs=1, checkpoint=tmp_path)
    program = perceptron()
    again = quietly(program, rows(3), epochs=1, checkpoint=tmp_path, resume="auto")
    assert again.losses == []
    assert again.steps == 3
    assert all(map(torch.equal, program.model.state_dict().values(), first.model.values()))


def test_a_directory_with_checkpoints_is_not_written_over(tmp_path: Path) -> None:
    quietly(perceptron(), rows(2), epochs=1, checkpoint=tmp_path)
    with pytest.raises(RunError, match="the last of them step_000002; go on from it with resume"):
        quietly(perceptron(), rows(2), epochs=1, checkpoint=tmp_path)


def test_the_first_loss_that_is_no_number_is_said() -> None:
    data = rows(4)
    data[1][0][2, 3] = torch.nan
    with pytest.warns(RuntimeWarning, match="the loss of step 2 is nan") as caught:
        found = quietly(perceptron(), data, epochs=1)
    assert [str(warning.message)[:22] for warning in caught] == ["the loss of step 2 is "]
    assert len(found.losses) == 4


def test_a_batch_whose_rows_are_not_sure_is_not_cut() -> None:
    """Of two weights that are no rows each microbatch would get one, and broadcast it."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (layer(x) * w + v).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batch, here = (torch.randn(8, 3), torch.rand(2), torch.rand(2)), {"in_process": True}
    with pytest.raises(InputError, match="the first has 8 rows, most have 2"):
        train(step, [batch], steps=1, microbatches=2, quiet=True, **here)
    state = copy.deepcopy(layer.state_dict())
    expected = step(*batch).item()
    layer.load_state_dict(state)
    for given in ({}, {"mesh": {"data": 2}}):
        layer.load_state_dict(state)
        found = train(step, [batch], steps=1, quiet=True, **here, **given).losses
        assert found == pytest.approx([expected], rel=1e-6)


PHASES = [
    "capturing the step with a batch of [8, 16], [8]",
    "planning it in 2 microbatches",
    "capturing and planning the evaluation",
    "building the pipeline",
    "batch 1 of pass 0 has the shapes [5, 16], [5], the first one [8, 16], [8]; a program is made "
    "for it",
]


@pytest.mark.parametrize(
    "in_process", [True, pytest.param(False, marks=pytest.mark.processes)], ids=["here", "workers"]
)
def test_a_line_is_said_for_each_phase_before_the_first_step(
    in_process: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [(x[:size], y[:size]) for (x, y), size in zip(rows(2), (8, 5), strict=True)]
    for quiet in (True, False):
        program = perceptron()
        train(
            program.step,
            data,
            epochs=1,
            mesh={"pipeline": 2},
            microbatches=2,
            evaluate=program.evaluate,
            eval_data=data[:1],
            in_process=in_process,
            quiet=quiet,
        )
        said = capsys.readouterr().err.splitlines()
        if quiet:
            assert said == []
        else:
            phases = [*PHASES, *(["starting 2 workers"] * (not in_process))]
            assert said[: len(phases)] == phases
            assert said[len(phases)].startswith("step 1  epoch 0  loss")


def test_notes_of_the_plan_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    program = trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    options = {"mesh": {"pipeline": 2}, "microbatches": 2}
    result = train(program.step, rows(1), epochs=1, in_process=True, **options)
    assert result.plan.notes
    said = capsys.readouterr().err.splitlines()
    for note in result.plan.notes:
        assert f"note: {note}" in said


def test_a_result_is_a_line() -> None:
    program = perceptron()
    result = quietly(
        program,
        rows(3),
        epochs=1,
        mesh={"pipeline": 2},
        evaluate=program.evaluate,
        eval_data=rows(1),
    )
    found = repr(result)
    first, last = (f"{loss:.6g}" for loss in (result.losses[0], result.losses[-1]))
    assert found.startswith(f"TrainResult(steps=3, first_loss={first}, last_loss={last}, seconds=")
    assert found.endswith(f"evaluations=1, plan={result.plan.policy!r}, slots=2)")


def test_more_than_a_loss() -> None:
    base = perceptron()

    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = base.step(x, y)
        return {"double": 2 * loss.detach(), "loss": loss}

    found = quietly(trained(base.model, base.optimizer), rows(1), epochs=1)
    more = train(step, rows(1), epochs=1, in_process=True, quiet=True)
    assert found.reports[0].numbers.keys() == {"loss"}
    numbers = more.reports[0].numbers
    assert more.losses == [numbers["loss"]]
    assert numbers["double"] == pytest.approx(2 * numbers["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say how long"),
        ({"steps": 0}, "steps must be a number from 1 up, found 0"),
        ({"steps": 1, "resume": True}, "need checkpoint=DIRECTORY"),
        ({"steps": 1, "eval_every": 2}, "needs both evaluate= and eval_data="),
        ({"steps": 1, "eval_data": []}, "needs both evaluate= and eval_data="),
        ({"steps": 1, "microbatches": 3}, "a batch of 8 cannot be cut in 3"),
        ({"steps": 1, "trace": "."}, "trace= cannot be written to .: Is a directory"),
    ],
    ids=["endless", "nothing", "nowhere", "no evaluation", "half of one", "uneven", "a directory"],
)
def test_what_contradicts_itself(options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quietly(perceptron(), rows(2), **options)


def test_restarts_are_torchruns_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="give --max-restarts to torchrun"):
        train(perceptron().step, rows(2), steps=1, restarts=1, checkpoint=tmp_path)


def test_a_session_gives_its_models_tensors() -> None:
    program = perceptron()
    result = quietly(program, rows(1), epochs=1, write_back=False)
    with TrainingRunner(result.pipeline, in_process=True) as session:
        found = state_dict(session)
    assert found.keys() == program.model.state_dict().keys()
    assert all(torch.equal(found[k], t) for k, t in program.model.state_dict().items())


def test_data_that_cannot_be_read_again(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="restarts= reads the data again"):
        quietly(perceptron(), iter(rows(2)), steps=1, restarts=1, checkpoint=tmp_path)
