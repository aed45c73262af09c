"""Turning the weights of a model into quantized parameters."""

import contextlib
import logging
import re
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from fp4adam.distributed.cast import cast
from fp4adam.distributed.dtensor import local
from fp4adam.formats.scale_groups import (
    ScaleGroups,
    form_scale_group,
    resolve_scale_groups,
)
from fp4adam.nn.candidates import Filter, adapters, candidates, check_filter, check_module
from fp4adam.nn.operand import check_shape, has_quantized_operands
from fp4adam.nn.recipe import FormatName, Recipe, describe, format_name, resolve_recipe
from fp4adam.nn.replacement import (
    check_attributes,
    check_no_replica,
    check_weight,
    put_in,
)
from fp4adam.nn.report import summary
from fp4adam.tensors.quantized_tensor import QuantizedTensor, implements_function
from fp4adam.tensors.quantizer import Quantizer, check_dtype

logger = logging.getLogger("fp4adam")

Model = TypeVar("Model", bound=nn.Module)

# The names that GPT, Llama, Megatron, GPT-NeoX, timm and Hugging Face heads go by.
OUTPUT_HEADS = frozenset(
    ("lm_head", "head", "output", "output_layer", "embed_out", "classifier", "score", "logits")
    + ("qa_outputs", "seq_relationship", "lm_head.decoder", "predictions.decoder")
    + ("classifier.out_proj", "classification_head.out_proj")
)
# What PEFT appends to the name of a layer that it has wrapped.
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)$")


def is_hidden_linear(module: nn.Module, name: str) -> bool:
    """The default filter: every layer but an output head, known by the end of its name.

    Embeddings, norms and heads stay in high precision, as in arXiv:2509.25149, section 4.1.
    """
    parts = _WRAPPED.sub("", name).split(".")
    return parts[-1] not in OUTPUT_HEADS and ".".join(parts[-2:]) not in OUTPUT_HEADS


def quantize_model(
    model: Model,
    recipe: FormatName | Quantizer | Recipe,
    filter: Filter | None = None,
    *,
    scale_groups: ScaleGroups = (),
) -> Model:
    """Quantize the weights of linear layers and stacked experts of ``model``, in place.

    Each weight keeps its name, its nominal dtype and what it is tied to. Left alone are weights
    that something else uses as well (an embedding, a layer that ``filter`` leaves out), adapters of
    PEFT, weights that the same recipe has quantized already, and all that is neither the weight of
    an ``nn.Linear`` nor a stack of experts, such as ``Conv1D`` of transformers' GPT-2. The logger
    "fp4adam" says at level INFO what is quantized and what is left; :func:`summary` shows each.

    A stack of experts is a 3-dimensional parameter of a module whose ``num_experts`` is its first
    size, as transformers 5 has them. No recipe quantizes the other operand of its products: give
    it one for weights alone, in a call with a ``filter``.

    The value before quantization is kept until ``FP4Adam`` takes it over as master weight at the
    first step (``param.clear_high_precision_init_val()`` frees it for inference); frozen weights
    (``requires_grad=False``) keep none, and are trained from decoded values if they are thawed.

    Parameters stay the same objects with other content (``torch.utils.swap_tensors``), with their
    attributes, gradients and hooks. An :class:`FP4Adam` from before goes on, other optimizers say
    that they cannot. Call this before wrappers such as ``DistributedDataParallel``;
    :func:`dequantize_model` is the inverse.

    Args:
        model: Its ``nn.Linear`` modules, subclasses included, and stacks of experts are candidates.
        recipe: "nvfp4", "mxfp8", "mxfp4", "float8block", "float8", a quantizer, or a
            :class:`fp4adam.Recipe`, which also says whether matmuls quantize activations and
            gradients.
        filter: ``filter(module, name) -> bool`` says which candidates are quantized;
            :func:`is_hidden_linear` by default. Names are those of ``model.named_modules()``.
        scale_groups: NVFP4 weights that share one amax, now and throughout training: lists of names
            (of ``model.named_parameters()``), or a rule ``rule(name) -> key`` that gives members of
            a group the same key and others None, such as :func:`hf_scale_groups`. A rule changes
            nothing in other formats.

    Returns: ``model``.

    Raises:
        ValueError: If a layer that ``filter`` selects has a shape that the recipe cannot hold;
            without a filter it stays as it is, with a warning. If a weight is not initialized (lazy
            layers), parametrized, of a subclass of ``nn.Parameter``, quantized by another recipe,
            or has an attribute whose name quantized tensors use. If DDP, FSDP1, DeepSpeed or
            ``AveragedModel`` is around the model. If a member of a scale group does not become
            NVFP4, or is in two groups.
        TypeError: If a selected weight is not float32, bfloat16 or float16.
        RuntimeError: If something but modules and optimizers refers to a weight.

    Nothing has been changed when it raises. It warns if no selected layer has a weight that it can
    take, and without a filter if less than half of the elements of matrices are quantized.
    """
    quantizer = resolve_recipe(recipe)
    check_module(model)
    check_filter(filter)
    selected = filter or is_hidden_linear
    modules = model.named_modules()
    count, misfits = _quantize_layers(
        modules, quantizer, selected, scale_groups, leaves=filter is None
    )
    _report([model], quantizer, count, misfits, asked=filter is not None, stacklevel=3)
    return model


