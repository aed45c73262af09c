"""Adaptive block scales of NVFP4: bytes of Transformer Engine's reference, and where they count."""

import copy
import dataclasses
import io
import pickle
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fp4adam import FP4Adam, NVFP4Quantizer, quantize_model
from fp4adam.tensors import backend
from golden_vectors import read_arrays, read_input

VARIANTS = [
    f"{blocks}_{error}_{bound}"
    for blocks in ("2d", "1d")
    for error in ("mae", "mse")
    for bound in (256, 448)
]


def quantizer_of(variant: str) -> NVFP4Quantizer:
    blocks, error, bound = variant.split("_")
    return NVFP4Quantizer(two_dimensional=blocks == "2d", adaptive=error, bound=int(bound))


@pytest.fixture(params=["torch", "kernel"])
def path_device(request, monkeypatch, device) -> Iterator[str]:
    kernel = request.param == "kernel"
    monkeypatch.setattr(backend, "uses_kernels", lambda _: kernel)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        yield device if kernel else "cpu"


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantize_gives_the_golden_bytes(variant, path_device):
    x = read_input("normal_32x64").bfloat16().to(path_device)
    tensor = quantizer_of(variant).quantize(x)
    arrays = read_arrays("nvfp4_4over6")
    fields = [name for name in arrays if name.startswith(variant)]
    assert len(fields) == 6
    for name in fields:
        actual = getattr(tensor, name.removeprefix(f"{variant}_")).cpu().numpy()
        expected = arrays[name]
        inside = tuple(slice(0, n) for n in expected.shape)  # the reference has no padding
        np.testing.assert_array_equal(actual[inside], expected, err_msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chosen_scale_has_the_smaller_error(variant):
    quantizer = quantizer_of(variant)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    power = 1 if "mae" in variant else 2

    def errors(q: NVFP4Quantizer) -> torch.Tensor:
        error = (q.quantize(x).dequantize().double() - x).abs() ** power
        rows = 16 if q.two_dimensional else 1
        return error.view(64 // rows, rows, 4, 16).sum((1, 3))

    chosen = errors(quantizer)
    plain = errors(NVFP4Quantizer(two_dimensional=quantizer.two_dimensional))
    assert chosen.sum() < plain.sum()
    if quantizer.bound == 448:  # the scale that maps to 6 is nearly always the one without a choice
        assert (chosen <= plain * 1.000001).float().mean() > 0.9


@pytest.mark.parametrize("divisor", [1536, 2688])
def test_a_product_and_a_correction_divide_exactly(divisor):
    # What the kernel does with fused multiply-adds, for every mantissa.
    x = np.arange(1 << 23, 1 << 24, 7).astype(np.float32)
    reciprocal = np.float32(1) / np.float32(divisor)
    quotient = x * reciprocal
    rest = (x.astype(np.float64) - quotient.astype(np.float64) * divisor).astype(np.float32)
    exact = quotient.astype(np.longdouble) + rest.astype(np.longdouble) * reciprocal
    np.testing.assert_array_equal(exact.astype(np.float32), x / np.float32(divisor))


def test_bound_defaults_to_that_of_transformer_engine_s_recipe():
    assert NVFP4Quantizer().bound == 448
    assert NVFP4Quantizer(adaptive="mae").bound == 256
    assert NVFP4Quantizer(adaptive="mae") == NVFP4Quantizer(adaptive="mae", bound=256)
    assert NVFP4Quantizer(adaptive="mae") != NVFP4Quantizer(adaptive="mse")
    assert NVFP4Quantizer(adaptive="mae") != NVFP4Quantizer(adaptive="mae", bound=448)
    assert "adaptive='mse', bound=448" in repr(NVFP4Quantizer(adaptive="mse", bound=448))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(adaptive="l1"), "adaptive must be 'mae', 'mse' or None, got 'l1'"),
        (dict(adaptive="MAE"), "adaptive must be 'mae', 'mse' or None, got 'MAE'"),
        (dict(bound=256), "bound must be 448 without adaptive, got 256"),
        (dict(adaptive="mae", bound=384), "bound must be 256 or 448, got 384"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        NVFP4Quantizer(**options)


@pytest.mark.parametrize("quantizer", [NVFP4Quantizer(), NVFP4Quantizer(adaptive="mse")])
def test_copies_keep_the_choice(quantizer):
    tensor = quantizer.quantize(torch.randn(32, 32))
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    for same in (copy.deepcopy(tensor), tensor.clone(), torch.load(buffer), tensor.detach()):
        assert same.quantizer == quantizer
        assert torch.equal(same.dequantize(), tensor.dequantize())
    assert pickle.loads(pickle.dumps(quantizer)) == quantizer
    assert copy.deepcopy(quantizer) == dataclasses.replace(quantizer) == quantizer


def test_quantizers_saved_without_a_choice_have_none():
    old = NVFP4Quantizer.__new__(NVFP4Quantizer)
    old.__setstate__(dict(rowwise=True, columnwise=False, two_dimensional=True))
    assert old == NVFP4Quantizer(columnwise=False)


@pytest.mark.parametrize("variant", ["2d_mae_256", "1d_mse_448"])
def test_training_writes_what_quantize_would(variant):
    quantizer = quantizer_of(variant)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    quantize_model(model, quantizer, filter=lambda *_: True)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    for seed in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weight in (model[0].weight, model[2].weight):
        expected = quantizer.quantize(optimizer.state[weight]["master_param"])
        for name, inner in expected.storage_tensors().items():
            assert torch.equal(getattr(weight, name), inner), name
