"""Base of torchao's tensor classes as views of ours, and their parts as parts of ours.

``Int8Tensor(qdata, scale, ...)`` creates a :class:`pennyweight.AffineQuantizedTensor`; ``isinstance(w, Int8Tensor)``
tests whether that class could represent w; a torchao pickle with this class loads as one of ours. Instances of such a
class exist only while torch.load reconstructs them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....core import blocks
from ....core.formats import E4M3, E5M2, Format, all_formats
from ....core.numerics import Parts
from ....core.spec import DTYPES, ActivationSpec, QuantSpec
from ....core.tensor import AffineQuantizedTensor
from ....kernels.repack import prepare

# -- torchao's parts and ours ------------------------------------------------------------------------------------------

FLOAT8 = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def int_format(lo: int, hi: int, signed: bool) -> Format:
    """Our narrowest format for the codes lo..hi. Raises ValueError if there is none."""
    for fmt in sorted(all_formats(), key=lambda f: f.bits):
        if fmt.kind == "int" and fmt.name.startswith("int" if signed else "uint") and fmt.lo <= lo and hi <= fmt.hi:
            return fmt
    raise ValueError(f"codes from {lo} to {hi} fit no {'signed' if signed else 'unsigned'} format of at most 8 bits")


def block_of(block_size: Sequence[int], shape: Sequence[int]) -> tuple[int, ...] | None:
    """torchao's block_size, one number per axis, as our block."""
    if len(block_size) != len(shape):
        raise AssertionError(f"block_size {list(block_size)} needs one number for each axis of {list(shape)}")
    for i, (b, n) in enumerate(zip(block_size, shape, strict=True)):
        if b < -1 or (b == 0 and n) or (b > 0 and n % b):
            raise AssertionError(f"block_size {list(block_size)} does not divide the shape {list(shape)} at axis {i}")
    sizes = tuple(1 if b == 1 else -1 if b == n else b for b, n in zip(block_size, shape, strict=True))
    return None if len(sizes) > 1 and all(b == -1 for b in sizes) else sizes


def block_size(w: AffineQuantizedTensor) -> list[int]:
    """Elements of each logical axis that share a scale."""
    stored = blocks.resolve(w.spec.block, w.stored_shape)
    return [stored[a] for a in (range(w.ndim) if w.axes is None else w.axes)]


def int_codes(
    qdata: Tensor, scale: Tensor, zero_point: Tensor | None, block: Sequence[int], dtype: torch.dtype,
    lo: int, hi: int, *, real: bool = False, act: ActivationSpec | None = None, act_scale: Tensor | None = None,
    act_zero_point: Tensor | None = None,
) -> AffineQuantizedTensor:  # fmt: skip
    """x = (qdata - zero_point) * scale, or with ``real`` (qdata - mid) * scale + zero_point, mid = (lo + hi + 1) / 2.

    qdata: one code per element, int8 or uint8. scale, zero_point: one per block, in any shape with that many elements.
    A zero point that is all zero, or all mid, is not stored. Non-integer zero points become offsets -zero_point *
    scale. Raises ValueError for codes outside lo..hi, which packing would truncate, and for parts that are not finite
    or not one per block.
    """
    shape = tuple(qdata.shape)
    fmt = int_format(lo, hi, qdata.dtype is not torch.uint8)
    if (lo, hi) != _RANGES.get(qdata.dtype) and not _holds(qdata, lambda q: (q >= lo) & (q <= hi)):
        least, most = int(qdata.min()), int(qdata.max())
        raise ValueError(f"codes of {list(shape)} range from {least} to {most}; {fmt} supports {lo} to {hi}")
    mine = block_of(block, shape)
    scale = _one_a_block(scale, "scale", mine, shape)
    spec = QuantSpec(fmt, mine, scale.dtype)
    offset, mid = None, (lo + hi + 1) // 2
    if zero_point is not None:
        zero_point = _one_a_block(zero_point, "zero_point", mine, shape)
        if real:
            spec, offset, zero_point = spec.with_(mid=mid, offset=scale.dtype), zero_point.to(scale.dtype), None
        elif not zero_point.is_meta and _holds(zero_point, lambda z: z == 0):
            zero_point = None
        elif not zero_point.is_meta and _holds(zero_point, lambda z: z == mid):
            spec, zero_point = spec.with_(mid=mid), None
        elif _are_codes(zero_point, fmt):
            spec, zero_point = spec.with_(zero_point=fmt), zero_point.to(fmt.code_dtype)
        else:
            offset, zero_point = -zero_point.to(scale.dtype) * scale, None
            spec = spec.with_(offset=scale.dtype)
    parts = Parts(qdata.to(fmt.code_dtype), scale, zero_point, offset, act_scale, act_zero_point)
    return AffineQuantizedTensor(parts, spec, shape, dtype, act)