def _report(
    models: Sequence[nn.Module],
    quantizer: Quantizer,
    count: int,
    misfits: Mapping[str, str],
    asked: bool,
    stacklevel: int,
) -> None:
    """Log what is quantized now and what is not; warn of what may not be meant.

    ``count`` weights are quantized; ``misfits``, by layer, cannot be; ``asked``: a filter chose.
    """
    found = [summary(model) for model in models]
    if misfits:
        warnings.warn(
            f"{len(misfits)} layers stay in high precision, as {describe(quantizer)} cannot hold "
            f"them: {', '.join([*misfits][:8])}{', ...' if len(misfits) > 8 else ''}. Of these, "
            f"{next(iter(misfits.values()))}",
            stacklevel=stacklevel,
        )
    # Embeddings, what is tied to them, and heads are not meant to be quantized.
    matrices = [
        p
        for model, each in zip(models, found, strict=True)
        for p in each.parameters
        if len(p.shape) > 1 and "Embedding" not in p.layer
        if is_hidden_linear(model, p.name.rpartition(".")[0])
    ]
    quantized = sum(p.numel for p in matrices if p.is_quantized)
    share = quantized / max(sum(p.numel for p in matrices), 1)
    if share < 0.5 and count and not (asked or misfits):
        warnings.warn(
            f"only {share:.1%} of the elements of matrices are quantized now, embeddings and heads "
            "aside: weights of nn.Linear layers and stacks of experts are, and those of LSTMs, "
            "convolutions and nn.MultiheadAttention's in_proj_weight are neither. "
            "fp4adam.summary(model) shows all; pass a filter if this is what you want",
            stacklevel=stacklevel,
        )
    for model, each in zip(models, found, strict=True):
        described = f"{type(model).__name__}, {format_name(quantizer)}: {each.describe()}"
        logger.info("%s", described)
        if not count:
            warnings.warn(
                f"no weight was quantized in {described}. Only weights of nn.Linear layers "
                "and stacks of experts that filter selects are, unless something else uses them",
                stacklevel=stacklevel,
            )


