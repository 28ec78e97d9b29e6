"""AffineQuantizedTensor: the only tensor subclass. It holds parts and a QuantSpec.

Invariants, each covered by a property test:
1. Every part has the rank of the tensor; its size on each stored axis divides the padded size of that axis.
2. If a block does not divide an axis, codes are padded to whole blocks; the tensor keeps its true shape.
3. Structural ops commute with ``dequantize``, or raise, or are a counted fallback.
4. ``spec`` and ``act`` are static and hashable; sizes are in the parts, never in the spec.
5. ``unpack(pack(parts)) == parts``, bit for bit.
6. No fallback is silent (see fallback.py).
7. A zero or constant block gives finite values; NaN or inf is an error that names the tensor.

Parts are stored with the contracted axis last. ``axes`` maps each logical axis to its stored axis (None: the same
order), so that ``w.t()`` is free under any layout and ``x @ w.t()`` still finds its kernel. The contracted axis
itself may be permuted by ``perm``: stored entry j is entry perm[j] of the value. Weights whose channels were sorted
before grouping use it (GPTQ's activation order). ``pre_scale`` is a factor of each entry of the contracted axis, by
which products scale their input: weights of AWQ and SmoothQuant have it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..support.arguments import show
from ..support.errors import ArgumentError, ArgumentTypeError
from . import blocks, codebook, quantize_backends, torchscript
from .call_site import copied_for_training, refuse_legacy_format
from .layouts import (
    READABLE,
    change_layout,
    compact_layout,
    get_layout,
    pack_on_arrival,
    reads_layout,
    unpack_zero_point,
)
from .numerics import Parts, dequantize, is_permutation, quantize, sqnr, to_stored
from .qparams import Params
from .spec import DTYPES, SPEC_VERSION, ActivationSpec, QuantSpec, dtype_name
from .storage import Address, Storage
from .value_checks import check_range, check_real, check_values

SLOTS = Parts._fields
VALUE_SLOTS = SLOTS[:4]  # the parts that have an entry per element or block
_PACKED = ("bits", "zero_point")  # the layout and part, other than the codes, that may be a bit stream
STORED = tuple(f"_{name}" for name in SLOTS)  # attributes that hold the stored parts
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
ATEN: dict[Any, Handler] = {}  # aten overload or namespace (None: all others) -> __torch_dispatch__ handler
FUNCTIONS: dict[Any, Handler] = {}  # public torch function -> __torch_function__ handler


def implements(*ops: Any, table: dict[Any, Handler] = ATEN) -> Callable[[Handler], Handler]:
    """Register a handler ``(func, args, kwargs) -> result``; it may return NotImplemented to fall back."""

    def add(fn: Handler) -> Handler:
        for op in ops:
            table[op] = fn
        return fn

    return add


class AffineQuantizedTensor(Tensor):
    """A tensor stored as low-precision codes: x = (decode(codes) - mid - zero_point) * scale + offset, times
    ``pre_scale`` if there is one.

    Create it with :meth:`from_float`, :func:`pennyweight.quantize_`, or from parts:
    ``AffineQuantizedTensor(parts, spec, shape, dtype)`` with parts in the layout of the spec. ``shape`` is the logical
    shape. ``AffineQuantizedTensor(w, requires_grad=...)`` of a quantized tensor w is an alias of it.
    """

    _codes: Tensor
    _scale: Tensor | None
    _zero_point: Tensor | None
    _offset: Tensor | None
    _act_scale: Tensor | None
    _act_zero_point: Tensor | None
    _perm: Tensor | None
    _table: Tensor | None
    _pre_scale: Tensor | None
    spec: QuantSpec
    act: ActivationSpec | None
    axes: tuple[int, ...] | None
    readonly: bool  # shares blocks with elements outside itself, so in-place ops must raise
    # ops of the kernel table that read this tensor, where known: what it is packed for on another device. Not in files
    readers: tuple[str, ...] | None = None
    _bound: dict[Any, Any]  # kernels selected for this tensor, by (op, dtype); its alias in autograd graphs

    @staticmethod
    def __new__(
        cls: type[AffineQuantizedTensor],
        parts: Parts | AffineQuantizedTensor,
        spec: QuantSpec | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        act: ActivationSpec | None = None,
        axes: tuple[int, ...] | None = None,
        readonly: bool = False,
        requires_grad: bool = False,
        **attributes: Any,
    ) -> AffineQuantizedTensor:
        if isinstance(parts, AffineQuantizedTensor):
            alias = parts.detach().requires_grad_(requires_grad)
            # accelerate's init_empty_weights passes all attributes of the parameter that it replaces: those of its
            # state, which the alias has already, and those that users set
            for name in attributes.keys() - alias.__dict__.keys() - {"_is_param"}:
                setattr(alias, name, attributes[name])
            return alias  # type: ignore[return-value]
        if attributes:
            raise TypeError(f"AffineQuantizedTensor got unexpected arguments {sorted(attributes)}")
        if not isinstance(parts, Parts) or spec is None or shape is None:
            raise TypeError(
                f"AffineQuantizedTensor needs Parts, a QuantSpec and a shape, got {type(parts).__name__}; "
                "to quantize a float tensor use AffineQuantizedTensor.from_float(x, spec)"
            )
        if axes == tuple(range(len(shape))):
            axes = None
        shape = tuple(shape)
        if parts.perm is not None and tuple(parts.perm.shape) != stored_shape(shape, axes)[-1:]:
            raise ValueError(
                f"perm of a quantized tensor {shape} has shape {tuple(parts.perm.shape)}; expected "
                f"{stored_shape(shape, axes)[-1:]}, one entry per entry of the last stored axis"
            )
        pre = parts.pre_scale
        if pre is not None and (tuple(pre.shape) != stored_shape(shape, axes)[-1:] or pre.dtype is not torch.float32):
            raise ValueError(
                f"pre_scale of a quantized tensor {shape} is {pre.dtype} {list(pre.shape)}; expected torch.float32 "
                f"{list(stored_shape(shape, axes)[-1:])}, one number per entry of the last stored axis"
            )
        if (None if parts.table is None else tuple(parts.table.shape)) != spec.table_shape:
            has = "no table" if parts.table is None else f"a table {list(parts.table.shape)}"
            raise ValueError(f"a quantized tensor {shape} ({spec}) has {has}, expected {spec.table_shape or 'none'}")
        self: AffineQuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=_strides(shape, axes),
            dtype=dtype,
            device=parts.codes.device,
            requires_grad=requires_grad,
        )
        torch._C._set_throw_on_mutable_data_ptr(self)  # C++ code gets an error instead of a null pointer
        part_shape: tuple[int, ...] | None = None
        for name, part in zip(SLOTS, parts, strict=True):
            if isinstance(part, Parts):
                if part_shape is None:
                    part_shape = blocks.counts(spec.block, stored_shape(shape, axes))
                part = AffineQuantizedTensor(part, getattr(spec, name), part_shape)
            setattr(self, f"_{name}", part)
        self.spec, self.act, self.axes, self.readonly = spec, act, axes, readonly
        self._bound = {}
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def from_float(
        cls,
        x: Tensor,
        spec: QuantSpec,
        rule: str | None = None,
        eps: float | None = None,
        act: ActivationSpec | None = None,
        params: Params | None = None,
        name: str = "tensor",
    ) -> AffineQuantizedTensor:
        """Quantize x [.., contracted] by round-to-nearest.

        rule, eps, params: see :mod:`pennyweight.core.qparams`. name: used in errors. Raises ValueError, naming the
        tensor, if x is not floating point or contains NaN or inf.
        """
        if not x.is_floating_point():
            raise ValueError(f"{name}: only floating-point tensors can be quantized, got {x.dtype}")
        x = x.detach()
        check_finite(x, name)
        fast = quantize_backends.quantize(x, spec, rule, eps) if params is None else NotImplemented
        if fast is not NotImplemented:
            return cls(fast.parts, spec, x.shape, x.dtype, act)
        plain = quantize(x, spec.with_(layout="plain"), rule, eps, params)
        parts = get_layout(spec.layout).pack(plain, spec, x.shape)
        return cls(parts, spec, x.shape, x.dtype, act)

    # -- the value ---------------------------------------------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dequantized tensor, in ``dtype`` (default: its own). The gradient is straight-through."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype or self.dtype)
        return self._dequantize(dtype or self.dtype)

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        shape = self.stored_shape
        x = quantize_backends.dequantize(self.parts, self.spec, shape, dtype)
        if x is NotImplemented:
            x = dequantize(self.plain_parts(), self.spec, shape, dtype)
        return x if self.axes is None else x.permute(self.axes)

    def plain_parts(self) -> Parts:
        """Unpacked parts in stored order; nested parts are Parts."""
        bare = self.parts._replace(perm=None, pre_scale=None)
        parts = get_layout(self.spec.layout).unpack(bare, self.spec, self.stored_shape)
        plain = each_part(parts, lambda p: p.plain_parts() if isinstance(p, AffineQuantizedTensor) else p)
        return plain._replace(perm=self._perm, pre_scale=self._pre_scale)

    @property
    def parts(self) -> Parts:
        """The stored parts, in their layout."""
        return Parts(
            self._codes, self._scale, self._zero_point, self._offset, self._act_scale, self._act_zero_point, self._perm,
            self._table, self._pre_scale,
        )  # fmt: skip

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Logical sizes in stored order: the contracted axis last."""
        return stored_shape(self.shape, self.axes)

    def _plain(self, slot: str) -> Any:
        part = getattr(self, f"_{slot}")
        layout = self.spec.layout
        # a layout may store a part with another one: torch_int4 has no part for the offsets, they are beside the scales
        absent = part is None and not getattr(self.spec, slot)
        if absent or layout == "plain" or (layout in READABLE and slot != "codes"):
            return unpack_zero_point(part, self.spec, self.stored_shape) if (layout, slot) == _PACKED else part
        part = getattr(self.plain_parts(), slot)
        if not isinstance(part, Parts):
            return part
        shape = blocks.counts(self.spec.block, self.stored_shape)
        return AffineQuantizedTensor(part, getattr(self.spec, slot), shape)

    @property
    def codes(self) -> Tensor:
        """One code per element, in stored order, padded to whole blocks; a copy if the layout packs them."""
        return self._plain("codes")

    @property
    def scale(self) -> Tensor | None:
        """One scale per block, with the tensor's rank, in stored order; itself quantized if the spec has that."""
        return self._plain("scale")

    @property
    def zero_point(self) -> Tensor | None:
        """The stored integer zero points, one per block; None if the spec has none."""
        return self._plain("zero_point")

    @property
    def offset(self) -> Tensor | None:
        """The stored real offsets, one per block; None if the spec has none."""
        return self._plain("offset")

    @property
    def act_scale(self) -> Tensor | None:
        """The scale of a static activation, one element."""
        return self._act_scale

    @property
    def act_zero_point(self) -> Tensor | None:
        """The zero point of a static activation, one element."""
        return self._act_zero_point

    @property
    def perm(self) -> Tensor | None:
        """Permutation of the last stored axis: stored entry j is entry perm[j] of the value. None: not permuted."""
        return self._perm

    @property
    def table(self) -> Tensor | None:
        """The codebook of a learned format, [codes, numbers per code]. None for other formats."""
        return self._table

    @property
    def pre_scale(self) -> Tensor | None:
        """Factor of each entry of the last stored axis, float32, by which products scale their input. None: 1."""
        return self._pre_scale

    @property
    def tensor_impl(self) -> PlainView:
        """Read-only view of the unpacked values, for any layout: .int_data, .scale, .zero_point."""
        return PlainView(self)

    def error(self, reference: Tensor) -> float:
        """Signal-to-quantization-noise ratio against ``reference``, in dB."""
        if not isinstance(reference, Tensor) or reference.shape != self.shape:
            raise ArgumentError(
                f"error: reference must be a tensor of shape {tuple(self.shape)}, that of this weight, got "
                f"{show(reference)}"
            )
        return sqnr(reference.detach(), self._dequantize(torch.float32))

    def requantize(self, spec: QuantSpec, rule: str | None = None) -> AffineQuantizedTensor:
        """This tensor under another spec, via float32. A change of only the layout is exact.

        ``pre_scale`` is kept. ``perm`` is kept if the new spec has several blocks on the last stored axis, else it is
        dropped.
        """
        if not isinstance(spec, QuantSpec):
            raise ArgumentTypeError(
                "requantize: spec must be a QuantSpec such as QuantSpec(pw.get_format('int4'), (32,)), got "
                f"{show(spec)}; quantize_(model, config) takes short names"
            )
        if spec.with_(layout="plain") == self.spec.with_(layout="plain"):
            return self.to_layout(spec.layout)
        shape = self.stored_shape
        x = self.with_(axes=None, shape=shape)._dequantize(torch.float32)
        perm = self._perm
        if perm is not None:
            perm = perm.clone() if blocks.counts(spec.block, shape)[-1] > 1 else None
        pre = self._pre_scale
        new = AffineQuantizedTensor.from_float(to_stored(x, perm, pre), spec, rule)
        parts = self.parts._replace(**{slot: getattr(new, f"_{slot}") for slot in VALUE_SLOTS}, table=new._table)
        return self.with_(parts=parts._replace(perm=perm), spec=spec, readonly=False)

    def to_layout(self, name: str) -> AffineQuantizedTensor:
        """The same tensor in another layout; exact."""
        if name == self.spec.layout:
            return self
        spec, shape = self.spec.with_(layout=name), self.stored_shape
        parts = change_layout(self.parts._replace(perm=None, pre_scale=None), self.spec, name, shape)
        return self.with_(parts=parts._replace(perm=self._perm, pre_scale=self._pre_scale), spec=spec)

    def with_(self, **changes: Any) -> AffineQuantizedTensor:
        """A copy with some of parts, spec, shape, dtype, act, axes, readonly (or single parts) changed."""
        slots = {k: changes.pop(k) for k in tuple(changes) if k in SLOTS}
        fields: dict[str, Any] = {
            "parts": self.parts, "spec": self.spec, "shape": self.shape, "dtype": self.dtype,
            "act": self.act, "axes": self.axes, "readonly": self.readonly,
        }  # fmt: skip
        unknown = changes.keys() - fields.keys()
        if unknown:
            raise TypeError(f"with_() got {sorted(unknown)}; it takes {sorted(fields)} and {SLOTS}")
        fields.update(changes)
        fields["parts"] = fields["parts"]._replace(**slots)
        new = AffineQuantizedTensor(**fields)
        if self.readers is not None and len(fields["shape"]) == self.ndim:  # an expert alone has another reader
            new.readers = self.readers
        return new

    # -- size and storage --------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all stored parts."""
        return sum(p.nbytes for p in self.parts if p is not None)

    def element_size(self) -> float:  # type: ignore[override]
        """Bytes per element: nbytes / numel. An int if it is whole, so that numel * element_size is nbytes."""
        n = self.numel()
        if n == 0:
            return 1
        return self.nbytes // n if self.nbytes % n == 0 else self.nbytes / n

    def untyped_storage(self) -> torch.UntypedStorage:
        """A :class:`Storage` without memory: it reports the bytes of all parts and supports comparison."""
        if type(self._codes) is not Tensor:  # traced: sizes may be symbolic, and torch needs its own storage
            with torch._C.DisableTorchFunctionSubclass():
                return super().untyped_storage()
        return Storage.of(self.nbytes, self.data_ptr())

    def data_ptr(self) -> Any:
        """An :class:`Address`, equal for tensors that share the same parts, that cannot be read from; 0 as in torch for
        empty tensors and on the meta device."""
        if self.numel() == 0 or self.is_meta:
            return 0
        return Address(tuple(p.data_ptr() for p in self.parts if p is not None))

    const_data_ptr = data_ptr

    def share_memory_(self) -> AffineQuantizedTensor:
        """Move all parts to shared memory."""
        for part in self.parts:
            if part is not None:
                part.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(p.is_shared() for p in self.parts if p is not None)

    @property
    def data(self) -> AffineQuantizedTensor:
        """A detached alias. Assigning a quantized tensor adopts its parts, spec and dtype. Assigning a float tensor
        quantizes it under the spec of this one, into new parts with the dtype and device of the value. As in torch,
        earlier aliases keep the old value. Raises ValueError if the shape, dtype or device does not fit.
        """
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        FUNCTIONS[torch.Tensor.data.__set__](None, (self, value), {})  # type: ignore[attr-defined]

    def adopt(self, value: AffineQuantizedTensor) -> None:
        """Replace the parts, spec, dtype and device of this tensor, which stays the same object, by those of value."""
        if (value.dtype, value.device, value.axes) != (self.dtype, self.device, self.axes):
            with torch._C.DisableTorchFunctionSubclass():
                torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]
        for name in (*STORED, "spec", "act", "axes", "readonly"):
            setattr(self, name, getattr(value, name))
        if value.readers is not None:
            self.readers = value.readers
        self._bound = {}

    def in_graph(self) -> AffineQuantizedTensor:
        """What autograd graphs refer to instead of a frozen weight: a detached alias, the same object at each call.

        It shares the version counter, so that backward after a change in place raises. ``Module.to``, ``.half()`` and
        ``share_memory()`` swap a quantized parameter with its new value, which torch refuses while a graph holds it.
        """
        if self.requires_grad:  # its gradient must reach it
            return self
        alias: AffineQuantizedTensor | None = self._bound.get("in_graph")
        if alias is None:
            alias = self.detach()  # type: ignore[assignment]
            assert alias is not None
            if isinstance(self, torch.nn.Parameter):
                alias._is_param = True  # hooks that offload what a graph saves leave parameters where they are
            self._bound["in_graph"] = alias
        return alias

    # -- protocols ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _quantized_linear_op(input: Tensor, weight: AffineQuantizedTensor, bias: Tensor | None = None) -> Tensor:
        """input [.., K] @ weight [N, K].T + bias, with the kernel selected from the table."""
        return torch.nn.functional.linear(input, weight, bias)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = f"AffineQuantizedTensor(shape={tuple(self.shape)}, {self.spec}, dtype={self.dtype}, device={self.device}"
        if self.act is not None:
            text += f", act={self.act}"
        if self._perm is not None:
            text += f", perm=[{self._perm.shape[0]}]"
        if self._pre_scale is not None:
            text += f", pre_scale=[{self._pre_scale.shape[0]}]"
        return text + (", requires_grad=True)" if self.requires_grad else ")")

    def _repr_html_(self) -> str:
        from .describe_spec import tensor_html

        return tensor_html(self)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [n for n in STORED if getattr(self, n) is not None]
        return names, (self.spec, self.act, self.dtype, self.axes, self.readonly, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], ctx: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> AffineQuantizedTensor:
        spec, act, dtype, axes, readonly, requires_grad = ctx
        parts = Parts(**{name[1:]: part for name, part in inner.items()})
        return AffineQuantizedTensor(parts, spec, outer_size, dtype, act, axes, readonly, requires_grad)

    def _stable_hash_for_caching(self) -> str:
        # A cached graph refers to parts by attribute name; the spec does not name these.
        return f"{STORED} {self._perm is not None} {self._pre_scale is not None} {static_json(self)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> AffineQuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if isinstance(self, torch.nn.Parameter) and copied_for_training():
            memo[id(self)] = copied = torch.nn.Parameter(self.dequantize(), requires_grad=True)
            return copied  # type: ignore[return-value]
        parts = each_part(self.parts, lambda p: copy.deepcopy(p, memo))
        new = self.with_(parts=parts).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            new._is_param = True
        memo[id(self)] = new
        return new  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        refuse_legacy_format()
        w, layout = self, self.spec.layout
        if get_layout(layout).devices is not None:  # a kernel's packing may differ on another machine
            w = self.to_layout(compact_layout(self.spec, self.stored_shape))
        parts = {n: p for n, p in zip(SLOTS, w.parts, strict=True) if p is not None}
        if w.spec.format.native_float:
            parts["codes"] = w._codes.view(torch.uint8)  # torch 2.13 cannot unpickle a float8 tensor
        return rebuild, (_pickled_json(w), parts, self.requires_grad, isinstance(self, torch.nn.Parameter), layout)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        handler = FUNCTIONS.get(func)
        if handler is not None:
            out = handler(func, args, kwargs or {})
            if out is not NotImplemented:
                return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if len(types) > 1 and any(map(foreign, types)):
            return NotImplemented  # the other class handles quantized tensors
        if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
            # A view shares the version counter of its base, which a tensor made in inference mode does not have.
            with torch.inference_mode(False):
                return cls.__torch_dispatch__(func, types, args, kwargs)
        handler = ATEN.get(func)
        out = NotImplemented if handler is None else handler(func, args, kwargs)
        return ATEN[None](func, args, kwargs) if out is NotImplemented else out


