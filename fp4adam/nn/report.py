"""What is said of a model: formats and bytes of its weights, how well codes represent masters."""

import dataclasses
import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fp4adam.distributed.dtensor import local, sharding_groups
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from fp4adam.nn.candidates import check_module, is_stack
from fp4adam.nn.recipe import format_name
from fp4adam.tensors import rows
from fp4adam.tensors.layout import CodeType
from fp4adam.tensors.quantized_tensor import QuantizedTensor

# Parameters of a layer class that are named one by one; of more, their number is given.
NAMED = 2


@dataclasses.dataclass(frozen=True)
class ParameterSummary:
    """One parameter of a model; bytes are those on this rank."""

    name: str  # the first of those of a tied one
    layer: str  # the class of its module
    shape: tuple[int, ...]  # on all ranks
    format: str  # "NVFP4", the class of another package's tensor, or a dtype such as "bfloat16"
    is_quantized: bool
    nbytes: int  # of codes and scales, or of values
    init_nbytes: int  # of the value before quantization
    reason: str  # why quantize_model does not take a matrix or a stack of them, or ""
    state_nbytes: int  # of the optimizer, in host memory as well

    @property
    def numel(self) -> int:
        """Number of elements, on all ranks."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class ModelSummary:
    """The parameters of a model; ``str()`` is a table of them with totals."""

    parameters: tuple[ParameterSummary, ...]
    has_state: bool = False  # whether an optimizer was given

    @property
    def quantized(self) -> tuple[ParameterSummary, ...]:
        """The quantized parameters."""
        return tuple(p for p in self.parameters if p.is_quantized)

    def total(self, name: str) -> int:
        """The sum of a number over all parameters, such as "nbytes"."""
        return sum(getattr(p, name) for p in self.parameters)

    def describe(self) -> str:
        """One line: how many weights are quantized, and what is left in high precision."""
        share = sum(p.numel for p in self.quantized) / max(self.total("numel"), 1)
        left: dict[str, list[ParameterSummary]] = defaultdict(list)
        for p in self.parameters:
            if not p.is_quantized:
                left["biases" if p.name.rpartition(".")[2] == "bias" else p.layer].append(p)
        n_weights = len(self.parameters) - len(biases := left.get("biases", []))
        words = []
        for kind, some in sorted(left.items(), key=lambda item: -sum(p.numel for p in item[1])):
            reasons = [p.reason and f": {p.reason}" for p in some]
            if some is biases:
                words.append(f"{len(some)} biases")
            elif len(some) <= NAMED:
                pairs = zip(some, reasons, strict=True)
                words += [f"{p.name} ({kind}{reason})" for p, reason in pairs]
            else:
                words.append(f"{len(some)} of {kind} ({some[0].name}, ...{reasons[0]})")
        return (
            f"{len(self.quantized)} of {n_weights} weights are quantized, {100 * share:.1f} % of "
            f"the parameters; left in high precision: {', '.join(words) or 'nothing'}"
        )

    def __str__(self) -> str:
        table = [("name", "layer", "shape", "format", "bytes", "state bytes")]
        for p in self.parameters:
            shape = "x".join(map(str, p.shape)) or "()"
            numbers = f"{p.nbytes:,}", f"{p.state_nbytes:,}"
            table.append((p.name, p.layer, shape, p.format, *numbers))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        sides = "<<<<>>" if self.has_state else "<<<<>"
        lines = []
        for row in table:
            cells = zip(row, widths, sides, strict=False)
            lines.append("  ".join(f"{cell:{side}{width}}" for cell, width, side in cells))
        names = "numel", "nbytes", "init_nbytes", "state_nbytes"
        numel, nbytes, init, state = map(self.total, names)
        bits, per_parameter = 8 * nbytes / max(numel, 1), state / max(numel, 1)
        lines += ["", self.describe()]
        lines.append(f"{numel:,} parameters in {nbytes:,} bytes, {bits:.2f} bits per parameter")
        if init:
            lines.append(f"{init:,} bytes more of values before quantization, until the first step")
        if state:
            lines.append(
                f"{state:,} bytes of the optimizer's state from its first step on, "
                f"{per_parameter:.2f} bytes per parameter"
            )
        elif self.has_state:
            lines.append("no optimizer state yet: the first step creates it")
        return "\n".join(lines)

    __repr__ = __str__


def summary(model: nn.Module, optimizer: Optimizer | None = None) -> ModelSummary:
    """Which parameters of a model are quantized, to which format, and in how many bytes.

    Print it, or read ``parameters``, ``quantized``, ``describe()`` and ``total(name)`` of a number.
    It takes shapes and types alone: models on the meta device and sharded ones have one as well.

    Args:
        model: Any module.
        optimizer: Any torch optimizer, whose state is counted, that of ``FP4Adam`` before its first
            step as well; None leaves it out.
    """
    check_module(model)
    optimizer = _unwrapped(optimizer)
    known = getattr(optimizer, "state_nbytes", dict)()
    states = {} if optimizer is None or known else optimizer.state
    parameters = []
    for name, p in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        leaves = map(local, pytree.tree_leaves(states.get(p, {})))
        # Step counts are on the host.
        found = sum(x.nbytes for x in leaves if isinstance(x, Tensor) and x.dim())
        parameters.append(_of_parameter(name, module, p, known.get(p, found)))
    return ModelSummary(tuple(parameters), optimizer is not None)


def _unwrapped(optimizer: Optimizer | None) -> Any:
    """The optimizer inside of Accelerate's wrapper."""
    if not (optimizer is None or isinstance(optimizer, Optimizer)):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer or None, got "
            f"{type(optimizer).__name__}; pass the one that steps the model"
        )
    return getattr(optimizer, "optimizer", optimizer)


