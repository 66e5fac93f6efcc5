"""A parameter group none of which has a gradient, before one with another learning rate."""

import torch
from torch import nn

FACTS = {'rows': 4, 'dtype': 'float64', 'rowwise': True, 'batch_norm': False, 'writes': False, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Linear(6, 6)
        self.m2 = nn.Linear(6, 6)
        self.m3 = nn.Linear(6, 6)

    def forward(self, x0):
        v1 = self.m1(x0)
        v2 = self.m2(x0).tanh()
        return self.m3(v2)


def build():
    torch.manual_seed(154)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(4, 6, dtype=torch.float64)]


def arguments(seed):
    t = drawn(seed)
    return (t[0],), {}


def batch(seed):
    args, kwargs = arguments(seed)
    return args


def train():
    model = build().train()
    first, *others = model.parameters()
    groups = [{'params': [first], 'lr': 0.02}, {'params': others}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def step(x0):
        optimizer.zero_grad()
        loss = model(x0).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step
