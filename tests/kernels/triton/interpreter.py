"""Runs kernels in Triton's interpreter and prints JSON: ``python -m tests.kernels.triton.interpreter NAME ARGUMENT..``

The interpreter is chosen when triton is imported, for the whole process, so tests start this file: :func:`interpret`.
"""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
MODULES = ("numpy", "torch", "triton")  # numpy before torch: their OpenMP libraries are then the same
CHECKS: dict[str, Callable[..., Any]] = {}


def interpret(name: str, *arguments: object, timeout: float = 900) -> Any:
    """What a check returns, in a process of its own."""
    from tests import forked  # here, as the process imports this file, too

    command = ["-m", "tests.kernels.triton.interpreter", name, *arguments]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache}
        done = forked.run(command, modules=MODULES, cwd=ROOT, env=env, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def patch_once_per_launch() -> None:
    """Triton's interpreter replaces the functions of its language at each launch, and again at each call of a device
    function, where nothing is left to replace after the first call of a module: a fourth of the time of a launch."""
    from triton.runtime import interpreter

    launch, patch, done = interpreter.GridExecutor.__call__, interpreter._patch_lang, {}

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(self, *args, **kwargs)

    def patched(fn: Any) -> Any:
        if id(fn.__globals__) not in done:
            done[id(fn.__globals__)] = patch(fn)
        return done[id(fn.__globals__)]

    interpreter.GridExecutor.__call__ = launched
    interpreter._patch_lang = patched


def run_once() -> None:
    """The self-test computes each weight-only product twice, because programs of a device may race. In the interpreter
    they run one after the other. test_programs_that_share_a_tile runs twice, with the locks of the first run."""
    from pennyweight.kernels.triton import self_test

    real, done = self_test._product, {}

    def product(case: Any, *given: Any) -> Any:
        if case not in done:
            done[case] = real(case, *given)
        return done[case]

    self_test._product = product


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    CHECKS[function.__name__] = function
    return function


def wrong(found: dict[str, str | None]) -> dict[str, str]:
    return {name: why for name, why in found.items() if why is not None}


def watch_locks() -> list[Any]:
    """All locks that kernels get from now on."""
    from pennyweight.kernels.triton import workspace

    given, real = [], workspace.locks

    def locks(count: int, device: Any) -> Any:
        given.append(real(count, device))
        return given[-1]

    workspace.locks = locks
    return given


@check
def first_use(which: str) -> dict[str, Any]:
    """All cases, or those that differ without a device: streams, graphs and chains are about its order of work, and are
    products like the others here."""
    from pennyweight.kernels.triton import self_test

    run_once()
    given, real = watch_locks(), self_test.cases
    ordered = ("stream", "graph", "chain")
    if which == "different":
        self_test.cases = lambda full=False: (c for c in real(full) if not any(word in c.name for word in ordered))
    found = self_test.prove("cpu")
    return {"wrong": wrong(found), "count": len(found), "locks": [int(lock.abs().sum()) for lock in given]}


@check
def whole(part: str, parts: str) -> dict[str, Any]:
    """Every n-th of all cases."""
    from pennyweight.kernels.triton import self_test

    chosen = list(self_test.cases(full=True))[int(part) :: int(parts)]
    self_test.cases = lambda full=False: iter(chosen)  # type: ignore[assignment]
    found = self_test.prove("cpu", full=True)
    return {"wrong": wrong(found), "count": len(found)}


def specs() -> dict[str, Any]:
    from pennyweight.kernels.triton.layout import LAYOUT

    return {str(spec): spec for spec, _ in LAYOUT.examples}


@check
def formats(dtype: str) -> dict[str, Any]:
    """One product of each format and scale."""
    import torch

    from pennyweight.kernels.triton import self_test

    run_once()
    found = {}
    for i, (name, spec) in enumerate(specs().items()):  # 300 columns: a whole group of 256 and a part of one
        case = self_test.Case(name, spec, getattr(torch, dtype), 1 + i % 3, 70 if i % 3 else 50, 300, bias=i % 2 == 0)
        found[name] = self_test.run(case, "cpu")
    return {"wrong": wrong(found), "count": len(found)}


@check
def codes(dtype: str) -> dict[str, Any]:
    """Each code of each format comes out as its number: by the product with rows that have a single one, and by the
    kernel that dequantizes."""
    import torch

    from pennyweight.core.numerics import quantize
    from pennyweight.core.tensor import AffineQuantizedTensor
    from pennyweight.kernels.triton import self_test, tiles, weight_only
    from pennyweight.kernels.triton.codes import decoding

    dtype, found, seen = getattr(torch, dtype), {}, set()
    for name, spec in specs().items():
        kind = (decoding(spec.format, spec.mid), bool(spec.zero_point), type(spec.scale))
        if kind in seen:
            continue
        seen.add(kind)
        table = spec.format.values
        count = len(table) or 2**spec.format.bits
        n, k = max(count, 64), 320  # each code in each column, and whole tiles
        spec = spec.with_(layout="plain")
        plain = quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(3)), spec)
        rows, columns = (torch.arange(size) for size in plain.codes.shape)
        every = (rows[:, None] + 7 * columns).remainder(count).to(torch.uint8)
        for _ in range(2):  # codes of NaN and infinity, which spoil whole sums, become zero
            codes = spec.format.from_unsigned(every)
            w = AffineQuantizedTensor(plain._replace(codes=codes), spec, (n, k), dtype)
            numbers = self_test._weight(w)
            every[:n, :k][~numbers.isfinite()] = 0
        columns = torch.arange(0, k, 20)  # some of each plane, even and odd ones
        columns[::2] += 1
        x = torch.zeros(len(columns), k, dtype=dtype)
        x[torch.arange(len(columns)), columns] = 1.0
        packed = w.to_layout("gpu")
        static = weight_only.static_of(packed.spec, (n, k), dtype)
        held = weight_only.operand(static, packed.spec, packed.parts)
        tile = tiles.by_rule("cuda:sm_90", static.decoding, len(columns), small=static.small)
        y = weight_only.launch(x, held, None, static, tile, 1)
        for what, got, expected in (
            ("product", y, numbers[:, columns].t()),
            ("dequantized", weight_only.dequantize(held, static), numbers),
        ):
            far = ((got.float() - expected).abs() / expected.abs().clamp_min(1e-6)).max()
            # one rounding to bfloat16, half the distance of int8's greatest codes; tables are rounded before
            limit = 2**-7 if static.decoding.kind == "table" else 2**-8
            found[f"{name}: {what}"] = None if far <= limit else f"differs by {float(far):.1e}"
    return {"wrong": wrong(found), "count": len(found)}


