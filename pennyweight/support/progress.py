"""Progress of long work: one bar on stderr, or in a notebook, as soon as the work has taken two seconds.

Functions that take ``progress`` accept

    None       the default: a bar if stderr is a terminal, or in a notebook; nothing in logs, pipes and scripts of cron
    False      nothing
    True       as None, also where PENNYWEIGHT_PROGRESS=0 hides bars
    function   called as (done, total, name of the item that is done); no bar. total is 0 if it is not known

PENNYWEIGHT_PROGRESS=0 hides all bars, PENNYWEIGHT_PROGRESS=1 shows them also where stderr is not a terminal. Work
within other work changes the name and the count of the same bar. Of several processes started by torchrun only rank 0
shows one, and of several threads only the first. A bar is erased when its work ends, by an exception or Ctrl-C too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from . import environment

Callback = Callable[[int, int, str], None]
Progress = Callback | bool | None

DELAY = 2.0  # seconds
_REDRAW = 0.2  # seconds between two drawings in a notebook; rich limits its own


def ignore(done: int, total: int, name: str) -> None:
    """A callback that does nothing."""


@contextmanager
def step(name: str, progress: Progress = None, *, delay: float | None = None) -> Iterator[Callback]:
    """Show the work of a ``with`` block, called ``name``. Yields a callback (done, total, item); it does nothing if no
    bar is shown. delay: seconds before it is; default: DELAY. Raises TypeError if ``progress`` is none of the values
    above."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress must be None, True, False or a function of (done, total, name), got {progress!r}")
    if isinstance(progress, _Advance):  # the callback of a bar: this is work within it
        progress = None
    outer = _CURRENT.get()
    if callable(progress) or progress is False or (outer is not None and not outer.drawn_here()):
        callback, bar, inner = progress if callable(progress) else ignore, None, _HIDDEN
    elif outer is not None:
        callback, bar, inner = outer.enter(name), outer, outer
    else:
        display = _display(progress)
        if display is None or not _OWNER.acquire(blocking=False):
            yield ignore
            return
        bar = _Bar(display, DELAY if delay is None else delay)
        callback, inner = bar.enter(name), bar
    token = _CURRENT.set(inner)
    try:
        yield callback
    finally:
        _CURRENT.reset(token)
        if bar is not None and bar.leave():
            _OWNER.release()


@dataclass
class _Step:
    name: str
    done: int = 0
    total: int | None = None
    item: str = ""


class _Display(Protocol):
    """Where a bar is drawn."""

    from_thread: bool  # whether it may be drawn by another thread, so that a step without a count is shown too

    def draw(self, name: str, step: _Step, seconds: float) -> None: ...

    def erase(self) -> None: ...


class _Bar:
    """The bar of one piece of work and of the work within it: a stack of steps, of which the last is shown."""

    def __init__(self, display: type[_Terminal | _Notebook] | None, delay: float) -> None:
        self._display, self._delay, self._start = display, delay, time.monotonic()
        self._steps: list[_Step] = []
        self._lock = threading.RLock()
        self._shown: _Display | None = None
        self._process = os.getpid()
        self._timer: threading.Timer | None = None
        if display is not None and display.from_thread:
            self._timer = threading.Timer(delay, self._draw)
            self._timer.daemon = True
            self._timer.start()

    def drawn_here(self) -> bool:
        """Whether it can be drawn here: it is a real bar, and this process is not a fork of the one that draws it."""
        return self._display is not None and self._process == os.getpid()

    def enter(self, name: str) -> Callback:
        current = _Step(name)
        with self._lock:
            self._steps.append(current)
            if self._shown is not None:
                self._draw()

        return _Advance(self, current)

    def refresh(self) -> None:
        if time.monotonic() - self._start >= self._delay:
            self._draw()

    def leave(self) -> bool:
        """End the last step. True if it was the outermost one; then the bar is erased."""
        with self._lock:
            self._steps.pop()
            if self._steps:
                return False
            if self._timer is not None:
                self._timer.cancel()
            if self._shown is not None:
                self._shown.erase()
            return True

    def _draw(self) -> None:
        with self._lock:
            if not self._steps or self._display is None:
                return
            if self._shown is None:
                self._shown = self._display()
            outer, inner = self._steps[0].name, self._steps[-1]
            name = " · ".join(dict.fromkeys(filter(None, (outer, inner.name))))
            self._shown.draw(name, inner, time.monotonic() - self._start)


class _Advance:
    """The callback of one step of a bar."""

    def __init__(self, bar: _Bar, step: _Step) -> None:
        self._bar, self._step = bar, step

    def __call__(self, done: int, total: int, item: str) -> None:
        self._step.done, self._step.total, self._step.item = done, total or None, item
        self._bar.refresh()


_HIDDEN = _Bar(None, 0.0)
_CURRENT: ContextVar[_Bar | None] = ContextVar("pennyweight_progress", default=None)
_OWNER = threading.Lock()  # held by the one bar of this process


def _forget() -> None:
    """In a forked process: the bar and its lock belong to the parent."""
    global _OWNER  # noqa: PLW0603
    _OWNER = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)


def _display(progress: bool | None) -> type[_Terminal | _Notebook] | None:
    """How a bar is drawn here; None: not at all."""
    wanted = environment.PROGRESS.read().lower()
    if (wanted in ("0", "off", "no", "false") and not progress) or os.environ.get("RANK", "0") != "0":
        return None
    if _in_notebook():
        return _Notebook
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return _Terminal
    return _ForcedTerminal if wanted in ("1", "on", "yes", "true") and sys.stderr is not None else None


def _in_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None or "ipykernel" not in sys.modules else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class _Terminal:
    """A bar of rich's. What the program prints meanwhile appears above it."""

    from_thread = True
    forced: bool | None = None

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        # rich sends what is printed meanwhile to the console of the bar: not right for stdout if that is a file or pipe
        to_terminal = sys.stdout is not None and sys.stdout.isatty()
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", markup=False), TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[item]}", markup=False, style="dim"),
        )  # fmt: skip
        self._bar = Progress(
            *columns,
            console=Console(stderr=True, force_terminal=self.forced),
            transient=True,
            redirect_stdout=to_terminal,
        )
        self._task = self._bar.add_task("", total=None, count="", item="")
        self._step: _Step | None = None

    def draw(self, name: str, step: _Step, seconds: float) -> None:
        if step is not self._step:  # its remaining time is estimated anew
            self._bar.reset(self._task, total=step.total)
            self._step = step
        self._bar.update(
            self._task, description=name, completed=step.done, total=step.total, count=_count(step), item=step.item
        )
        self._bar.start()  # the first time

    def erase(self) -> None:
        self._bar.stop()


class _ForcedTerminal(_Terminal):
    forced = True


class _Notebook:
    """A bar in the output of a notebook's cell, which needs no widgets."""

    from_thread = False

    def __init__(self) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found, unused-ignore]

        self._html: Any = HTML
        self._handle: Any = display(HTML(""), display_id=True)
        self._last = -_REDRAW

    def draw(self, name: str, step: _Step, seconds: float) -> None:
        if seconds - self._last < _REDRAW and step.done != step.total:
            return
        self._last = seconds
        value = "" if step.total is None else f' value="{step.done}" max="{max(1, step.total)}"'
        text = " ".join(filter(None, (name, _count(step), f"{seconds:.0f} s", step.item)))
        self._handle.update(self._html(f"<progress{value}></progress> <small>{escape(text)}</small>"))

    def erase(self) -> None:
        self._handle.update(self._html(""))


def _count(step: _Step) -> str:
    return "" if step.total is None else f"{step.done}/{step.total}"
