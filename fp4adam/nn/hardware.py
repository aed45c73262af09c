"""Hardware requirements of matmuls with quantized operands: GPU and shapes, per format."""

import functools
from typing import NamedTuple

import torch

from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.tensors import backend
from fp4adam.tensors.quantizer import Quantizer


class Requirement(NamedTuple):
    """Requirements of the products of a format.

    Attributes:
        capability: The first compute capability that has them.
        is_only: Whether later ones do not have them.
        multiple: Both sides of a weight must be multiples of it.
    """

    capability: tuple[int, int]
    is_only: bool
    multiple: int

    def is_met_by(self, capability: tuple[int, int]) -> bool:
        """Whether GPUs of this compute capability have these products."""
        is_later = capability > self.capability and not self.is_only
        return capability == self.capability or is_later

    @property
    def capabilities(self) -> str:
        """The text for errors: "9.0", or "10.0 or later"."""
        first = ".".join(map(str, self.capability))
        return first if self.is_only else f"{first} or later"


REQUIREMENTS: dict[type[Quantizer], Requirement] = {
    # cuBLAS has 128x128 blocks for compute capability 9.0 alone, from CUDA 12.9 on.
    Float8BlockQuantizer: Requirement((9, 0), True, 128),
    MXFP8Quantizer: Requirement((10, 0), False, 32),
    # Rows of packed codes must be multiples of 16 bytes.
    NVFP4Quantizer: Requirement((10, 0), False, 32),
}

# torch has products of stacks for 10.x alone: on 9.0 scales are per row, and 12.0 has none.
GROUPED_MAJOR = 10


def runs_natively(quantizer: Quantizer, device: torch.device, grouped: bool = False) -> bool:
    """Whether products of a format run on the block-scaled units of ``device``; else emulated.

    Args:
        grouped: Ask for products of a stack of weights (``scaled_grouped_mm``).

    Raises:
        RuntimeError: If the GPU has no such units and emulation is not asked for.
    """
    if quantizer.operands.emulate or not backend.uses_kernels(device):
        return False
    needed = REQUIREMENTS[type(quantizer)]
    found = _capability(device)
    fits, wanted = needed.is_met_by(found), needed.capabilities
    if grouped:
        fits, wanted = found[0] == GROUPED_MAJOR, f"{GROUPED_MAJOR}.x"
    if fits:
        return True
    name = quantizer.tensor_class.__name__.removesuffix("Tensor")
    raise RuntimeError(
        f"{'grouped ' * grouped}matmuls of {name} operands need CUDA compute "
        f"capability {wanted}, got {'.'.join(map(str, found))} ({device}); quantize the weights "
        'alone with Recipe(weights), pass activations="fake", or set emulate=True'
    )


_cached_capability = functools.lru_cache(torch.cuda.get_device_capability)


def _capability(device: torch.device) -> tuple[int, int]:
    return _cached_capability(device)


# All that torch.compiler.assume_constant_result does, which imports torch._dynamo first.
_capability._dynamo_marked_constant = True


def check_shape(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a weight, or each one of a stack, can be an operand both ways."""
    # A stack is quantized as one matrix, in which the scales of each weight must be whole tiles.
    is_stack = len(shape) == 3
    multiple = 128 if is_stack else REQUIREMENTS[type(quantizer)].multiple
    if any(n % multiple for n in shape[-2:]):
        name = f"{'grouped ' * is_stack}matmuls of {quantizer.tensor_class.__name__}"
        raise ValueError(
            f"out_features and in_features must be multiples of {multiple} for {name} with "
            f"quantized activations or gradients, got {tuple(shape)}; leave this layer to "
            "weight-only quantization (filter=...)"
        )
