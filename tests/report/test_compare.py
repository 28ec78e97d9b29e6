"""pw.compare: its figures against plain runs of both models, and what it must not touch."""

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration
from transformers.pytorch_utils import Conv1D

import pennyweight as pw
from pennyweight.report import compare_models
from tests.report.small import SIZES, bert, llama, mlp, prompts, quantized


def layer(found: pw.Comparison, name: str) -> Any:
    return next(w for w in found.layers if w.name == name)


def decibels(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(20 * torch.log10(a.double().norm() / (b.double() - a.double()).norm()))


@torch.no_grad()
def test_the_figures_of_a_language_model() -> None:
    model = llama()
    small = quantized(model)
    batches = prompts()
    found = pw.compare(model, small, batches)
    kl, nll, nll_q, same, a, b = [], [], [], [], [], []
    for batch in batches:
        p, q = (m(**batch).logits.double() for m in (model, small))
        for i in range(3):
            n = int(batch["attention_mask"][i].sum())
            a.append(p[i, :n])
            b.append(q[i, :n])
            kl.append(
                F.kl_div(q[i, :n].log_softmax(-1), p[i, :n].log_softmax(-1), log_target=True, reduction="none").sum(-1)
            )
            same.append(p[i, :n].argmax(-1) == q[i, :n].argmax(-1))
            for logits, out in ((p, nll), (q, nll_q)):
                out.append(F.cross_entropy(logits[i, : n - 1], batch["input_ids"][i, 1:n], reduction="none"))
    kl = torch.cat(kl)
    assert (found.kind, found.sequences, found.rows) == ("logits", 6, len(kl) == found.kl.number and 62)
    assert found.kl.mean == pytest.approx(kl.mean().item(), rel=1e-6)
    assert found.kl.median == pytest.approx(kl.median().item(), rel=0.05)
    assert found.kl.max == pytest.approx(kl.max().item(), rel=1e-6)
    assert found.kl_interval[0] < found.kl.mean < found.kl_interval[1]
    assert found.top1 == pytest.approx(torch.cat(same).double().mean().item())
    assert found.perplexity.reference == pytest.approx(torch.cat(nll).mean().exp().item(), rel=1e-6)
    assert found.perplexity.quantized == pytest.approx(torch.cat(nll_q).mean().exp().item(), rel=1e-6)
    assert found.perplexity.ratio == pytest.approx(found.perplexity.quantized / found.perplexity.reference, rel=1e-9)
    assert found.perplexity.tokens == len(torch.cat(nll))
    a, b = torch.cat(a), torch.cat(b)
    assert found.sqnr == pytest.approx(decibels(a, b), abs=1e-3)
    assert found.error == pytest.approx(10 ** (-decibels(a, b) / 20), rel=1e-4)
    assert found.cosine[0] == pytest.approx(torch.cosine_similarity(a, b, -1).mean().item(), rel=1e-6)


@torch.no_grad()
def test_the_figures_of_a_layer() -> None:
    model = llama()
    small = quantized(model)
    batch = prompts(1)[0]
    found = pw.compare(model, small, [batch])
    seen: dict[int, Any] = {}
    name = "model.layers.1.mlp.up_proj"
    for m in (model, small):
        hook = m.get_submodule(name).register_forward_hook(lambda mod, x, y, m=m: seen.__setitem__(id(m), (x[0], y)))
        m(**batch)
        hook.remove()
    (x, y), (_, y_q) = seen[id(model)], seen[id(small)]
    real = batch["attention_mask"].bool()
    w = layer(found, f"{name}.weight")
    assert w.stream_sqnr == pytest.approx(decibels(y[real], y_q[real]), abs=1e-3)
    assert w.stream_sqnr != pytest.approx(decibels(y, y_q), abs=1e-3)  # padding does not count
    assert w.layer_sqnr == pytest.approx(decibels(y[real], small.get_submodule(name)(x)[real]), abs=1e-3)
    weight = model.get_submodule(name).weight
    assert w.weight_sqnr == pytest.approx(decibels(weight, small.get_submodule(name).weight.dequantize()), abs=1e-3)
    assert w.stream_sqnr < w.layer_sqnr  # the layers before it cost something too
    assert (w.calls, w.type, w.shape, w.quantized) == (1, "Linear", (96, 64), True)
    worst = [v.worst for v in found.quantized]
    assert worst == sorted(worst)
    assert not found.layers[-1].quantized
    assert found.layers[-1].name == "model.embed_tokens.weight"
    assert found.layers[-1].layer_sqnr == math.inf


def test_bits_are_those_of_the_file(tmp_path) -> None:
    model = llama()
    small = quantized(model, pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(40)))  # 64 inputs in 2 groups: padded
    found = pw.compare(model, small, prompts(1))
    pw.save(small, tmp_path)
    with pw.open(tmp_path) as checkpoint:
        held = checkpoint.held
        for w in found.layers:
            assert w.bytes == held[w.name].nbytes, w.name
        assert found.bytes == sum(h.nbytes for h in held.values())
    w = layer(found, "model.layers.0.self_attn.q_proj.weight")
    assert w.scheme.startswith("int3[40]")
    assert w.bits_per_weight == pytest.approx((80 * 3 + 2 * 32) / 64)
    assert found.bytes_float == sum(p.nbytes for p in model.parameters())
    total = sum(v.bytes for v in found.quantized)
    assert found.bits_per_weight == 8 * total / sum(v.weights for v in found.quantized)


