"""torchao.sparsity and torchao.prototype.sparsity: masks, sparsifiers, sparse layouts and weights."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from pennyweight.compat.torchao import quantization, sparsity, v0_8_configs
from pennyweight.compat.torchao.dtypes import BlockSparseLayout, MarlinSparseLayout, SemiSparseLayout
from pennyweight.compat.torchao.prototype import sparsity as prototype
from pennyweight.compat.torchao.prototype.sparsity import pruner
from pennyweight.compat.torchao.sparsity import blocksparse, training, utils
from pennyweight.compat.torchao.sparsity.supermask import percentile
from pennyweight.core.tensor import AffineQuantizedTensor


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    v0_8_configs.stored_dense.cache_clear()


def _two_of_four(w: torch.Tensor) -> torch.Tensor:
    """w with the two smallest magnitudes of every four set to zero."""
    runs = w.detach().reshape(-1, 4)
    keep = runs.abs().argsort(1)[:, 2:]
    return torch.zeros_like(runs).scatter(1, keep, runs.gather(1, keep)).view(w.shape)


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 6), (0, 4), (4, 4)])
def test_masks_keep_the_largest(n: int, m: int) -> None:
    w = torch.randn(8, 12)
    mask = utils.mask_creator(w, n, m)
    assert mask.dtype is torch.float32
    runs, size = mask.view(-1, m), w.abs().view(-1, m)
    assert (runs.sum(1) == n).all()
    if 0 < n < m:
        assert (torch.where(runs > 0, size, torch.inf).amin(1) >= torch.where(runs > 0, 0, size).amax(1)).all()
    with pytest.raises(ValueError, match="evenly divided into 5 groups"):
        utils.mask_creator(w, 2, 5)


def test_random_sparse_matrices() -> None:
    blocks = utils.create_block_sparse_tensor(8, 12, 4, 0.5, torch.bfloat16, device="cpu")
    assert (blocks.shape, blocks.dtype) == ((8, 12), torch.bfloat16)
    assert all(len(b.unique()) == 1 for row in blocks.split(4) for b in row.split(4, 1))
    half = utils.create_semi_structured_tensor(4, 8, torch.float32, device="cpu")
    assert ((half.view(-1, 2) != 0).sum(1) == 1).all()
    with pytest.raises(AssertionError, match="between 0 and 1"):
        utils.create_block_sparse_tensor(8, 8, 4, 1.5, torch.float32)
    from pennyweight.compat.torchao.sparsity.marlin import inject_24

    w = torch.randn(8, 6)
    pruned, mask = inject_24(w, 8, 6)
    assert torch.equal(pruned, _two_of_four(w.t().contiguous()).t())
    assert torch.equal(pruned, w * mask)
    with pytest.raises(ValueError, match=r"w is \[8, 6\], not \[6, 8\]"):
        inject_24(w, 6, 8)


# -- sparsifiers -------------------------------------------------------------------------------------------------------


def test_fake_sparsity_is_two_of_four() -> None:
    model = _model()
    want = [_two_of_four(model[i].weight) for i in (0, 2)]
    sparsity.apply_fake_sparsity(model, filter_fn=lambda m, name: name == "2")
    assert torch.equal(model[2].weight, want[1])
    assert not torch.equal(model[0].weight, want[0])
    sparsity.apply_fake_sparsity(model)
    assert torch.equal(model[0].weight, want[0])
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("all_layers", [True, False])
def test_wanda(block: int | None, all_layers: bool) -> None:
    model, x = _model(), torch.randn(20, 16)
    if block is None:
        sparsifier = sparsity.WandaSparsifier(sparsity_level=0.3)
    else:
        with pytest.warns(UserWarning, match="fixed to 50%"):
            sparsifier = sparsity.WandaSparsifier(semi_structured_block_size=block)
    weights = [model[i].weight.detach().clone() for i in (0, 2)]
    sparsifier.prepare(model, None if all_layers else [{"tensor_fqn": "0.weight"}])
    with pytest.raises(ValueError, match="has seen no input"):
        sparsifier.step()
    model(x)
    model(2 * x.view(4, 5, 16))
    norm = model[0].activation_post_process.norm
    torch.testing.assert_close(norm, 5 * x.square().sum(0))
    sparsifier.step()
    sparsifier.squash_mask()
    score = (weights[0].abs() * norm).view(-1, block or weights[0].numel())
    count = 2 if block else int(0.3 * score.numel())
    want = weights[0].view_as(score).scatter(1, score.argsort(1)[:, :count], 0).view_as(weights[0])
    assert torch.equal(model[0].weight, want)
    assert torch.equal(model[2].weight, weights[1]) != all_layers
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    with pytest.raises(NotImplementedError, match="store activations only"):
        sparsity.PerChannelNormObserver().calculate_qparams()


def test_a_masked_model_is_saved_with_its_masks() -> None:
    model, x = _model(), torch.randn(3, 16)
    config = [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight", "sparsity_level": 0.25}]
    sparsifier = prototype.WeightNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4), zeros_per_block=4)
    sparsifier.prepare(model, config)
    assert isinstance(sparsifier, prototype.BaseSparsifier)
    schedule = prototype.CubicSL(sparsifier, init_sl=0.0, init_t=0, delta_t=1, total_t=2)
    for _ in range(2):
        sparsifier.step()
        schedule.step()
    sparsifier.step()
    assert schedule.get_last_sl() == [0.5, 0.25]
    assert float((model[0].weight == 0).float().mean()) == 0.5
    assert float((model[2].weight == 0).float().mean()) == 0.25
    saved = model.state_dict()
    assert "0.parametrizations.weight.0.mask" in saved
    other = _model()
    again = prototype.WeightNormSparsifier()
    again.prepare(other, config)
    other.load_state_dict(saved)
    assert torch.equal(other(x), model(x))
    third = _model()
    fresh = prototype.WeightNormSparsifier()
    fresh.model = third
    third[0].bias.data.copy_(model[0].bias)
    for i in (0, 2):  # registers masks in a model that was not prepared
        nn.utils.parametrize.register_parametrization(third[i], "weight", nn.Identity())
    fresh.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
    assert [type(m[1]) for m in (third[0].parametrizations.weight, third[2].parametrizations.weight)] == [
        prototype.FakeSparsity
    ] * 2
    assert torch.equal(third(x), model(x))

    class Doubled(nn.Linear):
        @classmethod
        def from_dense(cls, old: Any) -> Any:
            new = cls(old.in_features, old.out_features)
            new.weight, new.bias = nn.Parameter(2 * old.weight.detach()), old.bias
            return new

    converted = sparsifier.convert(model, {nn.Linear: Doubled})
    assert [type(m) for m in converted] == [Doubled, nn.ReLU, Doubled]
    assert type(sparsifier.convert(nn.Sequential(nn.Linear(2, 2)), {nn.Linear: Doubled})[0]) is nn.Linear
    sparsifier.squash_mask(params_to_keep=("sparsity_level",))
    assert torch.equal(other(x), model(x))
    assert model[2].sparse_params == {"sparsity_level": 0.25}
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    scheduled = prototype.LambdaSL(prototype.WeightNormSparsifier(), lambda epoch: 0.5**epoch)
    assert isinstance(scheduled, prototype.BaseScheduler)


def test_sparsifiers_of_your_own_and_near_diagonals() -> None:
    class Evens(prototype.BaseSparsifier):
        def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
            getattr(module.parametrizations, tensor_name)[0].mask[::2] = 0

    model = _model()
    own = Evens({})
    own.prepare(model, [{"tensor_fqn": "0.weight"}])
    model(torch.randn(2, 16)).sum().backward()
    own.step()
    assert (model[0].weight[::2] == 0).all()
    assert (model[0].weight[1::2] != 0).all()
    square = nn.Sequential(nn.Linear(6, 6))
    near = prototype.NearlyDiagonalSparsifier(nearliness=3)
    near.prepare(square, [{"tensor_fqn": "0.weight"}])
    near.step()
    i = torch.arange(6)
    assert torch.equal(square[0].weight != 0, (i[:, None] - i).abs() <= 1)


@pytest.mark.parametrize("between", [nn.ReLU(), nn.Dropout(0.0)])
def test_pruned_rows_take_the_next_layer_with_them(between: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model[0].weight[:4] *= 1e-3
        model[0].bias.zero_()
    x = torch.randn(5, 6)
    kept = nn.Sequential(*copy.deepcopy(model))
    with torch.no_grad():
        kept[0].weight[:4] = 0
    want = kept(x)
    sparsifier = pruner.SaliencyPruner({})
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.5}])
    sparsifier.enable_mask_update = True
    sparsifier.step()
    small = sparsifier.prune()
    shapes = {name: tuple(p.shape) for name, p in small.named_parameters()}
    assert shapes == {"0.weight": (4, 6), "0.bias": (4,), "2.weight": (4, 4), "2.bias": (4,)}
    torch.testing.assert_close(small(x), want)
    assert isinstance(sparsifier, pruner.BaseStructuredSparsifier)


def test_supermask() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(20, 12)
    masked = sparsity.SupermaskLinear.from_linear(linear, 0.6, 4)
    nn.init.uniform_(masked.scores)
    assert masked.scores.shape == (3, 5)
    mask = masked.get_mask()
    bound = percentile(masked.scores, 60)
    assert torch.equal(mask, (masked.scores >= bound).float().repeat_interleave(4, 0).repeat_interleave(4, 1))
    x = torch.randn(5, 20, requires_grad=True)
    masked(x).sum().backward()
    torch.testing.assert_close(masked.weight.grad, x.detach().sum(0).expand(12, 20))  # masked weights are trained too
    blocks = masked.weight.grad.view(3, 4, 5, 4).sum((1, 3))
    torch.testing.assert_close(masked.scores.grad, blocks)
    plain = sparsity.SupermaskLinear.to_linear(masked)
    assert torch.equal(plain.weight, linear.weight * mask)
    assert torch.equal(plain(x), masked(x))
    odd = sparsity.SupermaskLinear(0.99, 8, True, True, 20, 12, bias=False)
    assert odd.get_mask().shape == (12, 20)
    assert odd.sparsity_level == 1 - 1 / 6
    assert not odd.scores.requires_grad
    assert not odd.weight.requires_grad


# -- sparse weights ----------------------------------------------------------------------------------------------------


def test_semi_sparse_weights_are_pruned_and_say_once_that_they_are_dense() -> None:
    model = _model()
    want = _two_of_four(model[0].weight)
    with pytest.warns(UserWarning, match="SemiSparseWeightConfig: weights are pruned 2:4 and stored dense") as seen:
        found = sparsity.sparsify_(model, sparsity.semi_sparse_weight())
    assert found is model
    assert len(seen) == 1
    assert torch.equal(model[0].weight, want)
    assert type(model[0].weight) is nn.Parameter
    assert not model[0].weight.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsity.sparsify_(_model(), sparsity.semi_sparse_weight(), lambda m, name: name == "0")
    with pytest.raises(Exception, match="6 inputs are not divisible by 4"):
        sparsity.sparsify_(nn.Sequential(nn.Linear(6, 6)), sparsity.semi_sparse_weight())


def _int8_dynamic(layout: Any) -> Any:
    return quantization.Int8DynamicActivationInt8WeightConfig(layout=layout)


def test_sparse_layouts_quantize_pruned_weights() -> None:
    x = torch.randn(3, 16)
    for config, layout in (
        (sparsity.int8_dynamic_activation_int8_semi_sparse_weight(), SemiSparseLayout()),
        (quantization.Float8DynamicActivationFloat8SemiSparseWeightConfig(), None),
        (quantization.Int4WeightOnlyConfig(128, layout=MarlinSparseLayout()), MarlinSparseLayout()),
    ):
        model, dense = _model(), _model()
        float_weight = dense[0].weight.detach().clone()
        dense[0].weight.data.copy_(_two_of_four(float_weight))
        with pytest.warns(UserWarning, match="stored dense"):
            report = quantization.quantize_(model, config, lambda m, name: name == "0")
        w = model[0].weight
        assert isinstance(w, AffineQuantizedTensor)
        values = w.dequantize()
        assert torch.equal(values, values * (_two_of_four(float_weight) != 0))
        if layout is not None:
            assert torch.equal(layout.pre_process(float_weight), _two_of_four(float_weight))
        assert "2:4 sparse" in str(report)
        if isinstance(config, quantization.Int8DynamicActivationInt8WeightConfig):
            quantization.quantize_(dense, _int8_dynamic(None), lambda m, name: name == "0")
            assert torch.equal(values, dense[0].weight.dequantize())
            torch.testing.assert_close(model(x), dense(x))
    pruned, how = _two_of_four(float_weight), (quantization.MappingType.SYMMETRIC, (1, 16), torch.int32, 0, 15)
    scale, zero = quantization.choose_qparams_affine(pruned, *how, eps=1e-6)
    codes = quantization.quantize_affine(pruned, (1, 16), scale, zero, *how[2:])
    assert torch.equal(values, quantization.dequantize_affine(codes, (1, 16), scale, zero, *how[2:]))
    same = _model()
    quantization.quantize_(same, _int8_dynamic(BlockSparseLayout(4)))
    plain = _model()
    quantization.quantize_(plain, _int8_dynamic(None))
    assert torch.equal(same[0].weight.dequantize(), plain[0].weight.dequantize())
    with pytest.raises(ValueError, match="multiple of 4 inputs, not 6"):
        quantization.quantize_(nn.Sequential(nn.Linear(6, 6)), _int8_dynamic(SemiSparseLayout()))


def test_sparse_float8_tensors_are_pruned() -> None:
    from pennyweight.compat.torchao.quantization.quantize_.workflows.float8 import (
        float8_sparse_2x4_2d_data_2d_metadata_tensor as home,
    )

    w = torch.randn(8, 16)
    got = home.Float8Sparse2x4_2DData2DMetadataTensor.from_hp(w, torch.float8_e5m2)
    want = quantization.Float8Tensor.from_hp(_two_of_four(w), torch.float8_e5m2)
    assert torch.equal(got.dequantize(), want.dequantize())


def _blocks() -> torch.Tensor:
    torch.manual_seed(1)
    w = torch.randn(32, 48)
    w[:16, 16:], w[16:, :16] = 0, 0
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_block_sparse_weights(dtype: torch.dtype) -> None:
    w = _blocks().to(dtype)
    model = nn.Sequential(nn.Linear(48, 32)).to(dtype)
    model[0].weight.data.copy_(w)
    dense = copy.deepcopy(model)
    sparsity.sparsify_(model, sparsity.block_sparse_weight(blocksize=16))
    sparse = model[0].weight
    assert isinstance(sparse, blocksparse.BlockSparseTensor)
    assert sparse.values().shape == (3, 16, 16)
    assert sparse.crow_indices().tolist() == [0, 1, 3]
    assert sparse.col_indices().tolist() == [0, 1, 2]
    assert torch.equal(sparse.dequantize(), w)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    for shape in ((7, 48), (48,), (2, 3, 48), (0, 48)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        got, want = model(x), dense(other)
        torch.testing.assert_close(got, want, **tolerance)
        got.sum().backward()
        want.sum().backward()
        torch.testing.assert_close(x.grad, other.grad, **tolerance)
    held = io.BytesIO()
    torch.save(model.state_dict(), held)
    held.seek(0)
    loaded = torch.load(held, weights_only=False)["0.weight"]
    assert torch.equal(loaded.dequantize(), w)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert model[0].weight.to(torch.float32).dtype is torch.float32
    assert "weight=Parameter" in repr(model) or "BlockSparseTensor(shape=" in repr(model)


def test_block_sparse_products_and_errors() -> None:
    w = _blocks()
    t = blocksparse.BlockSparseTensor.from_dense(w, 16)
    x = torch.randn(48, 5)
    parts = t.crow_indices(), t.col_indices(), t.values()
    torch.testing.assert_close(blocksparse.blocksparse_addmm(x, *parts, 32, 48, None), w @ x)
    codes = torch.randint(-127, 128, (48, 5), dtype=torch.int8)
    integers = (w * 40).round().clamp(-127, 127).to(torch.int8)
    t8 = blocksparse.BlockSparseTensor.from_dense(integers, 16)
    left, right = torch.rand(32), torch.rand(5)
    got = blocksparse.blocksparse_int_addmm(t8.crow_indices(), t8.col_indices(), t8.values(), codes, left, right)
    want = ((integers.double() @ codes.double()) * left[:, None] * right).to(torch.bfloat16).t()
    assert torch.equal(got, want)
    none = blocksparse.BlockSparseTensor.from_dense(torch.zeros(16, 16), 16)
    assert torch.equal(nn.functional.linear(torch.ones(2, 16), none), torch.zeros(2, 16))
    with pytest.raises(ValueError, match="blocks of 5 do not divide"):
        blocksparse.BlockSparseTensor.from_dense(w, 5)
    with pytest.raises(ValueError, match="bsr_values and both indices"):
        blocksparse.BlockSparseTensor((4, 4), 2, None, None, None)


def test_semi_sparse_training() -> None:
    model = _model()
    before = list(model.parameters())
    training.swap_linear_with_semi_sparse_linear(
        model, {"0": training.SemiSparseLinear, "2": training.SemiSparseActivationLinear}
    )
    assert [type(m).__name__ for m in model] == ["SemiSparseLinear", "ReLU", "SemiSparseActivationLinear"]
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    x = torch.randn(2, 4, 16)
    pruned = training.semi_structured_sparsify(model[0].weight)
    assert torch.equal(model[0](x), nn.functional.linear(x, pruned, model[0].bias))
    model(x).sum().backward()
    assert (model[0].weight.grad != 0).float().mean() > 0.6  # straight through, also to pruned weights
    training.swap_semi_sparse_linear_with_linear(model)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_tiles_are_sparse_in_both_directions() -> None:
    w = torch.randn(16, 24)
    pruned = training.semi_structured_sparsify(w)
    for x in (pruned, pruned.t()):
        assert ((x.reshape(-1, 4) != 0).sum(1) <= 2).all()
    kept = pruned != 0
    assert torch.equal(pruned, w * kept)
    assert float(kept.float().mean()) > 0.45
    largest = w.abs().view(4, 4, 6, 4).amax((1, 3))
    assert torch.equal(pruned.abs().view(4, 4, 6, 4).amax((1, 3)), largest)
    like = training.autograd.semi_structured_sparsify_like(torch.ones(16, 24), pruned)
    assert torch.equal(like, kept.float())
    with pytest.raises(ValueError, match="multiples of 4"):
        training.semi_structured_sparsify(torch.randn(6, 8))
