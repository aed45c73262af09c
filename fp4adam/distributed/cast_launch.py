"""The kernel launches of a cast: kernels, tables and tiles of spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp4adam.kernels import cast
from fp4adam.kernels.launch import tile_lists
from fp4adam.kernels.launch.launch import launch_all
from fp4adam.kernels.launch.schema import CAST
from fp4adam.kernels.launch.tile_lists import Region
from fp4adam.tensors.layout import Layout
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.swizzle import gemm_scale_launches

if TYPE_CHECKING:
    from fp4adam.distributed.cast import CastSpan, Out

ALIGNMENT = 16  # in bytes, of everything that an unmasked tile reads and writes


class _Key(NamedTuple):
    """What spans of one launch have in common; ``value_dtype`` is None where no value is read."""

    quantizer: Quantizer
    value_dtype: torch.dtype | None
    write_dtype: torch.dtype


class CastLaunches:
    """The launches that cast spans with values at fixed addresses; each can be repeated.

    Memory for codes is None for the weight's own memory.
    """

    def __init__(
        self,
        spans: Sequence[CastSpan],
        values: Sequence[Tensor],
        outs: Sequence[Out] | None,
        device: torch.device,
    ) -> None:
        fields = [*map(_fields, spans, values, outs or repeat(None))]
        columns = {name: [each.get(name, 0) for each in fields] for name in CAST}
        self._table = table = tile_lists.table(columns, device)
        self._measures, self._writes = [], []
        for key, chunks in _chunks(spans, device):
            layout = key.quantizer.layout
            self._writes.append(cast.write_scales(table, chunks, layout, key.write_dtype))
        for (quantizer, *dtypes), tiles in _tiles(spans, values, fields, device):
            given = table, tiles, quantizer.layout, *dtypes
            self._measures += cast.write_spans(*given, measures=True)
            self._writes += cast.write_spans(*given, measures=False)
        self._writes += gemm_scale_launches([one.weight for one in spans])
        histories: dict[Quantizer, list[CastSpan]] = defaultdict(list)
        for one in spans:
            if one.layout.tensor_scale == "delayed":
                histories[one.weight.quantizer].append(one)
        self._histories = [
            (quantizer, [one.weight.inner for one in alike], [one.amax for one in alike])
            for quantizer, alike in histories.items()
        ]

    def measure(self) -> None:
        """Write the amaxes of blocks that overlap the spans; all others must be zero before."""
        launch_all(self._table, self._measures)

    def write(self) -> None:
        """Write the scales of all blocks, swizzled ones too, and the codes of the spans."""
        for quantizer, tensors, amaxes in self._histories:
            quantizer.take_amaxes(tensors, amaxes)
        launch_all(self._table, self._writes)


def _fields(one: CastSpan, value: Tensor, out: Out) -> dict[str, int]:
    (rows, cols), start, stop = one.span
    fields = {"start": start, "stop": stop, "rows": rows, "cols": cols}
    fields["value"] = value.data_ptr() - start * value.element_size()
    inner = one.weight.inner.addresses()
    if one.amax is not None:
        fields["tensor_amax"] = one.amax.data_ptr()
        fields["amax"] = inner["amax"]
    for usage, (codes, first_byte) in one.targets(out).items():
        fields[f"{usage}_data"] = codes.data_ptr() - first_byte
        if one.layout.scale_type is not None:
            fields[f"{usage}_amax"] = one.grids[usage].data_ptr()
            fields[f"{usage}_scale"] = inner[f"{usage}_scale"]
    return fields


def _tiles(
    spans: Sequence[CastSpan],
    values: Sequence[Tensor],
    fields: list[dict[str, int]],
    device: torch.device,
) -> list[tuple[_Key, list[Tensor]]]:
    """By key, the tiles that spans fill, and the tiles that their boundaries or edges cut."""
    regions: dict[_Key, tuple[list[Region], list[Region]]] = {}
    for i, (one, value) in enumerate(zip(spans, values, strict=True)):
        if one.span.stop > one.span.start:
            lists = regions.setdefault(_Key(one.weight.quantizer, value.dtype, one.dtype), ([], []))
            for listed, found in zip(lists, _regions(i, one, fields[i]), strict=True):
                listed.extend(found)
    return [
        (key, [tile_lists.tile_list(part, _tile(key.quantizer.layout), device) for part in lists])
        for key, lists in regions.items()
    ]


def _tile(layout: Layout) -> tuple[int, int]:
    """Rows and columns of the tiles of spans."""
    return cast.span_forms(layout)[0][:2]


def _regions(i: int, one: CastSpan, row: dict[str, int]) -> tuple[list[Region], list[Region]]:
    """The regions for unmasked tiles, and the regions for masked tiles."""
    (_, cols), start, stop = one.span
    height, width = _tile(one.layout)
    strip = height * cols
    top, bottom = start // strip * height, -(-stop // strip) * height
    inner_top, inner_bottom = -(-start // strip) * height, stop // strip * height
    inner_right = cols // width * width
    addresses = (row.get(name, 0) for name in ("value", "rowwise_data", "columnwise_data"))
    aligned = not any(n % ALIGNMENT for n in (*addresses, cols))
    if not (aligned and inner_top < inner_bottom and inner_right):
        return [], [(i, top, bottom, 0, cols)]
    return [(i, inner_top, inner_bottom, 0, inner_right)], [
        (i, top, inner_top, 0, cols),
        (i, inner_top, inner_bottom, inner_right, cols),
        (i, inner_bottom, bottom, 0, cols),
    ]


def _chunks(spans: Sequence[CastSpan], device: torch.device) -> list[tuple[_Key, Tensor]]:
    """By key, lists of blocks in chunks of ``cast.SCALES``."""
    regions: dict[_Key, list[Region]] = defaultdict(list)
    for i, one in enumerate(spans):
        if one.layout.tensor_scale == "delayed":
            continue  # its amax is another one than that of the values
        listed = regions[_Key(one.weight.quantizer, None, one.dtype)]
        grids = one.grids or {"rowwise": one.amax}  # which is written alone
        for usage, grid in grids.items():
            columnwise = int(usage == "columnwise")
            listed.append((i, 0, grid.numel(), columnwise, columnwise + 1))
    return [
        (key, tile_lists.tile_list(listed, (cast.SCALES, 1), device))
        for key, listed in regions.items()
    ]
