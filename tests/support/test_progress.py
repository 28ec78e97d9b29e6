"""Progress bars: in a terminal (a pseudo-terminal of a real process), in pipes, in notebooks, nested, in threads."""

import os
import re
import sys
import threading
import types

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.support import progress
from pennyweight.support.progress import step
from tests import forked

pty = pytest.importorskip("pty")  # not on Windows

QUANTIZE = """
import torch, pennyweight as pw
from pennyweight.support import progress
progress.DELAY = {delay}
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
data = [torch.randn(16, 64) for _ in range(3)]
{code}
print("end of stdout")
"""
GPTQ = 'pw.quantize_(model, "int4", calibration=data, algorithm="gptq"{how})'


def in_terminal(code: str, *, delay: float = 0.0, stdout: int | None = None, **env: str) -> tuple[int, str]:
    """(exit status, what the terminal got) of a program whose stderr is a terminal; its stdout too unless given."""
    main, child = pty.openpty()
    with forked.start(
        ["-c", QUANTIZE.format(delay=delay, code=code)],
        stdin=child, stdout=child if stdout is None else stdout, stderr=child,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **env},
    ) as process:  # fmt: skip
        os.close(child)
        data = b""
        while True:
            try:
                chunk = os.read(main, 1 << 16)
            except OSError:  # the terminal's other end is closed
                break
            if not chunk:
                break
            data += chunk
    os.close(main)
    return process.returncode, data.decode()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def is_erased(text: str) -> bool:
    """Whether the cursor is visible again and the line of the bar was cleared last."""
    return text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l") and "\x1b[2K" in text[text.rindex("\x1b[?25h") :]


def test_a_terminal_gets_one_bar_which_is_erased():
    status, text = in_terminal(GPTQ.format(how=""))
    assert status == 0
    assert "quantize_ · collecting statistics" in plain(text)
    assert re.search(r"quantize_ ━+.* [1-8]/8 .*[0-7]\.weight", plain(text))
    assert text.count("\x1b[?25l") == 1  # one bar, of the outermost work
    assert is_erased(text)
    assert text.rstrip().endswith("end of stdout")


def test_a_terminal_gets_none_if_not_wanted_or_not_needed():
    code = f"{GPTQ.format(how=', progress=False')}\nprogress.DELAY = 60.0\n{GPTQ.format(how='')}"
    status, text = in_terminal(code)
    assert (status, text.strip()) == (0, "end of stdout")


@pytest.mark.parametrize(
    ("env", "wanted", "shown"),
    [
        ({}, None, True),
        ({"PENNYWEIGHT_PROGRESS": "0"}, None, False),
        ({"PENNYWEIGHT_PROGRESS": "0"}, True, True),
        ({"RANK": "0"}, None, True),
        ({"RANK": "1"}, None, False),
        ({"TERM": "dumb"}, None, False),
    ],
)
def test_when_a_terminal_gets_one(monkeypatch, env, wanted, shown):
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert (progress._display(wanted) is progress._Terminal) == shown


def test_an_exception_and_ctrl_c_leave_the_terminal_clean():
    failing = "with progress.step('work') as told:\n"
    failing += "    told(1, 2, 'a layer')\n    told(2, 2, 'another')\n    {error}"
    for error in ("raise ValueError('wrong')", "raise KeyboardInterrupt"):
        status, text = in_terminal(failing.format(error=error))
        assert status != 0
        assert is_erased(text)
        assert "Traceback" in text[text.rindex("\x1b[?25h") :]


def test_what_is_printed_to_a_pipe_stays_in_it(tmp_path):
    with open(tmp_path / "out", "wb") as out:
        code = "with progress.step('work') as told:\n    told(1, 2, '')\n    print('a line')\n    told(2, 2, '')"
        status, text = in_terminal(code, stdout=out.fileno())
    assert status == 0
    assert (tmp_path / "out").read_text() == "a line\nend of stdout\n"
    assert "a line" not in text


@pytest.mark.parametrize(("env", "shown"), [({}, False), ({"PENNYWEIGHT_PROGRESS": "1"}, True)])
def test_a_pipe_gets_none_unless_asked_for(env, shown):
    code = QUANTIZE.format(delay=0.0, code=GPTQ.format(how=""))
    run = forked.run(["-W", "error", "-c", code], check=True, env={**os.environ, **env})
    assert run.stdout == "end of stdout\n"
    assert bool(run.stderr) == shown == ("quantize_" in run.stderr)


# -- in this process, whose stderr is not a terminal -------------------------------------------------------------------


class Drawn:
    """A display that records what it is asked to draw."""

    from_thread = False
    log: list

    def __init__(self) -> None:
        self.log.append("new")

    def draw(self, name, step, seconds) -> None:
        self.log.append((name, step.done, step.total, step.item))

    def erase(self) -> None:
        self.log.append("erased")


@pytest.fixture
def drawn(monkeypatch):
    Drawn.log = []
    monkeypatch.setattr(progress, "_display", lambda wanted: Drawn)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    return Drawn.log


def test_nested_work_has_the_same_bar(drawn):
    with step("outer") as told:
        told(1, 4, "a")
        with step("inner") as inner:
            inner(2, 3, "b")
        told(2, 4, "c")
    assert drawn == [
        "new", ("outer", 1, 4, "a"), ("outer · inner", 0, None, ""), ("outer · inner", 2, 3, "b"), ("outer", 2, 4, "c"),
        "erased",
    ]  # fmt: skip


def test_the_callback_of_a_bar_passed_on_is_work_within_it(drawn):
    with step("command") as told, step("quantize_", told) as inner:
        inner(1, 2, "x")
    assert ("command · quantize_", 1, 2, "x") in drawn
    assert drawn.count("new") == 1


def test_no_bar_before_the_delay(drawn):
    with step("short", delay=60) as told:
        told(1, 2, "x")
    assert drawn == []


def test_a_callback_is_called_instead_of_a_bar(drawn):
    seen = []
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    data = [torch.randn(16, 64)]
    pw.quantize_(model, "int8", calibration=data, algorithm="gptq", progress=lambda *args: seen.append(args))
    assert seen == [(1, 2, "0.weight"), (2, 2, "1.weight")]
    assert drawn == []


def test_false_hides_nested_work_too(drawn):
    with step("outer", False), step("inner") as told:
        told(1, 1, "x")
    assert drawn == []


def test_other_threads_have_no_second_bar(drawn):
    def work() -> None:
        with step("thread") as told:
            told(1, 1, "x")

    with step("main") as told:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        told(1, 1, "y")
    assert drawn == ["new", ("main", 1, 1, "y"), "erased"]
    with step("next") as told:  # the first one has given its place back
        told(1, 1, "z")
    assert drawn[3:] == ["new", ("next", 1, 1, "z"), "erased"]


def test_a_wrong_value_is_refused():
    with pytest.raises(TypeError, match=r"progress must be a function \(done, total, name\), True or False"):
        pw.quantize_(nn.Sequential(nn.Linear(64, 64)), "int8", progress="yes")


def every_function(model, calibrated, folder, told):
    """Every function that takes ``progress``, once."""
    exact = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    exact.load_state_dict(model.state_dict())
    small = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    small.load_state_dict(model.state_dict())
    yield "quantize_", pw.quantize_(small, "int8", progress=told)
    yield "calibrate", pw.calibrate(model, calibrated, pw.Int8StaticActivationInt8WeightConfig, progress=told)
    yield "search", pw.search(model, calibrated, "4.5 bpw", progress=told)
    yield "recommend", pw.recommend(model, calibrated[0], candidates=["int8"], seconds=0.01, progress=told)
    yield "improve", pw.algorithms.improve(small, exact, calibrated, progress=told)
    yield "sparsify_", pw.sparsify_(exact, "magnitude", progress=told)
    yield "save", pw.save(model, folder / "float", progress=told)
    yield "load", pw.load(folder / "float", nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), progress=told)
    yield "quantize_checkpoint", pw.quantize_checkpoint(folder / "float", folder / "int8", "int8", progress=told)
    yield "convert", pw.convert(folder / "int8", folder / "back", to="compressed-tensors", progress=told)
    yield "golden", pw.report.golden(model, calibrated, progress=told)
    yield "compare", pw.compare(model, small, calibrated, progress=told)
    yield "verify", pw.report.verify(model, pw.report.golden(model, calibrated, progress=False), progress=told)


def test_every_long_function_reports_its_progress(tmp_path, drawn):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    data = [torch.randn(16, 64) for _ in range(4)]
    calls: list = []
    names = []
    for name, _ in every_function(model, data, tmp_path, lambda *args: calls.append(args)):
        assert calls, name
        assert all(0 <= done <= total for done, total, _ in calls), name
        calls.clear()
        names.append(name)
    assert len(names) == 13
    assert drawn == []
    for name, _ in every_function(model, data, tmp_path / "bars", None):
        outer = {entry[0].split(" · ")[0] for entry in drawn if isinstance(entry, tuple)}
        assert outer == {name}
        assert drawn.count("new") == drawn.count("erased") == 1
        drawn.clear()


def test_a_notebook_gets_html_that_is_replaced(monkeypatch):
    shown: list[str] = []

    class Handle:
        def update(self, html) -> None:
            shown.append(html)

    display = types.ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda html, display_id: Handle()
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    with step("work", delay=0.0) as told:
        told(1, 2, "<layer>")
        told(2, 2, "last")
    assert shown[0] == '<progress value="1" max="2"></progress> <small>work 1/2 0 s &lt;layer&gt;</small>'
    assert "work 2/2" in shown[1]
    assert shown[-1] == ""
