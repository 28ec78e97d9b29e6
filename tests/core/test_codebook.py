"""Tables of numbers that each tensor brings itself, one code for one or several neighbours."""

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F

from pennyweight.core import codebook as tables
from pennyweight.core.codebook import fit, means, nearest
from pennyweight.core.formats import INT8, UINT4, get_format, learned, learned_formats
from pennyweight.core.numerics import Params, quantize
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError, flatten, unflatten

SPECS = {
    "3 bits": QuantSpec(learned(3), (-1,)),
    "4 bits in groups": QuantSpec(learned(4), (16,), torch.float16),
    "4 bits in a stream": QuantSpec(learned(4), (16,), torch.bfloat16, layout="bits"),
    "2 for 1 in a stream": QuantSpec(learned(4, 2), (8,), layout="bits"),
    "4 for 1": QuantSpec(learned(8, 4), (-1,), torch.bfloat16),
    "8 for 1, 5 bits": QuantSpec(learned(5, 8), (-1,), layout="bits"),
    "squares": QuantSpec(learned(6, 4), (2, 8), layout="bits"),
    "one scale": QuantSpec(learned(8, 2), None),
    "no scale": QuantSpec(learned(2), None, scale=None),
    "an offset": QuantSpec(learned(3), (8,), offset=torch.float16),
    "nested": QuantSpec(learned(4), (8,), scale=QuantSpec(INT8, (4,))),
}
EACH = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
ANY_WAY = pytest.mark.filterwarnings("ignore::pennyweight.FallbackWarning")


def make(spec: QuantSpec, *shape: int, dtype: torch.dtype = torch.float32) -> QT:
    return QT.from_float(torch.randn(shape).to(dtype), spec)


