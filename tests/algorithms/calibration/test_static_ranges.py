"""calibrate(): static scales from data, by formulas written out here and torch.ao's, with and without outliers."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms.calibration.static_ranges import METHODS, observe_ranges
from pennyweight.algorithms.calibration.statistics import HISTOGRAM, bins
from pennyweight.core.numerics import dequantize, quantize
from pennyweight.core.spec import ActivationSpec, QuantSpec

INT8 = QuantSpec(pw.get_format("int8"), None)
SYMMETRIC = ActivationSpec(INT8, "static")
ASYMMETRIC = ActivationSpec(INT8.with_(zero_point=True), "static")
FP8 = ActivationSpec(QuantSpec(pw.get_format("e4m3"), None), "static")


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)).eval()


def batches(samples: int = 1280, outliers: int = 0) -> list[Tensor]:
    """Normal values, but for some that are ten times the largest of those."""
    x = torch.randn(samples, 16)
    x.view(-1)[torch.randperm(x.numel())[:outliers]] = 40.0
    return [*x.split(samples // 8)]


def ends(x: Tensor, act: ActivationSpec, method: str) -> tuple[float, float]:
    state = HISTOGRAM.update(HISTOGRAM.init(1, 1), x.reshape(1, -1, 1))
    return METHODS[method](bins(HISTOGRAM.finish(state)), act, 99.9)


def error(x: Tensor, act: ActivationSpec, method: str) -> float:
    from pennyweight.algorithms.calibration.static_ranges import range_qparams

    parts = quantize(x, act.spec, params=range_qparams(ends(x, act, method), act))
    return float((dequantize(parts, act.spec, x.shape) - x).double().square().mean())


@torch.no_grad()
def test_minmax_by_hand() -> None:
    model, data = network(), batches()
    hidden = torch.cat([model[1](model[0](x)) for x in data])
    symmetric = partial(pw.Int8StaticActivationInt8WeightConfig, act_mapping_type=pw.MappingType.SYMMETRIC)
    config = pw.calibrate(model, data, symmetric, "minmax")
    scales = {name: c.act_quant_scale for name, c in config.fqn_to_config.items()}
    assert scales == pytest.approx({
        "0": float(torch.cat(data).abs().max()) / 127.5, "2": float(hidden.abs().max()) / 127.5
    })  # fmt: skip
    asymmetric = partial(pw.Int8StaticActivationInt8WeightConfig, act_mapping_type=pw.MappingType.ASYMMETRIC)
    second = pw.calibrate(model, data, asymmetric, "minmax").fqn_to_config["2"]
    low, high = float(hidden.min()), float(hidden.max())
    assert second.act_quant_scale == pytest.approx((high - low) / 255)
    assert second.act_quant_zero_point == -128 - round(low / ((high - low) / 255))


@torch.no_grad()
def test_five_lines_and_the_output_is_near() -> None:
    model, data = network(), batches(20480, 2)
    x = torch.randn(256, 16)
    wanted, errors = model(x), {}
    for method in METHODS:
        static = copy.deepcopy(model)
        before = copy.deepcopy(static.state_dict())
        config = pw.calibrate(static, data, pw.Int8StaticActivationInt8WeightConfig, method=method)
        assert all(torch.equal(v, before[k]) for k, v in static.state_dict().items())
        pw.quantize_(static, config)
        assert static[0].weight.act.mode == "static"
        errors[method] = float((static(x) - wanted).norm() / wanted.norm())
    assert errors["mse"] < 0.8 * errors["minmax"]
    assert errors["percentile"] < 0.4 * errors["minmax"]
    assert errors["histogram"] < 0.8 * errors["minmax"]


@pytest.mark.parametrize("act", [SYMMETRIC, ASYMMETRIC], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("shape", ["normal", "relu", "shifted", "digits", "outliers"])
def test_mse_is_least(act: ActivationSpec, shape: str) -> None:
    x = torch.randn(200000)
    if shape == "relu":
        x = x.relu()
    elif shape == "shifted":
        x = x + 4
    elif shape == "digits":  # whole numbers from 0 to 16, half of them 0, as in 8x8 images
        x = (x.abs() * 6 * (x > 0)).round().clamp(max=16)
    elif shape == "outliers":
        x[:2] = torch.tensor([40.0, -40.0])
    found = {method: error(x, act, method) for method in METHODS}
    assert found["mse"] <= min(found.values()) * 1.02
    if shape == "outliers":  # two far values in 200000 are worth a share of the range, not all of it
        assert found["mse"] < 0.9 * found["minmax"]


@pytest.mark.parametrize("act", [SYMMETRIC, ASYMMETRIC, FP8], ids=["symmetric", "asymmetric", "float8"])
def test_mse_against_trying_every_range(act: ActivationSpec) -> None:
    from pennyweight.algorithms.calibration.static_ranges import range_qparams

    x = torch.randn(4000)
    x[:3] *= 30
    reach = float(x.abs().max())

    def by(low: float, high: float) -> float:
        parts = quantize(x, act.spec, params=range_qparams((low, high), act))
        return float((dequantize(parts, act.spec, x.shape) - x).double().square().mean())

    tried = min(by(-reach * i / 400, reach * i / 400) for i in range(4, 401))
    assert error(x, act, "mse") <= 1.1 * tried


def test_percentile_is_that_of_the_values() -> None:
    x = torch.randn(50000)
    low, high = ends(x, SYMMETRIC, "percentile")
    assert high == pytest.approx(float(x.abs().double().quantile(0.999)), rel=2e-3)
    assert low == -high
    low, high = ends(x.relu() + x.abs().relu() * 0.1, ASYMMETRIC, "percentile")
    y = x.relu() + x.abs().relu() * 0.1
    assert low == pytest.approx(float(y.double().quantile(0.0005)), abs=1e-3)
    assert high == pytest.approx(float(y.double().quantile(0.9995)), rel=5e-3)


@pytest.mark.parametrize("kind", ["normal", "outliers", "relu"])
def test_histogram_is_torch_ao_s(kind: str) -> None:
    from torch.ao.quantization.observer import HistogramObserver

    x = torch.randn(30000)
    if kind == "outliers":
        x[:20] *= 20
    elif kind == "relu":
        x = x.relu()
    theirs = HistogramObserver(dtype=torch.qint8, qscheme=torch.per_tensor_affine)
    theirs(x)
    scale, _ = theirs.calculate_qparams()
    low, high = ends(x, ASYMMETRIC, "histogram")
    assert (max(high, 0) - min(low, 0)) / 255 == pytest.approx(float(scale), rel=0.03)


@pytest.mark.parametrize("method", METHODS)
def test_constant_and_zero_inputs(method: str) -> None:
    for value in (0.0, 0.7, -3.0):
        model = nn.Sequential(nn.Linear(4, 4))
        symmetric = partial(pw.Int8StaticActivationInt8WeightConfig, act_mapping_type=pw.MappingType.SYMMETRIC)
        config = pw.calibrate(model, [torch.full((3, 4), value)], symmetric, method)
        scale = config.fqn_to_config["0"].act_quant_scale
        assert scale > 0
        if value:
            assert scale * 127.5 == pytest.approx(abs(value), rel=0.01)


def test_every_static_config() -> None:
    model, data = network(), batches()
    fp8 = pw.calibrate(model, data, pw.Float8StaticActivationFloat8WeightConfig, "minmax")
    assert fp8.fqn_to_config["0"].scale == pytest.approx(float(torch.cat(data).abs().max()) / 448)
    weight = QuantSpec(pw.get_format("int4"), (16,))
    template = pw.SpecConfig(weight, SYMMETRIC, act_scale=1.0)
    by_template = pw.calibrate(model, data, template, "minmax")
    scheme = pw.Scheme(weight, SYMMETRIC, act_scale=1.0)
    by_partial = partial(pw.SpecConfig, weight, ASYMMETRIC)
    assert pw.calibrate(model, data, scheme, "minmax") == by_template
    assert by_template.fqn_to_config["0"].act_scale == pytest.approx(float(torch.cat(data).abs().max()) / 127.5)
    assert by_template.fqn_to_config["0"].weight == weight
    assert pw.calibrate(model, data, by_partial).fqn_to_config["2"].act_zero_point < 0
    reduced = partial(pw.Int8StaticActivationInt8WeightConfig, reduce_range=True)
    assert pw.calibrate(model, data, reduced, "minmax").fqn_to_config["0"].act_quant_scale == pytest.approx(
        float(torch.cat(data).abs().max()) / 63.5
    )
    for config in (fp8, by_template, pw.calibrate(model, data, by_partial)):
        done = copy.deepcopy(model)
        report = pw.quantize_(done, config)
        assert len(report.quantized) == 2
        assert done(data[0]).isfinite().all()


def test_filter_attention_and_masks() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    names = pw.calibrate(
        nn.ModuleDict({"a": attention})["a"], [(torch.randn(2, 5, 16),) * 3], pw.Int8StaticActivationInt8WeightConfig
    )
    assert [*names.fqn_to_config] == ["in_proj_weight", "out_proj"]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.first, self.last = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.last(self.first(self.embed(input_ids)))

    model = Model()
    with torch.no_grad():
        model.embed.weight[8] = 100.0
    ids = torch.tensor([[1, 2, 8], [3, 4, 5]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    config = pw.calibrate(
        model, [{"input_ids": ids, "attention_mask": mask}], pw.Int8StaticActivationInt8WeightConfig, "minmax",
        filter_fn=lambda module, name: name == "first",
    )  # fmt: skip
    assert [*config.fqn_to_config] == ["first"]
    assert config.fqn_to_config["first"].act_quant_scale < 0.1


def test_convolutions_are_seen_as_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, stride=2))
    x = torch.rand(5, 3, 9, 9) + 1
    seen = observe_ranges(model, {"w": model[0].weight}, [x])["w"]
    assert seen.least == float(x.min())  # no zero of the padding
    assert seen.counts.sum() == x.numel()


def test_what_is_refused() -> None:
    model, config = network(), pw.Int8StaticActivationInt8WeightConfig
    data = batches()
    idle = nn.Sequential(nn.Linear(16, 16))
    idle.register_module("never", nn.Linear(2, 2))
    idle.forward = idle[0].forward
    for args, text in (
        ((model, [], config), "no input reached 0.weight, 2.weight; use calibration data that does"),
        ((idle, data, config), "no input reached never.weight"),
        ((model, data, pw.Int8WeightOnlyConfig()), r"config must be a static config \(Int8Static"),
        ((model, data, pw.SpecConfig(INT8)), "SpecConfig needs act=ActivationSpec"),
        ((model, data, config, "max"), "method must be one of minmax, percentile, mse, histogram"),
        ((model, data[0], config), r"batches must be a list of batches, got a tensor of shape .*: batches=\[batch\]"),
    ):
        with pytest.raises(ValueError, match=text):
            pw.calibrate(*args)
    with pytest.raises(ValueError, match=r"batches batch 0 .* has 0 NaN and 1 infinite values"):
        pw.calibrate(model, [data[0].clone().view(-1).index_fill_(0, torch.tensor(3), torch.inf).view(-1, 16)], config)


@torch.no_grad()
def test_static_activations_under_weights_that_gptq_chose() -> None:
    model, x = network(), torch.randn(400, 16) @ torch.randn(16, 16)
    template = pw.SpecConfig(QuantSpec(pw.get_format("int4"), (16,)), SYMMETRIC, act_scale=1.0)
    config, errors = pw.calibrate(model, [x], template), []
    for algorithm in ("nearest", "gptq"):
        q = copy.deepcopy(model)
        pw.quantize_(q, config, calibration=[x], algorithm=algorithm)
        assert q[2].weight.act_scale.item() == pytest.approx(config.fqn_to_config["2"].act_scale)
        errors.append(float((q(x) - model(x)).square().mean()))
    assert errors[1] < 0.8 * errors[0]


# -- symmetric or asymmetric, layer by layer ---------------------------------------------------------------------------

STATIC = pw.Int8StaticActivationInt8WeightConfig


def mappings(config: pw.FqnToConfig) -> dict[str, str]:
    return {name: c.act_mapping_type.name for name, c in config.fqn_to_config.items()}


def convolutions() -> nn.Sequential:
    """Inputs that are normal, then outputs of ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
    ).eval()  # fmt: skip


