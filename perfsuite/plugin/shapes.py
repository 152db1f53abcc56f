"""Shapes of the user's own, from a file: ``--perf-shapes FILE`` replaces the sizes of the tests that it names.

A line is the name of a test function and one shape for it, ``#`` begins a comment::

    test_matmul            4096x4096x11008   # the first product of a 7B model's MLP
    test_attention_kernel  2x32x8x4096x128
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from perfsuite.base.errors import ConfigurationError, did_you_mean
from perfsuite.plugin.sweep import Size, Sweep

_NAME = re.compile(r"[A-Za-z_]\w*")
_SHAPE = re.compile(r"\d+(x\d+)*")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One line of the file."""

    line: int
    """From 1."""
    size: Size
    """As the test's argument takes it."""


@dataclass(frozen=True, kw_only=True)
class ShapeFile:
    """The shapes of one file by name of the test function, in the order of the file."""

    path: Path
    shapes: Mapping[str, tuple[Shape, ...]]

    def apply(self, test: str, sweep: Sweep) -> Sweep:
        """The sweep with the file's shapes for ``test`` at both scales; as it is where the file has none.

        Raises ConfigurationError, which names the line, where the test takes no shapes or others.
        """
        mine = self.shapes.get(test, ())
        if not mine:
            return sweep
        own = [size for size in (*sweep.full, *sweep.small) if isinstance(size.value, tuple)]
        for shape in mine:
            if not own:
                raise self.error(
                    shape.line, f"{test} has no sizes that are shapes; name one that has, or drop the line"
                )
            if len(shape.size.value) != len(own[0].value):
                raise self.error(
                    shape.line, f"{test} takes {len(own[0].value)} numbers, as in {own[0].id}, not {shape.size.id}"
                )
        sizes = tuple(shape.size for shape in mine)
        only_at = sweep.only_at and sizes[0]  # the other dtypes, at one size where the test has them at one
        return replace(sweep, full=sizes, small=sizes, extended_sizes=(), only_at=only_at)

    def require_known(self, tests: Iterable[str]) -> None:
        """Raise ConfigurationError for a name that no collected test has."""
        known = sorted(set(tests))
        for name, (first, *_) in self.shapes.items():
            if name not in known:
                near = did_you_mean(name, known) if known else "there is none; name the file of the tests"
                raise self.error(first.line, f"no perf test that was collected is named {name!r}; {near}")

    def error(self, line: int, rule: str) -> ConfigurationError:
        """What is wrong with a line."""
        return ConfigurationError(f"--perf-shapes: {self.path}, line {line}: {rule}")


def read_shapes(path: Path) -> ShapeFile:
    """The file, checked line by line; raises UsageError that names file, line, rule and what to write."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise pytest.UsageError(f"--perf-shapes: {path} cannot be read: {error.strerror}; give a text file") from None
    except UnicodeDecodeError as error:
        raise pytest.UsageError(f"--perf-shapes: {path} is not UTF-8 at byte {error.start}; save it as text") from None
    shapes: dict[str, tuple[Shape, ...]] = {}
    file = ShapeFile(path=path, shapes=shapes)
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            shape = _read_line(file, number, words)
        except ConfigurationError as error:
            raise pytest.UsageError(str(error)) from None
        earlier = shapes.get(words[0], ())
        if twin := [other.line for other in earlier if other.size == shape.size]:
            text = f"{words[0]} has {shape.size.id} in line {twin[0]} already; write each shape once"
            raise pytest.UsageError(str(file.error(number, text)))
        shapes[words[0]] = (*earlier, shape)
    if not shapes:
        raise pytest.UsageError(f"--perf-shapes: {path} has no shape; write a line such as: test_matmul 4096x4096x4096")
    return file


def _read_line(file: ShapeFile, number: int, words: list[str]) -> Shape:
    if len(words) != 2:
        raise file.error(
            number, f"has {len(words)} words; write a test's name and one shape: test_matmul 4096x4096x4096"
        )
    name, text = words
    if not _NAME.fullmatch(name):
        raise file.error(number, f"{name!r} is no name of a test function; write for example test_matmul")
    if not _SHAPE.fullmatch(text):
        raise file.error(number, f"{text!r} is no shape; write whole numbers with x between them: 4096x4096x11008")
    value = tuple(int(part) for part in text.split("x"))
    if 0 in value:
        raise file.error(number, f"{text} has a 0; a dimension is at least 1")
    return Shape(line=number, size=Size(value=value, id="x".join(map(str, value))))
