"""What a plan is predicted to take, as a value: a step's time, and each slot's work and memory."""

from __future__ import annotations

import msgspec

from shardwright.ir.tensor_meta import count_text

ITEMS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "messages")
"""What a slot's memory holds."""


class SlotMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that a slot holds at most.

    parameters
        Parameters, buffers and constants.
    gradients, optimizer
        Of trained parameters: gradients, the optimizer's state.
    activations
        What forwards keep for their backwards, of all microbatches under way.
    temporaries
        What the largest operator has in hand, what a block computes again, and what of it waits
        for gradients of weights.
    messages
        What other slots have sent and is not yet read; where slots share memory for messages, what
        this one has sent and others still hold, too; gradients that were put together.
    updated
        Of the parameters, those that this slot updates.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    messages: int
    updated: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, name) for name in ITEMS)

    def __str__(self) -> str:
        items = (f"{name} {getattr(self, name) / 1e6:.2f}" for name in ITEMS if getattr(self, name))
        return f"{self.total / 1e6:.2f} MB ({', '.join(items)})"


class SlotPrediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one slot does in a step: seconds at work and waiting, and the most bytes it holds."""

    device: str
    busy: float
    idle: float
    memory: SlotMemory


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan will take.

    step_time
        Seconds of a training step; of a model, seconds between two results where calls follow one
        another.
    latency
        Seconds from the beginning of a step or call to its end.
    microbatches
        How many batches of the captured size a step takes.
    """

    step_time: float
    latency: float
    microbatches: int
    slots: tuple[SlotPrediction, ...]

    @property
    def per_microbatch(self) -> float:
        """Seconds for each batch of the captured size: what plans are compared by."""
        return self.step_time / self.microbatches

    @property
    def peak_memory(self) -> int:
        """Bytes of the fullest slot."""
        return max(slot.memory.total for slot in self.slots)

    def summary(self) -> str:
        """The time and the fullest slot in a line."""
        return (
            f"{1e3 * self.step_time:.3f} ms a step of "
            f"{count_text(self.microbatches, 'captured batch')}, "
            f"{self.peak_memory / 1e6:.2f} MB on the fullest slot"
        )

    def __str__(self) -> str:
        lines = [f"a step takes {1e3 * self.step_time:.3f} ms"]
        lines += [
            f"{slot.device}: at work {1e3 * slot.busy:.3f} ms, waits {1e3 * slot.idle:.3f} ms, "
            f"{slot.memory}"
            for slot in self.slots
        ]
        return "\n".join(lines)
