"""The table of device models and machines: platforms.toml, with additions and overrides of the user's files."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError, UnknownPlatform, did_you_mean, nearest
from perfsuite.base.files import content, decoded, why
from perfsuite.platforms.base import DeviceModel, MachineModel
from perfsuite.platforms.detection import SHIPPED, family_names
from perfsuite.record.result import Peak
from perfsuite.record.workload import DTYPES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUILT_IN = Path(__file__).with_name("platforms.toml")

_PEAK_UNITS: Mapping[str, str] = {
    "memory": "GiB",
    "memory_bandwidth": "GB/s",
    "link": "GB/s",
    "host_link": "GB/s",
    "network": "GB/s",
    "devices_per_node": "devices",
}
_LISTS = ("names", "match", "exclude", "native", "notes")
_ROW_KEYS = ("title", "family", *_LISTS, "architecture", "tflops", *_PEAK_UNITS)
_PEAK_KEYS = ("value", "unit", "source", "kind")
_MACHINE_UNITS: Mapping[str, str] = {"nodes": "nodes", "devices_per_node": "devices", "network": "GB/s"}
_MACHINE_TEXTS = ("title", "platform", "inside")
_SECTIONS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "platform": (r"[a-z][a-z0-9_]*", "ids contain it: use small letters, digits and _, as in s4000", _ROW_KEYS),
    "machine": (
        r"[a-z0-9][a-z0-9_-]*",
        "use small letters, digits, - and _, as in oneflow-4x8-v100",
        (*_MACHINE_TEXTS, *_MACHINE_UNITS),
    ),
}
"""Pattern of a name, its rule in words, and the keys of a table, by section."""
_KINDS = ("published", "measured", "nominal")
_COMPUTE_DTYPES = (*(name for name in DTYPES if name not in ("uint8", "int32", "int64")), "fp8", "fp4", "int4")
_NOT_A_MODEL = re.compile(r"nvidia|amd|moore|threads|mtt|tesla|geforce|instinct|gpus?|[1-9]\d?x|x[1-9]\d?")
_VARIANT = re.compile(r"sxm\d?|oam|\d+gb?|hbm\d?e?|gb")  # Words after a model's name that do not change its peaks.


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All device models of this session."""

    models: Mapping[str, DeviceModel]  # By platform name, in the order of the files.
    machines: Mapping[str, MachineModel] = field(default_factory=dict)  # Machines by name, in the order of the files.
    declared: Mapping[str, Any] = field(default_factory=dict)  # ``[environment]`` sections of the user's files.

    def find(self, name: str, *, besides: Iterable[str] = ()) -> DeviceModel:
        """Return the row of this platform name, in upper or lower case.  Raises UnknownPlatform with the valid names,
        those of ``besides`` included, and the most similar one.
        """
        if (row := self.models.get(name) or self.models.get(name.lower())) is not None:
            return row
        legal = list(dict.fromkeys([*self.models, *besides]))
        near = nearest(name.lower(), legal, most=1, likeness=0.6)
        meant = f", did you mean {near[0]!r}?" if near else ";"
        raise UnknownPlatform(
            f"platform {name!r} is unknown{meant} choose from {', '.join(legal)}, or add a row "
            "(perfsuite docs add-a-platform)"
        )

    def find_machine(self, name: str) -> MachineModel:
        """Return the machine of this name; raise ConfigurationError with the valid names."""
        if name in self.machines:
            return self.machines[name]
        raise ConfigurationError(
            f"machine {name!r} is unknown; {did_you_mean(name, list(self.machines))}, or add [machine.{name}] to a "
            "platform file (perfsuite docs add-a-platform)"
        )

    def hosts(self, platform: str | None, machine: str | None) -> tuple[DeviceModel, MachineModel | None]:
        """Return a platform's row, with the nodes of the machine if one is named.  Raises ConfigurationError if neither
        is named, and if the machine has devices of another platform.
        """
        if not machine:
            if not platform:
                raise ConfigurationError("no platform and no machine is given; add for example --platform s4000")
            return self.find(platform), None
        found = self.find_machine(machine)
        if platform is not None and self.find(platform).name != found.platform:
            raise ConfigurationError(
                f"machine {found.name} has devices of {found.platform}, not of {platform}; leave --platform out"
            )
        return found.row(self.find(found.platform)), found

    def recognise(self, reported_name: str, family: str) -> DeviceModel | None:
        """Return the last row with this very reported name, else with the longest match, else None."""
        best, found = (False, 1), None
        for model in self.models.values():
            if model.family == family and not any(other in reported_name for other in model.exclude):
                lengths = [len(name) for name in model.match if name in reported_name]
                rank = (reported_name in model.names, max(lengths, default=0))
                best, found = (rank, model) if rank >= best else (best, found)
        return found

    def called(self, text: str) -> DeviceModel | None:
        """Return the row of a device name in a table; None if no row has it.

        >>> [load_catalog().called(text).name for text in ("H100", "Tesla V100-SXM2-16GB", "MTT S4000", "RTX 4090")]
        ['h100', 'v100', 's4000', 'rtx4090']
        """
        words = [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word and not _NOT_A_MODEL.fullmatch(word)]
        for count in range(len(words), 0, -1):
            names = "_".join(words[:count]), "".join(words[:count])
            found = next((self.models[name] for name in names if name in self.models), None)
            if found and all(_VARIANT.fullmatch(word) for word in words[count:]):
                return found
        return None

    def generic(self, family: str, title: str) -> DeviceModel:
        """Return the row for a device of ``family`` without a matching row: named after the family, without peaks."""
        return self.models.get(family) or DeviceModel(name=family, title=title or f"{family} device", family=family)


