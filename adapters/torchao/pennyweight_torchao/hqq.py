"""Solvers that optimize scales and codes jointly, under torchao's names: HQQ (two forms), SINQ and Marlin-QQQ.

HQQ: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. SINQ: arXiv 2509.22944.
QQQ: arXiv 2406.09904.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .qparams import require

__all__ = [
    "_choose_qparams_and_quantize_affine_hqq", "_choose_qparams_and_quantize_affine_qqq",
    "_choose_qparams_and_quantize_scale_only_hqq", "_choose_qparams_and_quantize_scale_only_sinq",
    "_convert_to_affinequantized_format", "_dequantize_affine_qqq", "_shrink_lp_op",
    "choose_qparams_and_quantize_affine_hqq", "choose_qparams_and_quantize_affine_qqq", "dequantize_affine_qqq",
    "optimize_weights_proximal_legacy",
]  # fmt: skip

# lp_norm: of the error that is minimised. beta: weight of the quadratic term, which grows by kappa a step.
_PROXIMAL = {"lp_norm": 0.7, "beta": 1e1, "kappa": 1.01, "iters": 20, "early_stop": True}


def _shrink_lp_op(x: Tensor, beta: float, lp_norm: float) -> Tensor:
    """sign(x) * relu(|x| - |x|**(lp_norm - 1) / beta): the proximal step of the lp norm."""
    threshold = 1.0 / beta if lp_norm == 1 else (1.0 / beta) * torch.pow(x.abs(), lp_norm - 1)
    return torch.sign(x) * F.relu(x.abs() - threshold)


@torch.no_grad()
def optimize_weights_proximal_legacy(
    tensor: Tensor, scale: Tensor, zero: Tensor, min_max: Sequence[float], axis: int = 0,
    dtype: torch.dtype | None = None, device: Any = None, verbose: bool = False,
    opt_params: Mapping[str, Any] = _PROXIMAL,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(codes, scale, zero) with codes = round(W * scale + zero) and zero optimized to reduce the lp norm of the error.

    Each step: E = shrink(W - (codes - zero) / scale), zero = mean(codes - (W - E) * scale) over ``axis``; the steps end
    where the mean error no longer falls. dtype: of the computation, default float16 on CUDA devices, else float32.
    """
    device = tensor.device if device is None else torch.device(device)
    if dtype is None:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
    w, scale, zero = (t.to(device, dtype) for t in (tensor, scale, zero))
    low, high = min_max[0], min_max[1]
    beta, best = opt_params["beta"], 1e4
    for step in range(opt_params["iters"]):
        codes = (w * scale + zero).round().clamp(low, high)
        off = w - (codes - zero) / scale
        zero = torch.mean(codes - (w - _shrink_lp_op(off, beta, opt_params["lp_norm"])) * scale, axis, keepdim=True)
        beta *= opt_params["kappa"]
        error = float(off.abs().mean())
        if verbose:
            print(f"Iter {step + 1} | Error: {error}")
        if opt_params["early_stop"]:
            if error >= best:
                break
            best = error
    scale, zero = scale.to(tensor.device), zero.to(tensor.device)
    return (tensor * scale + zero).round().clamp(low, high), scale, zero


