"""Finding the answer in a completion and comparing it. Pure, and linear in the length of hostile text."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

Kind = Literal["last_number", "boxed", "tag", "exact"]

# A sign is one only where no operand stands before it: "10-5" ends in 5. After "= " it may stand apart.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]])[-+]|(?<==) ?-\s)?[$€£]?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\w|\.\d))?(?P<below> ?/ ?\d+)?",
    re.ASCII,
)
# Full-width forms, and the dashes that are typed for minus signs.
_ASCII = {0xFF10 + digit: ord("0") + digit for digit in range(10)} | str.maketrans(
    "\uff0c\uff0e\uff05\uff04\uff0f\uff0d\ufe63\u2212\u2013\u2012\u2011\u2010", ",.%$/-------"
)
# What LaTeX writes differently, none of it with a meaning of its own; thin and no-break spaces between thousands.
_REWRITTEN = tuple(
    (re.compile(pattern, re.ASCII), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:[\u00a0\u2009\u202f]|\\,|\{,\})(?=\d{3}(?!\d))", ","),
        (r"(?<=\d) ?(?:\\times|\\cdot|\u00d7) ?10 ?\^ ?(?:\{(-?\d{1,3})\}|(-?\d{1,3})(?!\d))", r"e\1\2"),
        (r"(?<=\d)\\[dt]?frac(?=\{)", r" \\frac"),
        (r"\\[dt]?frac ?\{ ?(-?\d+) ?\} ?\{ ?(\d+) ?\}", r"\1/\2"),
        (r"\\(?:text|textbf|mathbf|mathrm) ?\{([^{}]*)\}", r" \1 "),
        (r"\^\{?\\circ\}?", "°"),
        (r"\\[()\[\],;!]", " "),
        (r"\\(?=[$%])", ""),
    )
)
_AROUND = "*_`$ \t\r\n"
_BOXED = re.compile(r"(?P<boxed>\\boxed\s*\{)|\\[{}]|[{}]")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
# Decimal's own work is linear, but nobody means more digits than this.
_MAX_DIGITS = 1000
# What may follow a number that is the whole answer: " clips, altogether." but no digit, operator or bracket.
_UNITS = re.compile(r"[%°]?(?:[\s.,;:!?][^\d*/^+=<>()\[\]{}_\\|-]*)?")


def extract(text: str, kind: Kind) -> str | None:
    """The answer that `text` gives, or None.

    last_number: the last number, wherever it stands, as -1234.5 (no commas, ASCII sign); boxed: what the last complete
    \\boxed{} holds; tag: what the last <answer></answer> holds; exact: everything. Thinking is not the answer: what
    stands before </think> is left out, and so is all that follows a <think> that was never closed.
    """
    spoken = after_thinking(text)
    match kind:
        case "last_number":
            found = _last_number(spoken)
        case "boxed":
            found = _last_boxed(spoken)
        case "tag":
            found = _last_tag(spoken)
        case "exact":
            found = spoken
    return (found or "").strip() or None


def same_answer(extracted: str, gold: str) -> bool:
    """Whether both are the same number, or else the same text apart from spacing.

    "1,234.50" is 1234.5, and "72 clips, altogether." is 72. A fraction is text: 2/4 does not answer "simplify 2/4".
    """
    wanted = _value(gold)
    if wanted is not None:
        given = _value(extracted, units=True)
        if given is not None:
            return given == wanted
    return _plain(extracted).split() == _plain(gold).split()


def same_number(extracted: str, gold: str) -> bool | None:
    """Whether both are the same number; None unless each is a number and nothing else."""
    given, wanted = _value(extracted), _value(gold)
    return None if given is None or wanted is None else given == wanted


def after_thinking(text: str) -> str:
    """What is said and not thought: nothing that stands before </think> or after a <think> that was never closed."""
    _, closed, after = text.rpartition("</think>")
    spoken = after if closed else text
    return spoken.partition("<think>")[0]


def _last_number(text: str) -> str | None:
    last = None
    for last in _NUMBER.finditer(_plain(text)):  # noqa: B007
        pass
    return last and _written(last)


def _plain(text: str) -> str:
    """The same with ASCII digits and signs, and numbers written as one types them."""
    text = text.translate(_ASCII)
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return text


def _written(number: re.Match[str]) -> str:
    sign = "-" if (number["sign"] or "+") != "+" else ""
    below = (number["below"] or "").replace(" ", "")
    return sign + number["digits"].replace(",", "") + (number["exponent"] or "") + below


def _value(text: str, units: bool = False) -> Decimal | None:
    stripped = _plain(text).strip(_AROUND)
    if stripped.startswith("- "):
        stripped = "-" + stripped[1:].lstrip()
    number = _NUMBER.match(stripped)
    if number is None or number["below"] or len(number["digits"]) > _MAX_DIGITS:
        return None
    rest = stripped[number.end() :]
    whole = _UNITS.fullmatch(rest) if units else rest in ("", ".", "%")
    return Decimal(_written(number)) if whole else None


def _last_boxed(text: str) -> str | None:
    """One pass with a stack of open braces, so that unclosed ones cost nothing twice."""
    opened: list[tuple[bool, int]] = []
    last = (-1, -1)
    for token in _BOXED.finditer(text):
        if token["boxed"] or token[0] == "{":
            opened.append((bool(token["boxed"]), token.end()))
        elif token[0] == "}" and opened:
            boxed, start = opened.pop()
            if boxed and start > last[0]:
                last = (start, token.start())
    return text[slice(*last)] if last[0] >= 0 else None


def _last_tag(text: str) -> str | None:
    start, last = None, None
    for token in _TAG.finditer(text):
        if not token[1]:
            start = token.end()
        elif start is not None:
            last = text[start : token.start()]
            start = None
    return last
