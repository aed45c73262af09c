"""Training of models that other packages have loaded with quantized weights."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp4adam.checkpoints.hub_names import pieces_of
from fp4adam.checkpoints.import_checkpoint import Import
from fp4adam.checkpoints.layouts import Encoding
from fp4adam.checkpoints.model_state import (
    ACTIVATION_SCALES,
    CACHE_SCALES,
    in_high_precision,
    members,
    plain_name,
    unwrapped,
)
from fp4adam.checkpoints.trained import check_no_adapters
from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.interop.adapter import find_adapter, is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback
from fp4adam.nn.candidates import check_module
from fp4adam.nn.recipe import FormatName, Recipe, resolve_recipe
from fp4adam.nn.replacement import check_attributes, check_no_replica, put_in
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

# What users register at a module, and torch calls around its forward and backward pass.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)

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
    guards against training are satisfied. Masters start from the decoded values. Scales of
    activations become buffers, for those who read what is saved.

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

    Nothing has been changed when it raises; Ctrl-C leaves the old model or the new one.
    """
    check_module(model)
    check_no_adapters(model, "made trainable", "add them afterwards")
    for name, param in model.named_parameters():
        if isinstance(local(param), QuantizedTensor):
            raise ValueError(
                f"model must not be trainable yet, got {name!r} in {type(local(param)).__name__}; "
                "train it as it is"
            )
    quantizer = None if recipe is None else resolve_recipe(recipe)
    inner = unwrapped(model)
    check_no_replica(model.modules(), [*model.parameters()])
    prepare = _change_of_foreign if _foreign_weights(inner) else _change_of_loaded
    prepare(inner, quantizer)()
    return model


class _LoadedModel:
    """The parameters of a loaded model as the tensors of a checkpoint; not copied."""

    hf_quant_config: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    folder = "the model"
    advice = (
        "load it again, and call make_trainable at once: model.to(dtype) casts codes, and "
        "compressed-tensors decodes them in the first forward pass"
    )

    def __init__(self, model: nn.Module) -> None:
        self.config = {"quantization_config": _quantization_config(model)}
        self.tensors = members(model)
        for name, value in self.tensors.items():
            kinds = {"a DTensor": is_dtensor(value), "one on the meta device": value.is_meta}
            if kind := next((kind for kind in kinds if kinds[kind]), None):
                raise ValueError(
                    f"{name!r} must be a whole tensor in memory to be trained, got {kind}; load "
                    "the model without tp_plan and offloading, and call fully_shard afterwards"
                )
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


def _change_of_loaded(model: nn.Module, quantizer: Quantizer | None) -> Callable[[], None]:
    """Prepare a function that exchanges the quantized modules of a model of transformers."""
    loaded = _LoadedModel(model)
    plain = in_high_precision(model)
    if plain is None:
        raise ValueError(
            "model must be one of transformers to have a quantization_config, got a "
            f"{type(model).__name__}; import_checkpoint reads folders into any model"
        )
    for name in loaded.names():  # for those who read what is saved
        layer, _, key = name.rpartition(".")
        if key in ACTIVATION_SCALES | CACHE_SCALES:
            plain.get_submodule(layer).register_buffer(key, loaded.tensors[name].detach())
    reading = Import(plain, loaded, quantizer)
    _check_experts(plain, reading, loaded.config["quantization_config"])
    modules = _exchanged(model, plain)
    names = {reading.parameter_name(layer): layer for layer in reading.layers}
    weights = {name: reading.quantized_weight(layer) for name, layer in names.items()}
    for name, weight in weights.items():
        weight._shared.name = name
    put_in((*reading.places[layer], nn.Parameter(weights[name])) for name, layer in names.items())
    for name, (_, _, old, module) in modules.items():
        _fit(module, old, name)
    state = _StoredState(reading.encoding, names, loaded.dtypes)
    config = model.config.quantization_config

    def change() -> None:
        for parent, key, old, module in modules.values():
            setattr(parent, key, module)
            _finish(module, old)
        state.register(model)
        if hook := vars(model).get("ct_decompress_hook"):
            hook.remove()  # compressed-tensors would decode all weights in the first forward pass
        if getattr(model, "hf_quantizer", None) is not None:
            model.hf_quantizer.remove_quantization_config(model)
        model.config.quantization_config = config
        _end_quantization(model)

    return change


