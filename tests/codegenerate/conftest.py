"""What several files of tests of stages in threads hold."""

import threading
from collections.abc import Iterator

import pytest

from tests.codegenerate.staged import PATIENCE


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """A test ends with the threads that there were."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("stage "):
            thread.join(PATIENCE)
            assert not thread.is_alive()
