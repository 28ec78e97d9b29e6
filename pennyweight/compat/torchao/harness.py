# ruff: noqa: PT009 (unittest cases, for those who run them without pytest)
"""Conformance tests for weight tensors: subclass one, set your tensor class, and run it under pytest or unittest.

::

    class TestMine(TorchAOBasicTestCase):
        TENSOR_SUBCLASS = MyTensor
        FACTORY_FN = MyTensor.from_float        # (float tensor [N, K], **kwargs) -> MyTensor
        kwargs = {"group_size": 32}
        LINEAR_MIN_SQNR = 30
"""

from __future__ import annotations

import copy
import functools
import inspect
import unittest
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal import common_utils

from ...core.formats import INT8
from ...core.numerics import sqnr
from ...core.spec import QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ...planning.configs import AOBaseConfig
from ...quantize import quantize_
from .model_architectures import LlamaModelsLlama4Experts

__all__ = [
    "TorchAOBasicTestCase", "TorchAOCompileTestCase", "TorchAOIntegrationTestCase", "copy_tests",
]  # fmt: skip

# -- copying -----------------------------------------------------------------------------------------------------------


def copy_tests(
    my_cls: type, other_cls: type, suffix: str, test_failures: Any = None, xfail_prop: str | None = None
) -> None:
    """Give ``other_cls`` every test of ``my_cls`` under the name ``<test>_<suffix>``.

    test_failures: test name → object with ``suffixes`` and ``is_skip``, for those to skip or to expect to fail.
    xfail_prop: name of an attribute that marks tests expected to fail.
    """
    for name, test in list(vars(my_cls).items()):
        if not name.startswith("test_"):
            continue
        new = _copied(test)
        if xfail_prop is not None and hasattr(test, xfail_prop):
            new = unittest.expectedFailure(new)
        failure = (test_failures or {}).get(name)
        if failure is not None and suffix in failure.suffixes:
            new = unittest.skip("named in test_failures")(new) if failure.is_skip else unittest.expectedFailure(new)
        setattr(other_cls, f"{name}_{suffix}", new)


def _copied(test: Any) -> Any:
    """A separate function: marks set on it must not affect the original."""

    @functools.wraps(test)
    def run(self: Any) -> Any:
        return test(self)

    run.__dict__ = copy.deepcopy(test.__dict__)
    return run


# -- cases -------------------------------------------------------------------------------------------------------------

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
over_devices = common_utils.parametrize("device", DEVICES)
over_dtypes = common_utils.parametrize("dtype", DTYPES)


class _TensorTestCase(common_utils.TestCase):
    """The tensor under test: by default int8 with a scale per row."""

    COMMON_DEVICES = DEVICES
    COMMON_DTYPES = DTYPES
    TENSOR_SUBCLASS: Any = AffineQuantizedTensor
    FACTORY_FN: Any = AffineQuantizedTensor.from_float
    kwargs: Any = {"spec": QuantSpec(INT8, (-1,))}  # noqa: RUF012 (subclasses replace it)
    LINEAR_MIN_SQNR: float = 40  # dB against the float linear
    COMPILE_MIN_SQNR: float = 50  # dB of the compiled constructor against the eager one

    def make(self, x: Tensor) -> Any:
        """The tensor under test from a float one. FACTORY_FN may be a plain function: it gets no ``self``."""
        factory = inspect.getattr_static(type(self), "FACTORY_FN")
        if not inspect.isfunction(factory):
            factory = self.FACTORY_FN
        return factory(x, **self.kwargs)

    def weight(self, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any]:
        """A float weight [4, 128] and the tensor under test made of it."""
        x = torch.randn(4, 128, device=device, dtype=dtype)
        return x, self.make(x)

    def assert_sqnr(self, reference: Tensor, approximation: Tensor, least: float) -> None:
        self.assertGreater(sqnr(reference, approximation), least)


