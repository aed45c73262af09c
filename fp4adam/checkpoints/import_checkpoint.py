"""Import of quantized checkpoints, to continue training from."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4adam.checkpoints.hub_names import pieces_of
from fp4adam.checkpoints.layouts import LAYOUTS, Encoding
from fp4adam.checkpoints.model_state import (
    ACTIVATION_SCALES,
    CACHE_SCALES,
    model_state,
    plain_name,
    unwrapped,
)
from fp4adam.checkpoints.reader import CheckpointReader, Source, short
from fp4adam.checkpoints.stack_reader import StackReader, WholeStacks
from fp4adam.distributed.dtensor import is_dtensor, local
from fp4adam.nn.candidates import candidates, check_module
from fp4adam.nn.replacement import (
    check_attributes,
    check_no_replica,
    check_weight,
    put_in,
)
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer, check_dtype

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_STRIP = 2**20  # elements


def import_checkpoint(
    model: nn.Module,
    folder: str | Path,
    quantizer: Quantizer | None = None,
    *,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Take over a quantized checkpoint: its codes and scales become parameters to train.

    Reads the layouts that :func:`fp4adam.export_checkpoint` writes, also from other programs.
    Linear layers that are quantized in the checkpoint get quantized weights with the same bytes and
    the nominal dtype of the old weight; all other parameters stay and get the values. So do stacks
    of experts, from weights of one expert each, under the names that exports have for them; those
    in NVFP4 have to share their tensor scale. Masters start from the decoded values. Scales of
    activations and of the KV cache are left out, and so are entries that hooks add to the model's
    state dict.

    The folder is not trusted: files are opened in it alone, apart from the cache of the Hugging
    Face hub, whose links lead to its ``blobs``. Names, shapes and dtypes are compared with the
    model before a tensor is read. Code that ``config.json`` names is not run.

    A model on the meta device gets its weights tensor by tensor: the model in high precision
    never exists: its memory is that of the quantized model and one tensor more. For
    ``fully_shard``, import with ``device="meta"`` first, which makes quantized weights without
    values; shard, call ``model.to_empty(device=...)``, and import again. Each rank then keeps its
    shards of one tensor after the other.

    Args:
        model: A model with the names of the checkpoint, compiled or not. Parameters stay the same
            objects, as by :func:`fp4adam.quantize_model`. Those of sharded models are written in
            place.
        folder: The folder with ``config.json`` and safetensors files.
        quantizer: The quantizer of the weights from now on; by default that of the format, with
            rowwise codes alone: ``Recipe(..., gradients=True).quantizer`` has both. NVFP4 scales of
            other blocks than 16x16 have ``two_dimensional=False`` then, Float8Block scales that are
            no powers of two ``force_pow_2_scales=False``.
        device: Where parameters on the meta device go; the default device if None. Others stay
            where they are.

    Returns:
        ``model``.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the layout is unknown, a file is damaged or lies outside of the folder, if
            names, shapes or scales do not fit the model, the layout or the quantizer, or if values
            are not finite.
        TypeError: If a dtype does not fit.
        ImportError: If safetensors is not installed.

    Warns:
        UserWarning: If scales of the KV cache are left out.

    Nothing has been changed when it raises, and Ctrl-C leaves the old model or the new one, but for
    sharded tensors, which are written one by one.
    """
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"quantizer must be a Quantizer, got {type(quantizer).__name__}; leave it out, or pass "
            "say NVFP4Quantizer() or Recipe(...).quantizer"
        )
    check_module(model)
    if device is not None:
        device = torch.device(device)
    with CheckpointReader(Path(folder)) as checkpoint:
        Import(unwrapped(model), checkpoint, quantizer, device).run(model)
    return model


