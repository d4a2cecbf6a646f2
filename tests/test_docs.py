"""The documentation names nothing that does not exist: commands, options, targets of make, scripts, files, links,
settings of a recipe, and recipes that load.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import BaseModel

import drafttrain
from drafttrain.cli import app
from drafttrain.recipe import Recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("recipes/*.md"), *sorted((ROOT / "drafttrain").glob("*/README.md"))]
PACKAGES = sorted(path.parent.name for path in (ROOT / "drafttrain").glob("*/__init__.py"))
VERBS = typer.main.get_command(app).commands
SECTIONS = tuple(name for name in Recipe.model_fields if name not in ("method", "source_path"))
USAGE_ERROR = typer.BadParameter.__mro__[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
STARTS = ("drafttrain ", "make ", "python -m drafttrain ", "python scripts/", "scripts/", "accelerate launch ")
PLACES = ("drafttrain", "scripts", "tests", "recipes", *PACKAGES)
OTHERS = ("--help", "--version", "--install-completion", "--show-completion")
OTHERS += ("--model-impl", "--model-loader-extra-config", "--speculative-config", "--disable-hybrid-kv-cache-manager")
OTHERS += ("--machine_rank", "--num_processes", "--config_file", "--signal", "--requeue")
"""Options of the command line itself, of engines, and of accelerate and Slurm."""
BASES = (ROOT, ROOT / "drafttrain", ROOT / "scripts")
OPERATORS = ("||", "&&", "|", ";", ">", "2>")
SOURCES = (".py", ".sh", ".md", ".j2", ".css", ".toml")


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page)


def spans(page: str) -> list[str]:
    """What stands in code font in the running text and in tables."""
    return [span.replace("\\|", "|").strip() for span in re.findall(r"`([^`\n]+)`", prose(page))]


def commands(page: str) -> Iterator[str]:
    """Command lines: in code font, and in fenced blocks, continued lines joined, without comments and prompts."""
    lines = [span for span in spans(page) if span.startswith(STARTS) and "<" not in span]
    for _, block in FENCE.findall(page):
        lines += block.replace("\\\n", " ").splitlines()
    for line in lines:
        words = re.sub(r"^(\$ |[A-Z_]+=\S+ )+", "", line.strip())
        words = re.sub(r"^(\.venv/bin/)", "", words)
        if words.startswith(STARTS):
            yield re.sub(r"\s+#.*$|\s*[;&|]+\s*$", "", words)


def check_command(line: str) -> str | None:
    """What is wrong with a command line; None where it would be read as it stands."""
    words = shlex.split(line)
    words = words[: next((i for i, word in enumerate(words) if word in OPERATORS), None)]
    if words[0] == "make":
        return check_make(words[1:])
    if words[:3] == ["python", "-m", "drafttrain"]:
        words = words[2:]
    if words[0] == "drafttrain":
        return check_verb(words[1:])
    scripts = [i for i, word in enumerate(words) if word.startswith("scripts/")]
    if not scripts:
        return None if all(word.startswith("--") for word in words[2:]) else "no script is named"
    return check_script(words[scripts[0] :])


def check_verb(words: list[str]) -> str | None:
    if words[0] in ("--help", "--version", "--install-completion", "--show-completion"):
        return None
    if words[0] == "VERB":
        return None if words[1:] == ["--help"] else "VERB stands for a verb before --help alone"
    if words[0] not in VERBS:
        return f"there is no verb {words[0]}"
    if words[1:] in ([], ["--help"]):  # The verb is only mentioned.
        return None
    try:
        VERBS[words[0]].make_context(words[0], [word for word in words[1:] if word != "..."])
    except USAGE_ERROR as error:
        return str(error)
    return check_overrides(words[1:])


def check_overrides(words: list[str]) -> str | None:
    """Dotted settings given as KEY=VALUE."""
    keys = [word.partition("=")[0] for word in words if re.match(r"[a-z][a-z_0-9]*(\.[a-z_0-9]+)*=", word)]
    wrong = [key for key in keys if not is_setting(key)]
    return f"there is no setting {wrong[0]}" if wrong else None


def check_make(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        name, equals, _ = word.partition("=")
        pattern = rf"^{re.escape(name)} *[:?]?=" if equals else rf"^{re.escape(name)}:"
        if not re.search(pattern, text, flags=re.MULTILINE):
            return f"the Makefile has no {'variable' if equals else 'target'} {name}"
    return None


@cache
def script_options(path: Path) -> frozenset[str]:
    """Options of a script: every "--name" in its text, and the parameters of its main as typer names them."""
    tree = ast.parse(path.read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = {text for text in texts if re.fullmatch(r"--[a-z][a-z-]*", text)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            names = [argument.arg.replace("_", "-") for argument in node.args.args]
            found |= {f"--{name}" for name in names} | {f"--no-{name}" for name in names}
    return frozenset(found)


def check_script(words: list[str]) -> str | None:
    path = ROOT / words[0]
    if not path.is_file():
        return f"there is no {words[0]}"
    if path.name.startswith("train_"):
        return check_verb(["train", *words[1:]])
    source = path.with_suffix(".py")
    options = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    wrong = options - script_options(source) - {"--help"}
    return f"{words[0]} has no {min(wrong)}" if wrong else None


def is_setting(key: str, values: object = None) -> bool:
    """Whether the dotted key is one of a recipe's; values: what it is set to, whose own keys are looked up too."""
    model: object = Recipe
    for name in key.split("."):
        if name.isdigit() and isinstance(model, type):  # an entry of a list
            continue
        if not isinstance(model, type) or name not in model.model_fields:
            return False
        model = section_of(model.model_fields[name].annotation)
    if isinstance(values, list):
        return all(is_setting(key, value) for value in values if isinstance(value, dict))
    if isinstance(values, dict) and isinstance(model, type):
        return all(is_setting(f"{key}.{name}", value) for name, value in values.items())
    return True


