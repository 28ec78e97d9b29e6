"""GPU kernels in Triton. Each family is one source for all GPUs, and proves itself on the device before it is used.

Importing this package does not import triton: a kernel is built at the first call on a GPU.
"""

from typing import Any

from . import self_test_verdict


def _prove(device: Any, family: str) -> dict[str, str | None]:
    """The cases import the kernels that ask for their verdict, and nobody needs them before a GPU is used."""
    from . import self_test

    return self_test.prove(device, family=family)


self_test_verdict.register(_prove)