def float_codes(
    qdata: Tensor, scale: Tensor, fmt: Format, block: Sequence[int] | None, dtype: torch.dtype,
    act: ActivationSpec | None = None,
) -> AffineQuantizedTensor:  # fmt: skip
    """x = qdata * scale. qdata: one code an element; block None or empty: the whole tensor."""
    shape = tuple(qdata.shape)
    mine = block_of(block, shape) if block else None
    scale = _one_a_block(scale, "scale", mine, shape)
    return AffineQuantizedTensor(Parts(qdata, scale), QuantSpec(fmt, mine, scale.dtype), shape, dtype, act)


_RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


def _holds(t: Tensor, condition: Callable[[Tensor], Tensor]) -> bool:
    """Whether a condition is true for every element; true if they cannot be read."""
    return t.is_meta or bool(condition(t).all())


def _one_a_block(part: Tensor, name: str, block: tuple[int, ...] | None, shape: tuple[int, ...]) -> Tensor:
    """A part in our shape. Raises ValueError unless it has one finite number per block."""
    counts = blocks.counts(block, shape)
    if part.numel() != math.prod(counts):
        raise ValueError(f"{name} is {list(part.shape)}; blocks {block} of {list(shape)} need {list(counts)}")
    if name == "scale" and part.dtype not in DTYPES.values():
        raise ValueError(f"scale must be one of {', '.join(DTYPES)}, got {part.dtype}")
    if part.is_floating_point() and not _holds(part, torch.isfinite):
        raise ValueError(f"{name} of {list(shape)} contains NaN or inf")
    return part.reshape(counts)


def _are_codes(t: Tensor, fmt: Format) -> bool:
    """Whether these are integers within the format; assumed for integer tensors that cannot be read."""
    if t.is_meta:
        return not t.is_floating_point()
    return _holds(t, lambda z: (z >= fmt.lo) & (z <= fmt.hi) & (z == z.to(torch.int32)))


def whole(w: AffineQuantizedTensor) -> bool:
    """Whether blocks divide the tensor, so that no code is padding. Derived from the spec: nothing is unpacked."""
    return blocks.padded(w.spec.block, w.stored_shape) == w.stored_shape


def plain_codes(w: AffineQuantizedTensor) -> Tensor:
    """Codes in logical order, one an element, without padding."""
    return w.tensor_impl.int_data


def part(w: AffineQuantizedTensor, slot: str) -> Tensor | None:
    """scale, zero_point or offset in logical order, as numbers."""
    value: Any = getattr(w, slot)
    if isinstance(value, AffineQuantizedTensor):
        value = value.dequantize()
    return value if value is None or w.axes is None else value.permute(w.axes)


def zero_points(w: AffineQuantizedTensor) -> Tensor | None:
    """The zero point in torchao's classes: our stored one, or zeros (or mids) of its shape."""
    zero, scale = part(w, "zero_point"), part(w, "scale")
    if zero is not None or scale is None:
        return zero
    return torch.full_like(scale, w.spec.mid, dtype=torch.int8)


def ready(w: Any) -> Any:
    """w packed for its kernel, like a weight of a model."""
    if not isinstance(w, AffineQuantizedTensor):
        return w
    return prepare(w) if w.ndim == 2 and w.axes is None and not w.is_meta else w


def with_pre_scale(w: AffineQuantizedTensor, act_pre_scale: Tensor | None) -> AffineQuantizedTensor:
    """w with torchao's factor of its input: one number per channel, or one for all. Raises ValueError for others."""
    if act_pre_scale is None:
        return w
    k = w.shape[-1]
    if act_pre_scale.numel() not in (1, k) or not act_pre_scale.is_floating_point():
        raise ValueError(
            f"act_pre_scale must have one number per input channel, [{k}], got {act_pre_scale.dtype} "
            f"{list(act_pre_scale.shape)}"
        )
    return w.with_(pre_scale=act_pre_scale.float().reshape(-1).expand(k).contiguous())


