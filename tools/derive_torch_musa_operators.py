"""Writes which operators torch_musa registers, per version, from a clone of its repository; nothing of it is run.

    git clone https://github.com/MooreThreads/torch_musa
    python -m tools.derive_torch_musa_operators torch_musa v2.1.0 v2.1.1 v2.5.0 v2.7.0 v2.7.1

writes ``simmusa/torch_musa_operators.json``, by which the simulated device refuses what the real one does not have.

An operator is registered where ``musa_functions.yaml`` dispatches it to PrivateUse1, or names it without a dispatch:
torch's structured kernel is then used.  There is no other registration for dense tensors and no fallback to the CPU.
Dtypes are those that a kernel lists for its input by ``TORCH_MUSA_CHECK_...`` or ``MUSA_TENSOR_TYPE_CHECK`` before it
branches (but for complex and empty tensors, which have ways of their own), in its own function or one of the same file
that it calls there.  What muDNN itself refuses is in no source, so a real dtype that is not refused here may be refused
there, never the other way round.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.git import git

FILE = Path(__file__).parents[1] / "simmusa" / "torch_musa_operators.json"
_TABLE = "torch_musa/csrc/aten/ops/musa_functions.yaml"
_KERNELS = "torch_musa/csrc/aten"
_FLOATING = ("Float", "Half", "BFloat16")
_MUDNN = ("Double", "Float", "Half", "BFloat16", "Int", "Long")
"""Of ``MUSA_TENSOR_TYPE_CHECK``."""
_DEPTH = 3


def kernels(table: str) -> dict[str, str]:
    r"""Operator -> its kernel for dense tensors; an empty one where torch's own is used.

    >>> kernels("- func: amax\n\n- func: mm.out\n  dispatch:\n    PrivateUse1: MmOut\n")
    {'amax': '', 'mm.out': 'MmOut'}
    >>> kernels("- func: q\n  dispatch:\n    QuantizedPrivateUse1: Q\n")
    {}
    """
    found = {}
    for entry in re.split(r"^- func: ", table, flags=re.MULTILINE)[1:]:
        name = re.split(r"[\s(]", entry, maxsplit=1)[0]
        dispatched = re.findall(r"^ {4,}([\w, ]+):\s*(\S+)", entry.partition("  dispatch:")[2], re.MULTILINE)
        dense = [kernel for keys, kernel in dispatched if "PrivateUse1" in re.split(r",\s*", keys)]
        if dense or "  dispatch:" not in entry:
            found[name] = dense[0].rpartition("::")[2] if dense else ""
    return found


def functions(source: str) -> dict[str, str]:
    r"""Body of every function that begins a line, by name; of several of one name all bodies.

    >>> functions("Tensor Mm(\n    int a) {\n  return 1;\n}\n")
    {'Mm': '\n  return 1;\n'}
    """
    found: dict[str, str] = {}
    for match in re.finditer(
        r"^[\w:<>&*, ]*?\b(\w+)\([^;{}]*\)\s*(?:const\s*)?\{(.*?)^\}", source, re.MULTILINE | re.DOTALL
    ):
        found[match[1]] = found.get(match[1], "") + match[2]
    return found


def before_branches(body: str) -> str:
    """What a function always does: all before its first branch that is not about complex or empty tensors.

    >>> before_branches("a(); if (x.numel() == 0) { return y; } b(); if (c) { d(); }")
    'a();  b(); '
    """
    aside = r"\bif\s+(?:C10_\w+\s*)?\([^{;]*(?:is_complex|numel)\(\)[^{;]*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
    return re.split(r"\b(?:if|switch|for|while)\b", re.sub(aside, "", body), maxsplit=1)[0]


def reached(name: str, bodies: Mapping[str, str], depth: int = _DEPTH) -> str:
    """What a function and those of its file that it calls always do."""
    body = before_branches(bodies.get(name, ""))
    if depth:
        called = dict.fromkeys(re.findall(r"\b(\w+)\s*\(", body))
        body += "".join(reached(each, bodies, depth - 1) for each in called if each != name and each in bodies)
    return body


def listed_dtypes(body: str) -> tuple[str, ...]:
    """Dtypes that the checks of a body allow its input, as C++ names them; empty where there is no check.

    >>> listed_dtypes('TORCH_MUSA_CHECK_FLOATING_TYPES_AND_N(self.scalar_type(), "Up", ScalarType::Byte);')
    ('BFloat16', 'Byte', 'Float', 'Half')
    """
    allowed: set[str] = set()
    for kind, arguments in re.findall(
        r"TORCH_MUSA_CHECK_(DTYPES|FLOATING_TYPES\w*)\(\s*(?:self|input)\.(.*?)\);", body, re.DOTALL
    ):
        allowed |= set(_FLOATING if kind != "DTYPES" else ()) | set(re.findall(r"ScalarType::(\w+)", arguments))
    if re.search(r"MUSA_TENSOR_TYPE_CHECK\((?:self|input)\)", body):
        allowed |= set(_MUDNN)
    return tuple(sorted(allowed))


def least_architecture(body: str) -> int:
    """The architecture below which a body refuses to run; 0 where it does not ask."""
    found = re.search(r"getMUSAArch\(\)\s*<\s*(\d+)\)\s*\{\s*TORCH_CHECK\(\s*false", body)
    return int(found[1]) if found else 0


def derive(table: str, sources: Iterable[str]) -> dict[str, Any]:
    """Operators of one version, the dtypes and the architectures that their kernels ask for."""
    named = kernels(table)
    by_file = [functions(source) for source in sources]
    dtypes: dict[str, list[str]] = {}
    architectures = {}
    for name, kernel in sorted(named.items()):
        homes = [bodies for bodies in by_file if kernel in bodies]
        if len(homes) != 1:
            continue  # torch's own kernel, or a name that several files have
        if allowed := listed_dtypes(reached(kernel, homes[0])):
            dtypes.setdefault(" ".join(allowed), []).append(name)
        # An operator that makes its result calls the kernel that takes one.
        if least := least_architecture("".join(homes[0].get(each, "") for each in (kernel, f"{kernel}Out"))):
            architectures[name] = least
    return {"operators": sorted(named), "dtypes": dtypes, "architectures": architectures}


def wrapped(names: Iterable[str]) -> list[str]:
    """Names in lines that a diff can show."""
    return textwrap.wrap(" ".join(sorted(names)), 112, break_on_hyphens=False)


def written(versions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Operators as what changed from each version to the next."""
    before: set[str] = set()
    made = {}
    for version, found in versions.items():
        now = set(found["operators"])
        changes = {"added": now - before, "removed": before - now}
        dtypes = {allowed: wrapped(names) for allowed, names in found["dtypes"].items()}
        made[version] = {
            **found,
            "operators": {kind: wrapped(names) for kind, names in changes.items()},
            "dtypes": dtypes,
        }
        before = now
    return made


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("repository", type=Path, help="a clone of torch_musa, bare or not")
    parser.add_argument("tag", nargs="+", help="v2.7.1, the oldest first")
    arguments = parser.parse_args()

    asked = functools.partial(git, arguments.repository)
    versions = {}
    for tag in arguments.tag:
        paths = asked("ls-tree", "-r", "--name-only", tag, _KERNELS).split()
        sources = [asked("show", f"{tag}:{path}") for path in paths if path.endswith((".cpp", ".mu"))]
        found = derive(asked("show", f"{tag}:{_TABLE}"), sources)
        versions[tag.lstrip("v")] = {"commit": asked("rev-parse", f"{tag}^{{commit}}"), **found}
        listed = sum(map(len, found["dtypes"].values()))
        print(f"{tag}: {len(found['operators'])} operators, {listed} of them list their dtypes")
    FILE.write_text(json.dumps(written(versions), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
