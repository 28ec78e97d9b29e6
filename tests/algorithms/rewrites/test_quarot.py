"""Rotations: the same function in another basis, or a refusal that leaves every bit."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import pennyweight as pw
from pennyweight import Int8DynamicActivationInt8WeightConfig, quantize_
from pennyweight.algorithms.rewrites.hadamard import hadamard, hadamard_factors, mean_preserving_rotation, rotation
from pennyweight.algorithms.rewrites.online_hadamard import RotatedLinear, rotate_inputs_
from pennyweight.algorithms.rewrites.quarot import Rotate
from pennyweight.algorithms.rewrites.verify_rewrite import TOLERANCE, float_outputs, relative_difference
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.scheme import Scheme
from tests.algorithms import models


def target(model: nn.Module) -> dict[str, Scheme | None]:
    return dict.fromkeys(f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear))


def outlier(x: Tensor) -> float:
    """Largest over root mean square."""
    return float(x.abs().max() / x.square().mean().sqrt())


def stream_of(model: nn.Module, batch: Tensor) -> Tensor:
    got: list[Tensor] = []
    hook = model.get_submodule("model.layers.1.post_attention_layernorm").register_forward_pre_hook(
        lambda m, a: got.append(a[0])
    )
    float_outputs(model, batch)
    hook.remove()
    return got[0]


# -- Hadamard matrices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 20, 24, 28, 36, 40, 44, 48, 60, 64, 96, 108, 128, 140, 144, 168])
def test_hadamard_matrices_of_many_sizes(n: int) -> None:
    h = hadamard(n)
    assert h is not None
    assert bool((h.abs() == 1).all())
    wide = h.double()
    assert torch.equal(wide @ wide.t(), n * torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("n", [3, 5, 6, 7, 10, 14, 30, 92])
def test_other_sizes_have_none_and_a_rotation_all_the_same(n: int) -> None:
    assert hadamard(n) is None
    q = rotation(n, 0)
    torch.testing.assert_close(q @ q.t(), torch.eye(n, dtype=torch.float64))


def test_usual_widths_have_hadamard_matrices() -> None:
    for n in (256, 576, 768, 896, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864, 5120, 8192, 8960, 14336):
        a, b = hadamard_factors(n)
        assert a * b == n
        assert a > 1


def test_rotations_are_random_but_by_seed() -> None:
    assert torch.equal(rotation(12, 1), rotation(12, 1))
    assert not torch.equal(rotation(12, 1), rotation(12, 2))
    x = torch.zeros(1, 256, dtype=torch.float64)
    x[0, 7] = 1.0
    assert outlier(x @ rotation(256, 0)) == pytest.approx(1.0)
    assert outlier(torch.ones(1, 256, dtype=torch.float64) @ rotation(256, 0)) < 5  # no channel takes the mean alone


@pytest.mark.parametrize("n", [1, 2, 7, 32])
def test_a_rotation_may_fix_the_mean(n: int) -> None:
    q = mean_preserving_rotation(n, 3)
    torch.testing.assert_close(q @ q.t(), torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(q.sum(0), torch.ones(n, dtype=torch.float64))


# -- whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral", "Phi3", "Gemma"])
def test_decoders_keep_function_and_names(family: str, seed: int) -> None:
    model = models.decoder(family, **({"head_dim": 8} if family == "Gemma" else {}))
    batches = models.ids()
    before, reference = models.state(model), float_outputs(model, batches[0])
    notes = Rotate(seed).apply(model, target(model), batches)
    assert relative_difference(reference, float_outputs(model, batches[0])) < TOLERANCE
    now = model.state_dict()
    assert list(now) == list(before)
    assert not any(torch.equal(now[n], t) for n, t in before.items() if t.ndim == 2)
    assert "in heads of 8" in notes["model.layers.0.self_attn.o_proj.weight"]
    gain = model.get_submodule("model.layers.0.input_layernorm").weight
    assert bool((gain == (0.0 if family == "Gemma" else 1.0)).all())


def test_outliers_of_the_stream_are_spread() -> None:
    model, batch = models.decoder("Llama"), models.ids()[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] *= 60  # type: ignore[union-attr, index, operator]
    before = stream_of(model, batch)
    Rotate().apply(model, {}, [batch])
    assert outlier(before) > 5
    assert outlier(stream_of(model, batch)) < 4


@pytest.mark.parametrize("make", [models.gpt2, models.vit], ids=["gpt2", "vit"])
def test_layer_norms_keep_the_mean_and_the_function(make: Any) -> None:
    model = make()
    batch = models.images()[0] if make is models.vit else models.ids()[0]
    reference = float_outputs(model, batch)
    Rotate().apply(model, target(model), [batch])
    assert relative_difference(reference, float_outputs(model, batch)) < TOLERANCE


def test_a_tied_table_becomes_two() -> None:
    model, batches = models.decoder("Llama", tie_word_embeddings=True), models.ids()
    names, reference = list(model.state_dict()), float_outputs(model, batches[0])
    notes = Rotate().apply(model, target(model), batches)
    assert relative_difference(reference, float_outputs(model, batches[0])) < TOLERANCE
    assert list(model.state_dict()) == names
    assert model.lm_head.weight is not model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert model.config.tie_word_embeddings is False  # type: ignore[union-attr]
    assert "untied from model.embed_tokens.weight" in notes["lm_head.weight"]


def test_a_tied_table_stays_one_where_no_gain_is_between() -> None:
    model, batches = models.decoder("Llama", tie_word_embeddings=True), models.ids()
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)  # type: ignore[union-attr, operator]
    reference = float_outputs(model, batches[0])
    Rotate(untie=False).apply(model, target(model), batches)
    assert relative_difference(reference, float_outputs(model, batches[0])) < TOLERANCE
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_gpt2s_head_gets_a_bias_only_if_it_may() -> None:
    model, batches = models.gpt2(), models.ids()
    with pytest.raises(
        PlanError, match=r"has no bias to fold that of transformer\.ln_f into; rotate with create_bias=True"
    ):
        Rotate(create_bias=False).apply(model, {}, batches)
    assert model.lm_head.bias is None  # type: ignore[union-attr]
    assert model.lm_head.weight is model.transformer.wte.weight  # type: ignore[union-attr]
    Rotate().apply(model, {}, batches)
    assert model.lm_head.bias is not None  # type: ignore[union-attr]


# -- refusals ----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A pre-norm block whose branch is scaled per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(64, 8), nn.RMSNorm(8), nn.Linear(8, 8)
        self.scale, self.last, self.head = nn.Parameter(torch.rand(8)), nn.RMSNorm(8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.last(x + self.scale * self.out(self.norm(x))))


class Leaks(nn.Module):
    """Puts its residual stream out as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 8), nn.RMSNorm(8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        return self.head(self.norm(x)), x


def llama_body() -> nn.Module:
    return models.decoder("Llama").model  # type: ignore[return-value]


REFUSED = {
    "post-norm": (models.bert, "post-norm, as in BERT"),
    "norm of a branch": (
        lambda: models.decoder("Gemma2", head_dim=8),
        "post_attention_layernorm normalises what is added",
    ),
    "layer scale": (Scaled, "the residual stream goes through 'mul'"),
    "stream put out": (Leaks, "outputs changed by"),
    "no head": (llama_body, "no linear layer reads norm"),
    "no norms": (lambda: nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8)), "has no linear layer that reads a norm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_why_and_leaves_every_bit(case: str) -> None:
    make, why = REFUSED[case]
    model = make()
    before, parameters = models.state(model), dict(model.named_parameters())
    with pytest.raises(PlanError, match=why):
        Rotate().apply(model, target(model), models.ids())
    assert models.same_state(model, before)
    assert all(p is parameters[n] for n, p in model.named_parameters())


def test_what_fails_at_the_end_is_taken_back_ties_classes_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.decoder("Llama", tie_word_embeddings=True)
    before = models.state(model)
    monkeypatch.setattr("pennyweight.algorithms.rewrites.quarot.tolerance", lambda model: 1e-12)
    with pytest.raises(PlanError, match="outputs changed by"):
        Rotate(online=True).apply(model, target(model), models.ids())
    assert models.same_state(model, before)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert model.config.tie_word_embeddings is True  # type: ignore[union-attr]
    assert not any(isinstance(m, RotatedLinear) for m in model.modules())


def test_an_input_that_enters_the_stream_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True).eval()
    with pytest.raises(PlanError, match=r"a tensor of shape \[2, 5, 32\] that is not a parameter"):
        Rotate().apply(layer, {}, [torch.randn(2, 5, 32)])


