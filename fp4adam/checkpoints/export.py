"""Export of trained models to the checkpoints that serving engines and trainers read."""

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fp4adam.checkpoints import folder as checkpoint_folder
from fp4adam.checkpoints.folder import CONFIG, HF_QUANT_CONFIG, Entry
from fp4adam.checkpoints.layouts import LAYOUTS, Encoding, Layout, find_layout, hf_quant_config
from fp4adam.checkpoints.model_state import (
    Rows,
    Spans,
    model_state,
    module_names,
    spans_of,
    unquantized_modules,
    unwrapped,
)
from fp4adam.distributed.dtensor import is_dtensor, like, local, sharded_dims
from fp4adam.distributed.tensor_parallel import gather_whole
from fp4adam.formats.scale_groups import fused_layer
from fp4adam.nn.candidates import check_module
from fp4adam.optim.fused_adam import FusedAdam
from fp4adam.optim.state_dict import current_master
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import check_dtype
from fp4adam.tensors.rows import is_whole_blocks

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
        ValueError: If the layout is unknown or cannot hold the weights, weights are not finite, or
            the model has adapters of PEFT.
        FileExistsError: If ``folder`` holds a checkpoint or a ``config.json`` already.
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
    weights = trained.quantized.items()
    amaxes = {name: x._amax.item() for name, x in weights if x._amax is not None}
    for text in _misreadings(trained, amaxes):
        warnings.warn(text, stacklevel=2)
    excluded, stacked = unquantized_modules(trained.model, module_names(trained.spans))
    described = trained.layout.describe(trained.encoding, excluded, stacked)
    documents[CONFIG]["quantization_config"] = {"quant_method": layout, **described}
    if layout == "modelopt":
        documents[HF_QUANT_CONFIG] = hf_quant_config(trained.encoding, excluded)
    # The layout's rounded scale does not determine the last bit of the amax.
    header = {f"{s}.amax": amax.hex() for n, amax in amaxes.items() for s, _ in trained.spans[n]}
    _write(folder, trained.entries(), documents, max_shard_bytes, trained.weights, header)


def export_tensors(
    model: nn.Module, layout: str = "compressed-tensors"
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that :func:`export_checkpoint` writes, on the model's device, without files.

    They refill an engine that serves the model while it is trained, for example to sample in
    reinforcement learning: its loader takes the names of a checkpoint.

    Tensors are made one weight at a time. Codes and weights in high precision are the model's own
    memory: copy or send them before the next step, and do not write to them. Scales and what is
    gathered are new. With ``fully_shard``, a weight is gathered when its turn comes, in the same
    order on all ranks, and every rank gets it: each has to go through the iterator to its end.

    Arguments and errors are those of :func:`export_checkpoint`; the model is checked at once.
    """
    trained = Trained.of(model, find_layout(layout))
    return (item for entry in trained.entries() for item in entry.items())


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

    The parameters themselves are read, not what hooks of the state dict make of them. One that has
    no master in the optimizer, or that something else has overwritten since, is written as it is,
    or, if it is quantized, as the value that its master would start from.

    Args:
        model: Any model; sharded ones as for :func:`export_checkpoint`.
        optimizer: Its optimizer; TypeError if it is none.
        folder: As for :func:`export_checkpoint`, as are ``config``, ``max_shard_bytes`` and errors.
        dtype: The dtype of all floating-point parameters: float32, bfloat16 or float16.
    """
    check_dtype("dtype", dtype)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be the one that trains the model, got {type(optimizer).__name__}; "
            "pass the FP4Adam that has its masters"
        )
    model, weights = tensors_of(model)
    spans = spans_of(model, weights)
    # Masters, or values where others have written them.
    is_ours = isinstance(optimizer, FusedAdam)
    parameters = set(model.parameters())

    def entries() -> Iterator[Entry]:
        for name, weight in weights.items():
            own = local(weight)
            master = current_master(optimizer._engine, weight) if is_ours else None
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
            yield from plain_entries(whole, spans[name])

    documents = _documents_of(model, config, dtype)
    _write(folder, entries(), documents, max_shard_bytes, weights, {})


