"""The total norm of gradients and their clipping coefficient, without a device sync.

This module does it with torch operators, ``fp4adam.kernels.grad_norm`` on GPUs. Both give the same
bits, because the order of summation is fixed. A tensor is read in memory order, in spans of
``SPAN`` elements. Within a span, lane l of ``LANES`` adds the elements l, l + LANES, ... one after
the other (magnitudes, squared for the 2-norm, in float64). Then the lanes are added pairwise,
neighbours first. The sums of all spans are added the same way in ``TOTAL_LANES`` lanes.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from numbers import Real
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.kernels.launch.device_tables import upload
from fp4adam.optim.memory_layout import memory_order
from fp4adam.tensors import backend
from fp4adam.tensors.quantized_tensor import QuantizedTensor

NORM_TYPES = (1.0, 2.0, math.inf)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SPAN = 2**15
LANES = 2**10
TOTAL_LANES = 2**12

# Elements widened to float64 at a time; few enough to stay in a CPU's cache.
_CHUNK = 4 * SPAN

MaybeTensors = Sequence[Tensor | None]
# Process groups, each with the device type that it communicates between.
Groups = tuple[tuple[dist.ProcessGroup, str], ...]


class GradNorm:
    """Computes the norm of a fixed list of gradients, as if they were one vector.

    It reads the gradients once, does not modify them, and never waits for the device. On a GPU a
    call launches one kernel per dtype and one that finishes, after a copy of the gradients'
    addresses if these have changed. It keeps 8 bytes per tensor and 24 bytes per span of 32,768
    elements on the device.

    Squares of float32 and narrower gradients are exact in float64, where they are added, so a norm
    that fits float32 does not overflow on the way. Before the rounding to float32, the relative
    error is at most 2**-46 for up to 2**33 elements. The norm is therefore correctly rounded unless
    the true one is that close to a tie between two float32 numbers. The order of the sum depends on
    ``sizes`` alone: the bits are the same on CPU and GPU, in every call, and for any memory layout.
    Float64 gradients are squared in float64, with its rounding and range.

    If a gradient is sharded, each rank adds up its own shard. The sums are then gathered (8 bytes
    per rank) and added in the same order on every rank. The same error bound holds, so the bits do
    not depend on the number of ranks unless the norm is that close to a tie.

    Attributes:
        sizes: Number of local elements of each gradient; if they change, make a new instance.
        groups: For each gradient the process groups that it is sharded over, one per mesh
            dimension; empty if this rank has all of it.
    """

    def __init__(self, sizes: Iterable[int], groups: Sequence[Groups] | None = None) -> None:
        self.sizes = list(sizes)
        self.groups = [()] * len(self.sizes) if groups is None else list(groups)
        self._parts = list(dict.fromkeys(self.groups))
        self._sizes = array("q", self.sizes)
        self._spans = _plan_spans(self._sizes)
        self._tables: dict[tuple[torch.device, Groups], _Tables] = {}

    @torch.no_grad()
    def __call__(
        self,
        grads: MaybeTensors,
        max_norm: float = math.inf,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> tuple[Tensor, dict[torch.device, Tensor]]:
        """The norm of all gradients, and the coefficient that clips it to ``max_norm``.

        Args:
            grads: One per size: float64, float32, bfloat16 or float16, of any shape, strides and
                alignment, on any devices. None counts as zeros.
            max_norm: Largest norm that is not clipped, >= 0.
            norm_type: 1, 2 or inf.
            error_if_nonfinite: Raise if the norm is NaN or infinite; this syncs the device.

        Returns:
            The norm, a new 0-dim float32 tensor on the device of the first gradient (0 on the CPU
            if there is none), and for each device with gradients a one-element float32 tensor:
            min(max_norm / (norm + 1e-6), 1), computed as ``torch.nn.utils.clip_grad_norm_`` does.
            NaN in a gradient makes both NaN; an infinite norm makes the coefficient 0.

        Raises:
            ValueError: If ``norm_type`` or ``max_norm`` is out of range, or a gradient has another
                number of elements than ``sizes`` says.
            TypeError: If a gradient is not a plain, dense tensor of one of these dtypes.
            NotImplementedError: If one is a DTensor; pass the local tensors.
            RuntimeError: With ``error_if_nonfinite``, if the norm is not finite.
        """
        max_norm, norm_type = _check_norm(max_norm, norm_type)
        grads, present = self._check_grads(grads)
        if not present:
            return torch.tensor(0.0, dtype=torch.float32, device="cpu"), {}
        devices = _devices(present)

        def sums_of(device: torch.device, part: Groups) -> Tensor:
            if len(devices) == 1 and self._parts == [()]:
                return self._span_sums(grads, device, norm_type)
            there = [
                g if g is not None and g.device == device and groups == part else None
                for g, groups in zip(grads, self.groups, strict=True)
            ]
            return self._span_sums(there, device, norm_type, part)

        return self._clip(sums_of, devices, max_norm, norm_type, error_if_nonfinite)

    @torch.no_grad()
    def span_sums(self, grads: MaybeTensors) -> Tensor:
        """The sums of squares of gradients on one device, one per span; for :meth:`of_span_sums`.

        Valid until the next call.
        """
        grads, present = self._check_grads(grads)
        return self._span_sums(grads, _devices(present)[0], 2.0)

    @torch.no_grad()
    def of_span_sums(
        self, sums: MaybeTensors, max_norm: float
    ) -> tuple[Tensor, dict[torch.device, Tensor]]:
        """The result of a call with ``max_norm``, for gradients that are gone by now.

        Args:
            sums: Per gradient its :meth:`span_sums`, or None.
            max_norm: Largest norm that is not clipped.
        """
        max_norm, norm_type = _check_norm(max_norm, 2.0)
        present = [s for s in sums if s is not None]
        if not present:
            return torch.tensor(0.0, dtype=torch.float32, device="cpu"), {}
        listed = [*zip(sums, self.groups, self._sizes, strict=True)]

        def sums_of(device: torch.device, part: Groups) -> Tensor:
            there = [
                s
                if s is not None and s.device == device and groups == part
                else torch.zeros(-(-size // SPAN), dtype=torch.float64, device=device)
                for s, groups, size in listed
            ]
            return torch.cat(there)

        return self._clip(sums_of, _devices(present), max_norm, norm_type, False)

    def _clip(
        self,
        sums_of: Callable[[torch.device, Groups], Tensor],
        devices: list[torch.device],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> tuple[Tensor, dict[torch.device, Tensor]]:
        """Norm and coefficients from the sums of each device and of each part of the gradients."""
        if len(devices) == 1 and self._parts == [()]:
            sums = sums_of(devices[0], ())
        else:
            totals = []
            for part in self._parts:
                total = self._total_of(part, sums_of, devices, norm_type)
                totals.append(total.to(devices[0], non_blocking=True))
            sums = torch.cat(totals)
        _, result = _finish(sums, max_norm, norm_type)
        norm, coefficient = result[0], result[1:]
        if error_if_nonfinite and not math.isfinite(value := norm.item()):
            raise RuntimeError(
                f"the total norm of the gradients must be finite, got {value} for norm_type "
                f"{norm_type}; look for what overflowed, or pass error_if_nonfinite=False"
            )
        return norm, {d: coefficient.to(d, non_blocking=True) for d in devices}

    def _total_of(
        self,
        part: Groups,
        sums_of: Callable[[torch.device, Groups], Tensor],
        devices: list[torch.device],
        norm_type: float,
    ) -> Tensor:
        """The float64 total [1] of the gradients that are sharded over the same ranks."""
        totals = [_finish(sums_of(device, part), math.inf, norm_type)[0] for device in devices]
        total = torch.cat([t.to(devices[0], non_blocking=True) for t in totals])
        for group, device_type in part:
            if len(total) > 1:
                total, _ = _finish(total, math.inf, norm_type)
            # Gathered rather than reduced: all-reduce fixes neither NaN handling nor the order of
            # the sum.
            total = total.to(device_type)
            gathered = total.new_empty(group.size())
            dist.all_gather(list(gathered.split(1)), total, group)
            total = gathered
        return _finish(total, math.inf, norm_type)[0]

    def _check_grads(self, grads: MaybeTensors) -> tuple[MaybeTensors, list[Tensor]]:
        """The gradients as contiguous tensors, and the list of those that are not None."""
        if len(grads) != len(self._sizes):
            raise ValueError(
                f"grads must have one entry per size, {len(self._sizes)}, got {len(grads)}; pass "
                "None for what is missing, or make a new GradNorm"
            )
        # In bulk, because there may be thousands.
        types = set(map(type, grads))
        present = [g for g in grads if g is not None] if type(None) in types else list(grads)
        if types - {Tensor, Parameter, type(None)}:
            _check_subclasses(present)
        if not _are_contiguous(present):
            grads = [g if g is None else _in_memory_order(g) for g in grads]
            present = [g for g in grads if g is not None]
        sizes = array("q", map(Tensor.numel, present))
        if len(present) < len(grads):
            known = iter(sizes)
            pairs = zip(grads, self._sizes, strict=True)
            sizes = array("q", [n if g is None else next(known) for g, n in pairs])
        if sizes != self._sizes:
            i = next(i for i, n in enumerate(sizes) if n != self._sizes[i])
            raise ValueError(
                f"gradient {i} must have {self._sizes[i]} elements, got {sizes[i]}; recompute it, "
                "or make a new GradNorm"
            )
        dtypes = list(map(attrgetter("dtype"), present))
        if unknown := set(dtypes) - set(DTYPES):
            raise TypeError(
                "gradients must be float64, float32, bfloat16 or float16 for their norm, got "
                f"{unknown.pop()}; cast them"
            )
        return grads, present

    def _span_sums(
        self, grads: MaybeTensors, device: torch.device, norm_type: float, part: Groups = ()
    ) -> Tensor:
        """One float64 sum per span on the device, zero for gradients that are None."""
        if not backend.uses_kernels(device):
            return _span_sums(grads, self._sizes, device, norm_type)
        if (device, part) not in self._tables:
            self._tables[device, part] = _Tables(device, self._spans, len(self._sizes))
        return self._tables[device, part].span_sums(grads, norm_type)


class Measured:
    """The gradients that a clipping coefficient was made from, which it does not keep alive."""

    def __init__(self, grads: MaybeTensors) -> None:
        # To the memory: references to gradients would keep Module.to() from swapping them.
        self._alive = [g if g is None else StorageWeakRef(g.untyped_storage()) for g in grads]
        self._known = [g if g is None else (g.data_ptr(), g._version) for g in grads]

    def are_current(self, grads: MaybeTensors) -> bool:
        """Whether these are the gradients that were measured, and nobody has written them since.

        Gradients that are missing by now, and parts without elements, say nothing.

        Raises:
            RuntimeError: If that is so for some of them only.
        """
        same = [
            known == (grad.data_ptr(), grad._version) and not alive.expired()
            for known, alive, grad in zip_longest(self._known, self._alive, grads)
            if grad is not None and grad.numel()
        ]
        if any(same) and not all(same):
            raise RuntimeError(
                "gradients must not change between clip_grad_norm_() and step(), got "
                f"{same.count(False)} of {len(same)} that have: the step would multiply all by the "
                "coefficient of the old ones; call clip_grad_norm_() last, or zero_grad() to begin "
                "anew"
            )
        return all(same)


class _Tables:
    """The kernels' tables and sums on one device; tables are uploaded when they change."""

    def __init__(self, device: torch.device, spans: Tensor, n_tensors: int) -> None:
        self.device = device
        self._all_spans = spans
        self._dtypes: list[torch.dtype | None] = [None] * n_tensors
        self._spans: dict[torch.dtype, Tensor] = {}
        self._uploaded = array("q")
        self._addresses = torch.empty(n_tensors, dtype=torch.int64, device=device)
        # The sums of gradients that were never given stay zero.
        self._sums = torch.zeros(len(spans), dtype=torch.float64, device=device)

    def span_sums(self, grads: MaybeTensors, norm_type: float) -> Tensor:
        """Launch the kernels on contiguous gradients."""
        from fp4adam.kernels import grad_norm

        self._update(grads)
        order = dict(norm_type=norm_type, span=SPAN, lanes=LANES)
        with torch.cuda.device_of(self._sums):
            for dtype, spans in self._spans.items():
                grad_norm.span_sums(self._addresses, spans, self._sums, dtype=dtype, **order)
        return self._sums

    def _update(self, grads: MaybeTensors) -> None:
        if type(None) in set(map(type, grads)):
            addresses = array("q", [0 if g is None else g.data_ptr() for g in grads])
            # A missing gradient keeps its place in the launch, which writes zeros for it.
            pairs = zip(grads, self._dtypes, strict=True)
            dtypes = [known if g is None else g.dtype for g, known in pairs]
        else:
            addresses = array("q", map(Tensor.data_ptr, grads))
            dtypes = list(map(attrgetter("dtype"), grads))
        if dtypes != self._dtypes:
            self._dtypes, self._spans = dtypes, {}
            tensors = self._all_spans[:, 0]
            for dtype in DTYPES:
                is_dtype = torch.tensor([d == dtype for d in dtypes], device="cpu")
                spans = self._all_spans[is_dtype[tensors]]
                if len(spans):
                    self._spans[dtype] = torch.empty_like(spans, device=self.device)
                    upload(spans, self._spans[dtype])
        if addresses != self._uploaded:
            upload(torch.frombuffer(addresses, dtype=torch.int64), self._addresses)
            self._uploaded = addresses


