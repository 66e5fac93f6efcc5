"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    """Leave what there is before the first test out of searches for cycles, and search less.

    Torch's modules and ten thousand tests stay to the end; to walk them again and again takes
    longer than many a test.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
