"""Prepared modules: the same objects with another class, whose forward uses quantized weights.

Names, parameters and their identity, hooks and ties do not change. Held parts of a weight are buffers or parameters
next to it: ``weight_scale``, ``weight_offset``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.model_arguments import check_arguments
from ...core.numerics import dequantize, fake_quantize, quantize
from ...kernels.activation import autocast_dtype, quantize_activation
from ...planning.scheme import stored_scale
from ...quantize.pipeline import quantize_
from .fake_quantize import FakeQuantizer, QuantizeWeight, fake_quantized_weight
from .straight_through import Addmm, ClampSTE, Linear, WithValue, clamp_ste


class FakeQuantized(nn.Module):
    """Base class of prepared modules.

    fake_quantized      quantization target of each prepared parameter, by name
    fake_quant_enabled  whether forward quantizes; see :func:`enable_fake_quant`
    """

    plain: type[nn.Module]  # the original class
    fake_quantized: dict[str, FakeQuantizer]
    fake_quant_enabled: bool

    def held(self, param: str) -> dict[str, Tensor]:
        """Held parts of a parameter, by name of the part."""
        return {name: getattr(self, f"{param}_{name}") for name in self.fake_quantized[param].names}

    def quantized_param(self, param: str = "weight", act: bool = True) -> Tensor:
        """The quantized weight; its gradient goes to the latent weight."""
        fake, tensors = self.fake_quantized[param], self.held(param)
        learnt = [tensors.pop(name) for name in fake.weight_learned]
        return QuantizeWeight.apply(getattr(self, param), fake, tensors, act, *learnt)

    def traceable_param(self, param: str = "weight") -> Tensor:
        """Same as :meth:`quantized_param`, as a float tensor."""
        return fake_quantized_weight(self.fake_quantized[param], getattr(self, param), self.held(param))

    def _static(self, param: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of a static activation."""
        scheme, tensors = self.fake_quantized[param].scheme, self.held(param)
        scale = tensors.get("act_scale")
        scale = stored_scale(scheme.act_scale, x.device) if scale is None else scale
        zero = scheme.act_zero_point
        return scale, None if zero is None else torch.tensor([zero], device=x.device)

    def clamped_input(self, x: Tensor, param: str = "weight") -> Tensor:
        """The float input for a kernel that quantizes it; with the gradients of the quantized input."""
        act = self.fake_quantized[param].scheme.act
        if act is None or not act.has_fixed_range:
            return x
        return ClampSTE.apply(x, *self._static(param, x), act.spec, False)

    def input(self, x: Tensor, param: str = "weight") -> Tensor:
        """The fake-quantized input."""
        act = self.fake_quantized[param].scheme.act
        if act is None:
            return x
        if act.has_fixed_range:
            if torch.compiler.is_compiling():
                return clamp_ste(x, *self._static(param, x), act.spec)
            return ClampSTE.apply(x, *self._static(param, x), act.spec, True)
        if act.mode == "static":
            with torch.no_grad():
                y = quantize_activation(x, act, *self._static(param, x))
            return y + (x - x.detach())
        if torch.compiler.is_compiling():
            with torch.no_grad():
                y = dequantize(quantize(x, act.spec, act.rule, act.eps), act.spec, x.shape, x.dtype)
            return y + (x - x.detach())
        return fake_quantize(x, act.spec, act.rule, act.eps)

    # -- class and held parts ----------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """.to(), .half() and the like; held parts keep their dtype, as scales of a quantized weight do."""
        names = [f"{p}_{name}" for p, fake in self.fake_quantized.items() for name in fake.names]
        before = {name: getattr(self, name).data for name in names}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype is not old.dtype:
                new.data = old.to(new.device)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unpickle_module, (self.plain,), dict(self.__dict__)

    def extra_repr(self) -> str:
        fakes = ", ".join(f"{name}={fake.scheme}" for name, fake in self.fake_quantized.items())
        return ", ".join(filter(None, (super().extra_repr(), f"fake-quantized {fakes}" if fakes else "")))


