"""For every test: fixed seeds, and memory that was never written is made visible."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.utils._device import _device_constructors

import pennyweight

# Terminals and pytest-xdist set these, and rich takes the width of tables from them; the tests expect its default.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
ENVIRONMENT = dict(os.environ)
# A shell lets what it runs in the background ignore Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PACKAGE = str(Path(pennyweight.__file__).parent)
SENTINEL = 85  # 0b01010101: fits every integer type, and is neither a likely code nor a likely zero point

# The same examples on every run, and no limit on the time of one: a loaded machine is not a failure.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

# torch.compile knows torch's functions by identity and looks them up once: let it do so before they are replaced.
get_torch_obj_rule_map()
# So does `with torch.device("meta")`, which would not know `empty` again.
_device_constructors()


class LogRecords(logging.Handler):
    """The log records of a test of level WARNING and above; torch.compile writes thousands of DEBUG records. It
    replaces pytest's logging plugin, which adds handlers to each logger that does not propagate (torch has fifty) and
    removes them again, six times a test: 3 ms of the 5 ms that an empty test takes. No test can use ``caplog``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s:%(filename)s:%(lineno)d %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


LOG_RECORDS = LogRecords()
logging.getLogger().addHandler(LOG_RECORDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: "pytest.CallInfo[None]") -> Iterator[None]:
    report: Any = yield
    if report.failed and LOG_RECORDS.lines:
        report.sections.append((f"Captured log {call.when}", "\n".join(LOG_RECORDS.lines)))
    LOG_RECORDS.lines.clear()
    return report


def pytest_collection_finish() -> None:
    restore_environment(ENVIRONMENT)  # modules that are imported to find the tests may be programs, which set variables
    # Modules and tests stay: every full collection would read them, for a second and more. A forked process that did so
    # would have a copy of them all.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Variables set by a test, by a page that it runs or by an import do not reach the processes of later tests."""
    before = dict(os.environ)
    yield
    restore_environment(before)


def restore_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() | wanted.keys():
        if name.startswith("PYTEST"):  # pytest and pytest-xdist keep these
            continue
        if name not in wanted:
            del os.environ[name]
        elif os.environ.get(name) != wanted[name]:
            os.environ[name] = wanted[name]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A local server that speaks the Hub's protocol, huggingface_hub set to it with an empty cache, and its token."""
    from huggingface_hub import constants

    from tests.io.hub_server import TOKEN, serving

    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # for processes that the test starts
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--each-value", action="store_true",
        help="of the combinations of a parametrized test, run as few as have each value of each parameter; leave out "
        "what is marked as exhaustive, and what slow_tests.txt lists",
    )  # fmt: skip
    parser.addoption("--slow", action="store_true", help="with --each-value: run what slow_tests.txt lists, too")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """With --each-value leave combinations out before pytest makes an item of each, which takes longer than to choose.
    A slow or exhaustive test keeps one, to be left out below: pytest makes an item without parameters of none."""
    yield
    if metafunc.config.getoption("--each-value"):
        quick = [c for c in metafunc._calls if all(mark.name != "exhaustive" for mark in c.marks)]
        metafunc._calls = fewest(quick) or metafunc._calls[:1]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("PENNYWEIGHT_SWEEP") != "1":
        skip = pytest.mark.skip(reason="a sweep of about an hour: PENNYWEIGHT_SWEEP=1 scripts/test -m sweep")
        for item in items:
            if "sweep" in item.keywords:
                item.add_marker(skip)
    if config.getoption("--each-value"):
        slow = set() if config.getoption("--slow") else slow_tests()
        out = {item for item in items if "exhaustive" in item.keywords or item.nodeid.partition("[")[0] in slow}
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


def fewest(combinations: list[Any]) -> list[Any]:
    """Combinations that have each value of each parameter: of two times three values three. The first of several."""
    values = [{(name, _identity(value)) for name, value in c.params.items()} for c in combinations]
    left = set().union(*values)
    found = []
    while left:
        found.append(max(range(len(values)), key=lambda k: len(values[k] & left)))
        left -= values[found[-1]]
    return [combinations[k] for k in sorted(found)]


def slow_tests() -> set[str]:
    """The tests that slow_tests.txt lists."""
    lines = (Path(__file__).parent / "tests" / "slow_tests.txt").read_text("utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def _identity(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else id(value)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for each kind of GPU, 1 ms


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pennyweight's own Python files get from `empty` holds NaN (85 for integers) instead of what lay there.

    The callers look the functions up on `torch` when they call, so `from torch import empty` would escape.
    """
    for name in ("empty", "empty_like", "empty_strided"):
        function = getattr(torch, name)
        monkeypatch.setattr(torch, name, poisoned(function, traced=function))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty, traced=traced_new_empty))


def poisoned(allocate: Callable[..., torch.Tensor], traced: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`allocate`, then fill. `traced` takes its place, unfilled, under torch.compile."""

    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return traced(*args, **kwargs)
        out = allocate(*args, **kwargs)
        if sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
            fill(out)
        return out

    return wrapper


def traced_new_empty(tensor: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
    # torch.compile traces the method by name only, and that name is ours now; the op behind it has no loose sizes
    if len(size) == 1 and isinstance(size[0], tuple | list):
        size = size[0]
    return torch.ops.aten.new_empty(tensor, kwargs.pop("size", size), **kwargs)


def fill(tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return  # a subclass's parts were poisoned when they were allocated
    plain = tensor.detach()
    if plain.dtype.itemsize == 1 and plain.dtype != torch.bool:
        # float8 and float4 have no fill_ everywhere; all ones is NaN in e4m3fn, e5m2 and e8m0
        plain.view(torch.uint8).fill_(0xFF if plain.is_floating_point() else SENTINEL)
    else:
        plain.fill_(float("nan") if plain.is_floating_point() or plain.is_complex() else SENTINEL)
