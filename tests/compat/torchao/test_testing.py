"""torchao.testing: its conformance cases, run on this package's tensor and on a class of one's own."""

import unittest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

import pennyweight as pw
from pennyweight.compat.torchao import hardware
from pennyweight.compat.torchao import harness as testing
from pennyweight.compat.torchao import harness_parallel as testing_parallel
from pennyweight.compat.torchao.base_tensor import TorchAOBaseTensor
from pennyweight.compat.torchao.dtypes import AffineQuantizedTensor, to_affine_quantized_intx
from pennyweight.compat.torchao.quantization import Int8Tensor
from pennyweight.core.numerics import sqnr

aten = torch.ops.aten
FOUNDING = {"mapping_type": pw.MappingType.ASYMMETRIC, "block_size": (1, 32), "target_dtype": torch.uint8}
INT4 = pw.QuantSpec(pw.get_format("int4"), (32,))


class Rows(TorchAOBaseTensor):
    """int8 [.., N, K] with a scale [.., N, 1]: a tensor as users of the field write them."""

    tensor_data_names = ["codes", "scale"]  # noqa: RUF012
    tensor_attribute_names = ["dtype"]  # noqa: RUF012

    def __new__(cls, codes: Any, scale: Any, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=dtype)

    def __init__(self, codes: Any, scale: Any, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def dequantize(self) -> torch.Tensor:
        return (self.codes * self.scale).to(self.dtype)


def to_rows(x: torch.Tensor, bits: int = 8) -> Rows:
    top = 2 ** (bits - 1) - 1
    scale = (x.float().abs().amax(-1, keepdim=True) / top).clamp(min=1e-8)
    return Rows(torch.clamp(torch.round(x / scale), -top, top).to(torch.int8), scale, x.dtype)


@Rows.implements_torch_function([F.linear])
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0], args[1].dequantize(), *args[2:], **kwargs)


@Rows.implements([aten.t.default, aten.transpose.int, aten.select.int])
def _view(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, args[0]._apply_fn_to_data(lambda p: func(p, *args[1:])))