class Trained(NamedTuple):
    """A model, without wrappers, that a layout can hold.

    Attributes:
        weights: All tensors by the first of their names, sharded ones as DTensors.
        quantized: Of these the quantized ones, a shard where they are sharded.
        encoding: How the layout stores the quantized ones.
        spans: What a checkpoint stores of each of the weights: stacked experts one by one.
    """

    model: nn.Module
    weights: dict[str, Tensor]
    quantized: dict[str, QuantizedTensor]
    layout: Layout
    encoding: Encoding
    spans: Spans

    @classmethod
    def of(cls, model: nn.Module, layout: Layout) -> "Trained":
        """Check that ``layout`` can hold a model; raises ValueError if not."""
        model, weights = tensors_of(model)
        shards = {name: local(weight) for name, weight in weights.items()}
        quantized = {n: x for n, x in shards.items() if isinstance(x, QuantizedTensor)}
        encoding = _encoding_for(layout, quantized)
        trained = cls(model, weights, quantized, layout, encoding, spans_of(model, weights))
        linear = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear)}
        for name in quantized:
            trained._check(name, id(weights[name]) in linear)
        return trained

    def _check(self, name: str, is_linear: bool) -> None:
        """Raise ValueError unless the layout can hold what is stored of a quantized weight."""
        weight, block_rows = self.quantized[name], self.encoding.block[0]
        cuts = [rows for _, rows in self.spans[name] if rows is not None]
        if self.layout.keeps_stacks:
            if cuts or weight.dim() != 3 or not is_whole_blocks(weight):
                raise ValueError(
                    "quantized weights must be whole stacks of experts for layout "
                    f"{self.layout.name!r}, as gpt-oss has them, got {name!r}; leave it in high "
                    "precision (filter=...), or use layout 'compressed-tensors'"
                )
            return
        if not (cuts or is_linear):
            raise ValueError(
                f"quantized weights must be those of nn.Linear layers, or stacks of experts that "
                f"checkpoints hold one by one, got {name!r}; leave it in high precision "
                "(filter=...), or write the values of training in high precision: "
                "dequantize_model(model), then model.save_pretrained(folder); export_masters "
                "writes masters"
            )
        for first, last in cuts:
            if first % block_rows or last % block_rows:
                raise ValueError(
                    f"the weight of each expert must have a multiple of {block_rows} rows to be "
                    f"exported, got rows {first} to {last} of {name!r}, which share scales with "
                    "others; leave it in high precision (filter=...)"
                )
        if weight.global_spec is None and not is_whole_blocks(weight):
            raise ValueError(f"{name!r} must be a whole tensor, got rows of another one; clone it")

    def entries(self) -> Iterator[Entry]:
        """What each weight is stored as, on its device; gathers one after the other."""
        for name, weight in self.weights.items():
            whole = gathered(weight)
            if isinstance(whole, QuantizedTensor):
                yield from self._quantized_entries(name, whole)
            else:
                yield from plain_entries(whole, self.spans[name])

    def _quantized_entries(self, name: str, weight: QuantizedTensor) -> Iterator[Entry]:
        try:
            shape = weight.shape
            matrix = weight._alias((shape[:-1].numel(), shape[-1]))
            encoded = self.encoding.encode(matrix)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        for stored_name, rows in self.spans[name]:
            if self.layout.keeps_stacks:
                tensors = self.encoding.of_stack(encoded, weight.shape, stored_name)
            else:
                parts = encoded if rows is None else self.encoding.cut(encoded, rows)
                layer = stored_name.removesuffix("weight")
                tensors = {layer + key: tensor for key, tensor in parts.items()}
            yield tensors


def plain_entries(whole: Tensor, stored: Iterable[tuple[str, Rows]]) -> Iterator[Entry]:
    """What a plain tensor is stored as."""
    for name, rows in stored:
        yield {name: whole if rows is None else whole.flatten(0, 1)[slice(*rows)]}