def every(module: nn.Module, name: str) -> bool:
    return isinstance(module, (nn.Linear, nn.Conv2d))


def images(seed: int = 1) -> list[Tensor]:
    return list(torch.randn(4, 4, 3, 12, 12, generator=torch.Generator().manual_seed(seed)))


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_a_zero_point_where_it_lowers_the_error(method: str) -> None:
    model = convolutions()
    config = pw.calibrate(model, images(), STATIC, method, filter_fn=every)
    assert mappings(config) == {"0": "SYMMETRIC", "2": "ASYMMETRIC", "4": "ASYMMETRIC"}
    errors = {}
    data = torch.cat(images(2))
    for name, how in (
        ("chosen", STATIC),
        ("symmetric", partial(STATIC, act_mapping_type=pw.MappingType.SYMMETRIC)),
        ("asymmetric", partial(STATIC, act_mapping_type=pw.MappingType.ASYMMETRIC)),
    ):
        quantized = copy.deepcopy(model)
        chosen = pw.calibrate(model, images(), how, method, filter_fn=every)
        report = pw.quantize_(quantized, chosen)
        rows = {row.name: row for row in report.quantized}
        assert ("static, asymmetric" in rows["2.weight"].scheme_text) == (name != "symmetric")
        assert ("inputs int8 static, asymmetric" in rows["2.weight"].scheme_short) == (name != "symmetric")
        errors[name] = float((quantized(data) - model(data)).norm())
    assert errors["chosen"] < 0.9 * errors["symmetric"]
    assert errors["chosen"] < 1.1 * errors["asymmetric"]


