"""Export of trained models to the checkpoints that serving engines and trainers read."""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fp4adam.checkpoints import folder as checkpoint_folder
from fp4adam.checkpoints.folder import CONFIG, Entry
from fp4adam.checkpoints.hub_names import Piece, module_names, pieces_of
from fp4adam.checkpoints.layouts import LAYOUTS, Encoding, Layout
from fp4adam.checkpoints.model_state import model_state, plain_name, unwrapped
from fp4adam.distributed.dtensor import is_dtensor, like, local, sharded_dims
from fp4adam.distributed.tensor_parallel import gather_whole
from fp4adam.formats.scale_groups import hf_scale_groups
from fp4adam.nn.quantize_model import check_module
from fp4adam.optim.fused_adam import FusedAdam
from fp4adam.optim.param_view import written_value
from fp4adam.optim.state_dict import saved_states
from fp4adam.tensors import rows
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import check_dtype

GENERATION_CONFIG = "generation_config.json"
MAX_SHARD_BYTES = 5 * 10**9  # as on the Hugging Face hub


def export_checkpoint(
    model: nn.Module,
    folder: str | Path,
    layout: str = "compressed-tensors",
    *,
    config: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model with quantized weights as a checkpoint that engines serve as it is.

    Codes and block scales are the trained bytes; nothing is rounded again. Everything else, such as
    embeddings, norms and the output head, is written in its own dtype. ``config.json`` names the
    dtype that readers decode to: bfloat16 for ``"compressed-tensors"``, that of the quantized
    weights for the others. Modules with weights in high precision are listed there as well; the
    generation configuration of transformers' models goes along.

    Stacked experts are written one by one: of transformers' models under their names on the hub,
    of others as ``<module>.<number>.gate_proj.weight``, say.

    ========================  ===========================================================
    layout                    what it holds
    ========================  ===========================================================
    ``"compressed-tensors"``  NVFP4 (``nvfp4-pack-quantized``), MXFP8 (``mxfp8-quantized``)
    ``"modelopt"``            NVFP4 (``W4A16_NVFP4``), MXFP8 (``MXFP8``)
    ``"fp8"``                 Float8Block of 128x128 (``weight_scale_inv``)
    ========================  ===========================================================

    A weight with several names is written under the first one only, as Hugging Face does. Sharded
    models are gathered weight by weight: every rank has to call this, and the first one writes.

    Args:
        model: Its quantized weights are those of ``nn.Linear`` layers and stacks of experts
            [experts, out_features, in_features], all of one format.
        folder: The folder to write to, made if it does not exist, or without a checkpoint and
            without files of these names. It may be a link or a mount point. Files appear once all
            are complete, ``config.json`` last; a process that is killed before leaves none.
        layout: See above.
        config: The model's configuration, a dictionary or one of Hugging Face's;
            ``model.config`` if None, where there is one.
        max_shard_bytes: The most that one file holds, unless a single weight is larger.

    Raises:
        ValueError: If the layout is unknown or cannot hold the weights, weights are not finite, or
            the model has adapters of PEFT.
        FileExistsError: If ``folder`` holds a checkpoint already, or a ``config.json``, or gets one
            from another process meanwhile.
        OSError: If the files cannot be written, for example because the disk is full.
        NotImplementedError: For weights that are sharded in another way than by ``fully_shard``.

    Warns:
        UserWarning: For NVFP4 weights with different amaxes that engines serve as one matrix, for
            Float8Block weights with partial blocks, and for experts that transformers misreads.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    check_module(model)
    model = unwrapped(model)
    _check_no_adapters(model)
    weights = _first_named(_state_of(model))
    pieces = pieces_of(model, weights)
    quantized = {n: local(w) for n, w in weights.items() if isinstance(local(w), QuantizedTensor)}
    encoding = _encoding_for(LAYOUTS[layout], quantized)
    linear = [
        plain_name(f"{name}.weight")
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, nn.Linear)
    ]
    for piece in pieces.values():
        if piece.name in quantized:
            _check_whole_linear(piece, quantized[piece.name], linear, encoding)
    _warn_of_readers(quantized, weights, encoding)
    has_stacks = any(piece.rows and piece.name in quantized for piece in pieces.values())
    if has_stacks and layout == "compressed-tensors" and hasattr(model, "from_pretrained"):
        warnings.warn(
            "experts in the layout 'compressed-tensors' should be read by an engine or by "
            "import_checkpoint, got a model of transformers, whose from_pretrained (5.23) leaves "
            "the tensor scales of experts out and refuses MXFP8 ones; for it, export Float8Block "
            "weights in the layout 'fp8'",
            stacklevel=2,
        )
    excluded, stacked = _unquantized_modules(model, module_names(pieces))
    quantization = LAYOUTS[layout].documents(encoding, excluded, stacked)
    dtype = LAYOUTS[layout].decoded_dtype or next(iter(quantized.values())).dtype
    documents = _documents_of(model, config, dtype)
    content = {**documents[CONFIG], "quantization_config": quantization[CONFIG]}
    documents.update(quantization, **{CONFIG: content})

    def entries() -> Iterator[Entry]:
        for name, parts in _parts_of(pieces).items():
            whole = _gathered(weights[name])
            if isinstance(whole, QuantizedTensor):
                yield from _quantized_entries(name, whole, encoding, parts)
            else:
                yield from _plain_entries(whole, parts)

    _write(Path(folder), entries(), documents, max_shard_bytes, weights)


