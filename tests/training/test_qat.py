"""quantize_(model, QATConfig(...)): what starts from a solver, what is learned, what is refused."""

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import pennyweight as pw
from pennyweight.core.formats import INT4, INT8
from pennyweight.core.numerics import sqnr
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.training import (
    FakeQuantizedEmbedding,
    FakeQuantizedLinear,
    Teacher,
    distillation_loss,
    parameter_groups,
)

W4 = pw.Int4WeightOnlyConfig(group_size=32)
INT2 = pw.IntxWeightOnlyConfig(torch.int2, pw.PerGroup(16), pw.MappingType.ASYMMETRIC)
SYMMETRIC = pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(16))
STATIC = pw.Int8StaticActivationInt8WeightConfig(0.03)


def network() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def inputs(count: int = 4) -> list[Tensor]:
    mix = torch.randn(64, 64)
    return [torch.randn(16, 64) @ mix for _ in range(count)]


@pytest.mark.parametrize("learn", ["none", "all"])
@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        (W4, "gptq"),
        (W4, ["smooth", "hqq"]),
        (INT2, {"gptq": {"activation_order": True}}),
        (pw.Int8DynamicActivationInt8WeightConfig(), "auto"),
        (pw.NVFP4WeightOnlyConfig(), "gptq"),
        (pw.NF4WeightOnlyConfig(), "gptq"),
        (pw.CodebookWeightOnlyConfig(bits=3, dim=2), "kmeans"),
    ],
    ids=str,
)
def test_training_starts_at_what_a_solver_chose(config: pw.AOBaseConfig, algorithm: object, learn: str) -> None:
    model, data = network(), inputs()
    solved = copy.deepcopy(model)
    pw.quantize_(solved, config, calibration=data, algorithm=algorithm)
    pw.quantize_(model, pw.QATConfig(config, learn=learn), calibration=data, algorithm=algorithm)
    assert torch.equal(model(data[0]), solved(data[0]))
    state = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(3):
        (model(data[0]) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = model(data[0])
    assert not torch.equal(trained, solved(data[0]))
    pw.quantize_(model, pw.QATConfig(step="convert"))
    assert torch.equal(model(data[0]), trained)
    again = network()
    pw.quantize_(again, pw.QATConfig(config, learn=learn), calibration=data, algorithm=algorithm)
    again.load_state_dict(state)
    assert torch.equal(again(data[0]), solved(data[0]))


@pytest.mark.parametrize("algorithm", [None, "gptq"])
@pytest.mark.parametrize("config", [W4, INT2, pw.Int8DynamicActivationInt8WeightConfig()], ids=str)
def test_in_bfloat16(config: pw.AOBaseConfig, algorithm: str | None) -> None:
    model, x = network().bfloat16(), torch.randn(8, 64).bfloat16()
    deployed = copy.deepcopy(model)
    options = {} if algorithm is None else {"calibration": [x], "algorithm": algorithm}
    pw.quantize_(deployed, config, **options)
    pw.quantize_(model, pw.QATConfig(config, learn="all"), **options)
    assert torch.equal(model(x), deployed(x))
    assert model[1].weight_scale.dtype == torch.float32
    optimizer = torch.optim.SGD(parameter_groups(model, 0.1))
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    trained = model(x)
    assert not torch.equal(trained, deployed(x))
    pw.quantize_(model, pw.QATConfig(step="convert"))
    assert torch.equal(model(x), trained)


def test_latent_weights_lie_in_the_cells_of_the_codes_and_towards_the_float_weights() -> None:
    model, data = network(), inputs()
    exact, other = copy.deepcopy(model), copy.deepcopy(model)
    pw.quantize_(model, pw.QATConfig(W4), calibration=data, algorithm="gptq")
    pw.quantize_(other, W4, calibration=data, algorithm="gptq")
    latent, rounded, was = model[1].weight.detach(), other[1].weight.dequantize(), exact[1].weight.detach()
    assert sqnr(was, latent) > sqnr(was, rounded) + 3
    size = other[1].weight.scale.float().repeat_interleave(32, 1)
    assert ((latent - rounded).abs() <= 0.5001 * size).all()
    moved = ((was - rounded).abs() > 0.5001 * size).double().mean()
    assert moved > 0.05  # GPTQ did not simply round to nearest


def numeric(model: nn.Module, name: str, x: Tensor, index: tuple[int, ...], step: float) -> float:
    p, out = model.get_parameter(name), []
    for sign in (1, -1):
        with torch.no_grad():
            p[index] += sign * step
            out.append(float(model(x).double().sum()))
            p[index] -= sign * step
    return (out[0] - out[1]) / (2 * step)


def test_gradients_of_scales_are_those_of_lsq() -> None:
    """d/ds = sum over the block of g (code - inside x / s), times 1 / sqrt(16 * 8)."""
    model, x = nn.Linear(32, 8, bias=False), torch.randn(5, 32)
    pw.quantize_(model, pw.QATConfig(SYMMETRIC, learn="scale"))
    with torch.no_grad():
        model.weight_scale.mul_(0.5)  # so that half of the range clips
    grad = torch.randn(5, 8)
    model(x).backward(grad)
    g, w, s = grad.t() @ x, model.weight.detach(), model.weight_scale.detach().repeat_interleave(16, 1)
    u = w / s
    inside = (u >= -8.5) & (u <= 7.5)
    assert 0.05 < (~inside).double().mean() < 0.6
    expected = (g * (u.round().clamp(-8, 7) - u * inside)).unflatten(1, (2, 16)).sum(-1) / (16 * 8) ** 0.5
    torch.testing.assert_close(model.weight_scale.grad, expected)
    torch.testing.assert_close(model.weight.grad, g * inside)


def test_gradients_of_offsets_and_zero_points() -> None:
    """Only what clips moves with them: with a different sign, as a zero point goes against the range."""
    for config, name, sign in ((W4, "weight_offset", 1.0), (INT2, "weight_zero_point", -1.0)):
        model, x, grad = nn.Linear(32, 8, bias=False), torch.randn(5, 32), torch.randn(5, 8)
        pw.quantize_(model, pw.QATConfig(config, learn="all"))
        with torch.no_grad():
            model.weight.mul_(1.5)
        model(x).backward(grad)
        g = grad.t() @ x
        clipped = (model.weight.grad == 0).float()
        assert 0.05 < clipped.mean() < 0.6
        group = 32 if config is W4 else 16
        size = model.weight_scale.detach().repeat_interleave(group, 1) if sign < 0 else 1.0
        reach = 8 if config is W4 else 2
        expected = sign * (g * clipped * size).unflatten(1, (32 // group, group)).sum(-1) / (group * reach) ** 0.5
        torch.testing.assert_close(getattr(model, name).grad, expected)


def test_the_range_of_a_static_activation_is_learned() -> None:
    model, x = nn.Linear(32, 8), 3 * torch.randn(40, 32)
    exact = copy.deepcopy(model)(x).detach()
    pw.quantize_(model, pw.QATConfig(STATIC, learn="scale"))
    assert model.weight_act_scale.shape == (1,)
    optimizer = torch.optim.Adam([model.weight_act_scale], 2e-3)
    losses = []
    for _ in range(40):
        loss = (model(x) - exact).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 3
    assert model.weight_act_scale.item() > 0.06
    y = model(x)
    pw.quantize_(model, pw.QATConfig(step="convert"))
    assert torch.equal(model(x), y)
    assert model.weight.act_scale.item() > 0.06


@torch.no_grad()
def divergence(teacher: Teacher, student: nn.Module, data: list[Tensor]) -> float:
    return sum(float(teacher.loss(student(x), x)) for x in data) / len(data)


def test_distillation_from_a_solver_wins_back_more_than_from_nearest() -> None:
    model, mix = network()[1:], torch.randn(64, 64)
    data = list((torch.randn(64 * 144, 64) @ mix).split(64))
    teacher, held_out = Teacher(model), data[128:]
    found = {}
    for name, options in (("nearest", {}), ("gptq", {"calibration": data[:16], "algorithm": "gptq"})):
        student = copy.deepcopy(model)
        pw.quantize_(student, pw.QATConfig(INT2, learn="all"), **options)
        before = divergence(teacher, student, held_out)
        optimizer = torch.optim.Adam(parameter_groups(student, 3e-4))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 128)
        for x in data[:128]:
            teacher.loss(student(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        pw.quantize_(student, pw.QATConfig(step="convert"))
        found[name] = before, divergence(teacher, student, held_out)
    assert found["gptq"][0] < 0.7 * found["nearest"][0]
    assert found["nearest"][1] < 0.6 * found["nearest"][0]
    assert found["gptq"][1] < 0.9 * found["gptq"][0]
    assert found["gptq"][1] < 0.97 * found["nearest"][1]


def test_start_counts_the_forward_passes_of_training() -> None:
    model, x = nn.Sequential(nn.Linear(64, 8)), torch.randn(3, 64)
    exact = model(x)
    pw.quantize_(model, pw.QATConfig(W4, start=2))
    assert torch.equal(model.eval()(x), exact)
    assert int(model.fake_quant_step) == 0
    model.train()
    assert torch.equal(model(x), exact)
    with torch.no_grad():
        assert torch.equal(model(x), exact)
    resumed = nn.Sequential(nn.Linear(64, 8))
    pw.quantize_(resumed, pw.QATConfig(W4, start=2))
    resumed.load_state_dict(model.state_dict())
    for one in (model, copy.deepcopy(model), resumed):
        assert torch.equal(one(x), exact)
        assert not torch.equal(one(x), exact)
        assert not torch.equal(one.eval()(x), exact)
        pw.quantize_(one, pw.QATConfig(step="convert"))
        assert list(one.state_dict()) == ["0.weight", "0.bias"]
        one(x)


def test_embeddings_may_be_prepared_in_a_second_call() -> None:
    model, x = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 8)), torch.randint(50, (3, 4))
    pw.quantize_(model, pw.QATConfig(W4))
    report = pw.quantize_(model, pw.QATConfig(pw.Int8WeightOnlyConfig()), lambda m, n: isinstance(m, nn.Embedding))
    assert [r.name for r in report.quantized] == ["0.weight"]
    y = model(x)
    report = pw.quantize_(model, pw.QATConfig(step="convert"))
    assert [r.name for r in report.rows] == ["0.weight", "1.weight"]
    assert report.verb == "converted"
    json.loads(report.to_json())
    assert torch.equal(model(x), y)


def test_specs_instead_of_a_config() -> None:
    model, x = nn.Linear(64, 8), torch.randn(3, 64)
    act = ActivationSpec(QuantSpec(INT8, (-1,)))
    other = copy.deepcopy(model)
    pw.quantize_(model, pw.QATConfig(activation_config=act, weight_config=QuantSpec(INT4, (32,))))
    pw.quantize_(other, pw.SpecConfig(QuantSpec(INT4, (32,)), act))
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("transposed", [False, True])
def test_training_may_start_from_a_quantized_model(transposed: bool) -> None:
    """One that somebody else has made, say: its format and codes are kept."""
    model, data = network(), inputs()
    if transposed:
        model = nn.Sequential(Conv1D(32, 64))
    pw.quantize_(model, W4, calibration=data, algorithm="gptq")
    before = model(data[0])
    report = pw.quantize_(model, pw.QATConfig(W4, learn="scale"))
    assert all("already quantized" in row.note for row in report.quantized)
    assert torch.equal(model(data[0]), before)
    optimizer = torch.optim.Adam(parameter_groups(model, 1e-3))
    (model(data[0]) - 1).square().mean().backward()
    optimizer.step()
    trained = model(data[0])
    assert not torch.equal(trained, before)
    pw.quantize_(model, pw.QATConfig(step="convert"))
    assert torch.equal(model(data[0]), trained)


def test_layers_by_the_constructors_of_torchao() -> None:
    x, spec = torch.randn(3, 64), QuantSpec(INT4, (32,))
    layer = FakeQuantizedLinear(64, 8, True, None, spec)
    linear = nn.Linear(64, 8)
    linear.load_state_dict(layer.state_dict())
    exact = linear(x)
    assert not torch.equal(layer(x), exact)
    assert FakeQuantizedLinear.from_linear(linear, None, spec) is linear
    assert torch.equal(linear(x), layer(x))
    assert torch.equal(linear.to_linear()(x), exact)
    assert type(linear) is nn.Linear
    assert torch.equal(FakeQuantizedLinear.from_linear(linear)(x), exact)
    table = FakeQuantizedEmbedding(50, 64, weight_config=spec)
    assert (table(torch.tensor([3])) - table.weight[3]).abs().max() > 0
    assert type(table.to_embedding()) is nn.Embedding


def test_a_dry_run_changes_nothing() -> None:
    model = network()
    state = copy.deepcopy(model.state_dict())
    report = pw.quantize_(model, pw.QATConfig(W4), dry_run=True)
    assert len(report.quantized) == 2
    assert type(model[1]) is nn.Linear
    pw.quantize_(model, pw.QATConfig(W4))
    assert len(pw.quantize_(model, pw.QATConfig(step="convert"), dry_run=True).rows) == 2
    assert type(model[1]) is not nn.Linear
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_scales_that_are_quantized_themselves_are_said_to_stay() -> None:
    model = network()
    report = pw.quantize_(model, pw.QATConfig(pw.MXWeightOnlyConfig(), learn="scale"))
    assert all("are not trained" in row.note for row in report.quantized)
    assert not [n for n, _ in model.named_parameters() if "scale" in n]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "Must specify"),
        ({"base_config": W4, "step": "train"}, "`step` must be one of"),
        ({"base_config": W4, "learn": "offset"}, "learn must be one of"),
        ({"base_config": W4, "start": -1}, "start must be a number"),
        ({"base_config": W4, "weight_config": QuantSpec(INT4, (32,))}, "Cannot specify both"),
        ({"weight_config": QuantSpec(INT4, (32,)), "step": "convert"}, "Cannot specify"),
        ({"step": "convert", "learn": "scale"}, "only valid with step='prepare'"),
        ({"base_config": 4}, "must be a config"),
        ({"base_config": "int44"}, "did you mean 'int4'"),
        ({"weight_config": 4}, "QuantSpec"),
        ({"activation_config": ActivationSpec(QuantSpec(INT8, (-1,)))}, "needs a weight_config"),
    ],
)
def test_what_a_config_refuses(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pw.QATConfig(**given)


def test_what_is_refused_before_anything_is_changed() -> None:
    model = network()
    with pytest.raises(pw.PlanError, match="no prepared module"):
        pw.quantize_(model, pw.QATConfig(step="convert"))
    with pytest.raises(pw.PlanError, match="tune: tuners"):
        pw.quantize_(model, pw.QATConfig(W4), calibration=inputs(), algorithm=["gptq", "tune"])
    hooked = network()
    hooked[1].forward = hooked[1].forward
    with pytest.raises(pw.PlanError, match=r"1\.weight: forward of this Linear was replaced"):
        pw.quantize_(hooked, pw.QATConfig(W4))
    named = network()
    named[1].weight_scale = 1.0
    with pytest.raises(pw.PlanError, match=r"1\.weight: its module already has a weight_scale"):
        pw.quantize_(named, pw.QATConfig(W4, learn="scale"))
    pw.quantize_(named, pw.QATConfig(W4))
    done = network()
    pw.quantize_(done, W4)
    with pytest.raises(pw.PlanError, match="is already quantized"):
        pw.quantize_(done, pw.QATConfig(SYMMETRIC))
    with pytest.raises(pw.PlanError, match="around FqnToConfig"):
        pw.quantize_(network(), pw.FqnToConfig({"1": pw.QATConfig(W4)}))
    assert all(type(m) is nn.Linear for m in (model[1], hooked[1], done[1]))

    pw.quantize_(model, pw.QATConfig(W4))
    with pytest.raises(pw.PlanError, match="prepared for quantization-aware training"):
        pw.quantize_(model, W4)
    with pytest.raises(pw.PlanError, match=r"1\.weight was trained for uint4.* would become int4"):
        pw.quantize_(model, pw.QATConfig(SYMMETRIC, step="convert"))
    with pytest.raises(pw.PlanError, match="calibration: not valid with step='convert'"):
        pw.quantize_(model, pw.QATConfig(step="convert"), calibration=inputs())
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with pytest.raises(pw.PlanError, match=r"1\.weight"):
        pw.quantize_(model, pw.QATConfig(step="convert"))
    with pytest.raises(ValueError, match=r"1\.weight"):
        model(torch.randn(2, 64))
    assert type(model[1]) is not nn.Linear


def test_distillation_loss() -> None:
    x, y = torch.randn(4, 5, 7, requires_grad=True), torch.randn(4, 5, 7)
    p, q = y.softmax(-1), x.softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1)
    torch.testing.assert_close(distillation_loss(x, y), expected.mean())
    mask = torch.rand(4, 5) > 0.5
    torch.testing.assert_close(distillation_loss(x, y, mask=mask), expected[mask].mean())
    warm = distillation_loss(x, y, temperature=2.0)
    p, q = (y / 2).softmax(-1), (x / 2).softmax(-1)
    torch.testing.assert_close(warm, 4 * (p * (p.log() - q.log())).sum(-1).mean())
    assert float(distillation_loss(y, y)) == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(distillation_loss(x, y, kind="mse"), (x - y).square().mean() / y.square().mean())
    distillation_loss((x, None), {"hidden": y}).backward()
    assert x.grad is not None
    for wrong, says in (({"kind": "l1"}, "kind must"), ({"temperature": 0}, "positive"), ({"mask": mask[:2]}, "mask")):
        with pytest.raises(ValueError, match=says):
            distillation_loss(x, y, **wrong)
    with pytest.raises(ValueError, match="the teacher's"):
        distillation_loss(x, y[:2])


def test_groups_of_parameters() -> None:
    model = network()
    pw.quantize_(model, pw.QATConfig(W4, learn="all"))
    groups = parameter_groups(model, 1e-3, weight_decay=0.1)
    assert [len(g["params"]) for g in groups] == [2, 4, 4]
    assert [g["lr"] for g in groups] == [1e-3, 1e-3, 1e-4]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.0]
    assert sum(p.numel() for g in groups for p in g["params"]) == sum(p.numel() for p in model.parameters())


def test_zero_points_move_as_far_as_offsets_would() -> None:
    """They are in units of their scale."""
    model = network()
    pw.quantize_(model, pw.QATConfig(INT2, learn="all"))
    groups = parameter_groups(model, 1e-3)
    assert [len(g["params"]) for g in groups] == [2, 4, 2, 1, 1]
    for group, layer in zip(groups[3:], (model[1], model[3]), strict=True):
        assert group["params"] == [layer.weight_zero_point]
        assert group["lr"] == pytest.approx(1e-4 / layer.weight_scale.mean().item())