def test_tied_weights_count_once_and_show_twice() -> None:
    model = llama(tied=True)
    small = quantized(model, pw.Int8WeightOnlyConfig(), lambda m, n: isinstance(m, (nn.Linear, nn.Embedding)))
    assert small.lm_head.weight is small.model.embed_tokens.weight
    found = pw.compare(model, small, prompts(1))
    table, head = layer(found, "model.embed_tokens.weight"), layer(found, "lm_head.weight")
    assert (table.tied, head.tied) == ("", "model.embed_tokens.weight")
    assert head.layer_sqnr != table.layer_sqnr
    assert found.bytes == sum(w.bytes for w in found.layers if not w.tied) + sum(
        p.nbytes for p in small.parameters() if p.ndim == 1
    )
    assert "lm_head.weight (tied to model.embed_tokens.weight)" in str(found)


def test_a_convolution_whose_output_is_written_over() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 5))
    small = quantized(model, pw.Int8WeightOnlyConfig(), lambda m, n: isinstance(m, (nn.Conv2d, nn.Linear)))
    x = torch.randn(4, 3, 8, 8)
    found = pw.compare(model, small, [x])
    with torch.no_grad():
        expected = decibels(model[0](x), small[0](x))
    w = layer(found, "0.weight")
    assert w.stream_sqnr == w.layer_sqnr == pytest.approx(expected, abs=1e-3)
    assert (found.kind, found.kl, found.top1, found.rows) == ("tensor", None, None, 4)


@torch.no_grad()
def test_embeddings_are_pooled_where_the_mask_says() -> None:
    model = bert()
    small = quantized(model)
    batches = prompts()
    found = pw.compare(model, small, batches, kind="embeddings")

    def embed(m: nn.Module) -> torch.Tensor:
        rows = []
        for batch in batches:
            for hidden, mask in zip(m(**batch).last_hidden_state, batch["attention_mask"], strict=True):
                rows.append(hidden[mask.bool()].mean(0))
        return torch.stack(rows)

    a, b = embed(model), embed(small)
    assert found.kl.mean == pytest.approx(pw.report.metrics.retrieval_kl(a, b).mean().item(), rel=1e-4)
    assert found.cosine[1] == pytest.approx(torch.cosine_similarity(a, b, -1).min().item(), rel=1e-6)
    assert (found.rows, found.sequences, found.perplexity) == (6, 6, None)
    first = pw.compare(model, small, batches, kind="embeddings", pooling="first")
    assert first.kl.mean != found.kl.mean


def test_nothing_is_changed_and_it_is_the_same_again() -> None:
    model = llama()
    small = quantized(model)
    model.train()
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    again = [pw.compare(model, small, prompts()).to_json() for _ in range(2)]
    assert again[0] == again[1]
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in (*model.modules(), *small.modules()))
    assert all(p.grad is None for p in model.parameters())


def test_an_error_in_a_model_leaves_no_hook() -> None:
    model = mlp().train()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pw.compare(model, quantized(model), [torch.randn(2, 31)])
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_little_memory_gives_the_same_figures(monkeypatch) -> None:
    model = llama()
    small = quantized(model)
    whole = pw.compare(model, small, prompts())
    monkeypatch.setattr(compare_models, "HELD", 1)  # one layer at a time
    assert pw.compare(model, small, prompts()) == whole


def test_a_model_beside_itself() -> None:
    model = llama()
    found = pw.compare(model, model, prompts())
    assert (found.kl.max, found.top1, found.error, found.sqnr) == (0, 1, 0, math.inf)
    assert all(w.layer_sqnr == w.stream_sqnr == math.inf for w in found.layers)
    assert found.bits_per_weight is None
    json.loads(found.to_json())


def test_other_forms_of_the_quantized_model() -> None:
    model = llama()
    small = quantized(model)
    plain = pw.compare(model, small, prompts())
    pw.inference.freeze_(small)
    frozen = pw.compare(model, small, prompts())
    assert {w.name: (w.scheme, w.bytes, w.weight_sqnr) for w in frozen.layers} == {
        w.name: (w.scheme, w.bytes, w.weight_sqnr) for w in plain.layers
    }
    assert (frozen.bytes, frozen.kl) == (plain.bytes, plain.kl)
    half = pw.compare(model, quantized(llama().bfloat16()), prompts())
    assert all(w.layer_sqnr is not None for w in half.layers)
    assert half.kl.mean == pytest.approx(plain.kl.mean, rel=0.3)


