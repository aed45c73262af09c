"""Quantization of flat shards of weights, when each rank has only a part of the values."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4adam.distributed.flat_shard import Out, Shard, as_pair
from fp4adam.formats import minifloat
from fp4adam.tensors import backend
from fp4adam.tensors.blocks import blocks_of, in_blocks, round_up, times_factors
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES
from fp4adam.tensors.swizzle import build_gemm_scales

if TYPE_CHECKING:
    from fp4adam.distributed.partial_cast_launch import CastLaunches


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
        self._shards = [
            _make_shard(i, *given)
            for i, given in enumerate(zip(weights, starts, sizes, dtypes, strict=True))
        ]
        self.device = weights[0].device if weights else torch.device("cpu")
        self._adaptive = [shard for shard in self._shards if shard.is_adaptive]
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
        of_tensors = [shard for shard in self._shards if shard.weight._amax is not None]
        n = len(of_tensors)
        spans = []
        for shard in self._shards:
            for usage in shard.blocks if shard.quantizer.layout.scale_type is not None else ():
                shape = shard.grid_shape(usage)
                n = round_up(n, 4)
                spans.append((shard, usage, n, shape))
                n += shape[0] * shape[1]
        marks = []
        for shard in self._adaptive:
            marks.append((n, n + shard.grid_shape("rowwise")[0]))
            n = marks[-1][1]
        self.amaxes = torch.zeros(n, dtype=torch.float32, device=self.device)
        for i, shard in enumerate(of_tensors):
            shard.amax = self.amaxes[i : i + 1]
        for shard, usage, first, shape in spans:
            shard.grids[usage] = self.amaxes[first : first + shape[0] * shape[1]].view(shape)
        for shard, (first, last) in zip(self._adaptive, marks, strict=True):
            shard.cut = self.amaxes[first:last]
        self.tensor_amaxes = [shard.amax for shard in self._shards]
        self.rowwise_amaxes = [shard.grids.get("rowwise") for shard in self._shards]
        self.columnwise_amaxes = [shard.grids.get("columnwise") for shard in self._shards]

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
        for shard in self._adaptive:
            for end in (shard.start, shard.stop) if shard.stop > shard.start else ():
                if end % shard.strip_numel:
                    shard.cut[end // shard.strip_numel] = 1
        if backend.uses_kernels(self.device):
            return self._launches_for(values, [None] * len(values)).measure()
        for shard, value in zip(self._shards, values, strict=True):
            _measure(shard, value)

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
        marks = torch.cat([shard.cut for shard in self._adaptive]).tolist()
        spans: list[tuple[Shard, int | None, int, int]] = []
        n = 0
        for shard in self._adaptive:
            rows, cols = shard.grid_shape("rowwise")
            spans.append((shard, None, n, n + rows * cols))
            n = round_up(spans[-1][3], 4)
        for shard in self._adaptive:
            rows, _ = shard.grid_shape("rowwise")
            own, marks = marks[:rows], marks[rows:]
            for row in (row for row, is_cut in enumerate(own) if is_cut):
                spans.append((shard, row, n, n + shard.strip_numel))
                n = spans[-1][3]
        self.choices = torch.zeros(n, dtype=torch.float32, device=self.device)
        for shard, row, first, last in spans:
            if row is None:
                shard.choices = self.choices[first:last].view(shard.grid_shape("rowwise"))
                shard.strips = {}
            else:
                shard.strips[row] = self.choices[first:last]
        given = dict(zip(map(id, self._shards), values, strict=True))
        whole = []
        for shard in self._adaptive:
            value, strip = given[id(shard)], shard.strip_numel
            if shard.stop == shard.start:
                continue
            for row, magnitudes in shard.strips.items():
                first, last = max(shard.start, row * strip), min(shard.stop, (row + 1) * strip)
                if first < last:
                    part = value[first - shard.start : last - shard.start].detach()
                    part = part.to(shard.dtype).float().abs().nan_to_num_(torch.inf, torch.inf)
                    magnitudes[first - row * strip : last - row * strip] = part
            first, last = -(-shard.start // strip) * strip, shard.stop // strip * strip
            if first < last:
                part = value[first - shard.start : last - shard.start]
                whole.append((dataclasses.replace(shard, start=first, stop=last), part))
        self._compare(whole)

    def _launches_for(self, values: Sequence[Tensor | None], outs: Sequence[Out]) -> "CastLaunches":
        """The launches on this memory: those of the last call, if it was the same."""
        from fp4adam.distributed.partial_cast_launch import CastLaunches

        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        memory = [None if x is None else (x.data_ptr(), x.dtype) for x in values]
        codes = [[None if x is None else x.data_ptr() for x in as_pair(out)] for out in outs]
        tensors = [shard.weight._shared.tensors for shard in self._shards]
        choices = [shard.choices for shard in self._shards]
        known = stream, memory, codes, [*map(id, tensors)], [*map(id, choices)]
        if known != self._known:
            self._known = known
            self._launches = CastLaunches(self._shards, values, outs, self.device), tensors, choices
        return self._launches[0]

    @property
    def cut_strips(self) -> list[tuple[tuple[int, int], dict[int, Tensor]] | None]:
        """Per adaptive weight the number of its rows of blocks and of the elements in each, and by
        row the magnitudes in those that are cut; None for other weights.
        """
        return [
            ((shard.grid_shape("rowwise")[0], shard.strip_numel), shard.strips)
            if shard.is_adaptive
            else None
            for shard in self._shards
        ]

    def _compare(self, parts: list[tuple[Shard, Tensor]]) -> None:
        """Write the choices of blocks in whole rows of blocks."""
        if not parts:
            return
        shards, values = zip(*parts, strict=True)
        if backend.uses_kernels(self.device):
            from fp4adam.distributed import partial_cast_launch

            return partial_cast_launch.choose(shards, values, self.device)
        for shard, value in parts:
            _choose(shard, value)

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
        outs = [None] * len(self._shards) if outs is None else outs
        self.check_outs(outs)
        for shard in self._shards:
            shard.weight.flush()  # a later flush would overwrite these values
        self._compare([strip for shard in self._adaptive for strip in _cut_strips(shard)])
        if backend.uses_kernels(self.device):
            self._launches_for(values, outs).write()
        else:
            for shard, value, out in zip(self._shards, values, outs, strict=True):
                _write_scales(shard)
                _write_codes(shard, value, shard.targets(out))
            build_gemm_scales([shard.weight for shard in self._shards])
        self._mark_written()

    @property
    def can_be_repeated(self) -> bool:
        """Whether :meth:`repeat` may be called after a :meth:`write` to the weights themselves."""
        return bool(self._launches) and not self._adaptive

    def repeat(self) -> None:
        """Measure and write again what the last calls did, with new values in the same memory.

        Nothing is checked. The caller knows that memory and layouts are the same, that no writes to
        the weights are pending, and that the current stream is the same.
        """
        launches = self._launches[0]
        self.amaxes.zero_()
        launches.measure()
        launches.write()
        self._mark_written()

    def _mark_written(self) -> None:
        tensors = [shard.weight._shared.tensors for shard in self._shards]
        written = chain.from_iterable(each.versioned for each in tensors)
        weights = [shard.weight for shard in self._shards]
        torch.autograd.graph.increment_version([*weights, *written])

    def check_values(self, values: Sequence[Tensor | None], name: str = "values") -> None:
        """Raise ValueError unless ``values`` fit the shards; ``name`` is for the error."""
        if len(values) != len(self._shards):
            raise ValueError(
                f"{name} must have one entry per weight, {len(self._shards)}, got {len(values)}; "
                "pass None for a weight without a shard"
            )
        for i, (shard, value) in enumerate(zip(self._shards, values, strict=True)):
            size = shard.stop - shard.start
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
        if len(outs) != len(self._shards):
            raise ValueError(
                f"{name} must have one entry per weight, {len(self._shards)}, got {len(outs)}; "
                "pass None to write codes to the weight itself"
            )
        for i, (shard, out) in enumerate(zip(self._shards, outs, strict=True)):
            if out is None:
                continue
            is_pair = isinstance(out, tuple | list)
            if is_pair and (
                len(out) != 2 or (shard.quantizer.layout.is_square and out[1] is not None)
            ):
                raise ValueError(
                    f"{name}[{i}] must be one tensor, or a pair (rowwise, columnwise) for MXFP8, "
                    f"got {len(out)} entries for {type(shard.weight).__name__}; columnwise codes "
                    "of other formats are built from the rowwise ones"
                )
            if not shard.quantizer.layout.is_square and not is_pair:
                raise ValueError(
                    f"{name}[{i}] must be a pair (rowwise, columnwise) for MXFP8, got "
                    f"{type(out).__name__}; both directions are quantized from the values"
                )
            for part in as_pair(out):
                if part is not None and (
                    part.dtype != torch.uint8
                    or part.numel() != shard.nbytes
                    or not part.is_contiguous()
                    or part.device != self.device
                ):
                    raise ValueError(
                        f"{name}[{i}] must be contiguous uint8 of {shard.nbytes} bytes on "
                        f"{self.device}, the codes of elements [{shard.start}, {shard.stop}), got "
                        f"{_describe(part)}; slice the flat codes at the bytes of these elements"
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


def _make_shard(
    i: int, weight: QuantizedTensor, start: int, size: int, dtype: torch.dtype
) -> Shard:
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
    return Shard(weight, start, start + size, dtype)


def _describe(x: Tensor) -> str:
    return (
        f"{type(x).__name__} {tuple(x.shape)} of {x.dtype} with strides {x.stride()} on {x.device}"
    )


def _strips(shard: Shard, value: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Strips of whole block rows that contain the shard, float32; zero outside of the shard."""
    if shard.start == shard.stop:
        return
    rows, cols = shard.matrix_shape
    block = shard.quantizer.layout.block
    height = max(1, backend.cpu_chunk_numel() // (block * cols)) * block
    first = shard.start // cols // block * block
    last = min(round_up(-(-shard.stop // cols), block), rows)
    for top in range(first, last, height):
        span = slice(top, min(top + height, last))
        begin, end = max(shard.start, top * cols), min(shard.stop, span.stop * cols)
        x = value[begin - shard.start : end - shard.start].detach().to(shard.dtype).float()
        if len(x) < (span.stop - top) * cols:
            padded = x.new_zeros((span.stop - top) * cols)
            padded[begin - top * cols : end - top * cols] = x
            x = padded
        yield span, x.view(-1, cols)


def _measure(shard: Shard, value: Tensor | None) -> None:
    for rows, strip in _strips(shard, value):
        for usage, grid in shard.grids.items():
            block = shard.blocks[usage]
            grid[in_blocks(rows, block[0])] = minifloat.amax(blocks_of(strip, block), (1, 3))
        if shard.amax is not None:
            torch.maximum(shard.amax, minifloat.amax(strip), out=shard.amax)


def _cut_strips(shard: Shard) -> Iterator[tuple[Shard, Tensor]]:
    """The rows of blocks that boundaries cut, as shards of their own, with their magnitudes."""
    for row, magnitudes in shard.strips.items():
        start = row * shard.strip_numel
        stop = start + shard.strip_numel
        yield dataclasses.replace(shard, start=start, stop=stop, dtype=torch.float32), magnitudes


def _choose(shard: Shard, value: Tensor) -> None:
    """Write the choices of blocks in a shard of whole rows of blocks."""
    block = shard.blocks["rowwise"]
    for rows, strip in _strips(shard, value):
        own = in_blocks(rows, block[0])
        blocks = blocks_of(strip, block)
        shard.choices[own] = shard.quantizer.maps_to_four(
            blocks, shard.grids["rowwise"][own], shard.amax
        ).float()


def _scales(shard: Shard, usage: str, rows: slice) -> tuple[Tensor, Tensor]:
    """The stored scales of some rows of blocks, and the factors that map values to codes."""
    # Without scales of blocks, that of the tensor is for all of them.
    grids = shard.grids or {usage: shard.weight._amax.expand(shard.grid_shape(usage))}
    grid = grids[usage][rows]
    choices = () if shard.choices is None else (shard.choices[rows] > 0,)
    return shard.quantizer.scales_of_blocks(grid, shard.weight._amax, shard.dtype, *choices)


def _write_scales(shard: Shard) -> None:
    if shard.amax is not None:
        shard.quantizer.take_amax(shard.weight._shared.tensors, shard.amax)
    if shard.quantizer.layout.scale_type is None:
        return
    for usage, grid in shard.grids.items():
        stored = shard.scale_inv(usage)
        stored[: grid.shape[0], : grid.shape[1]] = _scales(shard, usage, slice(None))[0]


def _write_codes(
    shard: Shard, value: Tensor | None, targets: dict[str, tuple[Tensor, int]]
) -> None:
    cols = shard.matrix_shape[1]
    for rows, strip in _strips(shard, value):
        top = rows.start * cols
        start, stop = max(shard.start, top), min(shard.stop, rows.stop * cols)
        for usage, block in shard.blocks.items():
            _, factor = _scales(shard, usage, in_blocks(rows, block[0]))
            scaled = times_factors(blocks_of(strip, block), factor)
            target, first_byte = targets[usage]
            codes = shard.quantizer.codes(scaled).flatten(2).flatten(0, 1)
            codes = codes[: len(strip), :cols].reshape(-1)[start - top : stop - top]
            if shard.quantizer.layout.code_bits == 4:
                _store_nibbles(codes, target, start - 2 * first_byte)
            else:
                target[start - first_byte : stop - first_byte] = codes


def _store_nibbles(codes: Tensor, target: Tensor, first: int) -> None:
    """Overwrite nibbles ``first``, ``first + 1``, ... of ``target``, low nibbles first."""
    if first % 2 and len(codes):
        target[first // 2] = (target[first // 2] & 0x0F) | codes[0] << 4
        codes, first = codes[1:], first + 1
    pairs, byte = len(codes) // 2, first // 2
    # Cloned for alignment, because pack_e2m1 reads pairs as 16-bit words.
    target[byte : byte + pairs] = minifloat.pack_e2m1(codes[: 2 * pairs].clone())
    if len(codes) % 2:
        target[byte + pairs] = (target[byte + pairs] & 0xF0) | codes[-1]