def export_masters(
    model: nn.Module,
    optimizer: Optimizer,
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    config: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model in high precision, its parameters rounded once from their master weights.

    The parameters themselves are read, not what hooks of the state dict make of them, such as those
    of :func:`fp4adam.use_plain_state_dict`.

    A parameter that has no master in the optimizer, or that something else has overwritten since,
    is written as it is, or, if it is quantized, as the value that its master would start from.

    Args:
        model: Any model; sharded ones as for :func:`export_checkpoint`.
        optimizer: Its optimizer.
        folder: As for :func:`export_checkpoint`, as are ``config`` and ``max_shard_bytes``.
        dtype: The dtype of all floating-point parameters: float32, bfloat16 or float16.

    Raises:
        TypeError: If ``dtype`` is another one, or model or optimizer is not one.
        ValueError: If the model has adapters of PEFT.
        FileExistsError, OSError, NotImplementedError: As :func:`export_checkpoint`.
    """
    check_dtype("dtype", dtype)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be the one that trains the model, got {type(optimizer).__name__}; "
            "pass the FP4Adam that has its masters"
        )
    check_module(model)
    model = unwrapped(model)
    _check_no_adapters(model)
    weights = _first_named(_state_of(model))
    parts = _parts_of(pieces_of(model, weights))
    masters = _current_masters(optimizer)
    parameters = set(model.parameters())

    def entries() -> Iterator[Entry]:
        for name, weight in weights.items():
            own, master = local(weight), masters.get(weight)
            if master is not None:
                source = master
            elif isinstance(own, QuantizedTensor):
                value = written_value(own)
                value = own.detach().dequantize() if value is None else value.view(own.shape)
                source = like(weight, value)
            else:
                source = weight
            whole = _gathered(source)
            if weight in parameters and weight.is_floating_point():
                whole = whole.to(dtype)
            yield from _plain_entries(whole, parts[name])

    documents = _documents_of(model, config, dtype)
    _write(Path(folder), entries(), documents, max_shard_bytes, weights)


def _current_masters(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """FP32 masters; the values of parameters that something else has overwritten since."""
    if not isinstance(optimizer, FusedAdam):
        return {}
    states = saved_states(optimizer.param_groups, optimizer.state_dict())
    return {param: state["master_param"] for param, state in states if "master_param" in state}


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a checkpoint, under all of their names."""
    state = model_state(model).tensors
    for name, value in state.items():
        if value.is_meta:
            raise ValueError(
                f"{name!r} must have a value to be exported, got one on the meta device; load the "
                "weights first"
            )
    return state


def _first_named(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each weight once, by the first of its names."""
    names: dict[int, str] = {}
    weights = {}
    for name, value in state.items():
        first = names.setdefault(id(value), name)
        if first == name:
            weights[name] = value
        elif isinstance(local(value), QuantizedTensor):
            raise ValueError(
                f"{first!r} and {name!r} must be two weights, got one quantized weight with two "
                "names, which readers do not know of; untie them: "
                "layer.weight = nn.Parameter(layer.weight.detach().clone())"
            )
    return weights


def _encoding_for(layout: Layout, quantized: dict[str, QuantizedTensor]) -> Encoding:
    """How ``layout`` stores the quantized weights of a model."""
    known = {encoding.quantizer_class: encoding for encoding in layout.encodings}
    held = ", ".join(kind.tensor_class.__name__ for kind in known)
    if not quantized:
        raise ValueError(
            f"model must have weights in {held} for layout {layout.name!r}, got none that are "
            "quantized; call quantize_model, or export_masters"
        )
    first, encoding = next(iter(quantized)), None
    for name, weight in quantized.items():
        quantizer = weight.quantizer
        if type(quantizer) not in known:
            others = [n for n, x in LAYOUTS.items() for e in x.encodings if _fits(e, weight)]
            cure = "no layout has this format; call export_masters"
            if others:
                cure = f"use layout={' or '.join(map(repr, others))}"
            raise ValueError(
                f"weights must be in {held} for layout {layout.name!r}, got {name!r} in "
                f"{type(weight).__name__}; {cure}"
            )
        if type(weight) is not type(quantized[first]):
            raise ValueError(
                f"quantized weights must be of one format, got {first!r} in "
                f"{type(quantized[first]).__name__} and {name!r} in {type(weight).__name__}; "
                "quantize all of them alike"
            )
        encoding = known[type(quantizer)]
        if problem := encoding.refusal(quantizer):
            raise ValueError(
                f"{name!r} must suit layout {layout.name!r}, got {quantizer}; {problem}"
            )
    return encoding


def _fits(encoding: Encoding, weight: QuantizedTensor) -> bool:
    return encoding.quantizer_class is type(weight.quantizer)


def _check_whole_linear(
    piece: Piece, weight: QuantizedTensor, linear: list[str], encoding: Encoding
) -> None:
    """Raise ValueError unless ``piece`` of a quantized weight is one that layouts can hold."""
    name, rows_of_it = piece
    if rows_of_it is None and name not in linear:
        raise ValueError(
            f"quantized weights must be those of nn.Linear layers, got {name!r}; leave it in high "
            "precision (filter=...), or write the model in high precision with export_masters: of "
            "stacks of experts, those that checkpoints hold one by one can be exported"
        )
    if rows_of_it is not None and any(row % encoding.block[0] for row in rows_of_it):
        raise ValueError(
            f"the weight of each expert must have a multiple of {encoding.block[0]} rows to be "
            f"exported, got rows {rows_of_it[0]} to {rows_of_it[1]} of {name!r}, which share "
            "scales with others; leave it in high precision (filter=...)"
        )
    if weight._shared.global_spec is None and not rows.is_whole_blocks(weight):
        raise ValueError(f"{name!r} must be a whole tensor, got rows of another one; clone it")


def _warn_of_readers(
    quantized: dict[str, QuantizedTensor], weights: dict[str, Tensor], encoding: Encoding
) -> None:
    """Warn of weights that readers are known to misread."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    partial = []
    for name, weight in quantized.items():
        layer = name.removesuffix(".weight")
        matrix = hf_scale_groups(name)
        if weight.quantizer.scales_tensor and matrix is not None:
            groups[matrix][layer.rpartition(".")[2]] = weight.flush()._amax.item()
        sides = zip(weights[name].shape[-2:], encoding.block, strict=True)
        partial += [layer] * any(n > block and n % block for n, block in sides)
    unequal = [name for name, amaxes in groups.items() if len({*amaxes.values()}) > 1]
    if unequal:
        warnings.warn(
            "weights that are served as one matrix should have one amax, got "
            f"{groups[unequal[0]]} for {unequal[0]!r}, and {len(unequal)} such groups: engines "
            "that fuse them, as vLLM does, decode them all by the largest and lose precision "
            "(transformers does not); train with scale_groups=hf_scale_groups",
            stacklevel=3,
        )
    if partial:
        name = encoding.quantizer_class.tensor_class.__name__.removesuffix("Tensor")
        warnings.warn(
            f"sides of {name} weights should be multiples of {max(encoding.block)}, or less, "
            f"got others in {len(partial)} layers such as {partial[0]!r}: transformers reads these "
            "wrongly where it decodes them, without a GPU; pad them, or serve with another engine",
            stacklevel=3,
        )


Parts = dict[str, tuple[int, int] | None]


def _parts_of(pieces: dict[str, Piece]) -> dict[str, Parts]:
    """Per tensor of a model: the names it is stored under, with the rows of each."""
    parts: dict[str, Parts] = defaultdict(dict)
    for stored, (name, rows_of_it) in pieces.items():
        parts[name][stored] = rows_of_it
    return parts


def _plain_entries(whole: Tensor, parts: Parts) -> Iterator[Entry]:
    for stored, span in parts.items():
        part = whole if span is None else whole.flatten(0, 1)[slice(*span)]
        yield Entry({stored: part.cpu().contiguous()}, {})


def _quantized_entries(
    name: str, weight: QuantizedTensor, encoding: Encoding, parts: Parts
) -> Iterator[Entry]:
    matrix = weight.flush()._alias((math.prod(weight.shape[:-1]), weight.shape[-1]))
    try:
        encoded = encoding.encode(matrix)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    for stored, span in parts.items():
        part = encoded if span is None else encoding.cut(encoded, span)
        layer, metadata = stored.removesuffix("weight"), {}
        if weight._amax is not None:
            # The layout's rounded scale does not determine the last bit of the amax.
            metadata[f"{stored}.amax"] = weight._amax.item().hex()
        yield Entry({layer + key: t.cpu().contiguous() for key, t in part.items()}, metadata)


def _gathered(weight: Tensor) -> Tensor:
    """All of a weight, quantized as it is; of a DTensor every rank has to ask."""
    if not is_dtensor(weight):
        return weight.detach()
    shard, sharded = weight._local_tensor.detach(), sharded_dims(weight)
    if not sharded:
        return shard
    if not isinstance(shard, QuantizedTensor):
        return weight.detach().full_tensor()
    return gather_whole(weight)


def _check_no_adapters(model: nn.Module) -> None:
    """Raise ValueError for a model with the adapters of PEFT, whose names no reader knows."""
    for name, module in model.named_modules():
        # The models of PEFT have the one, the layers that it puts into others the other.
        if hasattr(module, "merge_and_unload") or hasattr(module, "get_base_layer"):
            place = f"{name!r}, " if name else ""
            raise ValueError(
                f"model must be without adapters to be exported, got {place}a "
                f"{type(module).__name__}; merge them first: model = model.merge_and_unload(), or "
                "save them alone with save_pretrained"
            )


def _unquantized_modules(
    model: nn.Module, stored_names: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Modules whose weights stay in high precision, and those of them with stacks of weights.

    Each has its name in the model and, if it is another, the one in the checkpoint. They are the
    modules that engines could take for quantized linear layers: linear layers, routers, stacked
    experts; not embeddings, convolutions and modules that contain quantized ones.
    """
    excluded, stacked = [], []
    for name, module in model.named_modules(remove_duplicate=False):
        name = plain_name(f"{name}.").removesuffix(".")
        own = [param for param in module._parameters.values() if param is not None]
        is_other = isinstance(module, nn.Embedding | nn.modules.conv._ConvNd)
        if not name or is_other or not any(param.ndim > 1 for param in own):
            continue
        if not any(isinstance(local(param), QuantizedTensor) for param in module.parameters()):
            names = dict.fromkeys((name, stored_names.get(name, name)))
            excluded += names
            if any(param.ndim > 2 for param in own):
                stacked += names
    return excluded, stacked


def _documents_of(model: nn.Module, config: Any, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """The JSON files of a model by name, without quantization."""
    documents = {CONFIG: _config_of(model, config, dtype)}
    generation = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        documents[GENERATION_CONFIG] = json.loads(generation.to_json_string())
    return documents


def _config_of(model: nn.Module, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The content of ``config.json``, without quantization."""
    config = getattr(model, "config", None) if config is None else config
    if config is None:
        return {}
    if hasattr(config, "to_json_string"):
        content = json.loads(config.to_json_string())
    elif isinstance(config, dict):
        content = dict(config)
    else:
        raise TypeError(
            "config must be a dictionary or a configuration of transformers, got a "
            f"{type(config).__name__}; pass config={{...}}"
        )
    content.pop("quantization_config", None)
    # FSDP2 prefixes the name of the class with its own.
    architecture = type(model).__name__.removeprefix("FSDP")
    content["architectures"] = content.get("architectures") or [architecture]
    return {**content, "dtype": str(dtype).removeprefix("torch.")}


def _write(
    folder: Path,
    entries: Iterator[Entry],
    documents: dict[str, dict[str, Any]],
    max_shard_bytes: int,
    weights: dict[str, Tensor],
) -> None:
    """Write from the first rank, and raise on every one if that fails."""
    if not isinstance(max_shard_bytes, int) or max_shard_bytes <= 0:
        raise ValueError(
            f"max_shard_bytes must be a positive number of bytes, got {max_shard_bytes!r}; leave "
            f"it at {MAX_SHARD_BYTES}"
        )
    if not any(is_dtensor(weight) for weight in weights.values()):
        checkpoint_folder.write(folder, entries, documents, max_shard_bytes)
        return
    failure: list[Exception | None] = [None]
    try:
        if dist.get_rank() == 0:
            checkpoint_folder.write(folder, entries, documents, max_shard_bytes)
    except Exception as error:
        failure = [error]
    for _ in entries:
        pass  # no rank may leave while others still gather or write
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]
