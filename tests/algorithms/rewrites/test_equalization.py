"""Which layers can hand a scale to which, found without a table of models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pennyweight import Int8WeightOnlyConfig, quantize_
from pennyweight.algorithms.rewrites.equalization import NormWeight, find_pairs
from pennyweight.algorithms.rewrites.graph import sources, trace
from pennyweight.algorithms.rewrites.verify_rewrite import TOLERANCE, float_outputs, probe_batch, relative_difference
from tests.algorithms import models


def pairs(model: nn.Module, batch: Any) -> dict[str, set[str]]:
    return {c.writer.name: {r.name for r in c.readers} for c in find_pairs(model, batch).pairs}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral"])
def test_a_decoder_has_four_couples_a_layer_and_its_head(family: str) -> None:
    model = models.decoder(family)
    found = pairs(model, models.ids()[0])
    at = "model.layers.1"
    assert len(found) == 9
    assert found[f"{at}.input_layernorm"] == {f"{at}.self_attn.{n}_proj.weight" for n in "qkv"}
    assert found[f"{at}.self_attn.v_proj"] == {f"{at}.self_attn.o_proj.weight"}
    assert found[f"{at}.post_attention_layernorm"] == {f"{at}.mlp.{n}_proj.weight" for n in ("gate", "up")}
    assert found[f"{at}.mlp.up_proj"] == {f"{at}.mlp.down_proj.weight"}
    assert found["model.norm"] == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in ("Llama", "Phi3", "gpt2", "gelu", "relu")]
    + [(name, torch.float16) for name in ("Llama", "gpt2", "gelu", "relu")],
)
def test_a_model_in_16_bits_has_the_pairs_of_one_in_32(name: str, dtype: torch.dtype) -> None:
    def model() -> nn.Module:
        if name in ("gelu", "relu"):
            return models.shaken_mlp(nn.GELU() if name == "gelu" else nn.ReLU())
        return models.gpt2() if name == "gpt2" else models.decoder(name)

    batch: Any = 9 * torch.randn(20, 16) if name in ("gelu", "relu") else models.ids()[0]
    found = pairs(model(), batch)
    assert bool(found) is (name != "gelu")
    batch = batch.to(dtype) if isinstance(batch, Tensor) and batch.is_floating_point() else batch
    assert pairs(model().to(dtype), batch) == found


def test_fused_projections_are_seen_by_their_last_rows() -> None:
    found = {c.writer.name: c for c in find_pairs(models.decoder("Phi3"), models.ids()[0]).pairs}
    values, gated = (found[f"model.layers.0.{n}"].writer for n in ("self_attn.qkv_proj", "mlp.gate_up_proj"))
    assert (values.start, values.width) == (48, 16)  # 32 queries, 16 keys
    assert (gated.start, gated.width) == (48, 48)


def test_a_gain_of_one_plus_weight_is_recognised() -> None:
    model = models.decoder("Gemma", head_dim=8)
    norms = [c.writer for c in find_pairs(model, models.ids()[0]).pairs if isinstance(c.writer, NormWeight)]
    assert all(g.shift == 1.0 for g in norms)
    assert len(norms) == 4  # not the last: its reader is the embedding too


def test_gpt2_has_no_couple_over_its_gelu_nor_with_its_tied_head() -> None:
    model = models.gpt2()
    found = find_pairs(model, models.ids()[0])
    assert {c.writer.name for c in found.pairs} == {
        f"transformer.h.{i}.{n}" for i in (0, 1) for n in ("ln_1", "attn.c_attn", "ln_2")
    }
    assert set(found.without) == {f"transformer.h.{i}.mlp.c_proj.weight" for i in (0, 1)} | {"transformer.wte.weight"}


def test_vit_and_torch_encoder_layer() -> None:
    found = pairs(models.vit(), models.images()[0])
    assert found["vit.layernorm"] == {"classifier.weight"}
    assert found["vit.layers.1.layernorm_after"] == {"vit.layers.1.mlp.fc1.weight"}
    assert "vit.layers.1.mlp.fc1" not in found
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, activation="relu").eval()
    assert pairs(layer, torch.randn(2, 5, 32)) == {
        "norm1": {"self_attn.in_proj_weight"},
        "self_attn.in_proj_weight": {"self_attn.out_proj.weight"},
        "norm2": {"linear1.weight"},
        "linear1": {"linear2.weight"},
    }


def test_bert_folds_into_no_norm_because_the_residual_stream_reads_it_too() -> None:
    model = models.bert()
    before = models.state(model)
    found = find_pairs(model, models.ids()[0])
    assert {c.writer.name for c in found.pairs} == {f"encoder.layer.{i}.attention.self.value" for i in (0, 1)}
    why = found.without["encoder.layer.0.attention.self.query.weight"]
    assert why == "the model's outputs change when its scale is folded into the layer before"
    assert models.same_state(model, before)


@pytest.mark.parametrize(
    ("activation", "pairs"),
    [(nn.ReLU(), 1), (nn.LeakyReLU(), 1), (nn.Identity(), 1), (nn.GELU(), 0), (nn.Tanh(), 0), (nn.ReLU6(), 0)],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_only_a_homogeneous_activation_lets_a_scale_through(activation: nn.Module, pairs: int) -> None:
    found = find_pairs(models.shaken_mlp(activation), 9 * torch.randn(20, 16))
    assert len(found.pairs) == pairs
    assert found.without["0.weight"] == "it reads the model's input"


def test_both_halves_of_a_product_take_no_scale_twice() -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x) * self.b(x))

    assert len(find_pairs(Bilinear(), torch.randn(5, 8)).pairs) == 1


def test_a_layer_whose_output_no_one_sees_is_no_couple() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.a(self.norm(x))
            return self.b(x)

    assert find_pairs(Unused(), torch.randn(3, 8)).pairs == []


def test_a_quantized_reader_takes_no_scale() -> None:
    model = models.decoder("Llama")
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, n: n.endswith("layers.0.self_attn.q_proj"))
    found = find_pairs(model, models.ids()[0])
    assert "model.layers.0.input_layernorm" not in {c.writer.name for c in found.pairs}
    assert found.without["model.layers.0.self_attn.k_proj.weight"].endswith("is already quantized")


def test_any_scales_keep_the_function_to_a_hundred_thousandth() -> None:
    model, batch = models.decoder("Qwen2"), models.ids()[0]
    reference = float_outputs(model, batch)
    for pair in find_pairs(model, batch).pairs:
        pair.apply(torch.rand(pair.writer.width, dtype=torch.float64) * 4 + 0.1)
    assert 0 < relative_difference(reference, float_outputs(model, batch)) < TOLERANCE


def test_grouped_heads_read_their_own_values() -> None:
    pair = next(c for c in find_pairs(models.decoder("Llama"), models.ids()[0]).pairs if c.index is not None)
    assert pair.head == 8
    assert pair.index is not None
    assert pair.index.tolist() == [*range(8), *range(8), *range(8, 16), *range(8, 16)]
    x = torch.arange(32.0)
    assert torch.equal(pair.gather(x), torch.tensor([*range(8, 16), *range(24, 32)]).float())


def test_a_model_without_float_outputs_is_refused() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.norm(x)).argmax(-1)

    with pytest.raises(ValueError, match="Picks returns no float tensors"):
        find_pairs(Picks(), torch.randn(3, 8))


def test_trace_names_what_a_tensor_is_made_of() -> None:
    model = models.decoder("Llama")
    uses = {m.name: node for m, node in trace(model, models.ids()[0]).uses}
    assert uses["model.layers.0.self_attn.q_proj.weight"].resolved().name == "model.layers.0.input_layernorm"
    made_of = [n.name for n in sources(uses["model.layers.0.mlp.down_proj.weight"])]
    assert made_of == ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]


def test_apart() -> None:
    x = torch.tensor([3.0, -4.0])
    assert relative_difference([x], [x]) == 0
    assert relative_difference([x], [x + torch.tensor([0.0, 0.5])]) == pytest.approx(0.1)
    low = torch.tensor([1.0, -torch.inf])
    assert relative_difference([low], [low]) == 0
    assert relative_difference([x], [torch.tensor([3.0, torch.nan])]) == torch.inf
    assert relative_difference([x], [x[:1]]) == torch.inf
    assert relative_difference([x], []) == torch.inf


def test_probe_takes_two_samples_where_it_can() -> None:
    x = torch.arange(12).view(4, 3)
    assert torch.equal(probe_batch(x), x[:2])
    assert probe_batch({"a": x, "b": (x,)})["b"][0].shape == (2, 3)
    flags = (x, torch.ones(3))
    assert probe_batch(flags) is flags
    assert probe_batch(x[:2]).shape == (2, 3)
