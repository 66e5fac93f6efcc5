"""Batches of other shapes than the first one: trained on, with the losses of an ordinary loop."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from shardwright.errors import InputError, PlanError
from shardwright.training import TrainResult, train
from tests.runtime.programs import Trained, gpt, perceptron, rows, tokens
from tests.training.test_trainer import assert_alike, assert_close

MESHES = [
    {},
    {"mesh": {"pipeline": 2}, "microbatches": 4},
    {"mesh": {"pipeline": 2}, "microbatches": 8},
    {"mesh": {"data": 2}, "microbatches": 2},
    {"mesh": {"tensor": 2}},
    {"mesh": {"pipeline": 2, "data": 2}, "microbatches": 2, "zero": 1},
    {"mesh": {"pipeline": 2}, "microbatches": 4, "schedule": "zb-v"},
    {"mesh": {"pipeline": 2}, "microbatches": 2, "lower": True},
]
SIZES = (8, 5, 8, 6)


def quietly(program: Trained, data, **options) -> TrainResult:
    return train(program.step, data, in_process=True, quiet=True, **options)


def cut(batches, sizes=SIZES):
    return [
        tuple(tensor[:size] for tensor in batch) for batch, size in zip(batches, sizes, strict=True)
    ]


def some_ignored(batches):
    """Labels that do not count, not as many in each row."""
    found = [(x, y.clone()) for x, y in batches]
    for _, y in found:
        y[1, 2:], y[2, 4:] = -100, -100
    return found


@pytest.mark.parametrize(
    ("make", "options"), [*zip((perceptron, gpt) * 4, MESHES, strict=True)], ids=map(str, MESHES)
)
def test_losses_are_those_of_a_loop(make, options) -> None:
    program, reference = make(), make()
    data = cut(some_ignored(tokens(4)) if make is gpt else rows(4))
    found = quietly(program, data, epochs=1, **options)
    assert_close(found.losses, reference.loop(data))
    assert_alike(program.model.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize("options", [MESHES[3], MESHES[4]], ids=str)
def test_means_over_all_elements(options) -> None:
    """Shards of unlike size have unlike weights."""

    def program() -> tuple:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x) + model(x).abs().mean()
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    data = [torch.randn(size, 4) for size in SIZES]
    (model, step), (reference, loop) = program(), program()
    found = train(step, data, epochs=2, in_process=True, quiet=True, **options)
    assert_close(found.losses, [loop(x).item() for x in data * 2])
    assert_alike(model.state_dict(), reference.state_dict())


def test_other_lengths_are_other_programs() -> None:
    program, reference = gpt(), gpt()
    lengths = zip(tokens(3), (6, 4, 6), strict=True)
    data = [tuple(tensor[:, :length] for tensor in batch) for batch, length in lengths]
    found = quietly(program, data, epochs=1, **MESHES[1])
    assert_close(found.losses, reference.loop(data))


def test_buffers_are_the_same_in_all_programs() -> None:
    def program() -> tuple:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    data = [torch.randn(size, 4) for size in SIZES]
    (model, step), (reference, loop) = program(), program()
    found = train(step, data, epochs=1, mesh={"pipeline": 2}, in_process=True, quiet=True)
    assert_close(found.losses, [loop(x).item() for x in data])
    assert_alike(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("options", [MESHES[1], MESHES[5]], ids=str)
def test_a_run_goes_on_between_short_batches(options, tmp_path: Path) -> None:
    data, kept = cut(rows(4)), {"checkpoint": tmp_path}
    whole = quietly(perceptron(0.3), data, epochs=2, **options)
    program = perceptron(0.3)
    found = [
        loss
        for steps, resume in ((2, False), (5, True), (8, True))
        for loss in quietly(
            program,
            data,
            epochs=2,
            steps=steps,
            resume=resume,
            evaluate=program.evaluate,
            eval_data=cut(rows(2), (8, 3)),
            **kept,
            **options,
        ).losses
    ]
    assert found == whole.losses


def loader(count: int = 21, **options) -> DataLoader:
    torch.manual_seed(0)
    x = torch.randn(count, 16)
    data = TensorDataset(x, x[:, :4].argmax(-1))
    return DataLoader(data, batch_size=8, **options)


def test_a_short_last_batch_of_a_loader_is_trained_on_unless_it_is_dropped() -> None:
    program, reference = perceptron(), perceptron()
    found = quietly(program, loader(), epochs=2, **MESHES[3])
    assert_close(found.losses, reference.loop([*loader(), *loader()]))
    dropped = quietly(perceptron(), loader(), epochs=2, drop_last=True, **MESHES[3])
    full = [*loader(drop_last=True)]
    assert_close(dropped.losses, perceptron().loop(full * 2))


@pytest.mark.parametrize(
    ("rows", "count", "said"),
    [
        (7, 4, None),
        (61, 4, None),
        (67, 4, "batches of 67 rows come in 1 of 67, where others have 17: .* about 3.9 times"),
        (66, 4, None),
    ],
)
def test_a_prime_number_of_rows_takes_no_more_memory_without_a_word(
    rows: int, count: int, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes in microbatches of one row, unless these were too many."""
    program, reference = perceptron(), perceptron()
    torch.manual_seed(1)
    sizes = (68 if rows > 60 else 8, rows)
    data = [(torch.randn(size, 16), torch.randint(4, (size,))) for size in sizes]
    found = train(program.step, data, epochs=1, microbatches=count, in_process=True)
    assert_close(found.losses, reference.loop(data))
    shown = " ".join(capsys.readouterr().err.split())
    assert bool(re.search("times the memory", shown)) == (said is not None)
    assert said is None or re.search(said, shown)


