"""The tables behind the fused launches: which tensors are stepped, where they are, in which tiles."""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.float8_block import Float8BlockQuantizer
from fp4adam.mxfp8 import MXFP8Quantizer
from fp4adam.nvfp4 import NVFP4Quantizer
from fp4adam.quantized_tensor import QuantizedTensor, Quantizer, flat_shape

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
    """The device tables of one kind; each is uploaded again only when its content changes."""

    def __init__(self, device: torch.device, kind: Kind) -> None:
        self.device = device
        self.kind = kind
        self._shapes: list[tuple[int, int]] = []
        self._uploaded: dict[str, tuple[list, Tensor]] = {}
        self._tiles: Any = None
        self._amaxes: Tensor | None = None

    def run(self, updates: list["Update"], grad_scale: Tensor) -> None:
        """Launch the kernels on these tensors."""
        kind = self.kind
        shapes = [_table_shape(kind, update) for update in updates]
        if shapes != self._shapes:
            self._shapes, self._tiles = shapes, self._make_tiles(shapes)
            self._amaxes = torch.empty(len(shapes), dtype=torch.float32, device=self.device)
        rows = [[*_addresses(kind, u), *s] for u, s in zip(updates, shapes, strict=True)]
        table = self._upload("table", rows, torch.int64)
        scalars = self._upload("scalars", [list(u.scalars) for u in updates], torch.float32)
        options = dict(
            grad_dtype=kind.grad_dtype, adam_w_mode=kind.adam_w_mode, amsgrad=kind.amsgrad
        )
        quantizer = kind.quantizer
        if quantizer is None:
            from fp4adam.kernels import adam

            adam.adam_step(
                table,
                scalars,
                self._tiles,
                grad_scale,
                value_dtype=kind.value_dtype,
                param_dtype=kind.write_dtype,
                **options,
            )
            return
        options.update(
            write_dtype=kind.write_dtype, rowwise=quantizer.rowwise, columnwise=quantizer.columnwise
        )
        if isinstance(quantizer, NVFP4Quantizer):
            from fp4adam.kernels import nvfp4

            options["two_dimensional"] = quantizer.two_dimensional
            nvfp4.adam_step(table, scalars, self._tiles, grad_scale, self._amaxes, **options)
        elif isinstance(quantizer, MXFP8Quantizer):
            from fp4adam.kernels import mxfp8

            mxfp8.adam_step(table, scalars, self._tiles, grad_scale, **options)
        elif isinstance(quantizer, Float8BlockQuantizer):
            from fp4adam.kernels import float8_block

            float8_block.adam_step(
                table,
                scalars,
                self._tiles,
                grad_scale,
                two_dimensional=quantizer.two_dimensional,
                force_pow_2_scales=quantizer.force_pow_2_scales,
                amax_epsilon=quantizer.amax_epsilon,
                **options,
            )
        else:
            raise NotImplementedError(
                f"quantizer must be one of fp4adam's, got {type(quantizer).__name__}; construct "
                "the optimizer with fused=False to step its tensors by torch operators"
            )

    def _make_tiles(self, shapes: list[tuple[int, int]]) -> Any:
        """Tile lists of the kernels, on the device."""
        quantizer = self.kind.quantizer
        if quantizer is None:
            from fp4adam.kernels import adam

            return adam.flat_tiles([n for n, _ in shapes]).to(self.device)
        from fp4adam.kernels import float8_block, mxfp8, nvfp4, tensor_table

        if isinstance(quantizer, Float8BlockQuantizer):
            lists = float8_block.step_tiles(shapes)
        else:
            module = nvfp4 if isinstance(quantizer, NVFP4Quantizer) else mxfp8
            lists = tensor_table.cover(shapes, module.STEP_TILE, module.EDGE_TILE)
        return tuple(tiles.to(self.device) for tiles in lists)

    def _upload(self, name: str, rows: list, dtype: torch.dtype) -> Tensor:
        known = self._uploaded.get(name)
        if known is None or known[0] != rows:
            # A copy from pageable memory has read it all before it returns.
            known = rows, torch.tensor(rows, dtype=dtype).to(self.device)
            self._uploaded[name] = known
        return known[1]


class StepPlan:
    """Batches the updates of one device into one launch per kind of tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._launches: dict[Kind, Launch] = {}
        self._no_scale = torch.ones(1, dtype=torch.float32, device=device)

    @staticmethod
    def can_take(update: "Update") -> bool:
        """Whether the kernels can step it: FP32 state, tensors dense, alike in layout and aligned."""
        tensors = [update.value, update.grad, update.exp_avg, update.exp_avg_sq]
        if update.max_exp_avg_sq is not None:
            tensors.append(update.max_exp_avg_sq)
        quantized = isinstance(update.param, QuantizedTensor)
        if not quantized:
            tensors.append(update.param)
        value = update.value
        if value.dtype == torch.float64 or value.numel() == 0:
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
                    self._launches[kind] = Launch(self.device, kind)
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


def _table_shape(kind: Kind, update: "Update") -> tuple[int, int]:
    if kind.quantizer is None:
        return update.value.numel(), 1
    return flat_shape(tuple(update.param.shape))


def _addresses(kind: Kind, update: "Update") -> list[int]:
    """One row of the table of tensors, without the sizes; what is absent is 0."""
    tensors = [update.grad, update.value, update.exp_avg, update.exp_avg_sq, update.max_exp_avg_sq]
    if kind.quantizer is None:
        tensors += [None if kind.write_dtype is None else update.param, None, None, None, None]
    else:
        p = update.param
        scale = p._block_scale_inv if p._block_scale_inv is not None else p._rowwise_scale_inv
        amax = p._amax
        tensors += [p._rowwise_data, scale, p._columnwise_data, p._columnwise_scale_inv, amax]
    return [0 if t is None else t.data_ptr() for t in tensors]
