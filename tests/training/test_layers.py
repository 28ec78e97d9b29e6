"""Models under a recipe: what is converted and what is not, resuming, pickles, and weights that are codes only."""

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import pennyweight as pw
from pennyweight.core.formats import E2M1, E4M3, E5M2, INT4, INT8, NF4
from pennyweight.core.ops.inplace import stochastic_writes
from pennyweight.core.spec import MXFP8, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.optim import AdamW8bit
from pennyweight.planning.config_resolution import PlanError
from pennyweight.training import (
    RECIPES,
    BitNetTrainingConfig,
    Float8TrainingConfig,
    Int8MixedPrecisionTrainingConfig,
    Int8WeightOnlyTrainingConfig,
    LowPrecisionLinear,
    LowPrecisionTrainingConfig,
    MXTrainingConfig,
    Recipe,
    convert_to_float8_training,
    get_recipe,
    grouped_mm,
    linear,
    stochastic_rounding,
    to_high_precision_,
)

COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 48, bias=False), nn.GELU(), nn.Linear(48, 32))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 40, generator=generator), torch.randint(0, 32, (24,), generator=generator)


def train(model: nn.Module, optimizer: Any, steps: range, around: Any = lambda step: nullcontext()) -> list[float]:
    losses = []
    for step in steps:
        x, label = batch(step)
        loss = F.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        with around(step):
            optimizer.step()
        losses.append(loss.item())
    return losses


# -- converting --------------------------------------------------------------------------------------------------------


def test_a_converted_model_is_the_model_it_was() -> None:
    model = network()
    names, params = list(model.state_dict()), list(model.parameters())
    calls: list[str] = []
    model[0].register_forward_hook(lambda *a: calls.append("hook"))
    report = pw.quantize_(model, LowPrecisionTrainingConfig("rowwise"))
    assert [type(m) for m in model[::2]] == [LowPrecisionLinear] * 3
    assert list(model.state_dict()) == names
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    assert [r.name for r in report.quantized] == ["0", "2", "4"]
    assert report.rows[0].note == "rowwise, by float32 of codes; 40 inputs padded to 48 on a GPU"
    x = torch.randn(3, 40)
    assert torch.equal(model[0](x), linear(x, params[0], params[1], "rowwise"))
    assert calls == ["hook"]
    assert "recipe=rowwise" in repr(model)
    back = to_high_precision_(model)
    assert [r.name for r in back.rows] == ["0.weight", "2.weight", "4.weight"]
    assert back.rows[0].note == "was rowwise"
    assert [type(m) for m in model[::2]] == [nn.Linear] * 3
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    assert torch.equal(model[0](x), F.linear(x, params[0], params[1]))


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_what_is_not_converted_is_listed_with_its_reason() -> None:
    wrapped = nn.Linear(32, 32)
    wrapped.forward = lambda x: x  # type: ignore[method-assign]
    quantized = nn.Linear(32, 32)
    pw.quantize_(quantized, pw.Int8WeightOnlyConfig())
    model = nn.ModuleDict({
        "plain": nn.Linear(32, 32), "small": nn.Linear(32, 8), "own": Own(32, 32), "wrapped": wrapped,
        "normed": weight_norm(nn.Linear(32, 32)), "quantized": quantized,
        "frozen": nn.Linear(32, 32).requires_grad_(False),
        "attention": nn.MultiheadAttention(32, 2), "table": nn.Embedding(4, 32), "done": LowPrecisionLinear(32, 32),
    })  # fmt: skip
    report = pw.quantize_(model, MXTrainingConfig())
    assert {r.name: r.note for r in report.quantized} == {
        "plain": "mxfp8, by float32 of values",
        "frozen": "mxfp8, by float32 of values; its weight is frozen",
        "done": "mxfp8, by float32 of values; was rowwise",
    }
    reasons = {r.name: r.note for r in report.skipped if r.name.endswith("weight")}
    assert reasons["small.weight"] == "fewer than 16 inputs or outputs"
    assert reasons["own.weight"] == "only nn.Linear is converted; Own may have its own forward"
    assert "replaced on the instance" in reasons["wrapped.weight"]
    assert reasons["quantized.weight"].startswith("its weight is already quantized: int8")
    assert "nn.MultiheadAttention uses its parameters directly" in reasons["attention.in_proj_weight"]
    assert "NonDynamicallyQuantizableLinear may have its own forward" in reasons["attention.out_proj.weight"]
    assert type(model["own"]) is Own
    assert type(model["attention"].out_proj) is not LowPrecisionLinear
    with pytest.raises(PlanError, match=r"nothing would be quantized.*only nn\.Linear is converted"):
        pw.quantize_(nn.Sequential(Own(32, 32)), MXTrainingConfig())