def _check_experts(plain: nn.Module, reading: Import, config: dict[str, Any]) -> None:
    """Raise ValueError if transformers has decoded experts of compressed-tensors.

    Of those in NVFP4 it leaves out the scales of tensors. Those in BF16 it (5.23) does not load.
    """
    if config["quant_method"] != "compressed-tensors":
        return
    for piece in pieces_of(plain, reading.state).values():
        if piece.rows is not None and piece.name not in reading.layers:
            raise ValueError(
                f"experts must be quantized as in the checkpoint, got {piece.name!r}, which "
                "transformers has decoded; build the model on the meta device and call "
                "import_checkpoint(model, folder)"
            )


def _fit(module: nn.Module, old: nn.Module, name: str) -> None:
    """Give ``module``, which takes the place of ``old``, what is not quantized in it, and hooks."""
    tensors = {
        plain_name(full): value
        for named in (old.named_parameters, old.named_buffers)
        for full, value in named(prefix=name, remove_duplicate=False)
    }
    for prefix, part in module.named_modules(prefix=name):
        for kind in (part._parameters, part._buffers):
            for key, value in kind.items():
                if value is not None and value.is_meta:
                    kind[key] = tensors[f"{prefix}.{key}"]
    for part, its_old in _pairs(module, old):
        if vars(its_old).get("config") is not None:  # the model's, whose changes count
            part.config = its_old.config
        for hooks in _HOOKS:  # the dictionaries themselves, so that handles still remove them
            setattr(part, hooks, getattr(its_old, hooks))
        part.training = its_old.training
        if hasattr(its_old, "_hf_hook"):  # accelerate moves inputs from device to device
            from accelerate.hooks import add_hook_to_module

            add_hook_to_module(part, its_old._hf_hook)


