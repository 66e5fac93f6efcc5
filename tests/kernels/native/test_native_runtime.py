"""What holds for native calls of every kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tests.kernels.native.calls import addresses, native_bind, native_library


def test_programs_that_share_a_call_wait_for_one_another() -> None:
    """A call keeps figures of its own while it runs: here the statistics of channels."""
    x, y = torch.zeros(64, 4096, 1, 1), torch.empty(64, 4096, 1, 1)
    attrs = {"training": 1, "momentum": 0.1, "eps": 1e-5}
    bound = native_bind("batch_norm", attrs, [x, *[None] * 4], [y, *[None] * 4])
    assert not isinstance(bound, str), bound

    def differences(seed: int) -> int:
        """How often a program of one thread's own, on its own numbers, gives another result."""
        x = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)) * 10**seed
        expected = torch.nn.functional.batch_norm(x, None, None, training=True)
        made = torch.empty_like(y)
        bases = addresses([x.data_ptr(), *[None] * 4, made.data_ptr(), *[None] * 4])
        program, wrong = native_library().program([bound]), 0
        for _ in range(200):
            program.run(bases)
            wrong += not torch.allclose(made, expected, atol=1e-3)
        return wrong

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(differences, [0, 3])) == [0, 0]
