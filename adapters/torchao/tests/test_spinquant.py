"""SpinQuant's rotations: the function of the model stays, files of rotations, errors."""

import copy
from pathlib import Path

import pytest
import torch

from adapters.torchao.tests.gpt_fast_llama import Llama
from pennyweight.algorithms.rewrites.hadamard import rotation
from pennyweight_torchao.algorithms.spinquant import apply_spinquant

TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rotations", [(1,), (2,), (1, 2)])
def test_the_function_stays(split: bool, bias: bool, rotations: tuple[int, ...]) -> None:
    model = Llama(split=split, bias=bias).requires_grad_(False)
    y, before = model(TOKENS), copy.deepcopy(model.state_dict())
    apply_spinquant(model, use_r1=1 in rotations, use_r2=2 in rotations, use_r4=False, qkv_split=split)
    torch.testing.assert_close(model(TOKENS), y, rtol=1e-4, atol=1e-4)
    after = model.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert ("tok_embeddings.weight" in changed) == (1 in rotations)
    assert "layers.1.attention.wo.weight" in changed
    assert not (1 in rotations and bool((model.norm.weight != 1).any()))


def test_pretrained_rotations(tmp_path: Path) -> None:
    model, other = Llama(), Llama()
    other.load_state_dict(model.state_dict())
    y = model(TOKENS)
    r1, r2 = rotation(32, 7), rotation(8, 8)
    file = tmp_path / "R.bin"
    torch.save({"R1": r1, **{f"model.layers.{i}.self_attn.R2": r2 for i in range(2)}}, file)
    apply_spinquant(model, use_r1=True, use_r2=True, use_r4=False, pretrained_rotation_path=file)
    torch.testing.assert_close(model(TOKENS), y, rtol=1e-4, atol=1e-4)
    wanted = (other.tok_embeddings.weight.double() @ r1).float()
    torch.testing.assert_close(model.tok_embeddings.weight, wanted)
    with pytest.raises(AssertionError, match=r"R1 is \[32, 32\], the model needs \[64, 64\]"):
        apply_spinquant(Llama(64), use_r1=True, use_r4=False, pretrained_rotation_path=file)
    with pytest.raises(AssertionError, match="does not exist"):
        apply_spinquant(other, use_r4=False, pretrained_rotation_path=tmp_path / "none.bin")
    (tmp_path / "R.pt").touch()
    with pytest.raises(AssertionError, match=r"\.bin file"):
        apply_spinquant(other, use_r4=False, pretrained_rotation_path=tmp_path / "R.pt")
    with pytest.raises(NotImplementedError, match="pass use_r4=False"):
        apply_spinquant(other)
