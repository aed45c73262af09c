"""The kernel launches of a step for tensors of one kind: kernels, tiles and constants."""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.optim.state_codec import StateCodec
from fp4adam.tensors.quantizer import Quantizer

if TYPE_CHECKING:  # Triton is slow to import, and not installed everywhere.
    from fp4adam.kernels.adam import Variant
    from fp4adam.kernels.launch.tensor_table import Usage


class Kind(NamedTuple):
    """The properties that tensors of one launch have in common.

    ``quantizer``: None for plain parameters. ``group``: the ranks with the other shards of tensors
    that share a scale; None if no exchange is needed. ``write_dtype``: the dtype that the updated
    value is rounded to on its way to the parameter; None if only the value itself is written.
    """

    quantizer: Quantizer | None
    group: dist.ProcessGroup | None
    grad_dtype: torch.dtype
    value_dtype: torch.dtype
    write_dtype: torch.dtype | None
    value_codec: StateCodec
    exp_avg_codec: StateCodec
    exp_avg_sq_codec: StateCodec
    adam_w_mode: bool
    amsgrad: bool
    is_contiguous: bool

    @property
    def has_scaled_states(self) -> bool:
        """Whether any stored state has scales, one per 32 elements."""
        codecs = (self.value_codec, self.exp_avg_codec, self.exp_avg_sq_codec)
        return any(codec.scaled for codec in codecs)

    def variant(self) -> "Variant":
        """The compile-time options of the Adam kernels."""
        from fp4adam.kernels.adam import step_variant

        return step_variant(
            grad_dtype=self.grad_dtype,
            value_dtype=self.value_dtype if self.quantizer is None else None,
            write_dtype=self.write_dtype,
            value_codec=self.value_codec.name,
            exp_avg_codec=self.exp_avg_codec.name,
            exp_avg_sq_codec=self.exp_avg_sq_codec.name,
            adam_w=self.adam_w_mode,
            amsgrad=self.amsgrad,
        )

    def usage(self) -> "Usage":
        """The parts of a quantized weight that the kernels write."""
        from fp4adam.kernels.launch.tensor_table import Usage

        quantizer = self.quantizer
        return Usage(
            quantizer.rowwise,
            quantizer.columnwise,
            getattr(quantizer, "two_dimensional", False),
            getattr(quantizer, "optimize_for_gemm", False),
        )


class Listed(NamedTuple):
    """The tensors of one launch.

    Attributes:
        shapes: Rows and columns of each tensor, as in the table; plain tensors have one column.
        slots: The amax slot of each tensor; tensors with the same slot share an amax.
        table: Their rows of the tensor table, int64 [n_tensors, 18] on the device.
        scalars: The scalars that these rows refer to, float32 on the device.
    """

    shapes: list[tuple[int, int]]
    slots: list[int]
    table: Tensor
    scalars: Tensor


class FusedLaunch:
    """The step of plain tensors.

    Args:
        kind: The properties that the tensors have in common.
        tensors: The tensors.
    """

    def __init__(self, kind: Kind, tensors: Listed) -> None:
        from fp4adam.kernels import adam

        shapes, _, table, scalars = tensors
        tiles = adam.flat_tiles([numel for numel, _ in shapes]).to(table.device)
        self._launches = [adam.adam_step(table, scalars, tiles, kind.variant())]

    def compile(self, *signals: Tensor) -> None:
        """Compile all kernels of a step, for ``signals`` as for the call."""
        for launch in self._launches:
            launch.compile(*signals)

    def prepare(self, *signals: Tensor) -> None:
        """Compute what other ranks need before the step; ``signals`` as for the call."""

    def __call__(self, *signals: Tensor) -> None:
        """Step the tensors; ``signals`` are grad_scale, clip and found_inf, float32 [1] each."""
        for launch in self._launches:
            launch(*signals)


class MXFP8Launch(FusedLaunch):
    """One pass over MXFP8 tensors."""

    def __init__(self, kind: Kind, tensors: Listed) -> None:
        from fp4adam.kernels import mxfp8_step

        shapes, _, table, scalars = tensors
        tiles = tuple(part.to(table.device) for part in mxfp8_step.step_tiles(shapes))
        self._launches = mxfp8_step.adam_step(table, scalars, tiles, kind.variant(), kind.usage())


