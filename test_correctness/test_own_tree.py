"""An arm runs the code of its own tree: folders that come first, and modules of another tree that are named."""

import contextlib
import sys
from types import ModuleType

import pytest

from perfsuite.runtime import own_tree
from perfsuite.runtime.copies import NO_PROJECT, UNREADABLE, PackageCopies, package_folders
from perfsuite.runtime.own_tree import ForeignModule, mirrored, own_modules, require_own_modules, variable
from test_correctness.helpers.machines import write as written


@pytest.fixture
def trees(tmp_path):
    for name in ("checkout/src/shop", "checkout/.venv/lib/site-packages", "tree/src/shop"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "tree", tmp_path / "checkout"


def module(name, file):
    made = ModuleType(name)
    made.__file__ = str(file)
    return made


def test_folders_of_the_checkout_that_code_comes_from_are_those_of_the_tree_too(trees, monkeypatch):
    tree, checkout = trees
    places = [checkout / "src", checkout, checkout / ".venv" / "lib" / "site-packages", tree.parent / "elsewhere"]
    monkeypatch.setattr(sys, "path", [*map(str, places), str(checkout / "src")])
    assert mirrored(tree, checkout) == [str(tree / "src"), str(tree)]


def test_a_finder_of_an_editable_install_tells_where_packages_are(trees, monkeypatch):
    tree, checkout = trees
    finder = module("__editable___shop_1_0_finder", "/venv/site-packages/__editable___shop_1_0_finder.py")
    finder.MAPPING = {"shop": str(checkout / "src" / "shop"), "other": "/elsewhere/other"}
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [type("Finder", (), {"__module__": finder.__name__})])
    assert mirrored(tree, checkout) == [str(tree / "src")]


def test_a_module_of_the_checkout_in_an_arm_is_named_and_others_are_not(trees, monkeypatch):
    tree, checkout = trees
    fine = {
        "shop": module("shop", tree / "src" / "shop" / "__init__.py"),
        "torch": module("torch", checkout / ".venv" / "lib" / "site-packages" / "torch.py"),
        "json": module("json", "/usr/lib/python3/json.py"),
        "builtin": ModuleType("builtin"),
        "torch.ops": module("torch.ops", "_ops.py"),
    }
    wrong = {**fine, "shop.till": module("shop.till", checkout / "src" / "shop" / "till.py")}
    require_own_modules(wrong)  # no arm
    for name, value in variable(tree, checkout).items():
        monkeypatch.setenv(name, value)
    require_own_modules(fine)
    assert own_modules(fine) == {"shop": "src/shop/__init__.py"}
    with pytest.raises(ForeignModule, match=r"module shop.till was imported from .*till.py, outside of the tree of "):
        require_own_modules(wrong)


def test_a_tree_inside_the_checkout_is_the_arms_own(trees, monkeypatch):
    _, checkout = trees
    inside = checkout / "tmp" / "tree"
    monkeypatch.setenv(own_tree.VARIABLE, variable(inside, checkout)[own_tree.VARIABLE])
    require_own_modules({"shop": module("shop", inside / "src" / "shop" / "__init__.py")})


def test_folders_with_modules_and_the_project_that_installs_them(tmp_path):
    tree = written(
        tmp_path / "tree",
        {
            "code/pyproject.toml": '[build-system]\nrequires = []\n[project]\nname = "shop-core"  # ours\n',
            "code/ns/shop/__init__.py": "",
            "code/ns/shop/deep/__init__.py": "",
            "old/setup.py": "setup(name=NAME)",
            "old/till.py": "",
            "docs/index.md": "",
        },
    )
    folders = {str(tree / name): project for name, project in (("code/ns", "shop-core"), ("code", "shop-core"))}
    assert package_folders(tree) == {**folders, str(tree): NO_PROJECT, str(tree / "old"): UNREADABLE}


@pytest.mark.parametrize(
    ("owner", "origin", "text", "copied"),
    [
        ("shop-core", "", "b", True),  # a release of the project
        ("Shop.Core", "", "b", True),
        ("", "", "b", True),  # copied by hand
        ("other", "file://CHECKOUT/dist/other.whl", "b", True),
        ("other", "", "a", True),  # the same text
        ("other", "https://example.org/other.whl", "b", False),  # a dependency of that name
    ],
)
def test_a_copy_is_told_from_a_dependency_by_what_installed_it(tmp_path, owner, origin, text, copied):
    tree = written(tmp_path / "tree", {"code/shop/__init__.py": "", "code/shop/till.py": "a"})
    installed = written(tmp_path / "site", {"shop/__init__.py": "", "shop/till.py": text}) / "shop" / "till.py"
    copies = PackageCopies(
        {str(tree / "code"): "shop-core"},
        tmp_path / "checkout",
        owners=lambda: {"shop": [owner]} if owner else {},
        origin=lambda _: f'{{"url": "{origin.replace("CHECKOUT", str(tmp_path / "checkout"))}"}}',
    )
    assert copies.has("shop.till", installed) == copied
    assert not copies.has("shop_of_others.till", installed)


# -- the session's own run ---------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A checkout whose session this is; gives its folder and sets whether a foreign module fails."""
    written(
        tmp_path / "here",
        {
            "src/shop/__init__.py": "RATE = 2\n",
            "src/shop/till.py": "",
            "packages/tools/tools/__init__.py": "",
            "test_it.py": "",
            "conftest.py": "",
        },
    )
    (tmp_path / "here" / ".git").mkdir()

    def session(*, exclusive):
        told = own_tree.session_variable(tmp_path / "here", exclusive=exclusive)
        monkeypatch.setenv(own_tree.VARIABLE, told[own_tree.VARIABLE])
        return tmp_path / "here"

    return session


@pytest.mark.parametrize(
    "case",
    [
        ("shop", "other/src/shop/__init__.py", "RATE = 2\n", True),  # an editable install, whatever its text
        ("shop", "venv/lib/site-packages/shop/__init__.py", "RATE = 3\n", True),  # an old copy
        ("shop.till", "venv/lib/site-packages/shop/till.py", "#", True),
        ("tools", "other/packages/tools/tools/__init__.py", "", True),  # in no usual folder of another checkout
        ("shop", "here/.venv/lib/site-packages/shop/__init__.py", "RATE = 1\n", True),
        ("shop", "here/src/shop/__init__.py", "RATE = 2\n", False),
        ("shop", "venv/lib/site-packages/shop/__init__.py", "RATE = 2\n", False),  # pip install . of this very state
        ("shop._fast", "venv/lib/site-packages/shop/_fast.so", "", False),  # built: the checkout has no such file
        ("torch", "venv/lib/site-packages/torch/__init__.py", "", False),
        ("helper", "other/helper/__init__.py", "", False),  # another project that is installed editable
        ("conftest", "other/conftest.py", "", False),
        ("json", "here/src/json.py", "", False),
    ],
)
def test_a_module_from_elsewhere_is_foreign_where_the_checkout_has_another(tmp_path, here, case):
    name, file, text, foreign = case
    written(tmp_path, {file: text})
    (tmp_path / "other" / ".git").mkdir(parents=True, exist_ok=True)
    modules = {name: module(name, tmp_path / file), "builtin": ModuleType("builtin")}
    here(exclusive=False)
    require_own_modules(modules)
    assert own_modules(modules) == ({name: str(tmp_path / file)} if foreign else {})
    here(exclusive=True)
    refused = pytest.raises(ForeignModule, match=f"module {name} was imported from .* and not from this checkout")
    with refused if foreign else contextlib.nullcontext():
        require_own_modules(modules)