@pytest.mark.parametrize("options", [MESHES[3], MESHES[5], {"mesh": {"data": 4}}], ids=str)
def test_a_batch_of_fewer_rows_than_slots(options) -> None:
    program, reference = perceptron(), perceptron()
    data = cut(rows(4), (8, 1, 3, 8))
    assert_close(quietly(program, data, epochs=1, **options).losses, reference.loop(data))


def test_an_evaluation_that_cannot_be_split_is_refused_before_training(tmp_path: Path) -> None:
    program, log = perceptron(), tmp_path / "log.jsonl"
    evaluation = {"evaluate": program.evaluate, "eval_data": loader(9)}
    with pytest.raises(PlanError, match=r"give batches of 2|nothing to do"):
        quietly(program, rows(2), epochs=1, log=log, **evaluation, **MESHES[3])
    assert not log.exists(), "no step was done"


@pytest.mark.parametrize("data", [loader(17), cut(rows(3), (8, 8, 1))], ids=["loader", "list"])
def test_a_batch_that_cannot_be_trained_on_is_refused_before_training(data, tmp_path) -> None:
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).view(8, 4), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    log = tmp_path / "log.jsonl"
    options = {"mesh": {"data": 2}, "in_process": True, "quiet": True}
    with pytest.raises(InputError, match=r"\[1, 16\], \[1\], the first one \[8, 16\].*drop_last"):
        train(step, data, epochs=1, log=log, **options)
    assert not log.exists(), "no step was done"
    assert len(train(step, data, epochs=1, drop_last=True, **options).losses) == 2
    assert len(train(step, data, steps=2, **options).losses) == 2


def test_what_is_only_called_alike_is_not_shared() -> None:
    """Constants that code makes, and modules that two functions reach by other names."""
    torch.manual_seed(0)
    trained, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*trained.parameters(), *other.parameters()], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (trained(x) * torch.tensor([0.5] * 8) - other(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return (trained(x) * torch.tensor([2.0] * 8)).square().mean()

    data = [torch.randn(4, 8), torch.randn(3, 8)]
    found = train(
        step,
        data,
        mesh={"data": 2},
        epochs=1,
        evaluate=evaluate,
        eval_data=data[:1],
        in_process=True,
        quiet=True,
    )
    assert found.evaluations[2]["evaluate"] == pytest.approx(evaluate(data[0]).item(), rel=1e-5)


@pytest.mark.processes
def test_processes_share_the_state_too() -> None:
    data = cut(rows(4))
    expected = quietly(perceptron(0.3), data, epochs=1, **MESHES[1])
    program = perceptron(0.3)
    found = train(program.step, data, epochs=1, quiet=True, **MESHES[1])
    assert found.losses == expected.losses
    assert all(map(torch.equal, found.state_dict().values(), expected.state_dict().values()))