def _check_norm(max_norm: float, norm_type: float) -> tuple[float, float]:
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, Real | Tensor):
            raise TypeError(f"{name} must be a number, got {value!r}; inf is allowed")
    max_norm, norm_type = float(max_norm), float(norm_type)
    if norm_type not in NORM_TYPES:
        raise ValueError(
            f"norm_type must be 1, 2 or inf, got {norm_type}; for other norms use "
            "torch.nn.utils.clip_grad_norm_"
        )
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be >= 0, got {max_norm}; pass inf to measure only")
    return max_norm, norm_type


def _check_subclasses(grads: list[Tensor]) -> None:
    for grad in grads:
        name = type(grad).__name__
        if is_dtensor(grad):
            raise NotImplementedError(
                "gradients must be local tensors for their norm, got a DTensor of shape "
                f"{tuple(grad.shape)}; pass grad.to_local(), and the groups with the other shards"
            )
        if isinstance(grad, QuantizedTensor):
            raise TypeError(
                f"gradients must be plain tensors for their norm, got {name}; call dequantize()"
            )
        # The kernels take address 0 for a missing gradient.
        if grad.layout == torch.strided and grad.data_ptr() == 0 and grad.numel():
            raise TypeError(
                f"gradients must be plain tensors for their norm, got {name} without memory of its "
                "own; unwrap it"
            )


