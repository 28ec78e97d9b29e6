"""What is declared of rows is true: for every config, every named one, and every kernel that says so."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.kernels import Kernel, explain, kernels
from pennyweight.kernels.table import case_of, row_independent, select
from pennyweight.planning.configs.by_name import CONFIGS, by_name
from tests.every.test_configs import CASES, build

K, N, ROWS, OUTLIER = 160, 72, 64, 7
BATCHES = (2, 3, 4, 5, 8, 12, 13, 15, 16, 17, 32, 33, 64)
ALL = [*CONFIGS, *(text for text in CASES if "Fqn" not in text)]
FEW = ["int8", "int8-dynamic", "int4", "8da4w", "nf4", "float8", "mxfp4"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def quantized(text: str, dtype: torch.dtype) -> pw.AffineQuantizedTensor:
    layer = nn.Sequential(nn.Linear(K, N, bias=False)).to(dtype)
    pw.quantize_(layer, by_name(text) if text in CONFIGS else build(text))
    return layer[0].weight


@torch.no_grad()
def changed(product: Callable[[Tensor], Tensor], dtype: torch.dtype) -> set[str]:
    """What a row of the output was seen to change with, beside its own row of the input."""
    x, seen = torch.randn(ROWS, K).to(dtype), set()
    torch.set_num_threads(1)
    alone = torch.cat([product(row[None]) for row in x])
    apart = x.clone()
    apart[OUTLIER] *= 1000
    others = [i for i in range(ROWS) if i != OUTLIER]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        if any(not torch.equal(product(x[:n]), alone[:n]) for n in BATCHES):
            seen.add("batch" if threads == 1 else "threads")
        if not torch.equal(product(apart)[others], alone[others]):
            seen.add("outlier")
        if not torch.equal(product(x.view(4, 16, K)).view(ROWS, -1), alone):
            seen.add("shape")
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", ALL)
def test_what_is_declared_of_a_config_is_true(text: str, dtype: torch.dtype) -> None:
    w = quantized(text, dtype)
    case = case_of(w, dtype)
    declared = row_independent(select("linear", case), case)
    assert explain(dtype, w).row_independent == declared
    if declared is True:
        assert not changed(lambda x: torch.nn.functional.linear(x, w), dtype)
        assert str(explain(dtype, w)).endswith("each row of the output depends on its row of the input alone")
    else:
        assert str(explain(dtype, w)).endswith(f"may change with the batch and the threads: {declared}")
        if "one scale for all rows" in declared:  # it does, and not only may
            assert "outlier" in changed(lambda x: torch.nn.functional.linear(x, w), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [k for k in kernels("linear") if k.row_independent], ids=lambda k: k.name)
def test_kernels_that_are_not_chosen_here_keep_it_too(kernel: Kernel, dtype: torch.dtype) -> None:
    tried = 0
    for text in FEW:
        w = quantized(text, dtype)
        w = w.to_layout("plain")
        case = case_of(w, dtype)
        if kernel.refuses(case, any_layout=True) is None and row_independent(kernel, case) is True:
            stored = w.to_layout(kernel.layout)
            assert not changed(lambda x, stored=stored: kernel.run(x, stored, None), dtype), text
            tried += 1
    if not tried:
        pytest.skip("takes nothing that is tried here")


def test_experts_keep_it() -> None:
    w = pw.AffineQuantizedTensor.from_float(
        torch.randn(2, N, K), quantized("int8", torch.float32).spec.with_(layout="plain")
    )
    w = w.to_layout("cpu_experts")
    assert explain(torch.float32, w, "bmm").row_independent is True
    assert not changed(
        lambda x: torch.bmm(x.reshape(1, -1, K).expand(2, -1, -1), w.mT)[1].view(*x.shape[:-1], N), torch.float32
    )
