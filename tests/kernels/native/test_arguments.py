"""Native code is called from kernels/native alone, with arguments that were checked."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pennyweight
from pennyweight.core.formats import INT4, INT8
from pennyweight.core.numerics import LookupTable
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.cpu import abi, library
from pennyweight.kernels.cpu.convert import rounding_of
from pennyweight.kernels.cpu.matrix_view import affine
from pennyweight.kernels.native import attention as native_attention
from pennyweight.kernels.native import convert as native_convert
from pennyweight.kernels.repack import prepare
from pennyweight.support.errors import ArgumentError
from tests.kernels.cpu.native import abi as header
from tests.kernels.cpu.native import called

PACKAGE = Path(pennyweight.__file__).parent
# Who else may ask for an address, and what for. None of them gives it to the native library.
ADDRESSES = {
    "kernels/triton/launch.py": "gives it to Triton's launcher, of tensors that gpu_arguments.py has checked",
    "kernels/torch_int8.py": "alignment, which torch's own kernel needs",
    "kernels/gpu_arguments.py": "alignment, which GPU kernels need",
    "quantize/rollback.py": "identity", "core/ops/inplace.py": "identity", "core/storage.py": "refuses",
    "integrations/diffusers.py": "identity", "core/ops/view.py": "identity",
    "distributed/collectives.py": "identity",
    "distributed/fsdp.py": "identity", "inference/fuse_conv_net.py": "identity",
    "distributed/sharding.py": "identity", "core/tensor.py": "identity", "export/graph_capture.py": "identity",
    "io/state_dict.py": "identity", "io/gguf/blocks.py": "alignment", "optim/base.py": "identity",
}  # fmt: skip
NATIVE = [path.relative_to(PACKAGE).as_posix() for path in sorted((PACKAGE / "kernels" / "native").glob("*.py"))]
WITHOUT_ADDRESSES = {"pw_abi", "pw_isa_count", "pw_isa_name", "pw_isa_here", "pw_isa_use"}
native = pytest.mark.skipif(library.available() is not True, reason=str(library.available()))


def uses(path: Path, name: str) -> bool:
    """Whether a file calls or looks up something of that name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(
        (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)
        for node in ast.walk(tree)
    )


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_only_one_folder_calls_native_functions() -> None:
    native_names = re.compile(r"\bpw_[a-z_]+\b")
    inside = {*NATIVE, "kernels/cpu/library.py", "kernels/cpu/abi.py"}
    for path in files():
        name = path.relative_to(PACKAGE).as_posix()
        if name in inside:
            continue
        assert not native_names.search(path.read_text(encoding="utf-8")), f"{name} names a native function"
        loads = re.search(
            r"\blibrary\.(native|load)\b|from \S*library import .*\b(native|load)\b", path.read_text(encoding="utf-8")
        )
        assert not loads, f"{name} takes the native library; call pennyweight.kernels.native.linear"


def test_only_one_folder_gives_addresses_away() -> None:
    asking = {path.relative_to(PACKAGE).as_posix() for path in files() if uses(path, "data_ptr")}
    assert asking - {*NATIVE} <= ADDRESSES.keys()


def test_every_exported_function_is_called_there() -> None:
    exported = set(called.exported())
    texts = [(PACKAGE / name).read_text(encoding="utf-8") for name in NATIVE]
    named = set(re.findall(r'"(pw_\w+)"', "".join(texts)))
    assert exported == abi.SIGNATURES.keys()
    assert named == exported - WITHOUT_ADDRESSES


def test_constants_structures_and_signatures_are_those_of_the_header() -> None:
    """Else run: python -m tests.kernels.cpu.native.abi"""
    assert header.MODULE.read_text("utf-8") == header.module(header.HEADER.read_text("utf-8"))
    for odd in ("union U { int x; };", "struct S { int64_t bits : 3; };", "struct S { double x; };"):
        with pytest.raises(ValueError, match=r"abi\.h"):
            header.module(odd)


def rows(n: int, k: int, **kinds: Any) -> Any:
    return affine(QuantSpec(INT8, (-1,)), (n, k), torch.float32)


