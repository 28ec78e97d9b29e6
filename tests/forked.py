"""Python programs in new processes, for tests that are not about how a process starts: :func:`run`, :func:`start`.

The import of torch takes 3 to 5 s of a processor, and the tests run a hundred programs. A server that has imported it,
and has run nothing else, forks a process for each program. It is a fresh process itself: the tests' own has other
modules, patches and threads. Each worker of pytest starts it when it first needs it.

A program gets its arguments, environment, working directory, streams and signals as from the interpreter, and ends as
the interpreter does. Only what is decided before its first line is the server's: the libraries in `sys.modules`, flags
such as ``-X``, and variables that the libraries read when they are imported, for which there are servers of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE
# The second is what torch imports itself when it meets the first quantized weight, 1 s
TORCH = ("torch", "torch.distributed.tensor")
# Variables that are read when a process starts, or when a library is imported
READ_AT_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "ONEDNN_", "DNNL_", "TORCH")
READ_AT_IMPORT = {"triton": ("TRITON_",)}
SET_BY_US = ("PYTHONPATH", "PYTHONWARNINGS")  # for each program, not for the server


def run(
    arguments: Sequence[object], *, modules: tuple[str, ...] = TORCH, input: str = "", check: bool = False,
    env: Mapping[str, str] | None = None, cwd: str | os.PathLike[str] | None = None, timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)``."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(input.encode())
        given.seek(0)
        process = start(arguments, modules=modules, stdin=given, stdout=out, stderr=err, env=env, cwd=cwd)
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            raise
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    done = subprocess.CompletedProcess(list(map(str, arguments)), code, *printed)
    if check and code:
        raise AssertionError(f"{arguments} ended with {code}:\n{done.stderr}")
    return done


def start(
    arguments: Sequence[object], *, modules: tuple[str, ...] = TORCH, stdin: Any = DEVNULL, stdout: Any = None,
    stderr: Any = None, env: Mapping[str, str] | None = None, cwd: str | os.PathLike[str] | None = None,
) -> Process | subprocess.Popen[str]:  # fmt: skip
    """As ``subprocess.Popen([sys.executable, *arguments], text=True)``, with less to do with the process."""
    variables = dict(os.environ if env is None else env)
    words = [os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in arguments]
    if sys.platform != "linux":  # elsewhere libraries may have threads before they have run anything
        return subprocess.Popen(
            [sys.executable, *words], stdin=stdin, stdout=stdout, stderr=stderr, env=variables, cwd=cwd, text=True
        )
    fixed = read_early(variables, modules)
    key = (modules, tuple(sorted(fixed.items())))
    server = _servers.get(key)
    if server is None:
        # numpy's library starts threads when it is loaded, and a fork has only one of them
        others = {n: v for n, v in variables.items() if n not in SET_BY_US} | {"OPENBLAS_NUM_THREADS": "1"}
        server = _servers[key] = Server(modules, others)
    ignored = ignored_signals()
    request = {"arguments": words, "env": variables, "cwd": os.fspath(cwd or os.getcwd()), "ignored": ignored}
    return Process(server, request, stdin, stdout, stderr)


def ignored_signals() -> list[int]:
    """Those that a Python program started now would ignore. What the kernel ignores for this process survives exec:
    libraries change it, and signal.getsignal says what Python has set. The interpreter ignores two at its start."""
    line = next(x for x in Path("/proc/self/status").read_text("utf-8").splitlines() if x.startswith("SigIgn:"))
    mask = int(line.split()[1], 16)
    return [int(s) for s in signal.Signals if mask >> (s - 1) & 1 or s in (signal.SIGPIPE, signal.SIGXFSZ)]


def read_early(variables: Mapping[str, str], modules: tuple[str, ...]) -> dict[str, str]:
    """Those variables that a server must have been started with."""
    prefixes = (*READ_AT_START, *(p for name in modules for p in READ_AT_IMPORT.get(name, ())))
    return {n: v for n, v in variables.items() if n.startswith(prefixes) and n not in SET_BY_US}


class Server:
    """The client's end of the process that forks."""

    def __init__(self, modules: tuple[str, ...], env: dict[str, str]) -> None:
        self.control, theirs = socket.socketpair()
        command = [sys.executable, __file__, *modules]
        with theirs:
            self.process = subprocess.Popen(command, stdin=theirs, env=env)
        atexit.register(self.end)

    def end(self) -> None:
        self.control.close()
        self.process.wait()

    def send(self, request: dict[str, Any], files: list[int]) -> None:
        body = json.dumps(request).encode()
        socket.send_fds(self.control, [len(body).to_bytes(8, "little")], files)
        self.control.sendall(body)


