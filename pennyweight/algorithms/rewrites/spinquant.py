"""SpinQuant: a learned rotation of the residual stream that minimises the divergence of the quantized model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...core.numerics import fake_quantize
from ...core.spec import ActivationSpec
from ...distributed import all_reduce
from ...kernels.activation import quantize_activation
from ...planning.scheme import Scheme
from ..calibration.block_order import inference_mode
from ..calibration.float32_products import products_in_float32, run_batch
from ..tuners import losses
from ..tuners.distill import batch_arguments, shuffled_forever
from .hadamard import householder
from .residual_stream import ResidualStream

HELD_OUT = 0.25


def learn_rotation(
    model: nn.Module, stream: ResidualStream, start: Tensor, target: Mapping[str, Scheme | None], batches: Any,
    steps: int, rate: float,
) -> tuple[Tensor, str]:  # fmt: skip
    """(float64 rotation of the stream's width, note for the report). model: gains folded, nothing rotated yet.

        minimise KL(float || quantized) over Q = start (I + a)^-1 (I - a),  a^T = -a

    Adam trains a through the Cayley transform (instead of descent on the manifold as in SpinQuant, Liu et al. 2024);
    the rate decays to zero. If the scheme quantizes inputs, only inputs are quantized during training, because a solver
    chooses the weight codes afterwards; otherwise weights are rounded to nearest. ``start`` is kept if it is better on
    the held-out data.
    """
    batches = list(batches)
    trained, guard = losses.split_batches(batches, HELD_OUT)
    student = Student(model, stream, target)
    with torch.inference_mode(False), inference_mode(model), torch.enable_grad():
        expected = losses.references(model, guard)
        measure = losses.divergence(None, run_batch(model, guard[0]))

        def divergence_of(q: Tensor) -> float:
            with torch.no_grad():
                found = [measure(y, student(q, b), b) for b, y in zip(guard, expected, strict=True)]
            return float(all_reduce.reduce_sum(torch.stack(found).double().mean()))

        n = stream.width - stream.centred
        free = torch.zeros(n, n, dtype=torch.float64, requires_grad=True, device="cpu")
        optimizer = torch.optim.Adam([free], lr=rate)
        before = divergence_of(start)
        order = shuffled_forever(len(trained))
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
            batch = trained[next(order)]
            with torch.no_grad():
                wanted = losses.compared_tensor(run_batch(model, batch))
            with products_in_float32(model.parameters()):
                loss = measure(wanted, student(start @ cayley(free, stream.centred), batch), batch)
                (grad,) = torch.autograd.grad(loss, [free])
            free.grad = all_reduce.reduce_sum(grad)
            optimizer.step()
        q = (start @ cayley(free, stream.centred)).detach()
        after = divergence_of(q)
    if not after < before:
        return start, f"learned rotation undone: held-out divergence {before:.3g} -> {after:.3g}"
    return q, f"rotation learned: held-out divergence {before:.3g} -> {after:.3g}"


def cayley(free: Tensor, centred: bool) -> Tensor:
    """The orthogonal matrix (I + a)^-1 (I - a), a = free - free^T; centred: one row larger, preserving (1, .. 1)."""
    a, eye = free - free.t(), torch.eye(len(free), dtype=free.dtype, device="cpu")
    q = torch.linalg.solve(eye + a, eye - a)
    if not centred:
        return q
    swap = householder(len(free) + 1)
    return swap @ torch.block_diag(torch.ones(1, 1, dtype=free.dtype, device="cpu"), q) @ swap


class Student:
    """The quantized model under a rotation: ``student(q, batch)``, differentiable in q."""

    def __init__(self, model: nn.Module, stream: ResidualStream, target: Mapping[str, Scheme | None]) -> None:
        self.model, self.target = model, {name: s for name, s in target.items() if s is not None}
        self.inputs = any(map(_dynamic, self.target.values()))
        names: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        self.rotated: list[tuple[list[str], Callable[[Tensor], Tensor]]] = []
        readers = {id(r.weight): r for _, found in stream.norms for r in found}
        writers = {id(w.weight): w for w in stream.writers}
        for key, m in {**readers, **writers}.items():
            self.rotated.append((names[key], self._weight(m, key in readers, key in writers)))
            if key in writers and m.kind != "embedding" and m.bias is not None:
                self.rotated.append((names[id(m.bias)], _last(m.bias)))
        for _, module, param in stream.parameters:
            p = module._parameters[param]
            assert p is not None
            self.rotated.append((names[id(p)], _last(p)))

    def __call__(self, q: Tensor, batch: Any) -> Any:
        q = q.float()
        state = {name: value for names, rotate in self.rotated for value in (rotate(q),) for name in names}
        acts = {}
        if self.inputs:
            weights = {**dict(self.model.named_parameters(remove_duplicate=False)), **state}
            acts = {id(weights[n]): s.act for n, s in self.target.items() if _dynamic(s) and s.act is not None}
        else:
            state = {name: self._rounded(name, value) for name, value in state.items()}
        with products_in_float32(self.model.parameters()), _Inputs(acts):
            output = torch.func.functional_call(self.model, state, *batch_arguments(batch), tie_weights=False)
        return losses.compared_tensor(output)

    def _weight(self, m: Any, reads: bool, writes: bool) -> Callable[[Tensor], Tensor]:
        def rotate(q: Tensor) -> Tensor:
            x = m.view.float()
            q = q.to(x.device)
            if m.kind == "embedding":
                return (x @ q).to(m.weight.dtype)
            x = x @ q if reads else x
            x = torch.tensordot(q.t(), x, 1) if writes else x
            return (x.t() if m.transposed else x).to(m.weight.dtype)

        return rotate

    def _rounded(self, name: str, value: Tensor) -> Tensor:
        scheme = self.target.get(name)
        return value if scheme is None else fake_quantize(value, scheme.weight, scheme.rule, scheme.eps)


class _Inputs(TorchFunctionMode):
    """Quantizes the input of each linear product with one of these weights, at the same point as in deployment: after
    any preprocessing in the layer."""

    def __init__(self, acts: Mapping[int, ActivationSpec]) -> None:
        super().__init__()
        self.acts = acts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) > 1 and id(args[1]) in self.acts:
            args = (quantize_activation(args[0], self.acts[id(args[1])], None, None), *args[1:])
        return func(*args, **(kwargs or {}))


def _dynamic(scheme: Scheme) -> bool:
    return scheme.act is not None and scheme.act.mode == "dynamic"


def _last(p: Tensor) -> Callable[[Tensor], Tensor]:
    """Rotates a parameter that is added to the stream directly."""
    return lambda q: (p.detach().float() @ q.to(p.device)).to(p.dtype)
