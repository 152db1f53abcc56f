"""Base and new arm run different code however the checkout was installed, or the module that is not the arm's is named.

Every install is written as its tool writes it, into an environment of its own, without a network.
"""

import json
import subprocess
import sys
import textwrap
import venv

import pytest

from perfsuite.run.arms import ArmFailed, arm_of, described_imports, run_arm
from test_correctness.helpers.machines import write
from test_correctness.test_ab import CONFTEST, STEP
from test_correctness.test_git import committed
from test_correctness.test_git import run_git as git

ARMS = """
import json, subprocess, sys
from pathlib import Path
from perfsuite.run.arms import Arm, arm_environment, arm_of

IN_ARM = '''
import importlib, json, sys
from perfsuite.runtime.own_tree import ForeignModule, own_modules, require_own_modules
speed = importlib.import_module(sys.argv[1])
try:
    require_own_modules()
    print(json.dumps([speed.FACTOR, own_modules()]))
except ForeignModule as error:
    print(json.dumps([str(error), {}]))
'''
repository = Path(sys.argv[1])
with arm_of(repository, "HEAD~1", "base") as base:
    for arm in (base, Arm(name="new", root=repository)):
        command = [sys.executable, "-c", IN_ARM, sys.argv[2]]
        done = subprocess.run(command, cwd=arm.root, env=arm_environment(arm), capture_output=True, text=True)
        print(done.stdout.strip() or json.dumps([done.stderr, {}]))
"""
"""Prints for base and new arm what the module said, or why it was refused, and where modules came from."""

FINDER = """
import sys
from importlib.util import spec_from_file_location
MAPPING = {mapping!r}
class _EditableFinder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname in MAPPING:
            return spec_from_file_location(fullname, MAPPING[fullname] + "/__init__.py")
def install():
    sys.meta_path.append(_EditableFinder)
"""
REDIRECTION = """
import sys
from importlib.util import spec_from_file_location
class RedirectingFinder:
    _redirections = {mapping!r}
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname in cls._redirections:
            return spec_from_file_location(fullname, cls._redirections[fullname])
sys.meta_path.append(RedirectingFinder)
"""
LOADER = """
import sys
from importlib.util import spec_from_file_location
class MesonpyMetaFinder:
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "shop":
            return spec_from_file_location(fullname, {file!r})
sys.meta_path.insert(0, MesonpyMetaFinder())
"""


