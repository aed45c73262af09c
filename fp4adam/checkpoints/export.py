"""Export of trained models to the checkpoints that serving engines and trainers read."""

import json
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
from fp4adam.checkpoints.folder import CONFIG, HF_QUANT_CONFIG, Entry
from fp4adam.checkpoints.layouts import find_layout, hf_quant_config
from fp4adam.checkpoints.model_state import module_names, plain_name, spans_of
from fp4adam.checkpoints.trained import (
    Trained,
    gathered,
    plain_entries,
    stored_spans,
    tensors_of,
)
from fp4adam.distributed.dtensor import is_dtensor, like, local
from fp4adam.formats.scale_groups import fused_layer
from fp4adam.optim.fused_adam import FusedAdam
from fp4adam.optim.state_dict import current_masters
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
    ``"compressed-tensors"``  NVFP4 (``nvfp4-pack-quantized``), MXFP8 (``mxfp8-quantized``), MXFP4
                              (``mxfp4-pack-quantized``), Float8Block (``float-quantized``)
    ``"modelopt"``            NVFP4 (``W4A16_NVFP4``), MXFP8 (``MXFP8``)
    ``"fp8"``                 Float8Block of 128x128 (``weight_scale_inv``)
    ``"mxfp4"``               MXFP4 stacks of experts, as gpt-oss has them
    ========================  ===========================================================

    A weight with several names is written under the first one only, as Hugging Face does. Sharded
    models are gathered weight by weight: every rank has to call this, and the first one writes.

    Args:
        model: Its quantized weights are those of ``nn.Linear`` layers and stacks of experts
            [experts, out_features, in_features], all of one format.
        folder: The folder to write to, made if it does not exist, or without a checkpoint and
            without files of these names. It may be a link or a mount point. Files appear once all
            are complete; a process that is killed before leaves a hidden folder beside them.
        layout: See above.
        config: The model's configuration, a dictionary or one of Hugging Face's;
            ``model.config`` if None, where there is one.
        max_shard_bytes: The most that one file holds, unless a single weight is larger.

    Raises:
        ImportError: Without safetensors.
        ValueError: If the layout is unknown or cannot hold the weights, weights are not finite, or
            the model has adapters of PEFT.
        FileExistsError: If ``folder`` holds a checkpoint already, or a ``config.json``, or gets one
            from another process meanwhile.
        OSError: If the files cannot be written, for example because the disk is full.
        NotImplementedError: For weights that are sharded in another way than by ``fully_shard``.

    Warns:
        UserWarning: For what readers are known to misread: NVFP4 weights with different amaxes
            that engines serve as one matrix, Float8Block weights with partial blocks; in models of
            transformers, NVFP4 experts, and MXFP8 in "modelopt".
    """
    trained = Trained.of(model, find_layout(layout))
    dtype = trained.layout.decoded_dtype or next(iter(trained.quantized.values())).dtype
    documents = _documents_of(trained.model, config, dtype)
    _check_size(max_shard_bytes)
    for text in _misreadings(trained):
        warnings.warn(text, stacklevel=2)
    excluded, stacked = _unquantized_modules(trained.model, module_names(trained.spans))
    described = trained.layout.describe(trained.encoding, excluded, stacked)
    documents[CONFIG]["quantization_config"] = {"quant_method": layout, **described}
    if layout == "modelopt":
        documents[HF_QUANT_CONFIG] = hf_quant_config(trained.encoding, excluded)
    _write(folder, trained.entries(), documents, max_shard_bytes, trained.weights)


def export_tensors(
    model: nn.Module, layout: str = "compressed-tensors"
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that :func:`export_checkpoint` writes, on the model's device, without files.

    They refill an engine that serves the model while it is trained, for example to sample in
    reinforcement learning: its loader takes the names of a checkpoint. Codes and block scales are
    the trained bytes: an NVFP4 weight takes 0.5625 bytes, and nothing is rounded again.

    Tensors are made one weight at a time. Codes and weights in high precision are the model's own
    memory: copy or send them before the next step, and do not write to them. Scales and what is
    gathered are new. With ``fully_shard``, a weight is gathered when its turn comes, in the same
    order on all ranks, and every rank gets it: each has to go through the iterator to its end.

    Args:
        model: As for :func:`export_checkpoint`.
        layout: As for :func:`export_checkpoint`.

    Returns:
        An iterator of names and tensors. The model is checked before it is returned.

    Raises:
        ValueError: If the layout is unknown, or cannot hold the model.
        NotImplementedError: For weights that are sharded in another way than by ``fully_shard``.
    """
    trained = Trained.of(model, find_layout(layout))
    return (item for entry in trained.entries() for item in entry.tensors.items())


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
    _check_size(max_shard_bytes)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be the one that trains the model, got {type(optimizer).__name__}; "
            "pass the FP4Adam that has its masters"
        )
    model, weights = tensors_of(model)
    stored = stored_spans(spans_of(model, weights))
    # Masters, or values where others have written them.
    is_ours = isinstance(optimizer, FusedAdam)
    master_of = current_masters(optimizer._engine) if is_ours else lambda weight: None
    parameters = set(model.parameters())

    def entries() -> Iterator[Entry]:
        for name, weight in weights.items():
            own, master = local(weight), master_of(weight)
            if master is not None:
                source = master
            elif isinstance(own, QuantizedTensor):
                value = own.written_value()
                value = own.dequantize(torch.float32) if value is None else value.view(own.shape)
                source = like(weight, value)
            else:
                source = weight
            whole = gathered(source)
            if weight in parameters and weight.is_floating_point():
                whole = whole.to(dtype)
            yield from plain_entries(whole, stored[name])

    documents = _documents_of(model, config, dtype)
    _write(folder, entries(), documents, max_shard_bytes, weights)


