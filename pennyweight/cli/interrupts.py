"""Ctrl-C and SIGTERM: the first unwinds the command, so that temporary files are removed; a second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Handled wherever Ctrl-C is."""


@contextmanager
def unwinding(*, term: bool = True) -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT and, with ``term``, Terminated at SIGTERM. A second signal has the system's
    default action, which ends the process: cleaning up may take long, and Python would print a traceback.

    Does nothing outside of the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def stop(number: int, frame: Any) -> None:
        nonlocal came
        came = True
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    # a signal that the parent made the process ignore (nohup, a background job of sh) stays ignored
    wanted = (signal.SIGINT, signal.SIGTERM) if term else (signal.SIGINT,)
    before = {each: signal.getsignal(each) for each in wanted}
    before = {each: handler for each, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for each in before:
        signal.signal(each, stop)
    try:
        yield
    finally:
        if not came:  # else the default action stays, for a signal that comes while Python shuts down
            for each, handler in before.items():
                signal.signal(each, handler)


@contextmanager
def stop_request(hint: str = "") -> Iterator[Callable[[], bool]]:
    """Ctrl-C is a request, which the yielded function tells; a second one raises KeyboardInterrupt. The first writes
    ``hint`` to stderr. Outside of the main thread, and if the parent made the process ignore SIGINT, there is none."""
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True
        os.write(2, hint.encode())  # not through sys.stderr: its lock may be held where the signal arrives

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