def _of_parameter(
    name: str, module: nn.Module, param: nn.Parameter, state_nbytes: int
) -> ParameterSummary:
    own, layer, reason = local(param), type(module).__name__, ""
    is_lazy = isinstance(own, nn.UninitializedParameter)
    is_quantized = isinstance(own, QuantizedTensor) or is_foreign(own)
    shape = () if is_lazy else tuple(param.shape)
    kind, nbytes, init = str(param.dtype).removeprefix("torch."), 0, None
    if isinstance(own, QuantizedTensor):
        kind, nbytes = format_name(own.quantizer), own.nbytes_stored
        init = own._high_precision_init_val
    elif is_quantized:
        kind = type(own).__name__
        nbytes = sum(inner.nbytes for inner in vars(own).values() if isinstance(inner, Tensor))
    elif not is_lazy:
        nbytes = own.nbytes
        is_other = isinstance(module, nn.modules.conv._ConvNd)
        if len(shape) == 3 and not (is_other or is_stack(module, name.rpartition(".")[2])):
            reason = "its module has no num_experts that is its first size"
        elif len(shape) == 2 and layer == "Conv1D":
            reason = "its weight is [in, out]"
    numbers = nbytes, 0 if init is None else init.nbytes, reason, state_nbytes
    return ParameterSummary(name, layer, shape, kind, is_quantized, *numbers)


# Bytes of codes per weight that are kept on the host until the next measurement.
_SAMPLE = 2**20
# Each is a sum over the elements of a weight in units of another sum; that of errors a root of it.
_SHARES = ("zero_share", "underflow_share", "nonfinite_share", "saturated_share", "changed_share")
_NUMBERS = (*_SHARES, "exp_avg_zero_share", "exp_avg_sq_zero_share", "relative_error", "amax")