@pytest.fixture
def site(tmp_path, pytestconfig):
    """site-packages of a new environment that has perfsuite, pytest and what they need."""
    made = venv.EnvBuilder(symlinks=True, with_pip=False)
    made.create(tmp_path / "environment")
    (folder,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    borrowed = [str(pytestconfig.rootpath), *(path for path in sys.path if path.endswith("-packages"))]
    (folder / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return folder


@pytest.fixture
def checkout(tmp_path):
    """A package in src/, whose FACTOR was 1 in the commit before and is 2."""
    return committed(tmp_path / "checkout", *({"src/shop/__init__.py": f"FACTOR = {factor}\n"} for factor in (1, 2)))


def said_by_arms(site, checkout, module="shop"):
    python = site.parents[2] / "bin" / "python"
    command = [python, "-c", ARMS, str(checkout), module]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def static(name):
    def install(site, checkout):
        (site / name).write_text(f"{checkout / 'src'}\n")

    return install


def finder(site, checkout):
    (site / "__editable___shop_1_0_finder.py").write_text(FINDER.format(mapping={"shop": str(checkout / "src/shop")}))
    line = "import __editable___shop_1_0_finder; __editable___shop_1_0_finder.install()\n"
    (site / "__editable__.shop-1.0.pth").write_text(line)


def links(site, checkout):
    tree = checkout / "build" / "__editable__.shop-1.0-py3-none-any"
    (tree / "shop").mkdir(parents=True)
    (tree / "shop" / "__init__.py").symlink_to(checkout / "src" / "shop" / "__init__.py")
    (site / "__editable__.shop-1.0.pth").write_text(f"{tree}\n")


def redirection(site, checkout):
    mapping = {"shop": str(checkout / "src/shop/__init__.py")}
    (site / "_editable_impl_shop.py").write_text(REDIRECTION.format(mapping=mapping))
    (site / "_editable_impl_shop.pth").write_text("import _editable_impl_shop\n")


@pytest.mark.parametrize(
    "install",
    [
        pytest.param(static("shop.pth"), id="setuptools, hatch and uv"),
        pytest.param(finder, id="setuptools-finder"),
        pytest.param(links, id="setuptools-strict"),
        pytest.param(redirection, id="hatch-exact"),
    ],
)
def test_each_arm_runs_its_own_code(site, checkout, install):
    install(site, checkout)
    base, new = said_by_arms(site, checkout)
    assert [base, new] == [[factor, {"shop": "src/shop/__init__.py"}] for factor in (1, 2)]


def test_a_finder_before_the_path_is_named(site, checkout):
    (site / "_shop_editable_loader.py").write_text(LOADER.format(file=str(checkout / "src/shop/__init__.py")))
    (site / "shop-editable.pth").write_text("import _shop_editable_loader\n")
    (error, _), new = said_by_arms(site, checkout)
    assert f"module shop was imported from {checkout}/src/shop/__init__.py, outside of the tree of the rev" in error
    assert "(asked before the import path: _shop_editable_loader.MesonpyMetaFinder); give --perf-against" in error
    assert new == [2, {"shop": "src/shop/__init__.py"}]


def test_an_installed_copy_is_no_revision(site, checkout):
    write(site, {"shop/__init__.py": "FACTOR = 3\n"})
    (error, _), new = said_by_arms(site, checkout)
    assert f"module shop was imported from {site}/shop/__init__.py, outside of the tree" in error
    assert new == [3, {"shop": f"{site}/shop/__init__.py"}]


def test_an_installed_copy_of_what_lies_in_an_unusual_folder_is_named_and_a_dependency_is_not(site, tmp_path):
    project = {"code/pyproject.toml": '[project]\nname = "Shop_Core"\n', "third_party/yaml/__init__.py": "FACTOR = 8\n"}
    checkout = committed(tmp_path / "checkout", *({**project, "code/shop/__init__.py": f"F = {n}\n"} for n in (1, 2)))
    for package, distribution in (("shop", "shop-core"), ("yaml", "PyYAML")):
        metadata = f"{distribution}-1.0.dist-info"
        told = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        files = {f"{package}/__init__.py": "FACTOR = 3\n", f"{metadata}/METADATA": told}
        write(site, {**files, f"{metadata}/top_level.txt": package})
    (error, _), new = said_by_arms(site, checkout)
    assert f"module shop was imported from {site}/shop/__init__.py, outside of the tree" in error
    assert 3 == new[0]
    assert [[3, {}]] * 2 == said_by_arms(site, checkout, "yaml")


@pytest.mark.extended
def test_a_namespace_has_portions_in_both_trees_and_its_modules_are_the_arms(site, tmp_path):
    package = {"src/ns/shop/speed.py": "FACTOR = 1\n"}
    after = {"src/ns/shop/speed.py": "FACTOR = 2\n", "src/ns/shop/added.py": "FACTOR = 2\n"}
    checkout = committed(tmp_path / "checkout", package, after)
    static("__editable__.ns_shop-1.0.pth")(site, checkout)
    write(site, {"ns/other/__init__.py": "FACTOR = 9\n"})  # of somebody else, in the same namespace
    files = {"ns": "src/ns", "ns.shop": "src/ns/shop", "ns.shop.speed": "src/ns/shop/speed.py"}
    assert [[1, files], [2, files]] == said_by_arms(site, checkout, "ns.shop.speed")
    ((error, _), (factor, _)) = said_by_arms(site, checkout, "ns.shop.added")
    assert f"module ns.shop.added was imported from {checkout}/src/ns/shop/added.py, outside" in error
    assert 2 == factor
    assert [[9, {"ns": "src/ns"}]] * 2 == said_by_arms(site, checkout, "ns.other")


@pytest.fixture
def suite(tmp_path, monkeypatch, pytestconfig):
    """A repository with src/ layout whose pytest has ``pythonpath``; cases in it are measured by a script."""
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    ini = "[pytest]\npythonpath = src\naddopts = --benchmark-max-time=0.2 -p no:hypothesispytest\n"
    first = {"pytest.ini": ini, "conftest.py": textwrap.dedent(CONFTEST), "test_sleep.py": textwrap.dedent(STEP)}
    later = {"src/shop/__init__.py": "DELAY_S = 0.025\n"}
    return committed(tmp_path / "checkout", {**first, "src/shop/__init__.py": "DELAY_S = 0.02\n"}, later)


def test_folders_of_pytests_pythonpath_are_those_of_the_arm(suite):
    with arm_of(suite, "HEAD~1", "base") as base:
        measured = run_arm(base, ["."], 60)
    (result,) = measured.values()
    assert 0.02 == result.median_s
    assert "conftest from ., shop from src, test_sleep from ." == described_imports(measured)


def test_an_arm_with_a_foreign_module_is_not_measured_and_says_so_first(suite):
    path = suite / "conftest.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(suite / 'src')!r})\n" + path.read_text())
    git(suite, "commit", "--quiet", "--all", "--message", "absolute")
    with arm_of(suite, "HEAD", "base") as base, pytest.raises(ArmFailed) as failed:
        run_arm(base, ["."], 60)
    first = str(failed.value).splitlines()[0]
    assert f"base was not measured: module shop was imported from {suite}/src/shop/__init__.py, outside of" in first
    assert failed.value.whatever_case