def _convert_to_affinequantized_format(
    W_q: Tensor, scale: Tensor, zero: Tensor, nbits: float, shape: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """(code - zero) * scale as (code - mid) * scale + zero', mid = 2**nbits / 2."""
    mid = (2**nbits - 1 + 1) / 2
    return W_q.reshape(tuple(shape)), scale, ((mid - zero.float()) * scale.float()).to(zero.dtype)


def _choose_qparams_and_quantize_affine_hqq(
    tensor: Tensor, nbits: float = 4, group_size: int | None = 64, optimize: bool = True, axis: int = 1,
    compute_dtype: torch.dtype = torch.float16, device: Any = None, verbose: bool = False, raw_output: bool = False,
    optimize_weights: Callable[..., Any] = optimize_weights_proximal_legacy,
) -> tuple[Tensor, Tensor, Tensor, torch.Size]:  # fmt: skip
    """HQQ: (codes uint8, scale, zero, shape) of groups of ``group_size`` elements along ``axis`` (1: of a row).

    x = (code - mid) * scale + zero, with scale and zero in ``compute_dtype``, one a group in the order of the groups;
    ``raw_output``: x = (code - zero) * scale, with both as [N, K / g] (axis 0: [K / g, N]). device: where to compute
    and where the results lie, default that of the tensor. Raises AssertionError for another axis, and where the group
    size does not divide the number of elements.
    """
    require(axis in (0, 1), f"axis should be either 0 or 1, got {axis}")
    require(
        group_size is None or tensor.numel() % group_size == 0,
        f"group_size {group_size} does not divide the {tensor.numel()} elements of {list(tensor.shape)}",
    )
    w = tensor.detach().to(device=tensor.device if device is None else device, dtype=torch.float32)
    shape = w.shape
    if group_size is not None:
        w = w.reshape((-1, group_size) if axis == 1 else (group_size, -1))
    low, high = w.amin(axis, keepdim=True), w.amax(axis, keepdim=True)
    most = round(2**nbits - 1)
    scale = (most / (high - low)).clamp(max=2e4)  # in the range of float16, and finite for constant groups
    zero = -low * scale
    if nbits == 4:
        zero = zero.round()
    if optimize:
        codes, scale, zero = optimize_weights(
            tensor=w, scale=scale, zero=zero, min_max=[0, most], axis=axis, device=w.device, verbose=verbose
        )
    else:
        scale, zero = scale.to(compute_dtype), zero.to(compute_dtype)
        codes = (w * scale + zero).round().clamp(0, most)
    scale = 1.0 / scale
    if not raw_output:
        codes, scale, zero = _convert_to_affinequantized_format(codes, scale, zero, nbits, shape)
    else:
        parts = (shape[0], -1) if axis == 1 else (-1, shape[-1])
        codes, scale, zero = codes.reshape(shape), scale.reshape(parts), zero.reshape(parts)
    return codes.to(torch.uint8), scale.to(compute_dtype), zero.to(compute_dtype), shape


@torch.no_grad()
def _choose_qparams_and_quantize_scale_only_hqq(
    hp_tensor: Tensor, block_size: Sequence[int], qmin: int, qmax: int, *, iters: int = 20, stochastic: bool = False,
    early_stop_tol: float = 1e-5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(codes int32 [N, K], scale [N, K / g] in the input's dtype) of groups of a row, symmetric.

    Alternates codes = clamp(round(W / scale)) with the least squares scale = sum(W * codes) / sum(codes**2), from
    absmax / max(|qmin|, |qmax|) on, until no scale moves by more than ``early_stop_tol`` of itself.
    stochastic: round up with the probability of the fraction. Raises AssertionError unless hp_tensor is 2-d,
    block_size [1, g] with g dividing K, and qmin < qmax.
    """
    require(hp_tensor.ndim == 2, f"hp_tensor must be 2D [out, in], got {list(hp_tensor.shape)}")
    require(
        isinstance(block_size, list | tuple) and len(block_size) == 2 and block_size[0] == 1 and block_size[1] >= 1,
        f"block_size must be [1, group_size] with group_size >= 1, got {block_size}",
    )
    require(qmin < qmax, f"qmin must be < qmax, got {qmin} and {qmax}")
    n, k = hp_tensor.shape
    group = int(block_size[1])
    require(k % group == 0, f"in_features={k} must be divisible by group_size={group}")
    eps = torch.finfo(torch.float32).eps
    w = hp_tensor.to(torch.float32).reshape(n, k // group, group)

    def codes(scale: Tensor) -> Tensor:
        steps = w / scale.unsqueeze(-1)
        return (torch.floor(steps + torch.rand_like(steps)) if stochastic else steps.round()).clamp(qmin, qmax)

    scale = (w.abs().amax(2) / (max(abs(qmin), abs(qmax)) or 1)).clamp(min=eps)
    for _ in range(max(1, iters)):
        before, q = scale, codes(scale)
        square = (q * q).sum(2)
        scale = torch.where(square > 0, (w * q).sum(2) / square, before).clamp(min=eps)
        if w.numel() == 0 or ((scale - before).abs() / before.clamp(min=eps)).max() < early_stop_tol:
            break
    return codes(scale).reshape(n, k).to(torch.int32), scale.to(hp_tensor.dtype)


def _choose_qparams_and_quantize_scale_only_sinq(
    tensor: Tensor, qmin: int = -8, qmax: int = 7, group_size: int = 64, niter: int = 20,
    compute_dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """SINQ: (codes int8 [N, K], scale_row [N, K / g], scale_col [K]) with x = code * scale_row * scale_col.

    Columns and rows of the groups, laid below each other, are divided in turn by their standard deviation over the
    least one, ``niter`` times; what remains is rounded under absmax / qmax of each group. scale_col holds the same g
    numbers for every group. Raises AssertionError where the group size does not divide the rows.
    """
    require(
        tensor.shape[-1] % group_size == 0,
        f"group_size {group_size} must divide the last axis of {list(tensor.shape)}",
    )
    w = tensor.to(compute_dtype)
    shape = w.shape
    w = w.reshape(-1, group_size)
    least = max(min(w.std(0).min().item(), w.std(1).min().item()), 1e-8)
    col, row = torch.ones_like(w[0]), torch.ones_like(w[:, 0])
    for _ in range(niter):
        over = (w.std(0) / least).clamp(min=1e-8)
        w, col = w / over.unsqueeze(0), col * over
        over = (w.std(1) / least).clamp(min=1e-8)
        w, row = w / over.unsqueeze(1), row * over
    step = (w.abs().amax(1, keepdim=True) / float(qmax)).clamp(min=1e-8)
    codes = (w / step).round().clamp(qmin, qmax).reshape(shape).to(torch.int8)
    return codes, (step.reshape(-1) * row).reshape(shape[0], -1), col.repeat(shape[1] // group_size)


def _choose_qparams_and_quantize_affine_qqq(
    w: Tensor, num_bits: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Marlin-QQQ: (codes int32 [N, K], s_group, s_channel float32 [N, 1], w_ref float16 [N, K]).

    group_size 128: codes 0..15 around 8, x = (code - 8) * (s_group * s_channel), s_group float16 [N, K / g] and the
    rows again rounded to int8 under s_channel. group_size -1 or K: codes -7..7, x = code * (s_channel * 16),
    s_group empty. Raises AssertionError for other bits and group sizes.
    """
    require(num_bits == 4, f"Unsupported num_bits = {num_bits}")
    n, k = w.shape
    require(group_size in (-1, 128, k), f"Unsupported groupsize = {group_size}")
    if group_size in (-1, k):
        s_channel = w.abs().amax(-1, keepdim=True) / 7
        codes = (w / s_channel).round().int().clamp(-7, 7)
        s_group = torch.tensor([], dtype=torch.half, device=w.device)
        return codes, s_group, (s_channel / 16).to(torch.float), codes.half() * s_channel
    groups = w.reshape(-1, group_size)
    s_group = groups.abs().amax(-1, keepdim=True) * (2 / 15)
    codes = ((groups / s_group).round().int() + 8).clamp(0, 15)
    w_ref = ((codes - 8).half() * s_group).reshape(n, k)
    s_channel = w_ref.abs().amax(-1, keepdim=True) / 127.0
    w_ref = (w_ref / s_channel).round().clamp(-128, 127).to(torch.int8).half() * s_channel
    s_channel = s_channel.to(torch.float)
    return codes.reshape(n, k), (s_group.reshape(n, -1) / s_channel).to(torch.half), s_channel, w_ref


def _dequantize_affine_qqq(
    w: Tensor, s_group: Tensor, s_channel: Tensor, num_bits: int, group_size: int,
    output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Values of Marlin-QQQ's codes, float16 by default. Raises AssertionError as its quantizing does."""
    require(num_bits == 4, f"Unsupported num_bits = {num_bits}")
    n, k = w.shape
    require(group_size in (-1, 128, k), f"Unsupported groupsize = {group_size}")
    if group_size in (-1, k):
        x = w.half() * (s_channel * 16)
    else:
        x = ((w.reshape(-1, group_size) - 8).half() * (s_group * s_channel.half()).reshape(-1, 1)).reshape(n, k)
    return x.to(output_dtype or torch.float16)


choose_qparams_and_quantize_affine_hqq = _choose_qparams_and_quantize_affine_hqq
choose_qparams_and_quantize_affine_qqq = _choose_qparams_and_quantize_affine_qqq
dequantize_affine_qqq = _dequantize_affine_qqq