def _pairs(module: nn.Module, old: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Modules in ``module``, each with the one of the same name in ``old``."""
    olds = dict(old.named_modules())
    return ((part, olds[name]) for name, part in module.named_modules() if name in olds)


def _finish(module: nn.Module, old: nn.Module) -> None:
    """What is left to do when ``module`` has taken the place of ``old``.

    Hooks of compressed-tensors for its quantized cache go.
    """
    for part, _ in _pairs(module, old):
        for key, hook in [*part._forward_pre_hooks.items()]:
            if (getattr(hook, "__module__", None) or "").startswith("compressed_tensors."):
                del part._forward_pre_hooks[key]
                part._forward_pre_hooks_with_kwargs.pop(key, None)


def _exchanged(
    model: nn.Module, plain: nn.Module
) -> dict[str, tuple[nn.Module, str, nn.Module, nn.Module]]:
    """By name: a parent in ``model``, a name there, the module of it, and the one of ``plain``.

    They are those that transformers has exchanged, the outermost of nested ones, and those that
    compressed-tensors has changed.
    """
    loaded = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, str, nn.Module, nn.Module]] = {}
    for name, module in plain.named_modules():
        old = loaded.get(name)
        if old is None or any(name.startswith(f"{outer}.") for outer in found):
            continue
        if type(old) is not type(module) or hasattr(old, "quantization_scheme"):
            parent, _, key = name.rpartition(".")
            found[name] = loaded[parent], key, old, module
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


def _change_of_foreign(model: nn.Module, quantizer: Quantizer | None) -> Callable[[], None]:
    """Prepare a function that exchanges weights of torchao's classes for ones on their memory."""
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
    state = _ForeignState(sources)

    def change() -> None:
        put_in((found[name][0], "weight", param) for name, param in params.items())
        state.register(model)
        _end_quantization(model)  # the quantizer stays: it writes what save_pretrained saves

    return change


def _end_quantization(model: nn.Module) -> None:
    """For transformers, the model is not quantized any more; its configuration still says how."""
    if getattr(model, "is_quantized", False):
        model.is_quantized = False
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

    def names(self, name: str) -> dict[str, str]:
        """The names that a parameter is stored under, by those that ``decode`` knows."""
        raise NotImplementedError

    def decode(
        self, param: QuantizedTensor, stored: dict[str, Tensor], places: dict[str, str]
    ) -> Tensor | None:
        """The value of a parameter; None if the tensors are of another kind.

        Args:
            param: The parameter.
            stored: What it is stored as.
            places: The names of these tensors in the state dict.
        """
        raise NotImplementedError

    def register(self, model: nn.Module) -> None:
        """Add the hooks."""
        # torch sets an attribute of the hook, which methods do not have.
        model.register_state_dict_post_hook(functools.partial(type(self)._save, self))
        model.register_load_state_dict_pre_hook(functools.partial(type(self)._load, self))

    def _save(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        plain = []
        for full, value in [*state_dict.items()]:
            if not full.startswith(prefix) or isinstance(value, nn.Parameter):
                continue
            name = plain_name(full.removeprefix(prefix))
            if isinstance(value, QuantizedTensor):
                del state_dict[full]
                stored = self.encode(name, value)
                state_dict.update({prefix + name: part for name, part in stored.items()})
            elif isinstance(value, Tensor) and not is_dtensor(value) and self.names(name):
                # Codes of the loaded model are there for as long as it has not been taken.
                plain += [full] * (value.itemsize > 1)
        if plain and hasattr(getattr(module, "config", None), "quantization_config"):
            warnings.warn(
                f"weights such as {plain[0]!r} are plain now, and config.json will not say so, as "
                "save_pretrained writes it: dequantize_model(model) takes the others too and then "
                "ends its quantization_config; export_checkpoint lists what is plain",
                stacklevel=2,
            )

    def _load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for full, param in module.named_parameters():
            name = plain_name(full)
            if not isinstance(param, QuantizedTensor):
                continue
            places = {key: prefix + stored for key, stored in self.names(name).items()}
            found = {key: state_dict.get(place) for key, place in places.items()}
            stored = {key: part for key, part in found.items() if isinstance(part, Tensor)}
            if not places or not stored:
                continue
            if lacking := [places[key] for key in places.keys() - stored.keys()]:
                codes = state_dict.get(prefix + full)
                if isinstance(codes, Tensor) and codes.itemsize == 1:  # torch would take it
                    raise ValueError(
                        f"the state dict must have the scales of its codes, got {prefix + full!r} "
                        f"without {min(lacking)!r}; load all that was saved"
                    )
                continue
            if (value := self.decode(param, stored, places)) is not None:
                for place in places.values():
                    del state_dict[place]
                state_dict[prefix + full] = value


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

    def names(self, name: str) -> dict[str, str]:
        layer = self._layers.get(name)
        if layer is None:
            return {}
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

    def decode(
        self, param: QuantizedTensor, stored: dict[str, Tensor], places: dict[str, str]
    ) -> Tensor | None:
        parts = {key: x.to(param.device) for key, x in stored.items()}
        flat = {key: x.flatten(0, 1).flatten(1) if x.ndim > 2 else x for key, x in parts.items()}
        kinds = {places[key]: (tuple(x.shape), x.dtype) for key, x in flat.items()}
        self._encoding.check(places, kinds.__getitem__, param.shape, "load what was saved")
        try:
            return self._encoding.wrap(flat, param.shape, param.dtype, param.quantizer)
        except ValueError as error:
            raise ValueError(f"{param._shared.name!r}: {error}") from None


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

    def names(self, name: str) -> dict[str, str]:
        return {"weight": name} if name in self._sources else {}

    def decode(
        self, param: QuantizedTensor, stored: dict[str, Tensor], places: dict[str, str]
    ) -> Tensor | None:
        value = stored["weight"]
        if not (is_foreign(value) and find_adapter(value)):
            return None
        return BorrowedTensor(value).tensor