def test_an_explicit_choice_is_kept() -> None:
    model = convolutions()
    kinds = pw.MappingType
    for how, name in (
        (partial(STATIC, act_mapping_type=kinds.SYMMETRIC), "SYMMETRIC"),
        (partial(STATIC, act_mapping_type=kinds.ASYMMETRIC), "ASYMMETRIC"),
        (STATIC(act_quant_scale=1.0), "SYMMETRIC"),
        (STATIC(act_quant_scale=1.0, act_quant_zero_point=0, act_mapping_type=kinds.ASYMMETRIC), "ASYMMETRIC"),
    ):
        assert set(mappings(pw.calibrate(model, images(), how, filter_fn=every)).values()) == {name}
    reduced = pw.calibrate(model, images(), partial(STATIC, reduce_range=True), filter_fn=every)
    assert mappings(reduced)["2"] == "ASYMMETRIC"
    assert all(c.reduce_range for c in reduced.fqn_to_config.values())


@torch.no_grad()
def test_the_choice_is_that_of_the_error_and_not_of_the_sign() -> None:
    """A range of one sign gains a bit from a zero point, one about 0 nothing."""
    lin = nn.Sequential(nn.Linear(8, 8))
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    for data, name in ((x, "SYMMETRIC"), (x.abs(), "ASYMMETRIC"), (-x.abs(), "ASYMMETRIC"), (x + 1.0, "ASYMMETRIC"),
                       (x.sign(), "SYMMETRIC")):  # fmt: skip
        assert mappings(pw.calibrate(lin, [data], STATIC))["0"] == name


