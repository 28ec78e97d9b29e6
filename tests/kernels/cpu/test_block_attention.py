"""Native steps of rotary embeddings and attention within blocks, beside their reference."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from pennyweight.core.formats import get_format
from pennyweight.core.layouts import portable_layout
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.block import (
    AttentionStep,
    Call,
    Columns,
    Heads,
    LinearStep,
    Norm,
    NormStep,
    Past,
    RotaryStep,
    Steps,
    run_reference,
)
from pennyweight.kernels.cpu import library
from pennyweight.support.errors import ArgumentError
from tests.kernels.cpu.test_block import DTYPES, compiled, isa, layer, norm, random, run, threads

__all__ = ["isa", "threads"]  # fixtures
pytestmark = pytest.mark.skipif(library.available() is not True, reason="the native library was not built")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def encoder(dtype: torch.dtype, act: str = "float", d: int = 72, f: int = 112, heads: int = 3) -> Steps:
    """As in BERT: attention over the tokens of the call, norms after the residuals."""

    def w(n: int, k: int) -> Any:
        return layer(n, k, "row", act, dtype)

    h = Heads(heads, heads, d // heads)
    return Steps(
        (
            LinearStep(0, (w(d, d), w(d, d), w(d, d)), (2, 3, 4)),
            AttentionStep(Columns(2), 5, h, h.size**-0.5, Columns(3), Columns(4)),
            LinearStep(5, (w(d, d),), (6,), residual=0),
            LinearStep(6, (w(f, d),), (7,), norm("layer", d, dtype), normed=8, act="gelu"),
            LinearStep(7, (w(d, f),), (6,), residual=8),
            NormStep(6, 1, norm("layer", d, dtype)),
        ),
        (d, d, d, d, d, d, d, f, d),
        dtype,
    )


HEADS = Heads(4, 2, 24)


def decoder(dtype: torch.dtype, name: str = "int4", d: int = 96, f: int = 160, **options: Any) -> Steps:
    """As in Llama and Qwen: norms before, one product for q, k and v, rotary embeddings, a cache, gates."""

    def w(n: int, k: int) -> Any:
        return layer(n, k, name, "float", dtype)

    heads = options.pop("heads", HEADS)
    q, kv = heads.query * heads.size, heads.shared * heads.size
    columns = Columns(2), Columns(2, q), Columns(2, q + kv)
    softcap = options.pop("softcap", 0.0)
    return Steps(
        (
            LinearStep(0, (w(q + 2 * kv, d),), (2,), norm("rms", d, dtype)),
            RotaryStep(*columns, heads, **{"rotary": "half", "rotated": heads.size, **options}),
            AttentionStep(columns[0], 3, heads, heads.size**-0.5, softcap=softcap),
            LinearStep(3, (w(d, q),), (4,), residual=0),
            LinearStep(4, (w(f, d), w(f, d)), (5,), norm("rms", d, dtype), act="silu", gated=True),
            LinearStep(5, (w(d, f),), (1,), residual=4),
        ),
        (d, d, q + 2 * kv, q, d, f),
        dtype,
    )


def angles(batch: int, tokens: int, rotated: int, past: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    at = torch.arange(past, past + tokens)[:, None] * 0.7 ** torch.arange(rotated // 2)
    both = torch.cat((at, at), -1).expand(batch, -1, -1)
    return both.cos().to(dtype), both.sin().to(dtype)


def check(steps: Steps, x: torch.Tensor, make: Callable[[], Call], tolerance: float) -> None:
    """The output, and what is written to the keys and values."""
    mine, theirs = make(), make()
    y, expected = run(compiled(steps), x, mine), run_reference(steps, x, theirs)
    assert y.isfinite().all()
    assert (y.float() - expected.float()).norm() <= tolerance * expected.float().norm()
    for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
        if a is not None and b is not None:
            near = max(tolerance, torch.finfo(a.dtype).eps)
            assert (a.float() - b.float()).norm() <= near * b.float().norm()
            assert torch.equal(a == 9, b == 9)  # untouched


def cache(batch: int, h: Heads, capacity: int, past: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.full((2, batch, capacity, h.shared, h.size), 9, dtype=dtype)
    both[:, :, :past] = random(2, batch, past, h.shared, h.size, dtype=dtype)
    return both[0].transpose(1, 2), both[1].transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_encoder_block(isa: str, threads: int, dtype: torch.dtype) -> None:
    for batch, tokens in ((1, 1), (1, 2), (2, 5), (3, 33)):
        x = random(batch, tokens, 72, dtype=dtype)
        check(encoder(dtype), x, Call, TOLERANCE[dtype])
        allowed = (torch.arange(tokens) < torch.arange(1, batch + 1)[:, None])[:, None, None, :]
        check(encoder(dtype), x, lambda m=allowed: Call(mask=m), TOLERANCE[dtype])
        added = random(1, 3, tokens, tokens, dtype=dtype)
        check(encoder(dtype), x, lambda m=added: Call(mask=m, causal=True, window=4), TOLERANCE[dtype])
    if dtype is torch.float32:
        check(encoder(dtype, "int8"), random(3, 20, 72), Call, 2e-2)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoder_block(isa: str, threads: int, dtype: torch.dtype, stored: torch.dtype) -> None:
    h = HEADS
    steps = decoder(dtype)
    for batch, tokens, past in ((1, 1, 0), (1, 1, 300), (2, 9, 0), (2, 40, 5), (3, 2, 7)):

        def make(batch: int = batch, tokens: int = tokens, past: int = past) -> Call:
            keys, values = cache(batch, h, past + tokens + 3, past, stored)
            cos, sin = angles(1, tokens, h.size, past, dtype)
            return Call(cos, sin, None, True, 0, keys, values, past, past + tokens)

        check(steps, random(batch, tokens, 96, dtype=dtype), make, max(TOLERANCE[dtype], 2 * TOLERANCE[stored]))


@pytest.mark.parametrize(
    "options",
    [
        {"rotary": None, "rotated": 0}, {"rotary": "interleaved"}, {"rotated": 10}, {"softcap": 3.0},
        {"q_norm": norm("rms", 24, offset=1.0), "k_norm": norm("layer", 24)},
        {"q_norm": Norm("rms", 1e-6), "k_norm": norm("rms", 24, torch.bfloat16)},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_heads(isa: str, options: dict[str, Any]) -> None:
    h, rotated = HEADS, options.get("rotated", 24)

    def make() -> Call:
        keys, values = cache(2, h, 20, 8, torch.float32)
        cos, sin = angles(2, 6, rotated, 8)
        mask = torch.ones(2, 1, 6, 17, dtype=torch.bool).tril(8) & (
            torch.arange(17) > torch.arange(2)[:, None, None, None]
        )
        return Call(cos, sin, mask, False, 9, keys, values, 8, 14)

    check(decoder(torch.float32, **options), random(2, 6, 96), make, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_depends_on_nothing_else(isa: str, dtype: torch.dtype) -> None:
    """The same bits in any batch, on any number of threads, in plain C++ and on this instruction set."""
    h, tokens, past = HEADS, 7, 20
    x, steps = random(6, tokens, 96, dtype=dtype), decoder(dtype)
    keys, values = cache(6, h, 40, past, dtype)
    cos, sin = angles(1, tokens, h.size, past, dtype)

    def call(rows: slice) -> Call:
        return Call(cos, sin, None, True, 0, keys[rows].clone(), values[rows].clone(), past, past + tokens)

    block, before = compiled(steps), torch.get_num_threads()
    try:
        library.use_isa("scalar")
        torch.set_num_threads(1)
        expected, stored = run(block, x, call(slice(6))), call(slice(6))
        run(block, x, stored)
        library.use_isa(isa)
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (slice(6), slice(2, 3), slice(4, 6)):
                mine = call(rows)
                assert torch.equal(run(block, x[rows], mine), expected[rows]), (count, rows)
                assert torch.equal(mine.keys, stored.keys[rows])  # type: ignore[index,arg-type]
    finally:
        torch.set_num_threads(before)


WIDE = Heads(4, 2, 64)


def coded(batch: int, h: Heads, tokens: int, bits: int, group: int, dtype: torch.dtype, rotated: bool = False) -> Past:
    """Keys and values as inference/kv_cache.py quantizes them."""
    made = []
    for block in ((group, 1), (group,)):
        spec = QuantSpec(get_format(f"uint{bits}"), block, dtype, offset=dtype)
        x = random(batch, h.shared, tokens, h.size, dtype=dtype, seed=len(made))
        made.append(QT.from_float(x, spec.with_(layout=portable_layout(spec)), "minmax"))
    return Past(made[0], made[1], (h.size & -h.size,) * 2 if rotated else (0, 0))


@pytest.mark.parametrize("rotated", [False, True], ids=["", "rotated"])
@pytest.mark.parametrize(
    ("h", "bits", "group"), [(WIDE, 8, 32), (WIDE, 4, 16), (HEADS, 8, 32), (Heads(3, 1, 80), 4, 32), (WIDE, 3, 24)]
)
def test_codes_before_the_tokens(isa: str, threads: int, h: Heads, bits: int, group: int, rotated: bool) -> None:
    """Also a past that is not in whole groups, and so many sequences that threads take some through all steps."""
    for batch, tokens, codes, past, dtype in (
        (1, 1, 320, 0, torch.float32), (2, 1, 300, 70, torch.float32), (2, 3, 40, 5, torch.bfloat16),
        (70, 1, 16, 3, torch.float32), (1, 9, 270, 20, torch.float32),
    ):  # fmt: skip
        end = past + tokens
        pair = coded(batch, h, codes, bits, group, dtype, rotated)
        mask = random(batch, 1, tokens, codes + end) < 1
        mask[..., -1] = True
        for how in ({}, {"causal": True}, {"causal": True, "window": codes // 2}, {"mask": mask}):

            def make(
                batch: int = batch, tokens: int = tokens, past: int = past, end: int = end, dtype: torch.dtype = dtype,
                codes: int = codes, pair: Any = pair, how: dict[str, Any] = how,
            ) -> Call:  # fmt: skip
                keys, values = cache(batch, h, end + 2, past, dtype)
                cos, sin = angles(1, tokens, h.size, codes + past, dtype)
                return Call(cos, sin, keys=keys, values=values, past=past, length=end, coded=pair, **how)

            x = random(batch, tokens, 96, dtype=dtype)
            check(decoder(dtype, heads=h), x, make, max(1e-4, TOLERANCE[dtype]))


def test_codes_that_do_not_fit_are_refused() -> None:
    h, x = WIDE, random(2, 1, 96)
    keys, values = cache(2, h, 20, 8, torch.float32)
    cos, sin = angles(1, 1, 64)
    pair = coded(2, h, 64, 8, 32, torch.float32)
    good = Call(cos, sin, None, True, 0, keys, values, 8, 9, pair)
    block = compiled(decoder(torch.float32, heads=h))
    expected = run(block, x, good)
    other = coded(1, h, 64, 8, 32, torch.float32)
    for message, change in {
        "does not go before": {"coded": other}, "got Tensor": {"coded": Past(pair[0], values)},
        "73 or more": {"mask": torch.zeros(2, 1, 1, 72)},
        "expected": {"coded": Past(pair[0].with_(codes=pair[0]._codes[:, :, :40]), pair[1])},
    }.items():  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            block.run(x, replace(good, **change))
    assert torch.equal(run(block, x, good), expected)
    pair[0]._codes.zero_()  # the same memory
    assert not torch.equal(run(block, x, good), expected)
    pair[0]._codes.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError):
        block.run(x, good)
    alone = compiled(encoder(torch.float32))
    with pytest.raises(ArgumentError, match="no step reads them"):
        alone.run(random(1, 3, 72), Call(coded=pair))


def test_many_sequences_are_run_in_parts() -> None:
    """More rows than one pass over the steps takes."""
    x = random(24, 100, 72)
    check(encoder(torch.float32), x, Call, 1e-5)
    mask = random(24, 3, 100, 100)
    kept = torch.empty(2400, 72)
    whole = run(compiled(encoder(torch.float32)), x, Call(mask=mask, kept={8: kept}))
    one = torch.empty(100, 72)
    part = run(compiled(encoder(torch.float32)), x[17:18], Call(mask=mask[17:18], kept={8: one}))
    assert torch.equal(part, whole[17:18])
    assert torch.equal(one, kept[1700:1800])


def test_threads_of_python_may_call_one_block() -> None:
    block, xs = compiled(encoder(torch.float32)), [random(1, n, 72) for n in range(1, 40)]
    expected = [run(block, x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for y, wanted in zip(pool.map(lambda x: run(block, x), xs), expected, strict=True):
                assert torch.equal(y, wanted)


def test_calls_that_do_not_fit_are_refused() -> None:
    h, x = HEADS, random(2, 6, 96)
    keys, values = cache(2, h, 20, 8, torch.float32)
    cos, sin = angles(1, 6, 24)
    good = Call(cos, sin, None, True, 0, keys, values, 8, 14)
    block = compiled(decoder(torch.float32))
    run(block, x, good)
    wrong: dict[str, dict[str, Any]] = {
        "no keys": {"keys": None}, "expected keys and values": {"past": 15},
        "14 or more": {"keys": keys[:, :, :13], "values": values[:, :, :13]},
        "cos and sin of one shape": {"cos": cos[:, :5]},
        "expected cos and sin": {"cos": cos[..., :8], "sin": sin[..., :8]},
        "contiguous channels": {"keys": keys.transpose(2, 3).contiguous().transpose(2, 3)},
        "expected a mask": {"mask": torch.zeros(2, 1, 6, 13)}, "not be negative": {"window": -1},
        "native code needs": {"values": values.to("meta")},
        "contiguous elements of": {"mask": torch.zeros(2, 1, 6, 14, dtype=torch.float64)},
    }  # fmt: skip
    for message, change in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            block.run(x, replace(good, **change))
    with pytest.raises(ArgumentError, match=r"expected an input \[batch, tokens, 96\]"):
        block.run(x[..., :95], good)
    run(block, x, good)