class TorchAOBasicTestCase(_TensorTestCase):
    """Flattening, devices and dtypes, ``t``, ``linear``."""

    def test_flatten_unflatten(self) -> None:
        _, w = self.weight()
        names, context = w.__tensor_flatten__()
        inner = {name: getattr(w, name) for name in names}
        again = type(w).__tensor_unflatten__(inner, context, w.size(), w.stride())
        self.assertEqual(w.dequantize(), again.dequantize())

    @over_devices
    @over_dtypes
    def test_hp_tensor_device_dtype(self, device: str, dtype: torch.dtype) -> None:
        x, w = self.weight(device, dtype)
        self.assertIsInstance(w, self.TENSOR_SUBCLASS)
        self.assertEqual((w.shape, w.device), (x.shape, x.device))

    @common_utils.parametrize("device1", DEVICES)
    @common_utils.parametrize("device2", DEVICES)
    def test_device1_to_device2(self, device1: str, device2: str) -> None:
        _, w = self.weight(device1, torch.bfloat16)
        for moved in (w.to(device=device2), w.to(device2), getattr(w, device2)()):
            self.assertIsInstance(moved, self.TENSOR_SUBCLASS)
            self.assertEqual(moved.device.type, device2)
            self.assertEqual(moved.dequantize().cpu(), w.dequantize().cpu())

    @over_devices
    @over_dtypes
    def test_transpose(self, device: str, dtype: torch.dtype) -> None:
        _, w = self.weight(device, dtype)
        self.assertEqual(w.t().shape, (128, 4))

    @over_devices
    @over_dtypes
    def test_linear(self, device: str, dtype: torch.dtype) -> None:
        x, w = self.weight(device, dtype)
        act = torch.randn(32, 128, device=device, dtype=dtype)
        got = nn.functional.linear(act, w)
        self.assertEqual(got.dtype, dtype)
        self.assert_sqnr(nn.functional.linear(act, x), got, self.LINEAR_MIN_SQNR)


class TorchAOCompileTestCase(_TensorTestCase):
    """Tensors as inputs, outputs and weights of compiled functions."""

    def setUp(self) -> None:
        super().setUp()
        # All cases compile the same few functions, and past a number of variants torch would run them eagerly.
        torch.compiler.reset()
        self.addCleanup(torch.compiler.reset)

    @over_devices
    @over_dtypes
    def test_input_output_tensor_subclass(self, device: str, dtype: torch.dtype) -> None:
        _, w = self.weight(device, dtype)
        got = torch.compile(lambda tensor: tensor)(w)
        self.assertIsInstance(got, self.TENSOR_SUBCLASS)
        self.assertEqual(w.dequantize(), got.dequantize())

    @over_devices
    @over_dtypes
    def test_input_tensor_subclass(self, device: str, dtype: torch.dtype) -> None:
        _, w = self.weight(device, dtype)
        got = torch.compile(lambda tensor: tensor.dequantize())(w)
        self.assertNotIsInstance(got, self.TENSOR_SUBCLASS)
        self.assertEqual(w.dequantize(), got)

    @over_devices
    @over_dtypes
    def test_output_tensor_subclass(self, device: str, dtype: torch.dtype) -> None:
        x, w = self.weight(device, dtype)
        got = torch.compile(self.make)(x)
        self.assertIsInstance(got, self.TENSOR_SUBCLASS)
        if dtype != torch.bfloat16:  # where a compiler that keeps more digits moves many codes
            self.assert_sqnr(w.dequantize(), got.dequantize(), self.COMPILE_MIN_SQNR)

    @over_devices
    @over_dtypes
    def test_linear_compile(self, device: str, dtype: torch.dtype) -> None:
        x, w = self.weight(device, dtype)
        act = torch.randn(32, 128, device=device, dtype=dtype)
        linear = nn.Linear(128, 4, bias=False, device=device, dtype=dtype)
        linear.weight = nn.Parameter(w, requires_grad=False)
        self.assert_sqnr(nn.functional.linear(act, x), torch.compile(linear)(act), self.LINEAR_MIN_SQNR)


