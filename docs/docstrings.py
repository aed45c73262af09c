"""Docstrings, which are reStructuredText, as the Markdown that mkdocstrings expects."""

import re
from pathlib import Path
from typing import Any

from griffe import Alias, Extension, Module, Object

INIT = Path(__file__).resolve().parents[1] / "fp4adam" / "__init__.py"
PUBLIC = frozenset(re.findall(r" as (\w+)$", INIT.read_text(), re.MULTILINE))

ROLE = re.compile(r":\w+:`(?:fp4adam\.)?([\w.]+)`")
FIELDS = re.compile(r"^(?=``\w+``(?:, ``\w+``)*:)", re.MULTILINE)
TABLE = re.compile(
    r"^(?P<rule>=+(?: +=+)+)\n(?P<head>.+)\n(?P=rule)\n(?P<body>(?:.+\n)+?)(?P=rule)$",
    re.MULTILINE,
)


class MarkdownDocstrings(Extension):
    """Rewrites the docstrings of the package."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """A public function hides the module of the same name, as it does when it is imported."""
        for name in PUBLIC.intersection(pkg.modules):
            if name in pkg[name].members:
                pkg.members[name] = Alias(name, pkg[name][name], parent=pkg)


def markdown(text: str) -> str:
    """References to public names as links, simple tables, lists of fields, literal blocks."""
    text = TABLE.sub(_table, text)
    text = FIELDS.sub("- ", text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return ROLE.sub(_link, text)


def _link(role: re.Match) -> str:
    name = role[1]
    return f"[`{name}`][fp4adam.{name}]" if name in PUBLIC else f"`{name}`"


def _table(table: re.Match) -> str:
    starts = [column.start() for column in re.finditer("=+", table["rule"])]
    stops = [*starts[1:], None]
    rows: list[list[str]] = []
    for line in table["body"].splitlines():
        cells = [line[start:stop].strip() for start, stop in zip(starts, stops, strict=True)]
        # A row goes on where its first cell is empty, or has ended with a comma.
        if rows and (not cells[0] or rows[-1][0].endswith(",")):
            rows[-1] = [" ".join(both).strip() for both in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    head = [table["head"][start:stop].strip() for start, stop in zip(starts, stops, strict=True)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
