"""What communication between two processes of one machine costs: `python -m benchmarks.comm`.

Two ranks of one thread, f32, by turns: torch.distributed on gloo as it is, this package's messages
over gloo, and in shared memory. The time of an operation is that of many in a row; a send is half
of there and back, where the other side sends on what it has got. GB/s is the size of the tensor
that a member gets (received, gathered or reduced), divided by the time. Beside them stands what
copying as much takes, on both cores at once.

Then what a worker pays for one: a model of many small layers split over two workers, against the
same on one worker, by the all_reduce.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.distributed import PrefixStore, Store

import shardwright as sw
from benchmarks.measure import alternate, console, print_machine
from shardwright.comm import (
    Membership,
    Operation,
    TensorSpec,
    adopt_group,
    connect,
    join_group,
    make_store,
    open_store,
)
from shardwright.launch.protocol import Mailbox

SIZES = (64, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
KINDS = ("send", "all_gather", "all_reduce")
RAW, GLOO, SHARED, COPY = "torch gloo", "ours, gloo", "ours, shared memory", "copy"
CPU = torch.device("cpu")

Perform = Callable[[Operation, Tensor | None], Tensor | None]
"""This rank's part in an operation, to its end."""


def operation(kind: str, size: int, tag: int, ranks: tuple[int, int] = (0, 1)) -> Operation:
    """An operation that gives tensors of ``size`` bytes."""
    whole = TensorSpec((size // 4,), torch.float32)
    given = TensorSpec((size // 8,), torch.float32) if kind == "all_gather" else whole
    return Operation(
        kind=kind,
        group=str(tag),
        tag=tag,
        ranks=ranks,
        tasks=("", ""),
        inputs=(given, None if kind == "send" else given),
        outputs=(None if kind == "send" else whole, whole),
        metadata={"all_reduce": {"reduce_op": "sum"}, "all_gather": {"dim": 0}}.get(kind, {}),
    )


def all_operations() -> dict[tuple[str, int], list[Operation]]:
    """By kind and size; a send has one there and one back."""
    found: dict[tuple[str, int], list[Operation]] = {}
    for kind in KINDS:
        for size in SIZES:
            tag = 2 * len(found)
            found[kind, size] = [operation(kind, size, tag)]
            if kind == "send":
                found[kind, size].append(operation(kind, size, tag + 1, (1, 0)))
    return found


def ours(store: Store, rank: int, choice: str) -> Perform:
    """A transport of this package, over gloo or as it chooses itself."""
    os.environ["SHARDWRIGHT_TRANSPORT"] = choice
    mailbox = Mailbox()
    operations = [operation for some in all_operations().values() for operation in some]
    transport = connect(
        PrefixStore(choice, store),
        rank,
        [CPU] * 2,
        operations,
        threads=1,
        notify=mailbox.notify,
        make_group=adopt_group,
    )
    calls = itertools.count()
    members = {o.tag: Membership(o, o.ranks.index(rank)) for o in operations}

    def perform(operation: Operation, tensor: Tensor | None) -> Tensor | None:
        pending = transport.start(members[operation.tag], next(calls), tensor)
        while not pending.ready():
            transport.wait(mailbox.wakeup, None)
            mailbox.drain()
        return pending.result()

    return perform


def raw(rank: int) -> Perform:
    """torch.distributed itself."""

    def perform(operation: Operation, tensor: Tensor | None) -> Tensor | None:
        result = torch.empty(operation.outputs[1].shape)
        if operation.kind == "send":
            source, target = operation.ranks
            if rank == source:
                dist.send(tensor, target)
                return None
            dist.recv(result, source)
        elif operation.kind == "all_gather":
            dist.all_gather_single(result, tensor)
        else:
            dist.all_reduce(tensor)
            return tensor
        return result

    return perform


def repeated(perform: Perform, rank: int, operations: list[Operation]) -> Callable[[], None]:
    """Operations of one kind and size, so many times that it takes a while."""
    there = operations[0]
    spec = there.inputs[0]
    given = torch.zeros(spec.shape)

    def once() -> None:
        if there.kind != "send":
            perform(there, given)
        elif rank == 0:
            perform(there, given)
            perform(operations[1], None)
        else:
            perform(operations[1], perform(there, None))

    return lambda: [once() for _ in range(repeats(there))] and None


def repeats(operation: Operation) -> int:
    size = operation.outputs[1].shape[0] * 4
    return max(3, min(300, (64 << 20) // size))


def copies(operation: Operation) -> Callable[[], None]:
    source = torch.zeros(operation.outputs[1].shape)
    target = torch.zeros_like(source)
    return lambda: [target.copy_(source) for _ in range(repeats(operation))] and None


def measure(rank: int, store: Store, rounds: int) -> Table:
    """All kinds and sizes; both ranks do the same in the same order."""
    torch.set_num_threads(1)
    join_group(store, rank, 2, ["cpu"])
    performers = {
        RAW: raw(rank),
        GLOO: ours(store, rank, "gloo"),
        SHARED: ours(store, rank, "auto"),
    }
    title = f"two ranks, one thread each; gain is {SHARED} over {RAW}"
    table = Table(title=title, title_justify="left")
    for heading in ("kind", "size", *performers, COPY, "gain"):
        table.add_column(heading, justify="right")
    for (kind, size), operations in all_operations().items():
        variants = {name: repeated(p, rank, operations) for name, p in performers.items()}
        timings = alternate({**variants, COPY: copies(operations[0])}, rounds=rounds)
        shown = []
        for name in (*performers, COPY):
            count = repeats(operations[0]) * (2 if kind == "send" and name != COPY else 1)
            shown.append(described(size, timings.median(name) / count))
        gain = 1 / timings.ratio(SHARED, RAW)
        shown_size = f"{size >> 10:,} KiB" if size >= 1 << 10 else f"{size} B"
        table.add_row(kind, shown_size, *shown, f"{gain:.1f}")
    return table


def described(size: int, seconds: float) -> str:
    """The time of small messages, the speed of large ones."""
    return f"{size / seconds / 1e9:.2f} GB/s" if size >= 64 << 10 else f"{1e6 * seconds:.1f} µs"


class Blocks(torch.nn.Module):
    """Layers that are split by columns and then by rows, with an all_reduce behind each pair."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        pairs = [(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(2 * count)]
        self.layers = torch.nn.Sequential(*(layer for pair in pairs for layer in pair))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def by_workers(rounds: int, count: int = 200, width: int = 32) -> None:
    """What an all_reduce of ``width`` f32 adds to a call."""
    model, x = Blocks(count, width).eval(), torch.ones(1, width)
    graph = sw.capture(model, (x,))
    one = sw.build(graph, sw.plan(graph, devices=1))
    two = sw.build(graph, sw.plan(graph, devices=2, policy="tensor"))
    found = sum(t.kind == "all_reduce" and not t.device_idx for t in two.supertasks.values())
    with ExitStack() as running:
        runners = {"one worker": running.enter_context(sw.Runner(one, threads=1))}
        for name, choice in ((GLOO, "gloo"), (SHARED, "auto")):
            os.environ["SHARDWRIGHT_TRANSPORT"] = choice
            runners[name] = running.enter_context(sw.Runner(two, threads=1))
        timings = alternate(
            {name: partial(runner, x) for name, runner in runners.items()}, rounds=10 * rounds
        )
    for name in (GLOO, SHARED):
        pairs = zip(timings.seconds[name], timings.seconds["one worker"], strict=True)
        each = statistics.median((split - whole) / found for split, whole in pairs)
        console.print(
            f"an all_reduce of {4 * width} bytes, to a worker: {1e6 * each:.0f} µs, {name}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the comparison")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        table = measure(options.rank, open_store(options.store), options.rounds)
        if options.rank == 0:
            print_machine()
            console.print(table)
        dist.barrier()
        os._exit(0)
    command = [sys.executable, "-m", "benchmarks.comm", "--rounds", str(options.rounds)]
    with make_store() as file:
        command += ["--store", str(file.fileno())]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], pass_fds=[file.fileno()])
            for rank in range(2)
        ]
        failed = max(process.wait() for process in ranks)
    if failed:
        sys.exit(failed)
    torch.set_num_threads(1)
    by_workers(options.rounds)


if __name__ == "__main__":
    main()
