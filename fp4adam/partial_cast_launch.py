"""The launches of a partial cast: which kernels, on which tiles of which shards."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4adam.device_tables import TABLE_WIDTH, upload
from fp4adam.kernels import partial_cast
from fp4adam.kernels.partial_cast import COLUMNS, SCALES, TILES
from fp4adam.partial_cast import Out, Shard
from fp4adam.tile_lists import Region, tile_list

ALIGNMENT = 16  # bytes, of all that a tile without masks reads and writes


class _Kind(NamedTuple):
    """What must be equal among shards that share a launch."""

    format: str
    value_dtype: torch.dtype | None
    write_dtype: torch.dtype
    rowwise: bool
    columnwise: bool
    force_pow_2_scales: bool
    amax_epsilon: float

    def options(self, *names: str) -> dict:
        """Some of them by name."""
        return {name: getattr(self, name) for name in names}


_MEASURE = ("format", "value_dtype", "write_dtype", "rowwise", "columnwise")
_SCALES = ("format", "write_dtype", "force_pow_2_scales", "amax_epsilon")


class PartialCastLaunch:
    """Measures and writes shards of one device with a number of launches that is that of kinds."""

    def __init__(self, shards: list[Shard], device: torch.device) -> None:
        self._shards = shards
        self._device = device
        self._rows: list[list[int]] = []
        self._table = torch.empty(len(shards), TABLE_WIDTH, dtype=torch.int64, device=device)

    def measure(self, values: Sequence[Tensor | None]) -> None:
        """Write the amaxes of the blocks that shards have elements of; others must be zero."""
        self._update(values, [None] * len(values))
        for kind, tiles in self._tiles(values):
            partial_cast.measure(self._table, tiles, **kind.options(*_MEASURE))

    def write(self, values: Sequence[Tensor | None], outs: Sequence[Out]) -> None:
        """Write scales of all blocks, and the codes of shards."""
        self._update(values, outs)
        for kind, chunks in self._chunks():
            partial_cast.write_scales(self._table, chunks, **kind.options(*_SCALES))
        for kind, tiles in self._tiles(values):
            partial_cast.write_codes(self._table, tiles, **kind._asdict())

    def _update(self, values: Sequence[Tensor | None], outs: Sequence[Out]) -> None:
        """Bring the table up to date with where everything is now."""
        rows = [
            _table_row(shard, value, out)
            for shard, value, out in zip(self._shards, values, outs, strict=True)
        ]
        if rows != self._rows:
            upload(torch.tensor(rows, dtype=torch.int64), self._table)
            self._rows = rows

    def _tiles(self, values: Sequence[Tensor | None]) -> list[tuple[_Kind, list[Tensor]]]:
        """Tiles by kind: those that shards fill, and those that they cut."""
        regions: dict[_Kind, tuple[list[Region], list[Region]]] = {}
        for i, (shard, value) in enumerate(zip(self._shards, values, strict=True)):
            if shard.stop > shard.start:
                lists = regions.setdefault(_kind(shard, value.dtype), ([], []))
                for listed, found in zip(lists, _regions(i, shard, self._rows[i]), strict=True):
                    listed.extend(found)
        return [
            (kind, [tile_list(listed, _tile(kind.format), self._device) for listed in lists])
            for kind, lists in regions.items()
        ]

    def _chunks(self) -> list[tuple[_Kind, Tensor]]:
        """Blocks by kind, SCALES of them at a time."""
        regions: dict[_Kind, list[Region]] = {}
        for i, shard in enumerate(self._shards):
            listed = regions.setdefault(_kind(shard, None), [])
            for usage, grid in shard.grids.items():
                columnwise = int(usage == "columnwise")
                listed.append((i, 0, grid.numel(), columnwise, columnwise + 1))
        return [
            (kind, tile_list(listed, (SCALES, 1), self._device)) for kind, listed in regions.items()
        ]


def _tile(format: str) -> tuple[int, int]:
    tile = TILES[format]
    return tile.rows * tile.loop, tile.cols


def _kind(shard: Shard, value_dtype: torch.dtype | None) -> _Kind:
    quantizer = shard.weight.quantizer
    return _Kind(
        shard.format.name,
        value_dtype,
        shard.dtype,
        "rowwise" in shard.blocks,
        "columnwise" in shard.blocks,
        getattr(quantizer, "force_pow_2_scales", False),
        getattr(quantizer, "amax_epsilon", 0.0),
    )


def _table_row(shard: Shard, value: Tensor | None, out: Out) -> list[int]:
    rows, cols = shard.matrix_shape
    fields = {"start": shard.start, "stop": shard.stop, "rows": rows, "cols": cols}
    if value is not None:
        fields["value"] = value.data_ptr() - shard.start * value.element_size()
    if shard.amax is not None:
        fields["tensor_amax"] = shard.amax.data_ptr()
        fields["amax"] = shard.weight._amax.data_ptr()
    for usage, (codes, first_byte) in shard.targets(out).items():
        fields[f"{usage}_data"] = codes.data_ptr() - first_byte
        fields[f"{usage}_amax"] = shard.grids[usage].data_ptr()
        fields[f"{usage}_scale"] = shard.scale_inv(usage).data_ptr()
    row = [0] * TABLE_WIDTH
    for name, field in fields.items():
        row[COLUMNS[name]] = field
    return row


def _regions(i: int, shard: Shard, row: list[int]) -> tuple[list[Region], list[Region]]:
    """Regions that tiles fill without masks, and those that they do not."""
    rows, cols = shard.matrix_shape
    height, width = _tile(shard.format.name)
    top = shard.start // cols // height * height
    bottom = -(-shard.stop // (cols * height)) * height
    inner_top = -(-shard.start // (cols * height)) * height
    inner_bottom = shard.stop // (cols * height) * height
    inner_right = cols // width * width
    addresses = (row[COLUMNS[name]] for name in ("value", "rowwise_data", "columnwise_data"))
    aligned = not any(address % ALIGNMENT for address in (*addresses, cols))
    if not (aligned and inner_top < inner_bottom and inner_right):
        return [], [(i, top, bottom, 0, cols)]
    return [(i, inner_top, inner_bottom, 0, inner_right)], [
        (i, top, inner_top, 0, cols),
        (i, inner_top, inner_bottom, inner_right, cols),
        (i, inner_bottom, bottom, 0, cols),
    ]