# -- inputs that one scale spoils --------------------------------------------------------------------------------------


def loud_and_quiet(spread: float, seed: int = 0) -> Tensor:
    """Frames [8, 50, 16] of powers whose sizes differ by powers of ten, as those of mel filters do."""
    g = torch.Generator().manual_seed(seed)
    size = 10 ** (spread * torch.randn(8, 50, 1, generator=g))
    return size * torch.randn(8, 50, 16, generator=g).square()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


@torch.no_grad()
def test_tokens_that_one_scale_loses_are_told() -> None:
    model = Recurrent().eval()
    data = [loud_and_quiet(1.5)]
    with pytest.warns(
        pw.AccuracyWarning, match=r"calibrate: lstm.weight_ih_l0: its static input scale loses \d+% of"
    ) as w:
        config = pw.calibrate(model, data, STATIC)
    assert len(w) == 1
    assert w[0].filename == __file__
    assert "dynamic int8 inputs there, Int8DynamicActivationInt8WeightConfig" in str(w[0].message)
    static, dynamic = copy.deepcopy(model), copy.deepcopy(model)
    report = pw.quantize_(static, config)
    notes = {row.name: row.note for row in report.rows}
    assert "its static input scale loses" in notes["lstm.weight_ih_l0"]
    assert "Int8DynamicActivationInt8WeightConfig" in notes["lstm.weight_ih_l0"]
    assert not any("loses" in note for name, note in notes.items() if name != "lstm.weight_ih_l0")
    pw.quantize_(dynamic, pw.Int8DynamicActivationInt8WeightConfig())
    x = loud_and_quiet(1.5, seed=9)
    lost = [float((m(x) - model(x)).norm() / model(x).norm()) for m in (static, dynamic)]
    assert lost[0] > 4 * lost[1]


@torch.no_grad()
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_tokens_of_similar_sizes_are_not(spread: float) -> None:
    model, data = Recurrent().eval(), [loud_and_quiet(spread)]
    assert not pw.calibrate(model, data, STATIC).notes  # a warning is an error here


def test_what_a_scale_loses_by_hand() -> None:
    """Half of the tokens are below half a step, which become 0; the others keep nearly everything."""
    layer = nn.Sequential(nn.Linear(64, 4))
    x = torch.rand(200, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[::2] *= 1e-4
    with pytest.warns(pw.AccuracyWarning, match="loses 71% of an input token"):  # sqrt(1 / 2)
        pw.calibrate(layer, [x], STATIC)


@torch.no_grad()
def test_samples_of_a_convolution_have_scales_of_their_own() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    x = torch.randn(6, 3, 8, 8)
    x[::2] *= 1e-4
    with pytest.warns(pw.AccuracyWarning, match="loses 71% of an input sample"):
        pw.calibrate(model, [x], STATIC, filter_fn=every)
    within = torch.randn(6, 3, 8, 8)
    within[:, 1] *= 1e-4  # a dynamic scale per sample loses these channels too
    assert not pw.calibrate(model, [within], STATIC, filter_fn=every).notes
