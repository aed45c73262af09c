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


def runs_natively(quantizer: Quantizer, device: torch.device) -> bool:
    """Whether products of a format run on the block-scaled units of ``device``; else emulated.

    Raises:
        RuntimeError: If the GPU has no such units and emulation is not asked for.
    """
    if quantizer.operands.emulate or not backend.uses_kernels(device):
        return False
    needed = REQUIREMENTS[type(quantizer)]
    found = _capability(device)
    if needed.is_met_by(found):
        return True
    name = quantizer.tensor_class.__name__.removesuffix("Tensor")
    raise RuntimeError(
        f"matmuls of {name} operands need CUDA compute capability {needed.capabilities}, got "
        f"{'.'.join(map(str, found))} ({device}); quantize the weights "
        'alone with Recipe(weights), pass activations="fake", or set emulate=True'
    )


_cached_capability = functools.lru_cache(torch.cuda.get_device_capability)


def _capability(device: torch.device) -> tuple[int, int]:
    return _cached_capability(device)


# All that torch.compiler.assume_constant_result does, which imports torch._dynamo first.
_capability._dynamo_marked_constant = True


def check_shape(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a weight can be an operand in both directions."""
    multiple, name = REQUIREMENTS[type(quantizer)].multiple, quantizer.tensor_class.__name__
    if len(shape) == 3:
        raise ValueError(
            "a stack of experts must be quantized alone, got one for quantized activations or "
            f"gradients, {tuple(shape)}; quantize stacks with Recipe(weights) in a call of "
            "their own (filter=lambda module, name: not isinstance(module, nn.Linear))"
        )
    if any(n % multiple for n in shape):
        raise ValueError(
            f"out_features and in_features must be multiples of {multiple} for matmuls of "
            f"{name} with quantized activations or gradients, got {tuple(shape)}; weights alone "
            "take other shapes: Recipe(weights) in a call of its own (filter=...)"
        )