class PlainView:
    """Plain values of a quantized tensor: ``int_data`` (codes), ``scale``, ``zero_point`` (or real ``offset``).

    Shapes follow the logical axes; padding is cut off. A symmetric tensor shows its constant zero point (``mid``).
    They do not contain a ``pre_scale``. Raises AttributeError for a tensor with permuted channels, whose logical codes
    would not match the scales.
    """

    def __init__(self, tensor: AffineQuantizedTensor) -> None:
        if tensor._perm is not None:
            raise AttributeError(
                f"a quantized tensor {tuple(tensor.shape)} ({tensor.spec}) is stored with permuted channels, so plain "
                "codes and scales would not match; use .codes, .scale and .perm, or dequantize()"
            )
        self._tensor, self._parts = tensor, tensor.plain_parts()

    def _logical(self, part: Tensor) -> Tensor:
        return part if self._tensor.axes is None else part.permute(self._tensor.axes)

    def _part(self, name: str) -> Tensor | None:
        part, kind = getattr(self._parts, name), getattr(self._tensor.spec, name)
        if isinstance(part, Parts):
            shape = blocks.counts(self._tensor.spec.block, self._tensor.stored_shape)
            part = dequantize(part, kind, shape)
        return None if part is None else self._logical(part)

    @property
    def int_data(self) -> Tensor:
        """Codes, one per element."""
        codes, dim = self._parts.codes, self._tensor.spec.format.dim
        for axis, n in enumerate(self._tensor.stored_shape):
            codes = codes.narrow(axis, 0, n if axis < codes.ndim - 1 else -(-n // dim))
        return self._logical(codes)

    @property
    def scale(self) -> Tensor | None:
        return self._part("scale")

    @property
    def zero_point(self) -> Tensor | None:
        """Integer zero point in code units; the real offset if the spec has one."""
        if self._parts.zero_point is not None:
            return self._logical(self._parts.zero_point)
        if self._tensor.spec.offset is not None:
            return self._part("offset")
        scale = self.scale
        return None if scale is None else torch.full_like(scale, self._tensor.spec.mid, dtype=torch.int32)

    def get_plain(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.int_data, self.scale, self.zero_point


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: AffineQuantizedTensor, dtype: torch.dtype) -> Tensor:
        return w._dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@lru_cache(maxsize=1024)
def foreign(cls: Any) -> bool:
    """Whether a tensor class defines its own ``__torch_dispatch__``, so that its memory may not be readable."""
    ours = (AffineQuantizedTensor, torch._subclasses.FakeTensor, torch._subclasses.functional_tensor.FunctionalTensor)
    if not issubclass(cls, Tensor) or issubclass(cls, ours):
        return False
    return cls.__torch_dispatch__ is not Tensor.__torch_dispatch__


def each_part(parts: Parts, fn: Callable[[Any], Any]) -> Parts:
    """Apply fn to the parts that are present, without descending into nested tensors."""
    changed: list[Any] = [None if p is None else fn(p) for p in parts]
    return Parts(*changed)


def stored_shape(shape: Sequence[int], axes: tuple[int, ...] | None) -> tuple[int, ...]:
    """Logical sizes in stored order."""
    if axes is None:
        return tuple(shape)
    sizes = [0] * len(axes)
    for n, axis in zip(shape, axes, strict=True):
        sizes[axis] = n
    return tuple(sizes)


def _strides(shape: Sequence[int], axes: tuple[int, ...] | None) -> tuple[int, ...]:
    """Strides of the logical tensor: contiguous in stored order."""
    strides, step = [], 1
    for n in reversed(stored_shape(shape, axes)):
        strides.append(step)
        step *= max(n, 1) if isinstance(n, int) else n
    strides.reverse()
    return tuple(strides) if axes is None else tuple(strides[a] for a in axes)


def check_finite(x: Tensor, name: str) -> None:
    """Raise ValueError, naming the tensor, if it contains NaN or inf."""
    if (
        x.device.type == "meta"
        or x.numel() == 0
        or torch.compiler.is_compiling()
        or quantize_backends.finite(x) is True
    ):
        return
    if isinstance(x, torch._subclasses.FakeTensor):  # has no values to check
        return
    # The sum is cheap but may overflow, so check elements only if it is not finite.
    if not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(
            f"{name}: {bad} of {x.numel()} values are NaN or inf (shape {tuple(x.shape)}); fix or skip this tensor"
        )


def static_version(w: AffineQuantizedTensor) -> int:
    """The oldest version of :func:`static_json` that can represent the tensor: that of its specs."""
    return max(w.spec.version, 1 if w.act is None else w.act.spec.version)


def static_json(w: AffineQuantizedTensor) -> str:
    """All static properties of a tensor, as JSON."""
    return json.dumps(
        {
            "version": static_version(w),
            "spec": w.spec.to_dict(),
            "act": None if w.act is None else w.act.to_dict(),
            "shape": [int(n) for n in w.shape],
            "dtype": dtype_name(w.dtype),
            "axes": w.axes,
            "readonly": w.readonly,
        },
        sort_keys=True,
    )


def _pickled_json(w: AffineQuantizedTensor) -> str:
    """static_json of w in a portable layout, and whether scales are negative. Raises ValueError for values that
    :func:`rebuild` would reject."""
    signed = False
    if _has_values(w):
        scale = w.scale.dequantize() if isinstance(w.scale, AffineQuantizedTensor) else w.scale
        signed = scale is not None and bool((scale < 0).any())
        _check_values(w, signed)
    return json.dumps({**json.loads(static_json(w)), "signed_scale": signed}, sort_keys=True)


def _has_values(w: AffineQuantizedTensor) -> bool:
    return not w.is_meta and not isinstance(w._codes, torch._subclasses.FakeTensor)


def _check_values(w: AffineQuantizedTensor, signed: bool) -> None:
    """Raise ValueError if the parts of w, in a portable layout, hold invalid values."""
    plain = {n: p for n, p in zip(SLOTS, w.parts, strict=True) if p is not None}
    plain = {n: p.dequantize() if isinstance(p, AffineQuantizedTensor) else p for n, p in plain.items()}
    try:
        check_values(plain, w.spec, w.stored_shape, signed)
        if w.act is not None and w.act_scale is not None:
            check_real(w.act_scale, "act_scale", signed=False)
            if not bool((w.act_scale > 0).all()):
                raise ValueError("act_scale is zero; it must be positive")
            if w.act_zero_point is not None:
                check_range(w.act_zero_point, w.act.spec.format, "act_zero_point")
    except ValueError as e:
        raise ValueError(f"{w.spec} of {list(w.shape)} cannot be pickled or unpickled: {e}") from e


def rebuild(
    static: str, parts: dict[str, Tensor], requires_grad: bool, is_param: bool, layout: str
) -> AffineQuantizedTensor:
    """Unpickle; the only global that pickles of quantized tensors reference. Raises ValueError if the parts do not
    match the spec or hold invalid values: NaN, inf, negative scales that are not declared, invalid codes.

    ``layout`` is the original layout; the tensor is repacked to it if its device supports it, else for its device.
    """
    refuse_legacy_format()
    data = json.loads(static)
    if data.get("version") not in range(1, SPEC_VERSION + 1):
        raise ValueError(
            f"quantized tensor pickled as version {data.get('version')!r}; this release reads 1 to {SPEC_VERSION}"
        )
    spec = QuantSpec.from_dict(data["spec"])
    if spec.format.native_float:
        parts = {**parts, "codes": parts["codes"].view(spec.format.code_dtype)}
    axes = None if data["axes"] is None else tuple(data["axes"])
    _check_parts(parts, spec, stored_shape(data["shape"], axes))
    w = AffineQuantizedTensor(
        Parts(**parts),
        spec,
        data["shape"],
        DTYPES[data["dtype"]],
        None if data["act"] is None else ActivationSpec.from_dict(data["act"]),
        axes,
        bool(data["readonly"]),
        requires_grad,
    )
    if _has_values(w):
        _check_values(w, bool(data.get("signed_scale", True)))  # earlier releases did not store this key
    if get_layout(layout).devices is not None and not w.is_meta:
        here = reads_layout(layout, w.device)
        w = w.to_layout(layout) if here else pack_on_arrival(w, layout)
        w = w.requires_grad_(requires_grad)  # type: ignore[assignment]
    if is_param:
        w._is_param = True
    return w


def _check_parts(parts: dict[str, Tensor], spec: QuantSpec, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the parts have the dtypes and shapes of the spec, in a portable layout."""
    codes = spec.codes_shape(shape)
    dtype = spec.format.code_dtype
    if spec.is_stream and codes:
        codes, dtype = spec.stream_shape(codes, spec.format.bits), torch.uint8
    kinds: dict[str, Any] = {"codes": dtype, **spec.part_specs()}
    names = parts.keys() - set(SLOTS[len(VALUE_SLOTS) :])
    if get_layout(spec.layout).devices is not None or names != kinds.keys():
        raise ValueError(f"pickled {spec} has parts {sorted(names)}; expected {sorted(kinds)} in a portable layout")
    for name, kind in kinds.items():
        part, size = parts[name], codes if name == "codes" else blocks.counts(spec.block, shape)
        if name == "zero_point" and spec.is_stream and spec.zero_point_bits < 8 and size:
            size, kind = spec.stream_shape(size, spec.zero_point_bits), torch.uint8
        given_kind = part.spec if isinstance(part, AffineQuantizedTensor) else part.dtype
        if tuple(part.shape) != size or given_kind != kind:
            raise ValueError(
                f"pickled {spec} of {list(shape)}: {name} is {given_kind} {list(part.shape)}, expected {kind} "
                f"{list(size)}"
            )
    table = parts.get("table")  # its shape is checked when the tensor is constructed
    if table is not None and (table.dtype is not codebook.DTYPE or not (table.is_meta or table.isfinite().all())):
        raise ValueError(f"pickled {spec} of {list(shape)}: its table must be {codebook.DTYPE} with finite numbers")
    perm = parts.get("perm")
    if perm is not None and (
        perm.dtype not in (torch.int32, torch.int64) or tuple(perm.shape) != shape[-1:]
        or not (perm.is_meta or is_permutation(perm))
    ):  # fmt: skip
        raise ValueError(f"pickled {spec} of {list(shape)}: perm is no permutation of the {list(shape[-1:])} channels")
    pre = parts.get("pre_scale")  # its shape and dtype are checked when the tensor is constructed
    if pre is not None and not (pre.is_meta or pre.isfinite().all()):
        raise ValueError(f"pickled {spec} of {list(shape)}: pre_scale contains NaN or inf")


torch.serialization.add_safe_globals([rebuild])
torchscript.guard(AffineQuantizedTensor)