def act_pre_scale_of(w: AffineQuantizedTensor) -> Tensor | None:
    """The factor of the input in torchao's classes."""
    return None if w.pre_scale is None else w.pre_scale.to(w.dtype)


# -- views -------------------------------------------------------------------------------------------------------------


class ShellMeta(type(Tensor)):  # type: ignore[misc]
    """Calling the class builds another object; ``build`` is its signature."""

    def __init__(cls, name: str, bases: Any, namespace: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(name, bases, namespace)
        if "build" in namespace:
            cls.__signature__ = inspect.signature(cls.build)  # type: ignore[attr-defined]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.build(*args, **kwargs)


def attributes(state: Any) -> dict[str, Any]:
    """The attributes of a pickled object by name; slots are the second element."""
    return state if isinstance(state, dict) else {**(state[0] or {}), **(state[1] or {})}


class Shell(Tensor, metaclass=ShellMeta):
    """A class whose instances exist only while torch.load reconstructs a pickled object."""

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> Any:
        """The result of calling the class."""
        raise NotImplementedError(f"{cls.__name__} cannot be built")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} was called on a {cls.__name__} during unpickling")

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(attributes(state))


class ViewMeta(ShellMeta):
    """isinstance() tests whether the view can represent a tensor."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, AffineQuantizedTensor) and cls.represents(instance)


class View(Shell, metaclass=ViewMeta):
    """Base of the views. A view defines ``holds``, ``build`` and ``take``, and torchao's names of its members:
    constructor arguments are data, attributes, optional data, optional attributes, in that order."""

    tensor_data_names: ClassVar[list[str]] = []
    tensor_attribute_names: ClassVar[list[str]] = []
    optional_tensor_data_names: ClassVar[list[str]] = []
    optional_tensor_attribute_names: ClassVar[list[str]] = []

    @staticmethod
    def holds(w: AffineQuantizedTensor) -> bool:
        """Whether this class of torchao can represent w, but for the parts that :meth:`represents` looks at."""
        raise NotImplementedError

    @classmethod
    def represents(cls, w: AffineQuantizedTensor) -> bool:
        """Whether this class of torchao can represent w. None of them supports permuted channels."""
        scaled = w.pre_scale is None or "act_pre_scale" in cls.optional_tensor_data_names
        return w.perm is None and scaled and cls.holds(w)

    @staticmethod
    def take(w: AffineQuantizedTensor) -> dict[str, Any]:
        """torchao's members of one of our tensors, by name. Raises ValueError if it cannot represent it."""
        raise NotImplementedError

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> AffineQuantizedTensor:
        """Our tensor from the attributes of a pickled one; ``shell`` has its shape and dtype."""
        names = (*cls.tensor_data_names, *cls.tensor_attribute_names)
        more = (*cls.optional_tensor_data_names, *cls.optional_tensor_attribute_names)
        known = {n: state[n] for n in (*names, *more) if n in state}
        if "dtype" in (*names, *more):
            known.setdefault("dtype", shell.dtype)
        if "shape" in (*names, *more):
            known.setdefault("shape", tuple(shell.shape))
        return cls.build(**known)

    def __setstate__(self, state: Any) -> None:
        """torch.load created an empty tensor of this class: convert it to one of ours."""
        state = attributes(state)
        w = ready(type(self).restore(state, self))
        become(self, w)
        if state.get("_is_param"):
            self._is_param = True


def become(shell: Tensor, w: Tensor) -> None:
    """Turn an empty wrapper of the same shape and dtype into w, one of our tensors or its pre-scaled form."""
    if tuple(shell.shape) != tuple(w.shape) or shell.dtype != w.dtype:
        raise ValueError(f"a pickled {tuple(shell.shape)} {shell.dtype} has parts of a {tuple(w.shape)} {w.dtype}")
    state = dict(w.__dict__)
    shell.__class__ = type(w)
    shell.__dict__.update(state)
