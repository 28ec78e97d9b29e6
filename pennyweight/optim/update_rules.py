"""Update rules on floats: the reference implementation of every optimizer here.

Each rule changes p and its states in place, with the same operations as torch.optim's single-tensor loop, so that
float32 states give bit-identical results; so does native code, except for :func:`root`. ``c`` are the coefficients of
the step from ``numbers`` of the optimizer class; src/optimizer.h has them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[float], bool], None]


def adam(p: Tensor, g: Tensor, states: Sequence[Tensor], c: Sequence[float], nesterov: bool = False) -> None:
    """m += (1 - beta1)(g - m); v = beta2 v + (1 - beta2) g^2; p -= rate * m / (sqrt(v) / correction + eps).

    With a third state v is replaced by its maximum so far (AMSGrad). Kingma and Ba 2015; Loshchilov and Hutter 2019.
    """
    decay, l2, one_less_beta1, beta2, one_less_beta2, correction, eps, rate = c
    m, v, *peak = states
    g = _decayed(p, g, decay, l2)
    m.lerp_(g, one_less_beta1)
    v.mul_(beta2).addcmul_(g, g, value=one_less_beta2)
    if peak:
        v = torch.maximum(peak[0], v, out=peak[0])
    p.addcdiv_(m, (root(v) / correction).add_(eps), value=-rate)


def root(v: Tensor) -> Tensor:
    """torch's square root. A CPU vector library may be off by one bit; native code is correctly rounded."""
    return v.sqrt()


def lion(p: Tensor, g: Tensor, states: Sequence[Tensor], c: Sequence[float], nesterov: bool = False) -> None:
    """p -= rate * sign(m + (1 - beta1)(g - m)); m += (1 - beta2)(g - m). Chen et al. 2023."""
    decay, l2, one_less_beta1, one_less_beta2, rate = c
    (m,) = states
    g = _decayed(p, g, decay, l2)
    p.sub_(m.lerp(g, one_less_beta1).sign() * rate)
    m.lerp_(g, one_less_beta2)


def sgd(p: Tensor, g: Tensor, states: Sequence[Tensor], c: Sequence[float], nesterov: bool = False) -> None:
    """m = momentum * m + (1 - dampening) g; p -= rate * m, or rate * (g + momentum * m) with Nesterov's."""
    decay, l2, momentum, share, rate = c
    (m,) = states
    g = _decayed(p, g, decay, l2)
    m.mul_(momentum).add_(g, alpha=share)
    p.add_(g.add(m, alpha=momentum) if nesterov else m, alpha=-rate)


def _decayed(p: Tensor, g: Tensor, decay: float, l2: float) -> Tensor:
    if decay != 1:
        p.mul_(decay)
    return g.add(p, alpha=l2) if l2 else g