def _are_contiguous(tensors: list[Tensor]) -> bool:
    try:
        return all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:  # compressed sparse tensors do not answer
        return False


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements as a contiguous tensor in memory order; copies only if there are gaps."""
    if tensor.layout != torch.strided:
        raise TypeError(
            f"gradients must be dense for their norm, got layout {tensor.layout}; call to_dense()"
        )
    return tensor.permute(memory_order(tensor)).contiguous()


def _devices(tensors: list[Tensor]) -> list[torch.device]:
    """The distinct devices of the tensors, in order of first appearance."""
    indices = set(map(Tensor.get_device, tensors))  # far quicker than comparing devices
    if len(indices) == 1 and tensors[0].is_cuda:
        return [tensors[0].device]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if torch.device("meta") in devices:
        raise RuntimeError(
            "gradients must be on a real device for their norm, got one on meta; materialize it"
        )
    return devices


def _plan_spans(sizes: Sequence[int]) -> Tensor:
    """Spans of all tensors: int32 [n, 4], (tensor, span in the tensor, elements, index in sums)."""
    numels = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    counts = (numels + SPAN - 1) // SPAN
    tensors = torch.repeat_interleave(counts)
    index = torch.arange(len(tensors), device="cpu")
    numbers = index - (counts.cumsum(0) - counts)[tensors]
    elements = (numels[tensors] - numbers * SPAN).clamp(max=SPAN)
    return torch.stack((tensors, numbers, elements, index), dim=1).to(torch.int32)


def _span_sums(
    grads: MaybeTensors, sizes: Sequence[int], device: torch.device, norm_type: float
) -> Tensor:
    """One float64 sum per span, with torch operators."""
    sums = [torch.zeros(0, dtype=torch.float64, device=device)]
    rows = _lane_sums(grads, sizes, device, norm_type)
    while batch := list(islice(rows, 64)):
        sums.append(_fold(torch.cat(batch), norm_type))
    return torch.cat(sums)


def _lane_sums(
    grads: MaybeTensors, sizes: Sequence[int], device: torch.device, norm_type: float
) -> Iterator[Tensor]:
    """The lanes of a few spans at a time, float64 [n, LANES]."""
    zero = torch.zeros((), dtype=torch.float32, device=device)
    for grad, size in zip(grads, sizes, strict=True):
        flat = zero.expand(size) if grad is None else grad.view(-1)
        for chunk in flat.split(_CHUNK):
            terms = chunk.abs().double()
            if norm_type == 2:
                terms.square_()
            whole = len(terms) // SPAN * SPAN
            if whole:
                yield _add_lanes(terms[:whole].view(-1, SPAN), LANES, norm_type)
            if whole < len(terms):
                yield _add_lanes(terms[None, whole:], LANES, norm_type)


def _add_lanes(rows: Tensor, lanes: int, norm_type: float) -> Tensor:
    """Combine elements ``lanes`` apart, one after the other: [n, any] to [n, lanes]."""
    if missing := -rows.shape[1] % lanes:
        rows = torch.nn.functional.pad(rows, (0, missing))
    first, *others = rows.unflatten(1, (-1, lanes)).unbind(1)
    result = first.clone()
    for other in others:
        _combine(result, other, norm_type, out=result)
    return result


def _fold(lanes: Tensor, norm_type: float) -> Tensor:
    """Combine each row's neighbours until one value is left: [n, power of two] to [n]."""
    while lanes.shape[1] > 1:
        lanes = _combine(lanes[:, ::2], lanes[:, 1::2], norm_type)
    return lanes[:, 0]


