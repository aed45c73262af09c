"""Reading of folders of safetensors files and JSON that others may have made.

What a file says is checked before anything is allocated for it. Nothing outside the folder is
opened, and nothing in it is run.
"""

import contextlib
import json
import math
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
from fp4adam.checkpoints.layouts import Encoding
from fp4adam.checkpoints.model_state import Spans


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
            f"{str(folder / name)!r} must be a regular file, got a folder, a pipe or a device"
        )
    return path


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of every tensor, by the index."""
    weight_map = _read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or {*map(type, weight_map.values())} - {str}:
        raise ValueError(
            f"{INDEX} must have a weight_map, an object of names of files, got "
            f"{weight_map!r:.200}; the checkpoint is damaged: copy it again"
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


class NamedTensors:
    """The tensors of a checkpoint by the names of a model.

    A stack of experts is read as one matrix, the rows of all experts one after the other. The
    tensors of a quantized weight are named ``<layer>.<key>``, those of a stack ``<stack>.<key>``.

    Args:
        files: The open checkpoint.
        encoding: How it stores quantized weights.
        spans: What a checkpoint of the model holds, as from ``spans_of``; ValueError if one of its
            weights lacks a part, or parts of it are quantized and others are not.

    Attributes:
        quantized: The names in the model of what is quantized in the checkpoint.
        plain: Those of what else the checkpoint has of the model.
        unknown: The names in the checkpoint of all that is neither.
    """

    def __init__(self, files: CheckpointReader, encoding: Encoding, spans: Spans) -> None:
        self._files = files
        self._amaxes: dict[str, str | None] = {}
        self._parts: dict[str, list[str]] = {}
        self._whole_stacks: set[str] = set()
        self.quantized: list[str] = []
        self.plain: list[str] = []
        present, keys = files.names(), [*encoding.shapes()]
        for name, spans_of_it in spans.items():
            layer, stored = name.removesuffix(".weight"), [each for each, _ in spans_of_it]
            layers = [each.removesuffix(".weight") for each in stored]
            parts = {f"{layer}.{key}": [f"{each}.{key}" for each in layers] for key in keys}
            whole = {f"{layer}.{key}": [stored[0] + end] for key, end in encoding.stacked.items()}
            marks = (f"{each}.{key}" for each in layers for key in keys if key != "weight")
            names = self.quantized
            if whole and all(x in present and len(files.shape(x)) > 2 for [x] in whole.values()):
                parts = whole
                self._whole_stacks |= whole.keys()
            elif present.isdisjoint(marks):
                parts, names = {name: stored}, self.plain
            wanted = [each for those in parts.values() for each in those]
            given = [each for each in wanted if each in present]
            if given and given != wanted:
                missing = next(each for each in wanted if each not in present)
                raise ValueError(
                    f"the checkpoint must have all parts of {name!r} alike, got {given[0]!r} and "
                    f"no {missing!r}; it is damaged, or has experts in high precision, which a "
                    "stack cannot mix"
                )
            if given:
                names.append(name)
                self._parts |= parts
                self._amaxes[layer] = files.metadata.get(f"{stored[-1]}.amax")
        self.unknown = present.difference(*self._parts.values())

    def amax(self, layer: str, device: torch.device) -> Tensor | None:
        """The amax of a layer in our own headers, more exact than its rounded scale."""
        try:
            return torch.tensor(float.fromhex(self._amaxes.get(layer) or "nan"), device=device)
        except (ValueError, OverflowError):
            return None

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        """Those of a tensor, without reading it; ValueError if those of experts are different."""
        first, *others = ((self._files.shape(x), self._files.dtype(x)) for x in self._parts[name])
        if different := [other for other in others if other != first]:
            raise ValueError(
                f"tensors of experts must have one shape and dtype to be stacked, got {first} and "
                f"{different[0]} in {name!r}; the checkpoint is damaged"
            )
        shape, dtype = first
        if name in self._whole_stacks:
            shape = shape[0] * shape[1], math.prod(shape[2:])
        elif len(shape) > 1:
            shape = shape[0] * len(self._parts[name]), *shape[1:]
        return shape, dtype

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A tensor; ValueError if experts have different values of what a stack has once."""
        first, *others = (self._files.read(part, device) for part in self._parts[name])
        if name in self._whole_stacks:
            return first.flatten(0, 1).flatten(1)
        if others and first.dim() > 1:
            codes = [x.view(torch.uint8) for x in (first, *others)]  # torch joins few of FP8
            return torch.cat(codes).view(first.dtype)
        for part, other in zip(self._parts[name][1:], others, strict=True):
            if not torch.equal(other, first):
                raise ValueError(
                    "experts must have one tensor scale to be one stack, got "
                    f"{first.tolist()} for {self._parts[name][0]!r} and {other.tolist()} for "
                    f"{part!r}; build a model with one nn.Linear per expert and projection, or "
                    "load the checkpoint decoded and call quantize_model, which rounds it again"
                )
        return first
