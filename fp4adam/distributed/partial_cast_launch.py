"""The kernel launches of a partial cast: kernels, tables and tiles of shards."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.distributed.flat_shard import Out, Shard
from fp4adam.kernels import partial_cast
from fp4adam.kernels.launch import tile_lists
from fp4adam.kernels.launch.launch import launch_all
from fp4adam.kernels.launch.tile_lists import Region
from fp4adam.kernels.partial_cast import COLUMNS, SCALES, TILES
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.swizzle import gemm_scale_launches

ALIGNMENT = 16  # in bytes, of everything that an unmasked tile reads and writes


class _Kind(NamedTuple):
    """The properties that shards of one launch have in common."""

    format: str
    value_dtype: torch.dtype | None
    write_dtype: torch.dtype
    rowwise: bool
    columnwise: bool
    force_pow_2_scales: bool
    amax_epsilon: float
    adaptive: str | None
    bound: int

    def options(self, *names: str) -> dict[str, Any]:
        """The named fields, as keyword arguments."""
        return {name: getattr(self, name) for name in names}


_MEASURE = ("format", "value_dtype", "write_dtype", "rowwise", "columnwise")
_SCALES = ("format", "write_dtype", "force_pow_2_scales", "amax_epsilon", "adaptive", "bound")
_CHOICES = ("value_dtype", "write_dtype", "adaptive", "bound")


class CastLaunches:
    """The launches that cast shards with values at fixed addresses; each can be repeated.

    Args:
        shards: The shards, on one device.
        values: Per shard its values, or None for an empty shard.
        outs: Per shard the memory for its codes, or None for the weight's own.
        device: The device of all of these.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        values: Sequence[Tensor | None],
        outs: Sequence[Out],
        device: torch.device,
    ) -> None:
        rows = _table_rows(shards, values, outs)
        self._table = table = tile_lists.table(rows, device)
        tiles = _tiles(shards, values, rows, device)
        self._measures, self._writes = [], []
        for kind, chunks in _chunks(shards, device):
            self._writes.append(partial_cast.write_scales(table, chunks, **kind.options(*_SCALES)))
        for kind, lists in tiles:
            self._measures += partial_cast.measure(table, lists, **kind.options(*_MEASURE))
            self._writes += partial_cast.write_codes(table, lists, **kind._asdict())
        self._writes += gemm_scale_launches([shard.weight for shard in shards])
        histories: dict[Quantizer, list[Shard]] = defaultdict(list)
        for shard in shards:
            if shard.quantizer.layout.tensor_scale == "delayed":
                histories[shard.quantizer].append(shard)
        self._histories = [
            (quantizer, [s.weight._shared.tensors for s in alike], [s.amax for s in alike])
            for quantizer, alike in histories.items()
        ]

    def measure(self) -> None:
        """Write the amaxes of blocks that overlap the shards; all others must be zero before."""
        launch_all(self._table, self._measures)

    def write(self) -> None:
        """Write the scales of all blocks, swizzled ones too, and the codes of the shards."""
        for quantizer, tensors, amaxes in self._histories:
            quantizer.take_amaxes(tensors, amaxes)
        launch_all(self._table, self._writes)


def choose(shards: Sequence[Shard], values: Sequence[Tensor], device: torch.device) -> None:
    """Write the choices of adaptive scales for shards of whole rows of blocks."""
    rows = _table_rows(shards, values, [None] * len(shards))
    table = tile_lists.table(rows, device)
    for kind, tiles in _tiles(shards, values, rows, device):
        launch_all(table, partial_cast.write_choices(table, tiles, **kind.options(*_CHOICES)))


def _kind(shard: Shard, value_dtype: torch.dtype | None) -> _Kind:
    quantizer = shard.quantizer
    return _Kind(
        quantizer.name,
        value_dtype,
        shard.dtype,
        "rowwise" in shard.blocks,
        "columnwise" in shard.blocks,
        **quantizer.layout.scale_rule._asdict(),
    )


