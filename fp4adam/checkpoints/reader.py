"""Reading of folders of safetensors files and JSON that others may have made.

What a file says is checked before anything is allocated for it. Nothing outside the folder is
opened, and nothing in it is run.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4adam.checkpoints.folder import (
    CONFIG,
    DTYPES,
    HF_QUANT_CONFIG,
    INDEX,
    ONE_FILE,
    safetensors,
)


class CheckpointReader(contextlib.ExitStack):
    """The tensors of a checkpoint, each read on request; a context manager.

    ``config`` and ``hf_quant_config`` are the contents of these files, empty if there is only the
    other one, ``metadata`` the headers of all files, merged. FileNotFoundError if a file is
    missing, ValueError if one is damaged, or lies outside of the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        has_quant_config = (folder / HF_QUANT_CONFIG).exists()
        self.hf_quant_config = _read_json(folder, HF_QUANT_CONFIG) if has_quant_config else {}
        has_config = (folder / CONFIG).exists() or not has_quant_config
        self.config = _read_json(folder, CONFIG) if has_config else {}
        self.metadata: dict[str, str] = {}
        self._file_of: dict[str, Any] = {}
        weight_map = _weight_map(folder) if (folder / INDEX).exists() else None
        try:
            self._open_files([ONE_FILE] if weight_map is None else sorted({*weight_map.values()}))
            if weight_map is not None and weight_map.keys() != self._file_of.keys():
                key = min(weight_map.keys() ^ self._file_of.keys())
                raise ValueError(
                    f"{INDEX} must list what its files hold, got another list, for instance "
                    f"without {key!r} on one side; the checkpoint is damaged: copy it again"
                )
        except BaseException:
            self.close()
            raise

    def _open_files(self, names: list[str]) -> None:
        for name in names:
            file = self.enter_context(_open(self.folder, name))
            self.metadata.update(file.metadata() or {})
            for key in file.keys():
                if key in self._file_of:
                    raise ValueError(
                        f"{key!r} must be in one file, got it in {name!r} and another one; the "
                        "checkpoint is damaged: copy it again"
                    )
                self._file_of[key] = file

    def names(self) -> set[str]:
        """The names of all tensors."""
        return {*self._file_of}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | str:
        """The dtype of a tensor, without reading it; its name in the file if torch has none."""
        dtype = self._file_of[name].get_slice(name).get_dtype()
        return DTYPES.get(dtype, dtype)

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A copy of a tensor: what safetensors returns may be the mapped file itself."""
        return self._file_of[name].get_tensor(name).to(device, copy=True)


def _path(folder: Path, name: str) -> Path:
    """The path of a regular file of ``folder``, without links.

    A link has to lead to another file in the folder, or, in the cache of the Hugging Face hub,
    from ``snapshots/<revision>`` to ``blobs``, where that cache keeps the content.
    """
    root = folder.resolve()
    try:
        path = (root / name).resolve()
        is_there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, no name of a file
        raise ValueError(f"{name!r} in {str(folder)!r} must be a file, got {error}") from None
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    if not any(path.is_relative_to(home) for home in homes):
        raise ValueError(
            f"{name!r} must lie in {str(folder)!r}, got a link to {str(path)!r}; copy the file "
            "itself if you trust it"
        )
    if not is_there:
        raise FileNotFoundError(
            f"{str(folder / name)!r} must exist, got no such file; pass the folder of a checkpoint"
        )
    if not path.is_file():
        raise ValueError(
            f"{str(folder / name)!r} must be a regular file, got a folder, a pipe or a device; "
            "copy the checkpoint again"
        )
    return path


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of every tensor, by the index."""
    weight_map = _read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or {*map(type, weight_map.values())} - {str}:
        raise ValueError(
            f"{INDEX} must have a weight_map, an object of names of files, got "
            f"{short(weight_map)}; the checkpoint is damaged: copy it again"
        )
    return weight_map


def _open(folder: Path, name: str) -> Any:
    """An open safetensors file; the package checks what its header says against its size."""
    path, package = _path(folder, name), safetensors()
    try:
        return package.safe_open(path, framework="pt")
    except (package.SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} must be a whole safetensors file, got {error}; copy it again"
        ) from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = _path(folder, name)
    try:
        parsed = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} must be JSON, got {error}; copy it again") from None
    if not isinstance(parsed, dict):
        kind = type(parsed).__name__
        raise ValueError(f"{str(path)!r} must hold an object, got a {kind}; copy it again")
    return parsed


def short(value: Any) -> str:
    """A value for an error message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