def section_of(annotation: object) -> object:
    """The section that a field holds, be it optional or in a list; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [section_of(part) for part in getattr(annotation, "__args__", ())]
    return next((part for part in inner if part is not None), None)


def setting_of(span: str) -> tuple[str, object] | None:
    """(dotted key, value or None) of a span: `training.loss`, `training.loss: jsd`, `draft: {num_heads: 4}`."""
    if span.endswith((*SOURCES, ".gguf", ".json")):
        return None
    found = re.fullmatch(rf"(({'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)*)(?:[:=] *(.+))?", span)
    if found is None or ("." not in found[1] and (found[3] or "")[:1] != "{"):
        return None
    try:
        return found[1], yaml.safe_load(found[3]) if found[3] else None
    except yaml.YAMLError:
        return found[1], None


def missing_path(span: str, page: Path) -> bool:
    """Whether a span looks like a file of the repository and is none."""
    if not re.fullmatch(r"[\w./*{},<>-]+", span) or "<" in span or span.startswith(("/", "~", "--", "*")):
        return False
    first = span.partition("/")[0]
    ours = "/" in span and first in PLACES
    if not ours and not (span.endswith(SOURCES) and "/" not in span):
        return False
    return not any(list(base.glob(span.rstrip("/"))) for base in (page.parent, *BASES))


@cache
def options() -> frozenset[str]:
    """Every option of a verb or a script."""
    ours = {name for verb in VERBS.values() for param in verb.params for name in param.opts}
    return frozenset(ours.union(*(script_options(path) for path in (ROOT / "scripts").glob("*.py"))))


def unknown_options(span: str) -> list[str]:
    """Options that stand alone in code font, without their command, and that no verb, script or engine has."""
    if not span.startswith("--"):
        return []
    return [name for name in re.findall(r"--[a-z][a-z-]+", span) if name not in options() and name not in OTHERS]


def headings(page: str) -> set[str]:
    """The anchors of a page's headings."""
    found = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in found}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        where, _, anchor = link.partition("#")
        if re.match(r"https?:|mailto:", link):
            continue
        file = (page.parent / where) if where else page
        if not file.exists() or (anchor and anchor not in headings(file.read_text() if where else text)):
            broken.append(link)
    return broken