def _combine(a: Tensor, b: Tensor, norm_type: float, out: Tensor | None = None) -> Tensor:
    """The sum, or for the infinity norm the maximum; NaN if either is NaN."""
    return (torch.maximum if norm_type == math.inf else torch.add)(a, b, out=out)


def _finish(sums: Tensor, max_norm: float, norm_type: float) -> tuple[Tensor, Tensor]:
    """The float64 total [1] of ``sums``, and its norm and clipping coefficient, float32 [2].

    Totals of several devices or ranks are combined by calling it again on those totals.
    """
    if backend.uses_kernels(sums.device):
        from fp4adam.kernels import grad_norm

        total = torch.empty(1, dtype=torch.float64, device=sums.device)
        result = torch.empty(2, dtype=torch.float32, device=sums.device)
        clip = dict(max_norm=max_norm, norm_type=norm_type, lanes=TOTAL_LANES)
        with torch.cuda.device_of(sums):
            grad_norm.total_norm(sums, total, result, **clip)
        return total, result
    total = sums.new_zeros(1)
    if len(sums):
        total = _fold(_add_lanes(sums[None], TOTAL_LANES, norm_type), norm_type)
    norm = total
    if norm_type == 2:
        # torch's float64 square root on the CPU is off in the last bit for some numbers.
        norm = total.new_tensor([math.sqrt(total.item())])
    norm = norm.float()
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return total, torch.cat((norm, coefficient))