class Import:
    """The contents of a checkpoint for one model.

    Args:
        model: The model, without wrappers.
        checkpoint: The tensors of the checkpoint.
        quantizer: As for :func:`import_checkpoint`.
        device: As for :func:`import_checkpoint`.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Source,
        quantizer: Quantizer | None,
        device: torch.device | None = None,
    ) -> None:
        tensors, extra = model_state(model)
        self.state = {name: value for name, value in tensors.items() if name not in extra}
        for name, value in self.state.items():
            kinds = {
                "one of inference mode": value.is_inference(),
                "an expanded one": 0 in value.stride() and value.numel() > 1,
                "a DTensor on the meta device": is_dtensor(value) and value.is_meta,
            }
            if kind := next((kind for kind in kinds if kinds[kind]), None):
                raise ValueError(
                    f"{name!r} of the model must be a tensor in memory, or a whole one on the meta "
                    f"device, got {kind}; clone it, or call to_empty"
                )
        self.device = torch.get_default_device() if device is None else device
        # By layer, the module and the name of its weight; a stack of experts is a layer as well.
        self.places: dict[str, tuple[nn.Module, str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            for key in candidates(module):
                layer = plain_name(f"{name}.{key}" if name else key).removesuffix(".weight")
                self.places[layer] = module, key
        self.encoding = encoding_of(checkpoint)
        self._advice = checkpoint.advice
        source = WholeStacks(checkpoint, self.encoding)
        self.checkpoint = StackReader(source, pieces_of(model, self.state), self._keys)
        stored = self._needed(self.checkpoint.names())
        self.layers = self._layers(stored)
        of_layers = {f"{layer}.{key}" for layer in self.layers for key in self._keys}
        self.plain = stored - of_layers - extra
        self._check_names()
        self._check_quantized()
        self._check_plain()
        self.quantizer = self._quantizer(quantizer)

    def weight(self, layer: str) -> nn.Parameter:
        """The parameter of a layer that can be quantized."""
        module, key = self.places[layer]
        return module._parameters[key]

    def shape(self, layer: str) -> tuple[int, ...]:
        """The shape of a quantized weight; blocks of stacks lie along the inputs."""
        (module, key), shape = self.places[layer], tuple(self.weight(layer).shape)
        is_transposed = key != "weight" and getattr(module, "is_transposed", False)
        return (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape

    def parameter_name(self, layer: str) -> str:
        """The name of the parameter of a layer."""
        is_stack = layer in self.places and self.places[layer][1] != "weight"
        return layer if is_stack else f"{layer}.weight"

    def run(self, model: nn.Module) -> None:
        """Give the tensors of the checkpoint to the model; ``model`` may have wrappers."""
        check_buffers(model)
        check_no_replica(model.modules(), [self.weight(layer) for layer in self.places])
        layers = [layer for layer in self.layers if not is_dtensor(self.weight(layer))]
        olds = [self.weight(layer) for layer in layers]
        params = [
            nn.Parameter(self.quantized_weight(n), self.weight(n).requires_grad) for n in layers
        ]
        plain = self.plain_values()
        for layer, old, param in zip(layers, olds, params, strict=True):
            check_attributes(layer, old, param)
            param._shared.name = self.parameter_name(layer)
        places = [(*self.places[n], param) for n, param in zip(layers, params, strict=True)]
        transposed = {self.places[n][0] for n in layers if self.shape(n) != self.weight(n).shape}
        values = _Values(model, {id(self.state[name]): value for name, value in plain.items()})
        unfilled = {*_buffers_on_meta(model).values()} if self.device.type != "meta" else set()

        put_in(places)
        for module in transposed:
            module.is_transposed = False
        if transposed and hasattr(unwrapped(model), "set_experts_implementation"):
            # The model's own code takes [experts, in, out] alone.
            unwrapped(model).set_experts_implementation("grouped_mm")
        values.put_in()
        _fill_buffers(unwrapped(model), unfilled, self.device)
        self._write_shards()

    def _write_shards(self) -> None:
        """Write what is sharded, one tensor after the other."""
        with torch.no_grad():
            for layer in self.layers:
                if is_dtensor(weight := self.weight(layer)):
                    weight.copy_(_distributed(self.quantized_weight(layer), weight))
            for name in sorted(self.plain):
                if is_dtensor(old := self.state[name]):
                    old.copy_(_distributed(self._plain_value(name), old))

    @property
    def _keys(self) -> list[str]:
        return [*self.encoding.shapes(0, 0)]

    def _needed(self, names: set[str]) -> set[str]:
        """The names of the checkpoint without those of scales that the model does not have."""
        others = names - self.state.keys()
        cache = sorted(name for name in others if name.rpartition(".")[2] in CACHE_SCALES)
        if cache:
            warnings.warn(
                "scales of the KV cache are left out, training does not quantize it: got "
                f"{len(cache)} in the checkpoint, such as {cache[0]!r}",
                stacklevel=4,
            )
        unused = ACTIVATION_SCALES | CACHE_SCALES
        return names - {name for name in others if name.rpartition(".")[2] in unused}

    def _layers(self, stored: set[str]) -> list[str]:
        """The layers with quantized weights, found by any tensor of an encoding."""
        keys = {*self._keys} - {"weight"}
        layers = sorted(
            {name.rpartition(".")[0] for name in stored if name.rpartition(".")[2] in keys}
        )
        if not layers:
            raise ValueError(
                f"a checkpoint in {self.encoding.format!r} must have tensors named "
                f"{' and '.join(sorted(keys))}, got none; it is damaged"
            )
        for layer in layers:
            for key in self._keys:
                if f"{layer}.{key}" not in stored:
                    raise ValueError(
                        f"layer {layer!r} of the checkpoint must have {', '.join(self._keys)}, got "
                        f"no {key}; {self._advice}"
                    )
        return layers

    def _check_names(self) -> None:
        weights = {self.parameter_name(layer) for layer in self.layers}
        unknown = sorted((weights | self.plain) - self.state.keys())
        if unknown:
            advice = "build it from the checkpoint's config.json"
            if stack := next(filter(None, map(self._stack_of, unknown)), None):
                advice = (
                    f"its experts are stacked in {stack!r}, those of the checkpoint are not: build "
                    "a model with one nn.Linear per expert and projection"
                )
            raise ValueError(
                f"the model must have all that the checkpoint has, lacks {len(unknown)}, such as "
                f"{unknown[0]!r}; {advice}"
            )
        # A tied weight has one name there.
        given = {id(self.state[name]) for name in weights | self.plain}
        missing = [name for name, value in self.state.items() if id(value) not in given]
        if missing:
            raise ValueError(
                f"the checkpoint must have all that the model has, lacks {len(missing)}, such as "
                f"{missing[0]!r}; build the model from its config.json"
            )
        for layer in self.layers:
            if layer not in self.places:
                raise ValueError(
                    f"{layer!r} of the model must be an nn.Linear to have a quantized weight, got "
                    f"another module; build it from the checkpoint's config.json"
                )
            weight = self.weight(layer)
            if not is_dtensor(weight):
                check_weight(layer, weight)
            elif not isinstance(
                getattr(local(weight), "quantizer", None), self.encoding.quantizer_class
            ):
                raise ValueError(
                    f"weight of layer {layer!r} must be quantized to {self.encoding.format} to be "
                    "written shard by shard, got another DTensor; import with device='meta' before "
                    "fully_shard"
                )
            names = [name for name, x in self.state.items() if x is weight]
            if len(names) > 1:
                raise ValueError(
                    f"{names[0]!r} and {names[1]!r} must be two weights, got a tied one, which is "
                    "quantized in the checkpoint; untie them"
                )

    def _stack_of(self, name: str) -> str | None:
        """The parameter in which the model stacks what is one expert's weight in the checkpoint."""
        match = re.match(r"(.*\bexperts)\.\d+\.", name)
        stacks = (n for n, x in self.state.items() if x.ndim > 2)
        return match and next((n for n in stacks if n.startswith(f"{match[1]}.")), None)

    def _check_quantized(self) -> None:
        """Raise unless all parts of quantized weights have the shapes and dtypes that they need."""
        for layer in self.layers:
            old, whole = self.weight(layer), self.shape(layer)
            check_dtype(f"weight of layer {layer!r}", old.dtype)
            names = {key: f"{layer}.{key}" for key in self._keys}
            self.encoding.check(names, self._shape_and_dtype, whole, self._advice)

    def _shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype | str]:
        return self.checkpoint.shape(name), self.checkpoint.dtype(name)

    def _check_plain(self) -> None:
        """Raise unless all other tensors have the shapes and dtypes of the model's."""
        for name in sorted(self.plain):
            old, shape = self.state[name], self.checkpoint.shape(name)
            expected = tuple(old.shape)
            if self.checkpoint.is_stack(name):
                expected = flat_shape(expected)
            if shape != expected:
                raise ValueError(
                    f"{name!r} must have shape {expected}, got {shape} in the checkpoint; "
                    f"build the model from its config.json"
                )
            dtype = self.checkpoint.dtype(name)
            if isinstance(old, QuantizedTensor):
                raise TypeError(
                    f"{name!r} must be quantized in the checkpoint as it is in the model, got "
                    f"{dtype}; import before quantize_model"
                )
            if dtype != old.dtype and not {dtype, old.dtype} <= {*PLAIN}:
                raise TypeError(
                    f"{name!r} must be {old.dtype}, got {dtype} without a scale; the checkpoint "
                    "is damaged"
                )

    def _quantizer(self, chosen: Quantizer | None) -> Quantizer:
        kind = self.encoding.quantizer_class
        if chosen is None:
            scale = self.encoding.scale
            scales = (self.checkpoint.read(f"{layer}.{scale}") for layer in self.layers)
            return self.encoding.quantizer_for(scales)
        fits = isinstance(chosen, kind)
        problem = self.encoding.refusal(chosen) if fits else "leave it out"
        if problem:
            raise ValueError(
                f"quantizer must be a {kind.__name__} that {self.encoding.format!r} suits, got "
                f"{chosen}; {problem}"
            )
        return chosen

    def _home(self, old: Tensor) -> torch.device:
        """The device of what takes the place of a tensor, or is copied into it."""
        return self.device if old.is_meta else old.device

    def quantized_weight(self, layer: str) -> QuantizedTensor:
        """A new quantized weight."""
        old = self.weight(layer)
        own = local(old)
        is_sharded = is_dtensor(old)
        quantizer = own.quantizer if is_sharded else self.quantizer
        if is_sharded and own._shared.global_spec is not None:
            quantizer = own._shared.global_spec.quantizer
        device = own.device if is_sharded else self._home(old)
        if device.type == "meta":
            return quantizer.make_empty(self.shape(layer), old.dtype, device)
        stored = {key: self.checkpoint.read(f"{layer}.{key}", device) for key in self._keys}
        amax = self.checkpoint.metadata.get(f"{layer}.weight.amax")
        try:
            amax = None if amax is None else torch.tensor(float.fromhex(amax), device=device)
            weight = self.encoding.wrap(stored, self.shape(layer), old.dtype, quantizer, amax)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"layer {layer!r}: {error}") from None
        matrix = weight._alias(flat_shape(weight.shape))
        rows = max(_STRIP // matrix.shape[1] // 128, 1) * 128  # whole blocks
        for strip in matrix.split(rows):  # decoded as a whole, it would take the most memory
            is_plain = not isinstance(strip, QuantizedTensor)  # of formats that rows do not divide
            value = strip if is_plain else strip.dequantize(old.dtype)
            self._check_finite(f"{layer}.weight", value)
        return weight

    def plain_values(self) -> dict[str, Tensor]:
        """The values of everything that is not quantized, in the dtypes of the model."""
        values: dict[str, Tensor] = {}
        first: dict[int, str] = {}
        for name in sorted(self.plain):
            old = self.state[name]
            other = first.setdefault(id(old), name)
            if self._home(old).type == "meta" or (is_dtensor(old) and other == name):
                continue
            value = self._plain_value(name)
            if other == name:
                values[name] = value
            elif not torch.equal(
                values[other] if other in values else self._plain_value(other), value
            ):
                raise ValueError(
                    f"{other!r} and {name!r} must be equal in the checkpoint, since the model ties "
                    "them, got two values; untie them (tie_word_embeddings=False)"
                )
        return values

    def _plain_value(self, name: str) -> Tensor:
        """The value of a tensor that is not quantized, in the dtype of the model."""
        old = self.state[name]
        value = self.checkpoint.read(name, self._home(old)).view(old.shape).to(old.dtype)
        if isinstance(old, nn.Parameter):  # buffers may be masks
            self._check_finite(name, value)
        return value

    def _check_finite(self, name: str, value: Tensor) -> None:
        if not value.isfinite().all():
            bad = value[~value.isfinite()][0].item()
            raise ValueError(
                f"{name!r} must be finite in {value.dtype}, got {bad}; the checkpoint is damaged, "
                "or its training has diverged"
            )


def _distributed(whole: Tensor, target: Tensor) -> Tensor:
    """A tensor that every rank has, as its parts lie in ``target``."""
    if not is_dtensor(target):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = target.device_mesh, target.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


class _Values:
    """New values of tensors of a model; those on the meta device are replaced.

    Args:
        model: The model.
        values: The values by the ids of its parameters and buffers.
    """

    def __init__(self, model: nn.Module, values: dict[int, Tensor]) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        self._params: list[tuple[nn.Module, str, nn.Parameter]] = []
        params: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for members in (module._parameters, module._buffers):
                for name, old in members.items():
                    value = None if old is None else values.get(id(old))
                    if value is None:
                        continue
                    if not old.is_meta:
                        self._copies[id(old)] = old, value
                        continue
                    if isinstance(old, nn.Parameter):
                        params.setdefault(id(old), nn.Parameter(value, old.requires_grad))
                        self._params.append((module, name, params[id(old)]))
                    else:
                        self._buffers.append((members, name, value))

    def put_in(self) -> None:
        """Give them to the model."""
        with torch.no_grad():
            for old, value in self._copies.values():
                old.copy_(value)
        put_in(self._params)
        for members, name, value in self._buffers:
            members[name] = value


def _buffers_on_meta(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with buffers on the meta device that no checkpoint has, by the name of one."""
    return {
        f"{prefix}.{name}".removeprefix("."): module
        for prefix, module in model.named_modules()
        for name, value in module._buffers.items()
        if value is not None and value.is_meta and name in module._non_persistent_buffers_set
    }


def check_buffers(model: nn.Module) -> None:
    """Raise ValueError if a model has buffers that nobody can fill."""
    if (lost := _buffers_on_meta(model)) and not hasattr(unwrapped(model), "_init_weights"):
        raise ValueError(
            f"buffer {min(lost)!r} must be in memory, since checkpoints do not have it, got one on "
            "the meta device; build the model under accelerate.init_empty_weights(), or with "
            "device='meta' for its parameters alone"
        )


def _fill_buffers(model: nn.Module, modules: set[nn.Module], device: torch.device) -> None:
    """Let transformers compute buffers on the meta device, such as rotary frequencies."""
    for module in modules:
        for name, value in module._buffers.items():
            if value is not None and value.is_meta:
                module._buffers[name] = torch.empty_like(value, device=device)
        with torch.no_grad():
            model._init_weights(module)


def encoding_of(checkpoint: Source) -> Encoding:
    """How a checkpoint stores its quantized weights."""
    config = checkpoint.config.get("quantization_config")
    details = checkpoint.hf_quant_config.get("quantization")
    if config is None and isinstance(details, dict):
        config = {**details, "quant_method": "modelopt"}
    if not isinstance(config, dict):
        raise ValueError(
            f"config.json in {str(checkpoint.folder)!r} must have a quantization_config, got none; "
            "load weights in high precision with load_state_dict"
        )
    method = config.get("quant_method")
    layout = LAYOUTS.get(method) if isinstance(method, str) else None
    if layout is None:
        raise ValueError(
            f"quant_method must be one of {', '.join(LAYOUTS)} to be imported, got "
            f"{short(method)}; load the checkpoint decoded, and call quantize_model"
        )
    name = layout.format_of(config)
    for encoding in layout.encodings:
        if encoding.format == name:
            return encoding
    held = ", ".join(encoding.format for encoding in layout.encodings)
    raise ValueError(
        f"format must be one of {held} for quant_method {method!r} to be imported, got "
        f"{short(name)}"
    )
