"""torchao's float8 tensor of training: codes, the factor by which the tensor was multiplied, and its role in products.

    x = data / scale

Not one of our quantized tensors, which store the reciprocal of ``scale``: it is rounded, so that values would differ in
the last bit. Instances exist between a cast and a product of a user's own training code; :class:`Float8Linear` does not
need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .functions import pad_tensor_for_matmul
from .products import GemmInputRole, LinearMMConfig, ScaledMMConfig, addmm_float8_unwrapped, choose_scaled_mm_config

__all__ = [
    "FLOAT8_OPS_TABLE", "Float8TrainingTensor", "allgather_fp8", "autocast_to_copy", "copy_fp8", "float8_addmm",
    "float8_cast_up_op", "float8_cat", "float8_desugar_data_and_scale_op", "float8_desugar_op", "float8_is_same_size",
    "float8_mm", "float8_split", "float8_transpose", "float8_view", "implements", "index_put_fp8", "preprocess_addmm",
    "wait_tensor_fp8",
]  # fmt: skip

aten = torch.ops.aten
Handler = Callable[[Any, Any, Any], Any]
FLOAT8_OPS_TABLE: dict[Any, Handler] = {}  # aten overload -> handler (func, args, kwargs)
_TRACERS = ("FakeTensor", "FunctionalTensor")  # torch's tensors during tracing


class Float8TrainingTensor(Tensor):
    """x = _data / _scale, shown with dtype ``_orig_dtype``.

    _data           float8 codes
    _scale          float32, one number, or one for each index of all axes but ``_axiswise_dim``
    _orig_dtype     dtype of the tensor before its cast, and of products
    _axiswise_dim   axis over which the scale was computed: None (all), 0 or -1
    """

    _data: Tensor
    _scale: Tensor
    _orig_dtype: torch.dtype
    _linear_mm_config: LinearMMConfig
    _gemm_input_role: GemmInputRole | None
    _axiswise_dim: int | None
    __slots__ = ("_axiswise_dim", "_data", "_gemm_input_role", "_linear_mm_config", "_orig_dtype", "_scale")

    @staticmethod
    def __new__(
        cls: type[Float8TrainingTensor], data: Tensor, scale: Tensor, orig_dtype: torch.dtype,
        linear_mm_config: LinearMMConfig | None, gemm_input_role: GemmInputRole | None = GemmInputRole.INPUT,
        axiswise_dim: int | None = None,
    ) -> Float8TrainingTensor:  # fmt: skip
        assert axiswise_dim in (None, 0, -1), f"axiswise_dim must be None, 0 or -1, got {axiswise_dim}"
        self: Float8TrainingTensor = torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=orig_dtype,
            layout=data.layout, device=data.device, requires_grad=data.requires_grad,
        )  # fmt: skip
        self._data, self._scale, self._orig_dtype = data, scale, orig_dtype
        self._linear_mm_config = LinearMMConfig() if linear_mm_config is None else linear_mm_config
        self._gemm_input_role, self._axiswise_dim = gemm_input_role, axiswise_dim
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def with_data(self, data: Tensor, scale: Tensor | None = None, **changes: Any) -> Float8TrainingTensor:
        """A tensor with other codes, optionally another scale, ``orig_dtype`` or ``axiswise_dim``."""
        fields: dict[str, Any] = {"orig_dtype": self._orig_dtype, "axiswise_dim": self._axiswise_dim, **changes}
        dtype, dim = fields["orig_dtype"], fields["axiswise_dim"]
        scale = self._scale if scale is None else scale
        return Float8TrainingTensor(data, scale, dtype, self._linear_mm_config, self._gemm_input_role, dim)

    def to_original_precision(self) -> Tensor:
        """data / scale, in the original dtype. The gradient passes unchanged."""
        return _FromFloat8.apply(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Float8TrainingTensor(lp_dtype={self._data.dtype}, scale={self._scale}, "
            f"linear_mm_config={self._linear_mm_config}, axiswise_dim={self._axiswise_dim}\n"
            f"gemm_input_role={self._gemm_input_role}\nas_orig_prec={self.to_original_precision()})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = ("_orig_dtype", "_linear_mm_config", "_gemm_input_role", "_axiswise_dim")
        return ["_data", "_scale"], {name: getattr(self, name) for name in names}

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], metadata: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> Float8TrainingTensor:
        return Float8TrainingTensor(
            inner_tensors["_data"], inner_tensors["_scale"], metadata["_orig_dtype"], metadata["_linear_mm_config"],
            metadata["_gemm_input_role"], metadata["_axiswise_dim"],
        )  # fmt: skip

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if not all(issubclass(cls, t) or t.__name__ in _TRACERS for t in types):
            return NotImplemented
        handler = FLOAT8_OPS_TABLE.get(func)
        if handler is None:
            raise NotImplementedError(
                f"attempting to run {func}, this is not supported on a Float8TrainingTensor; call "
                "to_original_precision() first"
            )
        return handler(func, args, kwargs or {})


class _FromFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:  # type: ignore[override]
        return (tensor._data.to(tensor._orig_dtype) / tensor._scale).to(tensor._orig_dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


# -- operators ---------------------------------------------------------------------------------------------------------


def implements(aten_ops: Iterable[Any]) -> Callable[[Handler], Handler]:
    """Register a handler (aten_op, args, kwargs) -> result. Raises RuntimeError for an operator that has one."""

    def add(handler: Handler) -> Handler:
        for op in aten_ops:
            if op in FLOAT8_OPS_TABLE:
                raise RuntimeError(f"Float8 op {op} is already registered to {FLOAT8_OPS_TABLE[op].__name__}")
            FLOAT8_OPS_TABLE[op] = handler
        return handler

    return add


def _one_scale(aten_op: Any, x: Any) -> None:
    assert x._scale.ndim < 2, f"{aten_op} with axiswise scaling is not supported; call to_original_precision() first"


# -- products ----------------------------------------------------------------------------------------------------------


def _config(a: Any, b: Any) -> ScaledMMConfig:
    for side in (a, b):
        assert isinstance(side, Float8TrainingTensor), (
            f"a product of a Float8TrainingTensor needs two of them, got {type(side).__name__}; cast the other "
            "operand, or call to_original_precision()"
        )
    return choose_scaled_mm_config(a._gemm_input_role, a._linear_mm_config, b._gemm_input_role, b._linear_mm_config)


def preprocess_addmm(a: Float8TrainingTensor, b: Float8TrainingTensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes of a, its scale, codes of b, its scale) for :func:`addmm_float8_unwrapped`: padded if the options ask for
    it, a scale for each row or column if the other operand has that, a in rows and b in columns in memory."""
    a_data, a_scale, b_data, b_scale = a._data, a._scale, b._data, b._scale
    if _config(a, b).pad_inner_dim:
        assert a_data.size(1) == b_data.size(0), (
            f"Inner dims must match for mm, got {a_data.size(1)} and {b_data.size(0)}"
        )
        a_data, b_data = pad_tensor_for_matmul(a_data, 1), pad_tensor_for_matmul(b_data, 0)
    if a._axiswise_dim is None and b._axiswise_dim is not None:
        a_scale = a_scale.repeat(a_data.shape[0]).reshape(-1, 1)
    elif a._axiswise_dim is not None and b._axiswise_dim is None:
        b_scale = b_scale.repeat(b_data.shape[1]).reshape(1, -1)
    return a_data.contiguous(), a_scale, b_data.t().contiguous().t(), b_scale


