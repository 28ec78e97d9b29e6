"""The library under its own name, for as long as a test runs."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from pennyweight import compat


@pytest.fixture
def torchao() -> Iterator[ModuleType]:
    """``import torchao`` gives ours."""
    compat.install("torchao")
    import torchao

    yield torchao
    compat.uninstall("torchao")
