"""Adaptive block scales of NVFP4: bytes of Transformer Engine's reference, and where they count."""

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch

from fp4adam import FP4Adam, NVFP4Quantizer, PartialCast, export_tensors, quantize_model
from fp4adam.formats import four_over_six
from fp4adam.nn.operand import NVFP4Operands, weight_operand
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
def test_the_chosen_scale_has_the_smaller_error(variant, monkeypatch):
    quantizer = quantizer_of(variant)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    rows = 16 if quantizer.two_dimensional else 1
    errors = {}
    for name, choice in (("chosen", None), ("four", True), ("six", False)):
        if choice is not None:

            def always(blocks, block_amax, *_, choice=choice):
                return torch.full_like(block_amax, choice).bool()

            monkeypatch.setattr(four_over_six, "maps_to_four", always)
        difference = (quantizer.quantize(x).dequantize(torch.float32) - x).abs()
        difference = difference.square() if "mse" in variant else difference
        errors[name] = difference.view(64 // rows, rows, 16, 16).sum((1, 3))
    best = torch.minimum(errors["four"], errors["six"])
    torch.testing.assert_close(errors["chosen"], best, rtol=1e-5, atol=0)
    if not quantizer.two_dimensional:
        assert 0.2 < (errors["four"] < errors["six"]).float().mean() < 0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_errors_map_to_six(variant, path_device):
    """Equal values have no error with either scale, where 1.5 times the bound is a scale."""
    quantizer = quantizer_of(variant)
    tensor = quantizer.quantize(torch.ones(32, 64, device=path_device))
    scales = tensor.rowwise_scale_inv[:32, :4].view(torch.float8_e4m3fn).float()
    assert scales.unique().item() == quantizer.bound


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
        assert torch.equal(same.dequantize(torch.float32), tensor.dequantize(torch.float32))
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


def test_matmuls_read_the_same_values():
    quantizer = NVFP4Quantizer(adaptive="mae", optimize_for_gemm=True)
    weight = quantizer.quantize(torch.randn(128, 128))
    for usage, value in (
        ("rowwise", weight.dequantize(torch.float32)),
        ("columnwise", weight.dequantize(torch.float32).t()),
    ):
        # The bound is a part of the operand's amax, which is one more rounding.
        decoded = NVFP4Operands().decode(weight_operand(weight, usage))
        torch.testing.assert_close(decoded, value, rtol=1e-6, atol=0)


def test_weights_of_different_bounds_share_no_amax():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, 32) for name in ("q_proj", "k_proj")})
    for name, quantizer in (
        ("q_proj", NVFP4Quantizer()),
        ("k_proj", NVFP4Quantizer(adaptive="mae")),
    ):
        quantize_model(model, quantizer, lambda _, at, name=name: at == name)
    with pytest.raises(ValueError, match=r"must have one bound, got \[256, 448\].*alike"):
        FP4Adam(model.named_parameters(), scale_groups=[["q_proj.weight", "k_proj.weight"]])


def test_scale_groups_share_an_amax():
    quantizer = NVFP4Quantizer(adaptive="mse")
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(32, 32) for name in ("q_proj", "k_proj", "v_proj")}
    )
    groups = [[f"{name}.weight" for name in model]]
    quantize_model(model, quantizer, lambda *_: True, scale_groups=groups)
    optimizer = FP4Adam(model.named_parameters(), lr=1e-2, scale_groups=groups)
    for seed, layer in enumerate(model.values()):
        layer.weight.grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))
    optimizer.step()
    fused = torch.cat([optimizer.state[layer.weight]["master_param"] for layer in model.values()])
    expected = quantizer.quantize(fused)
    for name in ("rowwise_data", "amax_rowwise"):
        parts = [getattr(layer.weight, name) for layer in model.values()]
        whole = torch.cat(parts) if name == "rowwise_data" else parts[2]
        assert torch.equal(whole, getattr(expected, name))
    stored = dict(export_tensors(model, fused=True))
    scale = next(tensor for name, tensor in stored.items() if "global_scale" in name)
    torch.testing.assert_close(scale, 6 * 256 / expected._amax.expand(3))


def test_a_partial_cast_without_a_choice_is_refused():
    weight = NVFP4Quantizer(adaptive="mae").make_empty((32, 32))
    value = torch.randn(32 * 32)
    cast = PartialCast([weight], [0], [value.numel()], [torch.float32])
    cast.measure([value])
    with pytest.raises(RuntimeError, match="choose must be called before write"):
        cast.write([value])
    assert not weight._rowwise_data.any()
    cast.choose([value])
    cast.write([value])
    expected = weight.quantizer.quantize(value.view(32, 32))
    assert torch.equal(weight.rowwise_data, expected.rowwise_data)
    assert torch.equal(weight.rowwise_scale_inv, expected.rowwise_scale_inv)