def _example(spec: Any, m: int, n: int, k: int) -> tuple[Any, ...]:
    import torch

    from pennyweight.kernels.triton import self_test, weight_only

    case = self_test.Case("", spec, torch.bfloat16, m, n, k, bias=True)
    w, x, bias = self_test._inputs(case, torch.device("cpu"))
    exact = x.double() @ self_test._weight(w).double().t() + bias.double()
    static = weight_only.static_of(w.spec, (n, k), torch.bfloat16)
    return static, weight_only.operand(static, w.spec, w.parts), x, bias, exact


@check
def splits(which: str) -> dict[str, Any]:
    """The number of programs that share a tile changes results by rounding only; two runs have the same bits."""
    import torch

    from benchmarks.gpu import aot_compile
    from pennyweight.kernels.triton import tiles, weight_only

    given, found, sizes = watch_locks(), {}, set()
    for name in ("int4 g64", "int8 row"):
        static, w, x, bias, _ = _example(aot_compile.FORMATS[name], 5, 70, 2600)
        tile = tiles.by_rule("cuda:sm_90", static.decoding, 8, small=static.small)
        one = weight_only.launch(x, w, bias, static, tile, 1)
        for processors in (2, 4, 16) if which == "all" else (2, 4) if name == "int4 g64" else (16,):
            size = weight_only.grid(static, 5, tile, processors)[1]
            sizes.add(size)
            several = weight_only.launch(x, w, bias, static, tile, processors)
            far = float((several.double() - one.double()).norm() / one.double().norm())
            same = torch.equal(several, weight_only.launch(x, w, bias, static, tile, processors))
            found[f"{name} in {size}"] = None if far < 2e-3 and same else f"differs by {far:.1e}, same bits: {same}"
    return {"wrong": wrong(found), "sizes": sorted(sizes), "locks": [int(lock.abs().sum()) for lock in given]}


