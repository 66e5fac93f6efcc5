"""The batches of a run, in an order that can be taken up again anywhere.

Input: the user's data, an iterable or a function from the number of a pass to one. Output: a
stream of `Batch`es, each with its place, from any place on.

Invariant: random numbers that the data draws (the order of a shuffling DataLoader, random
crops) follow from the seed and the number of the pass alone. They come from a state of their own,
so the caller's generators are where they were, and a run that is taken up sees the same batches.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwright.engine.generator import InputRows
from shardwright.errors import InputError

Data = Iterable[Any] | Callable[[int], Iterable[Any]]
"""Batches to be gone through again in each pass, or a function of the pass that gives them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one step; batch ``number`` of the pass ``epoch``, both from 0 on."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    epoch: int
    number: int

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return list(_tensors((self.args, self.kwargs)))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)

    @property
    def size(self) -> int:
        """How many samples; 1 where the first tensor has no dimension."""
        return next((tensor.shape[0] for tensor in self.tensors if tensor.dim()), 1)

    @property
    def tokens(self) -> int | None:
        """How many tokens: the elements of the first tensor, where those are rows of integers."""
        first = next(iter(self.tensors), None)
        if first is None or first.dim() != 2 or first.dtype not in (torch.int64, torch.int32):
            return None
        return first.numel()


class Loading:
    """Goes through ``data`` for ``epochs`` passes, or without end."""

    def __init__(self, data: Data, *, seed: int, epochs: int | None = None) -> None:
        self._data = data
        self._epochs = epochs
        self._seed = seed
        self._begun: Iterator[Batch] | None = None

    def first(self) -> Batch:
        """The very first batch, which `batches` gives again. Raises InputError."""
        items = self._one_pass(0)
        batch = next(items, None)
        if batch is None:
            raise InputError(self._nothing(0))
        self._begun = itertools.chain([batch], items)
        return batch

    def other_shapes(self, first: Batch, steps: int | None) -> list[Batch]:
        """Batches of other shapes than the first that ``steps`` steps meet, where the data tells.

        Of a list all shapes are known, of a DataLoader how many rows its last batch has. Nothing is
        read: of a batch that is yet to come the first one's rows stand in.
        """
        if isinstance(self._data, list | tuple):
            batches = [as_batch(item, 0, number) for number, item in enumerate(self._data[:steps])]
            shapes = {batch.shapes: batch for batch in reversed(batches)}
            return [batch for batch in shapes.values() if batch.shapes != first.shapes]
        rows = _remainder(self._data)
        if not rows or (steps is not None and steps < len(cast(DataLoader[Any], self._data))):
            return []
        number = len(cast(DataLoader[Any], self._data)) - 1
        args, kwargs = _first_rows((first.args, first.kwargs), first.size, rows)
        return [Batch(tuple(args), kwargs, 0, number)]

    def read_rows(self, rows: Sequence[int], size: int) -> None:
        """From the next pass on read only some rows of each batch of ``size``, where that can be.

        The others are zeros.
        """
        if reads_rows(self._data):
            self._data = OwnRows(self._data, rows, size=size, seed=self._seed)
            self._begun = None

    def batches(self, epoch: int = 0, number: int = 0) -> Iterator[Batch]:
        """The batches from one place on. Raises InputError where a pass has none."""
        while self._epochs is None or epoch < self._epochs:
            found = False
            for batch in self._take_pass(epoch):
                found = True
                if batch.number >= number:
                    yield batch
            if not found:
                raise InputError(self._nothing(epoch))
            epoch, number = epoch + 1, 0

    def _take_pass(self, epoch: int) -> Iterator[Batch]:
        begun, self._begun = self._begun, None
        return begun if begun is not None and epoch == 0 else self._one_pass(epoch)

    def _one_pass(self, epoch: int) -> Iterator[Batch]:
        draws = Draws(self._seed, epoch)
        with draws.in_use():
            items = iter(self._items(epoch, draws.seed))
        for number in range(2**63):
            try:
                with draws.in_use():
                    item = next(items)
            except StopIteration:
                return
            yield as_batch(item, epoch, number)

    def _items(self, epoch: int, seed: int) -> Iterable[Any]:
        data = self._data
        if callable(data) and not isinstance(data, Iterable):
            return data(epoch)
        for part in (data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        if isinstance(generator := getattr(data, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        return data

    def _nothing(self, epoch: int) -> str:
        if epoch and isinstance(self._data, Iterator):
            return (
                f"the data was used up in {epoch} passes, since it is an iterator; give a list, a "
                "DataLoader, or a function that takes the number of the pass"
            )
        return f"the data has no batch in pass {epoch}"


def _tensors(item: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        yield from _tensors(tuple(item.values()))
    elif isinstance(item, tuple | list):
        for one in item:
            yield from _tensors(one)


def _remainder(data: Data) -> int:
    """How many rows the last batch of a DataLoader has, where those are fewer; else 0."""
    if not isinstance(data, DataLoader) or data.drop_last or not data.batch_size:
        return 0
    count = len(data.sampler) if isinstance(data.sampler, Sized) else 0
    return count % data.batch_size if count > data.batch_size else 0


def _first_rows(item: Any, size: int, rows: int) -> Any:
    """Nested tuples, lists and dicts with the first rows of the tensors that have ``size``."""
    if isinstance(item, Tensor):
        return item[:rows] if item.dim() and len(item) == size else item
    if isinstance(item, Mapping):
        return {key: _first_rows(one, size, rows) for key, one in item.items()}
    if isinstance(item, tuple | list) and not hasattr(item, "_fields"):
        return type(item)(_first_rows(one, size, rows) for one in item)
    return item


def as_batch(item: Any, epoch: int = 0, number: int = 0) -> Batch:
    """An item of the data as arguments: a dict by name, a tuple or list by position."""
    if isinstance(item, Mapping):
        return Batch((), dict(item), epoch, number)
    if isinstance(item, tuple | list):
        return Batch(tuple(item), {}, epoch, number)
    return Batch((item,), {}, epoch, number)


# --- the rows of one rank -------------------------------------------------------------------------


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


# --- random numbers -------------------------------------------------------------------------------


class Draws:
    """The states of torch's, Python's and numpy's generators that numbers lead to.

    ``seed`` is the one that they were given.
    """

    def __init__(self, *numbers: int) -> None:
        self.seed = int(np.random.SeedSequence(list(map(abs, numbers))).generate_state(1)[0])
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draw from these states in the block, and go on where an earlier block ended."""
        before = _states()
        if self._states is None:
            torch.default_generator.manual_seed(self.seed)
            random.seed(self.seed)
            np.random.seed(self.seed)
        else:
            _restore(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _restore(before)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
