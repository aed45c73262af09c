"""Training of models that other packages have loaded with quantized weights."""

import dataclasses
import functools
import math
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp4adam.checkpoints.import_checkpoint import Import
from fp4adam.checkpoints.layouts import Encoding
from fp4adam.checkpoints.model_state import in_high_precision, members, plain_name
from fp4adam.checkpoints.trained import check_no_adapters
from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.interop.adapter import find_adapter, is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback
from fp4adam.nn.candidates import check_module
from fp4adam.nn.recipe import FormatName, Recipe, resolve_recipe
from fp4adam.nn.replacement import check_attributes, check_no_replica, put_in
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

Model = TypeVar("Model", bound=nn.Module)


def make_trainable(model: Model, recipe: FormatName | Quantizer | Recipe | None = None) -> Model:
    """Turn the quantized weights of a loaded model into parameters to train, in place.

    For models that ``from_pretrained`` of transformers has loaded from FP8 and FP4 checkpoints, and
    for torchao's tensors in any module. Codes stay in their memory, and nothing is decoded or
    rounded. Modules of the quantized model become those of the model in high precision, such as
    ``nn.Linear``, with quantized weights::

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B-FP8", device_map="cuda")
        fp4adam.make_trainable(model)
        optimizer = fp4adam.FP4Adam(model.parameters(), lr=1e-5)

    ``model.state_dict()`` holds codes and scales under the names of the checkpoint, so that
    ``save_pretrained`` and the ``Trainer`` save the layout that the model was loaded from, and
    ``load_state_dict`` takes them. For transformers the model is not quantized any more, and its
    guards against training are satisfied. Masters start from the decoded values.

    ======================================  ===================================================
    weights                                 become
    ======================================  ===================================================
    ``FP8Linear``, ``FP8Experts``           Float8Block, if blocks are 128x128
    ``weight_scale_inv``
    compressed-tensors                      NVFP4, MXFP4, MXFP8, Float8Block of 128x128
    torchao's ``NVFP4Tensor``, ``MXTensor``  NVFP4, MXFP4, MXFP8
    ======================================  ===================================================

    Others are refused by name. transformers decodes FP8 checkpoints where it finds no GPU:
    :func:`fp4adam.import_checkpoint` reads them anywhere, into a model on the meta device.

    Args:
        model: The model. Create the optimizer, and call ``fully_shard``, after this.
        recipe: As for :func:`fp4adam.quantize_model`, of the format of the checkpoint: for example
            a :class:`fp4adam.Recipe` with FP8 matmuls. By default the format with rowwise codes
            alone, which needs no further memory.

    Returns:
        ``model``.

    Raises:
        ValueError: If no weight is quantized, the layout or the shape of a weight is not known, or
            the model has adapters of PEFT.
        TypeError: If ``model`` is not a module.

    Nothing has been changed when it raises.
    """
    check_module(model)
    check_no_adapters(model)
    for name, param in model.named_parameters():
        if isinstance(local(param), QuantizedTensor):
            raise ValueError(
                f"model must not be trainable yet, got {name!r} in {type(local(param)).__name__}; "
                "train it as it is"
            )
    quantizer = None if recipe is None else resolve_recipe(recipe)
    if _foreign_weights(model):
        _take_foreign(model, quantizer)
    else:
        _take_loaded(model, quantizer)
    _forget_quantizer(model)
    return model


