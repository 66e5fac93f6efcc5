"""A view of a gradient that has its dimensions in another order in memory."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 5, 'dtype': 'float64', 'rowwise': True, 'batch_norm': False, 'writes': False, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Parameter(torch.randn([5, 6]) * 0.5)
        self.m3 = nn.Linear(6, 6)
        self.m14 = nn.Parameter(torch.randn([4, 3, 6]) * 0.5)

    def forward(self, batch):
        x0 = batch['k0']
        v2 = (self.m1.T @ x0.unsqueeze(-1)).squeeze(-1)
        v4 = self.m3(v2)
        v6 = v4 + v2
        v15 = self.m14 - v6
        v16 = v15 @ v6.transpose(-1, -2) * 0.3
        return v16


def build():
    torch.manual_seed(181)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(5, 4, 3, 5, dtype=torch.float64)]


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
        optimizer.zero_grad()
        out = model(batch)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step
