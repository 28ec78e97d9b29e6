"""SpinQuant's rotations and Hadamard transforms: the function of the model stays, outliers shrink, sizes, errors."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adapters.torchao.tests.gpt_fast_llama import Llama
from pennyweight_torchao.algorithms.hadamard import (
    apply_exact_had_to_linear,
    get_hadK,
    hadamard_matrix,
    is_pow2,
    matmul_hadU_fast,
    matmul_hadU_slow,
    random_hadamard_matrix,
)
from pennyweight_torchao.algorithms.spinquant import (
    HadamardMultiplier,
    apply_spinquant,
    fuse_layernorm_into_linear,
)

TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rotations", [(1,), (2,), (4,), (1, 2), (1, 2, 4)])
def test_the_function_stays(split: bool, bias: bool, rotations: tuple[int, ...]) -> None:
    model = Llama(split=split, bias=bias).requires_grad_(False)
    y, before = model(TOKENS), copy.deepcopy(model.state_dict())
    apply_spinquant(model, **{f"use_r{i}": i in rotations for i in (1, 2, 4)}, qkv_split=split)
    torch.testing.assert_close(model(TOKENS), y, rtol=1e-4, atol=1e-4)
    after = model.state_dict()
    changed = {name for name, value in before.items() if name not in after or not torch.equal(after[name], value)}
    w2 = "layers.1.feed_forward.w2"
    assert ("tok_embeddings.weight" in changed) == (1 in rotations)
    assert ("layers.1.attention.wo.weight" in changed) == bool({1, 2} & {*rotations})
    assert (f"{w2}.1.weight" in after) == (4 in rotations)
    if 4 in rotations:
        multiplier: Any = model.layers[0].feed_forward.w2[0]  # type: ignore[union-attr, index]
        assert isinstance(multiplier, HadamardMultiplier)
        assert (multiplier.K, after[f"{w2}.0.had_K"].shape) == (12, (12, 12))


def test_pretrained_rotations(tmp_path: Path) -> None:
    model, other = Llama(), Llama()
    other.load_state_dict(model.state_dict())
    y = model(TOKENS)
    r1, r2 = random_hadamard_matrix(32, "cpu", 7), random_hadamard_matrix(8, "cpu", 8)
    file = tmp_path / "R.bin"
    torch.save({"R1": r1, **{f"model.layers.{i}.self_attn.R2": r2 for i in range(2)}}, file)
    apply_spinquant(model, use_r1=True, use_r2=True, use_r4=False, pretrained_rotation_path=file)
    torch.testing.assert_close(model(TOKENS), y, rtol=1e-4, atol=1e-4)
    wanted = (other.tok_embeddings.weight.double() @ r1).float()
    torch.testing.assert_close(model.tok_embeddings.weight, wanted)
    with pytest.raises(AssertionError, match=r"R1 is \[32, 32\], the model needs \[64, 64\]"):
        apply_spinquant(Llama(64), use_r1=True, pretrained_rotation_path=file)
    with pytest.raises(AssertionError, match="does not exist"):
        apply_spinquant(other, pretrained_rotation_path=tmp_path / "none.bin")
    (tmp_path / "R.pt").touch()
    with pytest.raises(AssertionError, match=r"\.bin file"):
        apply_spinquant(other, pretrained_rotation_path=tmp_path / "R.pt")


def test_norms_are_folded() -> None:
    model = Llama()
    y = model(TOKENS)
    fuse_layernorm_into_linear(model)
    assert torch.equal(model.norm.weight, torch.ones(32))
    torch.testing.assert_close(model(TOKENS), y, rtol=1e-4, atol=1e-4)


# -- transforms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8, 12, 24, 40, 56, 60, 104, 108, 140])
def test_transforms_are_orthogonal(n: int) -> None:
    table, k = get_hadK(n)
    assert n % k == 0
    assert is_pow2(n // k)
    assert torch.equal(table @ table.t(), k * torch.eye(k))
    assert torch.equal(get_hadK(n, transpose=True)[0], table.t())
    x = torch.randn(3, 2, n, dtype=torch.float64)
    y = matmul_hadU_slow(x, table, k)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(y @ hadamard_matrix(n, "cpu").double().t(), x, rtol=1e-5, atol=1e-5)
    r = random_hadamard_matrix(n, "cpu")
    torch.testing.assert_close(r @ r.t(), torch.eye(n, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert torch.equal(r, random_hadamard_matrix(n, "cpu"))


def test_powers_of_two_are_sylvesters() -> None:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    sixteen = torch.kron(torch.kron(two, two), torch.kron(two, two))
    x = torch.randn(3, 16)
    torch.testing.assert_close(matmul_hadU_fast(x, *get_hadK(16)), x @ sixteen / 4)


def test_sizes() -> None:
    assert [get_hadK(n)[1] for n in (4096, 12288, 14336, 13824 // 2, 5632)] == [1, 12, 28, 108, 44]
    for n in (3, 7, 0, 6, 172):
        with pytest.raises(AssertionError, match="no Hadamard matrix here"):
            get_hadK(n)
    assert not is_pow2(0)


def test_an_outlier_is_spread() -> None:
    x = torch.zeros(4, 96)
    x[:, 5] = 100.0
    assert matmul_hadU_slow(x, *get_hadK(96)).abs().max() == pytest.approx(100 / math.sqrt(96), rel=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers(bias: bool) -> None:
    layer = nn.Linear(24, 16, bias=bias)
    x = torch.randn(5, 24)
    y = layer(x)
    inputs, outputs, heads = (copy.deepcopy(layer) for _ in range(3))
    apply_exact_had_to_linear(inputs)
    torch.testing.assert_close(inputs(matmul_hadU_slow(x, *get_hadK(24))), y, rtol=1e-4, atol=1e-5)
    apply_exact_had_to_linear(outputs, output=True)
    torch.testing.assert_close(outputs(x), matmul_hadU_slow(y, *get_hadK(16)), rtol=1e-4, atol=1e-5)
    r = random_hadamard_matrix(8, "cpu", 3)
    apply_exact_had_to_linear(heads, had_dim=8, output=True, R2=r)
    wanted = (y.double().unflatten(-1, (2, 8)) @ r).flatten(-2).float()
    torch.testing.assert_close(heads(x), wanted, rtol=1e-4, atol=1e-5)
    half = copy.deepcopy(layer).bfloat16()
    apply_exact_had_to_linear(half, had_dim=8)
    assert half.weight.dtype is torch.bfloat16
    with pytest.raises(AssertionError, match="power of 2"):
        apply_exact_had_to_linear(layer, had_dim=12)


def test_multiplier() -> None:
    x = torch.randn(2, 24).bfloat16()
    slow, exact = HadamardMultiplier(*get_hadK(24)), HadamardMultiplier(*get_hadK(24), use_fp32=True)
    assert exact(x).dtype is torch.bfloat16
    torch.testing.assert_close(slow(x), exact(x), rtol=0.05, atol=0.05)
    assert list(slow.state_dict()) == ["had_K"]