def tensors_of(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model without wrappers, and all of its tensors by the first of their names.

    Raises TypeError or ValueError if it cannot be exported in any layout.
    """
    check_module(model)
    model = unwrapped(model)
    check_no_adapters(
        model,
        "exported",
        "merge them first: model = model.merge_and_unload(), or save them alone with "
        "save_pretrained",
    )
    names: dict[int, str] = {}
    weights = {}
    for name, value in model_state(model)[0].items():
        first = names.setdefault(id(value), name)
        if value.is_meta:
            raise ValueError(
                f"{name!r} must have a value to be exported, got one on the meta device; load the "
                "weights first"
            )
        if first == name:
            weights[name] = value
        elif isinstance(local(value), QuantizedTensor):
            raise ValueError(
                f"{first!r} and {name!r} must be two weights, got one quantized weight with two "
                "names, which readers do not know of; untie them: "
                "layer.weight = nn.Parameter(layer.weight.detach().clone())"
            )
    return model, weights


def _encoding_for(layout: Layout, quantized: dict[str, QuantizedTensor]) -> Encoding:
    """How ``layout`` stores the quantized weights of a model."""
    kinds = {type(weight.quantizer) for weight in quantized.values()}
    encoding = next((e for e in layout.encodings if kinds == {e.quantizer_class}), None)
    if encoding is None:
        held, found = (
            ", ".join(sorted(kind.tensor_class.__name__ for kind in those))
            for those in ({e.quantizer_class for e in layout.encodings}, kinds)
        )
        others = [
            x.name for x in LAYOUTS.values() for e in x.encodings if kinds == {e.quantizer_class}
        ]
        cure = f"use layout={' or '.join(map(repr, others))}"
        if not others:
            cure = "quantize all weights alike (quantize_model), or call export_masters"
        raise ValueError(
            f"model must have quantized weights of one format for layout {layout.name!r}, {held}, "
            f"got {found or 'none'}; {cure}"
        )
    for name, weight in quantized.items():
        if problem := encoding.refusal(weight.quantizer):
            raise ValueError(
                f"{name!r} must suit layout {layout.name!r}, got {weight.quantizer}; {problem}"
            )
    return encoding


def gathered(weight: Tensor) -> Tensor:
    """All of a weight, quantized as it is; of a DTensor every rank has to ask."""
    own = weight._local_tensor if is_dtensor(weight) else weight
    if not sharded_dims(weight):
        return own.detach()
    return gather_whole(weight) if isinstance(own, QuantizedTensor) else weight.full_tensor()


def check_no_adapters(model: nn.Module, purpose: str, advice: str) -> None:
    """Raise ValueError for a model with the adapters of PEFT, whose names no reader knows."""
    for name, module in model.named_modules():
        # The models of PEFT have the one, the layers that it puts into others the other.
        if hasattr(module, "merge_and_unload") or hasattr(module, "get_base_layer"):
            raise ValueError(
                f"model must be without adapters to be {purpose}, got a "
                f"{type(module).__name__} at {name!r}; {advice}"
            )


def _misreadings(trained: Trained, amaxes: dict[str, float]) -> Iterator[str]:
    """What readers are known to misread without an error, each as the text of a warning."""
    encoding, is_theirs = trained.encoding, hasattr(trained.model, "from_pretrained")
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    partial = []
    block_rows, block_cols = encoding.block
    for name in trained.quantized:
        layer = name.removesuffix(".weight")
        whole, parts = fused_layer(layer)
        if name in amaxes and whole is not None:
            groups[whole][layer.rpartition(".")[2]] = amaxes[name]
        if block_rows > 1:
            rows, cols = trained.weights[name].shape[-2:]
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
    has_stacks = any(trained.spans[name][0][1] for name in trained.quantized)
    is_packed = encoding.format == "nvfp4-pack-quantized"
    is_8bit = trained.layout.name == "modelopt" and encoding.bits == 8
    if is_theirs and (is_8bit or (has_stacks and is_packed)):
        what = "MXFP8 weights in layout 'modelopt'" if is_8bit else "NVFP4 experts"
        cure = "layout 'compressed-tensors'" if is_8bit else "Float8Block and layout 'fp8'"
        yield (
            f"{what} should be read by an engine or by import_checkpoint, got a model of "
            f"transformers, whose from_pretrained (5.23) leaves their scales out; for it use {cure}"
        )


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


def _write(
    folder: str | Path,
    entries: Iterator[Entry],
    documents: dict[str, dict[str, Any]],
    max_shard_bytes: int,
    weights: dict[str, Tensor],
    metadata: dict[str, str],
) -> None:
    """Write from the first rank, and raise on every one if that fails."""
    if not isinstance(max_shard_bytes, int) or max_shard_bytes <= 0:
        raise ValueError(
            f"max_shard_bytes must be a positive number of bytes, got {max_shard_bytes!r}; leave "
            f"it at {MAX_SHARD_BYTES}"
        )

    def write() -> None:
        checkpoint_folder.write(Path(folder), entries, documents, max_shard_bytes, metadata)

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