class Float8BlockLaunch(FusedLaunch):
    """One pass over Float8Block tensors."""

    def __init__(self, kind: Kind, tensors: Listed) -> None:
        from fp4adam.kernels import float8_block_step

        shapes, _, table, scalars = tensors
        tiles = tuple(part.to(table.device) for part in float8_block_step.step_tiles(shapes))
        self._launches = float8_block_step.adam_step(
            table,
            scalars,
            tiles,
            kind.variant(),
            kind.usage(),
            largest=torch.finfo(kind.write_dtype).max,
            force_pow_2_scales=kind.quantizer.force_pow_2_scales,
            amax_epsilon=kind.quantizer.amax_epsilon,
        )


class NVFP4Launch(FusedLaunch):
    """A preview of the tiles that can hold the new amaxes, then one pass over NVFP4 tensors.

    For shards the preview covers the rank's own rows and runs twice, so that no tile is missed. The
    pass then uses the largest amax of all ranks.

    Attributes:
        amaxes: float32 [n_slots]. For shards, the amaxes to exchange between :meth:`prepare` and
            the call.
    """

    def __init__(self, kind: Kind, tensors: Listed) -> None:
        from fp4adam.kernels import amax_preview, nvfp4_step

        shapes, slots, table, scalars = tensors
        device = table.device
        variant, usage = kind.variant(), kind.usage()
        tiles, n_whole = nvfp4_step.step_tiles(shapes, usage.square, kind.has_scaled_states)
        tiles = tiles.to(device)
        # With zeros the first preview looks at every tile, as nothing is known yet.
        tile_amaxes = torch.zeros(len(tiles), dtype=torch.float32, device=device)
        n_slots = max(slots) + 1
        slots = torch.tensor(slots, dtype=torch.int32, device=device)
        # Each at the start of memory of its own: Triton compiles anew for another alignment.
        amaxes = [torch.zeros(n_slots, dtype=torch.float32, device=device) for _ in range(2)]
        exceeding = torch.zeros(n_slots, dtype=torch.float32, device=device)
        self.amaxes = torch.zeros(n_slots, dtype=torch.float32, device=device)
        self._is_shared = kind.group is not None
        # Double buffer: the amaxes of one step are the old amaxes of the next.
        self._turns = []
        for old, new in (amaxes, amaxes[::-1]):
            known = table, scalars, tiles, slots, tile_amaxes, old, new, exceeding, variant
            looks = [
                amax_preview.preview_amax(*known, again=again)
                for again in ((False, True) if self._is_shared else (False,))
            ]
            steps = nvfp4_step.adam_step(
                table,
                scalars,
                tiles,
                n_whole,
                slots,
                self.amaxes if self._is_shared else new,
                old,
                tile_amaxes,
                exceeding,
                variant,
                usage,
            )
            requantize = amax_preview.requantize(
                table, tiles, slots, new, exceeding, variant, usage
            )
            self._turns.append((old, new, looks, steps, requantize))
        self._known = table, scalars, tiles, slots, tile_amaxes
        self._exceeding = exceeding

    def compile(self, *signals: Tensor) -> None:
        _, _, looks, steps, requantize = self._turns[0]
        for launch in (*looks, *steps):
            launch.compile(*signals)
        if not self._is_shared:
            requantize.compile()

    def candidates(self) -> Tensor:
        """The tiles that the next preview will read, bool [n_tiles]; for diagnosis."""
        from fp4adam.kernels import amax_preview

        return amax_preview.candidates(*self._known, self._turns[0][0])

    def _look(self, *signals: Tensor) -> None:
        for launch in self._turns[0][2]:
            launch(*signals)

    def prepare(self, *signals: Tensor) -> None:
        if self._is_shared:
            self._look(*signals)
            self.amaxes.copy_(self._turns[0][1])

    def __call__(self, *signals: Tensor) -> None:
        if not self._is_shared:
            self._look(*signals)
        _, _, _, steps, requantize = self._turns[0]
        for launch in steps:
            launch(*signals)
        if not self._is_shared:
            requantize()
        self._turns.reverse()


LAUNCHES: dict[type[Quantizer] | None, type[FusedLaunch]] = {
    None: FusedLaunch,
    NVFP4Quantizer: NVFP4Launch,
    MXFP8Quantizer: MXFP8Launch,
    Float8BlockQuantizer: Float8BlockLaunch,
}


def fused_launch(kind: Kind, tensors: Listed) -> FusedLaunch:
    """The launch for tensors of a kind."""
    return LAUNCHES[None if kind.quantizer is None else type(kind.quantizer)](kind, tensors)
