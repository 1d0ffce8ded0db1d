"""Lines of code per folder: `python profiling/lines.py engine evals profiling`. Blank, comment and docstring lines
do not count."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """How many lines of `source` hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(ast.parse(source)))


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of all strings that stand alone: docstrings of modules, classes, functions and attributes."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            case _:
                pass
    return lines


def main(folders: list[str]) -> None:
    """Print lines per folder, one level below the named ones, and their sum."""
    total = 0
    for top in folders:
        counts: dict[str, int] = {}
        for file in sorted(Path(top).rglob("*.py")):
            folder = "/".join(file.parts[: min(2, len(file.parts) - 1)])
            counts[folder] = counts.get(folder, 0) + code_lines(file.read_text())
        total += sum(counts.values())
        for folder, count in counts.items():
            print(f"{count:6,}  {folder}")
    print(f"{total:6,}  lines of code in all")


if __name__ == "__main__":
    main(sys.argv[1:])
