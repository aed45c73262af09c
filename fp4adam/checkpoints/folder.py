"""Folders of safetensors files and JSON, as Hugging Face lays them out."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Entry(NamedTuple):
    """Tensors that belong together, with their metadata.

    Attributes:
        tensors: By name.
        metadata: For the header of the file.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def check_vacant(folder: Path) -> None:
    """Raise FileExistsError if ``folder`` is a file or holds a checkpoint: two might mix."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"folder must be one, got the file {str(folder)!r}; choose another")
    present = sorted(folder.glob("*.safetensors*"))
    if present:
        raise FileExistsError(
            f"folder must not hold a checkpoint yet, got {str(present[0])!r}; choose another one, "
            "or remove its safetensors files"
        )


def write(
    folder: Path,
    entries: Iterable[Entry],
    documents: dict[str, dict[str, Any]],
    max_shard_bytes: int,
) -> None:
    """Write a checkpoint; if anything fails, no file of it remains.

    Args:
        folder: The folder to write to, made if it does not exist.
        entries: All tensors, one shard of them in memory at a time.
        documents: JSON files by name, ``config.json`` among them: the last file to appear.
        max_shard_bytes: The most bytes of tensors in one file, unless a single entry is larger.
    """
    save_file = safetensors().torch.save_file
    check_vacant(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        scratch = Path(name)
        shards = []
        total = 0
        for i, shard in enumerate(_shards(entries, max_shard_bytes)):
            tensors = {name: tensor for entry in shard for name, tensor in entry.tensors.items()}
            metadata = {name: text for entry in shard for name, text in entry.metadata.items()}
            save_file(tensors, scratch / str(i), {"format": "pt", **metadata})
            shards.append([*tensors])
            total += sum(entry.nbytes for entry in shard)
        names = [ONE_FILE]
        if len(shards) != 1:
            n = len(shards)
            names = [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
            weight_map = {
                key: file for file, keys in zip(names, shards, strict=True) for key in keys
            }
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            documents = {INDEX: index, **documents}
        for i, file in enumerate(names):
            (scratch / str(i)).rename(scratch / file)
        for file, content in documents.items():
            text = json.dumps(content, indent=2, sort_keys=True)
            (scratch / file).write_text(text + "\n")
        folder.mkdir(exist_ok=True)
        for file in sorted((*names, *documents), key=lambda file: file == CONFIG):
            os.replace(scratch / file, folder / file)


def _shards(entries: Iterable[Entry], max_shard_bytes: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.nbytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.nbytes
    yield shard


class CheckpointReader:
    """The tensors of a checkpoint, each read on request; a context manager.

    Attributes:
        config: The content of ``config.json``.
        metadata: The headers of all files, merged.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_json(folder / CONFIG)
        self.metadata: dict[str, str] = {}
        self._file_of: dict[str, Any] = {}
        weight_map = None
        files = [ONE_FILE]
        if (folder / INDEX).exists():
            weight_map = _read_json(folder / INDEX).get("weight_map", {})
            files = sorted(set(weight_map.values()))
        with contextlib.ExitStack() as stack:
            for name in files:
                file = stack.enter_context(_open(folder / name))
                self.metadata.update(file.metadata() or {})
                self._file_of.update(dict.fromkeys(file.keys(), file))
            if weight_map is not None and weight_map.keys() != self._file_of.keys():
                key = min(weight_map.keys() ^ self._file_of.keys())
                raise ValueError(
                    f"{INDEX} must list what its files hold, got another list, for instance "
                    f"without {key!r} on one side; the checkpoint is damaged: copy it again"
                )
            self._stack = stack.pop_all()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        """The names of all tensors."""
        return {*self._file_of}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU."""
        return self._file_of[name].get_tensor(name)


def _open(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"{str(path)!r} must exist, got no such file; copy it as well")
    package = safetensors()
    try:
        return package.safe_open(path, framework="pt")
    except package.SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} must be a whole safetensors file, got {error}; copy it again"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(
            f"{str(path)!r} must exist, got no such file; pass the folder of a checkpoint"
        )
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} must be JSON, got {error}; copy it again") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{str(path)!r} must hold an object, got a {kind}; copy it again")
    return content


def safetensors() -> Any:
    """The package.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "the package safetensors must be installed to export and import checkpoints; "
            "pip install fp4adam[export]"
        ) from None
    return safetensors
