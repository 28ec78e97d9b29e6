"""The figures against formulas written otherwise: scipy, numpy, loops."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from pennyweight.report import metrics
from tests import forked


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    p = 3 * torch.randn(3, 5, 7, generator=random)
    return p, p + 0.5 * torch.randn(3, 5, 7, generator=random)


def test_kl_is_scipys(logits) -> None:
    p, q = (scipy.special.softmax(x.double().numpy(), -1) for x in logits)
    np.testing.assert_allclose(metrics.kl_divergence(*logits).numpy(), scipy.stats.entropy(p, q, axis=-1), rtol=1e-9)


def test_kl_of_many_rows_is_that_of_pieces(logits, monkeypatch) -> None:
    whole = metrics.kl_divergence(*logits)
    monkeypatch.setattr(metrics, "_CHUNK", 14)
    assert torch.equal(metrics.kl_divergence(*logits), whole)


def test_kl_of_what_is_ruled_out() -> None:
    p, q = torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, 1.0]])
    assert metrics.kl_divergence(p, q).item() == pytest.approx(math.log(1 + math.e))
    assert metrics.kl_divergence(q, p).item() == math.inf
    assert metrics.kl_divergence(p, p).item() == 0
    for bad in ((p, torch.tensor([[math.nan, 0]])), (torch.tensor([[math.nan, 0]]), q)):
        assert math.isnan(metrics.kl_divergence(*bad).item())


def test_kl_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"the same shape, got \[2, 3\] and \[2, 4\]"):
        metrics.kl_divergence(torch.zeros(2, 3), torch.zeros(2, 4))


def test_spread_is_numpys() -> None:
    x = torch.randn(997, generator=torch.Generator().manual_seed(1)).exp()
    found = metrics.distribution(x)
    expected = [np.mean(x.double().numpy()), *np.percentile(x.double().numpy(), [50, 99, 100])]
    assert found.number == 997
    np.testing.assert_allclose(found[1:], expected, rtol=1e-12)
    assert metrics.distribution(torch.zeros(0)).number == 0
    assert math.isnan(metrics.distribution(torch.tensor([1.0, math.nan])).max)


def test_nll_and_perplexity(logits) -> None:
    p, q = (x.reshape(-1, 7) for x in logits)
    labels = torch.arange(15) % 7
    found = metrics.token_figures(p, q, labels)
    expected = torch.nn.functional.cross_entropy(q.double(), labels)
    assert found.nll_quantized.mean().item() == pytest.approx(expected.item(), rel=1e-12)
    assert metrics.perplexity(found.nll_quantized) == pytest.approx(math.exp(expected), rel=1e-12)
    assert found.same_top.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()


def test_top1_agreement_of_what_counts(logits) -> None:
    p, q = logits
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, :3] = mask[2, 1] = True
    same = [bool(p[i, j].argmax() == q[i, j].argmax()) for i, j in mask.nonzero().tolist()]
    assert metrics.top1_agreement(p, q, mask) == sum(same) / 4
    assert math.isnan(metrics.top1_agreement(p, q, torch.zeros(3, 5)))


def test_next_tokens_leave_out_padding_on_either_side() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [0, 0, 8, 9], [1, -100, 2, 3]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    labels, counts = metrics.next_tokens(ids, mask)
    found = [[(t, labels[b, t].item()) for t in range(4) if counts[b, t]] for b in range(3)]
    assert found == [[(0, 6), (1, 7)], [(2, 9)], [(1, 2), (2, 3)]]
    labels, counts = metrics.next_tokens(ids[:1])
    assert counts.tolist() == [[True, True, True, False]]


def test_cosine_error_and_sqnr() -> None:
    random = torch.Generator().manual_seed(2)
    a = torch.randn(6, 4, generator=random)
    b = a + 0.1 * torch.randn(6, 4, generator=random)
    x, y = a.double().numpy(), b.double().numpy()
    expected = [1 - scipy.spatial.distance.cosine(i, j) for i, j in zip(x, y, strict=True)]
    np.testing.assert_allclose(metrics.cosine(a, b).numpy(), expected, rtol=1e-9)
    error = np.linalg.norm(y - x) / np.linalg.norm(x)
    assert metrics.relative_error(a, b) == pytest.approx(error, rel=1e-6)
    assert metrics.sqnr(a, b) == pytest.approx(-20 * math.log10(error), rel=1e-6)
    assert metrics.cosine(torch.zeros(1, 2), torch.zeros(1, 2)).item() == 1
    assert metrics.cosine(torch.zeros(1, 2), torch.ones(1, 2)).item() == 0


def test_energies_at_the_edges() -> None:
    a = torch.tensor([1.0, -math.inf, 2.0])
    assert metrics.sqnr(a, a) == math.inf
    assert metrics.relative_error(a, torch.tensor([1.0, -math.inf, 3.0])) == pytest.approx(1 / math.sqrt(5))
    assert metrics.relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert metrics.relative_error(torch.zeros(2), torch.ones(2)) == math.inf
    assert metrics.relative_error(torch.ones(2), torch.ones(3)) == math.inf
    assert math.isnan(metrics.relative_error(torch.ones(2), torch.tensor([1.0, math.nan])))
    assert metrics.sqnr(torch.ones(2), torch.tensor([1.0, math.nan])) == -math.inf
    # of bfloat16, in float32: the difference itself is not rounded to 8 bits
    x = torch.full((64,), 1.0)
    assert metrics.relative_error(x.bfloat16(), x + 2**-10) == pytest.approx(2**-10, rel=1e-6)


@pytest.mark.parametrize(
    ("how", "expected"), [("mean", [[2.0], [5.5]]), ("first", [[1.0], [5.0]]), ("last", [[3.0], [6.0]])]
)
def test_pooled(how: str, expected: list) -> None:
    hidden = torch.tensor([[[1.0], [2.0], [3.0], [99.0]], [[99.0], [5.0], [6.0], [99.0]]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]])
    assert metrics.pooled(hidden, mask, how).tolist() == expected
    with pytest.raises(ValueError, match="pooling must be one of mean, first, last"):
        metrics.pooled(hidden, mask, "max")


def test_retrieval_kl_is_the_formula(monkeypatch) -> None:
    random = torch.Generator().manual_seed(3)
    a = torch.randn(9, 4, generator=random)
    b = a + 0.2 * torch.randn(9, 4, generator=random)
    expected = []
    for i in range(9):
        p, q = (
            scipy.special.softmax(
                [float(torch.cosine_similarity(x[i].double(), x[j].double(), 0)) / 0.05 for j in range(9) if j != i]
            )
            for x in (a, b)
        )
        expected.append(scipy.stats.entropy(p, q))
    np.testing.assert_allclose(metrics.retrieval_kl(a, b).numpy(), expected, rtol=1e-8)
    monkeypatch.setattr(metrics, "_CHUNK", 20)
    np.testing.assert_allclose(metrics.retrieval_kl(a, b).numpy(), expected, rtol=1e-8)
    nearest = [
        max((j for j in range(9) if j != i), key=lambda j, i=i, x=x: float(torch.cosine_similarity(x[i], x[j], 0)))
        for x in (a, b)
        for i in range(9)
    ]
    same = sum(nearest[i] == nearest[9 + i] for i in range(9)) / 9
    assert metrics.same_nearest(a, b) == pytest.approx(same)
    with pytest.raises(ValueError, match="at least 3 embeddings, got 2"):
        metrics.retrieval_kl(a[:2], b[:2])


def test_bootstrap_is_seeded_and_near_the_normal_interval() -> None:
    random = torch.Generator().manual_seed(4)
    counts = torch.randint(5, 30, (400,), generator=random).double()
    sums = counts * (2 + torch.randn(400, generator=random).double())
    found = metrics.bootstrap(sums, counts)
    assert found == metrics.bootstrap(sums, counts)
    assert found != metrics.bootstrap(sums, counts, seed=1)
    mean = float(sums.sum() / counts.sum())
    spread = float((sums - mean * counts).std() * math.sqrt(400) / counts.sum())
    np.testing.assert_allclose(found, [mean - 1.96 * spread, mean + 1.96 * spread], atol=0.15 * spread)


def test_bootstrap_in_pieces_and_at_the_edges(monkeypatch) -> None:
    assert metrics.bootstrap(torch.ones(5)) == (1.0, 1.0)
    assert all(map(math.isnan, metrics.bootstrap(torch.tensor([1.0, math.nan]))))
    low, high = metrics.bootstrap(torch.arange(50.0), resamples=500, level=0.5)
    assert 20 < low < 24.5 < high < 29
    with pytest.raises(ValueError, match="needs sequences"):
        metrics.bootstrap(torch.zeros(0))


def test_needs_torch_only() -> None:
    probe = (
        "import sys, pennyweight.report.metrics as m; "
        "print([n for n in ('transformers', 'matplotlib', 'jinja2', 'rich', 'scipy') if n in sys.modules])"
    )
    run = forked.run(["-W", "error", "-c", probe], check=True)
    assert run.stdout.strip() == "[]"
