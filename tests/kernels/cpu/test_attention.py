"""Native attention and rotary embeddings beside their plain reference in kernels/block.py: values, masks, sizes,
strides; every instruction set and number of threads gives the same bits, and no sequence depends on its batch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pennyweight.core import blocks
from pennyweight.core.formats import INT8, get_format
from pennyweight.core.layouts import portable_layout
from pennyweight.core.packing import unpack_bits
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.block import Call, Norm, Past, attend, normalize, rotate
from pennyweight.kernels.cpu import library
from pennyweight.kernels.native import attention as native_attention
from pennyweight.support.errors import ArgumentError

pytestmark = pytest.mark.skipif(library.available() is not True, reason="no native library here")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# (batch, query heads, shared heads, query tokens, keys, channels)
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 1, 17, 64),
    (1, 8, 2, 1, 300, 80),
    (2, 2, 1, 3, 700, 33),
    (1, 4, 4, 4, 600, 128),
    (1, 32, 1, 2, 257, 16),
    (2, 4, 4, 17, 17, 32),
    (1, 3, 3, 128, 128, 64),
    (2, 6, 2, 70, 300, 33),
    (1, 2, 1, 9, 5, 256),
    (1, 71, 1, 5, 40, 64),
    (1, 2, 1, 6, 0, 64),
    (1, 2, 1, 1, 0, 64),
    (2, 4, 1, 300, 17, 96),
]
LEAST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    library.use_isa("")
    torch.set_num_threads(threads)


def make(shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    b, h, shared, s, length, d = shape
    k, v = (torch.randn(b, shared, length, d).to(kind) for _ in range(2))
    return torch.randn(b, h, s, d), k, v


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    """In float64."""
    b, h, s, d = q.shape
    scale, softcap = how.pop("scale", d**-0.5), how.pop("softcap", 0.0)
    y = attend(q.double(), k.double(), v.double(), Call(mask=mask, **how), scale, softcap)
    return y.view(b, s, h, d).transpose(1, 2)


def close(y: Tensor, expected: Tensor, bound: float = 4e-6) -> None:
    assert y.shape == expected.shape
    assert not y.isnan().any()
    assert (y - expected).abs().max() <= bound if y.numel() else True


MASKS = {
    "none": lambda b, h, s, n: None,
    "padding": lambda b, h, s, n: (torch.arange(n) >= torch.tensor([n // 3, 0])[:b, None]).view(b, 1, 1, n),
    "bool": lambda b, h, s, n: torch.rand(b, 1, s, n) < 0.7,
    "by head": lambda b, h, s, n: torch.rand(1, h, s, n) < 0.7,
    "float": lambda b, h, s, n: torch.randn(1, h, 1, n),
    "bfloat16": lambda b, h, s, n: torch.randn(b, 1, s, n).to(torch.bfloat16),
    "float16 -inf": lambda b, h, s, n: torch.zeros(s, n).masked_fill(torch.rand(s, n) < 0.4, -torch.inf).half(),
    "least": lambda b, h, s, n: torch.zeros(b, 1, s, n).masked_fill(torch.rand(b, 1, s, n) < 0.4, LEAST),
    "strided": lambda b, h, s, n: torch.randn(b, 1, n, 2 * s)[..., ::2].transpose(-1, -2),
    "column": lambda b, h, s, n: torch.rand(b, 1, s, 1) < 0.7,
}  # fmt: skip


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, ...], kind: torch.dtype, isa: str) -> None:
    library.use_isa(isa)
    q, k, v = make(shape, kind)
    for how in ({}, {"causal": True}, {"causal": True, "window": 5}, {"window": 70}, {"softcap": 3.0, "scale": 0.7}):
        close(native_attention.attention(q, k, v, **how), reference(q, k, v, **how))


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks(shape: tuple[int, ...], mask: str, isa: str) -> None:
    library.use_isa(isa)
    q, k, v = make(shape)
    b, h, _, s, n, _ = shape
    allowed = MASKS[mask](b, h, s, n)
    for how in ({}, {"causal": True}, {"causal": True, "window": 20}):
        full = None if allowed is None else allowed.expand(b, h, s, n)
        close(native_attention.attention(q, k, v, allowed, **how), reference(q, k, v, full, **how))


def test_a_row_without_a_key_is_zero() -> None:
    for s in (2, 40):
        q, k, v = make((2, 4, 2, s, 300, 64))
        mask = torch.ones(2, 1, s, 300, dtype=torch.bool)
        mask[1, :, 1] = False
        for m in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
            y = native_attention.attention(q, k, v, m)
            assert (y[1, :, 1] == 0).all()
            assert (y[0] != 0).all()
            close(y, reference(q, k, v, m))
        y = native_attention.attention(q, k[:, :, :1], v[:, :, :1], causal=True)  # the first tokens come before any key
        assert (y[:, :, : s - 1] == 0).all()
        assert torch.equal(y[:, :, -1], v[:, :, 0].repeat_interleave(2, 1))


def test_keys_that_are_not_seen_may_be_anything() -> None:
    for s in (1, 20):
        q, k, v = make((1, 2, 1, s, 300, 64))
        mask = torch.rand(1, 1, s, 300) < 0.5
        mask[..., 7] = False
        expected = native_attention.attention(q, k, v, mask)
        for bad in (torch.nan, torch.inf):
            k[:, :, 7] = bad
            assert torch.equal(native_attention.attention(q, k, v, mask), expected)


def test_rows_of_the_least_number_are_means() -> None:
    """transformers masks with finfo.min: a row of padding has finite scores, which are all alike."""
    for s in (1, 20):
        q, k, v = make((1, 2, 2, s, 50, 64))
        y = native_attention.attention(q, k, v, torch.full((1, 1, s, 50), LEAST))
        close(y, v.mean(2, keepdim=True).expand_as(y), 1e-6)


def test_large_scores_and_nan() -> None:
    for s in (1, 20):
        q, k, v = make((1, 2, 1, s, 300, 64))
        close(native_attention.attention(q * 1e4, k, v), reference(q * 1e4, k, v), 0.02)
        k[:, :, 7] = torch.nan
        assert native_attention.attention(q, k, v).isnan().all()
        assert not native_attention.attention(q, k[:, :, 8:], v[:, :, 8:]).isnan().any()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_instruction_sets_and_threads_give_the_same_bits(shape: tuple[int, ...], kind: torch.dtype) -> None:
    q, k, v = make(shape, kind)
    b, _, _, s, n, _ = shape
    mask, seen = torch.randn(b, 1, s, n), []
    for isa in library.isas():
        library.use_isa(isa)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seen.append(native_attention.attention(q, k, v, mask, causal=True, softcap=9.0))
    assert all(torch.equal(y, seen[0]) for y in seen)


@pytest.mark.parametrize("s", [1, 4, 40])
def test_sequences_do_not_depend_on_their_batch(s: int) -> None:
    """70 sequences are units of work of their own, one is divided into chunks of keys."""
    q, k, v = make((70, 2, 1, s, 600, 32))
    mask = torch.rand(70, 1, s, 600) < 0.5
    y = native_attention.attention(q, k, v, mask)
    for i in (0, 33, 69):
        own = slice(i, i + 1)
        assert torch.equal(native_attention.attention(q[own], k[own], v[own], mask[own]), y[own])


@pytest.mark.parametrize("s", [1, 5])
def test_memory_of_transformers_caches(s: int) -> None:
    """A static cache has room for more tokens; heads of a projection are views [B, S, H, D] transposed."""
    q = torch.randn(2, s, 8, 64).transpose(1, 2)
    room = torch.full((2, 2, 400, 64), torch.nan)
    keys, values = torch.randn(2, 300, 2, 64).transpose(1, 2), torch.randn(2, 2, 300, 64)
    room[:, :, :300] = keys
    expected = reference(q, keys, values, causal=True)
    for k in (keys, room[:, :, :300]):
        y = native_attention.attention(q, k, values, causal=True)
        close(y, expected)
        assert y.transpose(1, 2).is_contiguous()
    for dtype in FLOATS[1:]:
        y = native_attention.attention(q.to(dtype), keys.to(dtype), values.to(dtype), causal=True)
        assert y.dtype is dtype
        exact = reference(q.to(dtype), keys.to(dtype), values.to(dtype), causal=True)
        close(y, exact, 2**-8 * float(exact.abs().max()))


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = make((2, 4, 2, 3, 5, 16))
    attention = native_attention.attention
    for wrong in (
        lambda: attention(q, k[:1], v[:1]),
        lambda: attention(q, k[..., :8], v[..., :8]),
        lambda: attention(q, k, v[:, :, :4]),
        lambda: attention(q, k, v.half()),
        lambda: attention(q[:, :3], k, v),
        lambda: attention(q.double(), k, v),
        lambda: attention(q.transpose(-1, -2).contiguous().transpose(-1, -2), k, v),
        lambda: attention(q, k, v, torch.ones(2, 1, 3, 6)),
        lambda: attention(q, k, v, torch.ones(3, 5, dtype=torch.int64)),
        lambda: attention(q, k, v, window=-1),
        lambda: attention(q, k, v, scale=float("nan")),
        lambda: attention(q.to("meta"), k, v),
        lambda: attention(q, k, v, out=torch.empty(2, 4, 3, 8)),
    ):
        with pytest.raises(ArgumentError):
            wrong()


# -- a quantized past --------------------------------------------------------------------------------------------------


def quantized(
    bits: tuple[int, int], group: int, dtype: torch.dtype, shape: tuple[int, ...], hadamard: tuple[int, int] = (0, 0)
) -> tuple[Past, Tensor, Tensor]:
    """Keys and values as inference/kv_cache.py quantizes them, and their exact values in float64."""
    made = []
    for block, n in zip(((group, 1), (group,)), bits, strict=True):
        spec = QuantSpec(get_format(f"uint{n}"), block, dtype, offset=dtype)
        spec = spec.with_(layout=portable_layout(spec))
        made.append(QT.from_float(torch.randn(shape).to(dtype), spec, "minmax"))
    exact = (exact_values(t, n) for t, n in zip(made, hadamard, strict=True))
    return Past(made[0], made[1], hadamard), *exact  # type: ignore[return-value]


def exact_values(t: QT, hadamard: int = 0) -> Tensor:
    shape, spec = t.shape, t.spec
    codes = unpack_bits(t._codes, spec.format.bits, spec.codes_shape(shape)[-1]).double()
    parts = []
    for part in (t._scale, t._offset):
        part = part.double()
        for axis, size in enumerate(blocks.resolve(spec.block, shape)):
            part = part.repeat_interleave(size, axis)
        parts.append(part)
    found = (codes * parts[0] + parts[1])[..., : shape[-1]]
    if hadamard:
        h = torch.ones(1, 1, dtype=torch.float64)
        while len(h) < hadamard:
            h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), h)
        found = (found.unflatten(-1, (-1, hadamard)) @ h / hadamard**0.5).flatten(-2)
    return found


PASTS = [  # bits, group, dtype, (batch, heads, shared heads, query tokens, past, newest, channels)
    (8, 32, torch.float32, (2, 4, 2, 1, 320, 7, 64)),
    (8, 32, torch.bfloat16, (1, 8, 2, 1, 96, 140, 128)),
    (4, 32, torch.bfloat16, (1, 8, 1, 1, 640, 33, 128)),
    (4, 32, torch.float16, (2, 4, 4, 3, 256, 5, 64)),
    (4, 64, torch.float32, (1, 4, 2, 1, 64, 1, 32)),
    (4, 32, torch.float32, (1, 2, 2, 1, 96, 1, 16)),
    (3, 32, torch.float32, (1, 2, 1, 1, 320, 9, 64)),
    (8, 32, torch.float32, (1, 2, 1, 1, 64, 9, 80)),
    (8, 24, torch.float32, (1, 2, 1, 2, 72, 9, 48)),
    (5, 32, torch.float32, (1, 2, 1, 1, 64, 4, 33)),
    (8, 32, torch.float32, (2, 4, 2, 20, 96, 20, 64)),
    (4, 32, torch.float32, (1, 4, 2, 50, 320, 60, 33)),
    (2, 32, torch.float32, (1, 4, 2, 9, 32, 9, 96)),
    (4, 32, torch.bfloat16, (1, 8, 8, 1, 480, 3, 80)),
    (4, 16, torch.float32, (1, 6, 2, 2, 528, 3, 48)),
    (8, 48, torch.bfloat16, (1, 6, 2, 2, 528, 3, 96)),
    (8, 32, torch.float16, (1, 5, 1, 4, 288, 3, 256)),
    (4, 32, torch.float32, (1, 7, 1, 1, 320, 1, 112)),
    (8, 32, torch.float32, (1, 2, 1, 1, 64, 1, 272)),
    (8, 512, torch.float32, (3, 4, 4, 1, 512, 1, 32)),
]


@pytest.mark.parametrize("rotated", [False, True], ids=["", "rotated"])
@pytest.mark.parametrize("case", PASTS, ids=str)
def test_a_quantized_past(case: tuple[int, int, torch.dtype, tuple[int, ...]], rotated: bool) -> None:
    bits, group, dtype, sizes = case
    check_past((bits, bits), group, dtype, sizes, (sizes[-1] & -sizes[-1],) * 2 if rotated else (0, 0))


@pytest.mark.parametrize("s", [1, 4, 9])
@pytest.mark.parametrize("hadamard", [(0, 64), (64, 0), (16, 32), (2, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("bits", [(8, 4), (4, 8), (6, 4)], ids=str)
def test_keys_and_values_of_different_bits_and_rotations(bits: Any, hadamard: Any, s: int) -> None:
    check_past(bits, 32, torch.float32, (2, 4, 2, s, 320, 37, 64), hadamard)


def check_past(
    bits: tuple[int, int], group: int, dtype: torch.dtype, sizes: tuple[int, ...], hadamard: tuple[int, int]
) -> None:
    b, h, shared, s, past, new, d = sizes
    q, k, v = make((b, h, shared, s, new, d), dtype)
    pair, exact_k, exact_v = quantized(bits, group, dtype, (b, shared, past, d), hadamard)
    all_k, all_v = torch.cat([exact_k, k.double()], 2), torch.cat([exact_v, v.double()], 2)
    mask = torch.rand(b, 1, s, past + new) < 0.7
    mask[..., -1] = True
    for how in ({}, {"causal": True}, {"causal": True, "window": 90}, {"mask": mask, "softcap": 4.0}):
        seen = []
        for isa in library.isas():
            library.use_isa(isa)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                seen.append(native_attention.attention(q, k, v, past=pair, **how))
        # codes of 8 and 4 bits are multiplied by numbers of 16 bits if there are few tokens
        close(seen[0], reference(q, all_k, all_v, **how), 3e-4 if s <= 4 and {*bits} & {4, 8} else 1e-5)
        assert all(torch.equal(y, seen[0]) for y in seen)


def test_the_past_of_a_cache() -> None:
    """After tokens were added, sequences selected and tokens removed; codes are views of larger memory."""
    from pennyweight.inference.kv_cache import QuantizedLayer

    for bits, turned, sinks in ((8, False, 0), (4, False, 0), (4, True, 0), (4, None, 5)):
        layer = QuantizedLayer(bits, 32, 40, rotate=turned, sinks=sinks)
        for n in (100, 1, 30, 70):
            layer.update(torch.randn(3, 2, n, 64), torch.randn(3, 2, n, 64))
        layer.batch_select_indices(torch.tensor([2, 0]))
        layer.crop(-3)
        past = layer.past
        assert past is not None
        assert past.hadamard == ((0, 0) if turned is False else (64, 64))
        q = torch.randn(2, 8, 1, 64)
        y = native_attention.attention(q, layer.keys, layer.values, past=past)
        k = torch.cat([exact_values(past.keys, past.hadamard[0]), layer.keys.double()], 2)
        v = torch.cat([exact_values(past.values, past.hadamard[1]), layer.values.double()], 2)
        close(y, reference(q, k, v), 3e-4)
        close(y, reference(q, *(t.double() for t in layer.floats())), 3e-4)  # in the order of the text


def test_a_past_that_does_not_fit_is_refused() -> None:
    q, k, v = make((1, 4, 2, 1, 5, 64))
    good, *_ = quantized((8, 8), 32, torch.float32, (1, 2, 64, 64))
    a, b, _ = good
    attention = native_attention.attention
    attention(q, k, v, past=good)
    signed = QT.from_float(torch.randn(1, 2, 64, 64), QuantSpec(INT8, (32,)))
    wider = QT.from_float(torch.randn(1, 2, 64, 64), a.spec.with_(block=(2, 32, 1)), "minmax")
    short = a.with_(codes=a._codes[:, :, :40])
    for past in ((a, a[:, :, :32].clone()), (a, v), (signed, signed), (a, wider), (short, b), (a.dequantize(), b)):
        with pytest.raises(ArgumentError):
            attention(q, k, v, past=Past(*past))
    for hadamard in ((0, 128), (3, 0), (-2, 0)):
        with pytest.raises(ArgumentError, match="expected a power of two that divides 64"):
            attention(q, k, v, past=Past(a, b, hadamard))


# -- rotary embeddings -------------------------------------------------------------------------------------------------

NORMS = {
    "none": None,
    "rms": Norm("rms", 1e-6, torch.randn(200), offset=1.0),
    "layer": Norm("layer", 1e-5, torch.randn(200), torch.randn(200)),
}


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("kind", ["half", "interleaved", None])
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (80, 32), (33, 6), (128, 90), (200, 200)])
def test_rotary(size: int, rotated: int, kind: str | None, isa: str) -> None:
    library.use_isa(isa)
    for dtype, norm, batch, s, past in (
        (torch.float32, "none", 2, 3, 0),
        (torch.bfloat16, "rms", 1, 20, 7),
        (torch.float16, "layer", 2, 1, 2),
    ):
        n = NORMS[norm]
        if n is not None:
            n = Norm(n.kind, n.eps, n.weight[:size], None if n.bias is None else n.bias[:size], n.offset)  # type: ignore[index]
        rows = torch.randn(batch, s, 10 * size + 5)[..., : 10 * size].unflatten(-1, (10, size))
        q, k, v = rows.split((6, 2, 2), 2)
        angle = torch.randn(1, s, rotated)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        keys, values = (torch.full((batch, 2, 40, size), 9.0).to(dtype) for _ in range(2))
        expected = [t if n is None else normalize(t, n) for t in (q, k)]
        expected = [rotate(t, cos, sin, kind, rotated) for t in expected]
        before = v.clone()
        torch.set_num_threads(2)
        native_attention.rotary(q, k, v, keys, values, past, cos, sin, kind, n, n)
        assert torch.equal(v, before)
        new = slice(past, past + s)
        torch.testing.assert_close(q, expected[0], atol=3e-6, rtol=0)
        if n is None:
            assert torch.equal(q, expected[0])
        torch.testing.assert_close(
            keys[:, :, new].float(), expected[1].transpose(1, 2).to(dtype).float(), atol=0.05, rtol=0.01
        )
        assert torch.equal(values[:, :, new], v.transpose(1, 2).to(dtype))
        for t in (keys, values):
            assert (t[:, :, :past] == 9).all()
            assert (t[:, :, past + s :] == 9).all()


@pytest.mark.parametrize("kind", ["half", "interleaved"])
def test_rotary_gives_the_same_bits_everywhere(kind: str) -> None:
    seen = []
    for isa in library.isas():
        library.use_isa(isa)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            q, k, v = torch.randn(2, 50, 8, 80), torch.randn(2, 50, 2, 80), torch.randn(2, 50, 2, 80)
            keys, values = (
                torch.zeros(2, 2, 60, 80, dtype=torch.bfloat16),
                torch.zeros(2, 2, 60, 80, dtype=torch.bfloat16),
            )
            n = Norm("layer", 1e-5, torch.randn(80), torch.randn(80))
            native_attention.rotary(
                q, k, v, keys, values, 9, torch.randn(2, 50, 80), torch.randn(2, 50, 80), kind, n, n
            )
            seen.append((q, keys, values))
    assert all(torch.equal(x, y) for some in seen for x, y in zip(some, seen[0], strict=True))


def test_rotary_refuses_what_does_not_fit() -> None:
    q, k, v = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16)
    keys, values, cos = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16), torch.ones(1, 2, 16)
    rotary = native_attention.rotary
    for wrong in (
        lambda: rotary(q, k, v, keys, values, 4, cos, cos, "half"),
        lambda: rotary(q, k, v, keys, values, -1, cos, cos, "half"),
        lambda: rotary(q, k, v, keys, values, 0, None, None, "half"),
        lambda: rotary(q, k, v, keys, values, 0, cos[..., :5], cos[..., :5], "half"),
        lambda: rotary(q, k, v, keys, values, 0, cos, cos, "quarter"),
        lambda: rotary(q[:, :, :3], k, v, keys, values, 0),
        lambda: rotary(q.half(), k, v, keys, values, 0),
        lambda: rotary(q, k, v, keys.half(), values, 0),
        lambda: rotary(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, keys, values, 0),
        lambda: rotary(q, k, v, keys, values, 0, q_norm=Norm("rms", 1e-6, torch.ones(8))),
    ):
        with pytest.raises(ArgumentError):
            wrong()
