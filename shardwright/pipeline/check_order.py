"""Rules of order: every device can run its supertasks as they stand, and none waits for ever.

The proof runs the file: each device goes through its supertasks in file order, computation passes,
and communication passes when every member of its group stands at it (as if all communication
blocked). What cannot move then is a deadlock.
"""

from __future__ import annotations

from collections import Counter, deque
from graphlib import CycleError, TopologicalSorter

from shardwright.errors import PipelineError
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import Document


def check_order(document: Document, connections: Connections) -> None:
    """Each device finds the inputs of a supertask made by earlier ones of its own."""
    position = {name: i for i, name in enumerate(document.supertasks)}
    for tasks in connections.order.values():
        for name in tasks:
            for tensor in document.supertasks[name].inputs:
                producer = _producer(document, connections, tensor)
                if producer is not None and position[producer] >= position[name]:
                    raise _cycle(document, connections) or broken(
                        "file-order",
                        f"supertask {producer!r}, which makes the tensor, stands later in the "
                        "file; put it before",
                        task=name,
                        tensor=tensor,
                    )


def _producer(document: Document, connections: Connections, tensor: str) -> str | None:
    """The supertask of a device that makes the tensor; None for constants and pipeline inputs."""
    producers = connections.producers.get(tensor)
    if producers is None or document.supertasks[producers[0]].device is None:
        return None
    return producers[0]


def _cycle(document: Document, connections: Connections) -> PipelineError | None:
    """The error for a cycle through tensors and groups, where there is one."""
    waits: TopologicalSorter[str] = TopologicalSorter()
    for name, task in document.supertasks.items():
        for tensor in task.inputs:
            producer = _producer(document, connections, tensor)
            if producer is not None:
                waits.add(_step(document, name), _step(document, producer))
    try:
        waits.prepare()
    except CycleError as error:
        steps = error.args[1]
        first = next(name for name in document.supertasks if _step(document, name) in steps)
        return broken("no-cycle", f"{' waits for '.join(reversed(steps))}; break it", task=first)
    return None


def _step(document: Document, task: str) -> str:
    """What runs as one: a supertask, or a whole group."""
    group = document.supertasks[task].group
    return f"supertask {task!r}" if group is None else f"group {group!r}"


def check_deadlock(document: Document, connections: Connections) -> None:
    """All supertasks run, each device in file order, with every communication blocking."""
    stuck = standing_still(document, connections)
    if not stuck:
        return
    if (cycle := _cycle(document, connections)) is not None:
        raise cycle
    fronts = ", ".join(
        f"{device!r} at {task!r} (group {document.supertasks[task].group!r})"
        for device, task in stuck.items()
    )
    task = next(iter(stuck.values()))
    raise broken(
        "no-deadlock",
        f"devices wait for one another: {fronts}; put the communications of these devices in "
        "one order",
        task=task,
        tensor=next(iter((*document.supertasks[task].inputs, *document.supertasks[task].outputs))),
    )


def standing_still(document: Document, connections: Connections) -> dict[str, str]:
    """Run the file; gives the supertask at which each device stands still, if any does."""
    queues = {
        device: deque(name for name in tasks if document.supertasks[name].group is not None)
        for device, tasks in connections.order.items()
    }
    arrived: Counter[str] = Counter()
    ready = list(queues)
    while ready:
        queue = queues[ready.pop()]
        group = document.supertasks[queue[0]].group if queue else None
        if group is None:
            continue
        arrived[group] += 1
        members = connections.groups[group]
        if arrived[group] == len(members):
            devices = [document.supertasks[name].device or "" for name in members]
            for device in devices:
                queues[device].popleft()
            ready += devices
    return {device: queue[0] for device, queue in queues.items() if queue}
