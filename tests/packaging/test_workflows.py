"""The workflows: what they call exists, and the torch releases they test are those of the documentation."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps(path: Path) -> list[dict]:
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_rights_are_the_least(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    checkouts = [s for s in steps(path) if s.get("uses", "").startswith("actions/checkout")]
    assert all(s["with"]["persist-credentials"] is False for s in checkouts)


@pytest.mark.parametrize("path", [p for p in WORKFLOWS if p.stem != "docs"], ids=lambda p: p.stem)
def test_called_scripts_exist(path: Path) -> None:
    called = {name for step in steps(path) for name in re.findall(r"scripts/[\w.-]+", step.get("run", ""))}
    assert all((ROOT / name).is_file() for name in called), called


def test_the_bug_report_asks_for_doctor() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text("utf-8"))
    asked = [field["attributes"]["label"] for field in form["body"] if field.get("validations", {}).get("required")]
    assert any("pennyweight doctor" in label for label in asked)
