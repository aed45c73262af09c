"""The one cast of many tensors: measure, exchange, write.

Tensors are whole, or each rank has the values of a span. Then their scales depend on values of
other ranks, which the ranks exchange after measuring.
"""

import copy
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.distributed.cast_span import CastSpan, Out, as_pair
from fp4adam.distributed.scale_exchange import Exchanged, ShardInfo, exchanges
from fp4adam.tensors import backend, encoding, rows
from fp4adam.tensors.blocks import Span, flat_shape, round_up
from fp4adam.tensors.quantized_tensor import QuantizedTensor, mark_written
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES
from fp4adam.tensors.swizzle import build_gemm_scales
from fp4adam.tensors.transpose import build_columnwise

if TYPE_CHECKING:
    from fp4adam.distributed.cast_launch import CastLaunches


class SpanCast:
    """Quantizes spans of weights on one device; values are flat, or None for an empty span.

    Attributes:
        amaxes: As for :class:`PartialCast`.
    """

    def __init__(self, spans: list[CastSpan], device: torch.device) -> None:
        self._spans, self.device = spans, device
        # Operators give the same bits, also of formats that have no kernels.
        has_kernels = all(one.weight.quantizer.has_kernels for one in spans)
        self._uses_kernels = has_kernels and backend.uses_kernels(device)
        self._launches: CastLaunches | None = None  # of the last call
        self._known: tuple = ()  # what they are for
        of_tensors = [one for one in spans if one.weight._amax is not None]
        n, places = len(of_tensors), []
        for one in spans:
            for usage, block in one.layout.blocks.items() if one.layout.scale_type else ():
                n, shape = round_up(n, 4), encoding.grid_shape(block, one.span.shape)
                places.append((one, usage, n, shape))
                n += shape[0] * shape[1]
        self.amaxes = torch.zeros(n, dtype=torch.float32, device=device)
        for i, one in enumerate(of_tensors):
            one.amax = self.amaxes[i : i + 1]
        for one, usage, first, shape in places:
            one.grids[usage] = self.amaxes[first : first + shape[0] * shape[1]].view(shape)

    def measure(self, values: Sequence[Tensor | None]) -> None:
        self.amaxes.zero_()
        if self._uses_kernels:
            return self._launches_for(values, [None] * len(values)).measure()
        for one, value in zip(self._spans, values, strict=True):
            if value is not None:
                encoding.measure_blocks(one.layout, value, one.span, one.dtype, one.grids, one.amax)

    def write(self, values: Sequence[Tensor | None], outs: Sequence[Out] | None = None) -> None:
        outs = [None] * len(self._spans) if outs is None else outs
        weights = [one.weight for one in self._spans]  # later it would overwrite them
        if self._uses_kernels:
            self._launches_for(values, outs).write()
        else:
            for one, value, out in zip(self._spans, values, outs, strict=True):
                one.write(value, out)
            build_gemm_scales(weights)
        mark_written(weights)

    def _launches_for(self, values: Sequence[Tensor | None], outs: Sequence[Out]) -> "CastLaunches":
        """The launches on this memory: those of the last call, if it was the same."""
        from fp4adam.distributed.cast_launch import CastLaunches

        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        tensors = [one.weight.inner for one in self._spans]
        memory = [None if x is None else (x.data_ptr(), x.dtype) for x in values]
        memory += [x.data_ptr() for out in outs for x in as_pair(out) if x is not None]
        known = stream, tensors, memory
        if self._launches is None or self._known != known:
            self._launches = CastLaunches(self._spans, values, outs, self.device)
            self._known = known
        return self._launches


