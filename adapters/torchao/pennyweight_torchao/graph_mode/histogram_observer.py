"""An observer that keeps a histogram and clips outliers: the range with the least squared quantization error."""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from .code_range import EPS, is_per_tensor
from .observer_base import UniformQuantizationObserverBase, _factory, refuse

__all__ = ["HistogramObserver"]

_FINER = 16  # each bin is split into so many before it is moved to a histogram of another range
_STEP = 1e-5  # share of the values that a step of the search may clip


class HistogramObserver(UniformQuantizationObserverBase):
    """Buffers ``histogram`` with ``bins`` bins, ``min_val`` and ``max_val``.

    If a tensor exceeds the range, the histogram is moved to the wider range. Parameters: from the range
    [min_val + width * first, min_val + width * (last + 1)] that ``_non_linear_param_search`` finds.
    Infinite values are ignored, with a warning. Raises NotImplementedError unless the qscheme is per tensor and static.
    """

    histogram: Tensor
    min_val: Tensor
    max_val: Tensor

    def __init__(
        self, bins: int = 2048, dtype: torch.dtype = torch.quint8, qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False, quant_min: int | None = None, quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None, eps: float = EPS, is_dynamic: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        refuse(not is_per_tensor(qscheme), f"HistogramObserver's qscheme must be per tensor, got {qscheme}")
        refuse(is_dynamic, "HistogramObserver doesn't support dynamic quantization")
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic, **kwargs)
        self.bins = bins
        self.register_buffer("histogram", torch.zeros(bins, **_factory(factory_kwargs)))
        self.register_buffer("min_val", torch.tensor(torch.inf, **_factory(factory_kwargs)))
        self.register_buffer("max_val", torch.tensor(-torch.inf, **_factory(factory_kwargs)))
        self.dst_nbins: int = 2 ** torch.iinfo(dtype).bits
        self.upsample_rate = _FINER

    # -- recording ---------------------------------------------------------------------------------------------------

    def forward(self, x_orig: Tensor) -> Tensor:
        """Record ``x_orig``; an empty one is ignored."""
        if x_orig.numel() == 0:
            return x_orig
        x = x_orig.detach()
        low, high = torch.aminmax(x)
        if low == -torch.inf or high == torch.inf:
            warnings.warn("torch.inf detected in input tensor, ignoring input", stacklevel=2)
            x = x[x.abs() != torch.inf]
            if x.numel() == 0:
                return x_orig
            low, high = torch.aminmax(x)
        if not self._seen():
            self.reset_histogram(x, low, high)
            return x_orig
        before = self.min_val, self.max_val
        low, high = torch.minimum(before[0], low), torch.maximum(before[1], high)
        new = _count(x, self.bins, low, high).to(self.histogram.device)
        total = self._combine_histograms(self.histogram, *before, new, low, high)
        self.histogram.detach_().resize_(total.shape).copy_(total)
        self.min_val.detach_().resize_(low.shape).copy_(low)
        self.max_val.detach_().resize_(high.shape).copy_(high)
        return x_orig

    def _seen(self) -> bool:
        return not bool((self.min_val == torch.inf) | (self.max_val == -torch.inf))

    def reset_histogram(self, x: Tensor, min_val: Tensor, max_val: Tensor) -> None:
        """Start again with the values of x, which are between the scalars min_val and max_val."""
        assert min_val.numel() == max_val.numel() == 1, "histogram min/max values must be scalar."
        self.min_val.resize_(min_val.shape).copy_(min_val)
        self.max_val.resize_(max_val.shape).copy_(max_val)
        counts = _count(x, self.bins, min_val, max_val)
        self.histogram.detach_().resize_(counts.shape).copy_(counts)

    def _combine_histograms(
        self, orig_hist: Tensor, orig_min: Tensor, orig_max: Tensor, update_hist: Tensor, update_min: Tensor,
        update_max: Tensor,
    ) -> Tensor:  # fmt: skip
        """The sum of two histograms, over the range of the second, which contains that of the first."""
        if update_min == orig_min and update_max == orig_max:
            return orig_hist + update_hist
        if orig_min == orig_max:  # all values of the first are equal
            place = _count(orig_min, self.bins, update_min, update_max)
            return place * torch.sum(orig_hist) + update_hist
        assert update_min <= orig_min <= orig_max <= update_max
        return update_hist + self._upscale_histogram(orig_hist, orig_min, orig_max, update_min, update_max)

    def _upscale_histogram(
        self, histogram: Tensor, orig_min: Tensor, orig_max: Tensor, update_min: Tensor, update_max: Tensor
    ) -> Tensor:
        """The histogram over another range: each bin is split, and each piece counts in the bin of its middle."""
        pieces = self.bins * self.upsample_rate
        device = histogram.device
        weights = histogram.repeat_interleave(self.upsample_rate) / self.upsample_rate
        edges = torch.linspace(orig_min, orig_max, pieces + 1, dtype=torch.float32, device=orig_min.device)
        edges = edges[:-1].to(device)
        middles = edges + 0.5 * ((orig_max - orig_min) / pieces)
        borders = torch.linspace(
            update_min, update_max, self.bins + 1, dtype=torch.float32, device=update_min.device
        ).to(device)
        into = (torch.bucketize(middles, borders, right=True) - 1).clamp(0, self.bins - 1)
        return torch.bincount(into, weights=weights, minlength=self.bins)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """(scale, zero_point) of the best range; 1 and 0, with a warning, if nothing was recorded."""
        if bool((self.min_val == torch.inf) & (self.max_val == -torch.inf)):
            warnings.warn(
                "must run observer before calling calculate_qparams. Returning default scale and zero point",
                stacklevel=2,
            )
            device = self.min_val.device
            return torch.tensor([1.0], device=device), torch.tensor([0], device=device)
        assert self.bins == len(self.histogram), f"the histogram must have {self.bins} bins, has {len(self.histogram)}"
        return self._calculate_qparams(*self._non_linear_param_search())

    def _compute_quantization_error(self, next_start_bin: int, next_end_bin: int) -> float:
        """Squared error if the codes are spread over these bins, with the values of a bin spread evenly over it.

        The error of a value is its distance d to the middle of its code's interval; values outside use the last code.
        The integral of d^2 from a to b is (b^3 - a^3) / 3: the part of a bin before the end of its first code's
        interval, whole intervals, and the part in its last code's interval.
        """
        width = (self.max_val.item() - self.min_val.item()) / self.bins
        step = width * (next_end_bin - next_start_bin + 1) / self.dst_nbins
        if step == 0.0:
            return 0.0
        index = torch.arange(self.bins, dtype=torch.float32, device=self.histogram.device)
        begin = (index - next_start_bin) * width
        end = begin + width
        last = self.dst_nbins - 1
        first_code = torch.div(begin, step, rounding_mode="floor").clamp(0, last)
        last_code = torch.div(end, step, rounding_mode="floor").clamp(0, last)
        density = self.histogram / width
        half = torch.tensor(step / 2, dtype=torch.float32, device=density.device)
        norm = _integral(begin - (first_code + 0.5) * step, torch.full_like(index, step / 2), density)
        norm = norm + (last_code - first_code - 1) * _integral(-half, half, density)
        norm = norm + _integral(-half, end - (last_code * step + step / 2), density)
        return norm.sum().item()

    def _non_linear_param_search(self) -> tuple[Tensor, Tensor]:
        """(low, high): the ends move inward, at each step the one that skips more bins, until the error grows.

        A step clips a share of 1e-5 of the values. The method is Caffe2's norm minimization.
        """
        assert self.histogram.size(0) == self.bins, f"the histogram must have {self.bins} bins"
        width = (self.max_val - self.min_val) / self.bins
        total = torch.sum(self.histogram).item()
        below = torch.cumsum(self.histogram, dim=0).tolist()
        alpha, beta, start, end, least = 0.0, 1.0, 0, self.bins - 1, float("inf")
        while alpha < beta:
            next_alpha, next_beta = alpha + _STEP, beta - _STEP
            # counts are compared in float32, the dtype of the histogram
            left = max(start, min(end, bisect_left(below, c_float(next_alpha * total).value)))
            right = min(end, max(start, bisect_right(below, c_float(next_beta * total).value) - 1))
            next_start, next_end = start, end
            if left - start > end - right:
                next_start, alpha = left, next_alpha
            else:
                next_end, beta = right, next_beta
            if (next_start, next_end) == (start, end):
                continue
            error = self._compute_quantization_error(next_start, next_end)
            if error > least:
                break
            least, start, end = error, next_start, next_end
        return self.min_val + width * start, self.min_val + width * (end + 1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any) -> None:
        version = local_metadata.get("version")
        for name, empty in (("min_val", torch.inf), ("max_val", -torch.inf)):
            key = prefix + name
            if key not in state_dict:
                continue
            old = state_dict[key]
            if (version is None or version < 3) and old.shape == (0,):  # before version 3: not seen yet
                state_dict[key] = torch.tensor(empty, dtype=old.dtype, device=old.device)
            setattr(self, name, torch.empty_like(state_dict[key], device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"


def _count(x: Tensor, bins: int, low: Tensor, high: Tensor) -> Tensor:
    """Counts of x in equal bins; torch.histc in float32, which bfloat16 and float16 do not have everywhere."""
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return torch.histc(x, bins, min=float(low), max=float(high))


def _integral(a: Tensor, b: Tensor, density: Tensor) -> Tensor:
    return density * ((b * b * b - a * a * a) / 3)
