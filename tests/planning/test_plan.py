"""plan(): names and patterns, ties, policies, and errors that say what to do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.formats import INT4
from pennyweight.core.layouts import READABLE
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels.table import case_of, select

INT8, INT4_32 = pw.Int8WeightOnlyConfig(), pw.Int4WeightOnlyConfig(group_size=32)


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Lm(nn.Module):
    """A language model in small: embedding, two blocks, a head, tied to the embedding or not."""

    def __init__(self, tied: bool = False, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(64, 80, bias=False)
        self.embed = nn.Embedding(80, 64)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        if not head_first:
            self.head = nn.Linear(64, 80, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.embed(index)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


INDEX = torch.tensor([[1, 2, 79], [0, 5, 5]])
LINEARS = [f"layers.{i}.{n}.weight" for i in (0, 1) for n in ("up", "down")]


def chosen(table: dict[str, Any], model: nn.Module | None = None) -> dict[str, str]:
    """Name -> scheme of what a table of names quantizes."""
    report = pw.plan(model or Lm(), pw.FqnToConfig(table)).report()
    return {r.name: r.scheme.split("[")[0] for r in report.quantized}


# -- names -----------------------------------------------------------------------------------------------------------


def test_the_default_takes_linear_layers() -> None:
    assert [r.name for r in pw.plan(Lm(), INT8).active] == [*LINEARS, "head.weight"]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"head": INT8}, {"head.weight": "int8"}),
        ({"*": INT8, "embed": None}, dict.fromkeys([*LINEARS, "head.weight"], "int8")),
        ({"head.weight": INT8}, {"head.weight": "int8"}),
        ({"layers.0.up": INT8, "layers.0.down.weight": INT4_32}, {LINEARS[0]: "int8", LINEARS[1]: "uint4"}),
        ({"layers.*": INT8}, dict.fromkeys(LINEARS, "int8")),
        ({"layers.?.up": INT8}, dict.fromkeys(LINEARS[::2], "int8")),
        ({r"re:layers\.[01]\.up": INT8}, dict.fromkeys(LINEARS[::2], "int8")),
        ({r"re:.*\.up\.weight": INT8}, dict.fromkeys(LINEARS[::2], "int8")),
        ({"*.up": INT8, "layers.1.*": INT4_32}, {**dict.fromkeys(LINEARS[::2], "int8"), LINEARS[3]: "uint4"}),
        ({"layers.1.*": INT4_32, "*.up": INT8}, {LINEARS[0]: "int8", **dict.fromkeys(LINEARS[2:], "uint4")}),
        # exact before pattern, parameter before module, whatever the order
        ({"layers.*": INT8, "layers.0.up": None}, dict.fromkeys(LINEARS[1:], "int8")),
        ({"layers.*": None, "layers.0.up": INT8}, {LINEARS[0]: "int8"}),
        ({"head": INT8, "head.weight": INT4_32}, {"head.weight": "uint4"}),
        ({"_default": INT8, "head": None}, dict.fromkeys(LINEARS, "int8")),
        ({"_default": INT8, "head": INT4_32}, {**dict.fromkeys(LINEARS, "int8"), "head.weight": "uint4"}),
        ({"embed.weight": INT8}, {"embed.weight": "int8"}),
    ],
)  # fmt: skip
def test_names(table: dict[str, Any], expected: dict[str, str]) -> None:
    assert chosen(table) == expected


def test_a_regular_expression_matches_the_whole_name() -> None:
    with pytest.raises(pw.PlanError, match="re:up"):
        chosen({"re:up": INT8})


def test_a_skip_says_by_which_key() -> None:
    report = pw.plan(Lm(), pw.FqnToConfig({"head": None, "_default": INT8})).report()
    assert {r.name: r.note for r in report.skipped}["head.weight"] == "skipped by 'head'"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"haed": INT8}, r"'haed' matches no module or parameter \(did you mean 'head'"),
        ({"layers.0.upp": INT8, "head": INT8}, r"did you mean 'layers\.0\.up'"),
        ({"layers": INT8}, r"'layers' is a container without a weight of its own; use 'layers\.\*'"),
        ({"layers.0": None, "head": INT8}, r"use 'layers\.0\.\*'"),
        ({"re:(": INT8}, "not a regular expression"),
        ({"layers.0.norm": INT8, "head": INT8}, "'layers.0.norm' matches nothing that can be quantized: LayerNorm"),
        ({"*.norm*": INT8, "head": INT8}, "matches nothing that can be quantized: LayerNorm"),
        ({"layers.0.up.bias": INT8, "head": INT8}, "matches nothing that can be .*bias of Linear is not quantized"),
        ({"head": None}, "nothing would be quantized"),
        ({}, "nothing would be quantized"),
    ],
)
def test_a_wrong_name_is_an_error_with_a_hint(table: dict[str, Any], message: str) -> None:
    with pytest.raises(pw.PlanError, match=message):
        chosen(table)


def test_a_key_whose_matches_an_earlier_key_takes_is_no_error() -> None:
    assert chosen({"layers.*": INT8, "*.up": INT4_32}) == dict.fromkeys(LINEARS, "int8")


def test_names_and_a_filter_contradict_each_other() -> None:
    with pytest.raises(pw.PlanError, match="leave filter_fn out"):
        pw.plan(Lm(), pw.FqnToConfig({"head": INT8}), lambda m, fqn: True)


# -- ties ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("config", [INT8, INT4_32, pw.Int8DynamicActivationInt8WeightConfig()])
def test_a_tied_weight_is_quantized_once_and_stays_tied(config: pw.AOBaseConfig, head_first: bool) -> None:
    model = Lm(tied=True, head_first=head_first)
    before = sum(p.nbytes for p in model.parameters())
    exact = model(INDEX).detach()
    report = pw.quantize_(model, config)
    w = model.embed.weight
    assert isinstance(w, AffineQuantizedTensor)
    assert model.head.weight is w
    assert report.bytes_before == before
    assert report.bytes_after == sum(p.nbytes for p in model.parameters())
    row = next(r for r in report.rows if "tied" in r.note)
    assert {row.name, row.note.removeprefix("tied: ")} == {"embed.weight", "head.weight"}
    rows = [select(op, case_of(w)) for op in ("linear", "embedding")]
    assert all(k.layout == w.spec.layout or w.spec.layout in READABLE for k in rows)  # no op unpacks all of it
    assert all(k.rank >= 0 for k in rows)
    assert torch.equal(model.embed(INDEX), w.dequantize()[INDEX])
    with pw.kernels.strict():
        assert pw.core.numerics.sqnr(exact, model(INDEX).detach()) > 14
    assert "already quantized" in next(r.note for r in pw.quantize_(model, config).rows if r.name == row.name)
    pw.dequantize_(model)
    assert model.head.weight is model.embed.weight
    assert type(model.head.weight) is nn.Parameter


@pytest.mark.parametrize("key", ["head", "head.weight", "embed", "*.weight", "_default"])
def test_any_name_of_a_tied_weight_chooses_it(key: str) -> None:
    model = Lm(tied=True)
    report = pw.quantize_(model, pw.FqnToConfig({key: INT8}))
    assert "embed.weight" in [r.name for r in report.quantized]
    assert model.head.weight is model.embed.weight


def test_of_two_keys_for_a_tied_weight_the_first_match_wins() -> None:
    tied = Lm(tied=True)
    assert "embed.weight" not in chosen({"embed": None, "_default": INT8}, tied)
    assert chosen({"*mbed": INT4_32, "head*": INT8, "layers.*": INT8}, tied)["embed.weight"] == "uint4"
    assert chosen({"head*": INT8, "*mbed": INT4_32, "layers.*": INT8}, tied)["embed.weight"] == "int8"


def test_a_tie_stays_when_the_filter_takes_neither() -> None:
    model = Lm(tied=True)
    report = pw.quantize_(model, INT8, lambda m, fqn: isinstance(m, nn.Linear) and fqn != "head")
    assert [r.name for r in report.quantized] == LINEARS
    assert model.head.weight is model.embed.weight


def test_the_same_module_twice() -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert chosen({"2": INT8}, model) == {"0.weight": "int8"}
    report = pw.quantize_(model, INT8)
    assert [(r.name, r.note) for r in report.quantized] == [("0.weight", "tied: 2.weight")]
    assert model[0] is model[2]
    assert model(torch.randn(2, 32)).isfinite().all()


# -- shapes that do not fit ------------------------------------------------------------------------------------------


def test_pad_is_exact_and_reported() -> None:
    layer = nn.Linear(100, 8)
    floats = layer.weight.detach().clone()
    (row,) = pw.quantize_(layer, INT4_32).quantized
    assert row.note == "100 inputs padded to 128; larger than int8: 15.4 bits per weight"
    for start in (0, 32, 64, 96):  # each group is quantized as if it stood alone
        part = nn.Linear(min(32, 100 - start), 8)
        part.weight = nn.Parameter(floats[:, start : start + 32].clone())
        pw.quantize_(part, INT4_32)
        assert torch.equal(part.weight.dequantize(), layer.weight.dequantize()[:, start : start + 32])


def test_padding_of_square_blocks_is_reported() -> None:
    (row,) = pw.quantize_(nn.Linear(40, 20), pw.Float8WeightOnlyConfig(granularity=pw.PerBlock((16, 16)))).quantized
    assert row.note == "[20, 40] padded to [32, 48]"


def test_largest_divisor() -> None:
    layer = nn.Linear(100, 8)
    (row,) = pw.quantize_(layer, INT4_32, on_indivisible="largest_divisor").quantized
    assert row.scheme.startswith("uint4[25]")
    assert layer.weight.scale.shape == (8, 4)


def test_largest_divisor_does_not_fall_to_a_scale_per_weight() -> None:
    with pytest.raises(pw.PlanError, match=r"weight: group size 32 does not divide its 97 inputs; use on_indivisible"):
        pw.quantize_(nn.Linear(97, 8), INT4_32, on_indivisible="largest_divisor")


def test_skip_is_reported_and_error_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 8))
    with pytest.raises(
        pw.PlanError, match=r"^0\.weight: group size 32 does not divide its 100 inputs; use group_size=25"
    ):
        pw.quantize_(model, INT4_32, on_indivisible="error")
    assert type(model[1].weight) is nn.Parameter
    report = pw.quantize_(model, INT4_32, on_indivisible="skip")
    assert report.rows[0].note == "skipped: group size 32 does not divide its 100 inputs"
    assert [r.name for r in report.quantized] == ["1.weight"]
    with pytest.raises(pw.PlanError, match=r"nothing would be quantized.*100 inputs"):
        pw.quantize_(model[0], INT4_32, on_indivisible="skip")


@pytest.mark.parametrize("policy", ["pad", "largest_divisor", "skip", "error"])
def test_a_group_larger_than_the_row_is_the_row(policy: str) -> None:
    layer, x = nn.Linear(64, 32), torch.randn(3, 64)
    exact = layer(x).detach()
    (row,) = pw.quantize_(layer, pw.Int4WeightOnlyConfig(), on_indivisible=policy).quantized
    assert "padded" not in row.note
    assert layer.weight.tensor_impl.scale.shape == (32, 1)
    assert pw.core.numerics.sqnr(exact, layer(x).detach()) > 15


def test_an_unknown_policy() -> None:
    with pytest.raises(pw.PlanError, match="largest_divisor"):
        pw.plan(nn.Linear(4, 4), INT8, on_indivisible="round")


# -- errors before anything changes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (pw.SpecConfig(QuantSpec(INT4, (4, 4, 32))), r"^0\.weight: block .* has 3 axes"),
        (pw.SpecConfig(QuantSpec(INT4, (32,)), rule="asymmetric"), r"^0\.weight: .*zero_point=True"),
        (pw.SpecConfig(QuantSpec(INT4, (32,)), eps=-1.0), r"^0\.weight: eps"),
        (pw.Float8WeightOnlyConfig(granularity=pw.PerBlock((2, 2, 2))), r"^0\.weight: block"),
    ],
)
def test_a_config_that_cannot_be_carried_out_names_the_layer(config: pw.AOBaseConfig, message: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    with pytest.raises(pw.PlanError, match=message):
        pw.quantize_(model, config)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_found_before_anything_changes(value: float) -> None:
    model = Lm()
    with torch.no_grad():
        model.layers[1].down.weight[3, 4] = value
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(pw.PlanError, match=r"^layers\.1\.down\.weight: 1 of 8192 values are NaN or inf"):
        pw.quantize_(model, INT8)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(before[k].nan_to_num(), v.nan_to_num()) for k, v in model.state_dict().items())


def test_what_is_no_config() -> None:
    with pytest.raises(TypeError, match="Int8WeightOnlyConfig"):
        pw.quantize_(nn.Linear(4, 4), None)
    with pytest.raises(pw.PlanError, match=r"unknown config 'int-8' \(did you mean 'int8"):
        pw.quantize_(nn.Linear(4, 4), "int-8")
    with pytest.raises(pw.PlanError, match="no parameters with two or more axes"):
        pw.quantize_(nn.Sequential(nn.ReLU()), INT8)
    with pytest.raises(pw.PlanError, match=r"nothing would be quantized; Linear: filtered out\. Select"):
        pw.quantize_(nn.Linear(4, 4), INT8, lambda m, fqn: False)


def test_lazy_and_empty_layers() -> None:
    with pytest.raises(pw.PlanError, match="one batch"):
        pw.quantize_(nn.Sequential(nn.LazyLinear(4)), INT8)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    model.empty = nn.Linear(4, 4, bias=False)
    model.empty.weight = nn.Parameter(torch.empty(0, 4))
    report = pw.quantize_(model, INT8)
    assert next(r for r in report.rows if r.name == "empty.weight").note == "empty"


# -- the meta device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [INT8, INT4_32, pw.NVFP4WeightOnlyConfig(), pw.MXWeightOnlyConfig("e2m1")])
def test_a_plan_on_the_meta_device_is_that_of_the_real_model(config: pw.AOBaseConfig) -> None:
    with torch.device("meta"):
        meta = Lm(tied=True)
    assert str(pw.plan(meta, config)) == str(pw.plan(Lm(tied=True), config))
    assert pw.quantize_(meta, config, dry_run=True).to_dict() == pw.plan(meta, config).report().to_dict()
    with pytest.raises(pw.PlanError, match=r"meta device.*load the weights"):
        pw.quantize_(meta, config, measure=True)


def test_predicted_bytes() -> None:
    for config in (
        INT8,
        pw.NF4WeightOnlyConfig(),
        pw.UIntXWeightOnlyConfig("uint3", 16),
        pw.MXWeightOnlyConfig("e2m3"),
    ):
        model = nn.Sequential(nn.Linear(61, 37), nn.Linear(37, 5))
        planned = pw.plan(model, config).report()
        assert [r.bytes_after for r in planned.rows] == [r.bytes_after for r in pw.quantize_(model, config).rows]


@pytest.mark.parametrize(
    ("make", "config", "words"),
    [
        (lambda: nn.Conv2d(8, 8, 3), "int8-dynamic", "f32 scales; inputs int8 per sample, dynamic"),
        (lambda: nn.Conv1d(8, 8, 3), "int8", "int8, per output channel, symmetric"),
        (lambda: nn.Conv2d(64, 8, 3), pw.Int4WeightOnlyConfig(group_size=40), "int4, groups of 4 input channels"),
        (lambda: nn.Conv2d(8, 4, (64, 1)), pw.Int4WeightOnlyConfig(group_size=64), "int4, per kernel, "),
        (lambda: nn.ConvTranspose2d(64, 8, 3), "int8-dynamic", "int8, per output channel, "),
        (lambda: nn.ConvTranspose2d(64, 8, 3), "int8-dynamic", "inputs int8 per position, dynamic"),
        (lambda: nn.ConvTranspose1d(64, 8, 3), pw.Int4WeightOnlyConfig(group_size=32), "int4, groups of 32, "),
    ],
)  # fmt: skip
def test_schemes_of_convolutions_in_words(make: Callable[[], nn.Module], config: Any, words: str) -> None:
    (row, *_) = pw.plan(make(), config, lambda m, name: True).report().quantized
    assert words in row.scheme_text


def test_a_block_with_too_many_axes_names_the_shape_of_the_weight() -> None:
    config = pw.SpecConfig(pw.QuantSpec(pw.get_format("int8"), (-1, -1, -1)))
    said = r"0.weight: block \(-1, -1, -1\) has 3 axes but the tensor of shape \(10, 288\) has 2"
    with pytest.raises(pw.PlanError, match=said):
        pw.quantize_(nn.Sequential(nn.Linear(288, 10)), config)


def test_a_group_larger_than_a_row_and_a_larger_model_are_told() -> None:
    report = pw.quantize_(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8)), "int4")
    notes = [row.note.partition(";")[0] for row in report.quantized]
    assert notes == ["one group per row of 64", "one group per row of 8"]
    report = pw.quantize_(nn.Linear(8, 8), "int8")
    assert f"-> {report.bytes_after} B ({report.bytes_after / report.bytes_before:.2f}x larger)" in report.summary()


def test_a_report_says_first_that_weights_were_quantized_before() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert not pw.quantize_(model, "int4").notes
    assert not pw.quantize_(model, "int4").notes  # unchanged
    report = pw.quantize_(model, "int8")
    assert "2 parameters were quantized before (0.weight, 1.weight)" in report.notes[0]
    assert "SQNR and error compare with the quantized values" in " ".join(str(report).split())


def test_quantize_takes_a_plan_with_its_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 8))
    planned = pw.plan(model, "int8", lambda module, name: name != "1", skip=["2"])
    report = pw.quantize_(model, planned)
    assert [row.name for row in report.quantized] == ["0.weight"]
    assert isinstance(model[0].weight, pw.AffineQuantizedTensor)
    assert [type(layer.weight) for layer in model[1:]] == [nn.Parameter, nn.Parameter]
    with torch.device("meta"):
        outline = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 8))
    real = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 8))
    assert len(pw.quantize_(real, pw.plan(outline, "int8")).quantized) == 3


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (nn.Sequential(nn.Linear(64, 16)), r"0\.weight was \[32, 64\], here it is \[16, 64\]"),
        (nn.Sequential(), r"0\.weight was \[32, 64\], here it is not there"),
        (nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)), r"1\.weight was not there, here it is \[8, 32\]"),
    ],
    ids=["another shape", "a layer less", "a layer more"],
)
def test_a_plan_of_another_model_is_refused(other: nn.Module, why: str) -> None:
    planned = pw.plan(nn.Sequential(nn.Linear(64, 32)), "int8")
    with pytest.raises(pw.PlanError, match=why):
        pw.quantize_(other, planned)
    assert not any(isinstance(p, pw.AffineQuantizedTensor) for p in other.parameters())