class PartialCast(SpanCast):
    """Quantizes flat shards of weights in place; all shards together equal the full cast.

    Shard i consists of the elements [starts[i], starts[i] + sizes[i]) of the row-major matrix that
    weights[i] is quantized as. Scales depend on values of other ranks, so there are three steps::

        cast = PartialCast(weights, starts, sizes, dtypes)
        cast.measure(values)
        torch.distributed.all_reduce(cast.amaxes, torch.distributed.ReduceOp.MAX, group)
        cast.write(values)

    Once every shard has been written, ``rowwise_data``, scales and amaxes equal those of
    ``weight.quantizer.quantize(values.to(dtype))``, bit for bit. MXFP8 columnwise data are written
    too; for the other formats they are derived from the rowwise data (``build_columnwise``). The
    number of launches does not depend on the number of weights, and nothing waits for the device.
    Values and outs may be different tensors at every call.

    Args:
        weights: :class:`QuantizedTensor` s on one device; formats may differ. NVFP4 and Float8Block
            need ``two_dimensional`` and rowwise data.
        starts: First element of each shard.
        sizes: Number of elements of each shard; 0 for a rank without a part of a weight.
        dtypes: The dtypes that values are rounded to first: bfloat16, float16, or float32, which
            leaves them as they are.

    Attributes:
        amaxes: float32 [n], one buffer for all: first an amax per NVFP4 or Float8 weight, then the
            block amaxes of all formats but Float8, weight by weight. Padding in between stays 0.

    Raises:
        ValueError: If lists differ in length, devices differ, a shard reaches past its weight, a
            format cannot be cast in shards, or a dtype is not one of the three.
    """

    def __init__(
        self,
        weights: Sequence[QuantizedTensor],
        starts: Sequence[int],
        sizes: Sequence[int],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        check_lengths(len(weights), starts=starts, sizes=sizes, dtypes=dtypes)
        check_weights(weights)
        spans = []
        for i, (weight, start, size, dtype) in enumerate(
            zip(weights, starts, sizes, dtypes, strict=True)
        ):
            if start < 0 or size < 0 or start + size > weight.numel():
                raise ValueError(
                    f"shard {i} must lie inside its weight of {weight.numel()} elements, got "
                    f"[{start}, {start + size}); count elements of the flattened weight"
                )
            if dtype not in HIGH_PRECISION_DTYPES:
                raise ValueError(
                    f"dtypes[{i}] must be float32, bfloat16 or float16, got {dtype}; float32 "
                    "leaves values as they are"
                )
            span = Span(flat_shape(tuple(weight.shape)), start, start + size)
            spans.append(CastSpan(weight, span, dtype))
        super().__init__(spans, weights[0].device if weights else torch.device("cpu"))

    def measure(self, values: Sequence[Tensor | None]) -> None:
        """Overwrite ``amaxes`` with the amaxes of this rank's shards.

        Args:
            values: Per weight a flat contiguous float32, bfloat16 or float16 tensor of the shard's
                size, or None for an empty shard.

        Raises:
            ValueError: If a value is not as described.
        """
        self.check_values(values)
        super().measure(values)

    def write(self, values: Sequence[Tensor | None], outs: Sequence[Out] | None = None) -> None:
        """Write all scales and amaxes of the weights from ``amaxes``, and the codes of the shards.

        If the shard owns one nibble of a byte, the other nibble is preserved.

        Args:
            values: As for :meth:`measure`.
            outs: Per weight the memory for the codes of its shard, contiguous uint8 on the same
                device, or None to write to the weight itself. NVFP4: bytes [start // 2, (start +
                size + 1) // 2) of ``rowwise_data``. MXFP8: a pair, rowwise and columnwise.

        Raises:
            ValueError: If a value or an out is not as described.
        """
        self.check_values(values)
        if outs is not None:
            self.check_outs(outs)
        super().write(values, outs)

    def check_values(self, values: Sequence[Tensor | None], name: str = "values") -> None:
        """Raise ValueError unless ``values`` fit the shards; ``name`` is for the error."""
        check_lengths(len(self._spans), **{name: values})
        for i, (one, value) in enumerate(zip(self._spans, values, strict=True)):
            size = one.span.numel
            if value is None and not size:
                continue
            if (
                value is None
                or isinstance(value, QuantizedTensor)
                or value.dtype not in HIGH_PRECISION_DTYPES
                or value.shape != (size,)
                or not value.is_contiguous()
                or value.device != self.device
            ):
                raise ValueError(
                    f"{name}[{i}] must be a flat contiguous float32, bfloat16 or float16 tensor of "
                    f"{size} elements on {self.device}, got {_describe(value)}; pass this shard's "
                    "slice of the flattened values, and None for empty shards only"
                )

    def check_outs(self, outs: Sequence[Out], name: str = "outs") -> None:
        """Raise ValueError unless ``outs`` fit the shards; ``name`` is for the error."""
        check_lengths(len(self._spans), **{name: outs})
        for i, (one, out) in enumerate(zip(self._spans, outs, strict=True)):
            if out is None:
                continue
            is_pair, is_square = isinstance(out, tuple | list), one.layout.is_square
            if (len(out) != 2 or (is_square and out[1] is not None)) if is_pair else not is_square:
                raise ValueError(
                    f"{name}[{i}] must be one tensor, or for MXFP8 a pair (rowwise, columnwise), "
                    f"got a {type(out).__name__} for {type(one.weight).__name__}; columnwise codes "
                    "of other formats are built from the rowwise ones"
                )
            for part in as_pair(out):
                if part is not None and (
                    part.dtype != torch.uint8
                    or part.numel() != one.nbytes
                    or not part.is_contiguous()
                    or part.device != self.device
                ):
                    raise ValueError(
                        f"{name}[{i}] must be contiguous uint8 of {one.nbytes} bytes on "
                        f"{self.device}, the codes of elements [{one.span.start}, "
                        f"{one.span.stop}), got {_describe(part)}; slice the flat codes at the "
                        "bytes of these elements"
                    )


def check_lengths(n: int, **lists: Sequence) -> None:
    """Raise ValueError unless all lists have ``n`` entries."""
    for name, given in lists.items():
        if len(given) != n:
            raise ValueError(
                f"{name} must have one entry per weight, {n}, got {len(given)}; pass None, or a "
                "size of 0, for a weight that this rank has no part of"
            )


def check_weights(weights: Sequence[QuantizedTensor], name: str = "weights") -> None:
    """Raise ValueError unless all weights can be cast in shards; ``name`` is for the error."""
    for i, weight in enumerate(weights):
        kind = type(weight).__name__
        if not isinstance(weight, QuantizedTensor):
            raise ValueError(
                f"{name}[{i}] must be an NVFP4, MXFP8, Float8 or Float8Block tensor, got a {kind}; "
                "quantize_model makes such parameters"
            )
        if not weight.quantizer.layout.rows_per_entry:
            raise ValueError(
                f"{name}[{i}] must have square blocks and rowwise data to be cast in shards, got a "
                f"{kind} with {weight.quantizer}: its columnwise codes need whole columns; make it "
                "with two_dimensional=True and rowwise=True"
            )
        if weight.device != weights[0].device:
            raise ValueError(
                f"{name}[{i}] must be on the device of the others, {weights[0].device}, got "
                f"{weight.device}; cast the weights of each device separately"
            )


def _describe(x: Tensor | None) -> str:
    if x is None:
        return "None"
    return (
        f"{type(x).__name__} {tuple(x.shape)} of {x.dtype} with strides {x.stride()} on {x.device}"
    )


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
            (one.amax, [grid for use, grid in one.grids.items() if one.layout.blocks[use][0] > 1])
            for one in spans
        ]

    def part(self, chosen: Sequence[bool]) -> "LocalCast":
        """The cast of some of the tensors, which writes what this one has measured."""
        if all(chosen):
            return self
        part = copy.copy(self)
        part._tensors = [*compress(self._tensors, chosen)]
        part._spans = [*compress(self._spans, chosen)]
        return part

    def measure(self, values: Sequence[Tensor]) -> None:
        super().measure([value.view(-1) for value in values])

    def write(self, values: Sequence[Tensor]) -> None:
        super().write([value.view(-1) for value in values])
        build_columnwise([one for one in self._tensors if one.quantizer.layout.is_square])
        for tensor in self._tensors:
            shared = tensor._shared
            shared.pending, shared.unsettled = None, False
            if shared.first_row is None:
                shared.first_row = 0
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
            found = [_measured(tensors[i], x) for i, x in zip(members, rounded, strict=True)]
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


def _measured(tensor: QuantizedTensor, value: Tensor) -> Tensor:
    amax = torch.zeros(1, dtype=torch.float32, device=value.device)
    if value.numel():
        tensor.quantizer.measure(value.reshape(flat_shape(tuple(value.shape))).contiguous(), amax)
    return amax
