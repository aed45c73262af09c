"""What exports read of a model: its tensors, checked, whole, and as a layout stores them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from fp4adam.checkpoints.folder import Entry
from fp4adam.checkpoints.layouts import LAYOUTS, Encoding, Layout
from fp4adam.checkpoints.model_state import Span, model_state, plain_name, spans_of, unwrapped
from fp4adam.distributed.dtensor import is_dtensor, local, sharded_dims
from fp4adam.distributed.tensor_parallel import gather_whole
from fp4adam.nn.candidates import check_module
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.rows import is_whole_blocks

Rows = tuple[int, int] | None  # the first and the one behind the last; None for all


class Trained(NamedTuple):
    """A model that a layout can hold.

    Attributes:
        model: The model, without wrappers.
        weights: All tensors by the first of their names, sharded ones as DTensors.
        quantized: Of these the quantized ones, a shard where they are sharded.
        layout: The layout.
        encoding: How it stores the quantized ones.
        spans: What a checkpoint stores, by its names: stacked experts one by one.
    """

    model: nn.Module
    weights: dict[str, Tensor]
    quantized: dict[str, QuantizedTensor]
    layout: Layout
    encoding: Encoding
    spans: dict[str, Span]

    @classmethod
    def of(cls, model: nn.Module, layout: Layout) -> "Trained":
        """Check that ``layout`` can hold a model; raises ValueError if not."""
        model, weights = tensors_of(model)
        shards = {name: local(weight) for name, weight in weights.items()}
        quantized = {n: x for n, x in shards.items() if isinstance(x, QuantizedTensor)}
        encoding = _encoding_for(layout, quantized)
        linear = [
            plain_name(f"{name}.weight")
            for name, layer in model.named_modules(remove_duplicate=False)
            if isinstance(layer, nn.Linear)
        ]
        spans = spans_of(model, weights)
        for span in spans.values():
            if span.name in quantized and layout.keeps_stacks:
                _check_whole_stack(span, quantized[span.name])
            elif span.name in quantized:
                _check_whole_linear(span, quantized[span.name], linear, encoding)
        return cls(model, weights, quantized, layout, encoding, spans)

    def entries(self) -> Iterator[Entry]:
        """What each weight is stored as, on its device; gathers one after the other."""
        stored = stored_spans(self.spans)
        for name, weight in self.weights.items():
            whole = gathered(weight)
            if isinstance(whole, QuantizedTensor):
                yield from self._quantized_entries(name, whole, stored[name])
            else:
                yield from plain_entries(whole, stored[name])

    def _quantized_entries(
        self, name: str, weight: QuantizedTensor, stored: Iterable[tuple[str, Rows]]
    ) -> Iterator[Entry]:
        try:
            cols = weight.shape[-1]
            matrix = weight._alias((weight.numel() // cols, cols))
            encoded = self.encoding.encode(matrix)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        metadata = {}
        for stored_name, rows in stored:
            if weight._amax is not None:
                # The layout's rounded scale does not determine the last bit of the amax.
                metadata = {f"{stored_name}.amax": weight._amax.item().hex()}
            if self.layout.keeps_stacks:
                tensors = self.encoding.of_stack(encoded, weight.shape, stored_name)
            else:
                parts = encoded if rows is None else self.encoding.cut(encoded, rows)
                layer = stored_name.removesuffix("weight")
                tensors = {layer + key: tensor for key, tensor in parts.items()}
            yield Entry(tensors, metadata)


def stored_spans(spans: dict[str, Span]) -> dict[str, list[tuple[str, Rows]]]:
    """Per tensor of a model: the names it is stored under, with the rows of each."""
    stored = defaultdict(list)
    for name, span in spans.items():
        stored[span.name].append((name, span.rows))
    return stored


def plain_entries(whole: Tensor, stored: Iterable[tuple[str, Rows]]) -> Iterator[Entry]:
    """What a plain tensor is stored as."""
    for name, rows in stored:
        yield Entry({name: whole if rows is None else whole.flatten(0, 1)[slice(*rows)]}, {})


def tensors_of(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model without wrappers, and all of its tensors by the first of their names.

    Raises:
        TypeError: If it is not a model.
        ValueError: If it cannot be exported in any layout.
    """
    check_module(model)
    model = unwrapped(model)
    check_no_adapters(
        model,
        "exported",
        "merge them first: model = model.merge_and_unload(), or save them alone with "
        "save_pretrained",
    )
    state, _ = model_state(model)
    for name, value in state.items():
        if value.is_meta:
            raise ValueError(
                f"{name!r} must have a value to be exported, got one on the meta device; load the "
                "weights first"
            )
    return model, _first_named(state)


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
    held = ", ".join(e.quantizer_class.tensor_class.__name__ for e in layout.encodings)
    if not quantized:
        raise ValueError(
            f"model must have weights in {held} for layout {layout.name!r}, got none that are "
            "quantized; call quantize_model, or export_masters"
        )
    first = next(iter(quantized))
    for name, weight in quantized.items():
        quantizer = weight.quantizer
        encoding = layout.encoding_of(quantizer)
        if encoding is None:
            others = [repr(x.name) for x in LAYOUTS.values() if x.encoding_of(quantizer)]
            cure = f"use layout={' or '.join(others)}"
            if not others:
                cure = "no layout has this format; call export_masters"
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
        if problem := encoding.refusal(quantizer):
            raise ValueError(
                f"{name!r} must suit layout {layout.name!r}, got {quantizer}; {problem}"
            )
    return encoding


