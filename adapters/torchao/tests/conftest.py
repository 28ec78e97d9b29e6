"""torchao under its own name, for as long as a test runs."""

import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch._dynamo

import pennyweight_torchao


@pytest.fixture
def torchao() -> Iterator[ModuleType]:
    """``import torchao`` gives ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*already imported")  # other tests have imported transformers
        pennyweight_torchao.install()
    import torchao

    yield torchao
    pennyweight_torchao.uninstall()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """An empty cache of compiled code: the limit of recompilations is per process, and many tests here compile."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
