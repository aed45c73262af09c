"""The tables behind the fused launches: which tensors are stepped, where, in which tiles."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.adam import Scalars
from fp4adam.float8_block import Float8BlockQuantizer
from fp4adam.mxfp8 import MXFP8Quantizer
from fp4adam.nvfp4 import NVFP4Quantizer
from fp4adam.quantized_tensor import QuantizedTensor
from fp4adam.quantizer import Quantizer, flat_shape
from fp4adam.update_bound import largest_update, measured_ratio, next_ratio

if TYPE_CHECKING:
    from fp4adam.fused_adam import Update

# Vector accesses of the kernels; torch's allocators give more, views into flat buffers may not.
ALIGNMENT = 16


class Kind(NamedTuple):
    """What must be equal among tensors that share a launch.

    ``quantizer`` is None for plain parameters. ``write_dtype`` is the dtype that the updated value
    is rounded to on its way to the parameter, None if nothing is written beside the value.
    """

    quantizer: Quantizer | None
    grad_dtype: torch.dtype
    value_dtype: torch.dtype
    write_dtype: torch.dtype | None
    adam_w_mode: bool
    amsgrad: bool


class Launch:
    """The device tables of one kind of plain tensors; each is uploaded only when it changes.

    Subclasses do the same for the quantized formats.
    """

    def __init__(self, device: torch.device, kind: Kind) -> None:
        self.device = device
        self.kind = kind
        self._shapes: list[tuple[int, int]] = []
        self._uploaded: dict[str, tuple[list, Tensor]] = {}

    def run(self, updates: list["Update"], grad_scale: Tensor) -> None:
        """Launch the kernels on these tensors."""
        shapes = [self.table_shape(update) for update in updates]
        if shapes != self._shapes:
            self.plan_tiles(shapes)
            self._shapes = shapes
        rows = [[*self.addresses(u), *s] for u, s in zip(updates, shapes, strict=True)]
        table = self.upload("table", rows, torch.int64)
        scalars = self.upload("scalars", [list(u.scalars) for u in updates], torch.float32)
        self.launch(updates, table, scalars, grad_scale)

    def upload(self, name: str, rows: list, dtype: torch.dtype) -> Tensor:
        """``rows`` on the device, copied only if they differ from those of the last step."""
        known = self._uploaded.get(name)
        if known is not None and known[0] == rows:
            return known[1]
        # The allocator of pinned memory keeps it until the copy has been made.
        source = torch.tensor(rows, dtype=dtype, pin_memory=self.device.type == "cuda")
        if known is None or known[1].shape != source.shape:
            known = rows, torch.empty_like(source, device=self.device)
        self._uploaded[name] = rows, known[1].copy_(source, non_blocking=True)
        return known[1]

    def step_options(self) -> dict[str, Any]:
        """What every kernel takes of the kind."""
        kind = self.kind
        return dict(grad_dtype=kind.grad_dtype, adam_w_mode=kind.adam_w_mode, amsgrad=kind.amsgrad)

    def addresses(self, update: "Update") -> list[int]:
        """One row of the table of tensors, without the sizes; what is absent is 0."""
        states = (update.value, update.exp_avg, update.exp_avg_sq, update.max_exp_avg_sq)
        tensors = (update.grad, *states, *self.written_tensors(update.param))
        return [0 if t is None else t.data_ptr() for t in tensors]

    def written_tensors(self, param: Tensor) -> tuple[Tensor | None, ...]:
        """Where the updated value is written beside the value itself, in the table's order."""
        return (None if self.kind.write_dtype is None else param, None, None, None, None)

    def table_shape(self, update: "Update") -> tuple[int, int]:
        """Rows and columns in the table; plain tensors are read flat."""
        return update.value.numel(), 1

    def plan_tiles(self, shapes: list[tuple[int, int]]) -> None:
        """Make the tile lists for tensors of these shapes."""
        from fp4adam.kernels import adam

        self._tiles = adam.flat_tiles([numel for numel, _ in shapes]).to(self.device)

    def launch(
        self, updates: list["Update"], table: Tensor, scalars: Tensor, grad_scale: Tensor
    ) -> None:
        """Call the kernels."""
        from fp4adam.kernels import adam

        kind = self.kind
        dtypes = dict(value_dtype=kind.value_dtype, param_dtype=kind.write_dtype)
        adam.adam_step(table, scalars, self._tiles, grad_scale, **dtypes, **self.step_options())


