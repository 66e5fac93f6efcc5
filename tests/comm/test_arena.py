from __future__ import annotations

import errno
import os

import pytest
import torch
from hypothesis import given as draw
from hypothesis import settings
from hypothesis import strategies as st

from shardwright.comm.arena import Arena, Block, Window
from shardwright.comm.transport import TensorSpec
from shardwright.errors import RunError

SPEC = TensorSpec((4, 8), torch.float32)


@pytest.fixture
def arena():
    found = Arena(3)
    yield found
    found.close()


def test_others_see_what_the_owner_writes(arena: Arena) -> None:
    window = Window(arena.descriptor)
    block = arena.lend(SPEC.nbytes, [1])
    tensor = torch.arange(32.0).view(4, 8)
    block.write(tensor, SPEC)
    found = window.hold(block.offset, SPEC, 1)
    assert torch.equal(found, tensor)
    assert found.data_ptr() % 64 == 0
    found[0] = -1
    assert (arena.window.hold(block.offset, SPEC, 0)[0] == -1).all()


def test_a_block_is_free_when_all_have_let_go(arena: Arena) -> None:
    block = arena.lend(SPEC.nbytes, [0, 2])
    assert not block.is_free()
    first, second = (arena.window.hold(block.offset, SPEC, rank) for rank in (0, 2))
    view = first[1:].t()
    del first, second
    assert not block.is_free()
    assert arena.lend(SPEC.nbytes, [1]) is not block
    del view
    assert block.is_free()
    assert arena.lend(SPEC.nbytes, [1]) is block


def test_a_row_of_a_tensor_holds_it_after_operators(arena: Arena) -> None:
    """What counts is the memory, not the Python object."""
    block = arena.lend(SPEC.nbytes, [1])
    rows = torch.unbind(torch.ops.aten.view.default(window_tensor(arena, block), [8, 4]))
    kept = rows[3]
    del rows
    assert not block.is_free()
    del kept
    assert block.is_free()


def window_tensor(arena: Arena, block: Block) -> torch.Tensor:
    return arena.window.hold(block.offset, SPEC, 1)


@draw(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_blocks_do_not_touch(sizes) -> None:
    arena = Arena(2)
    specs = [TensorSpec((size,), torch.uint8) for size in sizes]
    blocks = [arena.lend(size, [1]) for size in sizes]
    for value, (block, spec) in enumerate(zip(blocks, specs, strict=True)):
        block.write(torch.full(spec.shape, value, dtype=torch.uint8), spec)
    for value, (block, spec) in enumerate(zip(blocks, specs, strict=True)):
        assert not block.is_free()
        assert (arena.window.hold(block.offset, spec, 1) == value).all()
        assert block.is_free()
    arena.close()


def test_about_the_same_size_is_the_same_memory(arena: Arena) -> None:
    block = arena.lend(1_000_000, [])
    assert arena.lend(1_005_000, []) is block
    assert arena.lend(2_000_000, []) is not block


def test_no_memory_is_one_clear_error(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(RunError, match=r"no 1,\d\d\d MiB .*No space.* SHARDWRIGHT_TRANSPORT=gloo"):
        arena.lend(1 << 30, [1])
    monkeypatch.undo()
    assert arena.lend(1 << 10, [1])


def test_more_than_the_machine_has_is_refused(arena: Arena) -> None:
    with pytest.raises(RunError, match="for them in all"):
        arena.lend(1 << 50, [1])


def test_no_addresses_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(RunError, match="File too large"):
        Arena(2)


# --- how much memory it takes -----------------------------------------------------------------


def taken(arena: Arena) -> int:
    """Bytes of memory that the system keeps for the file."""
    return os.fstat(arena.descriptor).st_blocks * 512


def let_go(block: Block) -> None:
    block._header[:] = block._free


def test_blocks_of_any_sizes_one_after_another_take_the_memory_of_the_largest() -> None:
    arena = Arena(2)
    for megabytes in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 7, 60, 1):
        let_go(arena.lend(megabytes << 20, [0]))
    assert 89 << 20 <= taken(arena) < 90 << 20
    arena.close()


def test_what_cannot_be_used_between_blocks_is_given_back() -> None:
    arena = Arena(2)
    blocks = [arena.lend(2 << 20, [0]) for _ in range(20)]
    kept = blocks[::2]
    for block in blocks[1::2]:
        let_go(block)
    assert taken(arena) > 40 << 20
    large = [arena.lend(3 << 20, [0]) for _ in range(6)]
    assert taken(arena) < 39 << 20, "20 MiB are kept, 18 were lent"
    filled = [arena.lend(2 << 20, [0]) for _ in range(10)]
    assert taken(arena) < 60 << 20
    for value, block in enumerate((*kept, *large, *filled)):
        block.write(torch.full((1 << 20,), value, dtype=torch.uint8), BYTES)
    for value, block in enumerate((*kept, *large, *filled)):
        assert (arena.window.hold(block.offset, BYTES, 0) == value).all()
    arena.close()


BYTES = TensorSpec((1 << 20,), torch.uint8)


@settings(deadline=None, max_examples=60)
@draw(
    st.lists(
        st.tuples(st.integers(1, 3 << 20), st.integers(0, 7), st.sets(st.integers(0, 2))),
        min_size=1,
        max_size=60,
    )
)
def test_no_block_is_lent_twice_or_written_over(steps) -> None:
    """Blocks are lent and let go in any order, by any of the ranks."""
    arena = Arena(3)
    held: list[tuple[Block, list[torch.Tensor], int]] = []
    busiest = 0
    for value, (size, gone, ranks) in enumerate(steps):
        spec = TensorSpec((size,), torch.uint8)
        block = arena.lend(size, ranks)
        block.write(torch.full(spec.shape, value, dtype=torch.uint8), spec)
        shown = [arena.window.hold(block.offset, spec, rank) for rank in ranks]
        held.append((block, shown, value))
        lent = [b.end - b.start for b, tensors, _ in held if tensors or b is block]
        busiest = max(busiest, sum(lent))
        if gone < len(held):
            held.pop(gone)
        assert all((t == expected).all() for _, tensors, expected in held for t in tensors)
        ends = [0, *(b.end for b in arena._blocks)]
        assert [b.start for b in arena._blocks] == ends[:-1]
        assert ends[-1] == arena._end
    del shown
    held.clear()
    assert all(block.is_free() for block in arena._blocks)
    assert arena._end <= 4 * busiest + (1 << 20)
    arena.close()
