"""Which devices have kernels, which torch operators, and which are refused: by stand-ins."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fp4adam import NVFP4Quantizer, __main__
from fp4adam.tensors import backend

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


def test_kernels_run_from_capability_7_5_on(gpu):
    assert backend.uses_kernels(CUDA)


def no_triton(gpu):
    gpu.patch.setitem(sys.modules, "triton", None)


def no_compiler(gpu):
    def fail():
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    gpu.triton.runtime.driver.active.get_current_device = fail


def rocm(gpu):
    gpu.patch.setattr(torch.version, "hip", "6.4")
    gpu.patch.setitem(sys.modules, "triton", None)  # it is not asked


def volta(gpu):
    gpu.patch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))


@pytest.mark.parametrize(
    "take_away, why",
    [
        (no_triton, "they need Triton, .* pip install triton, on Windows triton-windows"),
        (no_compiler, "Failed to find C compiler.*install a C compiler"),
        (rocm, "they have assembly of NVIDIA GPUs, and this is torch for ROCm"),
        (volta, "they need compute capability 7.5, and this GPU has 7.0"),
    ],
)
def test_operators_take_their_place_with_one_warning(take_away, why, gpu):
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