class FakeQuantizedLinear(FakeQuantized, nn.Linear):
    """A linear layer with fake-quantized weight and input.

    Created by ``quantize_``. The constructor, ``from_linear`` and ``to_linear`` follow torchao; configs are those of
    :class:`QATConfig`, and a given layer is changed in place.
    """

    plain, input_is_seen = nn.Linear, True

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, activation_config: Any = None,
        weight_config: Any = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, *args, **kwargs)
        fake_(self)
        _prepare_alone(self, activation_config, weight_config)

    @classmethod
    def from_linear(cls, mod: nn.Linear, activation_config: Any = None, weight_config: Any = None) -> Any:
        return _prepare_alone(mod, activation_config, weight_config)

    def to_linear(self) -> Any:
        return _bare(self)

    def forward(self, input: Tensor) -> Tensor:
        if not self.fake_quant_enabled:
            return super().forward(input)
        if torch.compiler.is_compiling():
            return F.linear(self.input(_cast(input)), self.traceable_param(), self.bias)
        if self.fake_quantized["weight"].scheme.act is None:
            return F.linear(input, self.quantized_param(), self.bias)
        return Linear.apply(self.clamped_input(input), self.quantized_param(), self.bias)


class FakeQuantizedEmbedding(FakeQuantized, nn.Embedding):
    """An embedding with fake-quantized rows; see :class:`FakeQuantizedLinear`."""

    plain = nn.Embedding

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, weight_config: Any = None,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        rest = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        super().__init__(num_embeddings, embedding_dim, *rest, *args, **kwargs)
        fake_(self)
        _prepare_alone(self, None, weight_config)

    @classmethod
    def from_embedding(cls, mod: nn.Embedding, weight_config: Any = None) -> Any:
        return _prepare_alone(mod, None, weight_config)

    def to_embedding(self) -> Any:
        return _bare(self)

    def forward(self, input: Tensor) -> Tensor:
        if not self.fake_quant_enabled:
            return super().forward(input)
        table = self.traceable_param() if torch.compiler.is_compiling() else self.quantized_param()
        return F.embedding(
            input, table, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


class _Convolution(FakeQuantized):
    input_is_seen = True

    def forward(self, input: Tensor) -> Tensor:
        if not self.fake_quant_enabled:
            return super().forward(input)  # type: ignore[misc]
        conv: Any = self._conv_forward
        if torch.compiler.is_compiling():
            return conv(self.input(input), self.traceable_param(), self.bias)  # type: ignore[no-any-return]
        y = conv(self.input(input), self.quantized_param(act=False), self.bias)
        if self.fake_quantized["weight"].scheme.act is None:
            return y  # type: ignore[no-any-return]
        with torch.no_grad():  # by the kernel that runs when deployed, which sums integer codes
            deployed = conv(input, self.quantized_param(), self.bias)
        return WithValue.apply(y, deployed)


class FakeQuantizedConv1d(_Convolution, nn.Conv1d):
    """A convolution with fake-quantized weight and input."""

    plain = nn.Conv1d


class FakeQuantizedConv2d(_Convolution, nn.Conv2d):
    """A convolution with fake-quantized weight and input."""

    plain = nn.Conv2d


class FakeQuantizedConv3d(_Convolution, nn.Conv3d):
    """A convolution with fake-quantized weight and input."""

    plain = nn.Conv3d


class _Addmm(FakeQuantized):
    """transformers' Conv1D: x @ weight + bias, weight [in, out]."""

    input_is_seen = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.fake_quant_enabled:
            return super().forward(x)
        shape = (*x.shape[:-1], self.nf)
        x = x.reshape(-1, x.shape[-1])
        if torch.compiler.is_compiling():
            return torch.addmm(self.bias, self.input(x), self.traceable_param()).view(shape)  # type: ignore[arg-type]
        return Addmm.apply(self.clamped_input(x), self.quantized_param(), self.bias).view(shape)


class _Shadowed(FakeQuantized):
    """Any other module: during its forward, its parameters are replaced by the quantized ones.

    This includes parameters it reads from another module, as attention does with its output layer. If the op quantizes
    its input, the weight gradient uses the float input.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _shadows(self):
            return super().forward(*args, **kwargs)


class FakeQuantizedMultiheadAttention(_Shadowed, nn.MultiheadAttention):
    """Attention with fake-quantized projection weights."""

    plain = nn.MultiheadAttention


def _read(module: Any) -> Iterator[tuple[Any, str]]:
    """Parameters that a module's forward reads: its own, and for attention those of its output layer."""
    yield from ((module, name) for name in module.fake_quantized)
    if isinstance(module, nn.MultiheadAttention) and isinstance(module.out_proj, FakeQuantized):
        yield from ((module.out_proj, name) for name in module.out_proj.fake_quantized)


@contextmanager
def _shadows(module: Any) -> Iterator[None]:
    """Sets quantized weights as instance attributes, which take precedence over parameters."""
    read = [(m, name, m.__dict__.get(name)) for m, name in _read(module) if m.fake_quant_enabled]
    try:
        for m, name, _ in read:
            weight = m.traceable_param(name) if torch.compiler.is_compiling() else m.quantized_param(name)
            m.__dict__[name] = weight
        yield
    finally:
        for m, name, before in read:
            m.__dict__.pop(name, None)
            if before is not None:
                m.__dict__[name] = before
        if isinstance(module, nn.RNNBase):  # its own list of weights would keep the graph of this call alive
            module._update_flat_weights()


def _cast(x: Tensor) -> Tensor:
    """x cast to the autocast dtype, before quantization."""
    return x.to(autocast_dtype(x) or x.dtype)


# -- classes ---------------------------------------------------------------------------------------------------------

# Qualified name of a class -> prepared class, for modules that use exactly the forward of that class.
FORWARDS: dict[str, type[FakeQuantized]] = {
    "torch.nn.modules.linear.Linear": FakeQuantizedLinear,
    "torch.nn.modules.sparse.Embedding": FakeQuantizedEmbedding,
    "torch.nn.modules.conv.Conv1d": FakeQuantizedConv1d,
    "torch.nn.modules.conv.Conv2d": FakeQuantizedConv2d,
    "torch.nn.modules.conv.Conv3d": FakeQuantizedConv3d,
    "torch.nn.modules.activation.MultiheadAttention": FakeQuantizedMultiheadAttention,
    "transformers.pytorch_utils.Conv1D": _Addmm,
}


@lru_cache(maxsize=1024)
def fake_quantized_class(kind: type[nn.Module]) -> type[FakeQuantized]:
    """The prepared class of a module class."""
    over: type[FakeQuantized] = _Shadowed
    for base in kind.__mro__:
        found = FORWARDS.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None and kind.forward is base.forward:  # type: ignore[attr-defined]
            over = found
            break
    if vars(over).get("plain") is kind:
        return over
    return type(f"FakeQuantized{kind.__name__}", (over, kind), {"plain": kind, "__module__": __name__})


def unpickle_module(kind: type[nn.Module]) -> FakeQuantized:
    """An instance without state, for unpickling."""
    cls = fake_quantized_class(kind)
    return cls.__new__(cls)


def fake_(
    module: Any, param: str = "", fake: FakeQuantizer | None = None, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Prepare one parameter of a module; ``tensors`` are its held parts, trained ones as nn.Parameter. Without
    ``param``: prepare a module that only reads parameters of others."""
    if not isinstance(module, FakeQuantized):
        module.__class__ = fake_quantized_class(type(module))
    if "fake_quantized" not in module.__dict__:
        module.fake_quantized, module.fake_quant_enabled = {}, True
    if fake is not None:
        module.fake_quantized = {**module.fake_quantized, param: fake}
    for name, tensor in (tensors or {}).items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(f"{param}_{name}", tensor)
        else:
            module.register_buffer(f"{param}_{name}", tensor)


def unfake_(module: Any, param: str) -> None:
    """Undo :func:`fake_` for one parameter; its value is not changed."""
    fakes = dict(module.fake_quantized)
    fake = fakes.pop(param)
    for name in fake.names:
        delattr(module, f"{param}_{name}")
    module.fake_quantized = fakes
    if not fakes:
        restore_(module)


def restore_(module: Any) -> None:
    """Restore the original class."""
    module.__class__ = module.plain
    del module.fake_quantized, module.fake_quant_enabled


CONFIG: list[Callable[..., Any]] = []  # QATConfig, which its module adds: that module imports this one


def _prepare_alone(module: Any, activation_config: Any, weight_config: Any) -> Any:
    """Prepare one layer with the configs of a QATConfig; without configs it is not changed."""
    if weight_config is not None:
        quantize_(module, CONFIG[0](None, activation_config, weight_config), lambda m, fqn: m is module)
    elif activation_config is not None:
        raise ValueError("activation_config needs a weight_config")
    return module


def _bare(module: Any) -> Any:
    """The layer with fake quantization removed."""
    for param in list(module.fake_quantized):
        unfake_(module, param)
    if isinstance(module, FakeQuantized):
        restore_(module)
    return module


def fake_modules(model: nn.Module) -> list[tuple[str, FakeQuantized]]:
    """(name, module) of all prepared modules."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, FakeQuantized)]


@check_arguments()
def enable_fake_quant(model: nn.Module, enabled: bool = True) -> None:
    """Enable or disable fake quantization of a prepared model; disabled, it computes in float.

    Raises ValueError if nothing is prepared.
    """
    found = fake_modules(model)
    if not found:
        raise ValueError(
            "the model has no prepared module; call quantize_(model, QATConfig(config, step='prepare')) first"
        )
    for _, module in found:
        module.fake_quant_enabled = enabled
