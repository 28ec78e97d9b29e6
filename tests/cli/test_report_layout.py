"""The report page as people see it: colours, headings, keyboard; in a browser, if one is installed, its layout."""

import html as markup
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import pennyweight.report.page
from tests.cli.test_report import Page

STYLE = (Path(pennyweight.report.page.__file__).with_name("page.css")).read_text(encoding="utf-8")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def colours(dark: bool) -> dict[str, str]:
    """The style sheet's variables in light or dark mode."""
    light, night = re.findall(r":root \{(.*?)\}", STYLE, re.S)[:2]
    found = dict(re.findall(r"--([\w-]+): (#\w{6});", light))
    return found | dict(re.findall(r"--([\w-]+): (#\w{6});", night)) if dark else found


def luminance(colour: str) -> float:
    """WCAG's relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast(dark: bool) -> None:
    c = colours(dark)
    for text, ground in [("ink", "page"), ("ink", "card"), ("muted", "page"), ("muted", "card")]:
        assert contrast(c[text], c[ground]) >= 4.5, (text, ground)
    for grade in ("good", "fine", "watch", "bad"):
        assert contrast(c[f"on-{grade}"], c[grade]) >= 4.5, grade
    for figure in ("float", "quantized", "worst"):
        assert contrast(c[figure], c["card"]) >= 3, figure


CONES = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip


def dichromat(colour: str, kind: str) -> list[float]:
    """A colour as seen without red (protanopia), green (deuteranopia) or blue (tritanopia) cones: Machado, Oliveira and
    Fernandes 2009, severity 1, on linear RGB."""
    matrix = CONES[kind]
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    seen = [max(0.0, min(1.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in matrix]
    return [255 * (12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055) for v in seen]


@pytest.mark.parametrize("kind", ["protanopia", "deuteranopia", "tritanopia"])
@pytest.mark.parametrize("dark", [False, True])
def test_the_grades_differ_for_the_colour_blind(dark: bool, kind: str) -> None:
    seen = {g: dichromat(colours(dark)[g], kind) for g in ("good", "fine", "watch", "bad")}
    for a, b in [("good", "watch"), ("fine", "watch"), ("watch", "bad"), ("good", "bad"), ("fine", "bad")]:
        assert sum((x - y) ** 2 for x, y in zip(seen[a], seen[b], strict=True)) ** 0.5 > 40, (a, b)


# -- the markup --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A page of one quantization with many layers and long names, and one of two."""
    import torch
    import transformers
    from typer.testing import CliRunner

    from pennyweight.cli.app import app
    from tests.cli.conftest import add_tokenizer, write_text

    folder = tmp_path_factory.mktemp("layout")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "float")
    add_tokenizer(folder / "float")
    text = write_text(folder / "text.txt")
    names = ["a-quantization-with-a-very-long-name-without-spaces", "b"]
    for name, scheme in zip(names, ("8da4w", "int8"), strict=True):
        done = CliRunner().invoke(app, ["quantize", str(folder / "float"), str(folder / name), "--config", scheme])
        assert done.exit_code == 0
    out = []
    for count in (1, 2):
        path = folder / f"page{count}.html"
        words = [str(folder / n) for n in names[:count]]
        words += ["--float", str(folder / "float"), "--text", str(text), "--length", "16", "--rounds", "1"]
        done = CliRunner().invoke(app, ["report", *words, "--trials", "2", "--measure", "-o", str(path)])
        assert done.exit_code == 0, done.output
        out.append(path)
    return out


def test_headings_captions_and_keyboard(pages: list[Path]) -> None:
    for path in pages:
        page = Page(path)
        levels = [int(n) for n in re.findall(r"<h(\d)", page.source)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b <= a + 1 or (a, b) == (2, 4) for a, b in itertools.pairwise(levels))
        ids = {v for _, n, v in page.attributes if n == "id"}
        assert {v for _, n, v in page.attributes if n == "aria-labelledby"} <= ids
        assert page.source.count("<svg") == len([1 for t, n, _ in page.attributes if (t, n) == ("svg", "aria-label")])
        assert all(v for t, n, v in page.attributes if (t, n) == ("svg", "aria-label"))
        scrolls = re.findall(r'<div class="scroll"([^>]*)>', page.source)
        assert scrolls
        assert all('tabindex="0"' in rest and 'role="region"' in rest for rest in scrolls)
        assert not re.findall(r"<th(?! scope)[ >]", page.source)
        assert '<html lang="en">' in page.source


def test_without_scripts_only_sorting_is_missing(pages: list[Path]) -> None:
    for path in pages:
        page = Page(path)
        body = page.source[: page.source.index("<script>")]
        assert "<button" not in body  # the script adds them
        assert "Verdict" in body
        assert "hidden" not in re.sub(r"aria-hidden|overflow: hidden", "", body)


# -- in a browser ------------------------------------------------------------------------------------------------------

PROBE = """<body style="margin:0"><iframe id="f" style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>
<pre id="out"></pre><script>f.onload = () => {{
  const d = f.contentDocument, w = f.contentWindow.innerWidth, cut = [];
  for (const e of d.querySelectorAll("main *")) {{
    const r = e.getBoundingClientRect();
    if (!r.width || r.right <= w + 1 || e.closest("thead") || e.closest("{scrolls}")) continue;
    cut.push(e.tagName + "." + e.className);
  }}
  out.textContent = ["PROBE", w, d.documentElement.scrollWidth, d.querySelectorAll("#layers th button").length,
    cut.slice(0, 9).join(" ")].join("|") + "|END";
}}</script>"""


def probe(path: Path, width: int, tmp_path: Path, scrolls: str = ".none") -> tuple[int, int, int, str]:
    """(width, scroll width, sort buttons, elements beyond the right edge) of a page in a frame of that width."""
    page = markup.escape(path.read_text(encoding="utf-8"))
    (tmp_path / "probe.html").write_text(PROBE.format(width=width, page=page, scrolls=scrolls), encoding="utf-8")
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path / 'probe.html'}",
    ]  # fmt: skip
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r"PROBE\|(\d+)\|(\d+)\|(\d+)\|(.*?)\|END</pre>", shown)
    assert found, shown[-2000:]
    return int(found[1]), int(found[2]), int(found[3]), found[4]


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_nothing_is_cut_off_on_a_phone(pages: list[Path], tmp_path: Path) -> None:
    for path in pages:
        width, scroll, buttons, cut = probe(path, 390, tmp_path)
        assert width == 390
        assert scroll <= width
        assert cut == ""
        assert buttons > 3  # sorting works


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_only_wide_tables_scroll_on_a_desktop(pages: list[Path], tmp_path: Path) -> None:
    for path in pages:
        width, scroll, _, cut = probe(path, 1200, tmp_path, ".scroll")
        assert scroll <= width
        assert cut == ""
