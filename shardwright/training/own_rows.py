"""Under torchrun each rank reads, of each batch, only the rows that its slot takes.

In come a DataLoader and rows; out come batches of the whole size in which the other rows are zeros,
which nobody looks at.

What always holds: all ranks go through the same batches in the same order; what a sample draws at
random follows from the seed, the pass and its index, so ranks that read the same sample see the
same. What is no DataLoader over a dataset with indices is read whole, and cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwright.engine.generator import InputRows
from shardwright.training.draws import Draws


def rows_of(parts: Mapping[str, InputRows]) -> list[int]:
    """The rows that any input of a batch is read in, along dimension 0."""
    ranges = (span for rows in parts.values() if rows.dim == 0 for span in rows.ranges)
    return sorted({row for start, end in ranges for row in range(start, end)})


def reads_rows(data: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether parts of a batch can be read by themselves."""
    return (
        isinstance(data, DataLoader)
        and data.batch_sampler is not None
        and not isinstance(data.dataset, IterableDataset)
    )


class OwnRows:
    """A DataLoader's batches, read in the given rows only; rows beyond are zeros."""

    def __init__(self, loader: DataLoader[Any], rows: Sequence[int], *, size: int, seed: int):
        self._rows = list(rows) or [0]
        self._size = size
        self._dataset = _SeededDataset(loader.dataset, seed)
        self._sampler = _RowSampler(loader.batch_sampler, self._rows, size)
        self._loader = DataLoader(
            self._dataset,
            batch_sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
        )
        self.generator = loader.generator
        self.sampler = loader.sampler
        self.batch_sampler = loader.batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Say which pass comes."""
        self._dataset.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self._sampler.cut.clear()
        for batch in self._loader:
            yield self._whole(batch) if self._sampler.cut.popleft() else batch

    def _whole(self, part: Any) -> Any:
        """A batch of the whole size with the part's rows in their places."""
        if isinstance(part, Tensor) and part.dim() and len(part) == len(self._rows):
            whole = part.new_zeros((self._size, *part.shape[1:]))
            whole[self._rows] = part
            return whole
        if isinstance(part, dict):
            return {key: self._whole(item) for key, item in part.items()}
        if isinstance(part, tuple | list):
            return [self._whole(item) for item in part]
        return part


class _RowSampler:
    """A batch sampler that keeps some rows of each batch of the right size.

    ``cut`` says of each batch given whether that was done: others are left as they are.
    """

    def __init__(self, batches: Any, rows: Sequence[int], size: int) -> None:
        self._batches = batches
        self._rows = rows
        self._size = size
        self.cut: deque[bool] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._batches:
            indices = list(batch)
            self.cut.append(len(indices) == self._size)
            yield [indices[row] for row in self._rows] if self.cut[-1] else indices


class _SeededDataset(Dataset[Any]):
    """A dataset whose samples draw from states of their own."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self.epoch = 0

    def __getitem__(self, index: Any) -> Any:
        number = index if isinstance(index, int) else hash(index)
        with Draws(self._seed, self.epoch, number & (2**63 - 1)).in_use():
            return self._dataset[index]
