"""Marlin-QQQ: 4-bit weights for products with int8 inputs (Zhang et al. 2024), its packing for NVIDIA GPUs, and the
same weights in our tensor class.

Packed codes [K / 16, 2 N] are int32 of eight codes. Tiles of 16 by 16 lie side by side; the 1024 codes of each four
are permuted to the order in which 32 threads read them. Scales [.., N] are permuted in runs of 64 (those of groups) or
32 (those of rows).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....core.formats import INT4, UINT4
from ....core.tensor import AffineQuantizedTensor as QT
from ....planning.granularity import Granularity, PerAxis, PerGroup
from ..class_view import View, int_codes, ready
from ..enums import ZeroPointDomain
from ..hqq import _choose_qparams_and_quantize_affine_qqq
from ..qparams import require
from ..v0_8_layouts import AQTTensorImpl, Layout, MarlinQQQLayout, Pieces

__all__ = [
    "MarlinQQQAQTTensorImpl", "MarlinQQQConstants", "MarlinQQQLayout", "MarlinQQQTensor", "const", "get_pack_factor",
    "get_qqq_scale_perms", "get_qqq_scale_reverse_perms", "get_qqq_weight_perm", "get_qqq_weight_reverse_perm",
    "marlin_permute_weights", "marlin_qqq_workspace", "pack_to_marlin_qqq", "reverse_marlin_permute_weights",
    "to_marlinqqq_quantized_intx", "unpack_from_marlin_qqq",
]  # fmt: skip


@dataclass(frozen=True)
class MarlinQQQConstants:
    """Sizes that the GPU kernel supports."""

    TILE: int = 16
    MIN_THREAD_N: int = 64
    MAX_PARALLEL: int = 16
    SUPPORTED_NUM_BITS: list[int] = field(default_factory=lambda: [4])
    SUPPORTED_GROUP_SIZES: list[int] = field(default_factory=lambda: [-1, 128])


const = MarlinQQQConstants()


# -- permutations ------------------------------------------------------------------------------------------------------


def _need_4_bits(num_bits: int) -> None:
    require(num_bits == 4, f"Marlin QQQ supports 4 bits, got {num_bits}")


def get_pack_factor(num_bits: int) -> int:
    """Codes in an int32."""
    require(32 % num_bits == 0, f"Unsupported num_bits = {num_bits}")
    return 32 // num_bits


def get_qqq_weight_perm(num_bits: int, granularity: Granularity) -> Tensor:
    """The order of 1024 codes: of thread t, tiles 0 to 3, two blocks of 8 columns and four rows each; codes of eight
    are interleaved, differently for scales per row and per group."""
    _need_4_bits(num_bits)
    index = {"dtype": torch.int64, "device": "cpu"}
    thread, tile = torch.arange(32, **index).view(32, 1, 1, 1), torch.arange(4, **index).view(1, 4, 1, 1)
    block, row = torch.arange(2, **index).view(1, 1, 2, 1), torch.arange(4, **index)
    order = 16 * (4 * (thread % 4) + row) + thread // 4 + 8 * block + 256 * tile
    eight = [4, 0, 5, 1, 6, 2, 7, 3] if isinstance(granularity, PerAxis) else [0, 2, 4, 6, 1, 3, 5, 7]
    return order.reshape(-1, 8)[:, eight].flatten()


def get_qqq_weight_reverse_perm(num_bits: int, granularity: Granularity) -> Tensor:
    """Inverse of :func:`get_qqq_weight_perm`."""
    return get_qqq_weight_perm(num_bits, granularity).argsort()


def get_qqq_scale_perms(num_bits: int) -> tuple[list[int], list[int]]:
    """The order of 64 scales of groups, and of 32 scales of rows."""
    _need_4_bits(num_bits)
    return (
        [i + 8 * j for i in range(8) for j in range(8)],
        [2 * i + j + 8 * k for i in range(4) for k in range(4) for j in range(2)],
    )


def get_qqq_scale_reverse_perms(num_bits: int) -> tuple[Tensor, Tensor]:
    """Inverses of :func:`get_qqq_scale_perms`."""
    groups, rows = (torch.tensor(p, dtype=torch.int64, device="cpu") for p in get_qqq_scale_perms(num_bits))
    return groups.argsort(), rows.argsort()


def _need_tiles(size_k: int, size_n: int, tile: int) -> None:
    require(size_k % tile == 0 and size_n % tile == 0, f"[{size_k}, {size_n}] are no multiples of {tile}")


def marlin_permute_weights(q_w: Tensor, size_k: int, size_n: int, perm: Tensor, tile: int = const.TILE) -> Tensor:
    """Codes [K, N] -> [K / tile, N * tile]: tile by tile, then permuted. Raises AssertionError for other sizes."""
    require(tuple(q_w.shape) == (size_k, size_n), f"codes are {list(q_w.shape)}, expected [{size_k}, {size_n}]")
    _need_tiles(size_k, size_n, tile)
    tiles = q_w.reshape(size_k // tile, tile, size_n // tile, tile).transpose(1, 2)
    return tiles.reshape(-1, perm.numel())[:, perm].reshape(size_k // tile, size_n * tile)


def reverse_marlin_permute_weights(
    q_w_unpacked: Tensor, size_k: int, size_n: int, reverse_perm: Tensor, tile: int = const.TILE
) -> Tensor:
    """Inverse of :func:`marlin_permute_weights`."""
    _need_tiles(size_k, size_n, tile)
    tiles = q_w_unpacked.reshape(-1, reverse_perm.numel())[:, reverse_perm]
    return tiles.reshape(size_k // tile, size_n // tile, tile, tile).transpose(1, 2).reshape(size_k, size_n)


# -- packing -----------------------------------------------------------------------------------------------------------


def _granularity(group_size: int, size_k: int) -> Granularity:
    return PerAxis(1) if group_size in (-1, size_k) else PerGroup(group_size)


def _permuted(scale: Tensor, order: Any, columns: int) -> Tensor:
    return scale.reshape(-1, len(order))[:, order].reshape(-1, columns).contiguous()


def pack_to_marlin_qqq(
    q_w: Tensor, s_group: Tensor, s_channel: Tensor, num_bits: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(int32 [K / 16, 2 N], scales of groups, scales of rows) from codes [K, N], scales [K / group, N] and [1, N].

    Codes are 0 to 15 in groups and -8 to 7 per row (group_size -1 or K), which has no scales of groups.
    """
    _need_4_bits(num_bits)
    size_k, size_n = q_w.shape
    granularity, count = _granularity(group_size, size_k), get_pack_factor(num_bits)
    order = get_qqq_weight_perm(num_bits, granularity).to(q_w.device)
    codes = marlin_permute_weights(q_w, size_k, size_n, order).to(torch.int64) & 15
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int64, device=q_w.device)
    packed = (codes.unflatten(-1, (-1, count)) << shifts).sum(-1)
    groups, rows = get_qqq_scale_perms(num_bits)
    if isinstance(granularity, PerGroup):
        s_group = _permuted(s_group, groups, size_n)
    return packed.to(torch.int32), s_group, _permuted(s_channel, rows, size_n)


