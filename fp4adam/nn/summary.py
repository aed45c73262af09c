"""Which weights of a model are quantized, to which format, and in how many bytes."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor, nn

from fp4adam.distributed.dtensor import local
from fp4adam.interop.adapter import is_foreign
from fp4adam.nn.candidates import check_module, is_stack
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

# Parameters of a layer class that are named one by one; of more, their number is given.
NAMED = 2
# Classes of layers that multiply as nn.Linear does, and why their weights are left all the same.
REASONS = {"Conv1D": "its weight is [in, out]"}


@dataclasses.dataclass(frozen=True)
class ParameterSummary:
    """One parameter of a model.

    Attributes:
        name: As in ``model.named_parameters()``; tied parameters have the first of their names.
        layer: The class of the module that has it, such as "Linear".
        shape: The global shape.
        format: "NVFP4", "MXFP8", "Float8Block", the class of another package's tensor, or a dtype
            such as "bfloat16".
        is_quantized: Whether its values live as codes with scales.
        nbytes: Bytes of the codes and scales, or of the values, on this rank.
        init_nbytes: Bytes of the value before quantization, which ``FP4Adam`` frees at its first
            step.
        reason: Why ``quantize_model`` does not take a matrix or a stack of them, or "".
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    format: str
    is_quantized: bool
    nbytes: int
    init_nbytes: int
    reason: str = ""

    @property
    def numel(self) -> int:
        """Number of elements on all ranks."""
        return math.prod(self.shape)

    @property
    def is_bias(self) -> bool:
        """Whether the last part of its name is "bias"."""
        return self.name.rpartition(".")[2] == "bias"


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """The parameters of a model; ``str()`` is a table of them with totals.

    Attributes:
        parameters: Each parameter once, in the order of ``model.named_parameters()``.
    """

    parameters: tuple[ParameterSummary, ...]

    @property
    def quantized(self) -> tuple[ParameterSummary, ...]:
        """The quantized parameters."""
        return tuple(p for p in self.parameters if p.is_quantized)

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(p.numel for p in self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters on this rank; values before quantization are not counted."""
        return sum(p.nbytes for p in self.parameters)

    @property
    def init_nbytes(self) -> int:
        """Bytes of the values before quantization."""
        return sum(p.init_nbytes for p in self.parameters)

    def describe(self) -> str:
        """One line: how many weights are quantized, and what is left in high precision."""
        weights = sum(not p.is_bias for p in self.parameters)
        share = sum(p.numel for p in self.quantized) / max(self.numel, 1)
        left = ", ".join(self._left()) or "nothing"
        return (
            f"{len(self.quantized)} of {weights} weights are quantized, {100 * share:.1f} % of "
            f"the parameters; left in high precision: {left}"
        )

    def _left(self) -> Iterator[str]:
        """What is not quantized: few parameters of a layer class by name, more by number."""
        left: dict[str, list[ParameterSummary]] = defaultdict(list)
        for p in self.parameters:
            if not p.is_quantized:
                left["biases" if p.is_bias else p.layer].append(p)
        sizes = {kind: sum(p.numel for p in params) for kind, params in left.items()}
        for kind in sorted(left, key=lambda kind: -sizes[kind]):
            params = left[kind]
            if kind == "biases":
                yield f"{len(params)} biases"
            elif len(params) <= NAMED:
                yield from (f"{p.name} ({kind}{p.reason and ': ' + p.reason})" for p in params)
            else:
                reason = params[0].reason and f": {params[0].reason}"
                yield f"{len(params)} of {kind} ({params[0].name}, ...{reason})"

    def __str__(self) -> str:
        head = ("name", "layer", "shape", "format", "bytes")
        rows = [
            (p.name, p.layer, "x".join(map(str, p.shape)) or "()", p.format, f"{p.nbytes:,}")
            for p in self.parameters
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = []
        for *cells, nbytes in (head, *rows):
            padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)]
            lines.append("  ".join((*padded, f"{nbytes:>{widths[-1]}}")))
        bits = 8 * self.nbytes / max(self.numel, 1)
        lines += ["", self.describe()]
        lines.append(
            f"{self.numel:,} parameters in {self.nbytes:,} bytes, {bits:.2f} bits per parameter"
        )
        if self.init_nbytes:
            lines.append(
                f"{self.init_nbytes:,} bytes more of values before quantization, which FP4Adam "
                "frees at its first step"
            )
        return "\n".join(lines)


def summary(model: nn.Module) -> ModelSummary:
    """Which parameters of a model are quantized, to which format, and in how many bytes.

    ::

        print(fp4adam.summary(model))

    It reads shapes and types alone: models on the meta device and sharded ones have one as well.

    Args:
        model: Any module.

    Returns:
        The parameters, whose ``str()`` is a table of name, layer, shape, format and bytes, and
        totals.

    Raises:
        TypeError: If ``model`` is not an ``nn.Module``.
    """
    check_module(model)
    owners: dict[nn.Parameter, nn.Module] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, module)
    return ModelSummary(
        tuple(_of_parameter(name, owners[p], p) for name, p in model.named_parameters())
    )


def format_name(quantizer: Quantizer) -> str:
    """The name of a format in tables: "NVFP4", "MXFP8", "Float8Block"."""
    return type(quantizer).__name__.removesuffix("Quantizer")


def _of_parameter(name: str, module: nn.Module, param: nn.Parameter) -> ParameterSummary:
    own = local(param)
    kind, nbytes, init = str(param.dtype).removeprefix("torch."), 0, None
    if isinstance(own, QuantizedTensor):
        kind, nbytes = format_name(own.quantizer), own.nbytes_stored
        init = own._high_precision_init_val
    elif is_foreign(own):
        kind = type(own).__name__
        nbytes = sum(inner.nbytes for inner in vars(own).values() if isinstance(inner, Tensor))
    elif not isinstance(own, nn.UninitializedParameter):
        nbytes = own.nbytes
    is_quantized = isinstance(own, QuantizedTensor) or is_foreign(own)
    init_nbytes = 0 if init is None else init.nbytes
    shape = () if isinstance(own, nn.UninitializedParameter) else tuple(param.shape)
    key, layer, reason = name.rpartition(".")[2], type(module).__name__, ""
    is_other = isinstance(module, nn.modules.conv._ConvNd) or is_stack(module, key)
    if len(shape) == 3 and not (is_quantized or is_other):
        reason = "its module has no num_experts that is its first size"
    elif len(shape) == 2 and not is_quantized:
        reason = REASONS.get(layer, "")
    return ParameterSummary(name, layer, shape, kind, is_quantized, nbytes, init_nbytes, reason)