def bad(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors in the place of t that native code must not get."""
    wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
    short = t.flatten()[:-1]
    found = {"meta": t.to("meta"), "short": short, "every second": wide[..., ::2], "float64": t.double()}
    if t.is_floating_point():
        found["negated"] = torch._neg_view(t)
    return found


def calls() -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Each call with tensors that it takes; what is done with them is tested elsewhere."""
    a, q = rows(20, 64), rounding_of(QuantSpec(INT8, (-1,)), (20, 64), torch.float32, "symmetric", None)
    codes, scale, x = torch.zeros(20, 64, dtype=torch.int8), torch.ones(20, 1), torch.ones(20, 64)
    packed = torch.zeros(2, 2 * 64 * 4, dtype=torch.uint8)
    return {
        "pack_codes": (lambda c, o: native_convert.pack_codes(c, 64, 4, 0, o), [codes.view(torch.uint8), packed]),
        "pack_stream": (
            lambda s, o: native_convert.pack_stream(s, 64, 64, 4, 8, o),
            [torch.zeros(20, 32, dtype=torch.uint8), packed],
        ),
        "unpack_codes": (
            lambda p, o: native_convert.unpack_codes(p, 64, 4, 0, o), [packed, torch.zeros(20, 64, dtype=torch.uint8)],
        ),
        "dequantize": (
            lambda c, s, i, o: native_convert.dequantize(a, (c, s, None, None), i, o, 1),
            [codes, scale, torch.arange(20), torch.zeros(20, 64)],
        ),
        "quantize": (
            lambda x, c, s, room: native_convert.quantize(q, x, (c, s, None, None), room, 1),
            [x, codes, scale, torch.zeros(42, dtype=torch.float64)],
        ),
        "ranges": (lambda x, o: native_convert.ranges(a, x, o, 1), [x, torch.zeros(20, 1, 2)]),
        "gptq_block": (
            lambda w, u, keep, f, s, z, a, b, c, codes, v, e: native_convert.gptq_block(
                w, u, (keep, f, s, z, a, b, c), (8, 0, 15, 8), codes, v, e, 1
            ),
            [x, torch.eye(20), *(torch.ones(20, 64) for _ in range(7)), codes.clone(), x.clone(), x.clone()],
        ),
        "gptq_block of a table": (
            lambda w, u, keep, f, s, c, levels, numbers, codes, v, e: native_convert.gptq_block(
                w, u, (keep, f, s, None, None, None, c), (0, 0, 255, 0), codes, v, e, 1, False,
                LookupTable(levels, numbers, 3),
            ),
            [
                x, torch.eye(20), *(torch.ones(20, 64) for _ in range(4)), torch.arange(7.0), torch.arange(16.0),
                codes.clone(), x.clone(), x.clone(),
            ],
        ),
        "squared_errors": (
            lambda x, h, f, s, z, a, b, c, e: native_convert.squared_errors(
                x, h, (f, s, z, a, b, c), (8, 0, 15, 8), e, 1
            ),
            [x, torch.ones(5, 64), *(torch.ones(20) for _ in range(7))],
        ),
        "squared_errors of a table": (
            lambda x, f, s, c, levels, numbers, e: native_convert.squared_errors(
                x, None, (f, s, None, None, None, c), (0, 0, 255, 0), e, 1, LookupTable(levels, numbers, 3)
            ),
            [x, *(torch.ones(20) for _ in range(3)), torch.arange(7.0), torch.arange(16.0), torch.ones(20)],
        ),
        "finite": (lambda x: native_convert.finite(x, 1), [x]),
        "attention": (
            lambda q, k, v, m, o: native_attention.attention(q, k, v, m, out=o),
            [
                torch.ones(2, 4, 3, 8), torch.ones(2, 2, 5, 8), torch.ones(2, 2, 5, 8), torch.ones(3, 5),
                torch.ones(2, 4, 3, 8),
            ],
        ),
        "rotary": (
            lambda q, k, v, keys, values, c, s: native_attention.rotary(q, k, v, keys, values, 1, c, s, "half"),
            [torch.ones(2, 3, 4, 8), torch.ones(2, 3, 2, 8), torch.ones(2, 3, 2, 8), torch.ones(2, 2, 5, 8),
             torch.ones(2, 2, 5, 8), torch.ones(2, 3, 8), torch.ones(2, 3, 8)],
        ),
        "probe": (lambda x: native_convert.probe(0, x, x.numel() * 4, 1), [torch.ones(4096)]),
    }  # fmt: skip


@native
@pytest.mark.parametrize("name", calls() if library.available() is True else [])
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    run, tensors = calls()[name]
    run(*tensors)
    tried = 0
    for i, t in enumerate(tensors):
        for label, wrong in bad(t).items():
            if (name, label) in (("finite", "short"), ("quantize", "every second"), ("probe", "short")):
                continue  # one piece of memory as well; rows may lie apart; its size goes with it
            if name == "attention" and i == 3 and label == "every second":
                continue  # a mask has any strides
            if name == "quantize" and label == "float64" and t.dtype is torch.float64:
                continue
            with pytest.raises(ArgumentError):
                run(*tensors[:i], wrong, *tensors[i + 1 :])
            tried += 1
    assert tried >= 3


@native
def test_indices_out_of_range_are_refused() -> None:
    run, (codes, scale, _, out) = calls()["dequantize"]
    for index in (-1, 20, 1 << 40):
        with pytest.raises(IndexError, match="rows 0 to 19"):
            run(codes, scale, torch.full((20,), index), out)


def weight() -> QT:
    return prepare(QT.from_float(torch.randn(48, 96), QuantSpec(INT4, (32,))))


@native
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w._codes.resize_(1),
        lambda w: w._scale.resize_(1),
        lambda w: w._codes.untyped_storage().resize_(0),
        lambda w: w._scale.set_(torch.ones(3)),
    ],
)
def test_a_part_that_lost_its_memory_is_refused(change: Callable[[QT], Any]) -> None:
    """FSDP frees parameters by resizing their storage; a checkpoint loader assigns ``.data``."""
    w, x = weight(), torch.randn(2, 96)
    F.linear(x, w)
    change(w)
    with pytest.raises(RuntimeError):
        F.linear(x, w)


@native
def test_a_part_of_another_size_is_refused_when_it_is_bound() -> None:
    w = weight()
    for slot, part in (("codes", w._codes[:1]), ("scale", w._scale[:1]), ("scale", w._scale.double())):
        broken = w.with_(**{slot: part})
        with pytest.raises(ArgumentError, match=slot):
            F.linear(torch.randn(2, 96), broken)


@native
def test_tables_live_as_long_as_what_points_to_them() -> None:
    """80 custom formats: a cache of 64 tables let the first go while their addresses stayed in use."""
    from pennyweight.core.formats import Format

    kept = {}
    for i in range(80):
        f = Format(
            f"native_test_{i}", 4, "table", torch.uint8, 0.0, float(15 + i), tuple(float(n + i) for n in range(16))
        )
        w = QT.from_float(torch.rand(8, 64) * (15 + i), QuantSpec(f, (-1,)))
        kept[i] = w, w.dequantize()
    for w, value in kept.values():
        assert torch.equal(w.dequantize(), value)
