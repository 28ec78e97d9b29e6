"""Every Python block of docs/integrations.md runs, one after another, on small models."""

import re
from pathlib import Path
from typing import Any

import pytest

import pennyweight as pw
from tests.integrations.small import IDS, float_folder

pytest.importorskip("diffusers")

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    from tests.integrations.test_diffusers import unet
    from tests.integrations.test_sentence_transformers import encoder_folder, sentences

    sentences(encoder_folder(tmp_path / "encoder")).save(str(tmp_path / "sentences"), create_model_card=False)
    unet().save_pretrained(tmp_path / "unet")
    names: dict[str, Any] = {
        "folder": str(float_folder(tmp_path / "float")),
        "out": str(tmp_path / "out"),
        "ids": IDS,
        "sentence_folder": str(tmp_path / "sentences"),
        "unet_folder": str(tmp_path / "unet"),
    }
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 14
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["cache"].layers[0].past_keys.shape[2] == 32
    assert names["loss"].isfinite()
    assert len(names["report"].rows) == 4
    assert not any(isinstance(p, pw.AffineQuantizedTensor) for p in names["plain"].parameters())


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target
