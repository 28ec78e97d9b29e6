"""for_=: what an engine does not read is refused before anything is computed, with layer, scheme and remedy."""

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.algorithms.mixed_precision.budget import Option, allocate, merge
from pennyweight.planning.configs.by_name import CONFIGS, by_name, named
from pennyweight.planning.engines import (
    ENGINES,
    ROWS,
    Reads,
    Refuses,
    check_fused,
    fused_groups,
    row_of,
    verdict,
)
from pennyweight.planning.parameters import Site

SITE = Site("a.weight", "a", "weight", "linear", (256, 256), torch.bfloat16, "cpu", "Linear")


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width // 2)
        self.v_proj, self.down_proj = nn.Linear(width, width // 2), nn.Linear(width, width)
        self.embed = nn.Embedding(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.q_proj(x) + torch.cat([self.k_proj(x), self.v_proj(x)], -1)
        return self.down_proj(y)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_has_a_verdict_of_every_engine(name: str) -> None:
    scheme = by_name(name).scheme(SITE)
    for engine in ENGINES:
        found = verdict(engine, scheme, SITE.shape)
        if isinstance(found, Reads):
            assert found.format in ENGINES[engine].formats
        else:
            assert isinstance(verdict(engine, named(found.nearest).scheme(SITE), SITE.shape), Reads), (
                "remedy is refused"
            )


def test_examples_are_of_their_row() -> None:
    for row in ROWS:
        if row.example.partition(":")[0] in CONFIGS:
            assert row_of(named(row.example).scheme(SITE)) is row
        assert row.engines.keys() == ENGINES.keys()


def test_what_an_engine_reads_is_said_and_the_rest_is_refused() -> None:
    model = Block()
    before = {name: p.clone() for name, p in model.named_parameters()}
    report = pw.quantize_(model, by_name("w4a16", 32), for_="vllm")
    assert report.notes[-1].startswith(
        "vLLM on a CPU reads all quantized weights, from a file in the format compressed-t"
    )
    model = Block()
    model.load_state_dict(before)
    for engine, config, says in (
        (
            "vllm",
            "int4",
            r"q_proj.weight: vLLM on a CPU does not read int4, groups of 128.*; use 'w4a16', .*and 3 more",
        ),
        ("vllm", "int8", "supports? weights of 4 bits, and of 8 bits only with 8-bit inputs; use 'w8a8'"),
        ("llama.cpp", "fp8", "does not read e4m3, per row.*no GGUF type stores them; use 'q8_0'"),
        ("onnxruntime", "mxfp8-dynamic", "ONNX has no operator"),
        (
            "vllm",
            pw.FqnToConfig({"_embeddings": "int8"}),
            "embed.weight: .*only as floats; leave it float, skip='embed'",
        ),
        ("vllm", by_name("w4a16", 48), "blocks of 48 do not divide its 64 inputs; choose a group size"),
        ("vlm", "int8", r"for_='vlm': unknown engine 'vlm' \(did you mean 'vllm'\?\); known: vllm, vllm-gpu"),
    ):
        with pytest.raises(pw.PlanError, match=says):
            pw.quantize_(model, config, for_=engine)
        with pytest.raises(pw.PlanError, match=says):
            pw.quantize_(model, config, for_=engine, dry_run=True)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(pw.PlanError, match=r"need multiples of 32 inputs and outputs, not \[36, 64\]"):
        pw.quantize_(nn.Sequential(nn.Linear(64, 36)), by_name("w4a16", 32), for_="vllm")


def test_parts_of_a_fused_layer_have_one_scheme() -> None:
    small = by_name("w4a16", 32)
    mixed = pw.FqnToConfig({"k_proj": "w8a8", "_default": small})
    with pytest.raises(
        pw.PlanError, match=r"q_proj \(int4.*\) and k_proj \(int8.*computes both as one layer, qkv_proj"
    ):
        pw.quantize_(Block(), mixed, for_="vllm")
    with pytest.raises(pw.PlanError, match=r"and v_proj \(float\): .*give them the same config"):
        pw.quantize_(Block(), small, skip=["v_proj"], for_="vllm")
    pw.quantize_(Block(), mixed, for_="transformers")
    pw.quantize_(Block(), pw.FqnToConfig({"down_proj": "w8a8", "_default": small}), for_="vllm")


def test_groups_of_fused_layers() -> None:
    names = [f"m.0.a.{p}_proj" for p in "qkvo"] + [f"m.0.e.experts.{i}.up_proj" for i in (0, 1)] + ["gate_proj", "up"]
    assert fused_groups(names) == {"m.0.a.qkv_proj": names[:3], "m.0.e.experts": names[4:6]}
    assert fused_groups(names, {"x": ("o_proj", "q_proj")}, experts=False) == {
        "m.0.a.x": ["m.0.a.q_proj", "m.0.a.o_proj"]
    }
    assert check_fused("transformers", dict.fromkeys(names)) == ""


def test_an_allocation_gives_a_group_one_choice() -> None:
    def options(*losses: float) -> list[Option]:
        return [Option(None, str(i), 10 * (i + 1), loss, None) for i, loss in enumerate(losses)]

    table = {"a": options(5, 0), "b": options(1, 0), "c": options(3, 0)}
    assert allocate(table, 40) == {"a": 1, "b": 0, "c": 0}
    assert allocate(table, 50) == {"a": 1, "b": 0, "c": 1}
    assert allocate(table, 50, [["b", "c"]]) == {"a": 1, "b": 0, "c": 0}
    assert allocate(table, 50, [["a", "c"]]) == {"a": 1, "b": 0, "c": 1}
    assert merge(table, [["b", "c", "absent"]])[1] == {"a": ["a"], "b": ["b", "c"]}
    with pytest.raises(pw.PlanError, match="the candidates need 30"):
        allocate(table, 20, [["b", "c"]])


def test_search_obeys_the_engine() -> None:
    torch.manual_seed(0)
    model = Block(128)
    data = [torch.randn(16, 128) for _ in range(4)]
    found = pw.search(model, data, "4.9 bpw", for_="vllm", metric="error", algorithm="nearest")
    chosen = {str(found.config.fqn_to_config[f"{p}_proj.weight"]) for p in "qkv"}
    assert len(chosen) == 1
    assert pw.quantize_(model, found.config, for_="vllm").quantized
    assert found.within("8.3 bpw").fused == found.fused == (("q_proj.weight", "k_proj.weight", "v_proj.weight"),)
    with pytest.raises(pw.PlanError, match=r"does not read int4.*offsets"):
        pw.search(Block(128), data, "5 bpw", for_="vllm", candidates=["int4"], metric="error")
    with pytest.raises(pw.PlanError, match="no searched layer is named 'x_proj'"):
        pw.search(Block(128), data, "5 bpw", fused=[("x_proj",)], metric="error", algorithm="nearest")


def test_refusals_name_configs_or_none() -> None:
    for row in ROWS:
        for found in row.engines.values():
            assert not isinstance(found, Refuses) or found.nearest in CONFIGS
