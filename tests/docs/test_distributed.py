"""docs/distributed.md: its lines are one script, which runs on two ranks."""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

import pennyweight.distributed as pwd
from tests import forked

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "distributed.md"


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_the_lines_run_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    lines = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    # Without the exit of the interpreter, in which threads of torch's sometimes abort a process on a busy machine
    script.write_text("\n".join([*lines, "import os", "os._exit(0)"]))
    run = forked.run(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script], timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]


def test_every_public_name_is_on_the_page_and_links_lead_somewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in pwd.__all__ if name not in text and name != "QuantizedAllGather"] == []
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (PAGE.parent / target).exists()
