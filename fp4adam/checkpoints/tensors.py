"""Tensors of a model for an engine that runs beside the training, by the engine's names."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp4adam.checkpoints.hub_names import Piece
from fp4adam.checkpoints.layouts import LAYOUTS
from fp4adam.checkpoints.trained import Trained, cut_rows, gathered
from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.formats.scale_groups import fused_layer
from fp4adam.tensors.quantized_tensor import QuantizedTensor


class Matrix(NamedTuple):
    """What the engine has as one parameter.

    Attributes:
        name: The engine's name for it.
        members: What a checkpoint has in its place, in order.
    """

    name: str
    members: tuple[str, ...]


def export_tensors(
    model: nn.Module,
    layout: str = "compressed-tensors",
    *,
    fused: bool = False,
    names: Callable[[str], str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that :func:`export_checkpoint` writes, on the model's device, without files.

    They refill an engine that serves the model while it is trained, for example to sample in
    reinforcement learning. Codes and block scales are the trained bytes: an NVFP4 weight takes
    0.5625 bytes, and nothing is rounded again.

    Tensors are made one weight at a time. Codes and weights in high precision are the model's own
    memory: copy or send them before the next step, and do not write to them. Scales, fused weights
    and what is gathered are new.

    With ``fully_shard``, a weight is gathered when its turn comes, in the same order on all ranks,
    and every rank gets it: each has to go through the iterator to its end. All tensors of a weight
    follow each other. Stacked experts come one by one, as in a checkpoint.

    Args:
        model: As for :func:`export_checkpoint`.
        layout: ``"compressed-tensors"``, ``"modelopt"`` or ``"fp8"``.
        fused: Whether q, k and v are joined to ``qkv_proj``, gate and up to ``gate_up_proj``, as in
            the parameters of vLLM and SGLang. A tensor scale has an element per part, all the
            same. If False, names are those of a checkpoint, which loaders of engines take.
        names: The engine's name for each parameter of the model, after fusing; as it is if None.
            Names of quantized parameters must end in ``weight``, which the name of each stored
            tensor replaces.

    Returns:
        An iterator of names and tensors. The model is checked before it is returned.

    Raises:
        ValueError: If the layout cannot hold the model, names are not unique, or weights cannot be
            fused: NVFP4 weights with different amaxes (train with ``scale_groups``), quantized
            and plain ones, Float8Block ones of which one ends within a block.
        NotImplementedError: For weights that are sharded in another way than by ``fully_shard``.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout must be one of {', '.join(LAYOUTS)} for export_tensors, got {layout!r}; "
            "export_checkpoint writes files of other layouts"
        )
    trained = Trained.of(model, LAYOUTS[layout])
    return (
        (stored.name, stored.tensor)
        for group in group_matrices(trained, fused, names or str)
        for stored in stored_tensors(trained, group)
    )


def group_matrices(
    trained: Trained, fused: bool, names: Callable[[str], str]
) -> list[list[Matrix]]:
    """All parameters of the engine, checked; those that consist of the same weights together."""
    sources: dict[tuple[str, ...], list[Matrix]] = defaultdict(list)
    for matrix in _matrices(trained, fused, names):
        sources[tuple(trained.pieces[member].name for member in matrix.members)].append(matrix)
    return [*sources.values()]


def _matrices(trained: Trained, fused: bool, names: Callable[[str], str]) -> list[Matrix]:
    """All parameters of the engine, in the order of their first members; checked."""
    matrices: list[Matrix] = []
    seen: set[str] = set()
    taken: dict[str, tuple[str, ...]] = {}
    for name in trained.pieces:
        if name in seen:
            continue
        whole, members = _fused_with(name, trained.pieces) if fused else (name, (name,))
        if len(members) > 1:
            _check_fusable([trained.pieces[member].name for member in members], trained)
        seen.update(members)
        given = names(whole)
        is_quantized = trained.pieces[members[0]].name in trained.quantized
        if is_quantized and not str(given).endswith("weight"):
            raise ValueError(
                f"names must give quantized parameters names that end in 'weight', got {given!r} "
                f"for {whole!r}; change the part before"
            )
        if given in taken:
            raise ValueError(
                f"names must be unique, got {given!r} for {taken[given][0]!r} and {members[0]!r}; "
                "let names return another one"
            )
        taken[given] = members
        matrices.append(Matrix(given, members))
    return matrices


def _fused_with(name: str, pieces: dict[str, Piece]) -> tuple[str, tuple[str, ...]]:
    """The name of a fused parameter and those in it; a parameter itself where parts are missing.

    Parts of a stack of experts stay what they are in a checkpoint.
    """
    layer, dot, kind = name.rpartition(".")
    whole, parts = fused_layer(layer)
    members = tuple(f"{part}.{kind}" for part in parts)
    if whole is None or any(m not in pieces or pieces[m].rows is not None for m in members):
        return name, (name,)
    return f"{whole}{dot}{kind}", members


def _check_fusable(members: Sequence[str], trained: Trained) -> None:
    """Raise ValueError if weights cannot be one; of shards only what all ranks know."""
    quantized = [member for member in members if member in trained.quantized]
    if not quantized:
        return
    if len(quantized) < len(members):
        raise ValueError(
            f"parameters must be quantized alike to be fused, got {quantized[0]!r} quantized and "
            f"{min({*members} - {*quantized})!r} not; quantize all of them, or pass fused=False"
        )
    rows, _ = trained.encoding.block
    for member in members[:-1]:
        n = trained.weights[member].shape[0]
        if n % rows:
            raise ValueError(
                f"rows of a weight must be a multiple of {rows} to be fused with what follows, got "
                f"{n} of {member!r}: a block would belong to both; pass fused=False"
            )
    if not any(is_dtensor(trained.weights[member]) for member in members):
        _check_one_amax({member: trained.quantized[member] for member in members})


def _check_one_amax(weights: dict[str, QuantizedTensor]) -> None:
    amaxes = [weight.flush()._amax for weight in weights.values()]
    if amaxes[0] is None:
        return
    if bool((torch.cat(amaxes) == amaxes[0]).all()):
        return
    listed = {name: amax.item() for name, amax in zip(weights, amaxes, strict=True)}
    raise ValueError(
        f"NVFP4 weights must have one amax to be fused, got {listed}; train with "
        "scale_groups=hf_scale_groups, or pass fused=False"
    )


class Stored(NamedTuple):
    """A tensor that a parameter of the engine is stored as.

    Attributes:
        name: The engine's name for it.
        tensor: Its value.
        matrix: The parameter.
        key: What the encoding calls it; None for a plain parameter.
    """

    name: str
    tensor: Tensor
    matrix: Matrix
    key: str | None


def stored_tensors(trained: Trained, matrices: list[Matrix]) -> Iterator[Stored]:
    """The tensors of parameters of the engine that consist of the same weights; gathers these."""
    names = [trained.pieces[member].name for member in matrices[0].members]
    whole = {name: gathered(trained.weights[name]) for name in names}
    if not isinstance(whole[names[0]], QuantizedTensor):
        for matrix in matrices:
            pieces = [trained.pieces[member] for member in matrix.members]
            parts = [cut_rows(whole[piece.name], piece.rows) for piece in pieces]
            tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
            yield Stored(matrix.name, tensor, matrix, None)
        return
    if len(whole) > 1:
        _check_one_amax(whole)  # type: ignore[arg-type]
    stored = {
        member: tensors
        for name, weight in whole.items()
        for member, tensors in trained.encode_parts(name, weight).items()
    }
    for matrix in matrices:
        layer = matrix.name.removesuffix("weight")
        for key in stored[matrix.members[0]]:
            parts = [stored[member][key] for member in matrix.members]
            joined = parts[0]
            if len(parts) > 1:
                # As bytes: not every device joins FP8 numbers.
                rows = [part.reshape(-1, *part.shape[1:]).view(torch.uint8) for part in parts]
                joined = torch.cat(rows).view(joined.dtype)
            yield Stored(layer + key, joined, matrix, key)
