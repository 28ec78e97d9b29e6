"""Results in the hand: short reprs, HTML for notebooks, data frames."""

import json
import sys
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.describe_spec import LIMIT
from pennyweight.planning.quantize_report import LINES, Latency, Row, relative_speed
from pennyweight.support.tables import SHOWN, html_table
from tests import forked


class Parsed(HTMLParser):
    """Tables of an HTML text: cells by row; all text; checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        if tag == "rect":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def net(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))


BATCHES = [torch.randn(16, 64) for _ in range(4)]


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(0)
    exact, small = net(), net()
    small.load_state_dict(exact.state_dict())
    report = pw.quantize_(small, pw.Int4WeightOnlyConfig(64))
    return {
        "report": report,
        "plan": pw.plan(exact, "int8"),
        "comparison": pw.compare(exact, small, BATCHES, kind="logits"),
        "search": pw.search(exact, BATCHES, "4.5 bpw", algorithm="nearest"),
        "recommendation": pw.recommend(exact, BATCHES[0], candidates=["int8"], seconds=0.01),
        "verification": pw.report.verify(small, pw.report.golden(exact, BATCHES)),
        "model": pw.explain(torch.float32, small),
        "kernels": pw.explain(torch.float32, small[0].weight),
        "tensor": small[0].weight,
        "quantized scales": pw.AffineQuantizedTensor.from_float(torch.randn(64, 256), pw.core.spec.NF4_DOUBLE),
    }


EXPECTED = {
    "report": ["parameter", "0.weight", "int4, groups of 64", "2 parameters quantized"],
    "plan": ["0.weight", "int8 per row", "2 parameters would be quantized"],
    "comparison": ["KL(float || quantized):", "0.weight", "int4, groups of 64"],
    "search": ["parameter", "0.weight", "bits per weight"],
    "recommendation": ["candidate", "Int8WeightOnlyConfig()"],
    "verification": ["verdict", "relative error", "bound"],
    "model": ["inputs in float32", "0.weight", "linear"],
    "kernels": ["kernel", "RUNS", "dequantize"],
    "tensor": ["64×64", "int4, groups of 64", "float32", "uint4[64]", "scales", "codes from"],
    "quantized scales": ["nf4, groups of 64", "scales"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_html_is_a_table_with_the_facts(results, name):
    page = Parsed(results[name]._repr_html_())
    assert {"table", "tr", "td"} <= page.tags
    assert "script" not in page.tags
    for text in EXPECTED[name]:
        assert text in page.text, text


@pytest.mark.parametrize("name", [name for name in EXPECTED if "tensor" not in name and "scales" not in name])
def test_reprs_are_short(results, name):
    text = repr(results[name])
    assert len(text.splitlines()) == 1
    assert len(text) < 400
    assert str(results[name]) != text or name == "verification"


def test_what_users_give_is_escaped():
    evil = "<script>alert('&')</script>"
    report = pw.Report(evil, [Row(evil, "Linear", (2, 2), evil, "k", 16, 4, 40.0, evil)], notes=[evil])
    html = report._repr_html_()
    assert "<script" not in html
    assert Parsed(html).text.count(evil) >= 4


def test_long_tables_are_folded():
    page = Parsed(html_table(["a"], [[str(i)] for i in range(SHOWN + 5)]))
    assert {"details", "summary"} <= page.tags
    assert "5 more rows" in page.text
    assert [page.rows[SHOWN + 1], page.rows[-1]] == [["a"], ["34"]]


def test_a_large_or_empty_tensor_is_not_unpacked():
    model = nn.Linear(1 << 14, (LIMIT >> 14) + 1, bias=False, device="meta")
    pw.quantize_(nn.Sequential(model), "int4")
    page = Parsed(model.weight._repr_html_())
    assert "codes from" not in page.text
    empty = pw.AffineQuantizedTensor.from_float(torch.empty(0, 64), pw.QuantSpec(pw.get_format("int8"), (-1,)))
    assert "0×64" in Parsed(empty._repr_html_()).text


def test_the_full_spec_is_on_demand(results):
    report = results["report"]
    assert "int4, groups of 64" in str(report)
    assert "uint4[64]" not in str(report)
    flat = report.to_string(full=True).replace("\n", " ")
    assert "uint4[64]" in flat
    assert "mid=8" in flat
    assert json.loads(report.to_json())["rows"][0]["scheme"] == "uint4[64] scale=f32 offset=f32 mid=8"
    assert "scheme_short" not in report.to_dict()["rows"][0]


def test_many_different_layers_are_cut_in_the_middle():
    rows = [Row(f"{'x' * i}.weight", "Linear", (i, 8), "int8[*]", "k", 256, 64, 40.0) for i in range(1, 200)]
    report = pw.Report("config", rows)
    text = str(report)
    assert f"… {199 - LINES + 1} lines" in text
    assert "report.to_string(full=True)" in text
    assert len(text.splitlines()) < 4 * LINES  # long names are folded
    assert f"│ {'x' * 5}.weight " in text
    assert "lines" not in report.to_string(full=True)


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.69, "1.69x faster"), (1.0, "same speed"), (1.04, "same speed"), (0.5, "2x slower")]
)
def test_speeds_in_words(ratio, text):
    assert relative_speed(ratio) == text
    assert Latency(1, 100.0 * ratio, 100.0).text == f"1 row: {text}"
    assert Latency(4, 100.0 * ratio, 100.0, (1, 3, 8, 8)).text == f"1×3×8×8: {text}"


# -- data frames -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "length", "types"),
    [
        ("report", 4, {"name": "string", "quantized": "boolean", "bytes_after": "Int64", "sqnr_db": "Float64"}),
        ("plan", 4, {"scheme": "string", "bytes_before": "Int64"}),
        ("comparison", 2, {"layer_sqnr_db": "Float64", "weights": "Int64", "scheme": "string"}),
        ("search", 10, {"chosen": "boolean", "loss": "Float64", "bytes": "Int64"}),
        ("recommendation", 2, {"fits": "boolean", "speed": "Float64", "name": "string"}),
        ("verification", 1, {"ok": "boolean", "error": "Float64", "rows": "Int64"}),
    ],
)
def test_data_frames_have_typed_columns(results, name, length, types):
    pytest.importorskip("pandas")
    frame = results[name].to_pandas()
    assert len(frame) == length
    for column, kind in types.items():
        assert str(frame[column].dtype) == kind, column


def test_a_data_frame_has_the_values_of_the_report(results):
    pytest.importorskip("pandas")
    report = results["report"]
    frame = report.to_pandas()
    assert frame["bytes_after"].sum() == report.bytes_after
    assert list(frame[frame["quantized"]]["spec"]) == [r.scheme for r in report.quantized]
    assert frame["sqnr_db"].isna().tolist() == [r.sqnr is None for r in report.rows]
    assert frame["shape"][0] == (64, 64)
    assert frame.attrs == {"config": report.config}
    timed = pw.Report("c", [Row("a", "Linear", (8, 8), "int8", "k", 256, 64, latency=(Latency(64, 4.0, 2.0),))])
    assert list(timed.to_pandas()["speed_64"]) == [2.0]
    chosen = results["search"].to_pandas().query("chosen")
    assert chosen["bytes"].sum() == results["search"].nbytes


def test_without_pandas_the_error_has_the_remedy(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas\(\) needs pandas; install it with: pip install pandas"):
        results["report"].to_pandas()


def test_reprs_need_no_optional_package():
    code = "import sys, torch, pennyweight as pw; m = torch.nn.Linear(64, 64); r = pw.quantize_(m, 'int8')\n"
    code += "repr(r), r._repr_html_(), m.weight._repr_html_(), repr(m)\n"
    code += "print(sorted({'pandas', 'rich', 'jinja2'} & set(sys.modules)))"
    run = forked.run(["-c", code], check=True)
    assert run.stdout.strip() == "[]"


def test_a_long_config_is_short_above_the_table():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    config = pw.FqnToConfig({f"{i}.weight": "int8" for i in range(8)})
    report = pw.quantize_(model, config, algorithm="nearest")
    assert str(report).splitlines()[0].strip() == "FqnToConfig(...), nearest"
    assert "7.weight" in report.to_string(full=True).partition("┏")[0]
    assert "FqnToConfig(...)" in report._repr_html_()