class QuantizedLaunch(Launch):
    """What the formats share: matrices, and storage that is written in place."""

    def table_shape(self, update: "Update") -> tuple[int, int]:
        return flat_shape(tuple(update.param.shape))

    def written_tensors(self, param: Tensor) -> tuple[Tensor | None, ...]:
        square, rowwise = param._block_scale_inv, param._rowwise_scale_inv
        scale = rowwise if square is None else square
        data = (param._rowwise_data, scale, param._columnwise_data, param._columnwise_scale_inv)
        return (*data, param._amax)

    def step_options(self) -> dict[str, Any]:
        quantizer = self.kind.quantizer
        usage = dict(rowwise=quantizer.rowwise, columnwise=quantizer.columnwise)
        return super().step_options() | usage | dict(write_dtype=self.kind.write_dtype)


class MXFP8Launch(QuantizedLaunch):
    """One pass over MXFP8 tensors."""

    def plan_tiles(self, shapes: list[tuple[int, int]]) -> None:
        from fp4adam.kernels import mxfp8, tensor_table

        lists = tensor_table.cover(shapes, mxfp8.STEP_TILE, mxfp8.EDGE_TILE)
        self._tiles = tuple(tiles.to(self.device) for tiles in lists)

    def launch(
        self, updates: list["Update"], table: Tensor, scalars: Tensor, grad_scale: Tensor
    ) -> None:
        from fp4adam.kernels import mxfp8

        mxfp8.adam_step(table, scalars, self._tiles, grad_scale, **self.step_options())


class Float8BlockLaunch(QuantizedLaunch):
    """One pass over Float8Block tensors."""

    def plan_tiles(self, shapes: list[tuple[int, int]]) -> None:
        from fp4adam.kernels import float8_block

        self._tiles = tuple(tiles.to(self.device) for tiles in float8_block.step_tiles(shapes))

    def launch(
        self, updates: list["Update"], table: Tensor, scalars: Tensor, grad_scale: Tensor
    ) -> None:
        from fp4adam.kernels import float8_block

        names = ("two_dimensional", "force_pow_2_scales", "amax_epsilon")
        scaling = {name: getattr(self.kind.quantizer, name) for name in names}
        options = self.step_options() | scaling
        float8_block.adam_step(table, scalars, self._tiles, grad_scale, **options)


class History(NamedTuple):
    """What the last launch left of one tensor, to tell whether anything else has touched it since.

    ``ratio`` bounds |exp_avg| / sqrt(exp_avg_sq), see ``update_bound``.
    """

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    step: float
    ratio: float

    def leads_to(self, update: "Update") -> bool:
        """Whether ``update`` continues from exactly that state."""
        return (
            self.step + 1 == update.step
            and all(a is b for a, b in zip(self.tensors, _state(update), strict=True))
            and self.versions == tuple(t._version for t in self.tensors)
        )


class NVFP4Launch(QuantizedLaunch):
    """A look at the tiles that can hold the new amaxes, then one pass over NVFP4 tensors."""

    def plan_tiles(self, shapes: list[tuple[int, int]]) -> None:
        from fp4adam.kernels import nvfp4

        tiles, self._n_whole = nvfp4.step_tiles(shapes, self.kind.quantizer.two_dimensional)
        self._tiles = tiles.to(self.device)
        self._tile_amaxes = torch.zeros(len(tiles), device=self.device)
        self._amaxes = torch.zeros(2, len(shapes), device=self.device).unbind()
        self._history: list[History | None] = [None] * len(shapes)

    def launch(
        self, updates: list["Update"], table: Tensor, scalars: Tensor, grad_scale: Tensor
    ) -> None:
        from fp4adam.kernels import amax_preview, nvfp4

        bounds = self.upload("bounds", self._advance(updates), torch.float32)
        old_amaxes, amaxes = self._amaxes
        options = self.step_options()
        in_step_only = {name: options.pop(name) for name in ("rowwise", "columnwise")}
        in_step_only["two_dimensional"] = self.kind.quantizer.two_dimensional
        shared = (table, scalars, self._tiles)
        amax_preview.preview_amax(
            *shared, grad_scale, bounds, self._tile_amaxes, old_amaxes, amaxes, **options
        )
        nvfp4.adam_step(
            *shared,
            self._n_whole,
            grad_scale,
            amaxes,
            old_amaxes,
            self._tile_amaxes,
            **options,
            **in_step_only,
        )
        self._amaxes = amaxes, old_amaxes

    def _advance(self, updates: list["Update"]) -> list[list[float]]:
        """The largest change of a weight and its decay per tensor; notes the new history."""
        bounds = []
        ratios: dict[tuple[float, Scalars], float] = {}
        for i, update in enumerate(updates):
            history, s = self._history[i], update.scalars
            known = history is not None and history.leads_to(update)
            before = history.ratio if known else measured_ratio(update.exp_avg, update.exp_avg_sq)
            if (before, s) not in ratios:
                ratios[before, s] = next_ratio(before, s)
            ratio = ratios[before, s]
            state = _state(update)
            versions = tuple(t._version for t in state)
            self._history[i] = History(state, versions, update.step, ratio)
            decay = abs(s.decay) if update.adam_w_mode else 1.0
            bounds.append([largest_update(ratio, s) if known else math.inf, decay])
        return bounds


