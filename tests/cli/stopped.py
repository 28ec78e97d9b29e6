"""Runs commands in processes of their own and stops each at a chosen moment. A program, started by test_interrupts.py:

    python -m tests.cli.stopped JOBS.json

A job has ``arguments`` of the command, ``stdout`` and ``stderr`` (files), ``within``: the folder whose changes count as
moments; and optionally ``signals``: pairs of a moment and a signal that the process sends itself then;
``max_file_bytes``: the largest file that may be written, so that writing fails as on a full disk; ``closed``: nobody
reads stdout. Prints the exit status and the number of moments of each job as JSON lines.

A moment is an event of Python's audit hooks: a file of the folder is opened for writing, renamed or removed, or a
connection is made. Jobs are forked from one process, because importing takes longer than most of them. That process
imports torch, and after the first job what this one imported.
"""

import atexit
import gc
import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

CHANGES = {"os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.truncate": 0}


def main(jobs: list[dict[str, Any]]) -> None:
    import_module("pennyweight.startup")
    for number, job in enumerate(jobs):
        gc.freeze()  # a child that collects garbage at its end would copy all that was imported
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            run(job, write)
        os.close(write)
        with os.fdopen(read) as told:
            moments, _, modules = told.read().partition(" ")
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([status, len(moments)]), flush=True)
        for name in modules.split() if number == 0 else []:
            with suppress(Exception):  # __main__, and modules that cannot be imported by their name
                import_module(name)


def run(job: dict[str, Any], told: int) -> None:
    """The child: redirects its streams, sets the hook, and ends as the command does."""
    for number, file in ((1, job["stdout"]), (2, job["stderr"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if job.get("closed"):
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    if "max_file_bytes" in job:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_file_bytes"],) * 2)
    signals = {int(moment): number for moment, number in job.get("signals", [])}
    within, done = str(Path(job["within"]).resolve()), 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done
        if event == "open":
            path, _, flags = arguments
            counts = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) and not isinstance(path, int)
        elif event in CHANGES:
            path, counts = arguments[CHANGES[event]], True
        else:
            path, counts = within, event == "socket.connect"
        if not counts or not os.path.realpath(os.fsdecode(path)).startswith(within):
            return
        done += 1
        os.write(told, b".")
        if done in signals:
            os.kill(os.getpid(), signals[done])

    from pennyweight.cli import main as command

    if not job.get("signals"):
        atexit.register(lambda: os.write(told, f" {' '.join(sys.modules)}".encode()))
    sys.argv = ["pennyweight", *job["arguments"]]
    sys.addaudithook(hook)
    command()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
