"""Float8: E4M3 codes with one FP32 scale per tensor, from its current amax or from earlier ones."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fp4adam.formats import minifloat
from fp4adam.formats.float8_block import encode_scale
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.layout import Direction, Inner, Layout, ScaleRule
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.te_names import codes_as_shaped

KERNEL_MULTIPLE = 16
AMAX_COMPUTE_ALGOS = ("max", "most_recent")


class Float8Tensor(QuantizedTensor):
    """A tensor in E4M3 with one scale, 8 bits per element and direction.

    ``rowwise_data``: uint8 (E4M3) [rows, cols]; ``columnwise_data``: uint8 (E4M3) [cols, rows].
    ``rowwise_scale_inv``, ``columnwise_scale_inv``: float32 [1], equal.
    """

    # Transformer Engine's names.
    _data = codes_as_shaped("_rowwise_data", transposed=False)
    _transpose = codes_as_shaped("_columnwise_data", transposed=True)
    _transpose_invalid = False  # transposed codes are written with the others
    _scale_inv = property(lambda tensor: tensor.quantizer.per_tensor_scale(tensor._amax))

    @property
    def scale(self) -> Tensor:
        """The factor that values were multiplied by before rounding, float32 [1]."""
        return self.quantizer.encode_scale(self._amax)

    @property
    def amax_history(self) -> Tensor | None:
        """With delayed scaling the amaxes of the last writes, float32; the latest is entry 0.

        The order of the others is Transformer Engine's: entry -1 is the one before, entry 1 the
        oldest.
        """
        return self._amax_history


@dataclasses.dataclass(frozen=True)
class Float8Quantizer(Quantizer[Float8Tensor]):
    """Quantize to :class:`Float8Tensor`; any rows and columns.

    Weights whose rows and columns are multiples of 16 are quantized and stepped by kernels, others
    by operators, with the same bits.

    Code = E4M3(x * scale) with scale = 448 / max(amax, amax_epsilon), or 1 if the amax is 0 or
    infinite; the largest float32 where the quotient overflows. Every step is one float32 operation,
    in the same order as in Transformer Engine.

    With current scaling, amax is the largest magnitude of the values themselves. With delayed
    scaling, it is 2**margin times the ``amax_compute_algo`` of the history, the largest magnitudes
    of the last ``amax_history_len`` writes, this one not among them; if that is 0 or infinite, the
    scale stays. A tensor made by :meth:`quantize` begins with the amax of its values as history;
    one from :meth:`make_empty` has none, and its first write has scale 1.

    Args:
        rowwise: Keep codes of the matrix.
        columnwise: Keep codes of the transposed matrix.
        scaling: "current" or "delayed".
        force_pow_2_scales: Round scales down to powers of two; current scaling only.
        amax_epsilon: Lower bound of the amax, >= 0; current scaling only.
        amax_history_len: Number of amaxes that are kept, >= 1; delayed scaling only.
        amax_compute_algo: "max" of the history or its "most_recent" entry; delayed scaling only.
        margin: Powers of two that the scale is lowered by; delayed scaling only.

    Source: "FP8 Formats for Deep Learning", arXiv:2209.05433.
    """

    scaling: Literal["current", "delayed"] = "current"
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    margin: int = 0

    tensor_class = Float8Tensor
    kernels = True
    largest_value = minifloat.E4M3_MAX

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimize_for_gemm:
            raise ValueError(
                "optimize_for_gemm must be False for Float8, got True: it has no block scales; "
                "leave it out"
            )
        for name, value, known in (
            ("scaling", self.scaling, _OPTIONS),
            ("amax_compute_algo", self.amax_compute_algo, AMAX_COMPUTE_ALGOS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not (self.amax_epsilon >= 0 and math.isfinite(self.amax_epsilon)):
            raise ValueError(
                f"amax_epsilon must be finite and >= 0, got {self.amax_epsilon}; 0 turns it off"
            )
        if self.amax_history_len < 1:
            raise ValueError(
                f"amax_history_len must be >= 1, got {self.amax_history_len}; 1 keeps the last amax"
            )
        if not isinstance(self.margin, int) or not -100 <= self.margin <= 100:
            raise ValueError(
                f"margin must be an integer within [-100, 100], got {self.margin!r}; 0 uses all of "
                "the format's range"
            )
        other = [*_OPTIONS.keys() - {self.scaling}][0]
        for name in _OPTIONS[other]:
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} must be {default!r} with scaling={self.scaling!r}, got "
                    f"{getattr(self, name)!r}; it is an option of scaling={other!r}"
                )

    def full_layout(self) -> Layout:
        return Layout(
            block=1,
            code_type=minifloat.E4M3,
            scale_type=None,
            rowwise=Direction(Inner(1, 1)),
            columnwise=Direction(Inner(1, 1, True)),
            is_square=True,
            tensor_scale=self.scaling,
            scale_rule=ScaleRule(self.force_pow_2_scales, self.amax_epsilon),
            kernel_multiple=KERNEL_MULTIPLE,
            history=self.amax_history_len,
        )

    def scale_inv(self, tensors: Storage, usage: str) -> Tensor | None:
        return self.per_tensor_scale(tensors.amax) if getattr(self, usage) else None

    def per_tensor_scale(self, amax: Tensor) -> Tensor:
        return 1.0 / self.encode_scale(amax)

    def encode_scale(self, amax: Tensor) -> Tensor:
        """The factors that map values to codes, float32, for these amaxes."""
        return encode_scale(amax, minifloat.FP32_MAX, self.amax_epsilon, self.force_pow_2_scales)

    def encode(
        self, amaxes: Tensor, tensor_amax: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return amaxes, self.encode_scale(tensor_amax)  # no scales of blocks are stored

    def factors(self, scales: Tensor | None, tensor_amax: Tensor) -> Tensor:
        return self.encode_scale(tensor_amax)

    def decode(self, scales: Tensor | None, tensor_amax: Tensor) -> Tensor:
        return self.per_tensor_scale(tensor_amax)

    def _quantize(self, x: Tensor) -> QuantizedTensor:
        tensor = self.make_empty(x.shape, dtype=x.dtype, device=x.device)
        if (
            self.scaling == "delayed"
            and not isinstance(x, QuantizedTensor)
            and x.numel()
            and not x.is_meta
        ):
            matrix = x.detach().reshape(flat_shape(tuple(x.shape))).contiguous()
            tensor._amax_history[0] = self.measure(matrix)
        return tensor.quantize_(x)

    def take_amaxes(self, tensors: Sequence[Storage], amaxes: Sequence[Tensor]) -> None:
        if self.scaling == "current":
            return super().take_amaxes(tensors, amaxes)
        histories = torch.stack([each.amax_history for each in tensors])
        present = torch.cat([each.amax for each in tensors])
        is_max = self.amax_compute_algo == "max"
        known = (histories.amax(1) if is_max else histories[:, 0]) * 2.0**self.margin
        present = torch.where((known > 0) & known.isfinite(), known, present)
        moved = histories.roll(-1, 1)
        moved[:, 0] = torch.cat([*amaxes])
        torch._foreach_copy_(
            [*(each.amax for each in tensors), *(each.amax_history for each in tensors)],
            [*present.split(1), *moved.unbind()],
        )


_OPTIONS = {
    "current": ("force_pow_2_scales", "amax_epsilon"),
    "delayed": ("amax_history_len", "amax_compute_algo", "margin"),
}


torch.serialization.add_safe_globals([Float8Tensor, Float8Quantizer])
