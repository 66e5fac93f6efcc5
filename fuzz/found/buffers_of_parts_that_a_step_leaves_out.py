"""A part of the model that the loss leaves out, and whose buffers its forward writes."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 8, 'dtype': 'float32', 'rowwise': True, 'batch_norm': False, 'writes': True, 'dropout': False, 'autocast': True, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.ConvTranspose2d(2, 4, 2, padding=0, stride=2)
        self.m3 = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 4))

    def forward(self, x0, x1):
        v2 = self.m1(x1)
        v4 = self.m3(v2)
        return v2


def build():
    torch.manual_seed(65)
    return Model().to(torch.float32)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(8, 3, 3, dtype=torch.float32), torch.randn(8, 2, 5, 6, dtype=torch.float32)]


def arguments(seed):
    t = drawn(seed)
    return (), {'x0': t[0], 'x1': t[1]}


def batch(seed):
    args, kwargs = arguments(seed)
    return kwargs


def train():
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x0, x1):
        optimizer.zero_grad()  # set_to_none
        out = model(x0, x1)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step