def faults(page: Path, text: str) -> list[str]:
    """Everything that a page names and that does not exist."""
    found = [f"`{line}`: {why}" for line in commands(text) if (why := check_command(line))]
    found += [f"no link: {link}" for link in broken_links(page, text)]
    found += [f"left to be filled: {line}" for line in re.findall(r"^(?:[A-Z]+_[A-Z]+|<!--.*)$", text, re.MULTILINE)]
    for span in spans(text):
        found += [f"`{span}`: no verb or script has {name}" for name in unknown_options(span)]
        setting = setting_of(span)
        if setting is not None and not is_setting(*setting):
            found.append(f"`{span}`: no such setting of a recipe")
        elif setting is None and not span.startswith(STARTS) and missing_path(span, page):
            found.append(f"`{span}`: no such file")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    assert faults(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_recipes_of_a_page_load(page):
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        values = yaml.safe_load(block) if language == "yaml" else {}
        if "method" in values:
            assert parse_recipe(values, ROOT).method == values["method"]
        assert [key for key, value in values.items() if not is_setting(key, value)] == []


def test_every_package_has_a_page():
    assert [name for name in PACKAGES if not (ROOT / "drafttrain" / name / "README.md").exists()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_page_names_every_module(package):
    folder = ROOT / "drafttrain" / package
    text = (folder / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_python_of_a_page_imports_the_public_names():
    """The calls themselves are run by tests/test_api.py."""
    blocks = [block for page in PAGES for language, block in FENCE.findall(page.read_text()) if language == "python"]
    assert blocks
    for block in blocks:
        names = [n for n in ast.walk(ast.parse(block)) if isinstance(n, ast.ImportFrom) and n.module == "drafttrain"]
        assert {alias.name for node in names for alias in node.names} <= set(drafttrain.__all__)


GOOD = """
`drafttrain evaluate RUN --k 1,2,3` and `make test`, `make setup TORCH_ARGS="x"`, `training.loss: jsd`,
`draft: {lora: {r: 16}}`, `specdec/decode.py`, `recipes/*/eagle3-*.yaml`, `Qwen/Qwen3-8B`, [a word](README.md#recipes)
and [one](#one), `data.train`, `scripts/bench_vllm.py --no-plain --max-new-tokens 48`, `checkpoints/demo/export`,
`bench_vllm.py`, `drafttrain train RECIPE || echo no`.

# One

```
PYTHON=x scripts/gpu_check.sh --tiny
accelerate launch --num_processes 8 scripts/train_eagle.py recipes/r.yaml training.max_minutes=20   # eight devices
drafttrain evaluate RUN \\
  --temperature 0,0.8
```
"""


def test_a_page_without_fault():
    assert faults(ROOT / "README.md", GOOD) == []
    assert len(list(commands(GOOD))) == 8


@pytest.mark.parametrize(
    "wrong",
    [
        "`drafttrain evaluat RUN`",
        "`drafttrain evaluate RUN --kk 3`",
        "`drafttrain train RECIPE training.learning_rat=1`",
        "`--temprature 0,0.8`",
        "Figures:\n\nTABLE_HERE\n",
        "`make tests`",
        "`make setup TORCH_ARG=x`",
        "`scripts/bench_vlm.py`",
        "`scripts/bench_vllm.py --plane`",
        "`training.los`",
        "`training.loss.more`",
        "`draft: {lora: {rank: 16}}`",
        "`data: {train: [{file: prompts.jsonl}]}`",
        "`specdec/decoding.py`",
        "`tests/specdec/test_nothing_*.py`",
        "`no_such_file.py`",
        "[a word](NOTHING.md)",
        "[a word](README.md#no-such-heading)",
        "[one](#two)",
        "```\ndrafttrain tune RUN --ks 3\n```",
        "```\naccelerate launch scripts/train_eagl.py RECIPE\n```",
        "```\naccelerate launch scripts/train_kd.py RECIPE training.step=3\n```",
        "```\n$ .venv/bin/drafttrain nothing\n```",
    ],
)
def test_a_name_that_does_not_exist_is_found(wrong):
    assert len(faults(ROOT / "README.md", wrong)) == 1, wrong
