"""Text to train on, as bytes: the standard library, which every machine has, or any folders."""

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

# Tests, character tables and the manual: half of the text, and no library code.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
MAX_BYTES_OF_STDLIB = 16 * 2**20
SUFFIXES = (".py", ".md", ".rst", ".txt")
MAX_BYTES = 256 * 2**20


@functools.cache
def load_text(folders: tuple[str, ...] = ()) -> tuple[Tensor, Tensor]:
    """Training and validation text, uint8 on the CPU; every tenth file is held out.

    Args:
        folders: Their *.py, *.md, *.rst and *.txt files are read, one folder after the other and in
            order of names, up to 256 MiB; () stands for 16 MiB of the standard library.
    """
    if folders:
        found = (path for folder in folders for path in files(Path(folder)))
        # Each once, so that nothing is trained on that is held out as well.
        paths, limit = [*dict.fromkeys(found)], MAX_BYTES
    else:
        paths, limit = stdlib_files(), MAX_BYTES_OF_STDLIB
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for index, path in enumerate(paths):
        content = path.read_bytes()
        size += len(content)
        if size > limit:
            break
        parts[index % 10 == 9].append(content)
    if not all(parts):
        raise SystemExit(
            f"{' and '.join(folders) or 'the standard library'} must hold 10 files or more to "
            f"train on, within {limit >> 20} MiB, got {len(paths)}"
        )
    train, validation = (
        torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts
    )
    return train, validation


def files(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files below a folder whose names end so, sorted."""
    found = (path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    return sorted(found, key=Path.as_posix)


def stdlib_files() -> list[Path]:
    """The library code of Python itself."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = files(root, (".py",))
    return [path for path in paths if not SKIPPED.intersection(path.relative_to(root).parts)]


def cut_batch(text: Tensor, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random crops of ``text`` and their next bytes, int64 [batch, context], by ``seed`` alone.

    They are cut where the text is: from one on a GPU, without waiting for it.
    """
    # torch's CPU generator looks at the low 32 bits of its seed only.
    generator = torch.Generator().manual_seed(seed % 2**32)
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    starts = starts.to(text.device, non_blocking=True)
    crops = text[starts + torch.arange(context + 1, device=text.device)].long()
    return crops[:, :-1], crops[:, 1:]