@check
def candidates(bucket: str) -> dict[str, Any]:
    """Every tile that may be measured for a bucket gives the product."""
    from benchmarks.gpu import aot_compile
    from pennyweight.kernels.triton import tiles, weight_only

    found, m = {}, int(bucket) - 3
    static, w, x, bias, exact = _example(aot_compile.FORMATS["int4 g64"], m, 70, 300)
    for tile in tiles.candidates("cuda:sm_90", static.decoding, int(bucket), small=static.small):
        y = weight_only.launch(x, w, bias, static, tile, 16)
        far = float((y.double() - exact).norm() / exact.norm())
        found[str(tile)] = None if far < 4e-3 else f"differs by {far:.1e}"
    return {"wrong": wrong(found), "count": len(found)}


@check
def broken() -> dict[str, Any]:
    """A kernel that decodes integers wrongly, on a device that seems to be there."""
    import torch

    from pennyweight.core.formats import INT4
    from pennyweight.core.spec import QuantSpec
    from pennyweight.kernels.table import Case, select
    from pennyweight.kernels.triton import self_test, self_test_verdict, weight_only
    from pennyweight.support import environment

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_name = lambda device: "Card"
    self_test_verdict.target_of = lambda device: "cuda:sm_90"
    self_test_verdict._digest = lambda device: "digest"
    self_test_verdict.register(lambda device, family: self_test.prove("cpu", family=family))
    cases = list(self_test.products())[:2]  # one is enough to refuse
    self_test.cases = lambda full=False: iter(cases)  # type: ignore[assignment]
    real = weight_only._options
    weight_only._options = lambda *known: {**real(*known), "ZERO": real(*known)["ZERO"] + 1}
    case = Case(
        QuantSpec(INT4, (64,), scale=torch.bfloat16, layout="gpu"), None, (64, 128), torch.bfloat16, "cuda:sm_90"
    )
    os.environ[environment.GPU.name] = "1"
    trusted = select("linear", case).name
    del os.environ[environment.GPU.name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        proven = [select("linear", replace(case, shape=(64, k))).name for k in (192, 256)]
        why = self_test_verdict.refusal("cuda:sm_90", "weight_only")
    found = [str(warning.message) for warning in caught]
    return {"warnings": found, "trusted": trusted, "proven": proven, "why": why}


def _activations(which: str) -> list[Any]:
    """All, or all of one format of each kind and one of each other format."""
    import torch

    from pennyweight.core.formats import E4M3, E5M2, INT7, INT8
    from pennyweight.core.spec import ActivationSpec, QuantSpec

    found, eps = [], torch.finfo(torch.float32).eps
    for f in (INT8, INT7, E4M3, E5M2):
        integer = f.kind == "int"
        for block in ((-1,), None):
            found += [ActivationSpec(QuantSpec(f, block), "dynamic", rule) for rule in (None, "absmax")]
            found += [ActivationSpec(QuantSpec(f, block), "static")]
            if integer:
                found += [ActivationSpec(QuantSpec(f, block), eps=eps)]
                found += [ActivationSpec(QuantSpec(f, block, zero_point=True), mode) for mode in ("dynamic", "static")]
    return [
        a for a in found if which == "all" or a.spec.format in (INT8, E4M3) or a == ActivationSpec(a.spec, "dynamic")
    ]


@check
def quantized(dtype: str, which: str) -> dict[str, Any]:
    """Codes and parameters of inputs, and their values, against the CPU's: bit for bit, with NaN, infinity, zeros and
    subnormal numbers, in one piece and in steps."""
    import torch

    from pennyweight.kernels.activation import encode_activation, quantize_activation
    from pennyweight.kernels.triton import quantize
    from pennyweight.kernels.triton.self_test_inputs import difference

    dtype, found = getattr(torch, dtype), {}
    info = torch.finfo(dtype)
    for act in _activations(which):
        for m, k, widest in ((8, 70, 16384), (1, 1, 16384), (9, 300, 128)):
            quantize.WIDEST, quantize._STEP = widest, min(widest, 4096)
            quantize._launcher.cache_clear()
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
            x = (x * torch.exp2(torch.arange(m) * 3.0 - 9)[:, None]).to(dtype)
            if act.spec.block is not None and m > 7:
                x[0], x[1, 0], x[2, -1], x[3, 3] = 0, float("nan"), float("inf"), -float("inf")
                x[4], x[5, ::2], x[6] = info.smallest_normal * torch.rand(k), -0.0, info.max
                x[6, 0] = -info.max
            scale = zero = None
            if act.mode == "static":
                scale = torch.tensor(0.03) if act.spec.block is None else torch.rand(m) * 0.1 + 0.001
                zero = torch.tensor(-5, dtype=torch.int8) if act.spec.zero_point else None
            got, want = (run(x, act, scale, zero) for run in (quantize.encode, encode_activation))
            pairs = [(got.codes, want.codes), (got.scale, want.scale), (got.zero_point, want.zero_point)]
            pairs += [(run(x, act, scale, zero) for run in (quantize.fake_quantized, quantize_activation))]
            for name, (a, b) in zip(("codes", "scale", "zero point", "values"), pairs, strict=True):
                found[f"{act} {act.rule} {act.eps} {m} x {k}: {name}"] = difference(a, b, name)
    return {"wrong": wrong(found), "count": len(found)}


@check
def product_tiles(bias: str) -> dict[str, Any]:
    """int8 and float8 products with each way to load, and with tiles that programs share. bias: the shape with one."""
    import torch

    from pennyweight.kernels.triton.scaled_mm import Tile
    from pennyweight.kernels.triton.self_test_inputs import E4M3_TOKEN, INT8_TOKEN, _product

    given, found = watch_locks(), {}
    tiles = (Tile(32, 64, 32, 4, 2, blocks=True), Tile(32, 64, 64, 4, 2), Tile(16, 64, 32, 4, 2, True))
    for tile in tiles:
        for m, n, k in ((70, 136, 176), (5, 72, 1040)):
            for act in (INT8_TOKEN, E4M3_TOKEN) if tile.swap else (INT8_TOKEN,):
                _, check_it, _ = _product(torch.bfloat16, m, n, k, act=act, bias=m == int(bias), tile=tile)
                found[f"{act} {tile} {m} {n} {k}"] = check_it(torch.device("cpu"))
    return {"wrong": wrong(found), "count": len(found), "locks": [int(lock.abs().sum()) for lock in given]}


@check
def same_in_any_batch() -> bool:
    """A row of an int8 product has the same bits in a batch of any size, with other tiles and other splits."""
    import torch

    from pennyweight.kernels.triton import scaled_mm
    from pennyweight.kernels.triton.self_test_inputs import FULL, INT8_TOKEN, numbers

    spec, n, k = INT8_TOKEN.spec, 72, 1040
    from pennyweight.core.tensor import AffineQuantizedTensor

    w = AffineQuantizedTensor.from_float(numbers(n, k, FULL, special=False), spec)
    bound = scaled_mm.bind_static(w.spec, INT8_TOKEN, (n, k), torch.bfloat16)
    x, bias = numbers(140, k, torch.bfloat16, special=False), numbers(1, n, torch.bfloat16)[0]
    whole = bound.run_with(x, w.parts, bias)
    return all(torch.equal(bound.run_with(x[:m], w.parts, bias), whole[:m]) for m in (1, 17, 40, 70))


@check
def quantized_inputs() -> dict[str, Any]:
    """Weights in layout "gpu" under schemes that quantize the input: against float64, also with a permutation."""
    import torch

    import pennyweight as pw
    from pennyweight.kernels.activation import quantize_activation
    from pennyweight.kernels.triton import weight_only

    found: dict[str, str | None] = {}
    for config in (pw.Int8DynamicActivationInt4WeightConfig(), pw.Float8DynamicActivationInt4WeightConfig()):
        layer = torch.nn.Linear(256, 100, dtype=torch.bfloat16).requires_grad_(False)
        pw.quantize_(layer, config)
        w, x = layer.weight.data.to_layout("gpu"), torch.randn(5, 256, dtype=torch.bfloat16)
        perm = torch.randperm(256)
        for order in (None, perm):
            held = w.with_(perm=order)
            static = weight_only.static_of(held.spec, tuple(held.stored_shape), torch.bfloat16)
            y = weight_only.bind_static(static, held.spec, held.act).run_with(x, held.parts, layer.bias.data)
            inputs = quantize_activation(x, held.act, None, None).double()
            if order is not None:
                inputs = inputs.index_select(-1, order)
            numbers = w.with_(perm=None).to_layout("plain").dequantize(torch.float32).double()
            exact = inputs @ numbers.t() + layer.bias.double()
            error = float((y.double() - exact).norm() / exact.norm())
            found[f"{type(config).__name__} {order is not None}"] = None if error < 4e-3 else f"{error:.1e}"
    return {"wrong": wrong(found), "count": len(found)}


if __name__ == "__main__":
    patch_once_per_launch()
    print(json.dumps(CHECKS[sys.argv[1]](*sys.argv[2:])))
