"""Export of trained models to the checkpoints that serving engines and trainers read."""

import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fp4adam.checkpoints import folder as checkpoint_folder
from fp4adam.checkpoints.folder import CONFIG, Entry
from fp4adam.checkpoints.hub_names import module_names, pieces_of
from fp4adam.checkpoints.layouts import LAYOUTS
from fp4adam.checkpoints.model_state import in_high_precision, plain_name
from fp4adam.checkpoints.trained import Trained, cut_rows, gathered, spans_of, tensors_of
from fp4adam.distributed.dtensor import is_dtensor, like, local
from fp4adam.formats.mxfp4 import MXFP4Quantizer
from fp4adam.formats.scale_groups import fused_layer, hf_scale_groups
from fp4adam.optim.fused_adam import FusedAdam
from fp4adam.optim.parameter import written_value
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
        UserWarning: For what readers are known to misread or to refuse: NVFP4 weights with
            different amaxes that engines serve as one matrix, Float8Block weights with partial
            blocks; in models of transformers, experts, all of "modelopt", layers that it builds as
            Conv1D, and 4-bit layers of T5.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    trained = Trained.of(model, LAYOUTS[layout])
    dtype = LAYOUTS[layout].decoded_dtype or next(iter(trained.quantized.values())).dtype
    documents = _documents_of(trained.model, config, dtype)
    _check_size(max_shard_bytes)
    for text in _troubles_of_readers(trained, layout):
        warnings.warn(text, stacklevel=2)
    excluded, stacked = _unquantized_modules(trained.model, module_names(trained.pieces))
    quantization = LAYOUTS[layout].documents(trained.encoding, excluded, stacked)
    content = {**documents[CONFIG], "quantization_config": quantization[CONFIG]}
    documents.update(quantization, **{CONFIG: content})

    def entries() -> Iterator[Entry]:
        for name, weight in trained.weights.items():
            whole = gathered(weight)
            if isinstance(whole, QuantizedTensor):
                yield from _quantized_entries(name, whole, trained)
            else:
                yield from _plain_entries(whole, trained.spans[name])

    _write_folder(folder, entries(), documents, max_shard_bytes, trained.weights)


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
    spans = spans_of(pieces_of(model, weights))
    master_of = _masters_of(optimizer)
    parameters = set(model.parameters())

    def entries() -> Iterator[Entry]:
        for name, weight in weights.items():
            own, master = local(weight), master_of(weight)
            if master is not None:
                source = master
            elif isinstance(own, QuantizedTensor):
                value = written_value(own)
                value = own.dequantize(torch.float32) if value is None else value.view(own.shape)
                source = like(weight, value)
            else:
                source = weight
            whole = gathered(source)
            if weight in parameters and weight.is_floating_point():
                whole = whole.to(dtype)
            yield from _plain_entries(whole, spans[name])

    documents = _documents_of(model, config, dtype)
    _write_folder(folder, entries(), documents, max_shard_bytes, weights)


def _masters_of(optimizer: Optimizer) -> Callable[[Tensor], Tensor | None]:
    """A function that returns the FP32 master of one weight, or its value if others wrote it."""
    if not isinstance(optimizer, FusedAdam):
        return lambda weight: None
    return optimizer._current_masters()