class QuantizationMonitor:
    """Measures how well quantized weights represent their masters; it costs only when called.

    Between calls it keeps at most 1 MiB of codes per weight, in host memory. A call decodes one
    weight at a time to FP32, and waits for the device. With weights of FSDP2 or other DTensors call
    it on every rank; all of them get the numbers of the whole weights.

    Args:
        model: A model with quantized weights, before or after the optimizer's first step.
        optimizer: Its optimizer. None leaves out what compares with masters and moments, unless a
            weight still has its high-precision initial value.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        check_module(model)
        self.model, self.optimizer = model, _unwrapped(optimizer)
        self._samples: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """The numbers of all quantized weights, by ``"<number>/<name of the weight>"``.

        ``"<number>/all"`` is that of all weights together. The numbers are "relative_error" against
        the master, "amax", and shares between 0 and 1: "underflow_share", "zero_share",
        "saturated_share", "changed_share" since the last call (of up to 2**20 bytes),
        "nonfinite_share", "exp_avg_zero_share" and "exp_avg_sq_zero_share". The page "Monitoring"
        says what each means.

        Numbers without a basis are left out: ``changed_share`` at the first call, say, and the
        error of a master that is 0. Without a state, errors are those against the high-precision
        initial value. Of NVFP4 and MXFP8 weights whose directions have scales of their own, the
        rowwise direction is measured.
        """
        sums: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            weight = local(param)
            if is_foreign(weight) and not weight.is_meta:
                weight = BorrowedTensor(weight).tensor
            if isinstance(weight, QuantizedTensor) and not weight.is_meta:
                sums[name] = _gather(param, weight.device, self._measure(name, weight, param))
        if sums:
            every = torch.stack([*sums.values()])
            sums["all"] = torch.cat((every.sum(0)[:-1], every[:, -1:].amax(0)))
        found = {}
        for name, pairs in sums.items():
            for key, (number, unit) in zip(_NUMBERS, pairs.tolist(), strict=True):
                if unit:
                    is_root = key == "relative_error"
                    found[f"{key}/{name}"] = (number / unit) ** (0.5 if is_root else 1)
        return found

    def _measure(self, name: str, weight: QuantizedTensor, param: Tensor) -> dict[str, tuple]:
        """By number the sums of this rank's part of a weight and their units."""
        if not weight.numel():
            return {}
        state = {} if self.optimizer is None else self.optimizer.state.get(param, {})
        part = rows.own_blocks(weight)
        decoded = rows.read(part, torch.float32)
        found, numel = {"amax": (decoded.abs().amax(), 1)}, decoded.numel()
        found["zero_share"] = (decoded == 0).sum(), numel
        master = weight._high_precision_init_val
        if "master_param" in state and hasattr(self.optimizer, "get_unscaled_state"):
            # FP4Adam decodes masters that are stored in fewer bits.
            master = self.optimizer.get_unscaled_state(param, "master_param")
        elif "master_param" in state:
            master = local(state["master_param"])
        if master is not None:
            exact = master.reshape(decoded.shape).to(decoded.device, torch.float32)
            found["underflow_share"] = ((decoded == 0) & (exact != 0)).sum(), numel
            found["nonfinite_share"] = (~exact.isfinite()).sum(), numel
            squares = (x.square().sum(dtype=torch.float64) for x in (decoded.sub_(exact), exact))
            found["relative_error"] = tuple(squares)
        layout = weight.quantizer.layout
        usage = "rowwise" if weight.quantizer.rowwise else "columnwise"
        codes = getattr(part, f"{usage}_data")
        if not getattr(layout, usage).codes.transposed:
            # Shards store whole blocks.
            codes = codes[part._first_row :][: rows.matrix_shape(weight)[0]]
        found |= self._inspect_codes(name, codes, layout.code_type)
        if "exp_avg" in state and "exp_avg_sq" in state:
            first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
            # E4M3 codes have a sign; those of second moments have none.
            signed = first if first.is_floating_point() else first & 0x7F
            found["exp_avg_zero_share"] = (signed == 0).sum(), first.numel()
            found["exp_avg_sq_zero_share"] = (second == 0).sum(), second.numel()
        return found

    def _inspect_codes(self, name: str, codes: Tensor, kind: CodeType) -> dict[str, tuple]:
        flat = codes.reshape(-1)
        # An odd stride meets all columns of a matrix.
        stride = 1 if flat.numel() <= _SAMPLE else -(-flat.numel() // _SAMPLE) | 1
        sample = flat[::stride].cpu()
        last, self._samples[name] = self._samples.get(name), sample.clone()
        magnitudes = _codes(flat, kind.bits) & (2 ** (kind.bits - 1) - 1)
        found = {"saturated_share": ((magnitudes == kind.largest).sum(), magnitudes.numel())}
        if last is not None and last.shape == sample.shape:
            differing = _codes(last ^ sample, kind.bits)
            found["changed_share"] = (differing != 0).sum(), differing.numel()
        return found


def _codes(data: Tensor, bits: int) -> Tensor:
    """Codes one by one."""
    return torch.stack((data & 15, data >> 4)) if bits == 4 else data


def _gather(param: Tensor, device: torch.device, found: dict[str, tuple]) -> Tensor:
    """Pairs of sums and units of a whole weight, in the order of ``_NUMBERS``, on the host."""
    flat = [x for key in _NUMBERS for x in found.get(key, (0, 0))]
    pairs = torch.stack([torch.as_tensor(x, device=device).double() for x in flat]).view(-1, 2)
    for group, kind in sharding_groups(param):
        pairs = pairs.to(kind)
        dist.all_reduce(pairs[:-1], group=group)
        dist.all_reduce(pairs[-1], dist.ReduceOp.MAX, group=group)
    return pairs.cpu()
