"""Name patterns out of files, in time linear in the name: never Python's ``re``, which a pattern can stall for years.

Read are literals, ``.``, ``\\d``, ``\\w``, ``\\.`` and other escaped signs, classes such as ``[a-z0-9_]`` and ``[^.]``,
groups ``(a|b)`` and ``(?:a|b)``, the repeats ``*``, ``+``, ``?``, ``{2}``, ``{2,4}`` and their lazy forms, and the
anchors ``^`` at the start and ``$`` at the end. A match begins at the start of the name and may end before its end, as
``re.match`` does; with ``whole=True`` it ends there, as ``re.fullmatch``'s.

Thompson's construction (1968): a pattern becomes a graph of states, a name is one walk of a set of states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

MAX_PATTERN = 1000  # characters
MAX_PATTERNS = 200  # in one config out of a file
_MAX_COUNT = 64  # of a counted repeat
_MAX_STATES = 10_000
_MAX_SETS = 10_000  # sets of states remembered, so that a hostile pattern takes no memory
# States looked at to find new sets: thousands for a pattern of people, and up to a second for a hostile one
_MAX_WORK, _MORE_WORK = 400_000, 1_000

_ANY = -1  # repeats without an end
_REPEATS = {"*": (0, _ANY), "+": (1, _ANY), "?": (0, 1)}

Test = Callable[[str], bool]
_CLASSES: dict[str, Test] = {
    "d": lambda c: c.isdecimal(),
    "w": lambda c: c.isalnum() or c == "_",
}  # fmt: skip


class NamePattern:
    """A compiled pattern. Raises ValueError for a text that is not read."""

    def __init__(self, text: str, whole: bool = False) -> None:
        if len(text) > MAX_PATTERN:
            raise ValueError(f"pattern of {len(text)} characters; at most {MAX_PATTERN} are read")
        self.text, self.at, self.depth = text, 0, 0
        self.tests: list[Test | None] = []  # of each state; None: a step that takes no character
        self.nexts: list[list[int]] = []
        self.accept = self._state(None)
        if self._peek() == "^":
            self.at += 1
        self.whole = whole
        start = self._state(None)
        self.nexts[start].append(self._either(self.accept))
        if self.at < len(text):
            raise self._error(f"{text[self.at]!r} is not read here")
        self.start = self._closure({start})
        self.seen: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self.work = 0  # signs of names looked at, and states looked at for the first time
        self.left = _MAX_WORK + _MORE_WORK * len(text)  # states that may be

    def matches(self, name: str) -> bool:
        """Raises ValueError for a pattern that has taken too long, with the names so far."""
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

    # -- states: each knows those after it, so a pattern is built from its end ---------------------------------------

    def _state(self, test: Test | None, *after: int) -> int:
        if len(self.tests) >= _MAX_STATES:
            raise self._error("its repeats are too many")
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
            begin = self.at
            out = self._state(None)
            one = self._one(out)
            repeat = self._peek()
            least, most = 1, 1
            if repeat and repeat in "*+?{":
                self.at += 1
                least, most = self._counts() if repeat == "{" else _REPEATS[repeat]
                self.at += self._peek() == "?"  # lazy: what it means for where a match ends, nobody asks
                if self._peek() and self._peek() in "*+?{":
                    raise self._error("repeats of repeats are not read")
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
        """Least and most of ``{2}``, ``{2,}`` and ``{2,4}``; ``{`` is behind us."""
        inside, closed, _ = self.text[self.at :].partition("}")
        first, comma, second = inside.partition(",")
        known = closed and inside.isascii() and first.isdecimal() and (second.isdecimal() or not second)
        least = int(first) if known and len(first) < 4 else _MAX_COUNT + 1
        most = least if not comma else int(second) if second and len(second) < 4 and known else _ANY
        if not known or least > _MAX_COUNT or most > _MAX_COUNT or (comma and second and most < least):
            raise self._error(f"of counted repeats {{m}}, {{m,}} and {{m,n}} up to {_MAX_COUNT} are read")
        self.at += len(inside) + 1
        return least, most

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


def check_keys(keys: Iterable[str]) -> None:
    """Raise ValueError where a config that names layers has patterns (``re:``) that are not read from files."""
    patterns = [key for key in keys if key.startswith("re:")]
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"{len(patterns)} patterns; at most {MAX_PATTERNS} are read from files")
    for key in patterns:
        NamePattern(key[3:], whole=True)


def _between(first: str, last: str) -> Test:
    return lambda got: first <= got <= last