def _troubles_of_readers(trained: Trained, layout: str) -> Iterator[str]:
    """What readers are known to misread or to refuse, each as the text of a warning."""
    encoding = trained.encoding
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    partial, cut = [], []
    layers = [name.removesuffix(".weight") for name in trained.quantized]
    for layer, (name, weight) in zip(layers, trained.quantized.items(), strict=True):
        _, parts = fused_layer(layer)
        rows = trained.weights[name].shape[-2]
        cut += [layer] * bool(rows % encoding.block[0] and layer in parts[:-1])
        matrix = hf_scale_groups(name)
        if weight.quantizer.layout.tensor_scale == "current" and matrix is not None:
            groups[matrix][layer.rpartition(".")[2]] = weight.flush()._amax.item()
        sides = zip(trained.weights[name].shape[-2:], encoding.block, strict=True)
        partial += [layer] * any(n > block and n % block for n, block in sides)
    unequal = [name for name, amaxes in groups.items() if len({*amaxes.values()}) > 1]
    format_name = encoding.quantizer_class.tensor_class.__name__.removesuffix("Tensor")
    if unequal:
        yield (
            "weights that are served as one matrix should have one amax, got "
            f"{groups[unequal[0]]} for {unequal[0]!r}, and {len(unequal)} such groups: engines "
            "that fuse them, as vLLM does, decode them all by the largest and lose precision "
            "(transformers does not); train with scale_groups=hf_scale_groups"
        )
    if partial:
        yield (
            f"sides of {format_name} weights should be multiples of {max(encoding.block)}, or "
            f"less, got others in {len(partial)} layers such as {partial[0]!r}: transformers reads "
            "these wrongly where it decodes them, without a GPU; pad them, or serve with another "
            "engine"
        )
    if cut:
        yield (
            f"rows of q, k, gate should be multiples of {encoding.block[0]} for vLLM, got others "
            f"in {len(cut)} layers such as {cut[0]!r}: it fuses them with what follows, and (0.32) "
            "decodes that by the wrong scales without a word; serve with another engine"
        )
    if not hasattr(trained.model, "from_pretrained"):
        return
    if layout == "modelopt":
        outcome = "refuses the files"
        if encoding.bits == 8:
            outcome = "takes codes for weights and leaves the scales out"
        yield (
            f"layout 'modelopt' with {format_name} should be read by an engine or by "
            "import_checkpoint, got a model of transformers, whose from_pretrained (5.23) "
            f"{outcome}; for it, use layout 'compressed-tensors'"
        )
    if (rebuilt := in_high_precision(trained.model)) is not None:
        modules = dict(rebuilt.named_modules())
        others = [n for n in layers if type(modules.get(n)).__name__ == "Conv1D"]
        if others:
            yield (
                "quantized layers should be nn.Linear in the model that readers build, got Conv1D "
                f"in {len(others)} such as {others[0]!r}, which from_pretrained (5.23) leaves at "
                "random values or refuses; import_checkpoint reads them into a model with the "
                "layers exchanged"
            )
    if layout != "compressed-tensors":
        return
    has_stacks = any(p.rows and p.name in trained.quantized for p in trained.pieces.values())
    if has_stacks and encoding.quantizer_class is not MXFP4Quantizer:
        yield (
            "experts in the layout 'compressed-tensors' should be read by an engine or by "
            "import_checkpoint, got a model of transformers, whose from_pretrained (5.23) leaves "
            "the tensor scales of NVFP4 experts out and refuses 8-bit ones of most models; for it, "
            "export Float8Block weights in the layout 'fp8'"
        )
    asked = [layer for layer in layers if layer.endswith(".wo") and encoding.bits == 4]
    if asked:
        yield (
            f"layers called wo should have weights of 8 bits in T5 and its relatives, got "
            f"{format_name} in {len(asked)} such as {asked[0]!r}: transformers (5.23) asks each "
            "for .weight, which packed layers lack, and raises AttributeError in the first forward "
            "pass; keep them in high precision by quantize_model(..., filter=...), or train MXFP8"
        )


def _plain_entries(whole: Tensor, spans: dict[str, tuple[int, int] | None]) -> Iterator[Entry]:
    for stored, span in spans.items():
        yield Entry({stored: cut_rows(whole, span).cpu().contiguous()}, {})


def _quantized_entries(name: str, weight: QuantizedTensor, trained: Trained) -> Iterator[Entry]:
    amax = weight._amax
    for stored, part in trained.encode_parts(name, weight).items():
        layer, metadata = stored.removesuffix("weight"), {}
        if amax is not None:
            # The layout's rounded scale does not determine the last bit of the amax.
            metadata[f"{stored}.amax"] = amax.item().hex()
        if trained.keeps_stacks:
            tensors = trained.encoding.of_stack(part, weight.shape, stored)
        else:
            tensors = {layer + key: tensor for key, tensor in part.items()}
        yield Entry({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata)


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


def _check_size(max_shard_bytes: int) -> None:
    if not isinstance(max_shard_bytes, int) or max_shard_bytes <= 0:
        raise ValueError(
            f"max_shard_bytes must be a positive number of bytes, got {max_shard_bytes!r}; leave "
            f"it at {MAX_SHARD_BYTES}"
        )


def _write_folder(
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
