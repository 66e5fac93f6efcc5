"""A value that a chain keeps to itself, read by what a later chain does again."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 4, 'dtype': 'float64', 'rowwise': False, 'batch_norm': False, 'writes': True, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m6 = nn.MultiheadAttention(2, 2, batch_first=True)
        self.m14 = nn.Parameter(torch.randn([]) * 0.5)

    def forward(self, x0, x1, x2, scale=0.5, flag=True):
        v7 = self.m6(x2, x2, x2, need_weights=False)[0]
        v8 = torch.minimum(v7, x2)
        v15 = torch.maximum(v8, self.m14)
        return v15


def build():
    torch.manual_seed(2833)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(4, 5, 8, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64), torch.randn(4, 4, 2, dtype=torch.float64)]


def arguments(seed):
    t = drawn(seed)
    return (t[0], t[1], t[2],), {'scale': 0.75}


def batch(seed):
    args, kwargs = arguments(seed)
    return args


def train():
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x0, x1, x2, scale=0.75):
        optimizer.zero_grad()  # set_to_none
        out = model(x0, x1, x2, scale=scale)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step
