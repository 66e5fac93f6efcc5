"""A user's file with a model and a training step."""

FILE = "user_program.py"
SOURCE = """
import torch

def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

def make():
    return layers().eval(), (torch.ones(4, 8),), {}

def train():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, [tuple(torch.randn(2, 8, 8)) for _ in range(4)]
"""