def test_a_filter_picks_and_the_root_can_be_a_layer() -> None:
    model = network()
    same = convert_to_float8_training(model, module_filter_fn=lambda m, name: name != "4")
    assert same is model
    assert [type(m) for m in model[::2]] == [LowPrecisionLinear, LowPrecisionLinear, nn.Linear]
    assert model[0].recipe is RECIPES["tensorwise"]
    root = nn.Linear(32, 32)
    assert convert_to_float8_training(root, config="rowwise") is root
    assert type(root) is LowPrecisionLinear
    mixed = {"0": Float8TrainingConfig("rowwise"), "2": Int8MixedPrecisionTrainingConfig(), "_default": None}
    config = pw.FqnToConfig(mixed)
    model = network()
    pw.quantize_(model, config)
    assert [model[0].recipe.name, model[2].recipe.name, type(model[4])] == ["rowwise", "int8", nn.Linear]


def test_configs_are_checked_and_make_recipes() -> None:
    assert Float8TrainingConfig().make() is RECIPES["tensorwise"]
    how = Float8TrainingConfig("rowwise", grad_output=torch.float8_e5m2).make()
    assert (how.grad_input.a.spec.format, how.grad_weight.a.spec.format) == (E5M2, E5M2)
    how = Int8MixedPrecisionTrainingConfig(grad_weight=False).make()
    assert (how.grad_weight.quantized, how.output) == (False, RECIPES["int8"].output)
    assert BitNetTrainingConfig().make() is RECIPES["bitnet"]
    for make, text in (
        (lambda: Float8TrainingConfig("int8"), "recipe must be one of tensorwise, rowwise"),
        (lambda: Float8TrainingConfig(weight="int8"), "formats are e4m3 and e5m2, got int8"),
        (lambda: MXTrainingConfig("nvfp4"), "recipe must be one of mxfp8"),
        (lambda: Int8MixedPrecisionTrainingConfig("int8", 16, False, False, False), "quantizes nothing"),
        (lambda: LowPrecisionTrainingConfig("fp7"), "unknown training recipe 'fp7'"),
        (lambda: Int8WeightOnlyTrainingConfig(group_size=0), "group_size must be a positive integer, got 0"),
    ):
        with pytest.raises(ValueError, match=text):
            make()


def test_copies_pickles_and_moves_keep_the_recipe() -> None:
    model = network()
    pw.quantize_(model, MXTrainingConfig("mxfp4"))
    x = torch.randn(5, 40)
    want = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert other[0].recipe == RECIPES["mxfp4"]
        assert torch.equal(other(x), want)
        assert other[0].weight is not model[0].weight
    half = copy.deepcopy(model).bfloat16()
    assert half(x.bfloat16()).dtype is torch.bfloat16
    assert model.to("meta")(x.to("meta")).shape == (5, 32)