def test_what_only_one_model_has_is_told() -> None:
    model, other = mlp(), mlp()
    other[2] = nn.Linear(64, 10)
    other[2].extra = nn.Parameter(torch.zeros(2, 3))
    other.append(nn.Linear(10, 10))
    model[0] = nn.Linear(32, 64)
    wide = nn.Sequential(nn.Linear(32, 65), nn.ReLU(), nn.Linear(65, 10))
    x = torch.randn(4, 32)
    found = pw.compare(model, other, [x], kind="logits")
    ours, theirs = "only the quantized model has it", "only the float model has it"
    assert found.unmatched == (f"2.extra: {ours}", f"3.weight: {ours}")
    assert f"not compared: 3.weight: {ours}" in str(found)
    assert pw.compare(other, model, [x]).unmatched == (f"2.extra: {theirs}", f"3.weight: {theirs}")
    shapes = pw.compare(model, wide, [x]).unmatched
    assert "0.weight: the models have shapes [64, 32] and [65, 32]" in shapes


@pytest.mark.parametrize(
    "batches", [[torch.ones(2, 32)], torch.ones(2, 32), [(torch.ones(2, 32),)], [{"input": torch.ones(2, 32)}]]
)
def test_forms_of_batches(batches: Any) -> None:
    model = mlp()
    small = quantized(model)
    model = nn.Sequential(*model)

    class Named(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.inner(input)

    assert pw.compare(Named(model), Named(small), batches).rows == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kind": "logit"}, "kind must be one of logits, embeddings, tensor"),
        ({"pooling": "max"}, "pooling must be one of mean, first, last"),
        ({"labels": "all"}, "labels must be one of next, same, none"),
        ({"batches": []}, "there is nothing to compare: no batch was given"),
        ({"batches": 3}, "batches must be a list of batches .* got 3"),
    ],
)
def test_what_means_nothing_is_refused(how: dict, message: str) -> None:
    model = mlp()
    batches = how.pop("batches", [torch.ones(2, 32)])
    with pytest.raises(ValueError, match=message):
        pw.compare(model, model, batches, **how)


def test_outputs_that_cannot_be_compared() -> None:
    a, b = mlp(), nn.Sequential(nn.Linear(32, 9))
    with pytest.raises(ValueError, match=r"cannot be compared: Tensor of \[2, 10\] and Tensor of \[2, 9\]"):
        pw.compare(a, b, [torch.ones(2, 32)])
    with pytest.raises(ValueError, match="kind='embeddings' needs a tensor"):
        pw.compare(llama(), llama(), prompts(1), kind="embeddings")


@torch.no_grad()
def test_labels_of_a_model_of_ones_own() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids))

    torch.manual_seed(0)
    model = Tiny()
    ids = torch.randint(0, 50, (3, 9))
    small = quantized(model)
    assert pw.compare(model, small, [ids], kind="logits").perplexity is None
    found = pw.compare(model, small, [(ids,)], kind="logits", labels="next").perplexity
    expected = F.cross_entropy(small(ids)[:, :-1].reshape(-1, 50), ids[:, 1:].reshape(-1)).exp()
    assert found.quantized == pytest.approx(expected.item(), rel=1e-6)
    assert found.tokens == 24


@torch.no_grad()
def test_labels_that_a_batch_brings() -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=5)).eval()
    small = quantized(model)
    batch = prompts(1)[0] | {"labels": torch.tensor([1, 4, -100])}
    found = pw.compare(model, small, [batch])
    logits = small(**batch).logits
    assert found.perplexity.tokens == 2
    assert found.perplexity.quantized == pytest.approx(F.cross_entropy(logits[:2], batch["labels"][:2]).exp().item())
    assert pw.compare(model, small, [batch], labels="none").perplexity is None


