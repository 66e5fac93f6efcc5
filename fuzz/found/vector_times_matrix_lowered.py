"""A vector times a matrix, lowered."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 5, 'dtype': 'float64', 'rowwise': True, 'batch_norm': False, 'writes': False, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m3 = nn.Parameter(torch.randn([3, 8]) * 0.5)

    def forward(self, x0, x1, x2):
        v4 = torch.matmul(x1, self.m3).tanh()
        return v4


def build():
    torch.manual_seed(136)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(5, 5, dtype=torch.float64), torch.randn(3, dtype=torch.float64), torch.randn(5, 5, 8, dtype=torch.float64)]


def arguments(seed):
    t = drawn(seed)
    return (t[0], t[1], t[2],), {}


def batch(seed):
    args, kwargs = arguments(seed)
    return args


def train():
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x0, x1, x2):
        optimizer.zero_grad()
        out = model(x0, x1, x2)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step
