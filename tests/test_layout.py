"""The shape of the repository: imports run strictly downward, files stay small, every recipe loads."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import drafttrain
from drafttrain.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "drafttrain"

# Top to bottom. A module may import from the floors below its own and from its own package, nothing else. A single file
# may have helpers beside it that start with its name: target_files.py shares the floor of target.py.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"demo", "doctor", "init", "publish"},
    {"plan"},
    {"training"},
    {"export"},
    {"evaluate"},
    {"data"},
    {"specdec"},
    {"drafts"},
    {"target"},
    {"nn"},
    {"recipe"},
    {"errors"},
]
# The evaluator's core knows drafts only through Proposer, training only through Draft and the function that makes one.
ONLY_THROUGH = {("specdec", "drafts"): ("drafts.base",), ("training", "drafts"): ("drafts.base", "drafts.loading")}
MOST_LINES = 600

LEVEL = {name: len(FLOORS) - level for level, names in enumerate(FLOORS) for name in names}


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) for every import from the package, nested and relative ones too; modules without the prefix."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            # `from drafttrain.drafts import base` imports a module, `from drafttrain.drafts.base import Draft` a name.
            names = [f"{origin}.{alias.name}" for alias in node.names]
        for name in names:
            if name == "drafttrain" or name.startswith("drafttrain."):
                yield node.lineno, name.removeprefix("drafttrain").lstrip(".")


def first_of(name: str) -> str:
    """The module or package right below `drafttrain.`"""
    return name.split(".")[0]


def floor_of(name: str) -> str:
    """The entry of FLOORS that a module below `drafttrain.` belongs to; the name's first part where there is none."""
    first = name.split(".")[0]
    return first if first in LEVEL else first.split("_")[0] if first.split("_")[0] in LEVEL else first


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module's imports break, as "line N: ..."; `module` is its full dotted name."""
    home = floor_of(module.split(".")[1]) if "." in module else "__init__"
    broken = []
    for line, name in imported(source, module, is_package):
        floor = floor_of(name)
        if name == "__version__" or floor == home:
            continue
        if floor not in LEVEL:
            broken.append(f"line {line}: {name or 'drafttrain'} is no module of the package; import from its own home")
        elif home == "__init__" or LEVEL[floor] >= LEVEL[home]:
            broken.append(f"line {line}: {home} imports {name}, which is not below it")
        elif not f"{name}.".startswith(tuple(f"{way}." for way in ONLY_THROUGH.get((home, floor), (first_of(name),)))):
            broken.append(f"line {line}: {home} imports {name}, expected {ONLY_THROUGH.get((home, floor), floor)}")
    return broken


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_run_strictly_downward() -> None:
    broken = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source, is_package = path.read_text(encoding="utf-8"), path.name == "__init__.py"
        broken += [f"{path.relative_to(ROOT)}: {text}" for text in violations(source, dotted(path), is_package)]
    assert not broken, "\n".join(broken)


def test_every_module_has_a_floor() -> None:
    homes = {
        floor_of(dotted(path).partition(".")[2])
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE or path.stem[0] != "_"
    }
    assert homes <= set(LEVEL)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("drafttrain.nn.cache", "from drafttrain.target import Target"),
        ("drafttrain.nn.cache", "import drafttrain.target"),
        ("drafttrain.nn.cache", "from drafttrain import target"),
        ("drafttrain.nn.cache", "from ..target import Target"),
        ("drafttrain.nn.cache", "from .. import target"),
        ("drafttrain.nn.cache", "def late():\n    from drafttrain.target import Target"),
        ("drafttrain.nn.cache", "if TYPE_CHECKING:\n    from drafttrain.specdec.decode import generate"),
        ("drafttrain.nn.cache", "import drafttrain"),
        ("drafttrain.evaluate.runner", "from drafttrain import load_target"),
        ("drafttrain.plan", "from drafttrain.init import make_recipe"),
        ("drafttrain.specdec.decode", "from drafttrain.drafts.eagle3 import Eagle3Draft"),
        ("drafttrain.specdec.decode", "from drafttrain.drafts import load_draft"),
        ("drafttrain.training.trainer", "from ..drafts import medusa"),
        ("drafttrain.target_files", "from drafttrain.drafts.base import Draft"),
        ("drafttrain.nn.cache", "from drafttrain.target_files import load"),
        ("drafttrain.errors", "from drafttrain.recipe import Recipe"),
        ("drafttrain", "from drafttrain.target import load_target"),
    ],
)
def test_an_upward_import_is_found(module: str, source: str) -> None:
    assert len(violations(source, module, is_package=module == "drafttrain")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("drafttrain.target", "from drafttrain.nn.cache import RaggedCache\nfrom drafttrain.errors import UserError"),
        ("drafttrain.target_files", "from drafttrain.target import TargetError\nfrom drafttrain.nn import cache"),
        ("drafttrain.specdec.decode", "from drafttrain.drafts.base import Proposer\nfrom . import verify"),
        ("drafttrain.training.trainer", "from ..drafts import base\nfrom .callbacks import Budget"),
        ("drafttrain.cli", "from drafttrain import __version__\nimport drafttrain.demo"),
        (
            "drafttrain.evaluate.runner",
            "import torch\nfrom transformers import target\nfrom drafttrain.drafts import load_draft",
        ),
    ],
)
def test_a_downward_import_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_a_package_resolves_its_own_relative_imports() -> None:
    assert (
        violations("from .base import Draft\nfrom ..target import Target", "drafttrain.drafts", is_package=True) == []
    )
    assert len(violations("from ..specdec import decode", "drafttrain.drafts", is_package=True)) == 1


def test_files_stay_small() -> None:
    files = [path for folder in ("drafttrain", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_every_recipe_loads() -> None:
    recipes = [path for path in sorted((ROOT / "recipes").rglob("*.yaml")) if path.parent.name != "accelerate"]
    assert recipes
    for path in recipes:
        recipe = load_recipe(path)
        assert recipe.source_path == path
        if path.parent != ROOT / "recipes":
            assert path.name.startswith(f"{recipe.method}-"), f"{path}: expected the name <method>-<target>.yaml"


def test_the_public_names_are_listed_and_others_refused() -> None:
    assert {"load_target", "load_draft", "generate", "evaluate"} <= set(dir(drafttrain))
    with pytest.raises(AttributeError, match="no attribute 'load_model'"):
        drafttrain.load_model  # noqa: B018


def test_evaluate_is_callable_before_and_after_its_package_is_imported() -> None:
    first = drafttrain.evaluate
    importlib.import_module("drafttrain.evaluate.report")

    assert first is drafttrain.evaluate
    assert callable(first)
