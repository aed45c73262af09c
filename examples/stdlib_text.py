"""Training text that every machine has: the source code of Python's standard library, as bytes."""

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
MAX_BYTES = 16 * 2**20


@functools.cache
def load_text() -> tuple[Tensor, Tensor]:
    """Training and validation text, uint8 on the CPU; every tenth file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if not SKIPPED.intersection(name.split("/"))]
    if len(names) < 10:
        raise SystemExit(f"{root} must hold *.py files to train on, got {len(names)}")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for index, name in enumerate(names):
        content = (root / name).read_bytes()
        size += len(content)
        if size > MAX_BYTES:
            break
        parts[index % 10 == 9].append(content)
    train, validation = (
        torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts
    )
    return train, validation


def cut_batch(text: Tensor, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random crops of ``text`` and their next bytes, int64 [batch, context], by ``seed`` alone."""
    # torch's CPU generator looks at the low 32 bits of its seed only.
    generator = torch.Generator().manual_seed(seed % 2**32)
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    crops = text[starts + torch.arange(context + 1)].long()
    return crops[:, :-1], crops[:, 1:]
