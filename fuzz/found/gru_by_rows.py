"""An RNN whose batch is the first dimension, split by rows."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 4, 'dtype': 'float64', 'rowwise': False, 'batch_norm': False, 'writes': False, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.GRU(5, 2, batch_first=True)

    def forward(self, batch):
        x0 = batch['k0']
        v2 = self.m1(x0)[0]
        return v2


def build():
    torch.manual_seed(184)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(4, 4, 5, dtype=torch.float64)]


def arguments(seed):
    t = drawn(seed)
    return ({'k0': t[0]},), {}


def batch(seed):
    args, kwargs = arguments(seed)
    return args


def train():
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch):
        optimizer.zero_grad()  # set_to_none
        out = model(batch)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step
