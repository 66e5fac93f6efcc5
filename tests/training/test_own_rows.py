import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from shardwright.engine.generator import InputRows
from shardwright.training.data import Loading, OwnRows, reads_rows, rows_of

ROWS = [1, 2, 5]


def loader(dataset: Dataset | None = None, **options: object) -> DataLoader:
    dataset = dataset or TensorDataset(torch.arange(20.0).view(20, 1), torch.arange(20))
    return DataLoader(dataset, 6, shuffle=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_are_those_of_the_whole_batches(workers: int) -> None:
    whole = list(Loading(loader(), seed=1, epochs=2).batches())
    loading = Loading(loader(num_workers=workers), seed=1, epochs=2)
    loading.first()
    loading.read_rows(ROWS, 6)
    parts = list(loading.batches())
    assert [batch.shapes for batch in parts] == [batch.shapes for batch in whole]
    others = [0, 3, 4]
    for one, other in zip(parts, whole, strict=True):
        for part, tensor in zip(one.args, other.args, strict=True):
            if len(tensor) == 6:
                assert torch.equal(part[ROWS], tensor[ROWS])
                assert not part[others].any()
            else:
                assert torch.equal(part, tensor), "a short batch is left as it is"


class Noisy(Dataset):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"x": torch.rand(2) + index, "y": torch.tensor(random.random())}


def test_ranks_that_read_a_sample_see_the_same_draws() -> None:
    found = []
    for rows in (ROWS, list(range(6))):
        dataset = Noisy()
        part = OwnRows(loader(dataset), rows, size=6, seed=1)
        found.append([batch.kwargs for batch in Loading(part, seed=1, epochs=2).batches()])
        assert len(dataset.read) == 4 * len(rows), "nothing else is read"
    for one, other in zip(*found, strict=True):
        assert torch.equal(one["x"][ROWS], other["x"][ROWS])
        assert torch.equal(one["y"][ROWS], other["y"][ROWS])
    first, second = found[1][0], found[1][2]
    assert sorted(first["y"].tolist()) != sorted(second["y"].tolist()), "each pass draws anew"


def test_what_can_be_read_in_rows() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(2)])

    assert reads_rows(loader())
    assert not reads_rows(DataLoader(Stream(), 2))
    assert not reads_rows([torch.ones(2)])


def test_rows_of_all_inputs_together() -> None:
    parts = {
        "x": InputRows(0, ((0, 2), (4, 6))),
        "y": InputRows(0, ((1, 3),)),
        "z": InputRows(1, ((0, 9),)),
    }
    assert rows_of(parts) == [0, 1, 2, 4, 5]
