"""What the parameters of one launch have in common."""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from fp4adam.optim.state_codec import StateCodec
from fp4adam.tensors.quantizer import Quantizer

if TYPE_CHECKING:  # Triton is slow to import, and not installed everywhere.
    from fp4adam.kernels.adam import Variant


class LaunchKey(NamedTuple):
    """The properties that the parameters of one launch have in common.

    ``quantizer``: None for plain parameters. ``groups``: the ranks with the other shards of tensors
    that share a scale; () if no exchange is needed. ``write_dtype``: the dtype that the updated
    value is rounded to on its way to the parameter; None if only the value itself is written.
    """

    device: torch.device
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
