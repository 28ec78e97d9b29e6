"""fuse_: which blocks are fused, the same numbers within the tolerance, and everything else as before."""

import copy
import io
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.inference import CheckError, FusedBlock, checked
from tests import forked
from tests.inference.fuse_models import FAMILIES, NEWEST, SCHEMES, blocks_of, inputs, model_of, states

transformers = pytest.importorskip("transformers")
DTYPES = [torch.float32, torch.bfloat16]
# Limits of mean |difference| / mean |y| of the whole model: float32 2e-6, bfloat16 9e-3, quantized inputs 6e-2
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2.5e-2}
QUANTIZED_INPUTS = 0.12


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.float() - expected.float()).abs().mean() / expected.float().abs().mean())


def run(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return states(model(**batch))


def fused(family: str, scheme: str = "int8", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """(a quantized model, the same fused)"""
    model = model_of(family, scheme, dtype)
    other = copy.deepcopy(model)
    reasons = list(blocks_of(pw.fuse_(other)).values())
    count = FAMILIES[family][1]
    assert reasons.count("") == count or (not NEWEST and reasons.count("") > count), reasons
    return model, other


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_that_of_the_model(family: str, scheme: str, dtype: torch.dtype) -> None:
    model, other = fused(family, scheme, dtype)
    limit = QUANTIZED_INPUTS if "dynamic" in scheme else LIMITS[dtype]
    pw.reset_fallbacks()
    for batch, tokens in ((3, 9), (2, 1), (1, 7)):
        given = inputs(family, dtype, batch=batch, tokens=tokens)
        expected = run(model, given)
        y = run(other, given)
        kept = ~y.isnan()  # nn.MultiheadAttention gives NaN for a row without an allowed key, a fused block 0
        assert y.dtype is dtype
        assert error(y[kept], expected[kept]) < limit
    assert not [name for name in pw.fallbacks() if "fused" in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_classes_change(family: str) -> None:
    model = model_of(family)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    state = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    given = inputs(family)
    expected = run(model, given)
    pw.fuse_(model)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == state
    assert any(isinstance(module, FusedBlock) for module in model.modules())
    pw.inference.thaw_(model)
    assert not any(isinstance(module, (FusedBlock, pw.inference.FrozenLinear)) for module in model.modules())
    assert torch.equal(run(model, given), expected)


def test_the_report_lists_blocks_and_layers() -> None:
    report = pw.fuse_(model_of("t5"))
    blocks = blocks_of(report)
    assert blocks["encoder.block.0.layer.1"] == ""
    assert blocks["encoder.block.0.layer.0"] == "it returns more than its hidden states"
    frozen = {row.name for row in report.quantized}
    assert {"encoder.block.0.layer.1", "encoder.block.0.layer.0.SelfAttention.q.weight"} <= frozen
    assert "fused or frozen" in report.summary()
    again = pw.fuse_(model_of("bert"))
    assert set(blocks_of(again).values()) == {""}


def test_models_of_transformers_inside_another_need_no_example() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.other = model_of("bert"), model_of("llama")

        def forward(self, features: dict[str, Tensor]) -> Tensor:
            return torch.cat([states(part(**features)) for part in (self.text, self.other)], -1)

    model = Towers().eval()
    batch = {"input_ids": torch.arange(10).reshape(2, 5)}
    with torch.no_grad():
        expected = model(batch)
        blocks = blocks_of(pw.fuse_(model))
        assert len(blocks) == 4
        assert set(blocks.values()) == {""}
        assert error(model(batch), expected) < LIMITS[torch.float32]


def test_a_second_call_and_thaw_() -> None:
    model = model_of("llama")
    first = blocks_of(pw.fuse_(model))
    classes = [type(m) for m in model.modules()]
    assert blocks_of(pw.fuse_(model)) == first
    assert [type(m) for m in model.modules()] == classes
    names = [row.name for row in pw.inference.thaw_(model).rows]
    assert "model.layers.0" in names
    assert "model.layers.0.mlp.up_proj.weight" in names


# -- calls that are not fused ------------------------------------------------------------------------------------------


def reasons() -> str:
    return "; ".join(pw.fallbacks())


def test_gradients_training_and_autocast() -> None:
    model, other = fused("bert")
    given = inputs("bert")
    pw.reset_fallbacks()
    y = other(**given).last_hidden_state
    assert "gradients" in reasons()
    y.sum().backward()
    want = model(**given).last_hidden_state
    want.sum().backward()
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)
    with torch.no_grad():
        pw.reset_fallbacks()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(states(other(**given)), states(model(**given)))
        assert "autocast" in reasons()
        pw.reset_fallbacks()
        for m in (model, other):
            m.train()
            torch.manual_seed(0)
        y = states(other(**given))
        torch.manual_seed(0)
        assert torch.equal(y, states(model(**given)))
        assert "training" in reasons()
        other.eval(), model.eval()
        pw.reset_fallbacks()
        assert error(states(other(**given)), states(model(**given))) < LIMITS[torch.float32]
        assert not reasons()


def test_hooks_on_inner_modules_and_on_the_block() -> None:
    _, other = fused("llama")
    given = inputs("llama")
    seen: list[str] = []
    block = other.model.layers[0]
    handle = block.register_forward_hook(lambda *_: seen.append("block"))
    pw.reset_fallbacks()
    run(other, given)
    assert seen == ["block"]
    assert not reasons()
    inner = block.mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    run(other, given)
    assert seen == ["block", "mlp", "block"]
    assert "hook" in reasons()
    inner.remove()
    handle.remove()
    pw.reset_fallbacks()
    run(other, given)
    assert not reasons()


def test_hidden_states_and_attentions_of_transformers() -> None:
    model, other = fused("llama")
    given = inputs("llama")
    with torch.no_grad():
        pw.reset_fallbacks()
        y, want = (m(**given, output_hidden_states=True).hidden_states for m in (other, model))
        assert not reasons()
        assert all(error(a, b) < LIMITS[torch.float32] for a, b in zip(y, want, strict=True))
        for m in (model, other):
            m.set_attn_implementation("eager")
        y, want = (m(**given, output_attentions=True).attentions for m in (other, model))
        assert reasons()
        assert all(map(torch.equal, y, want))


def test_the_attention_implementation_is_changed() -> None:
    _, other = fused("llama")
    other.set_attn_implementation("eager")
    pw.reset_fallbacks()
    run(other, inputs("llama"))
    assert "attention implementation" in reasons()


def test_replaced_modules_and_parameters() -> None:
    model, other = fused("llama")
    given = inputs("llama")
    donor = model_of("llama")
    with torch.no_grad():
        donor.model.layers[0].mlp.up_proj.weight.data = model.model.layers[1].mlp.up_proj.weight.data.clone()
    for m in (model, other):  # the same weight, replaced as a parameter
        m.model.layers[0].mlp.up_proj.weight = donor.model.layers[0].mlp.up_proj.weight
    pw.reset_fallbacks()
    assert error(run(other, given), run(model, given)) < LIMITS[torch.float32]
    assert not reasons()
    for m in (model, other):  # in place
        m.model.layers[0].input_layernorm.weight.data.mul_(2)
        m.model.layers[1].input_layernorm.weight.data = m.model.layers[1].input_layernorm.weight.data * 3
    assert error(run(other, given), run(model, given)) < LIMITS[torch.float32]
    assert not reasons()
    for m in (model, other):
        layer = m.model.layers[0].mlp
        layer.down_proj = nn.Sequential(layer.down_proj, nn.Identity()).eval()
    assert error(run(other, given), run(model, given)) < LIMITS[torch.float32]
    assert "replaced" in reasons()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of peft 0.21
def test_lora() -> None:
    peft = pytest.importorskip("peft")
    model, other = fused("llama")
    given = inputs("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    found = []
    for m in (model, other):
        torch.manual_seed(2)
        found.append(run(peft.get_peft_model(m, config), given))
    assert error(*found) < LIMITS[torch.float32]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")  # of vmap
def test_tracing_and_transforms() -> None:
    model, other = fused("encoder")
    x = inputs("encoder")["src"]
    with torch.no_grad():
        traced = torch.jit.trace(other.layers[0], x[:1], check_trace=False)
        assert error(traced(x), model.layers[0](x)) < LIMITS[torch.float32]
        pw.reset_fallbacks()
        mapped = torch.func.vmap(other.layers[0])(x[:, None])
        assert "transform" in reasons()
        assert error(mapped[:, 0], model.layers[0](x)) < LIMITS[torch.float32]


def test_compile() -> None:
    model, other = fused("bert")
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        torch._dynamo.reset()
        pw.reset_fallbacks()
        y = torch.compile(other.encoder.layer[0], backend="eager", fullgraph=True)(x)
        assert not reasons()
        assert error(y, model.encoder.layer[0](x)) < LIMITS[torch.float32]
        torch._dynamo.reset()


def test_inputs_of_another_kind() -> None:
    model, other = fused("encoder")
    block, own = other.layers[0], model.layers[0]
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        for given in (x[0], x[:0], x.bfloat16().float()):
            assert block(given).shape == own(given).shape
        with pytest.raises(Exception, match="embedding dimension"):
            block(torch.randn(2, 5, 63))


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_fused(how: str) -> None:
    model, other = fused("llama")
    if how == "deepcopy":
        twin = copy.deepcopy(other)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(other))
    else:
        file = io.BytesIO()
        torch.save(other, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    given = inputs("llama")
    assert isinstance(twin.model.layers[0], FusedBlock)
    assert type(twin.model.layers[0]) is not type(other.model.layers[0])
    del other
    pw.reset_fallbacks()
    with torch.no_grad():
        twin.model.layers[1].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data
        model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data
    assert error(run(twin, given), run(model, given)) < LIMITS[torch.float32]
    assert not reasons()
    pw.inference.thaw_(twin)
    assert torch.equal(run(twin, given), run(model, given))


def test_save_and_load(tmp_path: Path) -> None:
    model, other = fused("bert")
    pw.save(other.state_dict(), tmp_path / "fused.safetensors")
    fresh = model_of("bert", "int8")
    with torch.no_grad():
        for p in fresh.parameters():
            if type(p) is nn.Parameter and p.ndim == 1:
                p.zero_()
    pw.fuse_(fresh)
    pw.load(tmp_path / "fused.safetensors", fresh)
    given = inputs("bert")
    pw.reset_fallbacks()
    assert error(run(fresh, given), run(model, given)) < LIMITS[torch.float32]
    assert not reasons()


def test_another_dtype_is_not_fused() -> None:
    model, other = fused("bert")
    model.bfloat16(), other.bfloat16()
    pw.reset_fallbacks()
    assert torch.equal(run(other, inputs("bert")), run(model, inputs("bert")))
    assert "float32" in reasons()


def test_dequantize_and_quantize_again() -> None:
    model, other = fused("bert")
    pw.dequantize_(other)
    assert not any(isinstance(module, (FusedBlock, pw.inference.FrozenLinear)) for module in other.modules())
    assert error(run(other, inputs("bert")), run(model, inputs("bert"))) < 1e-5
    pw.quantize_(other, "int8")
    assert "" in blocks_of(pw.fuse_(other)).values()


def test_threads() -> None:
    model, other = fused("llama")
    batches = [inputs("llama", batch=b, tokens=t) for b, t in ((1, 5), (2, 9), (3, 4), (1, 8))]
    expected = [run(model, given) for given in batches]
    bad: list[float] = []

    def work(i: int) -> None:
        for _ in range(5):
            bad.extend(e for e in [error(run(other, batches[i]), expected[i])] if not e < LIMITS[torch.float32])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []


# -- checks ------------------------------------------------------------------------------------------------------------


def test_a_fault_in_a_fused_block_is_found() -> None:
    _, other = fused("llama")
    given = inputs("llama")
    with checked():
        run(other, given)
    bound = type(other.model.layers[1]).bound
    own = bound.whole.runner

    class Faulty:
        converted = own.converted

        def run(self, x: Tensor, call: Any) -> Tensor:
            y = own.run(x, call).clone()
            y[0, 0, :8] += 0.3
            return y

    bound.whole = bound.whole._replace(runner=Faulty())
    run(other, given)
    with checked(), pytest.raises(CheckError, match=r"model\.layers\.1: the output of the fused block differs"):
        run(other, given)


def test_a_fault_in_the_cache_is_found() -> None:
    _, other = fused("llama")
    bound = type(other.model.layers[0]).bound
    own = bound.whole.runner

    class Faulty:
        converted = own.converted

        def run(self, x: Tensor, call: Any) -> Tensor:
            y = own.run(x, call)
            call.keys[:, 0, call.past] += 1
            return y

    bound.whole = bound.whole._replace(runner=Faulty())
    with checked(), pytest.raises(CheckError, match=r"model\.layers\.0: keys in the cache"):
        run(other, inputs("llama"))


def test_the_environment_variable() -> None:
    code = "from pennyweight.inference.verify_block import checks_enabled; print(checks_enabled())"
    for value, expected in (("1", "True"), ("0", "False")):
        result = forked.run(["-c", code], env={**os.environ, "PENNYWEIGHT_CHECK": value}, check=True)  # fmt: skip
        assert result.stdout.strip() == expected
