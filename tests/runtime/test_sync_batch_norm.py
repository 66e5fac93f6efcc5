"""Batch norm where a batch is split over data shards."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardwright.training import TrainResult, train
from tests.training.test_trainer import assert_close

MESHES = [{"data": 2}, {"data": 4}, {"pipeline": 2, "data": 2}, {"data": 2, "tensor": 2}]
SIZES = (8, 8, 5, 8)


def images(norm: Callable[[int], nn.Module]) -> nn.Module:
    layers = [nn.Conv2d(3, 6, 3), norm(6), nn.ReLU(), nn.Conv2d(6, 4, 3), norm(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 4))


def rows(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(48, 8), norm(8), nn.Tanh(), nn.Linear(8, 4), norm(4))


def without_weights(width: int) -> nn.Module:
    return nn.SyncBatchNorm(width, affine=False, momentum=0.3)


CASES = {
    "images": (images, nn.BatchNorm2d, nn.SyncBatchNorm),
    "rows": (rows, nn.BatchNorm1d, nn.SyncBatchNorm),
    "without weights": (
        rows,
        lambda width: nn.BatchNorm1d(width, affine=False, momentum=0.3),
        without_weights,
    ),
}


def batches(flat: bool) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    found = [torch.randn(size, 3, 6, 6, generator=draws) for size in SIZES]
    return [x[..., :4].flatten(1)[:, :48] for x in found] if flat else found


def stepping(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x.flatten(1)[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def run(model: nn.Module, data: list[torch.Tensor], mesh: dict[str, int]) -> TrainResult:
    return train(stepping(model), data, mesh=mesh, epochs=1, in_process=True, quiet=True)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_synchronized_it_is_that_of_the_whole_batch(name: str, mesh: dict[str, int]) -> None:
    make, plain, synchronized = CASES[name]
    data = batches(make is rows)
    torch.manual_seed(0)
    reference = make(plain)
    torch.manual_seed(0)
    model = make(synchronized)
    loop = stepping(reference)
    assert_close(run(model, data, mesh).losses, [loop(x).item() for x in data])
    for (key, found), expected in zip(
        model.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-5), key


def test_else_each_shard_has_its_own_and_the_plan_says_so() -> None:
    torch.manual_seed(0)
    model, synchronized = rows(nn.BatchNorm1d), rows(nn.SyncBatchNorm)
    data = batches(flat=True)[:1]
    result = run(model, data, {"data": 2})
    assert any("statistics of each data shard's rows" in note for note in result.plan.notes)
    notes = run(synchronized, data, {"data": 2}).plan.notes
    assert not any("data shard" in note for note in notes)
