"""Programs in forked processes (forked.py) get and give what they would as processes of the interpreter."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are processes of the interpreter")

SEEN = """
import json, os, signal, sys, threading, warnings
seen = {
    "argv": sys.argv, "path": [os.path.abspath(p) for p in sys.path[:2]], "name": __name__, "cwd": os.getcwd(),
    "stdin": sys.stdin.read(), "terminals": [os.isatty(n) for n in range(3)], "threads": threading.active_count(),
    "set": os.environ.get("PENNYWEIGHT_SEEN"), "unset": "HOME" in os.environ,
    "main": vars(sys.modules["__main__"]) is globals(), "encoding": sys.stdout.encoding,
    "options": sys.warnoptions, "strict": warnings.filters[0][0], "open": sorted(os.listdir("/proc/self/fd"))[:3],
    "signals": [int(s) for s in signal.Signals if signal.getsignal(s) is signal.SIG_IGN],
}
print(json.dumps(seen))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


def test_a_signal_that_a_library_has_reset_is_not_ignored() -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        assert int(signal.SIGQUIT) in forked.ignored_signals()
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGQUIT, None)  # SIG_DFL
        assert signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN
        assert int(signal.SIGQUIT) not in forked.ignored_signals()
    finally:
        signal.signal(signal.SIGQUIT, before)


def test_signals_that_the_interpreter_ignores_itself() -> None:
    before = signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        test = "import signal; print(signal.getsignal(signal.SIGXFSZ).name)"
        real = subprocess.run([sys.executable, "-c", test], capture_output=True, text=True, check=True)
        assert forked.run(["-c", test]).stdout == real.stdout == "SIG_IGN\n"
    finally:
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_what_a_program_sees_and_says(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_servers", {})  # another test may have changed what a process inherits since it began
    (tmp_path / "program.py").write_text(SEEN)
    first = {"-c": ["-c", SEEN], "-m": ["-m", "program"], "file": [str(tmp_path / "program.py")]}[kind]
    env = {n: v for n, v in os.environ.items() if n != "HOME"}
    env |= {"PENNYWEIGHT_SEEN": "1", "PYTHONPATH": str(tmp_path / "more")}
    command = ["-W", "error", *first, "one", "two"]
    real = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, input="given", capture_output=True, text=True, check=False
    )
    done = forked.run(command, cwd=tmp_path, env=env, input="given")
    assert (done.returncode, done.stderr) == (real.returncode, real.stderr)
    assert done.returncode == 3
    seen, expected = json.loads(done.stdout), json.loads(real.stdout)
    assert {name: (seen[name], value) for name, value in expected.items() if seen[name] != value} == {}
    assert seen["stdin"] == "given"


@pytest.mark.parametrize(
    ("code", "status", "end"),
    [
        ("", 0, ""),
        ("import sys; sys.exit('said')", 1, "said\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import atexit, sys; atexit.register(print, 'at the end', file=sys.stderr)", 0, "at the end\n"),
        ("import threading, time, sys\n"
         "threading.Thread(target=lambda: (time.sleep(0.2), print('joined', file=sys.stderr))).start()", 0, "joined\n"),
    ],
)  # fmt: skip
def test_how_a_program_ends(code: str, status: int, end: str) -> None:
    done = forked.run(["-c", code])
    assert done.returncode == status
    assert done.stderr.endswith(end)
    assert bool(done.stderr) == bool(end)


def test_a_program_that_runs_beside_the_test() -> None:
    code = "import sys, time\nfor line in sys.stdin: print(line.upper(), end='', flush=True)\ntime.sleep(60)"
    with forked.start(["-c", code], stdin=forked.PIPE, stdout=forked.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print("said", file=process.stdin, flush=True)
        assert process.stdout.readline() == "SAID\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == process.returncode == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(["-c", "import time; time.sleep(60)"], timeout=0.1)


def test_programs_do_not_see_each_other() -> None:
    code = "import torch; torch.set_num_threads(2); print(torch.ones(1 << 20).add(1).sum(), hasattr(torch, 'new'))"
    assert [forked.run(["-c", f"{code}; torch.new = 1"]).stdout for _ in range(2)] == ["tensor(2097152.) False\n"] * 2


def test_variables_that_need_another_server() -> None:
    env = {"OMP_NUM_THREADS": "2", "TRITON_INTERPRET": "1", "PENNYWEIGHT_CHECK": "1", "PYTHONPATH": "folder"}
    assert forked.read_early(env, ("torch",)) == {"OMP_NUM_THREADS": "2"}
    assert forked.read_early(env, ("torch", "triton")) == {"OMP_NUM_THREADS": "2", "TRITON_INTERPRET": "1"}
