"""Measured worth of a draft: timed runs against the plain target, the cost model, other engines, and the report.

The package is callable: `drafttrain.evaluate(...)` is `drafttrain.evaluate.runner.evaluate(...)`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    # Python binds the name drafttrain.evaluate to this package as soon as anything in it is imported. Being callable
    # keeps `from drafttrain import evaluate` the public function in whichever order things are imported.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from drafttrain.evaluate.runner import evaluate

        return evaluate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
