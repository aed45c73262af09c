"""The README as a package index shows it; everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
DEFINITION = re.compile(r"^\[([^\]]+)\]: (?!https://)(\S+)\n", re.MULTILINE)
IMAGES = (".png", ".svg")


def index_page(readme: str, repository: str | None, version: str) -> str:
    """The README with links that work outside of the repository.

    Args:
        readme: Its relative links are defined at its end, as ``[name]: path``.
        repository: Where these files are; None turns links into their text and drops images.
        version: The tag that links lead to is "v" and this.
    """
    if repository is None:
        readme = DEFINITION.sub("", readme)
        readme = re.sub(r"!\[[^\]]+\]\[[^\]]+\]\n\n", "", readme)
        return re.sub(r"\[([^\]]+)\]\[[^\]]+\]", r"\1", readme)

    def absolute(definition: re.Match) -> str:
        name, path = definition.groups()
        kind = "raw" if path.endswith(IMAGES) else "blob"
        return f"[{name}]: {repository}/{kind}/v{version}/{path}\n"

    return DEFINITION.sub(absolute, readme)


def _value(path: str, pattern: str) -> str | None:
    found = re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)
    return found and found[1]


if __name__ == "__main__":
    setup(
        long_description=index_page(
            (ROOT / "README.md").read_text(),
            _value("pyproject.toml", r'^Repository = "([^"]+?)/?"'),
            _value("fp4adam/__init__.py", r'^__version__ = "([^"]+)"'),
        ),
        long_description_content_type="text/markdown",
    )