class TorchAOIntegrationTestCase(common_utils.TestCase):
    """Operations of serving engines on weights during loading. Call the methods with a config from your own tests.

    Weights are on the accelerator if there is one. Weights of this package are unpacked first: packed ones do not
    support writable slices (shard first, pack after).
    """

    def _device(self) -> Any:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")

    def _quantized(self, weight: Tensor, config: AOBaseConfig) -> nn.Parameter:
        """A linear layer's weight [.., N, K] under a config."""
        linear = nn.Linear(weight.shape[-1], weight.shape[-2], bias=False, device=self._device())
        linear.weight = nn.Parameter(weight.to(self._device()), requires_grad=False)
        quantize_(linear, config)
        w = linear.weight
        if isinstance(w, AffineQuantizedTensor):
            w = nn.Parameter(w.to_layout("plain"), requires_grad=False)
        return w

    def _parts(self, w: Any) -> dict[str, Tensor]:
        return {name: getattr(w, name) for name in w.__tensor_flatten__()[0]}

    def _test_slice_and_copy_similar_to_vllm(self, config: AOBaseConfig) -> None:
        """Halves of one weight are copied into those of another, through ``narrow``."""
        param = self._quantized(torch.randn(1024, 1024, dtype=torch.bfloat16), config)
        loaded = self._quantized(1 + 2 * torch.randn(1024, 1024, dtype=torch.bfloat16), config)
        for start in (0, 512):
            into, source = param.data.narrow(0, start, 512), loaded.narrow(0, start, 512)
            self.assertFalse(torch.equal(into.dequantize(), source.dequantize()))
            into.copy_(source)
            for name, part in self._parts(source).items():
                self.assertTrue(torch.equal(getattr(into, name), part), f"{name} was not copied")
        self.assertTrue(torch.equal(param.dequantize(), loaded.dequantize()))

    def _test_narrow_similar_to_vllm(self, config: AOBaseConfig) -> None:
        """``narrow`` to the whole keeps the rank of what the tensor holds."""
        w = self._quantized(torch.randn(1024, 1024, dtype=torch.bfloat16), config)
        new = w.narrow(1, 0, 1024)
        for name, part in self._parts(w).items():
            self.assertEqual(getattr(new, name).ndim, part.ndim, name)
        self.assertTrue(torch.equal(new.dequantize(), w.dequantize()))

    def _test_quantize_3d_param_similar_to_vllm(self, config: AOBaseConfig) -> None:
        """The weights of experts in one parameter [E, N, K], and one of them."""
        w = self._quantized(torch.randn(6, 256, 512, dtype=torch.bfloat16), config)
        self.assertEqual(w[0].shape, (256, 512))
        self.assertTrue(torch.equal(w[0].dequantize(), w.dequantize()[0]))

    def _test_chunk_similar_to_vllm_llama4(self, ao_tensor: Any, dim: int) -> None:
        """``cat`` undoes ``chunk``, and ``chunk`` does not modify its argument."""
        before = ao_tensor.dequantize().clone()
        again = torch.cat(ao_tensor.chunk(2, dim=dim), dim=dim)
        self.assertTrue(torch.equal(again.dequantize(), before))
        self.assertTrue(torch.equal(ao_tensor.dequantize(), before))

    @torch.no_grad()
    def _test_moe_weight_reshape_ops(self, config: AOBaseConfig) -> None:
        """Two halves of a mixture of experts are quantized, reshaped as checkpoints are, joined, and run."""
        experts, tokens, dim, hidden = 2, 64, 128, 256
        names, dtype, device = ("w1", "w2", "w3"), torch.bfloat16, self._device()
        x = torch.randn(4, tokens, dim, dtype=dtype, device=device)

        def renew(moe: nn.Module, name: str, w: Any) -> None:
            setattr(moe, name, nn.Parameter(w, requires_grad=False))

        def new(width: int) -> LlamaModelsLlama4Experts:
            return LlamaModelsLlama4Experts(experts, dim, width, dtype, device)

        halves = [new(hidden), new(hidden)]
        for moe in halves:
            for name in names:
                transposed = getattr(moe, name).detach().transpose(1, 2).contiguous()
                renew(moe, name, self._quantized(transposed, config).transpose(1, 2))
            before = moe(x)
            for name in names:
                flat = getattr(moe, name).transpose(1, 2).flatten(0, 1)
                renew(moe, name, flat.unflatten(0, (experts, -1)).transpose(1, 2))
            self.assertEqual(before, moe(x))
        states = [moe.state_dict() for moe in halves]
        ours = all(isinstance(w, AffineQuantizedTensor) for state in states for w in state.values())
        if not ours:  # a tensor that keeps one scale for all it joins
            _share_parameters(states)
        both = new(2 * hidden)
        joined = {n: torch.cat([state[n] for state in states], dim=-2 if n == "w2" else -1) for n in names}
        both.load_state_dict(joined, assign=True)
        got = both(x)
        self.assertEqual(got.shape, (x.shape[0] * tokens, dim))
        if ours:  # the hidden units of both halves, so the sum of their outputs
            self.assertGreater(sqnr(sum(moe(x).double() for moe in halves), got), 30)


def _share_parameters(states: list[dict[str, Any]]) -> None:
    """Give every weight the scale and zero point with the same name in the first state."""
    for state in states[1:]:
        for name, w in state.items():
            for part in ("scale", "zero_point"):
                if hasattr(w, part):
                    setattr(w, part, getattr(states[0][name], part))


common_utils.instantiate_parametrized_tests(TorchAOBasicTestCase)
common_utils.instantiate_parametrized_tests(TorchAOCompileTestCase)
