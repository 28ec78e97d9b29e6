"""GPTQ: rounds a weight matrix column by column; the columns not yet rounded compensate for the error of each.

Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv
2210.17323; equations and steps below are the paper's. For a layer y = W x with W [N, K], the objective (eq. 1) is

    minimise E|(Wq - W) x|^2 = tr(D H D^T),  D = Wq - W,  H = E[x x^T]

The paper's H = 2 X X^T differs by a factor that cancels. The first part of the file is Algorithm 1 as pure functions of
matrices: damped Hessian, Cholesky factor of its inverse, loop over blocks of columns. The second part has the solvers
"gptq", "gptaq" and "auto": options, candidate grids, notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.numerics import dequantize
from ...kernels.cpu.library import usable
from ...kernels.cpu.matrix_view import threads_for
from ...kernels.native.convert import gptq_block
from ..base import Solution, Solver, Task, register
from .block_search import solve_in_chunks, stack_solutions
from .qparam_grid import SHRINKS, QParamGrid, grid_candidates, make_grid
from .refinement import BestCandidate, output_errors, refit_and_descend, subtract_outer
from .rtn import Nearest, nearest_parts, output_error, total_error

# -- Algorithm 1 -------------------------------------------------------------------------------------------------------

# The paper's B ("Step 2: Lazy Batch-Updates"): errors propagate within a block column by column, to the later ones by
# one matrix product per block
COLUMNS_PER_BLOCK = 128
FLOAT64_INPUTS = 8192  # inputs up to which factors are in float64
_PANEL = 512  # rows or columns of a large matrix that are worked on at once


class CholeskyFactor(NamedTuple):
    """Upper triangular U [K, K] with H^-1 = U^T U, where H is damped and its columns are in ``order`` [K].

    damping     as a fraction of the mean of H's diagonal
    added       float32 [K], what was added to H's diagonal, in H's own order
    """

    upper: Tensor
    order: Tensor
    damping: float
    added: Tensor

    def in_order(self, x: Tensor) -> Tensor:
        """x [K, N] with its rows in ``order``."""
        return x.index_select(0, self.order)

    def in_own_order(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`in_order`."""
        return x.index_select(0, torch.argsort(self.order))


def inverse_cholesky(
    hessian: Tensor, damping: float, activation_order: bool, shrinkage: float = 0.0
) -> CholeskyFactor | None:
    """Cholesky factor of the inverse of a Hessian [K, K] ("Step 3: Cholesky Reformulation").

        H <- H + damping mean(diag H) I + shrinkage / (1 - shrinkage) diag(H);  H^-1 = U^T U

    With F the columns j, j + 1, .., row j of U is row j of H_F^-1 over the root of its diagonal, U_jj^2 = [H_F^-1]_jj:
    all that eq. 2 needs, so that the loop does not update an inverse (eq. 3, 5). U is the inverse of the factor R of
    H = R R^T, upper triangular: the Cholesky factor with columns in reverse. The paper factors H, inverts and factors
    the inverse, which takes twice the operations and is less accurate. Damping grows tenfold, up to the mean diagonal,
    until H is positive definite; None if it never is. In float64 up to 8192 inputs: float32 is too inaccurate if
    channels differ by orders of magnitude.

    activation_order    columns with the largest diagonal of H first ("act-order" of the authors' code)
    shrinkage           0 to 1: but for a factor, elements of H off its diagonal are multiplied by 1 - shrinkage
    """
    k = hessian.shape[0]
    diagonal = hessian.diagonal()
    mean = float(diagonal.double().mean())
    if not 0 < mean < float("inf"):
        return None
    order = (
        torch.argsort(diagonal, descending=True, stable=True)
        if activation_order
        else torch.arange(k, device=hessian.device, dtype=torch.int64)
    )
    dtype = torch.float64 if k <= FLOAT64_INPUTS else torch.float32
    backwards = order.flip(0)
    panels = [slice(begin, min(begin + _PANEL, k)) for begin in range(0, k, _PANEL)]
    while damping <= 1.0:
        # Such matrices dominate the memory of a layer: one is worked on in place, by panels
        h = torch.empty(k, k, dtype=dtype, device=hessian.device)
        for rows in panels:
            h[rows] = hessian[backwards[rows]].index_select(1, backwards)
        added = damping * mean + shrinkage / (1 - shrinkage) * diagonal
        h.diagonal().add_(added.index_select(0, backwards))
        least = 4 * torch.finfo(dtype).eps * h.diagonal()
        if cholesky_in_place(h) and bool((h.diagonal().square() > least).all()):  # smaller pivots are rounding errors
            invert_triangle(h)
            upper = torch.empty(k, k, dtype=torch.float32, device=hessian.device)
            for rows in panels:
                upper[rows] = h[k - rows.stop : k - rows.start].flip(0, 1)
            if bool(upper.isfinite().all()):
                return CholeskyFactor(upper, order, damping, added.float())
        damping = max(10 * damping, 1e-4)
    return None