def _product(a: Any, b: Any, bias: Tensor | None) -> Tensor:
    if _config(a, b).emulate:
        y = torch.mm(a._data.float() / a._scale, b._data.float() / b._scale).to(a._orig_dtype)
        return y if bias is None else y + bias
    return addmm_float8_unwrapped(*preprocess_addmm(a, b), a._orig_dtype, bias=bias)


@implements([aten.mm.default, aten.matmul.default])
def float8_mm(aten_op: Any, args: Any, kwargs: Any = None) -> Tensor:
    return _product(args[0], args[1], None)


@implements([aten.addmm.default])
def float8_addmm(aten_op: Any, args: Any, kwargs: Any = None) -> Tensor:
    """bias + a · b; beta and alpha must be 1."""
    bias, a, b = args
    assert not kwargs or set(kwargs.values()) <= {1}, f"{aten_op}: beta and alpha must be 1, got {kwargs}"
    _config(a, b)
    assert bias.dtype == a._orig_dtype, f"bias dtype must match output dtype, got {bias.dtype} and {a._orig_dtype}"
    return _product(a, b, bias)


# -- views and copies --------------------------------------------------------------------------------------------------


@implements(
    [
        aten._unsafe_view.default, aten.as_strided.default, aten.clone.default, aten.slice.Tensor, aten.fill_.Scalar,
        aten.reshape.default,
    ]
)  # fmt: skip
def float8_desugar_op(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """The operator on the codes; the scale stays."""
    x = args[0]
    if aten_op is not aten.clone.default:
        _one_scale(aten_op, x)
    return x.with_data(aten_op(x._data, *args[1:], **kwargs or {}))


@implements([aten.detach.default, aten.alias.default])
def float8_desugar_data_and_scale_op(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """The operator on the codes and on the scale."""
    x = args[0]
    return x.with_data(aten_op(x._data, *args[1:]), aten_op(x._scale, *args[1:]))


@implements([aten.t.default, aten.transpose.int])
def float8_transpose(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    x = args[0]
    if aten_op is aten.transpose.int:
        _one_scale(aten_op, x)
    scale = aten_op(x._scale, *args[1:]) if x._scale.ndim > 1 else x._scale
    return x.with_data(aten_op(x._data, *args[1:]), scale, axiswise_dim={None: None, 0: -1, -1: 0}[x._axiswise_dim])


@implements([aten.view.default])
def float8_view(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """A view of the codes. With a scale per index of an axis: only to a matrix that keeps this axis."""
    x, shape = args[0], list(args[1])
    data = aten_op(x._data, shape)
    if list(data.shape) == list(x.shape) or x._scale.ndim < 2:
        return x.with_data(data)
    if data.ndim == 2 and x._axiswise_dim is not None:
        kept = 1 if x._axiswise_dim == 0 else 0  # the axis of the matrix that has a scale for each index
        if x._scale.numel() == data.shape[kept]:
            sizes = [1, -1] if kept else [-1, 1]
            return x.with_data(data, x._scale.reshape(sizes), axiswise_dim=x._axiswise_dim)
    raise AssertionError(
        f"{aten_op} of a Float8TrainingTensor {list(x.shape)} with scale {list(x._scale.shape)} over axis "
        f"{x._axiswise_dim} to {shape} is not supported; call to_original_precision() first"
    )


@implements([aten.split.Tensor])
def float8_split(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    _one_scale(aten_op, args[0])
    return [args[0].with_data(piece) for piece in aten_op(args[0]._data, *args[1:], **kwargs or {})]


@implements([aten.cat.default])
def float8_cat(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """Pieces of one tensor, as a split gives them: all with its scale and options."""
    first = args[0][0]
    for piece in args[0]:
        assert isinstance(piece, Float8TrainingTensor), "Expecting all chunks to be of type Float8TrainingTensor"
        _one_scale(aten_op, piece)
        assert piece._scale is first._scale, "Expecting all chunks to have the same scale as a result of a split"
        _same_kind(first, piece, "chunks")
    data = aten_op([piece._data.view(torch.uint8) for piece in args[0]], *args[1:], **kwargs or {})
    return first.with_data(data.view(first._data.dtype))


def _same_kind(a: Any, b: Any, what: str) -> None:
    for name in ("_orig_dtype", "_linear_mm_config", "_gemm_input_role"):
        one, two = getattr(a, name), getattr(b, name)
        assert one == two, f"Expecting all {what} to have the same {name}, got {one} and {two}"
    assert a._data.dtype == b._data.dtype, f"Expecting all {what} to be {a._data.dtype}, got {b._data.dtype}"


@implements([aten.sum.dim_IntList])
def float8_cast_up_op(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """The operator on the values: the gradient of a bias is a sum."""
    _one_scale(aten_op, args[0])
    args, kwargs = tree_map_only(Float8TrainingTensor, lambda x: x.to_original_precision(), (args, kwargs or {}))
    return aten_op(*args, **kwargs)


@implements([aten.is_same_size.default])
def float8_is_same_size(aten_op: Any, args: Any, kwargs: Any = None) -> bool:
    return args[0].shape == args[1].shape


@implements([aten._to_copy.default])
def autocast_to_copy(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """Autocast's cast of an operand: changes the dtype of the product, not the codes."""
    given = {name: value for name, value in (kwargs or {}).items() if value is not None}
    assert set(given) == {"dtype"}, f"a Float8TrainingTensor can be cast to another dtype only, got {sorted(given)}"
    assert given["dtype"] in (torch.float16, torch.bfloat16), (
        f"Only float16 and bfloat16 are supported for autocast w/ Float8TrainingTensor, got {given['dtype']}"
    )
    return args[0].with_data(args[0]._data, orig_dtype=given["dtype"])


@implements([aten.copy_.default])
def copy_fp8(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """A float8 tensor into a high-precision one, or into a float8 one of the same scale and options. Raises
    RuntimeError for a high-precision tensor into a float8 one: its scale might not fit."""
    target, source = args[:2]
    if not isinstance(source, Float8TrainingTensor):
        raise RuntimeError("Unsupported semantics for copy_ in Float8TrainingTensor: cast the source to float8 first")
    _one_scale(aten_op, source)
    if not isinstance(target, Float8TrainingTensor):
        return aten_op(target, source.to_original_precision(), *args[2:])
    _same_kind(target, source, "tensors of a copy")
    assert torch.equal(target._scale, source._scale), "Expecting both Float8TrainingTensors to have the same scale"
    target._data.copy_(source._data)
    return target


@implements([aten.index_put_.default])
def index_put_fp8(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """Codes of one float8 tensor into another of the same scale and dtype."""
    target, indices, values = args[:3]
    assert isinstance(target, Float8TrainingTensor), f"{aten_op}: expecting a Float8TrainingTensor to be indexed"
    assert isinstance(values, Float8TrainingTensor), f"{aten_op}: expecting values that are a Float8TrainingTensor"
    _one_scale(aten_op, target)
    assert torch.equal(target._scale, values._scale), f"{aten_op}: expecting values with the same scale"
    assert target._orig_dtype == values._orig_dtype, f"{aten_op}: expecting values of {target._orig_dtype}"
    assert target._data.dtype == values._data.dtype, f"{aten_op}: expecting codes of {target._data.dtype}"
    aten_op(target._data.view(torch.uint8), indices, values._data.view(torch.uint8), *args[3:], **kwargs or {})
    return target


# -- collectives -------------------------------------------------------------------------------------------------------


def _collectives(*names: str) -> list[Any]:
    """Functional collectives of this build of torch, which may lack torch.distributed."""
    spaces = (torch.ops._c10d_functional, torch.ops.c10d_functional)
    return [getattr(space, name).default for space in spaces for name in names if hasattr(space, name)]


@implements(_collectives("all_gather_into_tensor"))
def allgather_fp8(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """All-gather of the codes; every rank must have the same scale."""
    x = args[0]
    _one_scale(aten_op, x)
    return x.with_data(aten_op(x._data.contiguous(), *args[1:], **kwargs or {}))


@implements(_collectives("wait_tensor", "_wrap_tensor_autograd"))
def wait_tensor_fp8(aten_op: Any, args: Any, kwargs: Any = None) -> Any:
    """The operator on the codes that a collective is writing."""
    x = args[0]
    _one_scale(aten_op, x)
    return x.with_data(aten_op(x._data, *args[1:], **kwargs or {}))


torch.serialization.add_safe_globals([Float8TrainingTensor, ScaledMMConfig, GemmInputRole, LinearMMConfig])