class _LoadedModel:
    """The parameters of a loaded model as the tensors of a checkpoint; not copied."""

    hf_quant_config: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    folder = "the model"

    def __init__(self, model: nn.Module) -> None:
        self.config = {"quantization_config": _quantization_config(model)}
        self.tensors = members(model)
        self.dtypes = {name: value.dtype for name, value in self.tensors.items()}

    def names(self) -> set[str]:
        return {*self.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype | str:
        return self.tensors[name].dtype

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        value = self.tensors[name].detach()
        # Kernels read and write 16 bytes at a time.
        is_aligned = value.device.type == "cpu" or value.data_ptr() % 16 == 0
        return value if is_aligned else value.clone()


def _quantization_config(model: nn.Module) -> dict[str, Any]:
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None:
        raise ValueError(
            "model must have quantized weights, got none: transformers decodes FP8 and MXFP4 "
            "checkpoints where it has no kernels for them, such as without a GPU; build the model "
            "on the meta device and call import_checkpoint(model, folder), or quantize_model"
        )
    config = dict(config) if isinstance(config, dict) else config.to_dict()
    config["quant_method"] = str(getattr(config["quant_method"], "value", config["quant_method"]))
    if config["quant_method"] == "mxfp4":
        raise ValueError(
            "model must have weights in the order of its checkpoint, got MXFP4 ones that "
            "transformers has swizzled for its kernels; build the model on the meta device and "
            "call import_checkpoint(model, folder)"
        )
    if isinstance(block := config.get("weight_block_size"), tuple):
        config["weight_block_size"] = [*block]
    return config


def _take_loaded(model: nn.Module, quantizer: Quantizer | None) -> None:
    """Exchange the quantized modules of a model of transformers."""
    loaded = _LoadedModel(model)
    plain = in_high_precision(model)
    if plain is None:
        raise ValueError(
            "model must be one of transformers to have a quantization_config, got a "
            f"{type(model).__name__}; import_checkpoint reads folders into any model"
        )
    reading = Import(plain, loaded, quantizer)
    if quantizer is None:
        reading.quantizer = dataclasses.replace(reading.quantizer, columnwise=False)
    modules = _exchanged(model, plain)
    params = members(model)
    weights = {layer: reading.quantized_weight(layer) for layer in reading.layers}
    check_no_replica(model.modules(), [*model.parameters()])
    for layer, weight in weights.items():
        module, key = reading.places[layer]
        name = reading.parameter_name(layer)
        weight._shared.name = name
        module._parameters[key] = nn.Parameter(weight)
    for name, (parent, key, module) in modules.items():
        old = getattr(parent, key)
        for prefix, part in module.named_modules(prefix=name):
            for kind in (part._parameters, part._buffers):
                for k, value in kind.items():
                    if value is not None and value.is_meta:
                        kind[k] = params[f"{prefix}.{k}"]
        module.train(old.training)
        if hasattr(old, "_hf_hook"):  # accelerate moves inputs from device to device
            from accelerate.hooks import add_hook_to_module

            add_hook_to_module(module, old._hf_hook)
        setattr(parent, key, module)
    names = {reading.parameter_name(layer): layer for layer in reading.layers}
    _StoredState(reading.encoding, names, loaded.dtypes).register(model)


def _exchanged(model: nn.Module, plain: nn.Module) -> dict[str, tuple[nn.Module, str, nn.Module]]:
    """Modules of ``plain`` by name, with the parents in ``model`` where they belong.

    They are those that transformers has exchanged, the outermost of nested ones, and those that
    compressed-tensors has changed.
    """
    loaded = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, str, nn.Module]] = {}
    for name, module in plain.named_modules():
        old = loaded.get(name)
        if old is None or any(name.startswith(f"{outer}.") for outer in found):
            continue
        if type(old) is not type(module) or hasattr(old, "quantization_scheme"):
            parent, _, key = name.rpartition(".")
            found[name] = loaded[parent], key, module
    return found


def _foreign_weights(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Parameter]]:
    """Weights of linear layers in formats of other packages, by name."""
    return {
        f"{name}.weight".removeprefix("."): (module, weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (weight := module._parameters.get("weight")) is not None
        and is_foreign(weight)
    }


def _take_foreign(model: nn.Module, quantizer: Quantizer | None) -> None:
    """Exchange the weights of torchao's classes by parameters on their memory."""
    found = _foreign_weights(model)
    sources: dict[str, Tensor] = {}
    borrowed: dict[str, BorrowedTensor] = {}
    for name, (_, weight) in found.items():
        if find_adapter(weight) is None or is_dtensor(weight):
            raise ValueError(
                f"{name!r} must be in a format of this package to be trained, got a "
                f"{type(weight).__name__}; dequantize it, or register_adapter for its class"
            )
        try:
            sources[name] = weight.detach()
            borrowed[name] = BorrowedTensor(sources[name])
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name!r}: {error}") from None
    kinds = {type(one.tensor.quantizer) for one in borrowed.values()}
    if quantizer is not None and kinds != {type(quantizer)}:
        raise ValueError(
            f"recipe must be of the format of the weights, {min(k.__name__ for k in kinds)}, got "
            f"{quantizer}; leave it out"
        )
    params = {}
    for name, one in borrowed.items():
        if quantizer is not None:
            one.tensor.quantizer = dataclasses.replace(
                one.tensor.quantizer, operands=quantizer.operands
            )
        one.tensor._shared.name = name
        params[name] = nn.Parameter(one.tensor)
        check_attributes(name, found[name][1], params[name])
    check_no_replica(model.modules(), [weight for _, weight in found.values()])
    put_in((found[name][0], "weight", param) for name, param in params.items())
    _ForeignState(sources).register(model)


def _forget_quantizer(model: nn.Module) -> None:
    """For transformers, the model is not quantized any more; its configuration still says how."""
    if hook := vars(model).pop("ct_decompress_hook", None):
        hook.remove()  # compressed-tensors would decode all weights in the first forward pass
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        config = model.config.quantization_config
        quantizer.remove_quantization_config(model)
        model.config.quantization_config = config
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_is_quantized", False):
            module.config._is_quantized = False


