"""How well codes represent master weights, as numbers for TensorBoard or W&B and as a picture."""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fp4adam.distributed.dtensor import local, sharding_groups
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from fp4adam.nn.candidates import check_module
from fp4adam.nn.summary import check_optimizer
from fp4adam.tensors import rows
from fp4adam.tensors.minifloat import CODE_TYPES
from fp4adam.tensors.quantized_tensor import QuantizedTensor

# The largest magnitude of each kind of code, without its sign.
# Elements that are compared at a time, which bounds the memory of intermediate results.
_STRIP = 2**24
# Bytes of codes per weight that are kept on the host until the next measurement.
_SAMPLE = 2**20


class _Sums(NamedTuple):
    """What is summed over the elements of a weight, on all ranks that have a part of it."""

    numel: Any = 0
    compared: Any = 0  # elements with a master
    squares: Any = 0  # of masters
    squared_errors: Any = 0
    underflows: Any = 0
    nonfinite: Any = 0
    zeros: Any = 0
    codes: Any = 0
    saturated: Any = 0
    sampled: Any = 0  # codes that were compared with the last measurement
    changed: Any = 0
    moments: Any = 0  # elements with moments
    exp_avg_zeros: Any = 0
    exp_avg_sq_zeros: Any = 0


class QuantizationMonitor:
    """Measures how well quantized weights represent their masters; it costs only when called.

    ::

        monitor = fp4adam.QuantizationMonitor(model, optimizer)
        for step, batch in enumerate(batches):
            ...
            if step % 100 == 0:
                wandb.log(monitor.measure(step), step=step)
        monitor.plot("relative_error", "relative_error.png")

    Between calls it keeps at most 1 MiB of codes per weight, in host memory. A call decodes one
    weight at a time to FP32, and waits for the device. With weights of FSDP2 or other DTensors call
    it on every rank; all of them get the numbers of the whole weights.

    Args:
        model: A model with quantized weights, before or after the optimizer's first step.
        optimizer: Its optimizer. None leaves out what compares with masters and moments, unless a
            weight still has its high-precision initial value.

    Attributes:
        history: Each measurement as (step, numbers), which :meth:`plot` draws.

    Raises:
        TypeError: If ``model`` is not an ``nn.Module``, or ``optimizer`` not a torch optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        check_module(model)
        check_optimizer(optimizer)
        # Accelerate's wrapper of an optimizer cannot decode narrow states.
        self.model, self.optimizer = model, getattr(optimizer, "optimizer", optimizer)
        self.history: list[tuple[int, dict[str, float]]] = []
        self._samples: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(self, step: int | None = None) -> dict[str, float]:
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

        Args:
            step: The step that :attr:`history` has; None is one more than that of the last call.
        """
        if step is None:
            step = self.history[-1][0] + 1 if self.history else 0
        state = {} if self.optimizer is None else self.optimizer.state
        measured = defaultdict(list)
        for name, param in self.model.named_parameters():
            weight = _quantized(param)
            if weight is not None:
                sums, amax = self._measure(name, weight, param, state.get(param, {}))
                key = (sharding_groups(param), weight.device)
                measured[key].append((name, sums, amax))
        totals: list[tuple[str, _Sums, float]] = []
        for (groups, device), weights in measured.items():
            totals += _gather(groups, device, weights)
        numbers: dict[str, float] = {}
        for name, sums, amax in sorted(totals, key=lambda total: total[0]):
            numbers |= {f"{key}/{name}": x for key, x in _shares(sums, amax).items()}
        if totals:
            whole = _Sums(*map(math.fsum, zip(*(sums for _, sums, _ in totals), strict=True)))
            amax = max(amax for _, _, amax in totals)
            numbers |= {f"{key}/all": x for key, x in _shares(whole, amax).items()}
        self.history.append((step, numbers))
        return numbers

    def _measure(
        self, name: str, weight: QuantizedTensor, param: Tensor, state: dict[str, Any]
    ) -> tuple[_Sums, Any]:
        """The sums of this rank's part of a weight, as tensors on its device; and its amax."""
        part, (n_rows, _) = rows.own_blocks(weight.flush()), rows.matrix_shape(weight)
        if not weight.numel():
            return _Sums(), 0
        decoded = rows.read(part, torch.float32)
        sums = _Sums(numel=decoded.numel(), zeros=(decoded == 0).sum())
        master = self._master(weight, param, state)
        if master is not None:
            sums = sums._replace(**_compare(decoded, master.reshape(decoded.shape)))
        layout, usage = (
            weight.quantizer.layout,
            "rowwise" if weight.quantizer.rowwise else "columnwise",
        )
        codes = getattr(part, f"{usage}_data")
        if not getattr(layout, usage).codes.transposed:
            codes = codes[part._first_row :][:n_rows]  # shards store whole blocks
        sums = sums._replace(**self._inspect_codes(name, codes, layout.code_type))
        if "exp_avg" in state and "exp_avg_sq" in state:
            first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
            # E4M3 codes have a sign; those of second moments have none.
            signed = first if first.is_floating_point() else first & 0x7F
            sums = sums._replace(
                moments=first.numel(),
                exp_avg_zeros=(signed == 0).sum(),
                exp_avg_sq_zeros=(second == 0).sum(),
            )
        return sums, decoded.abs().amax()

    def _master(
        self, weight: QuantizedTensor, param: Tensor, state: dict[str, Any]
    ) -> Tensor | None:
        """The local FP32 master, else the high-precision initial value, or None."""
        if "master_param" not in state:
            return weight._high_precision_init_val
        # FP4Adam decodes masters that are stored in fewer bits.
        if hasattr(self.optimizer, "get_unscaled_state"):
            return self.optimizer.get_unscaled_state(param, "master_param")
        return local(state["master_param"])

    def _inspect_codes(self, name: str, codes: Tensor, code_type: str) -> dict[str, Any]:
        """Sums over codes, uint8; E2M1 has two per byte."""
        flat, largest = codes.reshape(-1), CODE_TYPES[code_type].largest
        if code_type == "e2m1":
            per_byte = 2
            saturated = ((flat & largest) == largest).sum() + ((flat >> 4 & 7) == largest).sum()
        else:
            per_byte, saturated = 1, ((flat & 0x7F) == largest).sum()
        # An odd stride meets all columns of a matrix.
        stride = 1 if flat.numel() <= _SAMPLE else -(-flat.numel() // _SAMPLE) | 1
        sample = flat[::stride].cpu()
        last, self._samples[name] = self._samples.get(name), sample.clone()
        found = {"codes": per_byte * flat.numel(), "saturated": saturated}
        if last is not None and last.shape == sample.shape:
            differing = last ^ sample
            changed = (differing != 0).sum()
            if per_byte == 2:
                changed = ((differing & 0xF) != 0).sum() + ((differing >> 4) != 0).sum()
            found |= {"sampled": per_byte * sample.numel(), "changed": changed}
        return found

    def plot(self, number: str = "relative_error", path: str | Path | None = None) -> Any:
        """Draw one number of all weights (rows) at all measurements (columns).

        Args:
            number: The first part of the keys that :meth:`measure` returns, such as
                "changed_share".
            path: Where to save the picture; None saves nothing.

        Returns:
            The matplotlib figure.

        Raises:
            ValueError: If no measurement has this number.
            ModuleNotFoundError: Without matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "plot() needs matplotlib, got none; pip install matplotlib", name="matplotlib"
            ) from error
        prefix = f"{number}/"
        names = dict.fromkeys(
            key.removeprefix(prefix)
            for _, numbers in self.history
            for key in numbers
            if key.startswith(prefix)
        )
        names.pop("all", None)
        if not names:
            known = sorted({key.partition("/")[0] for _, found in self.history for key in found})
            raise ValueError(
                f"number must be one of those that were measured, {', '.join(known) or 'none yet'},"
                f" got {number!r}; call measure() first, for changed_share twice"
            )
        values = [
            [numbers.get(prefix + name, math.nan) for _, numbers in self.history] for name in names
        ]
        figure = Figure(figsize=(8, 1.4 + 0.22 * len(names)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis")
        steps = [step for step, _ in self.history]
        ticks = range(0, len(steps), -(-len(steps) // 8))
        axes.set_xticks(ticks, [f"{steps[i]:,}" for i in ticks])
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_xlabel("step")
        axes.set_title(number.replace("_", " "))
        figure.colorbar(image, ax=axes)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def quantization_stats(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, float]:
    """How well quantized weights represent their masters now; see :class:`QuantizationMonitor`.

    ::

        for name, value in fp4adam.quantization_stats(model, optimizer).items():
            writer.add_scalar(name, value, step)

    Args:
        model: A model with quantized weights.
        optimizer: Its optimizer, or None.

    Returns:
        Numbers by ``"<number>/<name of the weight>"`` and ``"<number>/all"``, as
        :meth:`QuantizationMonitor.measure`; without ``changed_share``, for which a monitor keeps
        the codes of the last call.

    Raises:
        TypeError: If ``model`` is not an ``nn.Module``, or ``optimizer`` not a torch optimizer.
    """
    return QuantizationMonitor(model, optimizer).measure()


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
    found = dict.fromkeys(("squares", "squared_errors", "underflows", "nonfinite"), 0)
    height = max(1, _STRIP // max(decoded.shape[1], 1))
    for mine, theirs in zip(decoded.split(height), master.split(height), strict=True):
        exact = theirs.to(decoded.device, torch.float32)
        found["squares"] += exact.square().sum(dtype=torch.float64)
        found["squared_errors"] += (mine - exact).square_().sum(dtype=torch.float64)
        found["underflows"] += ((mine == 0) & (exact != 0)).sum()
        found["nonfinite"] += (~exact.isfinite()).sum()
    return {**found, "compared": decoded.numel()}


def _gather(
    groups: tuple, device: torch.device, weights: list[tuple[str, _Sums, Any]]
) -> Iterator[tuple[str, _Sums, float]]:
    """The sums and amaxes of whole weights, as numbers; one read for all of a device."""
    table = torch.stack(
        [
            torch.stack([torch.as_tensor(x, device=device).double() for x in (*sums, amax)])
            for _, sums, amax in weights
        ]
    )
    for group, kind in groups:
        table = table.to(kind)
        amaxes = table[:, -1].contiguous()
        dist.all_reduce(table, group=group)
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        table[:, -1] = amaxes
    for (name, *_), (*sums, amax) in zip(weights, table.tolist(), strict=True):
        yield name, _Sums(*sums), amax


def _shares(sums: _Sums, amax: float) -> dict[str, float]:
    """The numbers of a weight, without those that have no basis."""
    found = {}
    if sums.compared:
        norm = math.sqrt(sums.squares)
        found["relative_error"] = math.sqrt(sums.squared_errors) / norm if norm else 0.0
        found["underflow_share"] = sums.underflows / sums.compared
        found["nonfinite_share"] = sums.nonfinite / sums.compared
    if sums.numel:
        found["zero_share"] = sums.zeros / sums.numel
        found["amax"] = amax
    if sums.codes:
        found["saturated_share"] = sums.saturated / sums.codes
    if sums.sampled:
        found["changed_share"] = sums.changed / sums.sampled
    if sums.moments:
        found["exp_avg_zero_share"] = sums.exp_avg_zeros / sums.moments
        found["exp_avg_sq_zero_share"] = sums.exp_avg_sq_zeros / sums.moments
    return found
