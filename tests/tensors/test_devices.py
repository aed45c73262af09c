"""Kernels run on the device of their tensors, whichever is the current one."""

import contextlib

import pytest
import torch

from fp4adam import Recipe
from fp4adam.distributed.cast import PartialCast
from fp4adam.kernels.launch import launch
from fp4adam.nn import operand
from fp4adam.tensors import backend
from fp4adam.tensors.swizzle import read_gemm_scales
from fp4adam.tensors.transpose import build_columnwise
from quantizer_table import TABLE

NAMES = ("nvfp4-swizzled", "mxfp8-swizzled", "float8block", "float8")


def use_all(name, device):
    """All kernels of a format but those of steps, and what they make."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(device)
    weight = TABLE[name].quantize(x)
    made = [weight.dequantize(torch.float32)]
    if name == "float8block":
        recipe = Recipe(name, activations=True, gradients=True)
        made += operand.quantize(x, recipe.quantizer, True, True)[1][:2]
    elif name != "float8":
        read_gemm_scales(weight)
    if name != "mxfp8-swizzled":
        build_columnwise([weight])
    cast = PartialCast([weight], [0], [x.numel()], [x.dtype])
    cast.measure([2 * x.flatten()])
    cast.write([2 * x.flatten()])
    return [*made, *weight.storage_tensors().values()]


@pytest.mark.parametrize("name", NAMES)
def test_every_launch_asks_for_the_device(name, device, monkeypatch):
    """Of its first tensor; what is current does not matter then."""
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    original, asked = torch.cuda.device_of, []

    @contextlib.contextmanager
    def spy(tensor):
        asked.append(tensor.device.type)
        with original(tensor):
            yield

    monkeypatch.setattr(launch.torch.cuda, "device_of", spy)
    monkeypatch.setattr(launch, "is_on_current_device", lambda tensor: False)
    use_all(name, device)
    # Quantized, decoded, and cast from masters in three parts; the others have more.
    assert len(asked) >= 5 and set(asked) == {device}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_the_second_gpu_gives_what_the_first_does(name):
    for first, second in zip(*(use_all(name, f"cuda:{i}") for i in (0, 1)), strict=True):
        assert second.device.index == 1
        assert torch.equal(first.cpu(), second.cpu())