def _check_whole_linear(
    span: Span, weight: QuantizedTensor, linear: list[str], encoding: Encoding
) -> None:
    """Raise ValueError unless ``span`` of a quantized weight is one that layouts can hold."""
    name, rows_of_it = span
    if rows_of_it is None and name not in linear:
        raise ValueError(
            f"quantized weights must be those of nn.Linear layers, or stacks of experts that "
            f"checkpoints hold one by one, got {name!r}; leave it in high precision (filter=...), "
            "or write the values of training in high precision: dequantize_model(model), then "
            "model.save_pretrained(folder); export_masters writes masters"
        )
    if rows_of_it is not None and any(row % encoding.block[0] for row in rows_of_it):
        raise ValueError(
            f"the weight of each expert must have a multiple of {encoding.block[0]} rows to be "
            f"exported, got rows {rows_of_it[0]} to {rows_of_it[1]} of {name!r}, which share "
            "scales with others; leave it in high precision (filter=...)"
        )
    if weight.global_spec is None and not is_whole_blocks(weight):
        raise ValueError(f"{name!r} must be a whole tensor, got rows of another one; clone it")


def _check_whole_stack(span: Span, weight: QuantizedTensor) -> None:
    """Raise ValueError unless ``span`` is a stack that layouts of whole stacks can hold."""
    if span.rows is not None or weight.dim() != 3 or not is_whole_blocks(weight):
        raise ValueError(
            "quantized weights must be whole stacks of experts for layout 'mxfp4', as gpt-oss has "
            f"them, got {span.name!r}; leave it in high precision (filter=...), or use layout "
            "'compressed-tensors'"
        )


def gathered(weight: Tensor) -> Tensor:
    """All of a weight, quantized as it is; of a DTensor every rank has to ask."""
    if not is_dtensor(weight):
        return weight.detach()
    shard, sharded = weight._local_tensor.detach(), sharded_dims(weight)
    if not sharded:
        return shard
    if not isinstance(shard, QuantizedTensor):
        return weight.detach().full_tensor()
    return gather_whole(weight)


def check_no_adapters(model: nn.Module, purpose: str, advice: str) -> None:
    """Raise ValueError for a model with the adapters of PEFT, whose names no reader knows."""
    for name, module in model.named_modules():
        # The models of PEFT have the one, the layers that it puts into others the other.
        if hasattr(module, "merge_and_unload") or hasattr(module, "get_base_layer"):
            place = f"{name!r}, " if name else ""
            raise ValueError(
                f"model must be without adapters to be {purpose}, got {place}a "
                f"{type(module).__name__}; {advice}"
            )
