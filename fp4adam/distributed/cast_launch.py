"""The kernel launches of a cast: kernels, tables and tiles of spans."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.distributed.cast_span import CastSpan, Out
from fp4adam.kernels import partial_cast
from fp4adam.kernels.launch import tile_lists
from fp4adam.kernels.launch.launch import launch_all
from fp4adam.kernels.launch.schema import table_row
from fp4adam.kernels.launch.tile_lists import Region
from fp4adam.kernels.partial_cast import SCALES, TILES
from fp4adam.tensors.layout import ScaleRule
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.swizzle import gemm_scale_launches

ALIGNMENT = 16  # in bytes, of everything that an unmasked tile reads and writes


class _Key(NamedTuple):
    """What spans of one launch have in common; ``value_dtype`` is None where no value is read."""

    format: str
    value_dtype: torch.dtype | None
    write_dtype: torch.dtype
    usages: tuple[str, ...]
    rule: ScaleRule

    @property
    def of_values(self) -> dict[str, Any]:
        directions = {usage: usage in self.usages for usage in ("rowwise", "columnwise")}
        return dict(value_dtype=self.value_dtype, **directions)

    @property
    def of_scales(self) -> dict[str, Any]:
        return dict(format=self.format, write_dtype=self.write_dtype, **self.rule._asdict())


class CastLaunches:
    """The launches that cast spans with values at fixed addresses; each can be repeated.

    Args:
        spans: The spans of weights, on one device.
        values: Per span its values, or None for an empty span.
        outs: Per span the memory for its codes, or None for the weight's own.
        device: The device of all of these.
    """

    def __init__(
        self,
        spans: Sequence[CastSpan],
        values: Sequence[Tensor | None],
        outs: Sequence[Out],
        device: torch.device,
    ) -> None:
        fields = [*map(_fields, spans, values, outs)]
        self._table = table = tile_lists.table([table_row(**each) for each in fields], device)
        self._measures, self._writes = [], []
        for key, chunks in _chunks(spans, device):
            self._writes.append(partial_cast.write_scales(table, chunks, **key.of_scales))
        for key, tiles in _tiles(spans, values, fields, device):
            kind = dict(format=key.format, write_dtype=key.write_dtype)
            self._measures += partial_cast.measure(table, tiles, **kind, **key.of_values)
            self._writes += partial_cast.write_codes(table, tiles, **key.of_scales, **key.of_values)
        self._writes += gemm_scale_launches([one.weight for one in spans])
        histories: dict[Quantizer, list[CastSpan]] = defaultdict(list)
        for one in spans:
            if one.layout.tensor_scale == "delayed":
                histories[one.weight.quantizer].append(one)
        self._histories = [
            (quantizer, [one.weight._shared.tensors for one in alike], [one.amax for one in alike])
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


def _key(one: CastSpan, value_dtype: torch.dtype | None) -> _Key:
    layout = one.layout
    name = one.weight.quantizer.name
    return _Key(name, value_dtype, one.dtype, tuple(layout.blocks), layout.scale_rule)


def _fields(one: CastSpan, value: Tensor | None, out: Out) -> dict[str, int]:
    (rows, cols), start, stop = one.span
    fields = {"start": start, "stop": stop, "rows": rows, "cols": cols}
    if value is not None:
        fields["value"] = value.data_ptr() - start * value.element_size()
    inner = one.weight._shared.tensors.addresses()
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
    values: Sequence[Tensor | None],
    fields: list[dict[str, int]],
    device: torch.device,
) -> list[tuple[_Key, list[Tensor]]]:
    """By key, the tiles that spans fill, and the tiles that their boundaries or edges cut."""
    regions: dict[_Key, tuple[list[Region], list[Region]]] = {}
    for i, (one, value) in enumerate(zip(spans, values, strict=True)):
        if one.span.numel:
            lists = regions.setdefault(_key(one, value.dtype), ([], []))
            for listed, found in zip(lists, _regions(i, one, fields[i]), strict=True):
                listed.extend(found)
    return [
        (key, [tile_lists.tile_list(part, _tile(key.format), device) for part in lists])
        for key, lists in regions.items()
    ]


def _tile(format: str) -> tuple[int, int]:
    tile, _ = TILES[format]
    return tile.rows * tile.loop, tile.cols


def _regions(i: int, one: CastSpan, row: dict[str, int]) -> tuple[list[Region], list[Region]]:
    """The regions for unmasked tiles, and the regions for masked tiles."""
    (_, cols), start, stop = one.span
    height, width = _tile(one.weight.quantizer.name)
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
    """By key, lists of blocks in chunks of SCALES."""
    regions: dict[_Key, list[Region]] = defaultdict(list)
    for i, one in enumerate(spans):
        if one.layout.tensor_scale == "delayed":
            continue  # its amax is another one than that of the values
        listed = regions[_key(one, None)]
        if one.layout.scale_type is None:
            listed.append((i, 0, 1, 0, 1))  # for the amax alone
        for usage, grid in one.grids.items():
            columnwise = int(usage == "columnwise")
            listed.append((i, 0, grid.numel(), columnwise, columnwise + 1))
    return [
        (key, tile_lists.tile_list(listed, (SCALES, 1), device)) for key, listed in regions.items()
    ]
