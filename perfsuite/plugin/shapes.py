"""``--perf-shapes FILE``: replace the sizes of tests by the user's shapes.

A line is the name of a test function and one shape for it; ``#`` begins a comment::

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
    """Number of the line, from 1."""
    size: Size


@dataclass(frozen=True, kw_only=True)
class ShapeFile:
    """The shapes of one file by name of the test function, in the order of the file."""

    path: Path
    shapes: Mapping[str, tuple[Shape, ...]]

    def apply(self, test: str, sweep: Sweep) -> Sweep:
        """Return the sweep with the file's shapes for ``test`` at both scales; unchanged if the file has none.

        Raises ConfigurationError with the line if the test takes no shapes, or shapes of another length.
        """
        shapes = self.shapes.get(test, ())
        if not shapes:
            return sweep
        own = [size for size in (*sweep.full, *sweep.small) if isinstance(size.value, tuple)]
        for shape in shapes:
            if not own:
                raise self.error(shape.line, f"{test} has no sizes that are shapes; use another test, or drop the line")
            if len(shape.size.value) != len(own[0].value):
                raise self.error(
                    shape.line, f"{test} takes {len(own[0].value)} numbers, as in {own[0].id}, not {shape.size.id}"
                )
        sizes = tuple(shape.size for shape in shapes)
        only_at = sweep.only_at and sizes[0]  # a test with further dtypes at one size runs them at the first shape
        return replace(sweep, full=sizes, small=sizes, extended_sizes=(), only_at=only_at)

    def require_known(self, tests: Iterable[str]) -> None:
        """Raise ConfigurationError for a name that no collected test has."""
        names = sorted(set(tests))
        for name, (first, *_) in self.shapes.items():
            if name not in names:
                near = did_you_mean(name, names) if names else "there is none; add the file of the tests"
                raise self.error(first.line, f"no collected perf test is named {name!r}; {near}")

    def error(self, line: int, rule: str) -> ConfigurationError:
        """Return an error about a line of the file."""
        return ConfigurationError(f"--perf-shapes: {self.path}, line {line}: {rule}")


def read_shapes(path: Path) -> ShapeFile:
    """Read and check the file.  Raises UsageError with file, line, rule and remedy."""
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
        raise file.error(number, f"{name!r} is not the name of a test function; write for example test_matmul")
    if not _SHAPE.fullmatch(text):
        raise file.error(number, f"{text!r} is not a shape; write whole numbers with x between them: 4096x4096x11008")
    value = tuple(int(part) for part in text.split("x"))
    if 0 in value:
        raise file.error(number, f"{text} has a 0; a dimension is at least 1")
    return Shape(line=number, size=Size(value=value, id="x".join(map(str, value))))