def _table_rows(
    shards: Sequence[Shard], values: Sequence[Tensor | None], outs: Sequence[Out]
) -> list[dict[int, int]]:
    return [
        {COLUMNS[name]: field for name, field in _table_row(*given).items()}
        for given in zip(shards, values, outs, strict=True)
    ]


def _table_row(shard: Shard, value: Tensor | None, out: Out) -> dict[str, int]:
    rows, cols = shard.matrix_shape
    fields = {"start": shard.start, "stop": shard.stop, "rows": rows, "cols": cols}
    if value is not None:
        fields["value"] = value.data_ptr() - shard.start * value.element_size()
    if shard.amax is not None:
        fields["tensor_amax"] = shard.amax.data_ptr()
        fields["amax"] = shard.weight._amax.data_ptr()
    if shard.choices is not None:
        fields["choices"] = shard.choices.data_ptr()
    for usage, (codes, first_byte) in shard.targets(out).items():
        fields[f"{usage}_data"] = codes.data_ptr() - first_byte
        if shard.quantizer.layout.scale_type is not None:
            fields[f"{usage}_amax"] = shard.grids[usage].data_ptr()
            fields[f"{usage}_scale"] = shard.scale_inv(usage).data_ptr()
    return fields


def _tiles(
    shards: Sequence[Shard],
    values: Sequence[Tensor | None],
    rows: list[dict[int, int]],
    device: torch.device,
) -> list[tuple[_Kind, list[Tensor]]]:
    """By kind, the tiles that shards fill, and the tiles that shard boundaries or edges cut."""
    regions: dict[_Kind, tuple[list[Region], list[Region]]] = {}
    for i, (shard, value) in enumerate(zip(shards, values, strict=True)):
        if shard.stop > shard.start:
            lists = regions.setdefault(_kind(shard, value.dtype), ([], []))
            for listed, found in zip(lists, _regions(i, shard, rows[i]), strict=True):
                listed.extend(found)
    return [
        (kind, [tile_lists.tile_list(part, _tile(kind.format), device) for part in lists])
        for kind, lists in regions.items()
    ]


def _tile(format: str) -> tuple[int, int]:
    tile, _ = TILES[format]
    return tile.rows * tile.loop, tile.cols


def _regions(i: int, shard: Shard, row: dict[int, int]) -> tuple[list[Region], list[Region]]:
    """The regions for unmasked tiles, and the regions for masked tiles."""
    _, cols = shard.matrix_shape
    height, width = _tile(shard.quantizer.name)
    strip = height * cols
    top, bottom = shard.start // strip * height, -(-shard.stop // strip) * height
    inner_top, inner_bottom = -(-shard.start // strip) * height, shard.stop // strip * height
    inner_right = cols // width * width
    addresses = (row.get(COLUMNS[name], 0) for name in ("value", "rowwise_data", "columnwise_data"))
    aligned = not any(n % ALIGNMENT for n in (*addresses, cols))
    if not (aligned and inner_top < inner_bottom and inner_right):
        return [], [(i, top, bottom, 0, cols)]
    return [(i, inner_top, inner_bottom, 0, inner_right)], [
        (i, top, inner_top, 0, cols),
        (i, inner_top, inner_bottom, inner_right, cols),
        (i, inner_bottom, bottom, 0, cols),
    ]


def _chunks(shards: Sequence[Shard], device: torch.device) -> list[tuple[_Kind, Tensor]]:
    """By kind, lists of blocks in chunks of SCALES."""
    regions: dict[_Kind, list[Region]] = {}
    for i, shard in enumerate(shards):
        if shard.quantizer.layout.tensor_scale == "delayed":
            continue  # its amax is another one than that of the values
        listed = regions.setdefault(_kind(shard, None), [])
        if shard.quantizer.layout.scale_type is None:
            listed.append((i, 0, 1, 0, 1))  # for the amax alone
            continue
        for usage, grid in shard.grids.items():
            columnwise = int(usage == "columnwise")
            listed.append((i, 0, grid.numel(), columnwise, columnwise + 1))
    return [
        (kind, tile_lists.tile_list(listed, (SCALES, 1), device))
        for kind, listed in regions.items()
    ]