@COMPILED
def test_a_model_compiles_in_one_graph_and_for_any_batch() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(40, 32), nn.GELU())
    pw.quantize_(model, LowPrecisionTrainingConfig("int8"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for n in (4, 9):
        x = torch.randn(n, 40)
        with torch.autocast("cpu", torch.bfloat16):
            y, want = compiled(x), model(x)
        assert torch.equal(y, want)
        y.float().square().sum().backward()
        got = model[0].weight.grad.clone()
        model.zero_grad()
        want.float().square().sum().backward()
        torch.testing.assert_close(model[0].weight.grad, got)
        model.zero_grad()
    torch._dynamo.reset()


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rowwise", "int8", "mxfp4", "int8 weights", "int8 weights, AdamW8bit"])
def test_a_resumed_run_has_the_same_losses_bit_for_bit(name: str) -> None:
    weights = name.startswith("int8 weights")

    def start() -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        model = network()
        pw.quantize_(model, Int8WeightOnlyTrainingConfig() if weights else LowPrecisionTrainingConfig(name))
        ours = weights and name.endswith("8bit")
        return model, (AdamW8bit if ours else torch.optim.AdamW)(model.parameters(), lr=1e-3)

    around = stochastic_rounding if name == "int8 weights" else lambda step: nullcontext()
    model, optimizer = start()
    train(model, optimizer, range(4), around)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    wanted = train(model, optimizer, range(4, 10), around)
    torch.rand(5)  # what happens between makes no difference
    resumed, optimizer = start()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert train(resumed, optimizer, range(4, 10), around) == wanted
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        p, q = (t.codes if isinstance(t, QT) else t for t in (p, q))
        assert torch.equal(p, q)


# -- weights that are codes --------------------------------------------------------------------------------------------

WRITABLE = {
    "int8_row": (QuantSpec(INT8, (-1,)), "absmax"),
    "int4_group": (QuantSpec(INT4, (16,), scale=torch.bfloat16), "absmax"),
    "int8_bits": (QuantSpec(INT4, (32,), layout="bits"), "absmax"), "e4m3": (QuantSpec(E4M3, (-1,)), None),
    "nf4": (QuantSpec(NF4, (32,)), None), "mxfp8": (MXFP8, "mx_rceil"), "e2m1": (QuantSpec(E2M1, (16,)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITABLE)
def test_many_small_writes_add_up_to_what_they_are(name: str) -> None:
    """The mean over seeds of the value after some updates, each far below a step: within Bernstein's bound for each
    element, and within five standard errors for their sum."""
    spec, rule = WRITABLE[name]
    x = torch.randn(16, 32)
    update = torch.randn(16, 32) * 1e-3
    start = QT.from_float(x, spec, rule)
    times, steps = 30, 4
    found = torch.empty(times, 16, 32, dtype=torch.float64)
    for seed in range(times):
        w = start.clone()
        for step in range(steps):
            with stochastic_writes(step, seed):
                w.add_(update)
        found[seed] = w.dequantize(torch.float64)
    want = start.dequantize(torch.float64) + steps * update.double()
    mean, error = found.mean(0), found.std(0) / times**0.5
    gap = (found.amax(0) - found.amin(0)).max()
    assert ((mean - want).abs() <= 6 * error + 12 * gap / times).all()
    total = (mean - want).sum() / (found.sum((1, 2)).std() / times**0.5)
    assert total.abs() < 5
    assert (found[0] != start.dequantize(torch.float64)).any()
    to_nearest = start.clone()
    for _ in range(steps):
        to_nearest.add_(update)
    if spec.format is INT8:
        assert (to_nearest.dequantize() == start.dequantize()).double().mean() > 0.9  # the failure that this prevents


def test_scales_change_seldom() -> None:
    """A scale that moves rounds its whole block anew; under chance that adds noise, so it has room."""
    w = QT.from_float(torch.randn(8, 64), QuantSpec(INT8, (-1,)), "absmax")
    first, changes = w.scale.clone(), 0
    for step in range(60):
        before = w.scale.clone()
        with stochastic_writes(step, 0):
            w.mul_(1.002)
        changes += int((w.scale != before).sum())
    assert not torch.equal(w.scale, first)
    assert changes <= 8 * 4  # 12.7 % growth a row: once for the first overflow, then every 6 %
    assert w.codes.abs().max() <= 127
    with stochastic_writes(0, 0):
        w.zero_()
        w.add_(1.0)
    torch.testing.assert_close(w.dequantize(), torch.ones(8, 64), rtol=0, atol=1.1 / 119)  # a code, with its room


def test_int8_weights_train_by_chance_as_float_ones_do_and_to_the_nearest_stand_still() -> None:
    finals = {}
    start = network()
    pw.quantize_(start, Int8WeightOnlyTrainingConfig())
    assert sum(p.nbytes for p in start.parameters()) < 0.33 * sum(4 * p.numel() for p in start.parameters())
    runs = {"chance": stochastic_rounding, "nearest": lambda step: nullcontext(), "float": lambda step: nullcontext()}
    for name, around in runs.items():
        model = copy.deepcopy(start)
        if name == "float":
            to_high_precision_(model)
        optimizer = torch.optim.SGD([model[0].weight, model[2].weight, model[4].weight], lr=8e-3)
        first = model[0].weight
        for step in range(12):
            x, label = batch(0)
            loss = F.cross_entropy(model(x), label)
            optimizer.zero_grad()
            loss.backward()
            with around(step):
                optimizer.step()
        finals[name] = loss.item()
        assert model[0].weight is first
        assert type(first.grad) is Tensor
    begin = F.cross_entropy(start(batch(0)[0]), batch(0)[1]).item()
    gain = begin - finals["float"]
    assert abs(finals["chance"] - finals["float"]) < 0.3 * gain
    assert finals["nearest"] > finals["float"] + 0.5 * gain


def test_our_optimizers_round_quantized_weights_by_chance_themselves() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    pw.quantize_(model, Int8WeightOnlyTrainingConfig())
    w = model[0].weight
    codes = w.codes.clone()
    optimizer = AdamW8bit(model.parameters(), lr=1e-5, weight_decay=0.0)
    w.grad = torch.ones(64, 64)
    before = w.dequantize().detach().double()
    for _ in range(50):
        optimizer.step()
    moved = (w.dequantize().detach().double() - before).mean().item()
    assert (w.codes != codes).any()
    assert moved == pytest.approx(-50 * 1e-5, rel=0.2)  # a step is 1e-5, a code 1e-3


def test_stochastic_rounding_ends_with_its_block_and_updates_are_reproducible() -> None:
    def written(step: int, seed: int) -> Tensor:
        w = QT.from_float(torch.linspace(-1, 1, 512).reshape(8, 64), QuantSpec(INT8, (-1,)), "absmax")
        with stochastic_rounding(step, seed):
            w.add_(1e-3)
            w.add_(1e-3)
        return w.codes

    first = written(3, 0)
    assert torch.equal(written(3, 0), first)
    assert not torch.equal(written(4, 0), first)
    assert not torch.equal(written(3, 1), first)
    w = QT.from_float(torch.ones(4, 32), QuantSpec(INT8, (-1,)), "absmax")
    with pytest.raises(RuntimeError, match="stop"), stochastic_rounding(0):
        raise RuntimeError("stop")
    w.add_(1e-4)
    assert torch.equal(w.codes, torch.full((4, 32), 127, dtype=torch.int8))


def test_stochastic_rounding_around_forward_and_backward_leaves_gradients_alone() -> None:
    layer, x = nn.Linear(16, 4), torch.randn(3, 16)
    layer(x).square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    with stochastic_rounding(1):
        y = layer(x)
        assert y.requires_grad
        y.square().sum().backward()
    assert torch.equal(layer.weight.grad, expected)


# -- deploying ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_what_was_trained_is_what_is_deployed(name: str) -> None:
    """quantize_ under the recipe's own config stores the weight that the output's product saw."""
    model = network()
    pw.quantize_(model, LowPrecisionTrainingConfig(name))
    x = torch.randn(24, 40)
    first = model[0](x)
    pw.quantize_(model, get_recipe(name).deployed())
    assert isinstance(model[0].weight, QT)
    torch.testing.assert_close(model[0](x), first, rtol=1e-4, atol=1e-4 * first.abs().max().item())


def test_recipes_that_cannot_be_deployed_say_so() -> None:
    how = RECIPES["rowwise"]
    with pytest.raises(ValueError, match="its output does not use a quantized weight that can be stored"):
        how.with_(output=how.grad_weight.__class__()).deployed()


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rowwise", "tensorwise", "int8", "mxfp4"])
def test_experts_are_a_loop_over_linear(name: str) -> None:
    x, w = torch.randn(23, 48, requires_grad=True), torch.randn(4, 48, 32, requires_grad=True)
    bias = torch.randn(4, 32, requires_grad=True)
    ends = torch.tensor([5, 5, 20, 22], dtype=torch.int32)
    g = torch.randn(23, 32)
    y = grouped_mm(x, w, ends, name, bias)
    y.backward(g)
    got = [t.grad.clone() for t in (x, w, bias)]
    x.grad = w.grad = bias.grad = None
    start = 0
    for e, stop in enumerate(ends.tolist()):
        part = linear(x[start:stop], w[e].t(), bias[e], name)
        assert torch.equal(part, y[start:stop])
        part.backward(g[start:stop])
        start = stop
    assert not y[22:].any()
    for t, mine in zip((x, w, bias), got, strict=True):
        assert torch.equal(t.grad, mine)
    assert not w.grad[1].any()
    close = torch.cat([x[:5] @ w[0], x[5:20] @ w[2], x[20:22] @ w[3]]).detach()
    error = (y[:22] - torch.cat([bias[0].expand(5, 32), bias[2].expand(15, 32), bias[3].expand(2, 32)]) - close).norm()
    assert error < (0.2 if name == "mxfp4" else 0.06) * close.norm()


def experts(w: Tensor, bias: Tensor | None, run: Any, how: Recipe, ends: Tensor) -> list[Tensor]:
    """Output, and gradients of what wants one."""
    x = torch.randn(23, 48, generator=torch.Generator().manual_seed(1)).requires_grad_(bias is not None)
    y = run(x, w, ends, bias, how)
    wanted = [t for t in (x, w, bias) if t is not None and t.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, torch.randn(23, 32, generator=torch.Generator().manual_seed(2)))]


def plain(x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None, how: Recipe) -> Tensor:
    return grouped_mm(x, w.transpose(-2, -1), ends, how, bias)


def as_an_op(x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None, how: Recipe) -> Tensor:
    return torch.ops.pennyweight.training_grouped_mm(x, w.transpose(-2, -1), ends, bias, how.key)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("biased", [False, True])
def test_the_op_of_experts_gives_the_bits_of_eager_mode(name: str, biased: bool) -> None:
    w = torch.randn(4, 32, 48, requires_grad=True)
    bias = torch.randn(4, 32, requires_grad=True) if biased else None
    for stops in ([5, 5, 20, 22], [0, 0, 0, 0], [23, 23, 23, 23]):  # experts and rows without each other
        ends = torch.tensor(stops, dtype=torch.int32)
        got, want = (experts(w, bias, run, get_recipe(name), ends) for run in (as_an_op, plain))
        assert all(map(torch.equal, got, want))
    x, none = torch.randn(3, 48), torch.zeros(0, 32, 48)
    assert torch.equal(as_an_op(x, none, torch.zeros(0, dtype=torch.int64), None, get_recipe(name)), torch.zeros(3, 32))


@COMPILED
def test_experts_compile_in_one_graph_to_the_same_bits() -> None:
    w, bias = torch.randn(4, 32, 48, requires_grad=True), torch.randn(4, 32, requires_grad=True)
    for name, one in (("bitnet", None), ("nvfp4", bias)):
        torch._dynamo.reset()
        compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
        how = get_recipe(name).with_(seed=7)
        for stops in ([5, 5, 20, 22], [1, 9, 9, 23]):  # read at run time
            got, want = (experts(w, one, run, how, torch.tensor(stops)) for run in (compiled, plain))
            assert all(map(torch.equal, got, want))
    torch._dynamo.reset()
    op = torch.ops.pennyweight.training_grouped_mm.default
    with torch.no_grad():
        x, leaf = torch.randn(6, 32), torch.randn(2, 32, 16)
    given = (x.requires_grad_(), leaf.requires_grad_(), torch.tensor([2, 6]), None, get_recipe("mxfp4").key)
    torch.library.opcheck(op, given)
    torch._dynamo.reset()


@COMPILED
def test_compiled_experts_of_any_number_of_rows_under_autocast() -> None:
    torch._dynamo.reset()
    w = torch.randn(2, 48, 32, requires_grad=True)
    compiled = torch.compile(
        lambda x, ends: grouped_mm(x.tanh(), w, ends, "int8").float().square(), fullgraph=True, backend="aot_eager"
    )
    for rows in (6, 17, 30):
        x, ends = torch.randn(rows, 48), torch.tensor([2, rows])
        with torch.autocast("cpu", torch.bfloat16):
            y, want = compiled(x, ends), grouped_mm(x.tanh(), w, ends, "int8").float().square()
        assert torch.equal(y, want)
        assert torch.equal(*(torch.autograd.grad(t.sum(), w)[0] for t in (y, want)))
    with pytest.raises(ValueError, match="must ascend from 0 to the 30 rows"):
        compiled(torch.randn(30, 48), torch.tensor([2, 31]))
    torch._dynamo.reset()


def test_recipes_are_what_their_keys_say() -> None:
    for how in RECIPES.values():
        assert Recipe.from_key(how.key) == how
    own = get_recipe("nvfp4").with_formats(grad_output=E5M2).with_(seed=3, name='own "recipe"')
    assert Recipe.from_key(own.key) == own
    assert own.key != get_recipe("nvfp4").key


def test_experts_of_the_other_order_and_bad_ends() -> None:
    x, w = torch.randn(6, 32), torch.randn(2, 16, 32)
    ends = torch.tensor([2, 6])
    y = grouped_mm(x, w.transpose(-2, -1), ends)
    assert torch.equal(y[:2], linear(x[:2], w[0], None, "rowwise"))
    for bad, text in (
        (torch.tensor([4, 2]), "must ascend"), (torch.tensor([2, 7]), "must ascend from 0 to the 6 rows"),
        (torch.tensor([6]), "ends must be 2 integers"), (torch.tensor([2.0, 6.0]), "ends must be 2 integers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            grouped_mm(x, w.transpose(-2, -1), bad)
    with pytest.raises(ValueError, match=r"expected x \[T, K\] and w \[E, K, N\], got \[6, 32\] and \[2, 16, 32\]"):
        grouped_mm(x, w, ends)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    pw.reset_fallbacks()
    yield
    pw.reset_fallbacks()