@Rows.implements(aten.slice.Tensor)
def _slice(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, dim, *bounds = args
    # an axis with one scale for all keeps it
    new = w._apply_fn_to_data(lambda p: func(p, dim, *bounds) if p.shape[dim] == w.shape[dim] else p)
    return return_and_correct_aliasing(func, args, kwargs, new)


@Rows.implements(aten.split.Tensor)
def _split(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, size, dim = (*args, 0)[:3]
    return [w.narrow(dim, start, min(size, w.shape[dim] - start)) for start in range(0, w.shape[dim], size)]


@Rows.implements(aten.view.default)
def _same_view(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    assert tuple(args[1]) == tuple(args[0].shape)
    return return_and_correct_aliasing(func, args, kwargs, args[0]._apply_fn_to_data(aten.alias.default))


@Rows.implements(aten.cat.default)
def _cat(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    scales = [w.scale for w in parts]
    scale = scales[0] if scales[0].shape[dim] != parts[0].shape[dim] else func(scales, dim)
    return Rows(func([w.codes for w in parts], dim), scale, parts[0].dtype)


@Rows.implements([aten.mm.default, aten.bmm.default])
def _mm(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func(*(x.dequantize() if isinstance(x, Rows) else x for x in args))


class RowsConfig(pw.AOBaseConfig):
    pass


@pw.register_quantize_module_handler(RowsConfig)
def _to_rows(module: nn.Module, config: RowsConfig) -> nn.Module:
    module.weight = nn.Parameter(to_rows(module.weight.detach()), requires_grad=False)  # type: ignore[arg-type]
    return module


class TestOurs(testing.TorchAOBasicTestCase):
    pass


class TestOursInt4(testing.TorchAOBasicTestCase):
    kwargs = {"spec": INT4}  # noqa: RUF012
    LINEAR_MIN_SQNR = 14


class TestOursCompiled(testing.TorchAOCompileTestCase):
    pass


class TestCurrentEra(testing.TorchAOBasicTestCase):
    """The defaults of torchao 0.18."""

    TENSOR_SUBCLASS = Int8Tensor
    FACTORY_FN = staticmethod(Int8Tensor.from_hp)
    kwargs = {"granularity": pw.PerRow()}  # noqa: RUF012


class TestFoundingEra(testing.TorchAOBasicTestCase):
    """The defaults of torchao 0.12."""

    TENSOR_SUBCLASS = AffineQuantizedTensor
    FACTORY_FN = to_affine_quantized_intx
    kwargs = FOUNDING


class TestFoundingEraCompiled(testing.TorchAOCompileTestCase):
    TENSOR_SUBCLASS = AffineQuantizedTensor
    FACTORY_FN = to_affine_quantized_intx
    kwargs = FOUNDING


class TestRows(testing.TorchAOBasicTestCase):
    TENSOR_SUBCLASS = Rows
    FACTORY_FN = to_rows  # a plain function, which gets no self
    kwargs = {"bits": 7}  # noqa: RUF012
    LINEAR_MIN_SQNR = 34


class TestRowsCompiled(testing.TorchAOCompileTestCase):
    TENSOR_SUBCLASS = Rows
    FACTORY_FN = staticmethod(to_rows)
    kwargs = {}  # noqa: RUF012
    LINEAR_MIN_SQNR = 38


class TestOursParallel(testing_parallel.TorchAOTensorParallelTestCase):
    test_tp_float16 = test_tp_bfloat16 = None


class TestRowsParallel(testing_parallel.TorchAOTensorParallelTestCase):
    TENSOR_SUBCLASS = Rows
    QUANT_METHOD_FN = RowsConfig
    test_tp_float16 = test_tp_bfloat16 = None


class TestIntegration(testing.TorchAOIntegrationTestCase):
    CONFIGS = (pw.Int8WeightOnlyConfig(), pw.Int4WeightOnlyConfig(group_size=64), RowsConfig())

    def test_slice_and_copy(self) -> None:
        for config in self.CONFIGS:
            self._test_slice_and_copy_similar_to_vllm(config)

    def test_narrow(self) -> None:
        for config in self.CONFIGS:
            self._test_narrow_similar_to_vllm(config)

    def test_experts_in_one_parameter(self) -> None:
        for config in self.CONFIGS:
            self._test_quantize_3d_param_similar_to_vllm(config)

    def test_chunks(self) -> None:
        x = torch.randn(128, 256)
        for dim in (0, 1):
            self._test_chunk_similar_to_vllm_llama4(pw.AffineQuantizedTensor.from_float(x, INT4), dim)
            self._test_chunk_similar_to_vllm_llama4(to_rows(x), dim)

    def test_reshaping_experts(self) -> None:
        pw.reset_fallbacks()
        # scales of rows that are joined end to end differ, so the whole is not int8 any more
        with pytest.warns(pw.FallbackWarning, match=r"aten\.cat"):
            self._test_moe_weight_reshape_ops(pw.Int8WeightOnlyConfig())


# -- the cases find what is wrong --------------------------------------------------------------------------------------


def failures(case: type, **changes: Any) -> set[str]:
    """Names of the tests of a case that fail with these class attributes."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(type("Case", (case,), changes)).run(result)
    assert result.testsRun > 0
    return {test.id().rpartition(".")[2] for test, _ in (*result.failures, *result.errors)}


class TestCasesFail(unittest.TestCase):
    def test_a_bad_tensor_is_found(self) -> None:
        class Wrong(Rows):
            def dequantize(self) -> torch.Tensor:
                return 2 * super().dequantize()

        def make(x: torch.Tensor) -> Rows:
            good = to_rows(x)
            return Wrong(good.codes, good.scale, good.dtype)

        given = {"TENSOR_SUBCLASS": Wrong, "FACTORY_FN": make, "kwargs": {}, "LINEAR_MIN_SQNR": 30}
        names = {f"test_linear_device_cpu_{dtype}" for dtype in ("float32", "float16", "bfloat16")}
        assert failures(testing.TorchAOBasicTestCase, **given) == names

    def test_a_bad_flatten_and_a_bad_to_are_found(self) -> None:
        class Wrong(Rows):
            @classmethod
            def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
                return cls(-inner["codes"], inner["scale"], context["dtype"])

            def cpu(self) -> Any:
                return torch.zeros(4, 128)

        def make(x: torch.Tensor) -> Rows:
            good = to_rows(x)
            return Wrong(good.codes, good.scale, good.dtype)

        given = {"TENSOR_SUBCLASS": Wrong, "FACTORY_FN": make, "kwargs": {}, "LINEAR_MIN_SQNR": 30}
        want = {"test_flatten_unflatten", "test_device1_to_device2_device1_cpu_device2_cpu"}
        assert failures(testing.TorchAOBasicTestCase, **given) == want

    def test_a_copy_that_copies_nothing_is_found(self) -> None:
        class Stuck(Rows):
            pass

        Stuck.implements(aten.copy_.default)(lambda func, types, args, kwargs: args[0])

        class StuckConfig(pw.AOBaseConfig):
            pass

        @pw.register_quantize_module_handler(StuckConfig)
        def _(module: nn.Module, config: StuckConfig) -> nn.Module:
            good = to_rows(module.weight.detach())  # type: ignore[arg-type]
            module.weight = nn.Parameter(Stuck(good.codes, good.scale, good.dtype), requires_grad=False)
            return module

        with pytest.raises(AssertionError, match="codes was not copied"):
            testing.TorchAOIntegrationTestCase()._test_slice_and_copy_similar_to_vllm(StuckConfig())


# -- helpers -----------------------------------------------------------------------------------------------------------


def test_copied_tests_are_the_others_own() -> None:
    ran: list[str] = []

    class Source:
        def test_a(self) -> None:
            ran.append(f"a of {type(self).__name__}")

        def test_b(self) -> None:
            ran.append("b")

        def test_c(self) -> None:
            raise AssertionError("known")

        def helper(self) -> None:
            pass

    Source.test_c.broken = True  # type: ignore[attr-defined]

    class Other(unittest.TestCase):
        pass

    skipped = {"test_b": SimpleNamespace(suffixes=("cpu",), is_skip=True)}
    testing.copy_tests(Source, Other, "cpu", skipped, xfail_prop="broken")
    assert {name for name in vars(Other) if "_cpu" in name} == {"test_a_cpu", "test_b_cpu", "test_c_cpu"}
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Other).run(result)
    assert (result.testsRun, len(result.skipped), len(result.expectedFailures)) == (3, 1, 1)
    assert not result.failures
    assert not result.errors
    assert ran == ["a of Other"]
    testing.copy_tests(Source, Other, "gpu", skipped)
    Other("test_b_gpu").test_b_gpu()  # type: ignore[attr-defined]
    Source().test_b()  # the mark is on the copy only
    assert ran == ["a of Other", "b", "b"]


def test_copied_conformance_tests_run() -> None:
    class Copied(testing.TorchAOBasicTestCase):
        TENSOR_SUBCLASS = Rows
        FACTORY_FN = to_rows
        kwargs = {"bits": 8}  # noqa: RUF012

    before = len([name for name in dir(Copied) if name.startswith("test_")])
    testing.copy_tests(testing.TorchAOBasicTestCase, Copied, "rows")
    assert len([name for name in dir(Copied) if name.startswith("test_")]) == 2 * before
    result = unittest.TestResult()
    Copied("test_linear_device_cpu_float32_rows").run(result)
    assert result.testsRun == 1
    assert result.wasSuccessful()


SKIPS = {
    "cuda": (hardware.skip_if_no_cuda(), "torch.cuda.is_available"),
    "xpu": (hardware.skip_if_no_xpu(), "torch.xpu.is_available"),
}


@pytest.mark.parametrize("name", SKIPS)
def test_skips(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decorate, probe = SKIPS[name]

    @decorate
    def test(x: int) -> int:
        """Its own words."""
        return x

    assert (test.__name__, test.__doc__) == ("test", "Its own words.")
    monkeypatch.setattr(probe, lambda: False)
    with pytest.raises(unittest.SkipTest, match="needs"):
        test(1)
    monkeypatch.setattr(probe, lambda: True)
    assert test(1) == 1


def test_skips_that_take_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for skip, target, there in (
        (hardware.skip_if_rocm, "torch.version.hip", "6.0"),
        (hardware.skip_if_xpu, "torch.xpu.is_available", lambda: True),
    ):
        forms = [skip(lambda: 1), skip()(lambda: 1), skip("slow")(lambda: 1)]
        monkeypatch.setattr(target, None if target.endswith("hip") else (lambda: False))
        assert [form() for form in forms] == [1, 1, 1]
        monkeypatch.setattr(target, there)
        for form, words in zip(forms, ("not", "not", ": slow"), strict=True):
            with pytest.raises(unittest.SkipTest, match=words):
                form()


def test_skip_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "get_compute_capability", lambda: 8.9)
    assert hardware.skip_if_compute_capability_less_than(8.9)(lambda: 1)() == 1
    with pytest.raises(unittest.SkipTest, match="needs compute capability 9"):
        hardware.skip_if_compute_capability_less_than(9.0)(lambda: 1)()
    with pytest.raises(unittest.SkipTest, match="gemlite"):
        hardware.skip_if_no_gemlite()(lambda: 1)()


def test_rows_is_a_fair_example() -> None:
    x = torch.randn(16, 64)
    assert sqnr(x, to_rows(x).dequantize()) > 38
