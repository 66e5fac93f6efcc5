"""What is trained: ordinary programs for one device, and their data.

Comes in: a name and a number of steps. Goes out: a `Program` whose model, batches and their order
are the same every time. Digits are those of scikit-learn, 8 by 8 pixels; the text is that of
Python's own help on its language, read character by character.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data import topics

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.experiments.models import ResNet, ViT
from benchmarks.models import GPT

Batch = tuple[Tensor, Tensor]
LENGTH = 64
"""Characters in a row of text."""
HELD_OUT = 256
"""Images, or rows of text, that are not trained on."""


@dataclass(frozen=True)
class Program:
    """A model with its optimizer, and batches of inputs and labels to train and to test on.

    ``noun`` is what a batch is counted in, and ``count`` how many of it there are.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    training: list[Batch]
    testing: list[Batch]
    noun: str
    count: int

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One step of training; the loss."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        self.optimizer.step()
        return loss

    def evaluate(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The share of labels that the model gives its highest score."""
        found = self.model(inputs).argmax(-1)
        return {"accuracy": (found == labels).float().mean()}


def digits(model: Callable[[], nn.Module], rate: float, steps: int) -> Program:
    """Images of digits, each with its class."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    order = torch.randperm(len(images))
    data = images[order], torch.tensor(found.target)[order]
    return _program(model(), rate, data, 64, steps, "images", 64)


def text(model: Callable[[int], nn.Module], rate: float, steps: int) -> Program:
    """Rows of characters, each with those that follow."""
    whole = "".join(topics.topics.values())
    alphabet = {character: i for i, character in enumerate(sorted(set(whole)))}
    encoded = torch.tensor([alphabet[character] for character in whole])
    rows = encoded[: len(encoded) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    rows = rows[torch.randperm(len(rows))]
    data = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return _program(model(len(alphabet)), rate, data, 16, steps, "characters", 16 * LENGTH)


def small_gpt(vocabulary: int) -> GPT:
    """Four layers, with embeddings small enough to be the output layer's weight too."""
    model = GPT(4, 128, 4, vocabulary, LENGTH, fused=False)
    for table in (model.embed, model.position):
        nn.init.normal_(table.weight, std=0.1)
    return model


def _program(
    model: nn.Module, rate: float, data: Batch, batch: int, steps: int, noun: str, count: int
) -> Program:
    """Cut data in batches: the last samples to test on, the others again and again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    train, test = (
        list(zip(*(t[part].split(batch) for t in data), strict=True))
        for part in (slice(-HELD_OUT), slice(-HELD_OUT, None))
    )
    whole = [found for found in train if len(found[0]) == batch]
    training = [whole[step % len(whole)] for step in range(steps)]
    return Program(model, optimizer, training, test, noun, count)


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "ViT": lambda steps: digits(lambda: ViT(4, 64, 4), 2e-3, steps),
    "ResNet": lambda steps: digits(lambda: ResNet(16), 2e-3, steps),
    "GPT": lambda steps: text(small_gpt, 2e-3, steps),
}


def make_program(name: str, steps: int) -> Program:
    """A program, the same every time."""
    torch.manual_seed(0)
    return PROGRAMS[name](steps)
