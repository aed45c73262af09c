"""The one cast of many tensors: measure, exchange, write.

Tensors are whole, or each rank has the values of a span. Then their scales depend on values of
other ranks, which the ranks exchange after measuring.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.distributed.scale_exchange import Exchanged, ShardInfo, exchanges
from fp4adam.tensors import backend, encoding, rows
from fp4adam.tensors.blocks import Span, flat_shape
from fp4adam.tensors.layout import Layout
from fp4adam.tensors.quantized_tensor import QuantizedTensor, mark_written
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.swizzle import build_gemm_scales
from fp4adam.tensors.transpose import build_columnwise

if TYPE_CHECKING:
    from fp4adam.distributed.cast_launch import CastLaunches


# Memory for codes outside of the weight: one direction, or (rowwise, columnwise).
Out = Tensor | tuple[Tensor | None, Tensor | None] | None


@dataclasses.dataclass
class CastSpan:
    """A span of the matrix of a weight, and its amaxes.

    Attributes:
        weight: The weight.
        span: The span.
        dtype: The dtype that values are rounded to first.
        amax: float32 [1], or None for formats that store none.
        grids: float32 block amaxes by direction, of formats whose blocks have scales.
    """

    weight: QuantizedTensor
    span: Span
    dtype: torch.dtype
    amax: Tensor | None = None
    grids: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The layout of the weight."""
        return self.weight.quantizer.layout

    @property
    def nbytes(self) -> int:
        """Number of bytes that hold codes of the span, in one direction."""
        per_byte, (_, start, stop) = 8 // self.layout.code_type.bits, self.span
        return -(-stop // per_byte) - start // per_byte if stop > start else 0

    def targets(self, out: Out) -> dict[str, tuple[Tensor, int]]:
        """By direction, the flat memory to write codes to, and the code byte that it starts at."""
        tensors, first_byte = self.weight.inner, self.span.start * self.layout.code_type.bits
        given = dict(zip(("rowwise", "columnwise"), as_pair(out), strict=True))
        return {
            usage: (getattr(tensors, f"{usage}_data").view(-1), 0)
            if given[usage] is None
            else (given[usage].view(-1), first_byte // 8)
            for usage in self.layout.blocks
        }

    def measure(self, value: Tensor) -> None:
        """Write the amaxes of all blocks, and raise that of the tensor, if any, by operators."""
        values = self._around(value)
        for usage, grid in self.grids.items():
            blocks = encoding.blocks_of(values, self.layout.blocks[usage])
            grid.copy_(encoding.block_amaxes(self.layout, blocks, (1, 3)))
        if self.amax is not None and value.numel():
            torch.maximum(self.amax, encoding.amax_over(values, (0, 1)), out=self.amax)

    def write(self, value: Tensor, out: Out) -> None:
        """Write all scales of the weight, and the codes of the span, by operators."""
        quantizer, code, tensors = self.weight.quantizer, self.layout.code_type, self.weight.inner
        (_, start, stop), values, per_byte = self.span, self._around(value), 8 // code.bits
        if self.amax is not None:
            quantizer.take_amaxes([tensors], [self.amax])
        for usage, (target, first_byte) in self.targets(out).items():
            given = values, self.grids.get(usage, tensors.amax), tensors, self.dtype
            codes = encoding.write_scales(quantizer, usage, *given).reshape(-1)[start:stop]
            at = start - first_byte * per_byte
            packed = target[at // per_byte :][: self.nbytes]
            if per_byte == 2:  # nibbles beside the span stay
                nibbles = torch.stack((packed & 0x0F, packed >> 4), -1).flatten()
                nibbles[at % 2 :][: len(codes)] = codes
                codes = nibbles
            packed.copy_(code.pack(codes))

    def _around(self, value: Tensor) -> Tensor:
        """The matrix with the values of the span, rounded to the dtype; all others are 0."""
        values = value.new_zeros(self.span.shape, dtype=torch.float32)
        values.view(-1)[self.span.start : self.span.stop] = value.detach().to(self.dtype).view(-1)
        return values


def as_pair(out: Out) -> tuple[Tensor | None, Tensor | None]:
    """The memory for rowwise and for columnwise codes."""
    return tuple(out) if isinstance(out, tuple | list) else (out, None)


class SpanCast:
    """Quantizes spans of weights on one device, in three steps, as scales depend on other ranks::

        cast.measure(values)
        torch.distributed.all_reduce(cast.amaxes, torch.distributed.ReduceOp.MAX, group)
        cast.write(values)

    Values are contiguous, of any shape, and may be different tensors at every call; the memory of
    weights is always the same. The number of launches does not depend on the number of spans, and
    nothing waits for the device.

    Attributes:
        spans: The spans.
        amaxes: float32 [n], one buffer for all: first an amax per weight of a format that stores
            one, then the block amaxes, weight by weight.
    """

    def __init__(self, spans: list[CastSpan], device: torch.device) -> None:
        self.spans, self.device = spans, device
        # Operators give the same bits, also of formats that have no kernels.
        has_kernels = all(one.weight.quantizer.has_kernels for one in spans)
        self._uses_kernels = has_kernels and backend.uses_kernels(device)
        self._launches: CastLaunches | None = None  # of the last call
        self._known: tuple = ()  # what they are for
        of_tensors = [one for one in spans if one.weight._amax is not None]
        n, places = len(of_tensors), []
        for one in spans:
            for usage, block in one.layout.blocks.items() if one.layout.scale_type else ():
                shape = encoding.grid_shape(block, one.span.shape)
                places.append((one, usage, n, shape))
                n += shape[0] * shape[1]
        self.amaxes = torch.zeros(n, dtype=torch.float32, device=device)
        for i, one in enumerate(of_tensors):
            one.amax = self.amaxes[i : i + 1]
        for one, usage, first, shape in places:
            one.grids[usage] = self.amaxes[first : first + shape[0] * shape[1]].view(shape)

    def measure(self, values: Sequence[Tensor], outs: Sequence[Out] | None = None) -> None:
        self.amaxes.zero_()
        if self._uses_kernels:
            return self._launches_for(values, outs).measure()
        for one, value in zip(self.spans, values, strict=True):
            one.measure(value)

    def write(self, values: Sequence[Tensor], outs: Sequence[Out] | None = None) -> None:
        weights = [one.weight for one in self.spans]  # later it would overwrite them
        if self._uses_kernels:
            self._launches_for(values, outs).write()
        else:
            outs = [None] * len(values) if outs is None else outs
            for one, value, out in zip(self.spans, values, outs, strict=True):
                one.write(value, out)
            build_gemm_scales(weights)
        mark_written(weights)

    def _launches_for(self, values: Sequence[Tensor], outs: Sequence[Out] | None) -> "CastLaunches":
        """The launches on this memory: those of the last call, if it was the same."""
        from fp4adam.distributed.cast_launch import CastLaunches

        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        given = chain.from_iterable(map(as_pair, outs or ()))
        memory = [*map(Tensor.data_ptr, values)], [x if x is None else x.data_ptr() for x in given]
        known = stream, memory, [x.dtype for x in values]
        if self._launches is None or self._known != known:
            self._launches = CastLaunches(self.spans, values, outs, self.device)
            self._known = known
        return self._launches


class PartialCast(SpanCast):
    """Quantizes flat shards of weights in place; all shards together equal the full cast.

    Shard i is the elements [starts[i], starts[i] + sizes[i]) of the row-major matrix that
    weights[i] is quantized as; ``outs`` is other memory for its codes. Columnwise codes of MXFP8
    are written too; those of other formats follow from rowwise ones (``build_columnwise``).
    """

    def __init__(
        self,
        weights: Sequence[QuantizedTensor],
        starts: Sequence[int],
        sizes: Sequence[int],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        spans = [
            CastSpan(weight, Span(flat_shape(tuple(weight.shape)), start, start + size), dtype)
            for weight, start, size, dtype in zip(weights, starts, sizes, dtypes, strict=True)
        ]
        super().__init__(spans, weights[0].device if weights else torch.device("cpu"))


class LocalCast(SpanCast):
    """Casts local tensors on one device, which are whole or shards of whole rows.

    Values are contiguous tensors of the shapes of the local tensors.

    Attributes:
        exchanged: Per tensor its amax and its block amaxes, for :class:`Exchanged`.
    """

    def __init__(self, tensors: Sequence[QuantizedTensor], dtypes: Sequence[torch.dtype]) -> None:
        self._tensors, spans = list(tensors), []
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            n, cols = rows.matrix_shape(tensor)
            shape, first = (rows.stored_shape(tensor)[0], cols), tensor._first_row
            matrix = type(tensor)(shape, tensor.dtype, tensor.quantizer, tensor.inner)
            span = Span(shape, first * cols, (first + n) * cols)
            spans.append(CastSpan(matrix, span, dtype))
        super().__init__(spans, tensors[0].device)
        # Shards consist of whole rows, so only blocks of several rows can be cut.
        self.exchanged = [
            (one.amax, [grid for use, grid in one.grids.items() if one.layout.blocks[use][0] != 1])
            for one in spans
        ]

    def part(self, chosen: Sequence[bool]) -> "LocalCast":
        """The cast of some of the tensors, which writes what this one has measured."""
        part = copy.copy(self)
        part._tensors = [*compress(self._tensors, chosen)]
        part.spans = [*compress(self.spans, chosen)]
        return part

    def write(self, values: Sequence[Tensor]) -> None:
        super().write(values)
        build_columnwise([one for one in self._tensors if one.quantizer.layout.is_square])
        torch.autograd.graph.increment_version(self._tensors)


def cast(
    tensors: Sequence[QuantizedTensor],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    infos: Sequence[Sequence[ShardInfo]] | None = None,
    scales: Sequence[Hashable] | None = None,
) -> None:
    """Quantize new values of local tensors, which may share scales with each other or other ranks.

    If some are shards, every rank that has shards of these tensors has to call it for the same
    ones.

    Args:
        tensors: Whole tensors, and shards.
        values: Plain tensors of the same shapes, on the same devices.
        dtypes: The dtypes that values are rounded to first.
        infos: The positions of each shard, as by :meth:`ShardInfo.of`; empty for a whole tensor.
        scales: Keys that are equal for tensors that share an amax. ``tensors`` has all of these.
    """
    infos = [()] * len(tensors) if infos is None else infos
    scales = [*range(len(tensors))] if scales is None else scales
    whole: dict[Hashable, list[int]] = defaultdict(list)
    shards: dict[torch.device, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        (shards[tensor.device] if infos[i] else whole[scales[i]]).append(i)
    for members in whole.values():
        rounded = [values[i].to(dtypes[i]) for i in members]
        amax = None
        if len(members) > 1 and tensors[members[0]].quantizer.layout.tensor_scale is not None:
            matrices = [x.reshape(flat_shape(tuple(x.shape))).contiguous() for x in rounded]
            quantizers = [tensors[i].quantizer for i in members]
            found = [*map(Quantizer.measure, quantizers, matrices)]
            amax = torch.cat([each.to(found[0].device) for each in found]).amax(0, keepdim=True)
        for i, value in zip(members, rounded, strict=True):
            tensors[i]._write(value, amax=amax, by_step=True)
    for members in shards.values():
        one = LocalCast([tensors[i] for i in members], [dtypes[i] for i in members])
        given = [values[i].contiguous() for i in members]
        one.measure(given)
        exchanged = [
            (infos[i], Exchanged(tensors[i].global_spec, *amaxes, scales[i]))
            for i, amaxes in zip(members, one.exchanged, strict=True)
        ]
        for exchange in exchanges(exchanged):
            exchange()
        one.write(given)
