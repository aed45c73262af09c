"""Turning the weights of a model into quantized parameters."""

import contextlib
import weakref
from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules import module as nn_module

from fp4adam.float8_block import Float8BlockQuantizer
from fp4adam.mxfp8 import MXFP8Quantizer
from fp4adam.nvfp4 import NVFP4Quantizer
from fp4adam.quantized_tensor import QuantizedTensor, Quantizer

Filter = Callable[[nn.Module, str], bool]

RECIPES: dict[str, Quantizer] = {
    "nvfp4": NVFP4Quantizer(),
    "mxfp8": MXFP8Quantizer(),
    "float8block": Float8BlockQuantizer(),
}

# The names that GPT, Llama, Megatron, GPT-NeoX, timm and Hugging Face heads go by.
OUTPUT_HEADS = frozenset(
    ("lm_head", "head", "output", "output_layer", "embed_out", "classifier", "score", "logits")
)


def resolve_recipe(recipe: str | Quantizer) -> Quantizer:
    """The quantizer that a recipe stands for.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If it is neither a name nor a quantizer.
    """
    if isinstance(recipe, Quantizer):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"recipe must be a format name or a quantizer, got {type(recipe).__name__}; "
            f"pass one of {', '.join(RECIPES)}"
        )
    if recipe not in RECIPES:
        raise ValueError(
            f"recipe must be one of {', '.join(RECIPES)} or a quantizer, got {recipe!r}"
        )
    return RECIPES[recipe]


def is_hidden_linear(module: nn.Module, name: str) -> bool:
    """The default filter: every linear layer but an output head.

    Embeddings, norms and the output head stay in high precision, as in NVIDIA's NVFP4
    pre-training recipe (arXiv:2509.25149, section 4.1).
    """
    return name.rpartition(".")[2] not in OUTPUT_HEADS


def quantize_model(
    model: nn.Module,
    recipe: str | Quantizer,
    filter: Filter | None = None,
) -> nn.Module:
    """Quantize the weights of the linear layers of ``model``, in place.

    Each weight becomes a parameter of the recipe's format with the same name and the same nominal
    dtype; tied weights stay tied, unless one of the ties is an embedding: then the weight is left
    alone. The value before quantization is kept until ``FP4Adam`` takes it over as master weight
    at the first step (``param.clear_high_precision_init_val()`` frees it for inference).

    Args:
        model: Its ``nn.Linear`` modules, subclasses included, are candidates.
        recipe: "nvfp4", "mxfp8", "float8block" or a quantizer.
        filter: ``filter(module, name) -> bool`` says which candidates are quantized;
            :func:`is_hidden_linear` by default. Names are those of ``model.named_modules()``.

    Returns:
        ``model``.

    Raises:
        ValueError: If a selected layer has a shape that the format cannot hold; nothing has been
            changed then.

    Create the optimizer after this call: the parameters are new objects.
    """
    quantizer = resolve_recipe(recipe)
    selected = filter or is_hidden_linear
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    high_precision = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and selected(module, name):
            if not isinstance(weight, QuantizedTensor):
                _check_layer(quantizer, name, weight)
                users.setdefault(weight, []).append((module, name))
        elif isinstance(weight, nn.Parameter):
            high_precision.add(weight)
    for weight, modules in users.items():
        if weight not in high_precision:
            param = _quantized_parameter(quantizer, weight)
            for module, _ in modules:
                module.weight = param
    return model


def _check_layer(quantizer: Quantizer, name: str, weight: nn.Parameter) -> None:
    try:
        quantizer.check_shape(tuple(weight.shape))
    except ValueError as error:
        raise ValueError(f"layer {name!r}: {error}") from None


def _quantized_parameter(quantizer: Quantizer, weight: nn.Parameter) -> nn.Parameter:
    value = weight.detach()
    if value.is_meta:
        quantized = quantizer.make_empty(tuple(value.shape), value.dtype, value.device)
        return nn.Parameter(quantized, weight.requires_grad)
    param = nn.Parameter(quantizer.quantize(value), weight.requires_grad)
    param._high_precision_init_val = value
    return param


@contextlib.contextmanager
def quantized_init(recipe: str | Quantizer, filter: Filter | None = None) -> Iterator[None]:
    """Quantize the linear layers of every module that is built inside the ``with`` block.

    Building and initialization run in high precision; the weights are quantized when the block
    ends, and their high-precision values are kept for the optimizer, as by :func:`quantize_model`.

    Args:
        recipe: "nvfp4", "mxfp8", "float8block" or a quantizer.
        filter: As for :func:`quantize_model`; names are relative to the outermost new module.

    Raises:
        ValueError: At the end of the block, if a layer has a shape that the format cannot hold.
    """
    quantizer = resolve_recipe(recipe)
    built: dict[int, weakref.ref[nn.Module]] = {}
    children: set[int] = set()

    def on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        built[id(module)] = weakref.ref(module)

    def on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        built[id(module)] = weakref.ref(module)
        if child is not None:
            children.add(id(child))

    handles = (
        nn_module.register_module_parameter_registration_hook(on_parameter),
        nn_module.register_module_module_registration_hook(on_module),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for key, reference in built.items():
        module = reference()
        if module is not None and key not in children:
            quantize_model(module, quantizer, filter)
