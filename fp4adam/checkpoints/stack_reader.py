"""Reading of checkpoints with one weight per expert by the names of a model that stacks them."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp4adam.checkpoints.hub_names import Piece
from fp4adam.checkpoints.layouts import Encoding
from fp4adam.checkpoints.reader import Source


class WholeStacks:
    """A checkpoint with whole stacks of experts, by names as if each were a linear layer.

    Args:
        source: The checkpoint.
        encoding: How it stores quantized weights.
    """

    def __init__(self, source: Source, encoding: Encoding) -> None:
        self._source, self._names = source, {name: name for name in source.names()}
        self.config, self.hf_quant_config = source.config, source.hf_quant_config
        self.metadata = source.metadata
        self._stacked: set[str] = set()
        end = encoding.stacked.get(encoding.scale, "")
        for name in [name for name in self._names if end and name.endswith(end)]:
            stack = name.removesuffix(end)
            parts = {key: stack + end for key, end in encoding.stacked.items()}
            if all(len(source.shape(p)) > 2 for p in parts.values() if p in self._names) and (
                self._names.keys() >= {*parts.values()}
            ):
                for key, part in parts.items():
                    del self._names[part]
                    self._names[f"{stack}.{key}"] = part
                    self._stacked.add(f"{stack}.{key}")

    def names(self) -> set[str]:
        """The names of all tensors."""
        return {*self._names}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        shape = self._source.shape(self._names[name])
        if name in self._stacked:
            shape = (shape[0] * shape[1], math.prod(shape[2:]))
        return shape

    def dtype(self, name: str) -> torch.dtype | str:
        """The dtype of a tensor, without reading it; its name in the file if torch has none."""
        return self._source.dtype(self._names[name])

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A tensor on ``device``."""
        value = self._source.read(self._names[name], device)
        return value.flatten(0, 1).flatten(1) if name in self._stacked else value


class StackReader:
    """A checkpoint whose tensors have the names of the model.

    A stack is read as one matrix, the rows of all experts one after the other. A quantized one is
    named ``<stack>.<key>``, as if the stack were a linear layer.

    Args:
        checkpoint: The open checkpoint.
        pieces: What it holds, by its names; see ``pieces_of``. Other names stay as they are.
        keys: The last parts of the names of tensors that make up a quantized weight.

    Raises:
        ValueError: If a stack lacks a part, or parts of it are quantized and others are not.
    """

    def __init__(self, checkpoint: Source, pieces: dict[str, Piece], keys: list[str]) -> None:
        self._checkpoint = checkpoint
        self._parts: dict[str, list[str]] = {}
        self.metadata = dict(checkpoint.metadata)
        present, others = checkpoint.names(), {*keys} - {"weight"}
        layers = {stored.removesuffix(".weight"): piece for stored, piece in pieces.items()}
        # Parts of stacks, by the stack and the last part of their names, then by the first row.
        parts: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
        for name in sorted(present):  # files list their tensors in no particular order
            layer, _, key = name.rpartition(".")
            is_quantized = any(f"{layer}.{other}" in present for other in others)
            piece = pieces.get(name)
            if is_quantized and (piece is None or piece.rows is not None):
                piece = layers.get(layer)
            if piece is None:
                self._parts[name] = [name]
            elif piece.rows is not None:
                parts[piece.name, key if is_quantized else ""][piece.rows[0]] = name
            elif name in pieces:
                self._parts[piece.name] = [name]
            else:
                self._parts[f"{piece.name.removesuffix('.weight')}.{key}"] = [name]
        stacks: dict[str, dict[int, str]] = defaultdict(dict)
        for stored, (stack, rows) in pieces.items():
            if rows is not None:
                stacks[stack][rows[0]] = stored
        for (stack, key), found in parts.items():
            missing = sorted(stacks[stack].keys() - found.keys())
            if missing:
                raise ValueError(
                    f"the checkpoint must have all weights of the stack {stack!r} alike, got "
                    f"{found[min(found)]!r} and none for {stacks[stack][missing[0]]!r}; it is "
                    "damaged, or has experts in high precision, which a stack cannot mix"
                )
            layer = stack.removesuffix(".weight")
            self._parts[f"{layer}.{key}" if key else stack] = [found[row] for row in sorted(found)]
        for stack, names in stacks.items():
            amaxes = {checkpoint.metadata.get(f"{stored}.amax") for stored in names.values()}
            if len(amaxes) == 1 and None not in amaxes:
                self.metadata[f"{stack.removesuffix('.weight')}.weight.amax"] = amaxes.pop()

    def names(self) -> set[str]:
        """The names of all tensors."""
        return {*self._parts}

    def is_stack(self, name: str) -> bool:
        """Whether a tensor is put together from those of experts."""
        return len(self._parts[name]) > 1

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it; matrices of a stack lie row by row.

        Raises:
            ValueError: If the tensors of experts have different shapes.
        """
        shape = self._only(name, "shape", self._checkpoint.shape)
        return (shape[0] * len(self._parts[name]), *shape[1:]) if len(shape) > 1 else shape

    def dtype(self, name: str) -> torch.dtype | str:
        """The dtype of a tensor, without reading it; its name in the file if torch has none.

        Raises:
            ValueError: If the tensors of experts have different ones.
        """
        return self._only(name, "dtype", self._checkpoint.dtype)

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A tensor on ``device``.

        Raises:
            ValueError: If experts have different values of what a stack has once.
        """
        first, *others = (self._checkpoint.read(part, device) for part in self._parts[name])
        if others and first.dim() > 1:
            codes = [x.view(torch.uint8) if x.itemsize == 1 else x for x in (first, *others)]
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

    def _only(self, name: str, what: str, read: Callable[[str], Any]) -> Any:
        """What all tensors that make up one have."""
        first, *others = self._parts[name]
        value = read(first)
        for other in others:
            if read(other) != value:
                raise ValueError(
                    f"tensors of experts must have one {what} to be stacked, got {value} for "
                    f"{first!r} and {read(other)} for {other!r}; the checkpoint is damaged"
                )
        return value