def test_a_quantized_layer_and_no_data_are_refused() -> None:
    model = models.decoder("Llama")
    quantize_(model, pw.Int8WeightOnlyConfig(), filter_fn=lambda m, n: n.endswith("1.mlp.down_proj"))
    with pytest.raises(PlanError, match=r"layers\.1\.mlp\.down_proj\.weight is already quantized; rotate before"):
        Rotate().apply(model, {}, models.ids())
    with pytest.raises(PlanError, match="pass calibration=batches"):
        Rotate().apply(model, {}, [])


# -- at run time -------------------------------------------------------------------------------------------------------


def test_online_rotates_what_nothing_else_reaches() -> None:
    model, batches = models.decoder("Llama"), models.ids()
    reference = float_outputs(model, batches[0])
    notes = Rotate(online=True).apply(model, target(model), batches)
    assert relative_difference(reference, float_outputs(model, batches[0])) < TOLERANCE
    rotated = [n for n, m in model.named_modules() if isinstance(m, RotatedLinear)]
    assert rotated == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert notes["model.layers.0.mlp.down_proj.weight"] == "rotated; input rotated at run time"


def test_online_alone_works_for_bert_and_spreads_inputs() -> None:
    model, batches = models.bert(), models.ids()
    reference = float_outputs(model, batches[0])
    notes = Rotate(stream=False, values=False, online=True).apply(model, target(model), batches)
    assert relative_difference(reference, float_outputs(model, batches[0])) < TOLERANCE
    assert set(notes.values()) == {"input rotated at run time"}


