"""Calls recorded from torchao 0.9, 0.12 and 0.18 (tests/golden) give the same here: bits, dtypes, shapes."""

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pennyweight.planning import granularity
from pennyweight_torchao.enums import MappingType, ZeroPointDomain

GOLDEN = Path(__file__).parent / "golden"
RELEASES = ("0.9", "0.12", "0.18")
FILES = (
    "qparams", "primitives", "format_primitives", "groupwise", "int8_matmul", "observers",
)  # fmt: skip
ENUMS = {"MappingType": MappingType, "ZeroPointDomain": ZeroPointDomain}


@functools.cache
def calls(release: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"torchao_calls_{release}.json").read_text())["calls"]


@functools.cache
def tensors(release: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"torchao_calls_{release}.safetensors")


@functools.cache
def ours() -> dict[str, Any]:
    modules = [importlib.import_module(f"pennyweight_torchao.{file}") for file in FILES]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def decode(v: Any, release: str) -> Any:
    if isinstance(v, list):
        return [decode(e, release) for e in v]
    if not isinstance(v, dict):
        return v
    if "tensor" in v:
        t = tensors(release)[v["tensor"]]
        return t.view(getattr(torch, v["dtype"])) if "dtype" in v else t
    if "torch" in v:
        return getattr(torch, v["torch"])
    if "enum" in v:
        return ENUMS[v["enum"][0]][v["enum"][1]]
    if "granularity" in v:
        return getattr(granularity, v["granularity"][0])(*v["granularity"][1:])
    raise AssertionError(v)


def same(got: Any, want: Any, approx: bool) -> None:
    if isinstance(want, list) and all(isinstance(n, int) for n in want):
        assert list(got) == want
    elif isinstance(want, list):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w, approx)
    elif want is None:
        assert got is None
    else:
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        if not approx:
            assert torch.equal(got.view(torch.uint8) if got.dtype.itemsize == 1 else got,
                               want.view(torch.uint8) if want.dtype.itemsize == 1 else want)  # fmt: skip
        elif want.dtype.is_floating_point:
            torch.testing.assert_close(got, want, rtol=0.02, atol=1e-3)
        else:  # codes that lie on the edge between two
            assert (got.int() - want.int()).abs().max() <= 1
            assert (got != want).float().mean() < 0.02


@pytest.mark.parametrize(("release", "name"), [(r, n) for r in RELEASES for n in sorted({c["name"] for c in calls(r)})])
def test_calls(release: str, name: str) -> None:
    for call in calls(release):
        if call["name"] != name:
            continue
        kwargs = {key: decode(value, release) for key, value in call["kwargs"].items()}
        got = ours()[name](*decode(call["args"], release), **kwargs)
        for x in decode(call.get("inputs", []), release):
            assert got(x) is x
        if "inputs" in call:
            got = got.calculate_qparams()
        same(got, decode(call["result"], release), call.get("approx", False))


def test_every_release_is_recorded() -> None:
    assert [len({call["name"] for call in calls(release)}) for release in RELEASES] == [7, 4, 17]


# -- the families of torchao_0.18.json ---------------------------------------------------------------------------------

NEWEST = Path(__file__).parents[3] / "tests" / "golden"
FAMILIES = ("affine", "affine_options", "vec", "affine_tinygemm", "affine_no_preserve_zero", "affine_no_zero_point")
CASES: dict[str, dict[str, Any]] = json.loads((NEWEST / "torchao_0.18.json").read_text())["cases"]


@functools.cache
def newest() -> dict[str, torch.Tensor]:
    return load_file(NEWEST / "torchao_0.18.safetensors")


@pytest.mark.parametrize("name", [name for name in CASES if name.split(".")[0] in FAMILIES])
def test_affine_families(name: str) -> None:
    case, f = CASES[name], ours()
    args = dict(case["args"])
    x = newest()[case["inputs"]["input"]]
    mapping, block = MappingType[args.pop("mapping_type")], args.pop("block_size")
    target = (getattr(torch, args.pop("target_dtype")), args.pop("quant_min"), args.pop("quant_max"))
    options = {key: getattr(torch, v) if isinstance(v, str) else v for key, v in args.items()}
    kind = case["api"].rpartition(".")[2]
    suffix = "_no_zero_point" if kind == "_quantize_affine_no_zero_point" else ""
    if kind == "_choose_qparams_affine_tinygemm":
        suffix = "_tinygemm"
    choose = f["choose_qparams_affine" if suffix == "_no_zero_point" else kind]
    scale, zero_point = choose(x, mapping, block, *target, **options)
    quantize, dequantize = (f[f"_{v}_affine{suffix}" if suffix else f"{v}_affine"] for v in ("quantize", "dequantize"))
    zero_point = None if suffix == "_no_zero_point" else zero_point
    codes = quantize(x, block, scale, zero_point, *target)
    back = dequantize(codes, block, scale, zero_point, *target, output_dtype=x.dtype)
    got = {"codes": codes, "scale": scale, "zero_point": zero_point, "dequantized": back}
    for role in {*case["tensors"], *case.get("same_as", {})}:
        same(got[role], newest()[case.get("same_as", {}).get(role, f"{name}.{role}")], approx=False)
