"""Folders of safetensors files and JSON, as Hugging Face lays them out: how they are written."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The dtypes of safetensors files by the names that headers have for them.
DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (64, 32, 16, 8)},
    **{"BF16": torch.bfloat16, "C64": torch.complex64, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    "F8_E8M0": torch.float8_e8m0fnu,
}


Entry = dict[str, Tensor]  # tensors that belong together, by name


def safetensors() -> Any:
    """The package; raises ImportError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "the package safetensors must be installed to write or read checkpoints; "
            "pip install safetensors numpy"
        ) from None
    return safetensors


def _check_vacant(folder: Path, names: Iterable[str]) -> None:
    """Raise FileExistsError if files would be mixed with others, or overwrite some of ``names``."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"folder must be one, got the file {str(folder)!r}; choose another")
    present = next(folder.glob("*.safetensors*"), None)
    if present is not None:
        raise FileExistsError(
            f"folder must not hold a checkpoint yet, got {str(present)!r}; choose another one, "
            "or remove its safetensors files"
        )
    for name in names:
        if (folder / name).exists():
            raise FileExistsError(
                f"folder must not hold a {name} yet, got {str(folder / name)!r}, which would be "
                "overwritten; choose another folder, or remove it"
            )


@contextlib.contextmanager
def _new_files(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """A hidden folder to write to; its files appear in ``folder`` when the block ends.

    It becomes ``folder`` if that does not exist yet. Otherwise it lies inside, so that both are on
    one file system also at mount points, and its files are moved, ``config.json`` last. A process
    that is killed leaves the hidden folder, ``.<folder>-*.partial``; an error leaves nothing.
    """
    folder = folder.resolve()
    _check_vacant(folder, names)
    place = folder if folder.exists() else folder.parent
    hidden = place / f".{folder.name[:50]}-{secrets.token_hex(8)}.partial"
    hidden.mkdir(parents=True)
    try:
        try:
            yield hidden
        except (OSError, safetensors().SafetensorError) as error:
            raise OSError(
                getattr(error, "errno", None),
                f"the checkpoint must be written whole, got {str(error)!r}; nothing of it is left, "
                "make room or choose another folder",
                str(folder),
            ) from error
        _check_vacant(folder, os.listdir(hidden))
        if place == folder:
            _move_files(hidden, folder)
        else:
            os.rename(hidden, folder)  # fails if another process has made it, unless it is empty
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _move_files(source: Path, target: Path) -> None:
    paths = sorted(source.iterdir(), key=lambda path: path.name == CONFIG)
    try:
        for path in paths:
            path.rename(target / path.name)
    except BaseException:
        for path in paths:
            (target / path.name).unlink(missing_ok=True)
        raise


def write(
    folder: Path,
    entries: Iterable[Entry],
    documents: dict[str, dict[str, Any]],
    max_shard_bytes: int,
    metadata: dict[str, str],
) -> None:
    """Write a checkpoint: all files of it appear at the end, or none does.

    Args:
        folder: The folder to write to, made if it does not exist.
        entries: All tensors, one shard of them in memory at a time.
        documents: JSON files by name, ``config.json`` among them: the last file to appear.
        max_shard_bytes: The most bytes of tensors in one file, unless a single entry is larger.
        metadata: What the headers of all files say besides.

    FileExistsError if something there, also from another process meanwhile, would be mixed with it
    or overwritten; ValueError if two tensors have one name.
    """
    save_file = safetensors().torch.save_file
    with _new_files(folder, documents) as place:
        shard_numbers: dict[str, int] = {}
        count = total = 0
        for count, shard in enumerate(_shards(entries, max_shard_bytes), 1):
            tensors: dict[str, Tensor] = {}
            addresses: set[int] = set()
            for name, value in chain.from_iterable(entry.items() for entry in shard):
                if name in shard_numbers:
                    raise ValueError(
                        f"tensors of a checkpoint must have different names, got two {name!r}; "
                        "rename the buffer or parameter that is called like a scale of a weight"
                    )
                shard_numbers[name] = count
                # safetensors refuses tensors that share memory, such as a scale of all experts.
                tensors[name] = value.clone() if value.data_ptr() in addresses else value
                addresses.add(value.data_ptr())
                total += value.nbytes
            save_file(tensors, place / f"{count}", {"format": "pt", **metadata})
        names = {1: ONE_FILE}
        if count > 1:
            names = {i: f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)}
            weight_map = {name: names[i] for name, i in shard_numbers.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            documents = {INDEX: index, **documents}
        for i, name in names.items():
            (place / f"{i}").rename(place / name)
        for name, content in documents.items():
            (place / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _shards(entries: Iterable[Entry], max_shard_bytes: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    size = 0
    for tensors in entries:
        entry = {name: x.cpu().contiguous() for name, x in tensors.items()}
        nbytes = sum(x.nbytes for x in entry.values())
        if shard and size + nbytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += nbytes
    yield shard