@pytest.mark.parametrize("k", [2, 12, 48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotated_layer_computes_the_same(k: int, dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(k, 8, dtype=dtype))
    x = torch.randn(4, 3, k).to(dtype)
    with torch.no_grad():
        want = layer(x)
        rotate_inputs_(layer, ["0"])
        assert isinstance(layer[0], RotatedLinear)
        assert relative_difference([want], [layer(x)]) < (1e-6 if dtype is torch.float32 else 0.02)
        assert layer(x).dtype is dtype
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), layer(x))
    torch._dynamo.reset()  # all that is compiled in a process shares torch's limit of graphs


def test_layers_that_cannot_be_rotated_say_so() -> None:
    model = nn.ModuleDict({"odd": nn.Linear(7, 2), "norm": nn.LayerNorm(4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    notes = rotate_inputs_(model, ["odd", "norm", "a"])
    assert notes == {
        "odd.weight": "input not rotated: no Hadamard matrix for 7 inputs",
        "norm.weight": "input not rotated: LayerNorm is not a plain nn.Linear",
        "a.weight": "input not rotated: the weight is tied",
    }


def test_saved_rotations_load_only_where_they_are_understood(tmp_path: Any) -> None:
    model, batches = models.decoder("Llama"), models.ids()
    config, algorithm = Int8DynamicActivationInt8WeightConfig(), [{"rotate": {"online": True}}, "gptq"]
    quantize_(model, config, calibration=batches, algorithm=algorithm)
    pw.save(model, tmp_path / "q")
    fresh = models.decoder("Llama")
    with pytest.raises(ValueError, match=r"down_proj\.input_rotation"):
        pw.load(tmp_path / "q", fresh)
    rotate_inputs_(fresh, [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)])
    pw.load(tmp_path / "q", fresh)
    assert relative_difference(float_outputs(model, batches[0]), float_outputs(fresh, batches[0])) == 0
    config = transformers.LlamaConfig(**models.SIZES, num_key_value_heads=2)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    notes = rotate_inputs_(empty, [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)])
    assert len(notes) == 2
    assert empty.model.layers[0].mlp.down_proj.weight.is_meta


# -- with others -------------------------------------------------------------------------------------------------------


def test_rotation_lowers_the_error_of_int8_inputs_with_outliers() -> None:
    model, batches = models.decoder("Llama"), models.ids()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] *= 100  # type: ignore[union-attr, index, operator]
    exact = float_outputs(model, batches[0])
    errors = {}
    for name, algorithm in (("plain", "nearest"), ("rotated", "rotate"), ("gptq", ["rotate", "gptq"])):
        quantized = copy.deepcopy(model)
        quantize_(quantized, Int8DynamicActivationInt8WeightConfig(), calibration=batches, algorithm=algorithm)
        errors[name] = relative_difference(exact, float_outputs(quantized, batches[0]))
    assert errors["rotated"] < errors["plain"]
    assert errors["gptq"] < errors["plain"]


def test_smooth_rotate_and_gptq_in_one_recipe_load_into_a_fresh_model(tmp_path: Any) -> None:
    model, batches = models.planted(models.decoder("Llama"), size=150.0), models.ids()
    exact, plain = float_outputs(model, batches[0]), copy.deepcopy(model)
    config = Int8DynamicActivationInt8WeightConfig()
    quantize_(plain, config, calibration=batches, algorithm="gptq")
    report = quantize_(model, config, calibration=batches, algorithm=["smooth", "rotate", "gptq"])
    assert (
        relative_difference(exact, float_outputs(model, batches[0]))
        < relative_difference(exact, float_outputs(plain, batches[0])) / 3
    )
    note = next(r.note for r in report.rows if r.name.endswith("layers.0.mlp.down_proj.weight"))
    assert note.startswith("smooth alpha=")
    assert note.endswith("rotated")
    pw.save(model, tmp_path / "q")
    fresh = models.decoder("Llama")
    pw.load(tmp_path / "q", fresh)
    assert relative_difference(float_outputs(model, batches[0]), float_outputs(fresh, batches[0])) == 0
