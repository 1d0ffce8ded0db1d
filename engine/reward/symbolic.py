"""Mathematics that is written differently and means the same, by math-verify, which only a worker imports."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from engine.reward.answer import same_answer, same_number

# Hardly an answer is longer, and a thousand open brackets take the parser 12 s.
_MAX_CHARACTERS = 300
_DELIMITERS = re.compile(r"\\?[$%]|\\[()\[\]]")
# "listen" would be a product of six symbols, and equal to "silent".
_WORDS = re.compile(r"[^\W\d_]{3,}(?:\s+[^\W\d_]+)*")

SameMeaning = Callable[[str, str], bool]


def load() -> SameMeaning:
    """(answer, gold) -> whether they mean the same. Imports sympy.

    Numbers compare exactly; so do words, and a gold that is no formula, as text. Formulas are equal if sympy says so; a
    fraction or root and its decimals are, to six places. A percent sign is a unit: 7% is 7. What a gold number asks
    for is a number: 11+1 is no answer to 12, or the question would be an answer to itself.

    math-verify finds nothing here: it gets the answer alone, as one formula. Its own time limit is off: it rings an
    alarm that a long multiplication does not hear, and the pool kills.
    """
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig
    from sympy import Equality, Number

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off
    formulas = (LatexExtractionConfig(),)

    def parsed(text: str) -> Any | None:
        formula = f"${_DELIMITERS.sub('', text)}$"
        return next(iter(parse(formula, formulas, fallback_mode="no_fallback", parsing_timeout=0)), None)

    def same(answer: str, gold: str) -> bool:
        numbers = same_number(answer, gold)
        if numbers is not None:
            return numbers
        if answer.split() == gold.split():
            return True
        if _WORDS.fullmatch(gold.strip()) or (wanted := parsed(gold)) is None:
            return same_answer(answer, gold)
        given = parsed(answer) if len(answer) <= _MAX_CHARACTERS else None
        if isinstance(wanted, Number):
            given = given.rhs if isinstance(given, Equality) else given
            given = given if isinstance(given, Number) else None
        return given is not None and verify(wanted, given, timeout_seconds=0)

    return same
