"""The reference pages say what the code says: docs/config.md every key, docs/metrics.md every column."""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

from engine import errors
from engine.algorithms.health import BANDS
from engine.algorithms.presets import CORRECTION_BOUNDS, PRESETS, RULE_BOUNDS
from engine.config import NOT_BUILT, Config
from engine.observe.metrics import FAMILIES, KEYS

ROOT = Path(__file__).parents[2]

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table"}


def table_rows(text: str) -> list[list[str]]:
    """Cells of all rows of Markdown tables, heads and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in rows if row[0].startswith("`")]


def takes(kind: Any) -> str:
    """What a key accepts, in words."""
    if get_origin(kind) is typing.Annotated:
        plain, *metas = get_args(kind)
        return takes(plain) + "".join(bound for meta in metas for bound in bounds(meta))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" if choice != "" else "empty" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        return f"list: {takes(parts[0])}" if parts[-1] is Ellipsis else f"list of {len(parts)}: {takes(parts[0])}"
    return _WORDS[get_origin(kind) or kind]


def bounds(meta: msgspec.Meta) -> list[str]:
    words = (("at least", meta.ge), ("above", meta.gt), ("at most", meta.le), ("below", meta.lt))
    return [f", {word} {bound}" for word, bound in words if bound is not None]


def shown(value: Any) -> str:
    """A value as TOML writes it."""
    match value:
        case msgspec.NODEFAULT:
            return "required"
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'`"{value}"`'
        case tuple():
            return "`[" + ", ".join(shown(item).strip("`") for item in value) + "]`"
        case dict():
            return "`{}`"
        case _:
            return f"`{value}`"


def works(key: str, default: Any) -> str:
    """Which values are built."""
    built = NOT_BUILT.get(key)
    if built is None:
        return "all"
    return "default only" if built == (default,) else ", ".join(shown(value) for value in built)


def schema() -> dict[str, list[str]]:
    """section.key -> what its row must say before the meaning."""
    hints = typing.get_type_hints(Config, include_extras=True)
    rows: dict[str, list[str]] = {}
    for section in msgspec.structs.fields(Config):
        kind = hints[section.name]
        while not (isinstance(kind, type) and not isinstance(kind, types.GenericAlias)):
            kind = get_args(kind)[0]
        types_of = typing.get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            key = f"{section.name}.{field.name}"
            rows[key] = [takes(types_of[field.name]), shown(default), works(key, default)]
    return rows


def documented_keys() -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for part in (ROOT / "docs/config.md").read_text().split("\n## ")[1:]:
        heading = re.match(r"`\[+(\w+)\]+`", part)
        if heading:
            rows |= {f"{heading[1]}.{row[0].strip('`')}": row[1:] for row in table_rows(part)}
    return rows


def test_the_config_page_has_every_key_and_no_other() -> None:
    assert list(documented_keys()) == list(schema())


@pytest.mark.parametrize("key", schema())
def test_a_config_row_says_what_the_schema_says(key: str) -> None:
    *row, meaning = documented_keys()[key]
    assert row == schema()[key]
    assert meaning


def test_the_metrics_page_has_every_column() -> None:
    rows = [[cell.strip("`") for cell in row] for row in table_rows((ROOT / "docs/metrics.md").read_text())]
    assert rows == [list(key) for key in (*KEYS, *FAMILIES)]


def algorithm_rows(start: str, end: str) -> dict[str, list[str]]:
    """First cell -> the others, of the tables of docs/algorithms.md between two texts."""
    text = (ROOT / "docs/algorithms.md").read_text()
    return {row[0].strip("`"): row[1:] for row in table_rows(text[text.index(start) : text.index(end)])}


def test_the_algorithms_page_has_every_preset() -> None:
    rows = {
        name: [loss.ratio, loss.level, loss.rule, f"{loss.low:g}", f"{loss.high:g}", loss.gradient, loss.correction,
               f"{loss.kl.to} {loss.kl.kind} {loss.kl.coef:g}" if loss.kl else ""]
        for name, loss in PRESETS.items()
    }  # fmt: skip
    assert algorithm_rows("## Presets", "## Aggregation") == rows


@pytest.mark.parametrize(
    ("heading", "end", "bounds_of"),
    [
        ("| `algorithm.rule`", "A replaced r", RULE_BOUNDS),
        ("| `algorithm.correction`", "`algorithm.kl` =", CORRECTION_BOUNDS),
    ],
)
def test_the_algorithms_page_has_every_bound(heading: str, end: str, bounds_of: dict[str, tuple[float, float]]) -> None:
    _, *rows = algorithm_rows(heading, end).items()
    assert {name: (float(low or 0), float(high or "inf")) for name, (_, low, high) in rows} == bounds_of


def test_the_algorithms_page_has_every_band() -> None:
    rows = {name: tuple(map(float, limits)) for name, limits in algorithm_rows("## Health", "The limits are").items()}
    assert rows == {name: (band.healthy, band.bad) for name, band in BANDS.items()}


def test_the_errors_page_has_every_error_with_its_exit_code() -> None:
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.FarfieldError) and kind is not errors.FarfieldError
    }
    rows = {row[0].strip("`"): row[1] for row in table_rows((ROOT / "docs/errors.md").read_text()) if row[1].isdigit()}
    assert rows == {name: str(kind.exit_code) for name, kind in kinds.items()}


MIGRATION = table_rows((ROOT / "docs/coming-from.md").read_text())


@pytest.mark.parametrize("row", MIGRATION, ids=lambda row: row[0].replace("`", ""))
def test_the_migration_page_names_keys_that_exist_and_says_which_are_built(row: list[str]) -> None:
    rows, (ours, *_, difference) = schema(), row
    for key in re.findall(r"`([\w.]+)`", ours):
        assert difference.startswith("not built yet") == (rows[key][2] == "default only")
    sections = "|".join(field.name for field in msgspec.structs.fields(Config))
    assert set(re.findall(rf"`((?:{sections})\.\w+)", difference)) <= rows.keys()


def test_the_migration_page_names_no_key_twice() -> None:
    keys = [key for row in MIGRATION for key in re.findall(r"`([\w.]+)`", row[0])]
    assert len(keys) == len(set(keys)) > 60


PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "configs/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = re.findall(r"`((?:engine|evals|configs|requirements|docs)/[\w./-]+\.(?:py|toml|lock|txt|md))`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
