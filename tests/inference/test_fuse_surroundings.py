"""Fused models in surroundings that other code makes: hooks of accelerate, torch's default dtype."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.kernels.cpu import library
from tests.inference.fuse_models import conv_net, inputs, model_of, states

LIMIT = 2e-5
IMAGES = torch.randn(2, 3, 12, 11, generator=torch.Generator().manual_seed(0))
NETS = pytest.mark.skipif(library.available() is not True, reason=str(library.available()))
MODELS = ["llama", "bert", "encoder", pytest.param("convolutions", marks=NETS)]


def fused_and_not(family: str) -> tuple[nn.Module, nn.Module]:
    """(A fused model, the same unfused.)"""
    if family in ("llama", "bert"):
        pytest.importorskip("transformers")
    own = conv_net() if family == "convolutions" else model_of(family, "int8")
    fused = copy.deepcopy(own)
    report = pw.fuse_(fused, IMAGES) if family == "convolutions" else pw.fuse_(fused)
    assert report.rows[0].kernel in ("block", "chains"), str(report)
    pw.reset_fallbacks()
    return fused, own


def output(model: nn.Module, family: str) -> Tensor:
    with torch.no_grad():
        return model(IMAGES) if family == "convolutions" else states(model(**inputs(family)))


def same(a: Tensor, b: Tensor) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert float((a - b).abs().mean() / b.abs().mean()) < LIMIT


def reasons() -> list[str]:
    """Why calls were not fused."""
    found = [name.partition(": ")[2] for name in pw.fallbacks() if name.startswith("fused ")]
    pw.reset_fallbacks()
    return found


# -- accelerate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hooks() -> Any:
    return pytest.importorskip("accelerate.hooks")


def inner(model: nn.Module, family: str) -> nn.Module:
    paths = {"llama": "model.layers.0.mlp.up_proj", "bert": "encoder.layer.0.output.dense"}
    return model.get_submodule({**paths, "encoder": "layers.0.linear1", "convolutions": "2"}[family])


def outer(model: nn.Module, family: str) -> nn.Module:
    """The fused block or net."""
    paths = {"llama": "model.layers.0", "bert": "encoder.layer.0", "encoder": "layers.0", "convolutions": ""}
    return model.get_submodule(paths[family])


@pytest.mark.parametrize("family", MODELS)
def test_a_hook_of_accelerate_on_an_inner_layer_runs(family: str, hooks: Any) -> None:
    fused, own = fused_and_not(family)
    seen = []

    class Doubled(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(module)
            return tuple(2 * x for x in args), kwargs

    plain = output(own, family)
    for model in (fused, own):
        hooks.add_hook_to_module(inner(model, family), Doubled())
    hooked = output(own, family)
    same(output(fused, family), hooked)
    assert inner(fused, family) in seen
    assert set(reasons()) == {"a module in it has a forward of its own"}
    assert (hooked - plain).abs().max() > 1e-3
    for model in (fused, own):
        hooks.remove_hook_from_module(inner(model, family))
        same(output(model, family), plain)
    output(fused, family)
    assert reasons() == []  # accelerate leaves the class's own forward in the module


@pytest.mark.parametrize("family", MODELS)
def test_a_hook_of_accelerate_around_a_fused_module_runs(family: str, hooks: Any) -> None:
    fused, own = fused_and_not(family)
    seen = []

    class Seen(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(module)
            return args, kwargs

    plain = output(own, family)
    hooks.add_hook_to_module(outer(fused, family), Seen())
    same(output(fused, family), plain)
    assert seen == [outer(fused, family)]
    assert reasons() == []


@pytest.mark.parametrize("family", ["llama", "bert", pytest.param("convolutions", marks=NETS)])
def test_weights_that_accelerate_moves_at_each_call(family: str) -> None:
    """``cpu_offload``: parameters are on the meta device, except while their layer runs."""
    accelerate = pytest.importorskip("accelerate")
    fused, own = fused_and_not(family)
    plain = output(own, family)
    for model in (fused, own):
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(p.is_meta for p in inner(model, family).parameters())
    for _ in range(2):
        assert torch.equal(output(fused, family), output(own, family))
        same(output(fused, family), plain)
    assert set(reasons()) == {"a module in it has a forward of its own"}


# -- the default dtype -------------------------------------------------------------------------------------------------


@pytest.fixture
def double() -> Iterator[Callable[[], None]]:
    """A function that makes float64 torch's default dtype, until the end of the test."""
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(before)


@pytest.mark.parametrize("family", MODELS)
def test_the_default_dtype_changes_no_result(family: str, double: Callable[[], None]) -> None:
    fused, own = fused_and_not(family)
    want = output(fused, family)
    assert want.dtype is torch.float32
    given = inputs(family) if family != "convolutions" else None  # made before the default changes
    double()
    model = copy.deepcopy(own)
    report = pw.fuse_(model, IMAGES) if given is None else pw.fuse_(model, given)
    assert report.rows[0].kernel in ("block", "chains"), str(report)
    pw.reset_fallbacks()
    with torch.no_grad():
        for m in (fused, copy.deepcopy(fused), model):
            y = m(IMAGES) if given is None else states(m(**given))
            assert (y.dtype, torch.equal(y, want)) == (torch.float32, True)
        y = own(IMAGES) if given is None else states(own(**given))
    same(want, y)
    assert reasons() == []
