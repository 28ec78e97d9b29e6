"""Refits scales for fixed codes: closed-form least squares of the output error."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import blocks
from ...core.qparams import Params
from ...core.spec import QuantSpec
from .qparam_grid import QParamGrid, make_grid

_CHUNK = 1 << 24  # elements of a temporary


def refit(target: Tensor, codes: Tensor, g: QParamGrid, hessian: Tensor) -> QParamGrid | None:
    """The grid whose scales (and offsets) minimise tr(D H D^T) for the given codes: for each row with blocks B_i of
    inputs and u = codes - zero point,

        (B_i u) H (B_j u)^T s_j = (B_i u) H w^T

    target, codes [N, K]; hessian [K, K]. None if rows share scales, or if scales are quantized themselves. Scales whose
    sign would change, and rows with a singular system, keep their values.
    """
    spec, (n, k) = g.spec, target.shape
    if isinstance(spec.scale, QuantSpec) or isinstance(spec.offset, QuantSpec) or spec.scale is None:
        return None
    if not spec.rows_independent(target.shape):
        return None
    chosen = g.chosen
    assert chosen.scale is not None
    size = blocks.resolve(spec.block, target.shape)[1]
    groups = chosen.scale.shape[1]
    units = spec.format.decode(codes, torch.float32) - spec.mid
    if g.columns.zero_point is not None:
        units = units - g.columns.zero_point.t().float()
    bases = [units] if spec.offset is None else [units, torch.ones_like(units)]
    width = len(bases) * groups
    scale, offset = chosen.scale.clone(), None if chosen.offset is None else chosen.offset.clone()
    pull = target @ hessian
    step = max(1, _CHUNK // max(1, k * width))
    for begin in range(0, n, step):
        rows = slice(begin, min(begin + step, n))
        basis = torch.cat([_by_group(u[rows], groups, size) for u in bases], 1)  # [rows, width, K]
        system = basis @ hessian @ basis.mT
        wanted = (basis @ pull[rows].unsqueeze(-1)).squeeze(-1)
        system.diagonal(dim1=1, dim2=2).add_(1e-6 * system.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-30)
        found, info = torch.linalg.solve_ex(system, wanted)
        new = found[:, :groups]
        good = (info == 0).unsqueeze(1) & found.isfinite().all(1, keepdim=True) & (new * scale[rows] > 0)
        scale[rows] = torch.where(good, new.to(scale.dtype), scale[rows])
        if offset is not None:
            offset[rows] = torch.where(good, found[:, groups:].to(offset.dtype), offset[rows])
    return make_grid(Params(scale, chosen.zero_point, offset), spec, target.shape)


def _by_group(u: Tensor, groups: int, size: int) -> Tensor:
    """[R, K] as [R, groups, K], zero outside each group."""
    rows, k = u.shape
    out = torch.zeros(rows, groups, k, device=u.device, dtype=torch.float32)
    for i in range(groups):
        out[:, i, i * size : (i + 1) * size] = u[:, i * size : (i + 1) * size]
    return out
