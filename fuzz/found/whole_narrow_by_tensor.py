"""A narrow that takes all of a dimension, split along it."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 5, 'dtype': 'float64', 'rowwise': True, 'batch_norm': False, 'writes': False, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m3 = nn.Conv2d(4, 6, 2, padding=1, stride=1)

    def forward(self, x0):
        v4 = self.m3(x0)
        v5 = v4.narrow(1, 0, 6)
        return v5


def build():
    torch.manual_seed(104)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(5, 4, 4, 4, dtype=torch.float64)]


def arguments(seed):
    t = drawn(seed)
    return (t[0],), {}


def batch(seed):
    args, kwargs = arguments(seed)
    return args


def train():
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x0):
        optimizer.zero_grad()
        out = model(x0)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step

