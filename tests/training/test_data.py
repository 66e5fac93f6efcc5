import random
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shardwright.errors import InputError
from shardwright.training.data import Batch, Loading, as_batch

NUMBERS = [torch.full((2,), float(i)) for i in range(3)]


def values(batches: Iterator[Batch]) -> list[tuple[int, int, list[float]]]:
    return [(batch.epoch, batch.number, batch.args[0].tolist()) for batch in batches]


def test_a_list_is_gone_through_in_each_pass() -> None:
    found = values(Loading(NUMBERS, seed=0, epochs=2).batches())
    assert [(epoch, number) for epoch, number, _ in found] == [
        (epoch, number) for epoch in range(2) for number in range(3)
    ]
    assert len(list(islice(Loading(NUMBERS, seed=0).batches(), 10))) == 10


def test_a_function_gives_each_pass() -> None:
    loading = Loading(lambda epoch: [torch.tensor([epoch])] * (epoch + 1), seed=0, epochs=2)
    assert [batch.args[0].item() for batch in loading.batches()] == [0, 1, 1]


def test_the_first_batch_is_not_lost() -> None:
    loading = Loading(iter(NUMBERS), seed=0, epochs=1)
    assert loading.first().args[0].tolist() == [0, 0]
    assert [item[2][0] for item in values(loading.batches(0, 1))] == [1, 2]
    noisy = Loading(LOADERS["noisy"](), seed=0, epochs=2)
    noisy.first()
    assert values(noisy.batches(1)) == values(
        Loading(LOADERS["noisy"](), seed=0, epochs=2).batches(1)
    )


class Noisy(torch.utils.data.Dataset):
    """Draws from every generator that a transform may use."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


LOADERS = {
    "shuffling": lambda: DataLoader(TensorDataset(torch.arange(8.0)), 2, shuffle=True),
    "own generator": lambda: DataLoader(
        TensorDataset(torch.arange(8.0)), 2, shuffle=True, generator=torch.Generator()
    ),
    "noisy": lambda: DataLoader(Noisy(), 2, shuffle=True),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_a_run_taken_up_sees_the_same_batches(make) -> None:
    whole = values(Loading(make(), seed=3, epochs=3).batches())
    torch.rand(5)
    for start in (0, 1, 4, 5, 11):
        epoch, number, _ = whole[start]
        assert values(Loading(make(), seed=3, epochs=3).batches(epoch, number)) == whole[start:]
    first, second = whole[:4], whole[4:8]
    assert [item[2] for item in first] != [item[2] for item in second], "each pass is shuffled anew"
    assert values(Loading(make(), seed=4, epochs=3).batches()) != whole


def test_the_callers_generators_stay_where_they_were() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    list(Loading(LOADERS["noisy"](), seed=0, epochs=1).batches())
    assert torch.equal(torch.rand(2), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_samplers_are_told_the_pass() -> None:
    told = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    data = TensorDataset(torch.arange(4.0))
    list(Loading(DataLoader(data, 2, sampler=Sampler(data)), seed=0, epochs=2).batches())
    assert told == [0, 1]


def test_items_become_arguments() -> None:
    x, y = torch.ones(2, 3), torch.ones(2)
    assert as_batch((x, y)).args == as_batch([x, y]).args == (x, y)
    assert as_batch({"x": x}).kwargs == {"x": x}
    assert as_batch(x).args == (x,)
    assert as_batch({"x": x, "y": y}).shapes == ((2, 3), (2,))
    assert as_batch((torch.tensor(1.0), x)).size == 2
    assert as_batch({"pair": (x, [y])}).shapes == ((2, 3), (2,))
    assert as_batch(x).tokens is None
    assert as_batch(torch.ones(2, 3, dtype=torch.int64)).tokens == 6


def test_data_without_batches() -> None:
    with pytest.raises(InputError, match="no batch in pass 0"):
        Loading([], seed=0).first()
    with pytest.raises(InputError, match="no batch in pass 0"):
        next(Loading([], seed=0).batches())
    with pytest.raises(InputError, match="used up in 1 passes, since it is an iterator"):
        list(Loading(iter(NUMBERS), seed=0, epochs=2).batches())
