"""A training step for every model of the zoo: the same program on one device and on many.

Comes in: the name of a model. Goes out: the model, its step function over AdamW, and batches of any
number of microbatches with labels, the same for the same seed. All twenty-five have a loss. Dropout
is off, so that a run can be held against eager; batch norm is in training.

`accumulated` is the reference: eager, microbatch by microbatch. A mean over labels that may be
ignored weighs each microbatch by the labels that count in it, so that the step is that of the mean
over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.models import BY_NAME, LAYERS, VOCABULARY, Inputs

IGNORED = -100
"""The label that no loss counts."""
LEARNING_RATE = 1e-3

Batch = dict[str, Tensor | bool]


@dataclass(frozen=True)
class Labels:
    """How a kind of model is given what it shall learn.

    ``add`` makes a batch of a model's inputs; the loss counts the labels from the column ``first``
    on that are not to be ignored.
    """

    add: Callable[[Inputs], Batch]
    first: int = 0

    def count(self, batch: Batch) -> int:
        """How many labels of a batch the loss is the mean over; 1 where there are none."""
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            return 1
        return int((labels[..., self.first :] != IGNORED).sum())


def next_tokens(inputs: Inputs) -> Batch:
    """The tokens themselves, which the model shifts by one; some do not count."""
    labels = inputs["input_ids"].clone()
    labels[torch.rand(labels.shape) < 0.2] = IGNORED
    return {**inputs, "labels": labels}


def hidden_tokens(inputs: Inputs) -> Batch:
    """Tokens to guess at a few places."""
    labels = inputs["input_ids"].clone()
    labels[torch.rand(labels.shape) < 0.7] = IGNORED
    return {**inputs, "labels": labels}


def decoder_tokens(inputs: Inputs) -> Batch:
    """What the decoder shall say, in place of its inputs, which the model makes of it."""
    rest = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    shape = inputs["decoder_input_ids"].shape
    labels = torch.randint(5, VOCABULARY, shape)
    labels[torch.rand(shape) < 0.2] = IGNORED
    return {**rest, "labels": labels}


def image_class(inputs: Inputs) -> Batch:
    """One of two classes."""
    return {**inputs, "labels": torch.randint(2, inputs["pixel_values"].shape[:1])}


def pairs(inputs: Inputs) -> Batch:
    """Each image belongs to the caption at its place."""
    return {**inputs, "return_loss": True}


CAUSAL = Labels(next_tokens, first=1)
MASKED = Labels(hidden_tokens)
TRANSLATED = Labels(decoder_tokens)
CLASSIFIED = Labels(image_class)
PAIRED = Labels(pairs)

KINDS = {
    "ForCausalLM": CAUSAL,
    "LMHeadModel": CAUSAL,
    "ForMaskedLM": MASKED,
    "ForConditionalGeneration": TRANSLATED,
    "ForImageClassification": CLASSIFIED,
    "CLIPModel": PAIRED,
}
"""By the end of the model's class."""


@dataclass(frozen=True)
class Trained:
    """A model that trains: ``step(**batch)`` is a step of one device."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    labels: Labels
    dtype: torch.dtype

    def step(self, **batch: Tensor | bool) -> Tensor:
        """Forward, backward and update; the loss."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def microbatches(self, count: int, seed: int = 0) -> list[Batch]:
        """Microbatches of five samples, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return [self._microbatch() for _ in range(count)]

    def _microbatch(self) -> Batch:
        inputs = BY_NAME[self.name].inputs()
        return {
            key: value.to(self.dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for key, value in self.labels.add(inputs).items()
        }

    def accumulated(self, microbatches: list[Batch]) -> Tensor:
        """The step of all microbatches in eager; the loss."""
        self.optimizer.zero_grad()
        counts = [self.labels.count(batch) for batch in microbatches]
        total = torch.zeros((), dtype=self.dtype)
        for batch, count in zip(microbatches, counts, strict=True):
            loss = self.model(**batch).loss * (count / sum(counts))
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return total


def trained(name: str, dtype: torch.dtype = torch.float32, *, layers: int = LAYERS) -> Trained:
    """A model of the zoo, ready to train, without dropout; the same every time."""
    model, _, _ = BY_NAME[name].make(dropout=False, layers=layers)
    model = model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    end = next(kind for kind in KINDS if BY_NAME[name].model_class.endswith(kind))
    if KINDS[end] is CAUSAL and dtype == torch.float64:
        model.loss_function = next_token_loss
    return Trained(name, model, optimizer, KINDS[end], dtype)


def next_token_loss(logits: Tensor, labels: Tensor, *_: object, **__: object) -> Tensor:
    """The loss of transformers for causal models, which casts to float32 whatever it is given."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def joined(microbatches: list[Batch]) -> Batch:
    """The batch that is cut in these microbatches."""
    first = microbatches[0]
    return {
        key: torch.cat([batch[key] for batch in microbatches])
        if isinstance(value, Tensor)
        else value
        for key, value in first.items()
    }