def load_catalog(extra_files: Iterable[Path | str] = ()) -> Catalog:
    """Return the built-in rows and those of ``extra_files`` in order: a new name adds a row, an old one overrides
    keys.  Raises ConfigurationError in one line with file, line if found, key, rule and remedy.
    """
    extra = [Path(path) for path in extra_files]
    return _catalog_of(extra) if extra else _shipped()


@functools.lru_cache(maxsize=1)
def _shipped() -> Catalog:
    """Build once: this takes 5 ms, and some commands ask for each row of a table."""
    return _catalog_of([])


def _catalog_of(extra: Sequence[Path]) -> Catalog:
    rows: dict[str, dict[str, Any]] = {"platform": {}, "machine": {}}
    homes: dict[tuple[str, str], _File] = {}
    declared: dict[str, Any] = {}
    families = family_names() if extra else SHIPPED
    for file in (_built_in(), *(_File.load(path, families) for path in extra)):
        for section, merged in rows.items():
            for name, row in file.table(section).items():
                file.check(section, name, row)
                merged[name] = _merge(merged.get(name, {}), row)
                homes[section, name] = file
        declared = _merge(declared, file.environment())
    models = {name: homes["platform", name].model(name, row) for name, row in rows["platform"].items()}
    machines = {name: homes["machine", name].machine(name, row, models) for name, row in rows["machine"].items()}
    return Catalog(models=models, machines=machines, declared=declared)


