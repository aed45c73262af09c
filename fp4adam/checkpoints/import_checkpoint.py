"""Import of quantized checkpoints, to continue training from."""

from collections import defaultdict
from itertools import filterfalse
from pathlib import Path

import torch
from torch import Tensor, nn

from fp4adam.checkpoints.layouts import LAYOUTS, Encoding
from fp4adam.checkpoints.model_state import (
    UNUSED_SCALES,
    model_state,
    spans_of,
    unwrapped,
)
from fp4adam.checkpoints.reader import CheckpointReader, NamedTensors
from fp4adam.distributed.dtensor import is_dtensor, like, local, part_for
from fp4adam.nn.candidates import candidates, check_module
from fp4adam.nn.replacement import (
    check_attributes,
    check_no_replica,
    check_weight,
    put_in,
)
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES, Quantizer, check_dtype


def import_checkpoint(
    model: nn.Module,
    folder: str | Path,
    quantizer: Quantizer | None = None,
    *,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Take over a quantized checkpoint: its codes and scales become parameters to train.

    Reads the layouts that :func:`fp4adam.export_checkpoint` writes, also from other programs.
    Linear layers and stacks of experts that are quantized in the checkpoint get quantized weights
    with the same bytes and the nominal dtype of the old weight; all other parameters get the
    values. NVFP4 experts of one stack have to share their tensor scale. Masters start from the
    decoded values. Scales of activations and of the KV cache are left out, and so are entries that
    hooks add to the model's state dict.

    The folder is not trusted: files are opened in it alone, apart from the cache of the Hugging
    Face hub, whose links lead to its ``blobs``. Names, shapes and dtypes are compared with the
    model before a tensor is read. Code that ``config.json`` names is not run.

    A model on the meta device gets its weights tensor by tensor: its memory is that of the
    quantized model and one tensor more. For ``fully_shard``, import with ``device="meta"`` first,
    which makes quantized weights without values; shard, call ``model.to_empty(device=...)``, and
    import again. Each rank then keeps its shards of one tensor after the other.

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
            names, shapes or scales do not fit the model, the layout or the quantizer.
        TypeError: If a dtype does not fit.

    Nothing has changed when it raises, but for sharded tensors, which are written one by one.
    """
    check_module(model)
    device = torch.get_default_device() if device is None else torch.device(device)
    with CheckpointReader(Path(folder)) as files:
        _Import(model, files, quantizer, device).run()
    return model


class _Import:
    """A checkpoint for one model, checked; arguments as for ``import_checkpoint``."""

    def __init__(
        self,
        model: nn.Module,
        files: CheckpointReader,
        quantizer: Quantizer | None,
        device: torch.device,
    ) -> None:
        self.model, self.device = unwrapped(model), device
        check_no_replica(self.model.modules())
        tensors, extra = model_state(self.model)
        self.state = {name: value for name, value in tensors.items() if name not in extra}
        for name, value in self.state.items():
            if is_dtensor(value) and value.is_meta:
                raise ValueError(
                    f"{name!r} of the model must be a tensor in memory, or a whole one on the meta "
                    "device, got a DTensor on the meta device; call to_empty"
                )
        self._unfilled = _modules_to_fill(self.model, any(map(is_dtensor, self.state.values())))
        # By the id of each tensor: its module and key, and its names, several if it is tied.
        self.places = {
            id(value): (module, key)
            for module in self.model.modules()
            for members in (module._parameters, module._buffers)
            for key, value in members.items()
        }
        names: dict[int, list[str]] = defaultdict(list)
        for name, value in self.state.items():
            names[id(value)].append(name)
        self.encoding = encoding_of(files)
        spans = spans_of(self.model, self.state)
        self.files = NamedTensors(files, self.encoding, spans)
        self.quantized = {*self.files.quantized}
        known = {*self.files.quantized, *self.files.plain}
        unknown = {n for n in self.files.unknown if n.rpartition(".")[2] not in UNUSED_SCALES}
        if unknown := sorted(unknown - extra):
            raise ValueError(
                f"the model must have all that the checkpoint has, lacks {len(unknown)}, such as "
                f"{unknown[0]!r}; build it from the checkpoint's config.json"
            )
        if missing := [first for first, *more in names.values() if not known & {first, *more}]:
            raise ValueError(
                f"the checkpoint must have all that the model has, lacks {len(missing)}, such as "
                f"{missing[0]!r}; build the model from its config.json"
            )
        for name in self.files.quantized:
            self._check_quantized(name, names[id(self.state[name])])
        for name in self.files.plain:
            tied = [other for other in names[id(self.state[name])] if other in known]
            self._check_plain(name, tied[0], is_stack=spans[name][0][1] is not None)
        self.quantizer = self._quantizer(quantizer)

    def run(self) -> None:
        """Give the tensors of the checkpoint to the model."""
        new, copies, transposed = [], [], set()
        # Of a tied tensor once.
        targets = {self.state[n]: n for n in (*self.files.quantized, *self.files.plain)}
        for old in filterfalse(is_dtensor, targets):
            name, place = targets[old], self.places[id(old)]
            value = self._value(name)
            if isinstance(old, nn.Parameter):
                value = nn.Parameter(value, old.requires_grad)
            if isinstance(value, QuantizedTensor):
                check_attributes(name.removesuffix(".weight"), old, value)
                value.parameter_name = name
                if value.shape != old.shape:
                    transposed.add(place[0])
            if isinstance(value, QuantizedTensor) or old.is_meta:
                new.append((*place, value))
            else:
                copies.append((old, value))
        if self.device.type != "meta":
            # First, as this initializes parameters of these modules, too.
            _fill_buffers(self.model, self._unfilled, self.device)
        put_in(new)
        for module in transposed:
            module.is_transposed = False
        if transposed and hasattr(self.model, "set_experts_implementation"):
            # The model's own code takes [experts, in, out] alone.
            self.model.set_experts_implementation("grouped_mm")
        with torch.no_grad():
            for old, value in copies:
                old.copy_(value)
            for old in filter(is_dtensor, targets):  # what is sharded, one tensor after the other
                old.copy_(like(old, part_for(old, self._value(targets[old]))))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a quantized weight; blocks of stacks lie along the inputs."""
        module, key = self.places[id(self.state[name])]
        shape = tuple(self.state[name].shape)
        is_transposed = key != "weight" and getattr(module, "is_transposed", False)
        return (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape

    def _check_quantized(self, name: str, names: list[str]) -> None:
        """Raise unless the model can have a quantized weight for its one called ``names``."""
        weight, layer = self.state[name], name.removesuffix(".weight")
        module, key = self.places[id(weight)]
        if key not in candidates(module):
            raise ValueError(
                f"{layer!r} of the model must be an nn.Linear to have a quantized weight, got "
                f"another module; build it from the checkpoint's config.json"
            )
        kind = type(getattr(local(weight), "quantizer", None))
        if not is_dtensor(weight):
            check_weight(layer, weight)
        elif not issubclass(kind, self.encoding.quantizer_class):
            raise ValueError(
                f"weight of layer {layer!r} must be quantized to {self.encoding.format} to be "
                "written shard by shard, got another DTensor; import with device='meta' before "
                "fully_shard"
            )
        if len(names) > 1:
            raise ValueError(
                f"{names[0]!r} and {names[1]!r} must be two weights, got a tied one, which is "
                "quantized in the checkpoint; untie them"
            )
        check_dtype(f"weight of layer {layer!r}", weight.dtype)
        self.encoding.check(layer, self.files.shape_and_dtype, self.shape(name))

    def _check_plain(self, name: str, first: str, is_stack: bool) -> None:
        """Raise unless a tensor that is not quantized is as the model's, called ``first`` there."""
        old, (shape, dtype) = self.state[name], self.files.shape_and_dtype(name)
        expected = flat_shape(old.shape) if is_stack else tuple(old.shape)
        if shape != expected:
            raise ValueError(
                f"{name!r} must have shape {expected}, got {shape} in the checkpoint; "
                f"build the model from its config.json"
            )
        if isinstance(old, QuantizedTensor):
            raise TypeError(
                f"{name!r} must be quantized in the checkpoint as it is in the model, got "
                f"{dtype}; import before quantize_model"
            )
        if dtype != old.dtype and not {dtype, old.dtype} <= {torch.float64, *HIGH_PRECISION_DTYPES}:
            raise TypeError(
                f"{name!r} must be {old.dtype}, got {dtype} without a scale; the checkpoint is "
                "damaged"
            )
        if name != first and not torch.equal(self._value(name), self._value(first)):
            raise ValueError(
                f"{first!r} and {name!r} must be equal in the checkpoint, since the model ties "
                "them, got two values; untie them (tie_word_embeddings=False)"
            )

    def _quantizer(self, chosen: Quantizer | None) -> Quantizer:
        kind = self.encoding.quantizer_class
        if chosen is None:
            scale = self.encoding.scale
            layers = (name.removesuffix(".weight") for name in self.files.quantized)
            scales = (self.files.read(f"{layer}.{scale}") for layer in layers)
            return self.encoding.quantizer_for(scales)
        fits = isinstance(chosen, kind)
        problem = (
            self.encoding.refusal(chosen) if fits else "leave it out, or pass Recipe(...).quantizer"
        )
        if problem:
            raise ValueError(
                f"quantizer must be a {kind.__name__} that {self.encoding.format!r} suits, got "
                f"{chosen}; {problem}"
            )
        return chosen

    def _value(self, name: str) -> Tensor:
        """What takes the place of a tensor, or is copied into it, on the device of that."""
        old, layer = self.state[name], name.removesuffix(".weight")
        own = local(old)
        device = self.device if own.is_meta else own.device
        if name not in self.quantized:
            return self.files.read(name, device).view(old.shape).to(old.dtype)
        quantizer = (own.global_spec or own).quantizer if is_dtensor(old) else self.quantizer
        if device.type == "meta":
            return quantizer.make_empty(self.shape(name), old.dtype, device)
        stored = {key: self.files.read(f"{layer}.{key}", device) for key in self.encoding.shapes()}
        amax = self.files.amax(layer, device)
        try:
            return self.encoding.wrap(stored, self.shape(name), old.dtype, quantizer, amax)
        except ValueError as error:
            raise ValueError(f"layer {layer!r}: {error}") from None


def _modules_to_fill(model: nn.Module, is_sharded: bool) -> list[nn.Module]:
    """Modules with buffers that no checkpoint has and that have no values, as rotary frequencies.

    Of sharded models all, since ``to_empty`` has left them without values. ValueError if the model,
    which is not one of transformers, cannot compute them.
    """
    found, is_able = {}, hasattr(model, "_init_weights")
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            value = module._buffers[name]
            if value is not None and value.is_meta and not is_able:
                raise ValueError(
                    f"buffer {f'{prefix}.{name}'.removeprefix('.')!r} must be in memory, since "
                    "checkpoints do not have it, got one on the meta device; build the model under "
                    "accelerate.init_empty_weights(), or with device='meta' for its parameters "
                    "alone"
                )
            if value is not None and is_able and (value.is_meta or is_sharded):
                found[module] = None
    return [*found]


def _fill_buffers(model: nn.Module, modules: list[nn.Module], device: torch.device) -> None:
    """Let transformers compute buffers."""
    for module in modules:
        for name in module._non_persistent_buffers_set:
            if (value := module._buffers[name]) is not None and value.is_meta:
                module._buffers[name] = torch.empty_like(value, device=device)
        model._init_weights(module)


def encoding_of(files: CheckpointReader) -> Encoding:
    """Of the layout that config.json names, the encoding that fits the tensors."""
    config = files.config.get("quantization_config")
    if config is None and isinstance(files.hf_quant_config.get("quantization"), dict):
        config = {"quant_method": "modelopt"}
    method = config.get("quant_method") if isinstance(config, dict) else None
    layout = LAYOUTS.get(method) if isinstance(method, str) else None
    if layout is None:
        raise ValueError(
            f"quant_method must be one of {', '.join(LAYOUTS)}, in the quantization_config of "
            f"config.json in {str(files.folder)!r}, got {method!r:.200}; load the checkpoint "
            "decoded, and call quantize_model"
        )
    for encoding in layout.encodings:
        if encoding.is_in(files.names(), files.dtype):
            return encoding
    held = ", ".join(encoding.format for encoding in layout.encodings)
    raise ValueError(
        f"the checkpoint must have weights in one of {held} for quant_method {method!r} to be "
        "imported, got none; load it decoded, and call quantize_model"
    )
