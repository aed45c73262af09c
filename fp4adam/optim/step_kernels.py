"""The kernel launches of a step for tensors of one kind: kernels, tiles and constants."""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp4adam.optim.state_codec import StateCodec
from fp4adam.tensors.quantizer import Quantizer

if TYPE_CHECKING:  # Triton is slow to import, and not installed everywhere.
    from fp4adam.kernels.adam import StepLaunch, Variant


class Kind(NamedTuple):
    """The properties that tensors of one launch have in common.

    ``quantizer``: None for plain parameters. ``groups``: the ranks with the other shards of tensors
    that share a scale; () if no exchange is needed. ``write_dtype``: the dtype that the updated
    value is rounded to on its way to the parameter; None if only the value itself is written.
    """

    quantizer: Quantizer | None
    groups: tuple[dist.ProcessGroup, ...]
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


class LaunchTensors(NamedTuple):
    """The tensors of one launch.

    Attributes:
        shapes: Rows and columns of each tensor, as in the table; plain tensors have one column.
        slots: The amax slot of each tensor; tensors with the same slot share an amax.
        table: Their rows of the tensor table, int64 [n_tensors, 20] on the device.
        scalars: The scalars that these rows refer to, float32 on the device.
    """

    shapes: list[tuple[int, int]]
    slots: list[int]
    table: Tensor
    scalars: Tensor


def step_launch(kind: Kind, tensors: LaunchTensors) -> "StepLaunch":
    """The launch for tensors of a kind."""
    from fp4adam.kernels import plain_step, step

    module = plain_step if kind.quantizer is None else step
    return module.StepLaunch(kind, tensors)
