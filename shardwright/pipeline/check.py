"""check: a pipeline is right, or one PipelineError says where and why it is not.

It reads only the document: no weights, no devices. Operators run on tensors without contents, those
of each distinct graph once (`proof`). The rules are listed in `rules.RULES`; later ones may rely on
earlier ones, so `CHECKS` is in order. Time is linear in the size of the file.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwright.pipeline import (
    check_graphs,
    check_groups,
    check_metadata,
    check_phases,
    check_schedule,
    check_structure,
    check_tensors,
)
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.schema import Document
from shardwright.pipeline.serialize import reread

CHECKS: tuple[Callable[[Connections], None], ...] = (
    check_structure.check_version,
    check_structure.check_names,
    check_structure.check_tasks,
    check_structure.check_devices,
    check_structure.check_ends,
    check_tensors.check_tensor_sets,
    check_tensors.check_kinds,
    check_tensors.check_outputs,
    check_tensors.check_sizes,
    check_tensors.check_constants,
    check_tensors.check_parts,
    check_tensors.check_states,
    check_tensors.check_replaces,
    check_phases.check_phases,
    check_metadata.check_slices,
    check_phases.check_microbatches,
    check_metadata.check_originals,
    check_metadata.check_structure,
    check_tensors.check_locality,
    check_groups.check_groups,
    check_tensors.check_landing,
    check_structure.check_order,
    check_structure.check_deadlock,
    check_graphs.check_blobs,
    check_graphs.check_graphs,
    check_schedule.check_schedule,
)


def check(pipeline: Document) -> None:
    """Raise PipelineError at the first rule of the format that ``pipeline`` breaks.

    The error's ``rule`` is a key of `rules.RULES`; ``task`` and ``tensor`` say where, where the
    rule is about one.
    """
    check_rules(reread(pipeline))


def check_rules(document: Document) -> None:
    """`check` for a document whose types are known to be right, as one just read."""
    index = connect(document)
    for rule in CHECKS:
        rule(index)
