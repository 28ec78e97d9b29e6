"""GaLore: Adam on gradients that are projected to a low rank (Zhao et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AdamW", "GaLoreProjector", "TestGaLoreProjector", "get_orthogonal_matrix", "make_copy"]


def make_copy(*args: Tensor) -> list[Tensor]:
    """Copies without gradients."""
    return [t.detach().clone() for t in args]


def get_orthogonal_matrix(weights: Tensor, rank: int, type: str) -> Any:
    """The first ``rank`` singular vectors: "left" U [rows, rank], "right" V^T [rank, columns], "full" both."""
    if type not in ("left", "right", "full"):
        raise ValueError(f"type should be left, right or full, got {type!r}")
    u, _, vh = torch.linalg.svd(weights.detach().float(), full_matrices=False)
    left, right = u[:, :rank].to(weights.dtype), vh[:rank].to(weights.dtype)
    return [left, right] if type == "full" else left if type == "left" else right


class GaLoreProjector:
    """Projects gradients of a matrix to ``rank``, by singular vectors that are renewed each ``update_proj_gap`` steps.

    proj_type  "std": the shorter side is projected away last: V for tall matrices, U for wide ones; "reverse_std": the
               other; "left": U; "right": V; "full": both sides
    scale      factor of the updates
    """

    def __init__(
        self, rank: int = 128, verbose: bool = False, update_proj_gap: int = 200, scale: float = 1.0,
        proj_type: str = "std",
    ) -> None:  # fmt: skip
        if proj_type not in ("std", "reverse_std", "left", "right", "full"):
            raise ValueError(f"proj_type must be std, reverse_std, left, right or full, got {proj_type!r}")
        self.rank, self.verbose, self.update_proj_gap = rank, verbose, update_proj_gap
        self.scale, self.proj_type = scale, proj_type
        self.ortho_matrix: Any = None
        self._side = proj_type

    def project(self, full_rank_grad: Tensor, iter: int) -> Tensor:
        """G V, U^T G, or U^T G V."""
        if self.ortho_matrix is None or iter % self.update_proj_gap == 0:
            tall = full_rank_grad.shape[0] >= full_rank_grad.shape[1]
            sides = {"std": ("left", "right")[tall], "reverse_std": ("right", "left")[tall]}
            self._side = sides.get(self.proj_type, self.proj_type)
            self.ortho_matrix = self.get_orthogonal_matrix(full_rank_grad, self.rank, self._side)
        m = self.ortho_matrix
        if self._side == "full":
            return m[0].t() @ full_rank_grad @ m[1].t()
        return full_rank_grad @ m.t() if self._side == "right" else m.t() @ full_rank_grad

    def project_back(self, low_rank_grad: Tensor) -> Tensor:
        """The low-rank matrix in the space of the gradient, times ``scale``."""
        m = self.ortho_matrix
        if self._side == "full":
            return m[0] @ low_rank_grad @ m[1] * self.scale
        return (low_rank_grad @ m if self._side == "right" else m @ low_rank_grad) * self.scale

    def get_orthogonal_matrix(self, weights: Tensor, rank: int, type: str) -> Any:
        """:func:`get_orthogonal_matrix`."""
        return get_orthogonal_matrix(weights, rank, type)


class TestGaLoreProjector(GaLoreProjector):
    """A "std" projector whose matrix is renewed by :meth:`update_orthogonal_matrix` only."""

    __test__ = False  # its name is not that of a test

    def __init__(self, rank: int = 128, scale: float = 1.0, proj_type: str = "std") -> None:
        if proj_type != "std":
            raise ValueError(f"Only std projection is supported, got {proj_type!r}")
        super().__init__(rank, scale=scale)

    def update_orthogonal_matrix(self, full_rank_grad: Tensor) -> None:
        self.ortho_matrix = None
        super().project(full_rank_grad, 1)

    def project(self, full_rank_grad: Tensor, iter: int = 1) -> Tensor:
        if self.ortho_matrix is None:
            raise ValueError("TestGaLoreProjector.project: call update_orthogonal_matrix(gradient) before")
        return super().project(full_rank_grad, 1)


class AdamW(torch.optim.Optimizer):
    """AdamW. Groups with the key ``rank`` project their gradients, which must be matrices, to that rank.

    Such a group also has ``update_proj_gap``, ``scale`` and ``proj_type``, see :class:`GaLoreProjector`; by default
    200, 0.25 and "std". correct_bias: the bias correction of Adam. no_deprecation_warning: no effect. Weight decay
    comes after the step. A state dict holds the projections as ``projector``.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.0, correct_bias: bool = True, no_deprecation_warning: bool = False,
    ) -> None:  # fmt: skip
        if lr < 0 or eps < 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"lr and eps must be >= 0 and betas in [0, 1), got {lr}, {eps}, {betas}")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. closure: computes gradients and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        grad, state = p.grad, self.state[p]
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError("AdamW does not support sparse gradients; use torch.optim.SparseAdam")
        step = int(state.setdefault("step", 0))
        projector = None
        if "rank" in group:
            if grad.ndim != 2:
                raise ValueError(f"a group with rank needs matrices, got a parameter of shape {list(p.shape)}")
            projector = state.setdefault("projector", GaLoreProjector(
                group["rank"], update_proj_gap=group.get("update_proj_gap", 200), scale=group.get("scale", 0.25),
                proj_type=group.get("proj_type", "std"),
            ))  # fmt: skip
            grad = projector.project(grad, step)
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        state["step"] = step + 1
        beta1, beta2 = group["betas"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = group["lr"]
        if group["correct_bias"]:
            size = size * math.sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))
        update = mean / square.sqrt().add_(group["eps"])
        p.add_(update if projector is None else projector.project_back(update), alpha=-size)
        if group["weight_decay"] > 0:
            p.add_(p, alpha=-group["lr"] * group["weight_decay"])
