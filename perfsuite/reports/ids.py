"""Parts of node ids and of names of workloads, the short forms that reports print, and numbers for names of hosts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from perfsuite.base.text import bare_name, listed, printable
from perfsuite.record.result import Result

_RANKS = re.compile(r"(?<=[\[-])ws\d+(-|(?=\]))")
_OF_RECIPE = re.compile(r"(\[\w+-\d{3}[a-z]?-.+)-(\d+)x(\d+)(?=\])")
"""Id of a published run, which ends in nodes x devices of each."""
_WORLD_SIZE = re.compile(r"(?<=[\[-])ws(\d+)(?=[-\]])")


def name_of(node: str) -> str:
    """A node id without its file.

    >>> name_of("test_perf/test_train.py::test_ddp[cpu-ws2]"), name_of("own")
    ('test_ddp[cpu-ws2]', 'own')
    """
    return node.partition("::")[2] or node


def test_of(node: str) -> str:
    """The test function: ``test_ddp``."""
    return name_of(node).partition("[")[0]


def words_of(node: str) -> str:
    """Return the text in the brackets of a node id; the name without brackets."""
    name = name_of(node)
    return name.partition("[")[2].removesuffix("]") or name


def short_name(node: str) -> str:
    """A node id without file, ``test_`` and platform.

    >>> short_name("test_perf/test_train.py::test_ddp[cpu-ws2-gpt2-tiny]")
    'ddp ws2-gpt2-tiny'
    >>> short_name("test_perf/test_published.py::test_published[a100-001-latte-l-b1-w8-2x8]")
    'latte-l-b1-w8-2x8'
    """
    test, _, words = bare_name(node).partition("[")
    words = words.removesuffix("]").partition("-")[2]
    if _OF_RECIPE.search(node):
        return printable(words.partition("-")[2], 60)
    return printable(f"{test.removeprefix('test_')} {words}".strip(), 60)


def token_of(node: str, platform: str) -> str:
    """Return a case's test with its parameters other than platform and ranks.

    >>> token_of("test_perf/test_train_step.py::test_ddp[cpu-ws2-gpt2-tiny]", "cpu")
    'test_ddp[gpt2-tiny]'
    """
    name, _, words = bare_name(without_ranks(node)).partition("[")
    words = words.rstrip("]").removeprefix(platform).lstrip("-")
    return f"{name}[{words}]" if words else name


def without_ranks(node: str) -> str:
    """Return a node id without its number of ranks, which the cases of one series share.

    >>> without_ranks("t.py::test_ddp[cpu-ws8-gpt2-tiny]"), without_ranks("t.py::test_mine[cpu-ws2]")
    ('t.py::test_ddp[cpu-gpt2-tiny]', 't.py::test_mine[cpu]')
    >>> without_ranks("t.py::test_published[a100-004-gpt2-xl-ddp-b32-2x8]")
    't.py::test_published[a100-004-gpt2-xl-ddp-b32]'
    """
    return _OF_RECIPE.sub(r"\1", _RANKS.sub("", node)).replace("-]", "]").replace("[]", "")


def ranks_in(node: str) -> int | None:
    """Return the number of ranks in a node id; None without one.

    >>> ranks_in("t.py::test_ddp[cpu-ws8-gpt2-tiny]"), ranks_in("t.py::test_published[a100-001-latte-l-b1-w8-2x8]")
    (8, 16)
    """
    recipe = _OF_RECIPE.search(node)
    size = _WORLD_SIZE.search(node)
    return int(recipe[2]) * int(recipe[3]) if recipe else int(size[1]) if size else None


def named(nodes: Iterable[str], most: int = 3) -> str:
    """Names of a few cases and how many more there are."""
    return listed(list(map(name_of, nodes)), most)


def anchor_of(node: str, fingerprint: str) -> str:
    """Return the anchor of a case on pages of this hardware."""
    return "c-" + hashlib.sha256(f"{fingerprint} {node}".encode(errors="replace")).hexdigest()[:10]


def class_of(workload: str) -> str:
    """``TrainStep`` of ``perfsuite.workloads.training.train_step:TrainStep``."""
    return workload.rpartition(":")[2].rpartition(".")[2]


def kernel_of(workload: str, parameters: Mapping[str, Any], collective: str = "") -> str:
    """``all_reduce``, ``memory_copy``, ``host_device_copy host_to_device``."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", class_of(workload)).lower()
    return f"{collective or name} {parameters.get('direction', '')}".strip()


def hosts_of(results: Iterable[Result]) -> tuple[str, ...]:
    """Return the names of hosts that texts on these results may contain, the longest first."""
    names: set[str] = set()
    seen: set[int] = set()
    for result in results:
        names.add(str(result.environment.get("hostname", "")))
        if result.world_size not in seen and result.measurement is not None:  # as many ranks run on the same hosts
            seen.add(result.world_size)
            names |= {rank.host for rank in result.measurement.ranks}
    return tuple(sorted(names - {""}, key=lambda name: (-len(name), name)))


def numbered(hosts: Sequence[str]) -> Callable[[str], str]:
    """Return a function that replaces each host's name by its number.

    >>> numbered(["node17", "node2"])("node2 cuda:3 to node17 cuda:0, not node171")
    'host 1 cuda:3 to host 2 cuda:0, not node171'
    """
    if not hosts:
        return str
    places = {name: f"host {number}" for number, name in enumerate(sorted(hosts, key=_natural), start=1)}
    anyone = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, hosts))})(?![\w-])")
    return lambda text: anyone.sub(lambda found: places[found[0]], text)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
