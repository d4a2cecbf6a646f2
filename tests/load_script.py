"""Scripts are no package: a test loads the file it is about."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load_script(path: Path | str) -> ModuleType:
    """The module in a file; a bare name is one of scripts/."""
    path = SCRIPTS / f"{path}.py" if isinstance(path, str) else path
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))  # As where a script is run: it may import one beside it.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
