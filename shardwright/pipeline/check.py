"""check: a pipeline is right, or one PipelineError says where and why it is not.

It reads only the document: no weights, no devices. Operators run on tensors without contents, those
of each distinct graph once (`proof`). The rules are listed in `rules.RULES`; later ones may rely on
earlier ones, so `CHECKS` is in order; last comes that of the schedule.
Time is linear in the size of the file.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwright.pipeline.check_compute import check_blobs, check_graphs
from shardwright.pipeline.check_groups import check_groups, check_landing
from shardwright.pipeline.check_metadata import (
    check_originals,
    check_slices,
    check_structure,
    check_training,
)
from shardwright.pipeline.check_order import check_deadlock, check_order
from shardwright.pipeline.check_phases import check_microbatches, check_phases
from shardwright.pipeline.check_schedule import check_schedule
from shardwright.pipeline.check_tasks import (
    check_devices,
    check_ends,
    check_names,
    check_tasks,
    check_version,
)
from shardwright.pipeline.check_tensors import (
    check_constants,
    check_kinds,
    check_locality,
    check_outputs,
    check_parts,
    check_sizes,
    check_states,
    check_tensor_sets,
)
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.schema import Document
from shardwright.pipeline.serialize import reread

CHECKS: tuple[Callable[[Document, Connections], None], ...] = (
    check_version,
    check_names,
    check_tasks,
    check_devices,
    check_ends,
    check_tensor_sets,
    check_kinds,
    check_outputs,
    check_sizes,
    check_constants,
    check_parts,
    check_states,
    check_training,
    check_phases,
    check_slices,
    check_microbatches,
    check_originals,
    check_structure,
    check_locality,
    check_groups,
    check_landing,
    check_order,
    check_deadlock,
    check_blobs,
    check_graphs,
    check_schedule,
)


def check(pipeline: Document) -> None:
    """Raise PipelineError at the first rule of the format that ``pipeline`` breaks.

    The error's ``rule`` is a key of `rules.RULES`; ``task`` and ``tensor`` say where, where the
    rule is about one.
    """
    check_rules(reread(pipeline))


def check_rules(document: Document) -> None:
    """`check` for a document whose types are known to be right, as one just read."""
    connections = connect(document)
    for rule in CHECKS:
        rule(document, connections)
