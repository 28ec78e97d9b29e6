"""Name patterns out of files, in time linear in the name: never Python's ``re``, which a pattern can stall for years.

Read are literals, ``.``, ``\\d``, ``\\w``, ``\\.`` and other escaped signs, classes such as ``[a-z0-9_]`` and ``[^.]``,
groups ``(a|b)`` and ``(?:a|b)``, the repeats ``*``, ``+``, ``?``, and the anchors ``^`` at the start and ``$`` at the
end. A match begins at the start of the name and may end before its end, as ``re.match`` does.

Thompson's construction (1968): a pattern becomes a graph of states, a name is one walk of a set of states.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_PATTERN = 1000  # characters
_MAX_SETS = 10_000  # sets of states remembered, so that a hostile pattern takes no memory

Test = Callable[[str], bool]
_CLASSES: dict[str, Test] = {
    "d": lambda c: c.isdecimal(),
    "w": lambda c: c.isalnum() or c == "_",
}  # fmt: skip


class Pattern:
    """A compiled pattern. Raises ValueError for a text that is not read."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN:
            raise ValueError(f"pattern of {len(text)} characters; at most {MAX_PATTERN} are read")
        self.text, self.at, self.depth = text, 0, 0
        self.tests: list[Test | None] = []  # of each state; None: a step that takes no character
        self.nexts: list[list[int]] = []
        self.accept = self._state(None)
        if self._peek() == "^":
            self.at += 1
        self.whole = False
        start = self._state(None)
        self.nexts[start].append(self._either(self.accept))
        if self.at < len(text):
            raise self._error(f"{text[self.at]!r} is not read here")
        self.start = self._closure({start})
        self.seen: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self.work = 0  # signs of names looked at, and states looked at for the first time

    def matches(self, name: str) -> bool:
        now = self.start
        for c in name:
            self.work += 1
            if self.accept in now and not self.whole:
                return True
            key = (now, c)
            then = self.seen.get(key)
            if then is None:
                if len(self.seen) >= _MAX_SETS:
                    self.seen.clear()
                self.work += len(now)
                then = self._closure({n for s in now if (t := self.tests[s]) and t(c) for n in self.nexts[s]})
                self.seen[key] = then
            if not then:
                return False
            now = then
        return self.accept in now

    # -- states: each knows those after it, so a pattern is built from its end ---------------------------------------

    def _state(self, test: Test | None, *after: int) -> int:
        self.tests.append(test)
        self.nexts.append(list(after))
        return len(self.tests) - 1

    def _closure(self, states: set[int]) -> frozenset[int]:
        found, todo = set(states), list(states)
        while todo:
            state = todo.pop()
            if self.tests[state] is None:
                new = [n for n in self.nexts[state] if n not in found]
                found.update(new)
                todo += new
        return frozenset(found)

    # -- the grammar: either = row ("|" row)*; row = (one repeat?)* --------------------------------------------------

    def _peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def _error(self, why: str) -> ValueError:
        return ValueError(f"pattern {self.text[:100]!r}: {why}; only simple patterns are read from files")

    def _either(self, end: int) -> int:
        ways = [self._row(end)]
        while self._peek() == "|":
            self.at += 1
            ways.append(self._row(end))
        return self._state(None, *ways)

    def _row(self, end: int) -> int:
        first = here = self._state(None)
        while (c := self._peek()) and c not in "|)":
            if c == "$":
                if self.depth or self.at != len(self.text) - 1 or "|" in self._outside():
                    raise self._error("'$' is read only at the very end")
                self.at += 1
                self.whole = True
                break
            out = self._state(None)
            one = self._one(out)
            repeat = self._peek()
            if repeat and repeat in "*+?":
                self.at += 1
                if self._peek() and self._peek() in "*+?{":
                    raise self._error("repeats of repeats are not read")
                if repeat in "*+":
                    self.nexts[out].append(one)
                if repeat in "*?":
                    self.nexts[here].append(out)
            self.nexts[here].append(one)
            here = out
        self.nexts[here].append(end)
        return first

    def _outside(self) -> str:
        """The pattern's signs outside of groups, escapes and classes."""
        out, depth, i = "", 0, 0
        while i < len(self.text):
            c = self.text[i]
            if c == "\\":
                i += 1
            elif c == "[":
                i = max(self.text.find("]", i + 2), i)
            else:
                depth += (c == "(") - (c == ")")
                out += c if depth == 0 else ""
            i += 1
        return out

    def _one(self, end: int) -> int:
        c = self._peek()
        self.at += 1
        if c == "(":
            if self.text.startswith("?", self.at):
                if not self.text.startswith("?:", self.at):
                    raise self._error("look-arounds and flags are not read")
                self.at += 2
            self.depth += 1
            if self.depth > 20:
                raise self._error("groups lie too deep")
            one = self._either(end)
            if self._peek() != ")":
                raise self._error("'(' is not closed")
            self.at += 1
            self.depth -= 1
            return one
        if c == "[":
            return self._state(self._class(), end)
        if c == "\\":
            return self._state(self._escaped(), end)
        if c in "*+?{}^]":
            raise self._error(f"{c!r} is not read here")
        return self._state((lambda got: True) if c == "." else c.__eq__, end)

    def _escaped(self) -> Test:
        c = self._peek()
        self.at += 1
        if c in _CLASSES and c:
            return _CLASSES[c]
        if not c or c.isalnum():
            raise self._error(f"'\\{c}' is not read")
        return c.__eq__

    def _class(self) -> Test:
        inverted = self._peek() == "^"
        self.at += inverted
        tests: list[Test] = []
        while (c := self._peek()) != "]" or not tests:
            self.at += 1
            if not c or c in "[]":
                raise self._error("a class is not closed, or holds a bracket")
            if c == "\\":
                tests.append(self._escaped())
            elif self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]"):
                last = self.text[self.at + 1]
                self.at += 2
                if last in "\\[" or last < c:
                    raise self._error("a range of a class is not read")
                tests.append(_between(c, last))
            else:
                tests.append(c.__eq__)
        self.at += 1
        return lambda got: any(t(got) for t in tests) != inverted


def _between(first: str, last: str) -> Test:
    return lambda got: first <= got <= last
