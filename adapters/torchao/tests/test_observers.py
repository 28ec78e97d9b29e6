"""Observers of minima and maxima."""

from typing import Any

import pytest
import torch

from pennyweight.planning.granularity import PerAxis, PerGroup, PerRow, PerTensor
from pennyweight_torchao.enums import MappingType, ZeroPointDomain
from pennyweight_torchao.observers import (
    AffineQuantizedMinMaxObserver,
    AffineQuantizedObserverBase,
)
from pennyweight_torchao.primitives import choose_qparams_affine

SYM, ASYM = MappingType.SYMMETRIC, MappingType.ASYMMETRIC


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(0), PerGroup(8)])
@pytest.mark.parametrize("mapping", [*MappingType])
@pytest.mark.parametrize("keepdim", [False, True])
def test_min_max_is_the_range_of_all_that_passed(granularity: Any, mapping: MappingType, keepdim: bool) -> None:
    observer = AffineQuantizedMinMaxObserver(mapping, torch.int8, granularity, keepdim=keepdim)
    seen = [torch.randn(4, 16) * i for i in (1, 3, 2)]
    for x in seen:
        assert observer(x) is x
    observer(torch.empty(0, 16))
    block = {PerTensor: (4, 48), PerAxis: (1, 48), PerGroup: (1, 24)}[type(granularity)]
    grouped = torch.stack(seen, 1).reshape(4, 3, -1, 8 if isinstance(granularity, PerGroup) else 16)
    together = grouped.transpose(1, 2).reshape(4, 48)  # each block has its elements of all tensors
    want = choose_qparams_affine(together, mapping, block, torch.int8)
    for got, expected in zip(observer.calculate_qparams(), want, strict=True):
        assert torch.equal(got.flatten(), expected.flatten())
        assert got.dtype == expected.dtype
        assert keepdim == (got.ndim > 1) or isinstance(granularity, PerGroup)


def test_min_max_refuses_other_shapes_and_no_data() -> None:
    observer = AffineQuantizedMinMaxObserver(ASYM, torch.uint8, PerRow())
    with pytest.raises(AssertionError, match="run data through"):
        observer.calculate_qparams()
    observer(torch.randn(4, 8))
    observer(torch.randn(4, 6))
    with pytest.raises(AssertionError, match="shape mismatch"):
        observer(torch.randn(5, 8))
    watched = torch.randn(4, 8, requires_grad=True)
    assert observer(watched) is watched
    assert not observer.min_val.requires_grad


def test_what_was_seen_is_not_changed_by_later_writes() -> None:
    observer = AffineQuantizedMinMaxObserver(SYM, torch.int8, PerGroup(1))
    x = torch.ones(2, 3)
    observer(x)
    x.zero_()
    observer(-torch.ones(2, 3))
    assert (observer.min_val == -1).all()
    assert (observer.max_val == 1).all()


def test_factories() -> None:
    factory = AffineQuantizedMinMaxObserver.with_args(ASYM, torch.uint8).with_args(granularity=PerTensor(), eps=1e-3)
    one, two = factory(), factory(quant_max=15)
    assert one is not two
    assert (one.eps, two.quant_max, one.quant_max) == (1e-3, 15, None)
    assert "AffineQuantizedMinMaxObserver" in repr(factory)


def test_domains() -> None:
    x = torch.randn(4, 16)
    none = AffineQuantizedMinMaxObserver(SYM, torch.int8, PerRow(), zero_point_domain=ZeroPointDomain.NONE)
    none(x)
    assert none.calculate_qparams()[1] is None
    real = AffineQuantizedMinMaxObserver(
        ASYM, torch.uint8, PerRow(), 0, 15, preserve_zero=False, zero_point_domain=ZeroPointDomain.FLOAT
    )
    real(x)
    scale, zero = real.calculate_qparams()
    torch.testing.assert_close(zero, x.amin(1) + 8 * scale)
    with pytest.raises(ValueError, match="instead of None"):
        AffineQuantizedMinMaxObserver(SYM, torch.int8, PerRow(), zero_point_domain=None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="granularity is None"):
        AffineQuantizedMinMaxObserver(SYM, torch.int8, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        AffineQuantizedObserverBase(SYM, torch.int8, PerRow())  # type: ignore[abstract]