def cholesky_in_place(h: Tensor) -> bool:
    """Replace a symmetric matrix [K, K] by its lower Cholesky factor, by panels of columns; False if a pivot is not
    positive. LAPACK's function needs a second matrix for the result."""
    k = h.shape[0]
    for begin in range(0, k, _PANEL):
        end = min(begin + _PANEL, k)
        corner, info = torch.linalg.cholesky_ex(h[begin:end, begin:end])
        if info:
            return False
        h[begin:end, begin:end] = corner
        h[begin:end, end:] = 0
        if end == k:
            break
        below = torch.linalg.solve_triangular(corner.mT, h[end:, begin:end], upper=True, left=False)
        h[end:, begin:end] = below
        for first in range(end, k, _PANEL):  # what is left, on and below the diagonal
            last = min(first + _PANEL, k)
            h[first:, first:last].addmm_(below[first - end :], below[first - end : last - end].t(), alpha=-1)
    return True


def invert_triangle(lower: Tensor) -> None:
    """Invert a lower triangular matrix [K, K] in place, by halves: K^3 / 3 operations, nearly all in matrix products.

    [A 0; B C]^-1 = [A^-1 0; -C^-1 B A^-1 C^-1]
    """
    k, dtype, device = lower.shape[0], lower.dtype, lower.device
    if k <= 128:
        lower.copy_(torch.linalg.solve_triangular(lower, torch.eye(k, dtype=dtype, device=device), upper=False))
        return
    half = (k // 2 + 63) // 64 * 64
    a, b, c = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    invert_triangle(a)
    invert_triangle(c)
    product = torch.empty_like(b)
    for begin in range(0, half, 256):  # half of each triangle is zero
        product[:, begin : begin + 256] = b[:, begin:] @ a[begin:, begin : begin + 256]
    for begin in range(0, k - half, 256):
        end = min(begin + 256, k - half)
        b[begin:end] = (c[begin:end, :end] @ product[:end]).neg_()


def quantize_columns(
    w: Tensor, grid: QParamGrid, f: CholeskyFactor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, values) [K, N] of a transposed weight [K, N] by the loop of Algorithm 1, and their damped error [N]. All
    of them have the columns of the weight in the factor's order. For each column j of each block:

        q = quant(w_j);  e_j = (w_j - q) / U_jj;  w_i -= e_j U_ji  for the columns i > j of the block     (eq. 2)

    and after the block, W -= E U for all later columns (eq. 4, by the factor). The grid is fixed beforehand; without
    clipping this is Babai's nearest plane algorithm (Chen et al. 2025, arXiv 2507.18553). The difference that is left
    is D = -E U, so that D H D^T, with H damped, is the sum of the squares of a row of E.

    keep    bool [K, N]: all other elements become the representable value nearest to zero
    """
    w, upper, ordered = w.clone(), f.upper, grid._replace(group=f.in_order(grid.group))
    k = w.shape[0]
    codes = torch.empty(w.shape, dtype=grid.spec.format.code_dtype, device=w.device)
    values, total = torch.empty_like(w), torch.zeros_like(w[0])
    for begin in range(0, k, COLUMNS_PER_BLOCK):
        end = min(begin + COLUMNS_PER_BLOCK, k)
        here, errors = slice(begin, end), torch.empty(end - begin, w.shape[1], device=w.device, dtype=torch.float32)
        keep_here, out = None if keep is None else keep[here], (codes[here], values[here], errors)
        _quantize_block(w[here], upper[here, here], ordered, begin, keep_here, out)
        total += errors.square().sum(0)
        if end < k:
            w[end:].addmm_(upper[begin:end, end:].t(), errors, alpha=-1)
    return codes, values, total


def _quantize_block(
    w: Tensor, upper: Tensor, grid: QParamGrid, begin: int, keep: Tensor | None, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Eq. 2 for a block w [k, N] of the columns from ``begin`` on. Writes codes, values and errors to ``out``. w is
    working memory. Native code has the bits of the loop here."""
    codes, values, errors = out
    terms = grid.terms(begin, begin + len(w)) if w.is_cpu and usable() is True else None
    if terms is not None:
        kept = None if keep is None else keep.float()
        lower, threads = upper.t().contiguous(), threads_for(w.numel())
        gptq_block(w, lower, (kept, *terms[:6]), terms[6:10], codes, values, errors, threads, table=terms.table)
        return
    nearest, diagonal = grid.rounder(begin, begin + len(w)), upper.diagonal().tolist()
    for j, (wanted, error) in enumerate(zip(w.unbind(), errors.unbind(), strict=True)):
        codes[j], v = nearest(j, wanted if keep is None else wanted * keep[j])
        values[j] = v
        torch.sub(wanted, v, out=error).div_(diagonal[j])
        subtract_outer(w[j + 1 :], upper[j, j + 1 :], error)


def undamped_error(damped: Tensor, difference: Tensor, hessian: Tensor, added: Tensor) -> Tensor:
    """d H d^T of each row of a transposed difference [K, N], in float64, from d (H + diag(added)) d^T as float32. By a
    product with H [K, K] for rows of which damping is nearly all."""
    weights = added.sqrt().unsqueeze(1)
    error = damped.double() - torch.linalg.vector_norm(difference * weights, dim=0, dtype=torch.float64).square()
    unsure = error < damped / 32
    if unsure.any():
        error[unsure] = output_error(difference.t()[unsure].double(), hessian.unsqueeze(0))
    return error


def asymmetric_target(weight: Tensor, drift: Tensor, f: CholeskyFactor, share: float) -> Tensor:
    """W + share W E[(x_float - x) x^T] H^-1, with the damped H: the target of GPTAQ (Li et al. 2025) in closed form. At
    share 1 and without damping this is the least-squares fit to W x_float on the calibration inputs."""
    k, upper = weight.shape[1], f.upper
    panels = [(begin, min(begin + _PANEL, k)) for begin in range(0, k, _PANEL)]  # no float64 copy of a whole matrix
    shift = (weight @ drift).index_select(1, f.order).double()
    # (shift U^T) U in place: half of U is zero, so that each panel needs only those that are not replaced yet
    for begin, end in panels:
        shift[:, begin:end] = shift[:, begin:] @ upper[begin:end, begin:].double().t()
    for begin, end in reversed(panels):
        shift[:, begin:end] = shift[:, :end] @ upper[:end, begin:end].double()
    return shift.index_select(1, torch.argsort(f.order)).mul_(share).add_(weight).float()


# -- solvers -----------------------------------------------------------------------------------------------------------

LEAST, MOST = 0.01, 0.3  # damping by the number of tokens
SHRINKAGE = 0.1  # with many tokens
AUTO = ("scheme", *SHRINKS[1:], "extreme", "mse", "weighted")


@register("gptq")
@dataclass(frozen=True)
class GPTQ(Solver):
    """Second-order rounding: later columns compensate for the rounding error of each column (Frantar et al. 2023).

        minimise tr((Wq - W) H (Wq - W)^T),  H = E[x x^T] + damping mean(diag H) I

    damping     grows tenfold, per layer, until H is positive definite. None: inputs / (2 tokens), at least 0.01 and at
                most 0.3, because statistics of few tokens do not generalize (docs/log.md). With fewer tokens than
                inputs this value is the minimum, also if damping is given
    shrinkage   0 to 1: how much of H's correlations is left out: elements off the diagonal are multiplied by
                1 - shrinkage, because they differ from text to text, and few tokens overstate them. None:
                inputs / (inputs + tokens), at least 0.1 (docs/log.md); 0 for convolutions, where neighbours are
                correlated in all signals
    activation_order    quantize columns with the largest inputs first; grids are fixed beforehand, so files need no
                permutation
    grids       candidate range rules of blocks; each row uses the one with the smallest output error.
                "scheme": the config's own rule; "mse"; "weighted"; a fraction of the range such as 0.9
    asymmetric  0 to 1: how far the target moves towards the float model's output at the same token, to compensate for
                errors of earlier layers (Li et al. 2025, GPTAQ; here in closed form:
                W + asymmetric W E[(x_float - x) x^T] H^-1). Without float inputs the target is the layer's own output
    sweeps      number of sweeps of scale refitting and coordinate descent afterwards; each row keeps the better result
    keep_zeros  weights that are exactly 0 (see :func:`sparsify_`) do not compensate for errors; they become the
                representable value nearest to 0

    Cost: O(N K^2 + K^3) per layer, N K^2 more for each further grid; large weights are solved some rows at a time. On
    the calibration inputs no row's output is further from its target (the weight's own output if asymmetric is 0) than
    with round-to-nearest.
    """

    damping: float | None = 0.01
    shrinkage: float | None = None
    activation_order: bool = True
    grids: tuple[str | float, ...] = ("scheme",)
    asymmetric: float = 0.0
    sweeps: int = 0
    keep_zeros: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "grids", (self.grids,) if isinstance(self.grids, str) else tuple(self.grids))
        if not self.grids:
            raise ValueError("gptq: grids must name at least one grid, such as ('scheme',)")
        if self.damping is not None and not 0 <= self.damping <= 1:
            raise ValueError(f"gptq: damping must be between 0 and 1, got {self.damping}")
        if self.shrinkage is not None and not 0 <= self.shrinkage < 1:
            raise ValueError(f"gptq: shrinkage must be at least 0 and below 1, got {self.shrinkage}")
        if not 0 <= self.asymmetric <= 1:
            raise ValueError(f"gptq: asymmetric must be between 0 and 1, got {self.asymmetric}")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("hessian",)

    @property
    def wants(self) -> tuple[str, ...]:
        return ("drift",) if self.asymmetric else ()

    @property
    def copies(self) -> int:
        return 22 if self.sweeps or len(self.grids) > 1 else 15 if self.asymmetric else 11

    def damping_of(self, inputs: int, tokens: int) -> float:
        """The initial damping. With fewer tokens than inputs, H is singular: errors in unseen directions seem to cost
        nothing, and the given damping may be too small."""
        suited = min(max(LEAST, inputs / max(1, 2 * tokens)), MOST)
        if self.damping is None:
            return suited
        return max(self.damping, suited) if 0 < tokens < inputs else self.damping

    def shrinkage_of(self, inputs: int, tokens: int) -> float:
        if self.shrinkage is not None:
            return self.shrinkage
        return max(SHRINKAGE, inputs / (inputs + tokens)) if tokens else 0.0

    def _grids(self, task: Task, scheme: QParamGrid, importance: Tensor) -> Iterator[QParamGrid]:
        """The candidates. That of the scheme, the first, is not made again."""
        if "scheme" in self.grids or task.spec.scale is None:
            yield scheme
        if task.spec.scale is not None:
            others = tuple(name for name in self.grids if name != "scheme")
            for _, params in grid_candidates(task, others, importance):
                yield make_grid(params, task.spec, task.weight.shape)

    def solve(self, task: Task) -> Solution:
        hessians, drifts = task.stats["hessian"], task.stats.get("drift") if self.asymmetric else None
        if hessians.shape[0] == 1:
            return self._solve(task, hessians[0], None if drifts is None else drifts[0])
        if not task.spec.rows_independent(task.weight.shape):
            return Nearest().solve(task)._replace(note="rounded to nearest: blocks span groups of the convolution")
        # A grouped convolution: each group of outputs has its own inputs
        solved = []
        for g, rows in enumerate(task.weight.chunk(hessians.shape[0])):
            part = Task(task.name, rows, task.spec, task.rule, task.eps, tokens=task.tokens, patches=task.patches)
            solved.append(self._solve(part, hessians[g], None if drifts is None else drifts[g]))
        return stack_solutions(solved)

    def _solve(self, task: Task, hessian: Tensor, drift: Tensor | None) -> Solution:
        """A matrix whose rows have the same inputs: hessian and drift [K, K]."""
        damping = self.damping_of(hessian.shape[0], task.tokens)
        shrinkage = self.shrinkage_of(hessian.shape[0], 0 if task.patches else task.tokens)
        f = inverse_cholesky(hessian, damping, self.activation_order, shrinkage)
        return solve_in_chunks(task, lambda part, _: self._solve_rows(part, hessian, drift, f, damping))

    def _solve_rows(
        self, task: Task, hessian: Tensor, drift: Tensor | None, f: CholeskyFactor | None, damping: float
    ) -> Solution:
        (n, k), shape, h = task.weight.shape, task.weight.shape, hessian.unsqueeze(0)
        rounded, rounded_values = nearest_parts(task)
        of_nearest = output_error((rounded_values - task.weight).double(), h)
        nearest = max(0.0, float(of_nearest.sum()))
        if f is None:
            why = "inputs are all zero" if not hessian.any() else "the Hessian is not positive definite at any damping"
            return Solution(rounded, nearest, nearest, f"rounded to nearest: {why}")
        target = task.weight if drift is None else asymmetric_target(task.weight, drift, f, self.asymmetric)
        scheme = make_grid(next(grid_candidates(task, ("scheme",), None))[1], task.spec, shape)
        # Transposed from here on, [K, N]: access to a column of the weight is contiguous
        w, rounded_codes, rounded_values = (x.t().contiguous() for x in (target, rounded.codes[:n, :k], rounded_values))
        keep = task.weight.t() != 0 if self.keep_zeros else None
        keep = None if keep is None or bool(keep.all()) else keep.contiguous()

        # Candidates are compared under damping, which generalizes better: d (H + diag(added)) d^T
        added = f.added

        def errors(values: Tensor) -> tuple[Tensor, Tensor]:
            """Of each row, without and with damping."""
            off = values - w
            error = output_errors(off, hessian)
            return error, error + added @ off.square_()

        if drift is None:
            exact = of_nearest
            with_damping = (exact + added @ (rounded_values - w).square_()).float()
        else:
            exact, with_damping = errors(rounded_values)
        by_loop = k <= FLOAT64_INPUTS  # the errors of the loop are as accurate as its factor
        found = BestCandidate(scheme, *map(f.in_order, (rounded_codes, rounded_values)), with_damping, shape)
        ordered, ordered_keep = f.in_order(w), None if keep is None else f.in_order(keep)
        for g in self._grids(task, scheme, hessian.diagonal()):
            codes, values, damped_error = quantize_columns(ordered, g, f, ordered_keep)
            found.offer(g, codes, values, damped_error if by_loop else errors(f.in_own_order(values))[1])
        found.codes, found.values = map(f.in_own_order, (found.codes, found.values))
        if self.sweeps:
            damped = hessian.clone()
            damped.diagonal().add_(added)
            refit_and_descend(found, w, damped, self.sweeps, keep=keep)
        by_loop = by_loop and not self.sweeps
        # At most round-to-nearest's error: guaranteed without damping
        best = BestCandidate(scheme, rounded_codes, rounded_values, exact, shape)
        without = undamped_error(found.error, found.values - w, hessian, added) if by_loop else errors(found.values)[0]
        best.offer(found.grid, found.codes, found.values, without)
        wanted = damping if self.damping is None else self.damping
        note = "" if f.damping == wanted else f"damping raised to {f.damping:g}"
        if self.asymmetric and drift is None and self.name == GPTAQ.name:  # "auto" uses drift only if available
            note = "; ".join(filter(None, (note, "target is its own output: no float inputs")))
        solved = best.grid.parts(task.weight, best.codes)
        values = dequantize(solved, task.spec, shape)
        if by_loop and drift is None and torch.equal(values.t(), best.values):
            error = max(0.0, float(best.error.double().sum()))
        else:
            error = total_error(values - task.weight, h)
        return Solution(solved, error, nearest, note)


@register("auto")
@dataclass(frozen=True)
class Auto(GPTQ):
    """GPTQ with all grids and refinement: each row of each layer uses the range rule with the smallest output error on
    the calibration inputs, because no fixed rule is best on all models. It compensates for half of the errors of
    earlier layers (docs/algorithms/auto.md)."""

    damping: float | None = None
    grids: tuple[str | float, ...] = AUTO
    asymmetric: float = 0.5
    sweeps: int = 2


@register("gptaq")
@dataclass(frozen=True)
class GPTAQ(GPTQ):
    """GPTQ whose target is the float model's output, on the inputs from the quantized layers before it."""

    asymmetric: float = 0.5