def _quantize_layers(
    named_modules: Iterable[tuple[str, nn.Module]],
    quantizer: Quantizer,
    selected: Filter,
    scale_groups: ScaleGroups,
    leaves: bool,
    keeps_others: bool = False,
) -> tuple[int, dict[str, str]]:
    """Quantize the weights of selected layers among all modules.

    Weights of shapes that the format cannot hold are left if ``leaves``, weights of other recipes
    if ``keeps_others``; else they are refused. Returns how many weights of these layers are
    quantized now, and why others are left, by layer.
    """
    named_modules = [*named_modules]
    already = set()
    uses: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    left_alone = set()
    modules = [module for _, module in named_modules]
    check_no_replica(modules)
    of_adapters = adapters(modules)
    for name, module in named_modules:
        params = dict(module.named_parameters(recurse=False))
        names = () if module in of_adapters else candidates(module)
        for key in names if names and selected(module, name) else ():
            weight = params.pop(key, None)
            if not isinstance(weight, QuantizedTensor):
                check_weight(name, weight)
                uses.setdefault(weight, []).append((name, module, key))
            else:
                already.add(weight)
                found = weight.quantizer
                is_same = (found, found.operands) == (quantizer, quantizer.operands)
                if not (is_same or keeps_others):
                    raise ValueError(
                        f"weight of layer {name!r} must not be quantized by another recipe, got "
                        f"{describe(found)} for {describe(quantizer)}: quantizing twice would add "
                        "up the errors; call dequantize_model first, or leave this layer as it is "
                        "(filter=...)"
                    )
        left_alone.update(params.values())
    chosen, misfits = [], {}
    for weight, [(name, *_), *_] in uses.items():
        misfit = None if weight in left_alone else _misfit(quantizer, name, weight)
        if misfit and not leaves:
            raise ValueError(misfit)
        if misfit:
            misfits[name] = misfit
        elif weight not in left_alone:
            chosen.append(weight)
    names = [f"{name}.{key}" for [(name, _, key), *_] in (uses[weight] for weight in chosen)]
    groups = resolve_scale_groups(scale_groups, chosen, names, [quantizer] * len(chosen))
    params = []
    for weight, name in zip(chosen, names, strict=True):
        empty = quantizer.make_empty(tuple(weight.shape), weight.dtype, weight.device)
        params.append(param := nn.Parameter(empty, weight.requires_grad))
        check_attributes(uses[weight][0][0], weight, param)
        param.parameter_name = name
    for group in groups:
        form_scale_group([params[i] for i in group], [names[i] for i in group])
    group_of = {i: group[0] for group in groups for i in group}
    real = [i for i, weight in enumerate(chosen) if not weight.is_meta]
    targets, values = [params[i] for i in real], [chosen[i].detach() for i in real]
    # Reads attributes of tensor subclasses directly.
    with torch._C.DisableTorchFunctionSubclass():
        scales = [group_of.get(i, i) for i in real]
        cast(targets, values, [x.dtype for x in values], scales=scales)
        for param, weight in zip(params, chosen, strict=True):
            if weight.requires_grad:
                param._high_precision_init_val = weight.detach()
    new = zip(chosen, params, strict=True)
    put_in([(module, key, param) for weight, param in new for _, module, key in uses[weight]])
    return len(chosen) + len(already), misfits


def _misfit(quantizer: Quantizer, name: str, weight: nn.Parameter) -> str | None:
    """Why the format cannot hold a weight of this shape, or None; raises for its dtype."""
    shape = tuple(weight.shape)
    rows = quantizer.layout.block if quantizer.layout.is_square else 1
    try:
        check_dtype("weight", weight.dtype)
        quantizer.check_shape(shape)
        if has_quantized_operands(quantizer):
            check_shape(quantizer, shape)
    except TypeError as error:
        raise TypeError(f"layer {name!r}: {error}") from None
    except ValueError as error:
        return f"layer {name!r}: {error}"
    if len(shape) == 3 and shape[1] % rows:
        return (
            f"layer {name!r}: experts must have a multiple of {rows} rows each for "
            f"{format_name(quantizer)}, got {shape}: they would share scales, and no checkpoint "
            "layout holds them; take another format"
        )
    return None


def use_plain_state_dict(model: Model) -> Model:
    """Make ``model.state_dict()`` return plain tensors of the nominal dtypes, in place.

    For programs that save models by memory address, as safetensors does. Such values can be loaded
    into a quantized model again. To the optimizer they count as equal to the rounded masters, so
    these hold. Loading the optimizer's state after the model's gives back every byte at once, and
    the next step does so in any case. DTensors stay as they are.

    Later calls of :func:`quantize_model` count. Returns ``model``, whose ``load_state_dict`` raises
    a ValueError where plain values would take the place of quantized weights (``assign=True``).
    """
    model.register_state_dict_post_hook(_dequantize_values)
    model.register_load_state_dict_pre_hook(_refuse_plain_parameters)
    return model


