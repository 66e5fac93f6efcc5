"""A character-level GPT on a text from the Python standard library, written for one device.

shardwright train examples/train_gpt.py:make --mesh pipeline=2,data=2 --microbatches 2 --epochs 1
torchrun --nproc-per-node 2 -m shardwright train examples/train_gpt.py:make --mesh pipeline=2 …
python examples/train_gpt.py          # the same step in an ordinary loop on one device
"""

import argparse
import inspect

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 64
BATCH = 16


class Block(nn.Module):
    """Pre-norm attention and feed-forward layers with residual connections."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.dropout(self.proj(self.attend(self.norm_1(x))))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """A decoder whose head is tied to its embedding."""

    def __init__(
        self,
        vocabulary: int,
        layers: int = 4,
        width: int = 64,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids (batch, length) to logits (batch, length, vocabulary)."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))


def read_text() -> tuple[torch.Tensor, int]:
    """The source of argparse as token ids, and the size of the vocabulary."""
    text = inspect.getsource(argparse)
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


def batches(text: torch.Tensor, *, shuffle: bool) -> DataLoader:
    """Batches of token ids, each with the ids that follow."""
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), BATCH, shuffle=shuffle)


def make(layers: int = 4, dropout: float = 0.1) -> dict[str, object]:
    """The program: a step, its data, an evaluation and a scheduler."""
    torch.manual_seed(0)
    text, vocabulary = read_text()
    model = GPT(vocabulary, layers, dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    def evaluate(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return {"loss": loss, "accuracy": (logits.argmax(-1) == y).float().mean()}

    cut = len(text) * 9 // 10
    return {
        "step_fn": step,
        "data": batches(text[:cut], shuffle=True),
        "evaluate": evaluate,
        "eval_data": batches(text[cut:], shuffle=False),
        "scheduler": scheduler,
    }


if __name__ == "__main__":
    program = make()
    for number, batch in enumerate(program["data"]):
        print(number, program["step_fn"](*batch).item())
        program["scheduler"].step()