_servers: dict[Any, Server] = {}


class Process:
    """A program that a server has forked; what tests use of :class:`subprocess.Popen`."""

    def __init__(self, server: Server, request: dict[str, Any], stdin: Any, stdout: Any, stderr: Any) -> None:
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        answers, answer = os.pipe()
        files, opened = [], [answer]
        for number, (name, wanted) in enumerate({"stdin": stdin, "stdout": stdout, "stderr": stderr}.items()):
            if wanted == PIPE:
                read, write = os.pipe()
                theirs, ours = (read, write) if number == 0 else (write, read)
                setattr(self, name, os.fdopen(ours, "w" if number == 0 else "r", encoding="utf-8"))
                opened.append(theirs)
            elif wanted == DEVNULL:
                opened.append(theirs := os.open(os.devnull, os.O_RDWR))
            elif wanted == subprocess.STDOUT:
                theirs = files[1]
            else:
                theirs = number if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno()
            files.append(theirs)
        server.send(request, [*files, answer])
        for file in opened:
            os.close(file)
        self.answers = os.fdopen(answers, "rb", buffering=0)
        line = self.answers.readline()
        if not line:
            self.answers.close()
            raise RuntimeError("the server of forked processes has ended; it says why on stderr")
        self.pid = int(line)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.answers], [], [], 0)[0]:
            self.returncode = int(self.answers.readline())
            self.answers.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self.answers], [], [], timeout)[0]:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()


# -- the server --------------------------------------------------------------------------------------------------------


def serve() -> dict[str, Any]:
    """Forks a process per request from stdin, until that is closed; returns the request in each of them."""
    control = socket.socket(fileno=0)
    while True:
        head, files, _, _ = socket.recv_fds(control, 8, 4)
        if not head:
            while _reaped(0):  # so that their time counts as the server's
                pass
            os._exit(0)
        body = b""
        while len(body) < int.from_bytes(head, "little"):
            body += control.recv(1 << 20)
        while _reaped(os.WNOHANG):
            pass
        if os.fork() == 0:
            control.detach()
            if _is_program(files):
                return dict(json.loads(body))
        for file in files:
            os.close(file)


def _reaped(options: int) -> bool:
    try:
        return os.waitpid(-1, options)[0] != 0
    except ChildProcessError:
        return False


def _is_program(files: list[int]) -> bool:
    """In the first fork, which waits for the second and tells the tests its number and how it ended; True in that."""
    *streams, answer = files
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        # Below the places of the streams there may be one of the files; none of them is, as stdin to stderr are open.
        for number, file in enumerate(streams):
            os.dup2(file, number)
            os.close(file)
        return True
    for file in streams:
        os.close(file)
    os.close(0)
    os.write(answer, b"%d\n" % pid)
    os.write(answer, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def execute(request: dict[str, Any], path: list[str]) -> None:
    """Does what the interpreter does with its arguments: ``[-W OPTION] -c CODE | -m MODULE | FILE``."""
    env, words = request["env"], list(request["arguments"])
    os.environ.clear()
    os.environ.update(env)
    os.chdir(request["cwd"])
    for number in signal.Signals:
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif number is signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    assert sys.stdout is not None
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    options = [w for w in env.get("PYTHONWARNINGS", "").split(",") if w]
    while words[0] == "-W":
        options.append(words[1])
        del words[:2]
    sys.warnoptions += options
    warnings._processoptions(options)  # type: ignore[attr-defined]
    first, kind = words.pop(0), "file"
    if first in ("-c", "-m"):
        kind, first = first, words.pop(0)
    folder = {"-c": "", "-m": os.getcwd(), "file": os.path.dirname(os.path.abspath(first))}[kind]
    sys.path[:] = [folder, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv[:] = ["-c" if kind == "-c" else first, *words]
    if kind == "-c":
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(first, "<string>", "exec"), vars(main))
    elif kind == "-m":
        runpy.run_module(first, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import gc
    import importlib

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and their end ends this
    del sys.path[0]  # the folder of this file
    for _name in sys.argv[1:]:
        importlib.import_module(_name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit(f"an import of {', '.join(sys.argv[1:])} starts threads, and a fork has only one of them")
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy what it looks at
    execute(serve(), list(sys.path))
