"""An output with gaps between its elements, from a worker process."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {'rows': 8, 'dtype': 'float64', 'rowwise': True, 'batch_norm': False, 'writes': False, 'dropout': False, 'autocast': False, 'trains': True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.RMSNorm(12, eps=1e-6)
        self.register_buffer("b7", torch.rand([8]) + 0.5)

    def forward(self, tree, none=None):
        x0 = tree[0]['a']
        x1 = tree[1][0]
        v2 = self.m1(x0)
        v3 = v2.select(1, 5)
        v4 = torch.full((), 0.5, dtype=torch.float64)
        v6 = v3 * v3
        v8 = v6 * self.b7
        v10 = torch.ones(8, dtype=torch.float64)
        v11 = v8 + v10 * 0.1
        return {"z": v3, "y": v6}


def build():
    torch.manual_seed(106)
    return Model().to(torch.float64)


def drawn(seed):
    torch.manual_seed(seed)
    return [torch.randn(8, 12, dtype=torch.float64), torch.rand(8, 5) > 0.4]


def arguments(seed):
    t = drawn(seed)
    return ([{'a': t[0]}, (t[1], ), None],), {}


def batch(seed):
    args, kwargs = arguments(seed)
    return args


def train():
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(tree):
        optimizer.zero_grad()
        out = model(tree)
        loss = out["z"].sum() * 0.1 + F.smooth_l1_loss(out["y"], torch.zeros_like(out["y"]))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step