def _misreadings(trained: Trained) -> Iterator[str]:
    """What readers are known to misread without an error, each as the text of a warning."""
    encoding, is_theirs = trained.encoding, hasattr(trained.model, "from_pretrained")
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    partial = []
    layers = [name.removesuffix(".weight") for name in trained.quantized]
    for layer, (name, weight) in zip(layers, trained.quantized.items(), strict=True):
        shape, (whole, parts) = trained.weights[name].shape, fused_layer(layer)
        if weight.quantizer.layout.tensor_scale == "current" and whole is not None:
            groups[whole][layer.rpartition(".")[2]] = weight._amax.item()
        (rows, cols), (block_rows, block_cols) = shape[-2:], encoding.block
        is_cut = rows % block_rows and (rows > block_rows or layer in parts[:-1])
        partial += [layer] * bool(is_cut or (cols > block_cols and cols % block_cols))
    unequal = [name for name, amaxes in groups.items() if len({*amaxes.values()}) > 1]
    if unequal:
        yield (
            "weights that are served as one matrix should have one amax, got "
            f"{groups[unequal[0]]} for {unequal[0]!r}, and {len(unequal)} such groups: engines "
            "that fuse them, as vLLM does, decode them all by the largest and lose precision; "
            "train with scale_groups=hf_scale_groups"
        )
    if partial:
        yield (
            f"sides of Float8Block weights should be multiples of {max(encoding.block)}, got "
            f"others in {len(partial)} layers such as {partial[0]!r}: transformers reads these "
            "wrongly where it decodes them, without a GPU, and so does vLLM (0.32) where it fuses "
            "q, k and v or gate and up; pad them, or serve with another engine"
        )
    if is_theirs and trained.layout.name == "modelopt" and encoding.bits == 8:
        yield (
            "layout 'modelopt' with MXFP8 should be read by an engine or by import_checkpoint, got "
            "a model of transformers, whose from_pretrained (5.23) takes codes for weights and "
            "leaves the scales out; for it, use layout 'compressed-tensors'"
        )
    has_stacks = any(p.rows and p.name in trained.quantized for p in trained.spans.values())
    is_packed = encoding.format == "nvfp4-pack-quantized"
    if is_theirs and has_stacks and is_packed:
        yield (
            "NVFP4 experts should be read by an engine or by import_checkpoint, got a model of "
            "transformers, whose from_pretrained (5.23) leaves their tensor scales out; for it, "
            "export Float8Block weights in the layout 'fp8'"
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
    documents: dict[str, dict[str, Any]] = {CONFIG: {}}
    generation = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        documents[GENERATION_CONFIG] = json.loads(generation.to_json_string())
    config = getattr(model, "config", None) if config is None else config
    if config is None:
        return documents
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
    documents[CONFIG] = {**content, "dtype": str(dtype).removeprefix("torch.")}
    return documents


def _check_size(max_shard_bytes: int) -> None:
    if not isinstance(max_shard_bytes, int) or max_shard_bytes <= 0:
        raise ValueError(
            f"max_shard_bytes must be a positive number of bytes, got {max_shard_bytes!r}; leave "
            f"it at {MAX_SHARD_BYTES}"
        )


def _write(
    folder: str | Path,
    entries: Iterator[Entry],
    documents: dict[str, dict[str, Any]],
    max_shard_bytes: int,
    weights: dict[str, Tensor],
) -> None:
    """Write from the first rank, and raise on every one if that fails."""

    def write() -> None:
        checkpoint_folder.write(Path(folder), entries, documents, max_shard_bytes)

    if not any(is_dtensor(weight) for weight in weights.values()):
        write()
        return
    failure: list[Exception | None] = [None]
    try:
        if dist.get_rank() == 0:
            write()
    except Exception as error:
        failure = [error]
    for _ in entries:
        pass  # no rank may leave while others still gather or write
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]
