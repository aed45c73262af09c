"""A model's weights: their formats, their bytes, and those of the optimizer's state."""

import dataclasses
import html
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

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
        state_nbytes: Bytes of the optimizer's state on this rank, in host memory as well.
        host_nbytes: Those of them in host memory, for a parameter on another device.
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    format: str
    is_quantized: bool
    nbytes: int
    init_nbytes: int
    reason: str = ""
    state_nbytes: int = 0
    host_nbytes: int = 0

    @property
    def numel(self) -> int:
        """Number of elements on all ranks."""
        return math.prod(self.shape)

    @property
    def is_bias(self) -> bool:
        """Whether the last part of its name is "bias"."""
        return self.name.rpartition(".")[2] == "bias"


@dataclasses.dataclass(frozen=True, repr=False)
class ModelSummary:
    """The parameters of a model; ``str()`` is a table of them with totals, as are notebook cells.

    Attributes:
        parameters: Each parameter once, in the order of ``model.named_parameters()``.
        has_state: Whether an optimizer was given.
    """

    parameters: tuple[ParameterSummary, ...]
    has_state: bool = False

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

    @property
    def state_nbytes(self) -> int:
        """Bytes of the optimizer's state on this rank; 0 without an optimizer."""
        return sum(p.state_nbytes for p in self.parameters)

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

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The head of the table, and its rows; from the fifth column on, numbers."""
        head: tuple[str, ...] = ("name", "layer", "shape", "format", "bytes")
        rows: list[tuple[str, ...]] = [
            (p.name, p.layer, "x".join(map(str, p.shape)) or "()", p.format, f"{p.nbytes:,}")
            for p in self.parameters
        ]
        if self.has_state:
            head = (*head, "state bytes")
            states = (f"{p.state_nbytes:,}" for p in self.parameters)
            rows = [(*row, state) for row, state in zip(rows, states, strict=True)]
        return head, rows

    def _totals(self) -> Iterator[str]:
        numel = max(self.numel, 1)
        yield self.describe()
        yield (
            f"{self.numel:,} parameters in {self.nbytes:,} bytes, {8 * self.nbytes / numel:.2f} "
            "bits per parameter"
        )
        if self.init_nbytes:
            yield (
                f"{self.init_nbytes:,} bytes more of values before quantization, which FP4Adam "
                "frees at its first step"
            )
        if self.state_nbytes:
            host = sum(p.host_nbytes for p in self.parameters)
            on_host = host and f", {host:,} of them in host memory"
            yield (
                f"{self.state_nbytes:,} bytes of the optimizer's state{on_host or ''}, "
                f"{self.state_nbytes / numel:.2f} bytes per parameter"
            )
        elif self.has_state:
            yield "no optimizer state yet: the first step creates it"

    def __str__(self) -> str:
        head, rows = self._table()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = []
        for row in (head, *rows):
            cells = zip(row, widths, "<<<<>>"[: len(row)], strict=True)
            lines.append("  ".join(f"{cell:{side}{width}}" for cell, width, side in cells))
        return "\n".join((*lines, "", *self._totals()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        head, rows = self._table()
        cells = [f"<th>{html.escape(cell)}</th>" for cell in head]
        lines = ["<table>", f"<thead><tr>{''.join(cells)}</tr></thead>", "<tbody>"]
        for row in rows:
            cells = [f"<td>{html.escape(cell)}</td>" for cell in row]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        lines += ["</tbody></table>", *(f"<p>{html.escape(line)}</p>" for line in self._totals())]
        return "\n".join(lines)


def summary(model: nn.Module, optimizer: Optimizer | None = None) -> ModelSummary:
    """Which parameters of a model are quantized, to which format, and in how many bytes.

    ::

        print(fp4adam.summary(model, optimizer))

    It reads shapes and types alone: models on the meta device and sharded ones have one as well.

    Args:
        model: Any module.
        optimizer: Any torch optimizer, whose state is counted; None leaves it out. A state begins
            with the first step.

    Returns:
        The parameters, whose ``str()`` is a table of name, layer, shape, format and bytes, and
        totals.

    Raises:
        TypeError: If ``model`` is not an ``nn.Module``, or ``optimizer`` not a torch optimizer.
    """
    check_module(model)
    check_optimizer(optimizer)
    owners: dict[nn.Parameter, nn.Module] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, module)
    parameters = [_of_parameter(name, owners[p], p) for name, p in model.named_parameters()]
    if optimizer is not None:
        states, params = optimizer.state, dict(model.named_parameters())
        parameters = [_with_state(p, params[p.name], states) for p in parameters]
    return ModelSummary(tuple(parameters), optimizer is not None)


def check_optimizer(optimizer: Optimizer | None) -> None:
    """Raise TypeError unless it is a torch optimizer or None."""
    if not (optimizer is None or isinstance(optimizer, Optimizer)):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer or None, got "
            f"{type(optimizer).__name__}; pass the one that steps the model"
        )


def _with_state(
    found: ParameterSummary, param: nn.Parameter, states: Mapping[Tensor, Any]
) -> ParameterSummary:
    """The same with the bytes of the parameter's optimizer state."""
    total = host = 0
    state = states.get(param, {})
    # FusedAdam does not show the scales of narrow states.
    for leaf in pytree.tree_leaves(getattr(state, "stored", state)):
        own = local(leaf)
        if isinstance(own, Tensor) and own.dim():  # no step counts, which are on the host
            total += own.nbytes
            host += own.nbytes if own.is_cpu and not local(param).is_cpu else 0
    return dataclasses.replace(found, state_nbytes=total, host_nbytes=host)


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
