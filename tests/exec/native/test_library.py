"""The native library: building, binding, running."""

from tests.exec.native.calls import native_library


def test_a_kind_without_a_kernel_is_refused_with_the_reason() -> None:
    assert native_library().bind(255, 0, b"", [], 0) == "no native kernel of this kind"
