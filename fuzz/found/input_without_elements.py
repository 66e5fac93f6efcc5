"""An input without elements beside one with rows, in calls of several sizes."""


import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 4, 'dtype': 'float64', 'rowwise': False, 'batch_norm': False, 'writes': False, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Linear(2, 2)

    def forward(self, x0, x1, x2, scale=0.5, flag=True):
        return self.m1(torch.cat([x2, x1], -1))


def build():
    torch.manual_seed(2833)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(4, 5, 8, dtype=torch.float64), torch.randn(4, 4, 0, dtype=torch.float64), torch.randn(4, 4, 2, dtype=torch.float64)]


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
