"""Matches name patterns from files in time linear in the name. Does not use Python's ``re``, whose time can be
exponential for a hostile pattern.

Supported: literals, ``.``, ``\\d``, ``\\w``, ``\\.`` and other escaped characters, classes such as ``[a-z0-9_]`` and
``[^.]``, groups ``(a|b)`` and ``(?:a|b)``, the repeats ``*``, ``+``, ``?``, ``{2}``, ``{2,4}`` with their lazy forms,
and the anchors ``^`` at the start and ``$`` at the end. A match begins at the start of the name and may end before its
end, like ``re.match``; with ``whole=True`` it must end there, like ``re.fullmatch``.

Thompson's construction (1968): a pattern becomes an NFA, and a name is matched by one walk over sets of its states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

MAX_PATTERN = 1000  # characters
MAX_PATTERNS = 200  # in one config from a file
_MAX_COUNT = 64  # of a counted repeat
_MAX_STATES = 10_000
_MAX_SETS = 10_000  # cached sets of states; bounds the memory of a hostile pattern
# States visited to compute new sets: thousands for an ordinary pattern, up to a second for a hostile one
_MAX_WORK, _MORE_WORK = 400_000, 1_000

_ANY = -1  # unbounded repeats
_REPEATS = {"*": (0, _ANY), "+": (1, _ANY), "?": (0, 1)}

Test = Callable[[str], bool]
_CLASSES: dict[str, Test] = {
    "d": lambda c: c.isdecimal(),
    "w": lambda c: c.isalnum() or c == "_",
}  # fmt: skip


class NamePattern:
    """A compiled pattern. Raises ValueError for an unsupported pattern."""

    def __init__(self, text: str, whole: bool = False) -> None:
        if len(text) > MAX_PATTERN:
            raise ValueError(f"pattern of {len(text)} characters; at most {MAX_PATTERN} are allowed")
        self.text, self.at, self.depth = text, 0, 0
        self.tests: list[Test | None] = []  # of each state; None: a step that consumes no character
        self.nexts: list[list[int]] = []
        self.accept = self._state(None)
        if self._peek() == "^":
            self.at += 1
        self.whole = whole
        start = self._state(None)
        self.nexts[start].append(self._either(self.accept))
        if self.at < len(text):
            raise self._error(f"{text[self.at]!r} is not supported here")
        self.start = self._closure({start})
        self.seen: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self.work = 0  # characters matched plus states visited to compute new sets
        self.left = _MAX_WORK + _MORE_WORK * len(text)  # budget of states to visit

    def matches(self, name: str) -> bool:
        """Whether the name matches. Raises ValueError once the pattern has used up its budget over all names."""
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
                self.left -= len(now)
                if self.left < 0:
                    raise ValueError(f"pattern {self.text[:100]!r} takes too long to match; write a simpler one")
                then = self._closure({n for s in now if (t := self.tests[s]) and t(c) for n in self.nexts[s]})
                self.seen[key] = then
            if not then:
                return False
            now = then
        return self.accept in now

    # -- states: each lists its successors, so a pattern is built from its end ---------------------------------------

    def _state(self, test: Test | None, *after: int) -> int:
        if len(self.tests) >= _MAX_STATES:
            raise self._error("it has too many repeats")
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
        return ValueError(f"pattern {self.text[:100]!r}: {why}; files may contain simple patterns only")

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
                    raise self._error("'$' is supported only at the very end")
                self.at += 1
                self.whole = True
                break
            begin = self.at
            out = self._state(None)
            one = self._one(out)
            repeat = self._peek()
            least, most = 1, 1
            if repeat and repeat in "*+?{":
                self.at += 1
                least, most = self._counts() if repeat == "{" else _REPEATS[repeat]
                self.at += self._peek() == "?"  # lazy: does not change whether the name matches
                if self._peek() and self._peek() in "*+?{":
                    raise self._error("repeats of repeats are not supported")
            after = self.at
            for i in range(max(least, most, 1)):
                if i:  # once more
                    self.at = begin
                    out = self._state(None)
                    one = self._one(out)
                if i >= least:
                    self.nexts[here].append(out)
                if most:
                    self.nexts[here].append(one)
                here = out
            if most == _ANY:
                self.nexts[out].append(one)
            self.at = after
        self.nexts[here].append(end)
        return first

    def _counts(self) -> tuple[int, int]:
        """Minimum and maximum of ``{2}``, ``{2,}`` and ``{2,4}``; ``{`` is already consumed."""
        inside, closed, _ = self.text[self.at :].partition("}")
        first, comma, second = inside.partition(",")
        known = closed and inside.isascii() and first.isdecimal() and (second.isdecimal() or not second)
        least = int(first) if known and len(first) < 4 else _MAX_COUNT + 1
        most = least if not comma else int(second) if second and len(second) < 4 and known else _ANY
        if not known or least > _MAX_COUNT or most > _MAX_COUNT or (comma and second and most < least):
            raise self._error(f"counted repeats must be {{m}}, {{m,}} or {{m,n}}, up to {_MAX_COUNT}")
        self.at += len(inside) + 1
        return least, most

    def _outside(self) -> str:
        """The pattern's characters outside of groups, escapes and classes."""
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
                    raise self._error("look-arounds and flags are not supported")
                self.at += 2
            self.depth += 1
            if self.depth > 20:
                raise self._error("groups are nested too deep")
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
            raise self._error(f"{c!r} is not supported here")
        return self._state((lambda got: True) if c == "." else c.__eq__, end)

    def _escaped(self) -> Test:
        c = self._peek()
        self.at += 1
        if c in _CLASSES and c:
            return _CLASSES[c]
        if not c or c.isalnum():
            raise self._error(f"'\\{c}' is not supported")
        return c.__eq__

    def _class(self) -> Test:
        inverted = self._peek() == "^"
        self.at += inverted
        tests: list[Test] = []
        while (c := self._peek()) != "]" or not tests:
            self.at += 1
            if not c or c in "[]":
                raise self._error("a class is not closed, or contains a bracket")
            if c == "\\":
                tests.append(self._escaped())
            elif self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]"):
                last = self.text[self.at + 1]
                self.at += 2
                if last in "\\[" or last < c:
                    raise self._error("a range of a class is not supported")
                tests.append(_between(c, last))
            else:
                tests.append(c.__eq__)
        self.at += 1
        return lambda got: any(t(got) for t in tests) != inverted


def check_keys(keys: Iterable[str]) -> None:
    """Raise ValueError if a config by name has patterns (``re:``) that files may not contain."""
    patterns = [key for key in keys if key.startswith("re:")]
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"{len(patterns)} patterns; a file may contain at most {MAX_PATTERNS}")
    for key in patterns:
        NamePattern(key[3:], whole=True)


def _between(first: str, last: str) -> Test:
    return lambda got: first <= got <= last
