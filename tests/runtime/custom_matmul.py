"""An operator of a user's own, in a module that workers can import."""

import torch

import shardwright as sw


@sw.register_op("(h^ m^) kd+, kd+ n -> h^ m^ n", name="test_matmul_custom")
def matmul_custom(x: torch.Tensor, w: torch.Tensor, h: int) -> torch.Tensor:
    out = torch.matmul(x, w)
    return out.view(h, out.size(0) // h, out.size(1))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(matmul_custom(x, self.weight, 2))
