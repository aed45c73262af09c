"""Which devices have kernels, which operators, which are refused; and where kernels run."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from fp4adam import NVFP4Quantizer, Recipe, __main__
from fp4adam.distributed.cast import PartialCast
from fp4adam.kernels.launch import launch
from fp4adam.nn import operand
from fp4adam.tensors import backend
from fp4adam.tensors.swizzle import read_gemm_scales
from fp4adam.tensors.transpose import build_columnwise
from quantizer_table import TABLE

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which kernels run, of which tests take something away."""
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0))
    triton = SimpleNamespace(runtime=SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    backend._runs_kernels.cache_clear()
    yield SimpleNamespace(triton=triton, patch=monkeypatch)
    backend._runs_kernels.cache_clear()


def no_compiler():
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")


# What is taken from the GPU, and why operators take the place of kernels then.
TAKEN = [
    (
        lambda gpu: gpu.patch.setitem(sys.modules, "triton", None),
        "they need Triton, .* pip install triton, on Windows triton-windows",
    ),
    (
        lambda gpu: setattr(gpu.triton.runtime.driver.active, "get_current_device", no_compiler),
        "Failed to find C compiler.*install a C compiler",
    ),
    (
        lambda gpu: gpu.patch.setattr(torch.version, "hip", "6.4"),
        "they have assembly of NVIDIA GPUs, and this is torch for ROCm",
    ),
    (
        lambda gpu: gpu.patch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0)),
        "they need compute capability 7.5, and this GPU has 7.0",
    ),
]


@pytest.mark.parametrize(("take_away", "why"), TAKEN)
def test_operators_take_their_place_with_one_warning(take_away, why, gpu):
    assert backend.uses_kernels(CUDA)
    backend._runs_kernels.cache_clear()
    take_away(gpu)
    with pytest.warns(UserWarning, match=f"torch operators take the place .*: .*{why}") as said:
        assert not backend.uses_kernels(CUDA)
        assert not backend.uses_kernels(CUDA)
    assert len(said) == 1
    assert not backend.uses_kernels(torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "word"),
    [("xpu", "emulated"), ("cpu", "emulated"), ("meta", "emulated"), ("mps", "refused")],
)
def test_other_devices_run_operators_but_mps(kind, word):
    device = torch.device(kind)
    if word == "refused":
        with pytest.raises(NotImplementedError, match="not be on mps, .* no float64.* the CPU"):
            backend.check_device(device)
    else:
        backend.check_device(device)
        assert not backend.uses_kernels(device)
    verdict = __main__._verdict(device, None)
    assert __main__.support(NVFP4Quantizer, (0, 0), verdict)[0] == word


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
