"""The one cast of many tensors: measure, exchange, choose, write.

Tensors are whole, or each rank has the values of a span. Then their scales depend on values of
other ranks, which the ranks exchange after measuring.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.distributed.cast_span import CastSpan, Out, as_pair
from fp4adam.distributed.scale_exchange import (
    AmaxExchange,
    CutStrips,
    Exchanged,
    ShardInfo,
    exchange_strips,
)
from fp4adam.tensors import encoding, rows
from fp4adam.tensors.blocks import Span, flat_shape, round_up
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES
from fp4adam.tensors.swizzle import build_gemm_scales
from fp4adam.tensors.transpose import build_columnwise

if TYPE_CHECKING:
    from fp4adam.distributed.cast_launch import CastLaunches

Exchange = Callable[[Tensor], None]


class PartialCast:
    """Quantizes flat shards of weights in place; all shards together equal the full cast.

    Shard i consists of the elements [starts[i], starts[i] + sizes[i]) of the row-major matrix that
    weights[i] is quantized as. Scales depend on values of other ranks, so there are three steps::

        cast = PartialCast(weights, starts, sizes, dtypes)
        cast.measure(values)
        torch.distributed.all_reduce(cast.amaxes, torch.distributed.ReduceOp.MAX, group)
        cast.write(values)

    Adaptive scales depend on all values of a block, so there is one more step if ``is_adaptive``.
    Before ``cast.write(values)``::

        cast.choose(values)
        torch.distributed.all_reduce(cast.choices, torch.distributed.ReduceOp.MAX, group)

    Once every shard has been written, ``rowwise_data``, scales and amaxes equal those of
    ``weight.quantizer.quantize(values.to(dtype))``, bit for bit. MXFP8 columnwise data are written
    too; for the other formats they are derived from the rowwise data (``build_columnwise``). The
    number of launches does not depend on the number of weights, and nothing waits for the device
    but ``choose``.
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
            block amaxes of all formats but Float8, weight by weight, and marks of the rows of
            blocks that are cut, for adaptive scales. Padding in between stays 0.
        choices: float32, one buffer for all adaptive weights, made by :meth:`choose`: which of two
            scales each block has, then the magnitudes in rows of blocks that are cut. Else None.
        tensor_amaxes: Per weight a view [1] of the buffer; None for formats without a per-tensor
            scale.
        rowwise_amaxes: Per weight a view of the buffer: [rows / 16, cols / 16] (NVFP4),
            [ceil(rows / 128), ceil(cols / 128)] (Float8Block), or [rows, cols / 32] (MXFP8, None
            without rowwise usage); None for Float8.
        columnwise_amaxes: Per weight a view [rows / 32, cols] of the buffer for MXFP8 with
            columnwise usage, else None.

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
        for name, given in (("starts", starts), ("sizes", sizes), ("dtypes", dtypes)):
            if len(given) != len(weights):
                raise ValueError(
                    f"{name} must have one entry per weight, {len(weights)}, got {len(given)}; "
                    "pass a size of 0 for a weight without a shard"
                )
        check_weights(weights)
        self._spans = [
            _make_span(i, *given)
            for i, given in enumerate(zip(weights, starts, sizes, dtypes, strict=True))
        ]
        self._prepare(weights[0].device if weights else torch.device("cpu"))

    def _prepare(self, device: torch.device) -> None:
        self.device = device
        # Operators give the same bits, also for formats of one's own that have no kernels.
        self._uses_kernels = all(one.weight.quantizer.uses_kernels(device) for one in self._spans)
        self._adaptive = [one for one in self._spans if one.is_adaptive]
        self.choices: Tensor | None = None
        # The launches of the last call, what they are for, and what keeps that alive.
        self._known: tuple = ()
        self._launches: tuple = ()
        self._lay_out_amaxes()

    @property
    def is_adaptive(self) -> bool:
        """Whether a weight has adaptive scales, so that :meth:`choose` is needed."""
        return bool(self._adaptive)

    def _lay_out_amaxes(self) -> None:
        of_tensors = [one for one in self._spans if one.weight._amax is not None]
        n, places = len(of_tensors), []
        for one in self._spans:
            for usage in one.layout.blocks if one.layout.scale_type is not None else ():
                shape = one.grid_shape(usage)
                n = round_up(n, 4)
                places.append((one, usage, n, shape))
                n += shape[0] * shape[1]
        marks = []
        for one in self._adaptive:
            marks.append((n, n + one.grid_shape("rowwise")[0]))
            n = marks[-1][1]
        self.amaxes = torch.zeros(n, dtype=torch.float32, device=self.device)
        for i, one in enumerate(of_tensors):
            one.amax = self.amaxes[i : i + 1]
        for one, usage, first, shape in places:
            one.grids[usage] = self.amaxes[first : first + shape[0] * shape[1]].view(shape)
        for one, (first, last) in zip(self._adaptive, marks, strict=True):
            one.cut = self.amaxes[first:last]
        self.tensor_amaxes = [one.amax for one in self._spans]
        self.rowwise_amaxes = [one.grids.get("rowwise") for one in self._spans]
        self.columnwise_amaxes = [one.grids.get("columnwise") for one in self._spans]

    def __call__(
        self,
        values: Sequence[Tensor | None],
        exchange: Exchange | None = None,
        outs: Sequence[Out] | None = None,
    ) -> None:
        """Measure, exchange, choose, exchange and write.

        Args:
            values: As for :meth:`measure`.
            exchange: Replaces ``amaxes`` and ``choices`` by their maximum over all ranks; None if
                all spans are whole.
            outs: As for :meth:`write`.
        """
        self.measure(values)
        if exchange is not None:
            exchange(self.amaxes)
        if self._adaptive:
            self.choose(values)
            if exchange is not None:
                exchange(self.choices)
        self.write(values, outs)

    def measure(self, values: Sequence[Tensor | None]) -> None:
        """Overwrite ``amaxes`` with the amaxes of this rank's shards.

        Args:
            values: Per weight a flat contiguous float32, bfloat16 or float16 tensor of the shard's
                size, or None for an empty shard.

        Raises:
            ValueError: If a value is not as described.
        """
        self.check_values(values)
        self.amaxes.zero_()
        self.choices = None
        for one in self._adaptive:
            for end in one.span[1:] if one.span.numel else ():
                if end % one.row_numel:
                    one.cut[end // one.row_numel] = 1
        if self._uses_kernels:
            return self._launches_for(values, [None] * len(values)).measure()
        for one, value in zip(self._spans, values, strict=True):
            if value is not None:
                encoding.measure_blocks(one.layout, value, one.span, one.dtype, one.grids, one.amax)

    def choose(self, values: Sequence[Tensor | None]) -> None:
        """Compare the two scales of every block of adaptive weights; waits for the device.

        Call it after the reduction of ``amaxes``, then reduce ``choices``.

        Args:
            values: As for :meth:`measure`.

        Raises:
            ValueError: If a value is not as described.
        """
        self.check_values(values)
        if not self._adaptive:
            return
        marks = torch.cat([one.cut for one in self._adaptive]).tolist()
        places: list[tuple[CastSpan, int | None, int, int]] = []
        n = 0
        for one in self._adaptive:
            height, width = one.grid_shape("rowwise")
            places.append((one, None, n, n + height * width))
            n = round_up(places[-1][3], 4)
        for one in self._adaptive:
            height, _ = one.grid_shape("rowwise")
            own, marks = marks[:height], marks[height:]
            for row in (row for row, is_cut in enumerate(own) if is_cut):
                places.append((one, row, n, n + one.row_numel))
                n = places[-1][3]
        self.choices = torch.zeros(n, dtype=torch.float32, device=self.device)
        for one, row, first, last in places:
            if row is None:
                one.choices = self.choices[first:last].view(one.grid_shape("rowwise"))
                one.magnitudes = {}
            else:
                one.magnitudes[row] = self.choices[first:last]
        given = dict(zip(map(id, self._spans), values, strict=True))
        whole = []
        for one in self._adaptive:
            value, row_numel, (_, start, stop) = given[id(one)], one.row_numel, one.span
            if start == stop:
                continue
            for row, magnitudes in one.magnitudes.items():
                first, last = max(start, row * row_numel), min(stop, (row + 1) * row_numel)
                if first < last:
                    part = value[first - start : last - start].detach()
                    part = part.to(one.dtype).float().abs().nan_to_num_(torch.inf, torch.inf)
                    magnitudes[first - row * row_numel : last - row * row_numel] = part
            first, last = -(-start // row_numel) * row_numel, stop // row_numel * row_numel
            if first < last:
                part = value[first - start : last - start]
                span = one.span._replace(start=first, stop=last)
                whole.append((dataclasses.replace(one, span=span), part))
        self._compare(whole)

    def _launches_for(self, values: Sequence[Tensor | None], outs: Sequence[Out]) -> "CastLaunches":
        """The launches on this memory: those of the last call, if it was the same."""
        from fp4adam.distributed.cast_launch import CastLaunches

        self._stream = self._current_stream()
        memory = [None if x is None else (x.data_ptr(), x.dtype) for x in values]
        codes = [[None if x is None else x.data_ptr() for x in as_pair(out)] for out in outs]
        tensors = [one.weight._shared.tensors for one in self._spans]
        choices = [one.choices for one in self._spans]
        known = self._stream, memory, codes, [*map(id, tensors)], [*map(id, choices)]
        if known != self._known:
            self._known = known
            self._launches = CastLaunches(self._spans, values, outs, self.device), tensors, choices
        return self._launches[0]

    @property
    def cut_strips(self) -> list[CutStrips | None]:
        """Per adaptive weight the magnitudes in rows of blocks that are cut; None for others."""
        return [
            CutStrips((one.grid_shape("rowwise")[0], one.row_numel), one.magnitudes)
            if one.is_adaptive
            else None
            for one in self._spans
        ]

    def _compare(self, parts: list[tuple[CastSpan, Tensor]]) -> None:
        """Write the choices of blocks in whole rows of blocks."""
        if not parts:
            return
        if self._uses_kernels:
            from fp4adam.distributed import cast_launch

            return cast_launch.choose(*zip(*parts, strict=True), self.device)
        for one, value in parts:
            grid, amax = one.grids["rowwise"], one.amax
            encoding.choose(
                one.weight.quantizer, value, one.span, one.dtype, grid, amax, one.choices
            )

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
            RuntimeError: If weights have adaptive scales and :meth:`choose` was not called.
        """
        self.check_values(values)
        if self._adaptive and self.choices is None:
            raise RuntimeError(
                "choose must be called before write for weights with adaptive scales, got none "
                "since measure; call it after the reduction of amaxes, then reduce choices"
            )
        outs = [None] * len(self._spans) if outs is None else outs
        self.check_outs(outs)
        for one in self._spans:
            one.weight.flush()  # a later flush would overwrite these values
        self._compare([*chain.from_iterable(one.cut_rows() for one in self._adaptive)])
        if self._uses_kernels:
            self._launches_for(values, outs).write()
        else:
            for one, value, out in zip(self._spans, values, outs, strict=True):
                _write(one, value, out)
            build_gemm_scales([one.weight for one in self._spans])
        weights = [one.weight for one in self._spans]
        versioned = chain.from_iterable(each._shared.tensors.versioned for each in weights)
        self._written = [*versioned]
        torch.autograd.graph.increment_version([*weights, *self._written])

    @property
    def can_be_repeated(self) -> bool:
        """Whether :meth:`repeat` may be called after a :meth:`write` to the weights themselves."""
        return bool(self._launches) and not self._adaptive

    @property
    def is_on_its_stream(self) -> bool:
        """Whether the current stream is that of the last call, where tables were uploaded."""
        return self._stream == self._current_stream()

    def repeat(self, exchange: Exchange | None = None) -> None:
        """Do again what the last call did, with new values in the same memory.

        Only the versions of inner tensors are raised. Nothing is checked. The caller knows that
        memory and layouts are the same, that no writes to the weights are pending, and that the
        current stream is the same.
        """
        launches = self._launches[0]
        self.amaxes.zero_()
        launches.measure()
        if exchange is not None:
            exchange(self.amaxes)
        launches.write()
        torch.autograd.graph.increment_version(self._written)

    def _current_stream(self) -> torch.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def check_values(self, values: Sequence[Tensor | None], name: str = "values") -> None:
        """Raise ValueError unless ``values`` fit the shards; ``name`` is for the error."""
        if len(values) != len(self._spans):
            raise ValueError(
                f"{name} must have one entry per weight, {len(self._spans)}, got {len(values)}; "
                "pass None for a weight without a shard"
            )
        for i, (one, value) in enumerate(zip(self._spans, values, strict=True)):
            size = one.span.numel
            if value is None and not size:
                continue
            wanted = (
                f"{name}[{i}] must be a flat contiguous float32, bfloat16 or float16 tensor of "
                f"{size} elements on {self.device}"
            )
            if value is None:
                raise ValueError(f"{wanted}, got None; pass None for empty shards only")
            if (
                isinstance(value, QuantizedTensor)
                or value.dtype not in HIGH_PRECISION_DTYPES
                or value.dim() != 1
                or len(value) != size
                or not value.is_contiguous()
                or value.device != self.device
            ):
                raise ValueError(
                    f"{wanted}, got {_describe(value)}; pass this shard's slice of the flattened "
                    "values"
                )

    def check_outs(self, outs: Sequence[Out], name: str = "outs") -> None:
        """Raise ValueError unless ``outs`` fit the shards; ``name`` is for the error."""
        if len(outs) != len(self._spans):
            raise ValueError(
                f"{name} must have one entry per weight, {len(self._spans)}, got {len(outs)}; "
                "pass None to write codes to the weight itself"
            )
        for i, (one, out) in enumerate(zip(self._spans, outs, strict=True)):
            if out is None:
                continue
            is_pair, is_square = isinstance(out, tuple | list), one.layout.is_square
            if is_pair and (len(out) != 2 or (is_square and out[1] is not None)):
                raise ValueError(
                    f"{name}[{i}] must be one tensor, or a pair (rowwise, columnwise) for MXFP8, "
                    f"got {len(out)} entries for {type(one.weight).__name__}; columnwise codes "
                    "of other formats are built from the rowwise ones"
                )
            if not is_square and not is_pair:
                raise ValueError(
                    f"{name}[{i}] must be a pair (rowwise, columnwise) for MXFP8, got "
                    f"{type(out).__name__}; both directions are quantized from the values"
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


def check_weights(weights: Sequence[QuantizedTensor], name: str = "weights") -> None:
    """Raise ValueError unless all weights can be cast in shards; ``name`` is for the error."""
    for i, weight in enumerate(weights):
        kind = type(weight).__name__
        if not isinstance(weight, QuantizedTensor):
            raise ValueError(
                f"{name}[{i}] must be an NVFP4, MXFP8, Float8 or Float8Block tensor, got a {kind}; "
                "quantize_model makes such parameters"
            )
        if not weight.quantizer.layout.casts_in_parts:
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


def _make_span(
    i: int, weight: QuantizedTensor, start: int, size: int, dtype: torch.dtype
) -> CastSpan:
    if start < 0 or size < 0 or start + size > weight.numel():
        raise ValueError(
            f"shard {i} must lie inside its weight of {weight.numel()} elements, got "
            f"[{start}, {start + size}); count elements of the flattened weight"
        )
    if dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(
            f"dtypes[{i}] must be float32, bfloat16 or float16, got {dtype}; float32 leaves values "
            "as they are"
        )
    return CastSpan(weight, Span(flat_shape(tuple(weight.shape)), start, start + size), dtype)


def _describe(x: Tensor) -> str:
    return (
        f"{type(x).__name__} {tuple(x.shape)} of {x.dtype} with strides {x.stride()} on {x.device}"
    )


def _write(one: CastSpan, value: Tensor | None, out: Out) -> None:
    """Write all scales of a weight, and the codes of its span, by operators."""
    quantizer, layout, tensors = one.weight.quantizer, one.layout, one.weight._shared.tensors
    if one.amax is not None:
        quantizer.take_amax(tensors, one.amax)
    factors = {}
    for usage in layout.blocks:
        grid = one.grids.get(usage, tensors.amax)
        scales, factors[usage] = quantizer.encode(grid, tensors.amax, one.dtype)
        if layout.scale_type is not None:
            encoding.stored_scales(layout, tensors, usage, one.span.shape).copy_(scales)
    if value is not None:
        targets = one.targets(out)
        encoding.write_codes(quantizer, value, one.span, one.dtype, factors, targets)


class LocalCast(PartialCast):
    """Casts the values of local tensors, which are whole or shards of whole rows.

    Values are contiguous tensors of the shapes of the local tensors. Shards together equal the
    whole tensor's cast, bit for bit.

    Args:
        tensors: Local tensors on one device.
        dtypes: The dtypes that values are rounded to first.

    Attributes:
        exchanged: Per tensor its amax and its block amaxes, for :class:`Exchanged`.
    """

    def __init__(self, tensors: Sequence[QuantizedTensor], dtypes: Sequence[torch.dtype]) -> None:
        self._tensors, self._spans = list(tensors), []
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            n, cols = rows.matrix_shape(tensor)
            shape, first = (rows.stored_rows(tensor), cols), tensor._first_row
            matrix = type(tensor)(shape, tensor.dtype, tensor.quantizer, tensor._shared.tensors)
            span = Span(shape, first * cols, (first + n) * cols)
            self._spans.append(CastSpan(matrix, span, dtype))
        self._prepare(tensors[0].device)
        # Shards consist of whole rows, so only blocks of several rows can be cut.
        self.exchanged = [
            (one.amax, [grid for use, grid in one.grids.items() if one.layout.blocks[use][0] > 1])
            for one in self._spans
        ]

    def part(self, chosen: Sequence[bool]) -> "LocalCast":
        """The cast of some of the tensors, which writes what this one has measured and chosen."""
        if all(chosen):
            return self
        part = copy.copy(self)
        part._tensors = [*compress(self._tensors, chosen)]
        part._spans = [*compress(self._spans, chosen)]
        part._adaptive = [one for one in part._spans if one.is_adaptive]
        return part

    def check_values(self, values: Sequence[Tensor | None], name: str = "values") -> None:
        """Nothing: callers pass values of the tensors' shapes."""

    def measure(self, values: Sequence[Tensor]) -> None:
        super().measure([value.view(-1) for value in values])

    def choose(self, values: Sequence[Tensor]) -> None:
        super().choose([value.view(-1) for value in values])

    def write(self, values: Sequence[Tensor], outs: Sequence[Out] | None = None) -> None:
        super().write([value.view(-1) for value in values], outs)
        for tensor in self._tensors:
            shared = tensor._shared
            shared.pending, shared.unsettled = None, False
            if shared.first_row is None:
                shared.first_row = 0
        build_columnwise([one for one in self._tensors if one.quantizer.layout.is_square])


def cast(
    tensors: Sequence[QuantizedTensor],
    values: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    infos: Sequence[Sequence[ShardInfo]] | None = None,
    scales: Sequence[Hashable] | None = None,
) -> None:
    """Quantize new values of local tensors: measure, exchange, choose, write.

    If some are shards, every rank that has shards of these tensors has to call it for the same
    ones. The number of launches does not depend on the number of tensors, except for those that
    :func:`can_be_cast` excludes.

    Args:
        tensors: Whole tensors, and shards.
        values: Plain tensors of the same shapes, on the same devices.
        dtypes: The dtypes that values are rounded to first.
        infos: The positions of each shard, as by :meth:`ShardInfo.of`; empty for a whole tensor.
        scales: Keys that are equal for tensors that share an amax. ``tensors`` has all of these.
    """
    infos = [()] * len(tensors) if infos is None else infos
    scales = [*range(len(tensors))] if scales is None else scales
    sharing: dict[Hashable, list[int]] = defaultdict(list)
    for i, key in enumerate(scales):
        sharing[key].append(i)
    together: dict[torch.device, list[int]] = defaultdict(list)
    for members in sharing.values():
        if all(infos[i] or can_be_cast(tensors[i]) for i in members):
            together[tensors[members[0]].device] += members
            continue
        rounded = [values[i].to(dtypes[i]) for i in members]
        amax = None
        has_amax = tensors[members[0]].quantizer.layout.tensor_scale is not None
        if len(members) > 1 and has_amax:
            found = [_measured(tensors[i], x) for i, x in zip(members, rounded, strict=True)]
            amax = torch.cat([each.to(found[0].device) for each in found]).amax(0, keepdim=True)
        for i, value in zip(members, rounded, strict=True):
            tensors[i]._write(value, amax=amax)
    for members in together.values():
        one = LocalCast([tensors[i] for i in members], [dtypes[i] for i in members])
        given = [values[i].contiguous() for i in members]
        one.measure(given)
        _exchange(
            one,
            [tensors[i] for i in members],
            [infos[i] for i in members],
            [scales[i] for i in members],
        )
        if one.is_adaptive:
            one.choose(given)
            exchange_strips(
                [
                    (tensors[i], infos[i], strips)
                    for i, strips in zip(members, one.cut_strips, strict=True)
                    if strips is not None
                ]
            )
        one.write(given)
        torch.autograd.graph.increment_version([tensors[i] for i in members])


def can_be_cast(tensor: QuantizedTensor) -> bool:
    """Whether a tensor can be quantized in one launch with others.

    Not with ``two_dimensional=False``, nor a slice or with delayed scaling.
    """
    layout = tensor.quantizer.layout
    is_current = bool(layout.rows_per_entry) and layout.tensor_scale != "delayed"
    return bool(tensor.numel()) and is_current and rows.is_all(tensor)


def _measured(tensor: QuantizedTensor, value: Tensor) -> Tensor:
    amax = torch.zeros(1, dtype=torch.float32, device=value.device)
    if value.numel():
        matrix = value.reshape(flat_shape(tuple(value.shape))).contiguous()
        tensor.quantizer.measure(matrix, amax)
    return amax


def _exchange(
    one: LocalCast,
    tensors: Sequence[QuantizedTensor],
    infos: Sequence[Sequence[ShardInfo]],
    scales: Sequence[Hashable],
) -> None:
    """Exchange amaxes that tensors share with each other and with other ranks."""
    exchanged: dict[tuple[dist.ProcessGroup, torch.device], list[Exchanged]] = defaultdict(list)
    shared: dict[Hashable, list[Tensor]] = defaultdict(list)
    for tensor, own, amaxes, key in zip(tensors, infos, one.exchanged, scales, strict=True):
        for info in own:
            spec = tensor._shared.global_spec
            exchanged[info.group, info.device].append(Exchanged(spec, info, *amaxes, key))
        if not own and amaxes[0] is not None:
            shared[key].append(amaxes[0])
    for peers in shared.values():
        if len(peers) > 1:
            largest = torch.cat(peers).amax(0, keepdim=True)
            torch._foreach_copy_(peers, [largest] * len(peers))
    for (group, device), shards in exchanged.items():
        AmaxExchange(group, device, shards)()
