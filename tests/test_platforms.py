"""What macOS lacks is not needed to import anything: Linux-only packages are optional, and marked so."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINUX_PACKAGES = ("triton", "deepspeed", "vllm", "sglang")
LINUX_NAMES = ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "sendfile")
LINUX_NAMES += ("pidfd_open", "F_SETPIPE_SZ", "O_DIRECT", "EPOLLIN", "epoll")
LINUX_MODULES = ("spwd", "ossaudiodev")

PROGRAM = '''
import importlib, json, pkgutil, sys

blocked = set(json.loads(sys.argv[1]))
read = set()

class Hiding:
    """The finder of ordinary modules, for which some packages are not installed."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in blocked else self.finder.find_spec(name, path, target)

def opened(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/proc/", "/sys/")):
        frame = sys._getframe(1)
        for _ in range(4):  # The caller, or a helper of pathlib below it.
            if frame is None:
                break
            if "/drafttrain/" in frame.f_code.co_filename:
                read.add(arguments[0])
            frame = frame.f_back

sys.meta_path = [Hiding(f) if getattr(f, "__name__", "") == "PathFinder" else f for f in sys.meta_path]
sys.addaudithook(opened)
import drafttrain
names = [info.name for info in pkgutil.walk_packages(drafttrain.__path__, "drafttrain.") if "__main__" not in info.name]
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = str(error)
print(json.dumps({"modules": len(names), "failed": failed, "read": sorted(read)}))
'''


def test_everything_imports_without_the_packages_of_linux():
    words = [sys.executable, "-c", PROGRAM, json.dumps(LINUX_PACKAGES)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["modules"] > 100
    assert found["failed"] == {}
    assert found["read"] == []


def linux_only(source: str) -> list[str]:
    """Names in a module that macOS' Python does not have, wherever they stand, and its imports of Linux packages that
    run when it is imported.
    """
    tree = ast.parse(source)
    found = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in LINUX_NAMES]
    late = None
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        bad = [name for name in names if name.split(".")[0] in (*LINUX_PACKAGES, *LINUX_MODULES)]
        if bad and late is None:
            late = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        found += [name for name in bad if id(node) not in late]
    return found


def test_no_linux_only_call():
    allowed = {"fused_triton.py": ["triton", "triton.language"], "vllm_worker.py": ["vllm"]}
    for path in sorted((ROOT / "drafttrain").rglob("*.py")):
        found = linux_only(path.read_text(encoding="utf-8"))
        assert set(found) <= set(allowed.get(path.name, ())), f"{path.relative_to(ROOT)}: {found}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nos.sched_getaffinity(0)", ["sched_getaffinity"]),
        ("import triton", ["triton"]),
        ("from triton import language", ["triton"]),
        ("def kernel():\n    import triton", []),
        ("import resource, fcntl", []),
    ],
)
def test_linux_only_names_are_found(source, found):
    assert linux_only(source) == found


def test_dependencies_of_linux_are_marked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = [*project["dependencies"], *(row for rows in project["optional-dependencies"].values() for row in rows)]
    unmarked = [row for row in rows if row.startswith(LINUX_PACKAGES) and "platform_system == 'Linux'" not in row]
    assert not unmarked
    constraints = (ROOT / "constraints.txt").read_text().split()
    # torch's CUDA builds fix their own.
    assert not [row for row in constraints if row.startswith(("triton", "nvidia", "vllm", "sglang"))]
