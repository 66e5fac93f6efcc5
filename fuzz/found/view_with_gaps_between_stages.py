"""A view with gaps between its elements, at the cut between two stages."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 2, 'dtype': 'float64', 'rowwise': False, 'batch_norm': False, 'writes': False, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m3 = nn.Linear(4, 5)

    def forward(self, x0):
        v1 = torch.where(x0 > x0, x0, x0 * 0.5)
        v2 = v1.chunk(2, 2)[-1]
        v4 = self.m3(v2)
        v5 = v4 * v4
        return v5


def build():
    torch.manual_seed(1222)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(2, 1, 4, 4, dtype=torch.float64)]


def arguments(seed):
    t = drawn(seed)
    return (t[0],), {}


def batch(seed):
    args, kwargs = arguments(seed)
    return args


def train():
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x0):
        optimizer.zero_grad()
        out = model(x0)
        loss = F.smooth_l1_loss(out, torch.zeros_like(out))
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step