def by_hand(w: QT) -> torch.Tensor:
    """The formula of the page, element by element."""
    parts, dim = w.plain_parts(), w.spec.format.dim
    scale = None if w.scale is None else w.scale.dequantize() if isinstance(w.scale, QT) else w.scale.float()
    out = torch.empty(w.shape)
    for index in itertools.product(*map(range, w.shape)):
        *rows, column = index
        value = parts.table[int(parts.codes[(*rows, column // dim)]), column % dim].float()
        sizes = [-(-n // g) for n, g in zip(w.shape, (scale if scale is not None else parts.codes).shape, strict=True)]
        if w.spec.block is not None:
            from pennyweight.core import blocks

            sizes = list(blocks.resolve(w.spec.block, w.shape))
        block = tuple(i // b for i, b in zip(index, sizes, strict=True))
        if scale is not None:
            value = value * scale[block]
        if w.offset is not None:
            value = value + w.offset[block].float()
        out[index] = value
    return out


# -- what it is ------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("shape", [(6, 40), (5, 37), (3, 8), (1, 1)])
def test_the_formula(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    w = make(spec, *shape)
    assert torch.equal(w.dequantize(), by_hand(w))
    assert w.nbytes == w.spec.nbytes(shape)
    assert w.to_layout("bits").nbytes == spec.with_(layout="bits").nbytes(shape)
    assert torch.equal(w.to_layout("bits").dequantize(), w.to_layout("plain").dequantize())


def test_bits_a_weight() -> None:
    shape = (512, 1024)
    for spec, codes in ((QuantSpec(learned(8, 4), None), 2), (QuantSpec(learned(6, 2), None, layout="bits"), 3)):
        table = 2 * spec.format.dim << spec.format.bits
        assert spec.nbytes(shape) * 8 == codes * 512 * 1024 + 8 * (table + 4)
        assert make(spec, *shape).nbytes == spec.nbytes(shape)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_values(spec: QuantSpec, dtype: torch.dtype) -> None:
    big, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for x in (
        torch.zeros(4, 24), torch.full((4, 24), 0.37), torch.full((4, 24), -31.7), torch.randn(4, 24).sign(),
        torch.randn(4, 24) * torch.tensor([1e-6, 1.0, 1e3, 0.0]).unsqueeze(1), torch.full((4, 24), tiny),
        torch.zeros(0, 8), torch.zeros(8, 0),
        torch.full((4, 24), min(big, 1e38) if spec.scale is torch.float32 else 60000.0, dtype=dtype),
    ):  # fmt: skip
        x = x.to(dtype)
        w = QT.from_float(x, spec)
        y = w.dequantize()
        assert y.isfinite().all()
        assert torch.equal(y, QT.from_float(x, spec).dequantize())
        if not x.any():
            assert not y.any()


def test_few_distinct_values_are_kept() -> None:
    """Fewer numbers than entries: each has its own, to the table's digits."""
    x = torch.tensor([-1.0, -0.25, 0.0, 0.5, 1.0])[torch.randint(5, (16, 64))]
    x[:, 0] = 1.0
    for fmt in (learned(3), learned(4)):
        assert torch.equal(QT.from_float(x, QuantSpec(fmt, (-1,))).dequantize(), x)
    pairs = torch.tensor([[1.0, -0.5], [0.25, 0.25], [-1.0, 1.0]])[torch.randint(3, (16, 32))].flatten(1)
    pairs[:, :2] = torch.tensor([-1.0, 1.0])
    assert torch.equal(QT.from_float(pairs, QuantSpec(learned(2, 2), (-1,))).dequantize(), pairs)


@EACH
def test_codes_are_the_nearest(spec: QuantSpec) -> None:
    if spec.block is not None and len(spec.block) > 1:
        return
    x = torch.randn(3, 48)
    w = QT.from_float(x, spec.with_(layout="plain", scale=None, offset=None))
    table, dim = w.table.float(), spec.format.dim
    apart = (x.view(3, -1, 1, dim) - table).square().sum(-1)
    chosen = apart.gather(-1, w.codes.long().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(chosen, apart.amin(-1))


def test_kmeans_finds_clusters_and_weighs_them() -> None:
    centers = torch.tensor([[3.0, 0.0], [-3.0, 1.0], [0.0, 5.0], [1.0, -4.0]])
    x = centers[torch.arange(4000) % 4] + 0.1 * torch.randn(4000, 2)
    table = fit(x, 4)
    assert (torch.cdist(centers, table).amin(1) < 0.05).all()
    assert torch.equal(table, fit(x, 4))
    numbers = torch.cat([torch.zeros(10), torch.ones(10)]).unsqueeze(1)
    heavy = torch.cat([torch.ones(10), torch.full((10,), 9.0)]).unsqueeze(1)
    torch.testing.assert_close(fit(numbers, 1, heavy), torch.tensor([[0.9]]))
    codes = torch.tensor([0, 0, 2])
    kept = means(torch.tensor([[1.0], [3.0], [7.0]]), codes, torch.full((4, 1), 5.0))
    assert kept.flatten().tolist() == [2.0, 5.0, 7.0, 5.0]


def test_nearest_in_pieces_and_with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    x, table, weight = torch.randn(7, 30, 4), torch.randn(16, 4), torch.rand(7, 30, 4)
    want = ((x.unsqueeze(-2) - table).square() * weight.unsqueeze(-2)).sum(-1).argmin(-1).to(torch.uint8)
    assert torch.equal(nearest(x, table, weight), want)
    monkeypatch.setattr(tables, "_CHUNK", 160)
    assert torch.equal(nearest(x, table, weight), want)
    assert nearest(torch.empty(0, 4), table).shape == (0,)


def test_a_given_table_is_used() -> None:
    table = torch.tensor([[-1.0], [0.0], [0.25], [1.0]])
    spec = QuantSpec(learned(2), (-1,))
    parts = quantize(torch.tensor([[-2.0, 0.1, 0.6, 2.0]]), spec, params=Params(torch.tensor([[2.0]]), table=table))
    assert parts.codes.tolist() == [[0, 1, 2, 3]]
    assert torch.equal(parts.table, table.half())


def test_wrong_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="1, 2, 4 or 8 numbers, got 3"):
        learned(4, 3)
    with pytest.raises(ValueError, match=r"bits must be in 1\.\.8, got 9"):
        learned(9)
    with pytest.raises(ValueError, match="block size 6 is not a multiple of 4, the numbers per code of learned8x4"):
        QuantSpec(learned(8, 4), (6,))
    with pytest.raises(ValueError, match="scale: its numbers cannot be learned"):
        QuantSpec(INT8, (8,), scale=QuantSpec(learned(4), (8,)))
    with pytest.raises(ValueError, match="needs an integer format, got learned4"):
        QuantSpec(learned(4), (8,), zero_point=UINT4)
    with pytest.raises(ValueError, match="a 0-d tensor cannot have codes that represent 4"):
        make(QuantSpec(learned(8, 4), None))
    with pytest.raises(ValueError, match="encoding needs a table"):
        quantize(torch.randn(2, 8), QuantSpec(learned(4), (8,)), "mse")
    w = make(SPECS["4 for 1"], 4, 16)
    with pytest.raises(ValueError, match=r"has no table, expected \(256, 4\)"):
        w.with_(table=None)
    with pytest.raises(ValueError, match=r"has a table \[256, 4\], expected none"):
        w.with_(spec=QuantSpec(INT8, (-1,)))
    with pytest.raises(ValueError, match="each tensor's own table"):
        w.spec.format.decode(w.codes)
    assert {f.name for f in learned_formats()} >= {"learned1", "learned8", "learned8x4", "learned4x8"}
    assert get_format("learned8x4") is learned(8, 4)


# -- what is done to it ----------------------------------------------------------------------------------------------


@EACH
@ANY_WAY
def test_structure(spec: QuantSpec) -> None:
    w = make(spec, 6, 48)
    x = w.dequantize()
    for start, stop in itertools.combinations(range(0, 49, 4), 2):
        piece = w[:, start:stop]
        assert torch.equal(piece.dequantize() if isinstance(piece, QT) else piece, x[:, start:stop])
    for piece, want in zip(w.split(2), x.split(2), strict=True):
        assert torch.equal(piece.dequantize(), want)
        assert piece._table.data_ptr() == w._table.data_ptr() if isinstance(piece, QT) else spec.block is None
    for fn in (
        lambda t: t.t(), lambda t: t.t()[3:7], lambda t: t[1:3], lambda t: t[4], lambda t: t[[5, 1]], lambda t: t[::2],
        lambda t: t.view(2, 3, 48), lambda t: t.view(6, 6, 8), lambda t: t.unsqueeze(0).expand(3, 6, 48),
        lambda t: torch.cat([t, t]), lambda t: torch.cat([t, t], 1), lambda t: torch.stack([t, t]),
        lambda t: t[:, ::2], lambda t: t[:, [3, 1]], lambda t: t[:, 5:6].squeeze(1), lambda t: t[:, 5:6].expand(6, 3),
        lambda t: t.reshape(-1), lambda t: t[None].squeeze(0), lambda t: t.clone(), lambda t: t.detach(),
    ):  # fmt: skip
        got = fn(w)
        assert torch.equal(got.dequantize() if isinstance(got, QT) else got, fn(x))


@EACH
def test_what_is_cheap_stays_quantized(spec: QuantSpec) -> None:
    w = make(spec, 8, 64)
    assert isinstance(w.t(), QT)
    assert isinstance(w[:, 16:48], QT) or spec.block in (None, (-1,)) or isinstance(spec.scale, QuantSpec)
    if spec.block is not None and spec.block != (2, 8):
        assert isinstance(w[2:5], QT)
        assert isinstance(torch.cat([w, w]), QT)


@ANY_WAY
def test_joins_of_different_tables_are_dequantized() -> None:
    a, b = make(SPECS["4 for 1"], 4, 16), make(SPECS["4 for 1"], 4, 16)
    joined = torch.cat([a, b])
    assert not isinstance(joined, QT)
    assert torch.equal(joined, torch.cat([a.dequantize(), b.dequantize()]))


@EACH
def test_copies(spec: QuantSpec) -> None:
    w = make(spec, 6, 48)
    buffer = io.BytesIO()
    torch.save({"w": w}, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(w), torch.load(buffer, weights_only=True)["w"], w.to(torch.float64).float(), w.clone()):
        assert other.spec == w.spec
        assert torch.equal(other.dequantize(), w.dequantize())
        assert torch.equal(other.table, w.table)
        assert other._table.data_ptr() != w._table.data_ptr()
    assert w.to("meta").table.is_meta
    assert QuantSpec.from_json(w.spec.to_json()) == w.spec
    other = make(spec, 6, 48)
    other.copy_(w)
    assert torch.equal(other.dequantize(), w.dequantize())
    layer, again = torch.nn.Linear(48, 6), torch.nn.Linear(48, 6)
    layer.weight = torch.nn.Parameter(w, requires_grad=False)
    again.weight = torch.nn.Parameter(make(spec, 6, 48), requires_grad=False)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.weight.dequantize(), w.dequantize())


@EACH
def test_writes_keep_the_table(spec: QuantSpec) -> None:
    w = make(spec, 6, 48)
    alias, table = w.detach(), w.table.clone()
    before = w.dequantize()
    w.add_(0.0)
    assert torch.equal(w.dequantize(), before)
    w.mul_(0.9)
    assert torch.equal(alias.dequantize(), w.dequantize())
    assert torch.equal(w.table, table)
    assert (w.dequantize() - 0.9 * before).norm() < 0.6 * before.norm()
    if spec.scale is not None and spec.offset is None:
        w.mul_(100)
        assert 50 < w.dequantize().norm() / before.norm() < 150
    w.zero_()
    assert w.dequantize().abs().max() <= (1e-6 if spec.scale is not None else 0.7)


@ANY_WAY
def test_nothing_that_is_written_changes_a_neighbour() -> None:
    """A piece shares the table with what is outside it, a copy has one of its own."""
    w, other = make(SPECS["4 bits in groups"], 6, 48), make(SPECS["4 bits in groups"], 6, 48)
    before = w.dequantize()
    for piece in (w[:2], w[3], w.split(2)[1], w.unbind()[0]):
        with pytest.raises(RuntimeError, match="shares scales"):
            piece.copy_(torch.randn(piece.shape))
    for mine, theirs in (
        (w[[1, 4]], other[[1, 4]]),
        (torch.cat([w, w]), torch.cat([other, other])),
        (w.clone(), other),
    ):
        mine.copy_(theirs)
        assert torch.equal(mine.dequantize(), theirs.dequantize())
    assert torch.equal(w.dequantize(), before)
    w.t().copy_(other.t())
    assert torch.equal(w.dequantize(), other.dequantize())


def test_updates_do_not_drift() -> None:
    for spec in (SPECS["4 bits in groups"], SPECS["3 bits"], SPECS["4 for 1"]):
        w = make(spec, 8, 64)
        before, noise = w.dequantize(), 1e-3 * torch.randn(8, 64)
        for _ in range(40):
            w.add_(noise)
            w.sub_(noise)
        assert (w.dequantize() - before).norm() < 0.02 * before.norm()


@EACH
def test_products_lookups_and_graphs(spec: QuantSpec) -> None:
    w = make(spec, 6, 48)
    x, x2 = torch.randn(5, 48), torch.randn(5, 6)
    want = F.linear(x, w.dequantize())
    assert torch.equal(F.linear(x, w), want)
    assert torch.equal(x2 @ w, x2 @ w.dequantize())
    torch._dynamo.reset()  # each spec is a graph of its own
    compiled = torch.compile(lambda t: F.linear(t, w), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), want)
    index = torch.tensor([[0, 5], [2, 2]])
    assert torch.equal(F.embedding(index, w), w.dequantize()[index])
    y = x.clone().requires_grad_()
    F.linear(y, w).sum().backward()
    torch.testing.assert_close(y.grad, torch.ones(5, 6) @ w.dequantize())


# -- files -----------------------------------------------------------------------------------------------------------


@EACH
def test_files(spec: QuantSpec) -> None:
    w = make(spec, 5, 37)
    tensors, metadata = flatten({"w": w})
    assert '"version":4' in metadata["pennyweight"]
    assert sum(t.nbytes for t in tensors.values()) <= w.nbytes
    back = unflatten(tensors, metadata)["w"]
    assert back.spec.with_(layout="plain") == w.spec.with_(layout="plain")
    assert torch.equal(back.dequantize(), w.dequantize())
    wrong = {**tensors, "w.table": tensors["w.table"][:-1]}
    with pytest.raises(CheckpointError, match=r"part w.table is torch.float16"):
        unflatten(wrong, metadata)
    with pytest.raises(CheckpointError, match=r"part w.table is missing"):
        unflatten({k: t for k, t in tensors.items() if k != "w.table"}, metadata)
    for bad in (torch.nan, torch.inf):
        table = tensors["w.table"].clone()
        table[0, 0] = bad
        with pytest.raises(CheckpointError, match=r"w.table: 1 of .* values are NaN or inf"):
            unflatten({**tensors, "w.table": table}, metadata)
    plain, about = flatten({"w": make(QuantSpec(INT8, (-1,)), 5, 37), "w2": w})
    with pytest.raises(CheckpointError, match=r"unexpected part w.table"):
        unflatten({**plain, "w.table": tensors["w.table"]}, about)


@pytest.mark.parametrize("dim", [1, 3])
def test_tables_of_more_than_256_entries(dim: int) -> None:
    x = torch.randn(2000, dim, generator=torch.Generator().manual_seed(7))
    table = x[:600].clone()
    codes = nearest(x[:600], table)
    assert codes.dtype is torch.int32
    assert torch.equal(table[codes.long()], x[:600])
    assert len(fit(x, 600)) == 600
    close = x - fit(x, 600)[nearest(x, fit(x, 600)).long()]
    assert close.square().sum() < 0.5 * (x - fit(x, 256)[nearest(x, fit(x, 256)).long()]).square().sum()
