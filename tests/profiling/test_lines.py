"""What counts as a line of code, against counts made by hand."""

from __future__ import annotations

import pytest

from profiling.lines import code_lines

MODULE = '''"""Title.

More."""

import os  # why

# A comment.
TEXT = """two
lines"""


class Box:
    """Holds."""

    size: int = 1
    """In litres."""

    def open(self) -> None:
        """Open."""
        print(
            self.size,
        )
'''


@pytest.mark.parametrize(
    ("source", "count"), [("", 0), ("\n# nothing\n", 0), ('"""Only a docstring."""\n', 0), ("x = 1\n", 1), (MODULE, 9)]
)
def test_blank_lines_comments_and_docstrings_do_not_count(source: str, count: int) -> None:
    assert code_lines(source) == count
