"""The own scorers of reasoning_gym's families: third-party code that parses the model's text.

Imported only in a worker, and only for families that accept more than one answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.gym import import_reasoning_gym

Accepts = Callable[[str], bool]

# Many scorers give partial credit; only a full mark is exact.
_FULL_MARK = 0.999

# Families whose scorer runs the text through eval (or sympy's parser, which is eval too), and complex_arithmetic,
# which gives "nan" a full mark. They get formulas only: no name longer than a letter but these, no string, no
# backslash to spell a name with.
_FORMULAS_ONLY = frozenset(
    {
        "complex_arithmetic", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
        "puzzle24", "simple_integration",
    }
)  # fmt: skip
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "pi")
)
_NAME = re.compile(r"[^\W\d]\w*")

# What these scorers raise on a text that they cannot parse, which is then a wrong answer (in 0.1.25: boxnet, coin_flip,
# game_of_life, prime_factorization).
_UNPARSED = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip

_loaded: dict[tuple[str, str], Any] = {}


def load(answer: dict[str, Any]) -> Accepts:
    """The scorer of the family that `answer` names, for its entry. Imports the package, which takes seconds."""
    package = import_reasoning_gym()
    key = (answer["family"], repr(answer["params"]))
    if key not in _loaded:
        _loaded[key] = package.create_dataset(answer["family"], seed=0, size=10, **answer["params"])
    dataset = _loaded[key]

    def accepts(extracted: str) -> bool:
        if answer["family"] in _FORMULAS_ONLY and not _is_formula(extracted):
            return False
        try:
            return dataset.score_answer(extracted, answer["entry"]) >= _FULL_MARK
        except _UNPARSED:
            return False

    return accepts


def _is_formula(text: str) -> bool:
    names = _NAME.findall(text)
    return not set(text) & set("\"'\\") and all(len(name) == 1 or name in _FUNCTIONS for name in names)
