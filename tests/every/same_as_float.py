"""What products, lookups and convolutions do with arguments that fit, and with those that do not.

    python -m tests.every.same_as_float [config ...]

Each case is run with a quantized weight and with what it dequantizes to. Either both give a result, equal within the
arithmetic of the config, or both raise the same kind of exception. Where dtypes differ, float raises, and a quantized
weight computes in the dtype of the input: there the twin is cast to that dtype first.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core.spec import SPECS
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.repack import prepare
from pennyweight.kernels.table import case_of, select
from pennyweight.planning.configs.by_name import CONFIGS, by_name

N, K = 48, 128  # several tiles of rows, several groups of columns
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    """unwritten: torch 2.13 answers with memory that was never written (a weight on a CPU beside a tensor on the meta
    device), so a quantized weight has to refuse."""

    label: str
    run: Callable[[Any], Any]  # weight -> result
    unwritten: bool = False


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    seed = torch.Generator().manual_seed(sum((i + 1) * n for i, n in enumerate(shape)))
    return torch.randn(shape, generator=seed, dtype=torch.float32, device="cpu").to(dtype)


def like(w: Any, dtype: torch.dtype) -> Any:
    """The weight beside an input of a dtype: a quantized one computes in it, a float one has to be cast."""
    return w if isinstance(w, QT) or not dtype.is_floating_point else w.to(dtype)


WIDTHS = (K, K - 1, K + 1, 2 * K, K // 2, 1, 0)
ROWS = ((), (1,), (5,), (2, 3), (0,), (2, 0, 3))


def linears() -> Iterator[Case]:
    biases: list[tuple[int, ...] | None] = [
        None, (N,), (N - 1,), (N + 1,), (1,), (), (5, 1), (5, N), (1, N), (N, 1), (6, N), (3, N), (2, 1, N), (2 * N,),
        (0,),
    ]  # fmt: skip
    for rows, width, bias in itertools.product(ROWS, WIDTHS, biases):
        if width != K and bias not in (None, (N,)):
            continue
        b = None if bias is None else normal(*bias)
        x = normal(*rows, width)
        yield Case(f"linear {(*rows, width)} bias {bias}", lambda w, x=x, b=b: F.linear(x, w, b))
    flipped = normal(2, K, 5).transpose(1, 2)
    for bias in biases[1:]:
        b = normal(*bias)  # type: ignore[misc]
        yield Case(f"linear, strided input, bias {bias}", lambda w, b=b: F.linear(flipped, w, b))
    for dtype in (*FLOATS, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64):
        x, b = normal(5, K).to(dtype), normal(N).to(dtype)
        yield Case(f"linear {dtype}", lambda w, x=x: F.linear(x, like(w, x.dtype)))
        yield Case(f"linear {dtype} bias", lambda w, x=x, b=b: F.linear(x, like(w, x.dtype), b))
        if not dtype.is_floating_point:
            yield Case(f"linear bias {dtype}", lambda w, b=b: F.linear(normal(5, K), w, b))
    meta = torch.empty(5, K, device="meta")
    yield Case("linear meta input", lambda w: F.linear(meta, w))
    yield Case("linear meta input and bias", lambda w: F.linear(meta, w, torch.empty(N, device="meta")))
    yield Case("linear meta bias", lambda w: F.linear(normal(5, K), w, torch.empty(N, device="meta")))
    yield Case("linear negated view", lambda w: F.linear(torch._neg_view(normal(5, K)), w))
    yield Case("linear negated bias", lambda w: F.linear(normal(5, K), w, torch._neg_view(normal(N))))
    yield Case("linear imaginary part", lambda w: F.linear(torch.complex(normal(5, K), normal(5, K)).conj().imag, w))
    yield Case("linear expanded", lambda w: F.linear(normal(1, K).expand(5, K), w))
    yield Case("linear column", lambda w: F.linear(normal(K, 5).t(), w))
    yield Case("linear every second", lambda w: F.linear(normal(5, 2 * K)[:, ::2], w, normal(2 * N)[::2]))
    yield Case("linear reversed rows", lambda w: F.linear(normal(5, K).flip(0), w))
    yield Case("linear parameter", lambda w: F.linear(nn.Parameter(normal(5, K)), w).detach())
    yield Case("linear no tensor", lambda w: F.linear([1.0] * K, w))
    yield Case("linear None", lambda w: F.linear(None, w))
    yield Case("linear number as bias", lambda w: F.linear(normal(5, K), w, 1.0))
    yield Case("linear of a transposed weight", lambda w: F.linear(normal(5, N), w.t()))
    yield Case("linear of a transposed weight, misfit", lambda w: F.linear(normal(5, K), w.t()))
    yield Case("linear of one row", lambda w: F.linear(normal(5, K), w[3]))
    yield Case("linear of one row, bias", lambda w: F.linear(normal(5, K), w[3], normal(1)))
    yield Case("linear of some rows", lambda w: F.linear(normal(5, K), w[3:20], normal(17)))
    yield Case("linear of some rows, bias of all", lambda w: F.linear(normal(5, K), w[3:20], normal(N)))
    yield Case("linear sparse input", lambda w: F.linear(normal(5, K).to_sparse(), w))
    yield Case("linear by module", lambda w: _module(w)(normal(5, K)))
    yield Case("linear by module, misfit", lambda w: _module(w)(normal(5, K - 1)))


def _module(w: Any) -> nn.Module:
    layer = nn.Linear(K, N)
    layer.weight, layer.bias = nn.Parameter(w, requires_grad=False), nn.Parameter(normal(N), requires_grad=False)
    return layer


def products() -> Iterator[Case]:
    for width, rows in itertools.product(WIDTHS, (0, 1, 5)):
        x = normal(rows, width)
        yield Case(f"mm {rows, width}", lambda w, x=x: torch.mm(x, w.t()))
        yield Case(f"mm of the weight {width, rows}", lambda w, x=x: torch.mm(w, x.t()))
        yield Case(f"matmul contiguous {width, rows}", lambda w, x=x: w @ x.t().contiguous())
        yield Case(f"matmul across {rows, width}", lambda w, x=x: x @ w)
        for bias in ((N,), (rows, N), (1, N), (rows, 1), (), (N + 1,), (2, rows, N)):
            b = normal(*bias)
            yield Case(f"addmm {bias} {rows, width}", lambda w, x=x, b=b: torch.addmm(b, x, w.t()))
        yield Case(f"addmm alpha {rows, width}", lambda w, x=x: torch.addmm(normal(N), x, w.t(), alpha=2.0, beta=0.5))
        yield Case(f"addmm of the weight {width, rows}", lambda w, x=x: torch.addmm(normal(N, 1), w, x.t()))
        for batch in ((2,), (2, 3)):
            y = normal(*batch, rows, width)
            yield Case(f"matmul {(*batch, rows, width)}", lambda w, y=y: y @ w.t())
            yield Case(f"matmul of the weight {(*batch, rows, width)}", lambda w, y=y: w @ y.transpose(-1, -2))
        yield Case(f"einsum {rows, width}", lambda w, x=x: torch.einsum("bk,nk->bn", x, w))
        yield Case(f"einsum transposed {rows, width}", lambda w, x=x: torch.einsum("nk,bk->nb", w, x))
        yield Case(f"inner {rows, width}", lambda w, x=x: torch.inner(x, w))
        yield Case(f"tensordot {rows, width}", lambda w, x=x: torch.tensordot(x, w, dims=([1], [1])))
        yield Case(
            f"bmm of an expanded weight {rows, width}",
            lambda w, x=x: torch.bmm(x.expand(4, *x.shape), w.t().expand(4, K, N)),
        )
        yield Case(
            f"bmm of an expanded weight, other batch {rows, width}",
            lambda w, x=x: torch.bmm(x.expand(3, *x.shape), w.t().expand(4, K, N)),
        )
        yield Case(f"mm out {rows, width}", lambda w, x=x: torch.mm(x, w.t(), out=torch.empty(x.shape[0], N)))
    for width in WIDTHS:
        v = normal(width)
        yield Case(f"mv {width}", lambda w, v=v: torch.mv(w, v))
        yield Case(f"matmul of the weight {width}", lambda w, v=v: w @ v)
        yield Case(f"matmul {width}", lambda w, v=v: v @ w.t())
        yield Case(f"vector across {width}", lambda w, v=v: v @ w)
        yield Case(f"addmv {width}", lambda w, v=v: torch.addmv(normal(N), w, v))
        yield Case(f"dot of a row {width}", lambda w, v=v: torch.dot(w[1], v))
        yield Case(f"mv out {width}", lambda w, v=v: torch.mv(w, v, out=torch.empty(N)))
    x = normal(5, K)
    for shape in ((5, N), (5, N + 1), (N, 5), (4, N), (0,)):
        y = torch.zeros(shape)
        with warnings.catch_warnings():
            yield Case(f"matmul out {shape}", lambda w, y=y: torch.matmul(x, w.t(), out=y.clone()))
            yield Case(f"addmm out {shape}", lambda w, y=y: torch.addmm(normal(N), x, w.t(), out=y.clone()))
    yield Case("mm out of another dtype", lambda w: torch.mm(x, w.t(), out=torch.empty(5, N, dtype=torch.int32)))
    yield Case("mm out on meta", lambda w: torch.mm(x, w.t(), out=torch.empty(5, N, device="meta")))
    for dtype in (*FLOATS, torch.float64, torch.int64, torch.complex64):
        y = x.to(dtype)
        yield Case(f"mm {dtype}", lambda w, y=y: y @ like(w, y.dtype).t())
        yield Case(f"mv {dtype}", lambda w, y=y: like(w, y.dtype) @ y[0])
    meta = torch.empty(5, K, device="meta")
    yield Case("mm meta", lambda w: meta @ w.t())
    yield Case("mm of the weight, meta", lambda w: w @ meta.t(), True)
    yield Case("mv meta", lambda w: w @ meta[0])
    yield Case("addmm meta bias", lambda w: torch.addmm(torch.empty(N, device="meta"), x, w.t()))
    yield Case("bmm meta", lambda w: torch.bmm(meta.expand(2, 5, K), w.t().expand(2, K, N)), True)
    yield Case("mm negated view", lambda w: torch._neg_view(x) @ w.t())
    yield Case("mm 3-d", lambda w: torch.mm(x.unsqueeze(0), w.t()))
    yield Case("mm 1-d", lambda w: torch.mm(x[0], w.t()))
    yield Case("bmm 2-d", lambda w: torch.bmm(x, w.t()))
    yield Case("mv 2-d", lambda w: torch.mv(w, x))
    yield Case("matmul 0-d", lambda w: w @ torch.tensor(1.0))
    yield Case("chain", lambda w: torch.linalg.multi_dot([x, w.t(), normal(N, 3)]))
    yield Case("chain misfit", lambda w: torch.linalg.multi_dot([x, w.t(), normal(K, 3)]))


E = 3  # experts


def experts() -> Iterator[Case]:
    """Of a weight [E, N, K]."""
    for count, width in itertools.product((E, 1, 2, 4, 5, 0), (K, K - 1, 2 * K, 0)):
        for rows in (0, 1, 4):
            x = normal(count, rows, width)
            yield Case(f"bmm {(count, rows, width)}", lambda w, x=x: torch.bmm(x, w.transpose(1, 2)))
        x = normal(count, 4, width)
        yield Case(f"bmm of the weight {(count, width, 4)}", lambda w, x=x: torch.bmm(w, x.transpose(1, 2)))
        yield Case(f"matmul {(count, 4, width)}", lambda w, x=x: x @ w.transpose(1, 2))
        yield Case(f"baddbmm {(count, 4, width)}", lambda w, x=x: torch.baddbmm(normal(N), x, w.transpose(1, 2)))
        yield Case(f"einsum {(count, 4, width)}", lambda w, x=x: torch.einsum("emk,enk->emn", x, w))
        yield Case(f"one expert {(count, width)}", lambda w, x=x: F.linear(x, w[1]))
        yield Case(f"bmm across {(count, width)}", lambda w, x=x: torch.bmm(x[..., :N], w))
    yield Case("no such expert", lambda w: w[E])
    yield Case("last expert", lambda w: F.linear(normal(4, K), w[-1]))
    yield Case("bmm meta", lambda w: torch.bmm(torch.empty(E, 4, K, device="meta"), w.transpose(1, 2)), True)
    yield Case("bmm int", lambda w: torch.bmm(torch.ones(E, 4, K, dtype=torch.int64), w.transpose(1, 2)))
    yield Case("bmm strided", lambda w: torch.bmm(normal(E, K, 4).transpose(1, 2), w.transpose(1, 2)))
    for rows, width, ends in itertools.product(
        (0, 7), (K, K - 1, K + 16),
        ([2, 2, 7], [7, 7, 7], [0, 0, 0], [1, 2], [1, 2, 3, 7], [3, 5, 6], []),
    ):  # fmt: skip
        if ends and max(ends) > rows:
            continue
        x = normal(rows, width, dtype=torch.bfloat16)
        offs = torch.tensor(ends, dtype=torch.int32)
        label = f"grouped {rows, width} {ends}"
        yield Case(label, lambda w, x=x, offs=offs: _grouped(x, w, offs))
    for dtype in (torch.int64, torch.float32):
        offs = torch.tensor([2, 2, 7]).to(dtype)
        yield Case(f"grouped, ends {dtype}", lambda w, o=offs: _grouped(normal(7, K, dtype=torch.bfloat16), w, o))
    offs = torch.tensor([[2, 2, 7]], dtype=torch.int32)
    yield Case("grouped, ends 2-d", lambda w: _grouped(normal(7, K, dtype=torch.bfloat16), w, offs))
    yield Case("grouped, no ends", lambda w: _grouped(normal(7, K, dtype=torch.bfloat16), w, None))


def _grouped(x: torch.Tensor, w: Any, offs: torch.Tensor | None) -> torch.Tensor:
    y = torch._grouped_mm(x, like(w, x.dtype).transpose(1, 2), offs=offs)
    return y if offs is None or not offs.numel() else y[: int(offs.flatten()[-1])]  # float leaves the rest unwritten


ENTRIES = 10


def lookups() -> Iterator[Case]:
    """Of a table [ENTRIES, K]."""
    for values in ([0], [9], [10], [-1], [0, 10], [1 << 40], [-(1 << 40)], [], [[1, 2], [3, 4]], 3):
        for dtype in (torch.int64, torch.int32):
            if dtype is torch.int32 and abs(torch.tensor(values).max() if values != [] else 0) >= 1 << 31:
                continue
            index = torch.tensor(values, dtype=dtype)
            yield Case(f"embedding {values} {dtype}", lambda w, i=index: F.embedding(i, w))
            yield Case(f"embedding_bag {values} {dtype}", lambda w, i=index: F.embedding_bag(i.reshape(1, -1), w))
            yield Case(f"index {values} {dtype}", lambda w, i=index: w[i])
    index = torch.tensor([1, 2])
    for dtype in (torch.float32, torch.int8, torch.bool):
        other = index.to(dtype)
        yield Case(f"embedding {dtype}", lambda w, i=other: F.embedding(i, w))
    yield Case("embedding meta", lambda w: F.embedding(torch.full((30,), 7, device="meta"), w), True)
    yield Case("embedding padding", lambda w: F.embedding(index, w, padding_idx=1))
    yield Case("embedding padding out of range", lambda w: F.embedding(index, w, padding_idx=ENTRIES))
    yield Case("embedding of a row", lambda w: F.embedding(index, w[0]))
    yield Case("embedding transposed", lambda w: F.embedding(index, w.t()))
    yield Case("index_select", lambda w: w.index_select(0, index))
    yield Case("index_select out of range", lambda w: w.index_select(0, torch.tensor([ENTRIES])))
    yield Case("gather out of range", lambda w: w.gather(0, torch.full((1, K), ENTRIES)))


C = 16  # channels


def convolutions() -> Iterator[Case]:
    """Of a weight [8, C, 3, 3]."""
    for channels, size in itertools.product((C, C - 1, C + 1, 0), ((6, 6), (3, 3), (2, 2), (0, 6))):
        x = normal(2, channels, *size)
        for bias in (None, (8,), (7,), (1,), (8, 1)):
            b = None if bias is None else normal(*bias)
            yield Case(f"conv2d {tuple(x.shape)} bias {bias}", lambda w, x=x, b=b: F.conv2d(x, w, b))
        yield Case(f"conv2d padded {tuple(x.shape)}", lambda w, x=x: F.conv2d(x, w, padding=1, stride=2))
        yield Case(f"conv2d groups {tuple(x.shape)}", lambda w, x=x: F.conv2d(x, w, groups=2))
        yield Case(f"conv_transpose2d {tuple(x.shape)}", lambda w, x=x: F.conv_transpose2d(x[:, :8], w))
    yield Case("conv2d unbatched", lambda w: F.conv2d(normal(C, 6, 6), w))
    yield Case("conv2d 5-d", lambda w: F.conv2d(normal(1, 1, C, 6, 6), w))
    yield Case("conv1d", lambda w: F.conv1d(normal(2, C, 6), w))
    yield Case("conv3d", lambda w: F.conv3d(normal(2, C, 6, 6, 6), w))
    yield Case("conv2d meta", lambda w: F.conv2d(torch.empty(2, C, 6, 6, device="meta"), w))
    yield Case("conv2d int", lambda w: F.conv2d(torch.ones(2, C, 6, 6, dtype=torch.int64), w))


GROUPS = {"matrix": (linears, products), "experts": (experts,), "table": (lookups,), "kernel": (convolutions,)}
SHAPES = {"matrix": (N, K), "experts": (E, N, K), "table": (ENTRIES, K), "kernel": (8, C, 3, 3)}
OPS = {"matrix": "linear", "experts": "bmm", "table": "embedding", "kernel": "convolution"}


# Beside the named ones: what has a kernel or parts of its own.
MORE: dict[str, pw.AOBaseConfig] = {
    "int8-static": pw.Int8StaticActivationInt8WeightConfig(0.03),
    "codebook": pw.CodebookWeightOnlyConfig(bits=2, dim=2),
    "q4_k": pw.SpecConfig(SPECS["q4_k"]),
    "q6_k": pw.SpecConfig(SPECS["q6_k"]),
    "float8-blocks": pw.Float8WeightOnlyConfig(granularity=pw.PerBlock((16, 16))),
}
NAMES = (*CONFIGS, *MORE)


def weights(name: str) -> Iterator[tuple[str, QT]]:
    """Weights of every shape under one named config, packed for their kernels."""
    layer = nn.Sequential(nn.Linear(2 * K, N, bias=False))  # K-quants have blocks of 256
    pw.quantize_(layer, MORE[name] if name in MORE else by_name(name))
    plain = layer[0].weight
    spec = plain.spec.with_(layout="plain")
    for kind, shape in SHAPES.items():
        x = normal(*shape)
        if spec.block is not None and len(spec.block) > len(shape):
            continue
        act = plain.act if kind in ("matrix", "experts") else None
        w = QT.from_float(x, spec, act=act)
        if act is not None and act.mode == "static":
            w = w.with_(act_scale=plain.act_scale, act_zero_point=plain.act_zero_point)
        yield kind, prepare(w, (OPS[kind],))


def outcome(run: Callable[[Any], Any], w: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = run(w)
    except Exception as error:
        return error
    return y.dequantize() if isinstance(y, QT) else y


def kind_of(error: Exception) -> type[Exception]:
    """The class that callers of torch catch."""
    return next((k for k in (IndexError, TypeError, RuntimeError) if isinstance(error, k)), type(error))


def tolerance(w: QT, dtype: torch.dtype) -> float:
    """Share of the norm of the result: that of the arithmetic, and of quantizing the input where the config does."""
    if w.act is not None:
        return 0.3 if w.act.spec.format.bits < 8 else 0.1
    if w.ndim == 2 and w.axes is None and select("linear", case_of(w)).tolerance == "bfloat16":
        return 3e-2
    return {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 5e-3}.get(dtype, 3e-2)


def deviation(case: Case, w: QT, mine: Any, theirs: Any) -> str:
    """How the outcome of the quantized weight differs from that of its float twin, or nothing."""
    if case.unwritten:
        return "" if isinstance(mine, RuntimeError) else f"gives {mine!r:.100}, and should refuse"
    if isinstance(theirs, Exception) or isinstance(mine, Exception):
        if not isinstance(mine, Exception):
            return f"gives {tuple(mine.shape)} where float raises {theirs!r:.200}"
        if not isinstance(theirs, Exception):
            return f"raises {mine!r:.300} where float gives {tuple(theirs.shape)}"
        same = isinstance(mine, kind_of(theirs))
        return "" if same else f"raises {mine!r:.200} where float raises {theirs!r:.200}"
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype or mine.device != theirs.device:
        forms = [f"{tuple(t.shape)} {t.dtype} {t.device}" for t in (mine, theirs)]
        return f"gives {forms[0]}, float {forms[1]}"
    if theirs.is_meta or not theirs.numel():
        return ""
    a, b = (t.to_dense() if t.layout is not torch.strided else t for t in (mine, theirs))
    error, size = (a.double() - b.double()).norm().item(), b.double().norm().item()
    return "" if error <= tolerance(w, theirs.dtype) * size + 1e-30 else f"is off by {error / max(size, 1e-30):.3g}"


def sweep(name: str) -> tuple[int, int, list[str]]:
    """(number of cases, of those that float refuses, deviations) of one named config."""
    count, refused, found = 0, 0, []
    for kind, w in weights(name):
        for group in GROUPS[kind]:
            for case in group():
                count += 1
                print(f"{name} {kind}: {case.label}", file=sys.stderr, flush=True)  # the last line of one that dies
                mine, theirs = outcome(case.run, w), outcome(case.run, w.dequantize())
                refused += isinstance(theirs, Exception)
                if text := deviation(case, w, mine, theirs):
                    found.append(f"{kind} {case.label}: {text}")
    return count, refused, found


if __name__ == "__main__":
    for config in sys.argv[1:] or NAMES:
        cases, refusals, deviations = sweep(config)
        print(
            f"{config}: {cases} cases, float refuses {refusals}, {len(deviations)} deviations", *deviations, sep="\n  "
        )
