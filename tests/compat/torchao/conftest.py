"""The library under its own name, for as long as a test runs."""

import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch._dynamo

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


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """An empty cache of compiled code: the limit of recompilations is per process, and many tests here compile."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