def read_platform_file(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the text and the tables of a TOML file; raise ConfigurationError in one line if it has none."""
    file = _File.load(path, ())
    return file.text, file.tables


@functools.lru_cache(maxsize=1)
def _built_in() -> _File:
    """Read once: parsing its text takes most of the loading time."""
    return _File.load(BUILT_IN, SHIPPED)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` overridden by ``above``; tables are merged, a peak is replaced as a whole."""
    merged = dict(below)
    for key, value in above.items():
        both_tables = isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
        merged[key] = _merge(below[key], value) if both_tables and "value" not in value else value
    return merged


@dataclass(frozen=True, kw_only=True)
class _File:
    """One TOML file: its tables, and its text for line numbers."""

    path: Path
    text: str
    tables: Mapping[str, Any]
    families: tuple[str, ...]  # Valid families of a row.

    @classmethod
    def load(cls, path: Path, families: tuple[str, ...]) -> _File:
        try:
            text = decoded(content(path), "strict").replace("\r\n", "\n")
            file = cls(path=path, text=text, tables=tomllib.loads(text), families=families)
        except OSError as error:
            raise ConfigurationError(
                f"platform file {path} cannot be read: {why(error)}; correct the path or the permissions"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"platform file {path} is not UTF-8 at byte {error.start}; save it as UTF-8"
            ) from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"platform file {path} is not TOML: {error}; correct that line") from None
        except (RecursionError, ValueError):  # brackets in brackets, or a number of thousands of digits
            raise ConfigurationError(f"platform file {path} is nested too deep, or a number is too long") from None
        allowed = "a file has [platform.NAME] and [machine.NAME] tables, [environment] and [[expectation]] rows"
        if unknown := set(file.tables) - {"platform", "machine", "environment", "expectation"}:
            raise file.error(min(unknown), "", f"is unknown; {allowed}")
        if not file.tables:
            raise ConfigurationError(f"platform file {path} has no table; {allowed}")
        return file

    def error(self, table: str, key: str, rule: str) -> ConfigurationError:
        """Return the error about ``key`` of ``[table]``, with the line if found."""
        line = self._line(table, key)
        where = f"{self.path}{f', line {line}' if line else ''}"
        return ConfigurationError(f"platform file {where}: [{table}]{f' {key}' if key else ''} {rule}")

    def _line(self, table: str, key: str) -> int:
        """Return the line, from 1, of ``key`` in ``[table]`` or of ``[table.key]``, else of the table; 0 if unknown."""
        current, nearest = "", 0
        for number, line in enumerate(self.text.splitlines(), start=1):
            header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line)
            if header:
                current = header[1].replace('"', "")
                if current == f"{table}.{key}":
                    return number
                if not nearest and (current == table or current.startswith(f"{table}.")):
                    nearest = number
            elif key and current == table and re.match(rf'\s*"?{re.escape(key)}"?\s*[=.]', line):
                return number
        return nearest

    def table(self, name: str) -> Mapping[str, Any]:
        section = self.tables.get(name, {})
        if not isinstance(section, Mapping):
            raise self.error(name, "", f"is {section!r:.40}; write a table [{name}...]")
        return section

    def check(self, section: str, name: str, row: object) -> None:
        """Check a row or a machine of this file by itself, before it is merged into an earlier one."""
        (pattern, rule, keys), table = _SECTIONS[section], f"{section}.{name}"
        if not re.fullmatch(pattern, name):
            raise self.error(table, "", f"has name {name!r}; {rule}")
        if not isinstance(row, Mapping):
            raise self.error(section, name, f"is {row!r:.40}; write a table [{table}]")
        for key in row:
            if key not in keys:
                raise self.error(table, key, f"is unknown; choose from {', '.join(keys)}")
        if section == "machine":
            return
        if name in self.families and name != "cpu":
            raise self.error(
                table, "", "is the name of a family, reserved for its unknown devices; choose another name"
            )
        self._peaks(table, row)
        self._tflops(table, row.get("tflops", {}))
        self._lists(table, row)

    def _require_texts(self, table: str, row: Mapping[str, Any], keys: Iterable[str]) -> None:
        for key in keys:
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise self.error(table, key, f"is missing or not a text; write {key} = {_EXAMPLES[key]}")

    def model(self, name: str, row: Mapping[str, Any]) -> DeviceModel:
        """Return the complete row; this file is the last that wrote to it."""
        table = f"platform.{name}"
        self._require_texts(table, row, ("title", "family"))
        if not isinstance(row.get("architecture", ""), str):
            raise self.error(table, "architecture", f'is {row["architecture"]!r:.40}; write architecture = "mp_22"')
        if row["family"] not in self.families:
            raise self.error(
                table, "family", f"is {row['family']!r}, which is not installed; choose from {', '.join(self.families)}"
            )
        texts = {key: row[key] for key in ("title", "family", "architecture") if key in row}
        lists_and_peaks: dict[str, Any] = {**self._lists(table, row), **self._peaks(table, row)}
        return DeviceModel(name=name, **texts, tflops=self._tflops(table, row.get("tflops", {})), **lists_and_peaks)

    def machine(self, name: str, row: Mapping[str, Any], models: Mapping[str, DeviceModel]) -> MachineModel:
        """Return the complete machine; this file is the last that wrote to it."""
        table = f"machine.{name}"
        self._require_texts(table, row, _MACHINE_TEXTS)
        if row["platform"] not in models:
            near = did_you_mean(row["platform"], list(models))
            raise self.error(table, "platform", f"is {row['platform']!r}, which has no row; {near}")
        units = {key: unit for key, unit in _MACHINE_UNITS.items() if key in row or key != "network"}
        peaks: dict[str, Any] = {key: self._peak(table, key, row.get(key), unit) for key, unit in units.items()}
        if peaks["nodes"].value > 1 and "network" not in peaks:
            raise self.error(table, "network", "is missing for a machine of several nodes; write a whole node's rate")
        return MachineModel(name=name, **{key: row[key] for key in _MACHINE_TEXTS}, **peaks)

    def _lists(self, table: str, row: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        lists = {key: row.get(key, []) for key in _LISTS}
        for key, value in lists.items():
            if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
                raise self.error(table, key, f'is {value!r:.40}; write a list of texts: {key} = ["..."]')
        for dtype in lists["native"]:
            self._check_dtype(table, "native", dtype)
        return {key: tuple(value) for key, value in lists.items()}

    def _peaks(self, table: str, row: Mapping[str, Any]) -> dict[str, Peak]:
        return {key: self._peak(table, key, row[key], unit) for key, unit in _PEAK_UNITS.items() if key in row}

    def _check_dtype(self, table: str, key: str, dtype: str) -> None:
        if dtype not in _COMPUTE_DTYPES:
            raise self.error(table, key, f"names dtype {dtype!r}; choose from {', '.join(_COMPUTE_DTYPES)}")

    def _tflops(self, table: str, value: object) -> dict[str, Peak]:
        if not isinstance(value, Mapping):
            raise self.error(table, "tflops", f"is {value!r:.40}; write a table [{table}.tflops], a key per dtype")
        peaks = {}
        for dtype, peak in value.items():
            self._check_dtype(f"{table}.tflops", dtype, dtype)
            unit = "TOPS" if dtype.startswith("int") else "TFLOPS"
            peaks[dtype] = self._peak(f"{table}.tflops", dtype, peak, unit)
        return peaks

    def _peak(self, table: str, key: str, plain: object, unit: str) -> Peak:
        example = f'{{ value = 1.0, unit = "{unit}", source = "data sheet" }}'
        if not isinstance(plain, Mapping):
            raise self.error(table, key, f"is {plain!r:.40}; write {key} = {example}")
        if unknown := set(plain) - set(_PEAK_KEYS):
            raise self.error(table, key, f"has unknown key {min(unknown)!r}; choose from {', '.join(_PEAK_KEYS)}")
        value = plain.get("value")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.error(table, key, f"has value {value!r:.40}; write a number above 0, in {unit}")
        if plain.get("unit") != unit:
            raise self.error(table, key, f'has unit {plain.get("unit")!r:.40}; convert it and write unit = "{unit}"')
        if unit in ("devices", "nodes") and value != int(value):
            meaning = "of one node" if unit == "devices" else "of the machine"
            raise self.error(table, key, f"has value {value!r:.40}; write the whole number of {unit} {meaning}")
        source = plain.get("source")
        if not isinstance(source, str) or not source.strip():
            raise self.error(table, key, 'has no source; write where the number is from: source = "data sheet of ..."')
        kind = plain.get("kind", "published")
        if kind not in _KINDS:
            raise self.error(table, key, f"has kind {kind!r:.40}; choose from {', '.join(_KINDS)}")
        return Peak(value=float(value), unit=unit, source=source.strip(), kind=kind)

    def environment(self) -> Mapping[str, Any]:
        """Return the ``[environment]`` section: texts, numbers and lists of them, in at most one level of tables."""
        section = self.table("environment")
        for key, value in section.items():
            nested = value.items() if isinstance(value, Mapping) else [(key, value)]
            table = f"environment.{key}" if isinstance(value, Mapping) else "environment"
            for name, item in nested:
                plain = item if isinstance(item, list) else [item]
                if not all(isinstance(entry, (str, int, float)) for entry in plain):
                    raise self.error(table, name, f"is {item!r:.40}; write a text, a number or a list of texts")
        return section


_EXAMPLES: Mapping[str, str] = {
    "title": '"MTT S4000"',
    "family": '"musa"',
    "platform": '"s4000", the name of a row',
    "inside": '"MTLink: handbook of the machine, page 3"',
}