# safetensors asks for it after untyped_storage(), which has no address either.
@implements_function(torch.Tensor.storage)
def _refuse_storage(weight: QuantizedTensor) -> NoReturn:
    raise RuntimeError(
        "weights must be plain tensors to be saved by memory address, as safetensors does, got "
        f"{type(weight).__name__} of shape {tuple(weight.shape)}; call "
        "fp4adam.use_plain_state_dict(model) once, and save_pretrained and safetensors save "
        "decoded values; fp4adam.export_checkpoint(model, folder) writes the trained bytes"
    )


def _dequantize_values(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    for name, value in state_dict.items():
        # state_dict(keep_vars=True) returns the parameters themselves.
        is_asked_for = name.startswith(prefix) and not isinstance(value, nn.Parameter)
        if isinstance(value, QuantizedTensor) and is_asked_for:
            state_dict[name] = value.dequantize(value.dtype)


def _refuse_plain_parameters(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    if not metadata.get("assign_to_params_buffers"):
        return
    for name, param in module.named_parameters(prefix.removesuffix(".")):
        loaded = local(state_dict.get(name, param))
        if isinstance(local(param), QuantizedTensor) and not isinstance(loaded, QuantizedTensor):
            raise ValueError(
                f"assign must be False to load plain values of the quantized {name!r}, got True: "
                "they would take its place and be trained in its stead; leave assign out (in "
                "Accelerate, set cpu_ram_efficient_loading=False)"
            )


# What blocks of quantized_init with enabled=False have built.
_left_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def quantized_init(
    recipe: FormatName | Quantizer | Recipe | None = None,
    filter: Filter | None = None,
    *,
    scale_groups: ScaleGroups = (),
    enabled: bool = True,
) -> Iterator[None]:
    """Quantize every module that is built inside the ``with`` block, as ``quantize_model`` does.

    Building and initialization run in high precision; weights are quantized when the block ends,
    unless by an exception. A module from before the block counts as built inside once it becomes
    part of one that is. Weights that a nested block or :func:`quantize_model` has quantized already
    keep their recipes.

    Args:
        recipe: As for :func:`quantize_model`; may be left out if not ``enabled``.
        filter: As for :func:`quantize_model`; names are relative to the outermost module that the
            block built, or added to.
        scale_groups: As for :func:`quantize_model`, with names as for ``filter``.
        enabled: False leaves what is built inside alone, also in the blocks around this one and in
            later ones.

    Raises:
        ValueError, TypeError: At the end of the block, as :func:`quantize_model`.
    """
    quantizer = resolve_recipe(recipe) if enabled else None
    check_filter(filter)
    # Whether each module that still exists is new, in the order of first sight.
    is_new: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def on_member(module: nn.Module, name: str, member: Any) -> None:
        members = (*module._parameters.values(), *module._modules.values())
        is_new.setdefault(module, all(each is None for each in members))
        if isinstance(member, nn.Module):
            # Copies are built without registering anything, and have their members already.
            is_new.setdefault(member, True)

    with (
        nn_module.register_module_parameter_registration_hook(on_member),
        nn_module.register_module_module_registration_hook(on_member),
    ):
        yield
    seen = dict(is_new)
    new = {part for module in seen if seen[module] for part in module.modules()}
    if quantizer is None:
        _left_alone.update(new)
        return
    new.difference_update(_left_alone)
    children = {child for module in seen for child in module.children()}
    roots = [module for module in seen if module not in children]
    named_modules = [named for root in roots for named in root.named_modules()]
    selected = filter or is_hidden_linear
    count, misfits = _quantize_layers(
        named_modules,
        quantizer,
        lambda module, name: module in new and selected(module, name),
        scale_groups,
        leaves=filter is None,
        keeps_others=True,
    )
    with_weights = [root for root in roots if next(root.parameters(), None) is not None]
    # What was there before, or was left alone, is not meant.
    asked = filter is not None or any(part not in new for root in roots for part in root.modules())
    _report(with_weights, quantizer, count, misfits, asked, stacklevel=4)
