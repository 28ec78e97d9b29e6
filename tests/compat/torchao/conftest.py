"""The library under its own name, for as long as a test runs."""

import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest

from pennyweight import compat


@pytest.fixture
def torchao() -> Iterator[ModuleType]:
    """``import torchao`` gives ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*already imported")  # other tests have imported transformers
        compat.install("torchao")
    import torchao

    yield torchao
    compat.uninstall("torchao")
