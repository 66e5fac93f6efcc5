"""What holds for all tests."""

import gc
import os

import pytest
from hypothesis import settings

# How long an example takes says how loaded the machine is, nothing of what is tested.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")
# On some processors MKL rounds a product by where in memory its arrays lie, which is another place
# at every call; told so, it does not. It reads this once, so it is said before anything imports
# torch; processes that tests start inherit it.
os.environ.setdefault("MKL_CBWR", "AUTO")
# One thread an operator: processes of a test share the machine, and sums stay in one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a run before has proved is proved again.
os.environ["SHARDWRIGHT_KEEP_PROOFS"] = "0"


def pytest_configure(config: pytest.Config) -> None:
    """Let operators of newer torches warn: what its C++ says is a warning of Python there."""
    import torch

    if torch.__version__ >= "2.14":
        config.addinivalue_line("filterwarnings", "ignore:.*Triggered internally:UserWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hold files with tests of `processes` to the words by which `make test` finds them."""
    for path in {item.path for item in items if item.get_closest_marker("processes")}:
        assert path.name.startswith("test_"), path
        assert "mark.processes" in path.read_text(), path


def pytest_collection_finish() -> None:
    """Leave what there is before the first test out of searches for cycles, and search less.

    Torch's modules and ten thousand tests stay to the end; to walk them again and again takes
    longer than many a test.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