LAUNCHES: dict[type[Quantizer] | None, type[Launch]] = {
    None: Launch,
    NVFP4Quantizer: NVFP4Launch,
    MXFP8Quantizer: MXFP8Launch,
    Float8BlockQuantizer: Float8BlockLaunch,
}


def _state(update: "Update") -> tuple[Tensor, ...]:
    return update.value, update.exp_avg, update.exp_avg_sq


class StepPlan:
    """Batches the updates of one device into one launch per kind of tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._launches: dict[Kind, Launch] = {}
        self._no_scale = torch.ones(1, dtype=torch.float32, device=device)

    @staticmethod
    def can_take(update: "Update") -> bool:
        """Whether the kernels can step it: FP32 state; dense, aligned tensors of one layout."""
        tensors = [update.value, update.grad, update.exp_avg, update.exp_avg_sq]
        if update.max_exp_avg_sq is not None:
            tensors.append(update.max_exp_avg_sq)
        quantized = isinstance(update.param, QuantizedTensor)
        if not quantized:
            tensors.append(update.param)
        value = update.value
        if value.dtype == torch.float64 or value.numel() == 0:
            return False
        if quantized and type(update.param.quantizer) not in LAUNCHES:
            return False
        if not all(t.is_contiguous() for t in tensors):
            alike = all(t.stride() == value.stride() for t in tensors)
            if quantized or not (alike and is_dense(value)):
                return False
        if quantized:
            tensors.extend(update.param.storage_tensors().values())
        return not any(t.data_ptr() % ALIGNMENT for t in tensors)

    def run(
        self,
        updates: list["Update"],
        grad_scale: Tensor | None,
        write_dtype: Callable[[Tensor], torch.dtype],
    ) -> None:
        """Step all ``updates`` on the device.

        Args:
            updates: Each accepted by :meth:`can_take`.
            grad_scale: One-element float32 tensor that gradients are divided by, or None.
            write_dtype: The dtype that a master weight is rounded to before the parameter is
                written.
        """
        kinds: dict[Kind, list[Update]] = defaultdict(list)
        for update in updates:
            kinds[_kind(update, write_dtype(update.param))].append(update)
        if grad_scale is None:
            grad_scale = self._no_scale
        else:
            grad_scale = grad_scale.to(device=self.device, dtype=torch.float32)
        with torch.cuda.device_of(grad_scale):
            for kind, members in kinds.items():
                if kind not in self._launches:
                    launch = LAUNCHES[None if kind.quantizer is None else type(kind.quantizer)]
                    self._launches[kind] = launch(self.device, kind)
                self._launches[kind].run(members, grad_scale)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _kind(update: "Update", write_dtype: torch.dtype) -> Kind:
    has_master = update.value is not update.param
    quantized = isinstance(update.param, QuantizedTensor)
    return Kind(
        # Where the value cannot move, the bytes are left alone and only the moments are updated.
        quantizer=update.param.quantizer if quantized and update.moves else None,
        grad_dtype=update.grad.dtype,
        value_dtype=update.value.dtype,
        write_dtype=write_dtype if has_master and update.moves else None,
        adam_w_mode=update.adam_w_mode,
        amsgrad=update.max_exp_avg_sq is not None,
    )
