"""What pyproject.toml cannot say: the README on a package index, links for editable installs."""

import contextlib
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
# The one folder that editable installs add to sys.path.
EDITABLE = "build/editable"
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


class LinkedEditableWheel(editable_wheel):
    """An editable install as a line in a .pth file: type checkers follow it, but no import hook.

    The line names a folder with nothing but a link to the package. Beside the package itself lies
    ``kernels/``, and Hugging Face has a package of that name.
    """

    def finalize_options(self) -> None:
        """Make the links that an import follows."""
        super().finalize_options()
        _link(f"{EDITABLE}/fp4adam", "../../fp4adam")
        _link("fp4adam/kernels", "../kernels")
        self.package_dir = {"": EDITABLE}


def _link(path: str, target: str) -> None:
    """Make a symbolic link, unless there is one."""
    link = ROOT / path
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(target, target_is_directory=True)


if __name__ == "__main__":
    # A program that starts in the clone imports the package from there, however it is installed.
    with contextlib.suppress(OSError):  # no links on this file system, or a clone for reading only
        _link("fp4adam/kernels", "../kernels")
    setup(
        cmdclass={"editable_wheel": LinkedEditableWheel},
        long_description=index_page(
            (ROOT / "README.md").read_text(),
            _value("pyproject.toml", r'^Repository = "([^"]+?)/?"'),
            _value("fp4adam/__init__.py", r'^__version__ = "([^"]+)"'),
        ),
        long_description_content_type="text/markdown",
    )
