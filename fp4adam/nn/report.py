"""What is said of a model: formats and bytes of its weights, how well codes represent masters."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
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
# Classes of layers that multiply as nn.Linear does, and why their weights are left all the same.
REASONS = {"Conv1D": "its weight is [in, out]"}


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
    host_nbytes: int  # those in host memory, for a parameter on another device

    @property
    def kind(self) -> str:
        """The class of its layer, or "biases"."""
        return "biases" if self.name.rpartition(".")[2] == "bias" else self.layer


@dataclasses.dataclass(frozen=True, repr=False)
class ModelSummary:
    """The parameters of a model; ``str()`` is a table of them with totals."""

    parameters: tuple[ParameterSummary, ...]
    has_state: bool = False  # whether an optimizer was given

    @property
    def quantized(self) -> tuple[ParameterSummary, ...]:
        """The quantized parameters."""
        return tuple(p for p in self.parameters if p.is_quantized)

    @property
    def numel(self) -> int:
        """Number of elements of all parameters, on all ranks."""
        return sum(math.prod(p.shape) for p in self.parameters)

    def total(self, name: str) -> int:
        """The sum of a number over all parameters, such as "nbytes"."""
        return sum(getattr(p, name) for p in self.parameters)

    def describe(self) -> str:
        """One line: how many weights are quantized, and what is left in high precision."""
        weights = sum(p.kind != "biases" for p in self.parameters)
        share = sum(math.prod(p.shape) for p in self.quantized) / max(self.numel, 1)
        left: dict[str, list[ParameterSummary]] = defaultdict(list)
        for p in self.parameters:
            if not p.is_quantized:
                left[p.kind].append(p)
        words = []
        for kind in sorted(left, key=lambda kind: -sum(math.prod(p.shape) for p in left[kind])):
            first, reason = left[kind][0], left[kind][0].reason and f": {left[kind][0].reason}"
            if kind == "biases":
                words.append(f"{len(left[kind])} biases")
            elif len(left[kind]) <= NAMED:
                words += [f"{p.name} ({kind}{p.reason and ': ' + p.reason})" for p in left[kind]]
            else:
                words.append(f"{len(left[kind])} of {kind} ({first.name}, ...{reason})")
        return (
            f"{len(self.quantized)} of {weights} weights are quantized, {100 * share:.1f} % of "
            f"the parameters; left in high precision: {', '.join(words) or 'nothing'}"
        )

    def _totals(self) -> Iterator[str]:
        numel, nbytes, state = max(self.numel, 1), self.total("nbytes"), self.total("state_nbytes")
        yield self.describe()
        yield (
            f"{self.numel:,} parameters in {nbytes:,} bytes, {8 * nbytes / numel:.2f} bits per "
            "parameter"
        )
        if init := self.total("init_nbytes"):
            yield (
                f"{init:,} bytes more of values before quantization, which FP4Adam frees at its "
                "first step"
            )
        if state:
            host = self.total("host_nbytes")
            on_host = f", {host:,} of them in host memory" if host else ""
            yield (
                f"{state:,} bytes of the optimizer's state{on_host}, {state / numel:.2f} bytes per "
                "parameter"
            )
        elif self.has_state:
            yield "no optimizer state yet: the first step creates it"

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
        return "\n".join((*lines, "", *self._totals()))

    __repr__ = __str__


def summary(model: nn.Module, optimizer: Optimizer | None = None) -> ModelSummary:
    """Which parameters of a model are quantized, to which format, and in how many bytes.

    ::

        print(fp4adam.summary(model, optimizer))

    It reads shapes and types alone: models on the meta device and sharded ones have one as well.
    The result has ``parameters``, ``quantized``, ``describe()`` and ``total(name)`` of a number.

    Args:
        model: Any module.
        optimizer: Any torch optimizer, whose state is counted; None leaves it out.

    Raises:
        TypeError: If ``model`` is not an ``nn.Module``, or ``optimizer`` not a torch optimizer.
    """
    check_module(model)
    _check_optimizer(optimizer)
    owners: dict[nn.Parameter, nn.Module] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, module)
    states = {} if optimizer is None else optimizer.state
    parameters = [
        _of_parameter(name, owners[param], param, states.get(param, {}))
        for name, param in model.named_parameters()
    ]
    return ModelSummary(tuple(parameters), optimizer is not None)


def _check_optimizer(optimizer: Optimizer | None) -> None:
    if not (optimizer is None or isinstance(optimizer, Optimizer)):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer or None, got "
            f"{type(optimizer).__name__}; pass the one that steps the model"
        )


def _of_parameter(
    name: str, module: nn.Module, param: nn.Parameter, state: Any
) -> ParameterSummary:
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
    shape = () if isinstance(own, nn.UninitializedParameter) else tuple(param.shape)
    key, layer, reason = name.rpartition(".")[2], type(module).__name__, ""
    is_other = isinstance(module, nn.modules.conv._ConvNd) or is_stack(module, key)
    if len(shape) == 3 and not (is_quantized or is_other):
        reason = "its module has no num_experts that is its first size"
    elif len(shape) == 2 and not is_quantized:
        reason = REASONS.get(layer, "")
    # FusedAdam does not show the scales of narrow states. Step counts are on the host.
    leaves = map(local, pytree.tree_leaves(getattr(state, "stored", state)))
    parts = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    host = sum(part.nbytes for part in parts if part.is_cpu and not own.is_cpu)
    return ParameterSummary(
        name,
        layer,
        shape,
        kind,
        is_quantized,
        nbytes,
        0 if init is None else init.nbytes,
        reason,
        sum(part.nbytes for part in parts),
        host,
    )


# Elements that are compared at a time, which bounds the memory of intermediate results.
_STRIP = 2**24
# Bytes of codes per weight that are kept on the host until the next measurement.
_SAMPLE = 2**20
# What is summed over the elements of a weight, on all ranks that have a part of it.
_SUMS = (
    *("numel", "zeros", "compared", "squares", "squared_errors", "underflows", "nonfinite"),
    *("codes", "saturated", "sampled", "changed", "moments", "exp_avg_zeros", "exp_avg_sq_zeros"),
)
# By number: a sum, and the sum that it is a share of.
_SHARES = {
    "underflow_share": ("underflows", "compared"),
    "nonfinite_share": ("nonfinite", "compared"),
    "zero_share": ("zeros", "numel"),
    "saturated_share": ("saturated", "codes"),
    "changed_share": ("changed", "sampled"),
    "exp_avg_zero_share": ("exp_avg_zeros", "moments"),
    "exp_avg_sq_zero_share": ("exp_avg_sq_zeros", "moments"),
}


class QuantizationMonitor:
    """Measures how well quantized weights represent their masters; it costs only when called.

    ::

        monitor = fp4adam.QuantizationMonitor(model, optimizer)
        for step, batch in enumerate(batches):
            ...
            if step % 100 == 0:
                wandb.log(monitor.measure(), step=step)

    Between calls it keeps at most 1 MiB of codes per weight, in host memory. A call decodes one
    weight at a time to FP32, and waits for the device. With weights of FSDP2 or other DTensors call
    it on every rank; all of them get the numbers of the whole weights.

    Args:
        model: A model with quantized weights, before or after the optimizer's first step.
        optimizer: Its optimizer. None leaves out what compares with masters and moments, unless a
            weight still has its high-precision initial value.

    Raises:
        TypeError: If ``model`` is not an ``nn.Module``, or ``optimizer`` not a torch optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        check_module(model)
        _check_optimizer(optimizer)
        # Accelerate's wrapper of an optimizer cannot decode narrow states.
        self.model, self.optimizer = model, getattr(optimizer, "optimizer", optimizer)
        self._samples: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """The numbers of all quantized weights, by ``"<number>/<name of the weight>"``.

        ``"<number>/all"`` is that of all weights together. Shares are between 0 and 1.

        ======================  ====================================================================
        number                  of a weight
        ======================  ====================================================================
        relative_error          norm of (decoded weight - master) over the norm of the master
        underflow_share         of elements: decoded to 0 though the master is not
        zero_share              of elements: decoded to 0
        saturated_share         of codes: with the largest magnitude, 6 or 448
        changed_share           of codes: other than at the last call; from up to 2**20 bytes
        amax                    largest magnitude of the decoded weight
        nonfinite_share         of elements: the master is NaN or infinite
        exp_avg_zero_share      of elements: the stored first moment is 0
        exp_avg_sq_zero_share   of elements: the stored second moment is 0 or, in 8 or 16 bits,
                                the smallest number of its block
        ======================  ====================================================================

        Numbers without a basis are left out, such as ``changed_share`` at the first call. Without a
        state, errors are those against the high-precision initial value. Of NVFP4 and MXFP8 weights
        whose directions have scales of their own, the rowwise direction is measured.
        """
        state = {} if self.optimizer is None else self.optimizer.state
        measured: dict[Any, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        for name, param in self.model.named_parameters():
            weight = _quantized(param)
            if weight is not None:
                found = self._measure(name, weight, param, state.get(param, {}))
                measured[sharding_groups(param), weight.device].append((name, found))
        totals = {}
        for (groups, device), weights in measured.items():
            totals |= _gather(groups, device, weights)
        if totals:
            whole = {key: math.fsum(sums[key] for sums in totals.values()) for key in _SUMS}
            totals["all"] = whole | {"amax": max(sums["amax"] for sums in totals.values())}
        numbers = {}
        for name in (*sorted(totals.keys() - {"all"}), *(["all"] if totals else [])):
            numbers |= {f"{key}/{name}": value for key, value in _numbers(totals[name]).items()}
        return numbers

    def _measure(
        self, name: str, weight: QuantizedTensor, param: Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """The sums of this rank's part of a weight, as tensors on its device; and its amax."""
        part, (n_rows, _) = rows.own_blocks(weight), rows.matrix_shape(weight)
        if not weight.numel():
            return {}
        decoded = rows.read(part, torch.float32)
        found = {"numel": decoded.numel(), "zeros": (decoded == 0).sum()}
        found["amax"] = decoded.abs().amax()
        master = weight._high_precision_init_val
        if "master_param" in state and hasattr(self.optimizer, "get_unscaled_state"):
            # FP4Adam decodes masters that are stored in fewer bits.
            master = self.optimizer.get_unscaled_state(param, "master_param")
        elif "master_param" in state:
            master = local(state["master_param"])
        if master is not None:
            found |= _compare(decoded, master.reshape(decoded.shape))
        layout = weight.quantizer.layout
        usage = "rowwise" if weight.quantizer.rowwise else "columnwise"
        codes = getattr(part, f"{usage}_data")
        if not getattr(layout, usage).codes.transposed:
            codes = codes[part._first_row :][:n_rows]  # shards store whole blocks
        found |= self._inspect_codes(name, codes, layout.code_type)
        if "exp_avg" in state and "exp_avg_sq" in state:
            first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
            # E4M3 codes have a sign; those of second moments have none.
            signed = first if first.is_floating_point() else first & 0x7F
            found |= {"moments": first.numel(), "exp_avg_zeros": (signed == 0).sum()}
            found["exp_avg_sq_zeros"] = (second == 0).sum()
        return found

    def _inspect_codes(self, name: str, codes: Tensor, kind: CodeType) -> dict[str, Any]:
        flat = codes.reshape(-1)
        # An odd stride meets all columns of a matrix.
        stride = 1 if flat.numel() <= _SAMPLE else -(-flat.numel() // _SAMPLE) | 1
        sample = flat[::stride].cpu()
        last, self._samples[name] = self._samples.get(name), sample.clone()
        magnitudes = _codes(flat, kind.bits) & (2 ** (kind.bits - 1) - 1)
        found = {"codes": magnitudes.numel(), "saturated": (magnitudes == kind.largest).sum()}
        if last is not None and last.shape == sample.shape:
            differing = _codes(last ^ sample, kind.bits)
            found |= {"sampled": differing.numel(), "changed": (differing != 0).sum()}
        return found


def _codes(data: Tensor, bits: int) -> Tensor:
    """Codes one by one."""
    return torch.stack((data & 15, data >> 4)) if bits == 4 else data


def _quantized(param: Tensor) -> QuantizedTensor | None:
    """This rank's part of a parameter with codes that can be read, else None."""
    own = local(param)
    if own.is_meta:
        return None
    if isinstance(own, QuantizedTensor):
        return own
    return BorrowedTensor(own).tensor if is_foreign(own) else None


def _compare(decoded: Tensor, master: Tensor) -> dict[str, Any]:
    """Sums over a decoded matrix and its master, which may be on another device."""
    found: dict[str, Any] = defaultdict(int, compared=decoded.numel())
    height = max(1, _STRIP // max(decoded.shape[1], 1))
    for mine, theirs in zip(decoded.split(height), master.split(height), strict=True):
        exact = theirs.to(decoded.device, torch.float32)
        found["squares"] += exact.square().sum(dtype=torch.float64)
        found["squared_errors"] += (mine - exact).square_().sum(dtype=torch.float64)
        found["underflows"] += ((mine == 0) & (exact != 0)).sum()
        found["nonfinite"] += (~exact.isfinite()).sum()
    return found


def _gather(
    groups: tuple, device: torch.device, weights: list[tuple[str, dict[str, Any]]]
) -> dict[str, dict[str, float]]:
    """The sums and amaxes of whole weights, as numbers; one read for all of a device."""
    keys = (*_SUMS, "amax")
    table = torch.stack(
        [
            torch.stack([torch.as_tensor(x.get(k, 0), device=device).double() for k in keys])
            for _, x in weights
        ]
    )
    for group, kind in groups:
        table = table.to(kind)
        amaxes = table[:, -1].clone()
        dist.all_reduce(table, group=group)
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        table[:, -1] = amaxes
    found = (dict(zip(keys, row, strict=True)) for row in table.tolist())
    return dict(zip((name for name, _ in weights), found, strict=True))


def _numbers(sums: dict[str, float]) -> dict[str, float]:
    """The numbers of a weight, without those that have no basis."""
    found = {key: sums[part] / sums[of] for key, (part, of) in _SHARES.items() if sums[of]}
    if sums["compared"]:
        norm = math.sqrt(sums["squares"])
        found["relative_error"] = math.sqrt(sums["squared_errors"]) / norm if norm else 0.0
    return found | ({"amax": sums["amax"]} if sums["numel"] else {})