def unpack_from_marlin_qqq(
    q_w: Tensor, s_group: Tensor, s_channel: Tensor, original_shape: Any, num_bits: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of :func:`pack_to_marlin_qqq`. original_shape: [K, N]."""
    _need_4_bits(num_bits)
    size_k, size_n = original_shape
    granularity = _granularity(group_size, size_k)
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32, device=q_w.device)
    codes = ((q_w.unsqueeze(-1) >> shifts) & 15).flatten(-2)
    if isinstance(granularity, PerAxis):  # signed
        codes = torch.where(codes > 7, codes - 16, codes)
    order = get_qqq_weight_reverse_perm(num_bits, granularity).to(q_w.device)
    groups, rows = get_qqq_scale_reverse_perms(num_bits)
    if isinstance(granularity, PerGroup):
        s_group = _permuted(s_group, groups.to(s_group.device), size_n)
    codes = reverse_marlin_permute_weights(codes, size_k, size_n, order)
    return codes, s_group, _permuted(s_channel, rows.to(s_channel.device), size_n)


def marlin_qqq_workspace(
    out_features: int, min_thread_n: int = const.MIN_THREAD_N, max_parallel: int = const.MAX_PARALLEL
) -> Tensor:
    """Zeros for the locks of the GPU kernel, on the current GPU if there is one."""
    require(out_features % min_thread_n == 0, f"out_features = {out_features} is no multiple of {min_thread_n}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.zeros(out_features // min_thread_n * max_parallel, dtype=torch.int, device=device)


# -- weights -----------------------------------------------------------------------------------------------------------


class MarlinQQQAQTTensorImpl(AQTTensorImpl):
    """int_data (packed), s_group, s_channel. Its plain pieces are codes [N, K] and the scales of groups and rows."""

    layouts = (MarlinQQQLayout,)

    @classmethod
    def build(  # type: ignore[override]
        cls, int_data: Tensor, s_group: Tensor, s_channel: Tensor, _layout: Layout, original_shape: Any,
        group_size: int, num_bits: int,
    ) -> Pieces:  # fmt: skip
        parts = unpack_from_marlin_qqq(int_data, s_group, s_channel, original_shape, num_bits, group_size)
        codes, groups, rows = (p.t() if p.ndim == 2 else p for p in parts)
        return Pieces(codes, groups, rows, _layout)

    @classmethod
    def from_plain(  # type: ignore[override]
        cls, int_data: Tensor, s_group: Tensor, s_channel: Tensor, _layout: Layout
    ) -> Pieces:
        return Pieces(int_data, s_group, s_channel, _layout)


class MarlinQQQTensor(View):
    """4-bit weights in groups of 128 with float16 scales, or per row with float32 scales."""

    tensor_data_names = ["tensor_impl"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        spec = w.spec
        if spec.offset is not None or spec.zero_point or w.act is not None or spec.block is None:
            return False
        in_groups = spec.format is UINT4 and spec.mid == 8 and spec.scale is torch.float16 and spec.block == (128,)
        return in_groups or (spec.format is INT4 and spec.scale is torch.float32 and spec.block == (-1,))

    @classmethod
    def build(
        cls, tensor_impl: Any, block_size: Any, shape: Any, quant_min: int | None = None, quant_max: int | None = None,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, dtype: torch.dtype | None = None, strides: Any = None,
    ) -> QT:  # fmt: skip
        """Groups: x = (code - 8) * (s_group * s_channel) in float16. Rows: x = code * (s_channel * 16) in float32."""
        codes, s_group, s_channel = tensor_impl.get_plain()
        shape, dtype = tuple(shape), dtype or torch.float16
        if s_group.numel():
            scale, data, lo, hi = s_group * s_channel.half(), codes.to(torch.uint8), 0, 15
            eight: Tensor | None = torch.full_like(scale, 8, dtype=torch.uint8)
        else:
            scale, data, lo, hi, eight = s_channel * 16, codes.to(torch.int8), -8, 7, None
        w = int_codes(data, scale.reshape(shape[0], -1), eight, (1, max(block_size)), dtype, lo, hi)
        return ready(w)

    @classmethod
    def from_hp_to_intx(
        cls, input_float: Tensor, block_size: tuple[int, ...], quant_min: int | None = None,
        quant_max: int | None = None, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
        _layout: Layout | None = None,
    ) -> QT:  # fmt: skip
        """Symmetric codes of the nearest values, per group of 128 or per row. Raises AssertionError for other blocks
        and ValueError for zero_point_domain None."""
        if zero_point_domain is None:
            raise ValueError("Please use ZeroPointDomain.NONE instead of None")
        layout, group = _layout or MarlinQQQLayout(), max(block_size)
        x = layout.pre_process(input_float)
        codes, s_group, s_channel, _ = _choose_qparams_and_quantize_affine_qqq(x, 4, group)
        pieces = MarlinQQQAQTTensorImpl.from_plain(codes, s_group, s_channel, layout)
        return cls.build(pieces, block_size, x.shape, quant_min, quant_max, zero_point_domain, x.dtype)


to_marlinqqq_quantized_intx = MarlinQQQTensor.from_hp_to_intx