@torch.no_grad()
def test_an_encoder_decoder_by_its_decoders_mask() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes)).eval()
    batch = {
        "input_ids": torch.randint(0, 64, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "decoder_input_ids": torch.randint(0, 64, (2, 5)),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
    }  # fmt: skip
    found = pw.compare(model, quantized(model), [batch])
    assert (found.rows, found.perplexity, found.kind) == (7, None, "logits")
    assert len(found.quantized) > 10


def test_weights_that_are_no_layers_own_and_transposed_ones() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 32, 64))
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
            self.conv = Conv1D(48, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attention(x, x, x, need_weights=False)[0].contiguous()
            return self.conv(x), torch.bmm(x.reshape(1, -1, 64).expand(4, -1, -1), self.up.transpose(1, 2))

    torch.manual_seed(0)
    model = Experts()
    int8 = pw.Int8WeightOnlyConfig()
    small = quantized(model, pw.FqnToConfig({"up": int8, "conv": int8, "attention": int8}))
    found = pw.compare(model, small, [torch.randn(2, 5, 64)])
    layers = {w.name: w for w in found.layers}
    assert layers.keys() == {"up", "attention.in_proj_weight", "attention.out_proj.weight", "conv.weight"}
    assert all(35 < w.weight_sqnr < 60 for w in found.quantized)
    assert (
        layers["up"].layer_sqnr == layers["up"].stream_sqnr == pytest.approx(found.sqnr, abs=1)
    )  # of both outputs together
    assert (layers["attention.out_proj.weight"].calls, layers["attention.out_proj.weight"].layer_sqnr) == (0, None)
    assert 30 < layers["conv.weight"].layer_sqnr < 60
    assert 30 < layers["attention.in_proj_weight"].layer_sqnr < 60
    assert layers["conv.weight"].bits_per_weight == pytest.approx(8 + 32 / 64)
    assert found.error < 0.05


# -- gates -----------------------------------------------------------------------------------------------------------


def test_check_names_figures_and_the_worst_layers() -> None:
    model = llama()
    found = pw.compare(model, quantized(model, pw.IntxWeightOnlyConfig(torch.int2, pw.PerGroup(32))), prompts())
    assert found.check(max_kl=100, min_top1=0.0, max_error=100) is found
    with pytest.raises(ValueError, match=r"nats, the limit is 0.001; top-1 agreement is .* the minimum is 99.90%") as e:
        found.check(max_kl=0.001, min_top1=0.999, max_error=0.01)
    assert "relative error of the outputs is" in str(e.value)
    for w in found.worst():
        assert w.name in str(e.value)
    assert found.quantized[-1].name not in str(e.value)
    assert len(found.worst()) == 5


def test_check_refuses_a_bound_on_nothing() -> None:
    model = mlp()
    found = pw.compare(model, quantized(model), [torch.randn(4, 32)])
    with pytest.raises(ValueError, match="max_kl needs distributions, but the outputs were compared as 'tensor'"):
        found.check(max_kl=1)
    with pytest.raises(ValueError, match=r"relative error of the outputs is .*, the limit is 1e-06"):
        found.check(max_error=1e-6)


def test_nan_passes_no_gate() -> None:
    model = mlp()
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken[2].weight[0, 0] = math.nan
    found = pw.compare(model, broken, [torch.randn(4, 32)], kind="logits")
    for bound in ({"max_kl": 1e9}, {"max_error": 1e9}):
        with pytest.raises(ValueError, match="; no quantized layer differs from float"):
            found.check(**bound)
    assert json.loads(found.to_json())["error"] == "nan"


def test_assert_kl() -> None:
    model = mlp()
    small = quantized(model)
    x = [torch.randn(4, 32)]
    pw.report.assert_kl(model, small, x, 1.0)
    with pytest.raises(AssertionError, match=r"mean KL.* the limit is 1e-09; worst layers: 2.weight \("):
        pw.report.assert_kl(model, small, (t for t in x), 1e-9)  # batches are gone through once
    pw.report.assert_kl(bert(), bert(), prompts(), 1e-9, kind="embeddings")


def test_json_and_table() -> None:
    model = llama()
    found = pw.compare(model, quantized(model), prompts())
    data = json.loads(found.to_json())
    assert data["version"] == 1
    assert data["kl"]["mean"] == found.kl.mean
    assert data["layers"][0]["bits_per_weight"] == found.layers[0].bits_per_weight
    assert data["layers"][-1]["weight_sqnr"] == "inf"
    text = found.table()
    assert all(w.name in text for w in found.layers)
    few = found.table(full=False)
    assert all(w.name in few for w in found.layers[:24])


def test_different_and_exchanged_models_are_told_first() -> None:
    model, x = mlp(), [torch.randn(4, 32)]
    small = quantized(model, "int8")
    assert (pw.compare(model, small, x).wrong, pw.compare(model, small, x).reference) == ("", "")
    exchanged = pw.compare(small, model, x)
    assert exchanged.wrong.startswith("2 weights of the float model are quantized (0.weight), and none of the other")
    assert "exchange them" in str(exchanged).splitlines()[0]
    assert "exchange them" in repr(exchanged)
    both = pw.compare(small, quantized(model, "int4"), x)
    assert both.wrong == ""
    assert str(both).startswith("reference:")
    assert "errors are relative to them" in str(both).splitlines()[0]
    other = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10))
    found = pw.compare(model, quantized(other, "int8"), x)
    assert found.wrong.startswith("only 0 of 2 weights have the same name and shape")
    assert str(found).startswith("WRONG:")
