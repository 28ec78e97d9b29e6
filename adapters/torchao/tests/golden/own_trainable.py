"""A trainable tensor class of a user's own, over whichever TorchAOBaseTensor and primitives it is given."""

import torch
import torch.nn.functional as F
from torch import nn


def make(base, prim):
    """(class, differentiable constructor) of int8 weights with a scale a row, which optimizers can update in place."""
    lo, hi = -128, 127

    class Trainable(base):
        tensor_data_names = ["qdata", "scale"]  # noqa: RUF012
        tensor_attribute_names = ["dtype"]  # noqa: RUF012

        def __new__(cls, qdata, scale, dtype, requires_grad=False):
            return torch.Tensor._make_wrapper_subclass(
                cls, qdata.shape, dtype=dtype, device=qdata.device, requires_grad=requires_grad
            )

        def __init__(self, qdata, scale, dtype, requires_grad=False):
            self.qdata, self.scale = qdata, scale

        @classmethod
        def from_float(cls, x):
            block = (1, x.shape[1])
            scale, zero = prim.choose_qparams_affine(x, prim.MappingType.SYMMETRIC, block, torch.int8, lo, hi, eps=1e-7)
            return cls(prim.quantize_affine(x, block, scale, zero, torch.int8, lo, hi), scale, x.dtype)

        def dequantize(self):
            block = (1, self.shape[1])
            return prim.dequantize_affine(
                self.qdata, block, self.scale, None, torch.int8, lo, hi, output_dtype=self.dtype
            )

    class Make(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return Trainable.from_float(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return F.linear(x, w.dequantize())

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.dequantize(), grad.t() @ x

    @Trainable.implements_torch_function([F.linear])
    def _(func, types, args, kwargs):
        return Linear.apply(args[0], args[1])

    aten = torch.ops.aten

    @Trainable.implements([aten.add_.Tensor])
    def _(func, types, args, kwargs):
        new = Trainable.from_float(args[0].dequantize().add(args[1], alpha=kwargs.get("alpha", 1)))
        args[0].qdata.copy_(new.qdata)
        args[0].scale.copy_(new.scale)
        return args[0]

    @Trainable.implements([aten.add.Tensor])
    def _(func, types, args, kwargs):
        a, b = (t.dequantize() if isinstance(t, Trainable) else t for t in args[:2])
        return a.add(b, alpha=kwargs.get("alpha", 1))

    return Trainable, Make.apply


def train(base, prim, steps=8):
    """(losses, codes and scales of both layers) after so many steps of SGD with momentum and weight decay."""
    torch.manual_seed(0)
    trainable, construct = make(base, prim)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 4, bias=False))
    x, label = torch.randn(24, 16), torch.randint(0, 4, (24,))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(construct(layer.weight.detach()), requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    weights = [model[i].weight for i in (0, 2)]
    assert all(isinstance(w, trainable) for w in weights)
    return {
        "losses": torch.stack(losses),
        **{
            f"{name}.{i}": getattr(w, name).detach().clone()
            for i, w in enumerate(weights)
            for name in ("qdata", "scale")
        },
    }
