"""Which of a training step's tensors there are once a microbatch, and where their slices lie.

In comes a checked document; out comes a `Microbatching`. A document without training is one
microbatch of which nothing is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.engine.agenda import is_training
from shardwright.engine.replacement import runs_once
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.schema import Document


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a batch is cut.

    ``inputs`` and ``outputs`` are the pipeline's tensors of which there is one a microbatch, each
    with the dimension along which that of microbatch i lies further on; an output of a single
    microbatch may have none.
    """

    n: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int | None]

    @classmethod
    def of(cls, document: Document, connections: Connections | None = None) -> Microbatching:
        """How a document says it."""
        if not is_training(document):
            return cls(1, {}, {})
        assert document.training is not None
        assert document.training.microbatches is not None
        dims, slices = document.training.microbatches.dim, document.metadata.tensor_slices
        connections = connections or connect(document)
        inputs = {
            name: dims[piece.origin]
            for name, piece in slices.inputs.items()
            if piece.origin in dims
            and not all(runs_once(document, user) for user in connections.users.get(name, ()))
        }
        outputs = {
            name: dims.get(piece.origin)
            for name, piece in slices.outputs.items()
            if not runs_once(document, connections.producers[name][0])
        }
        return cls(document.training.microbatches.n, inputs, outputs)