class _State:
    """Hooks that give a model's state dict the names and tensors of a checkpoint, and take them.

    ``state_dict(keep_vars=True)`` returns the parameters themselves, and DTensors stay as they are.
    """

    def encode(self, name: str, weight: QuantizedTensor) -> dict[str, Tensor]:
        """What a parameter is stored as."""
        raise NotImplementedError

    def decode(self, name: str, param: QuantizedTensor, stored: dict[str, Any]) -> Tensor | None:
        """A value for a parameter, removed from ``stored``; None if it does not have it."""
        raise NotImplementedError

    def register(self, model: nn.Module) -> None:
        """Add the hooks."""
        # torch sets an attribute of the hook, which methods do not have.
        model.register_state_dict_post_hook(functools.partial(type(self)._save, self))
        model.register_load_state_dict_pre_hook(functools.partial(type(self)._load, self))

    def _save(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        for full, value in [*state_dict.items()]:
            is_own = full.startswith(prefix) and not isinstance(value, nn.Parameter)
            if is_own and isinstance(value, QuantizedTensor):
                del state_dict[full]
                stored = self.encode(plain_name(full.removeprefix(prefix)), value)
                state_dict.update({prefix + name: part for name, part in stored.items()})

    def _load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, param in module.named_parameters():
            if isinstance(param, QuantizedTensor) and not isinstance(
                state_dict.get(prefix + name), QuantizedTensor
            ):
                found = {
                    key.removeprefix(prefix): value
                    for key, value in state_dict.items()
                    if key.startswith(prefix)
                }
                before = found.keys() | set()
                value = self.decode(plain_name(name), param, found)
                for key in before - found.keys():
                    del state_dict[prefix + key]
                if value is not None:
                    state_dict[prefix + name] = value


class _StoredState(_State):
    """The names and tensors of the layout that a model was loaded from.

    Args:
        encoding: How the layout stores weights.
        layers: The layers by the names of their parameters.
        dtypes: The dtypes that the loaded model had, by names of the layout.
    """

    def __init__(
        self, encoding: Encoding, layers: dict[str, str], dtypes: dict[str, torch.dtype]
    ) -> None:
        self._encoding, self._layers, self._dtypes = encoding, layers, dtypes

    def _names(self, name: str) -> dict[str, str]:
        """The names that a parameter is stored under, by those of the encoding."""
        layer = self._layers[name]
        if name == layer:
            return {key: layer + end for key, end in self._encoding.stacked.items()}
        return {key: f"{layer}.{key}" for key in self._encoding.shapes(0, 0)}

    def encode(self, name: str, weight: QuantizedTensor) -> dict[str, Tensor]:
        if name not in self._layers:  # quantized later
            return {name: weight}
        *leading, cols = weight.shape
        parts = self._encoding.encode(weight.flush()._alias((math.prod(leading), cols)))
        if name == self._layers[name]:
            parts = self._encoding.of_stack(parts, weight.shape, name)
        else:
            parts = {f"{self._layers[name]}.{key}": part for key, part in parts.items()}
        stored = {}
        for full, part in parts.items():
            dtype = self._dtypes.get(full)
            if dtype is not None and dtype != part.dtype:
                if part.element_size() == dtype.itemsize == 1:
                    part = part.view(dtype)
                elif torch.equal(part.to(dtype).float(), part):
                    part = part.to(dtype)
                else:
                    warnings.warn(
                        f"scales such as {full!r} are stored in float32, since {dtype} would round "
                        "them, as readers may that keep them in it; train with "
                        "make_trainable(model, Float8BlockQuantizer(columnwise=False)) for scales "
                        "that are powers of two",
                        stacklevel=2,
                    )
            stored[full] = part
        return stored

    def decode(self, name: str, param: QuantizedTensor, stored: dict[str, Any]) -> Tensor | None:
        if name not in self._layers:
            return None
        names = self._names(name)
        if not all(isinstance(stored.get(full), Tensor) for full in names.values()):
            return None
        parts = {key: stored.pop(full).to(param.device) for key, full in names.items()}
        flat = {key: x.flatten(0, 1).flatten(1) if x.ndim > 2 else x for key, x in parts.items()}
        return self._encoding.wrap(flat, param.shape, param.dtype, param.quantizer)


class _ForeignState(_State):
    """The tensors of another package that parameters lie in.

    Args:
        sources: These tensors, by the names of parameters.
    """

    def __init__(self, sources: dict[str, Tensor]) -> None:
        self._sources = sources

    def encode(self, name: str, weight: QuantizedTensor) -> dict[str, Tensor]:
        source = self._sources.get(name)
        if source is None:
            return {name: weight}
        borrowed = BorrowedTensor(source)
        if borrowed.tensor.data_ptr() != weight.data_ptr():  # moved since
            source = source.clone().to(weight.device)
            borrowed = BorrowedTensor(source)
        borrowed.tensor.copy_(weight)
        ScaleWriteback([borrowed])()
        return {name: source}

    def decode(self, name: str, param: QuantizedTensor, stored: dict[str, Any]) -> Tensor | None:
        value = stored.get(name)
        if not (isinstance(value, Tensor) and is_foreign(value) and find_adapter(value)):
            return None
        return BorrowedTensor(value).tensor
