"""The one way to import reasoning_gym."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from typing import Any


def import_reasoning_gym() -> Any:
    """The package, which takes a second to import and brings no types.

    It imports pycosat for one family (`zebra_puzzles`), and pycosat must be compiled: without a C compiler an empty
    module stands in, and that family fails when it is asked for.
    """
    if importlib.util.find_spec("pycosat") is None:
        sys.modules.setdefault("pycosat", types.ModuleType("pycosat"))
    with warnings.catch_warnings():
        # A dependency of the package warns about its own syntax when it is first compiled.
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("reasoning_gym")
