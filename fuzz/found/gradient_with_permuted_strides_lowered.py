"""A view of a gradient whose strides no other view may have, in lowered tasks."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 8, 'dtype': 'float64', 'rowwise': True, 'batch_norm': False, 'writes': False, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Linear(5, 8)
        self.m3 = nn.Linear(8, 3, bias=False)

    def forward(self, x0, x1):
        v2 = self.m1(x1)
        v4 = self.m3(v2)
        v7 = v4.rot90(1, (1, 2))
        v8 = F.interpolate(v7, scale_factor=2, mode="nearest")
        return v8


def build():
    torch.manual_seed(48)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 2, 5, dtype=torch.float64)]


def arguments(seed):
    t = drawn(seed)
    return (t[0], t[1],), {}


def batch(seed):
    args, kwargs = arguments(seed)
    return (*args, torch.randint(4, [8, 3]).where(torch.rand([8, 3]) > 0.2, -100))


def train():
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x0, x1, target):
        optimizer.zero_grad()
        out = model(x0, x1)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step
