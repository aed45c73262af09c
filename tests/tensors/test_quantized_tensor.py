"""QuantizedTensor as a tensor: parameter, copies, files, conversions, and what may write to it."""

import copy
import dataclasses
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    quantize_model,
)
from fp4adam.formats.nvfp4 import NVFP4Tensor
from fp4adam.tensors import encoding
from fp4adam.tensors.quantizer import Operands
from fp4adam.tensors.storage import Storage
from helpers import assert_identical, stored, through_a_file

NVFP4 = NVFP4Quantizer()
QUANTIZERS = {
    "nvfp4": NVFP4,
    "nvfp4-1d": NVFP4Quantizer(two_dimensional=False),
    "nvfp4-columnwise": NVFP4Quantizer(rowwise=False),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8-2d": MXFP8Quantizer(two_dimensional=True),
    "mxfp8-swizzled": MXFP8Quantizer(optimize_for_gemm=True),
    "float8block": Float8BlockQuantizer(),
    "float8block-1d": Float8BlockQuantizer(two_dimensional=False),
    "float8": Float8Quantizer(),
    "float8-delayed": Float8Quantizer(scaling="delayed", amax_history_len=3),
}
SHAPE = (64, 96)

every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS.keys())


def randn(shape=SHAPE, dtype=torch.float32, device="cpu", seed=0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def new_param(quantizer: Quantizer = NVFP4, **kwargs) -> nn.Parameter:
    return nn.Parameter(quantizer.quantize(randn(**kwargs)))


def param_with_init_val(**kwargs) -> nn.Parameter:
    """As quantize_model() makes it: the value before quantization is kept."""
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    layer.weight = nn.Parameter(randn(**kwargs))
    return quantize_model(layer, NVFP4).weight


# Parameter


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameter_has_plain_gradient_of_nominal_dtype(quantizer, dtype, device):
    param = new_param(quantizer, dtype=dtype, device=device)
    assert isinstance(param, nn.Parameter) and isinstance(param, quantizer.tensor_class)
    assert param.requires_grad and param.is_leaf
    assert (param.shape, param.dtype, param.device.type) == (SHAPE, dtype, device)

    (param * 2).sum().backward()
    F.linear(randn((3, SHAPE[1]), dtype, device), param).sum().backward()

    assert type(param.grad) is Tensor
    assert (param.grad.shape, param.grad.dtype) == (SHAPE, dtype)


@every_quantizer
def test_repr_tells_format_shape_and_bits(quantizer):
    text = repr(new_param(quantizer, dtype=torch.bfloat16))
    assert text.startswith(f"{quantizer.tensor_class.__name__}(shape=(64, 96), ")
    assert ("rowwise + columnwise" in text) == quantizer.rowwise
    assert text.endswith(" dtype=torch.bfloat16, device='cpu', requires_grad=True)")
    assert " bits per element, " in text


def test_repr_counts_bits_of_everything_stored():
    tensor = NVFP4.quantize(torch.zeros(256, 256))
    # Codes of both directions, one scale byte per 256 elements, one FP32 amax.
    assert f"{8 + 8 / 256 + 32 / 65536:.2f} bits per element" in repr(tensor)
    assert "0.00 bits" not in repr(NVFP4.quantize(torch.zeros(0, 16)))


def test_graphs_on_disk_are_told_apart_by_looks_alone():
    """torch.compile warns of tensors without this hash; values are not a part of it."""

    def key(quantizer=NVFP4, shape=(64, 96), dtype=torch.float32, seed=0, requires_grad=True):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        return nn.Parameter(quantizer.quantize(x), requires_grad)._stable_hash_for_caching()

    others = [
        key(dataclasses.replace(NVFP4, two_dimensional=False)),
        key(dataclasses.replace(NVFP4, operands=Operands(activations=True))),
        key(MXFP8Quantizer()),
        key(shape=(96, 64)),
        key(dtype=torch.bfloat16),
        key(requires_grad=False),
    ]
    assert key(seed=1) == key()
    assert len({key(), *others}) == 7


def test_repr_of_a_symbolic_shape():
    """The logs of torch.compile ask for it."""
    tensor = NVFP4.quantize(torch.zeros(32, 64))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        (rows, cols) = mode.from_tensor(torch.zeros(32, 64), static_shapes=False).shape
        inner = tensor.inner.existing()
        fake = Storage(**{name: mode.from_tensor(x) for name, x in inner.items()})
        symbolic = type(tensor)((rows, cols), tensor.dtype, NVFP4, fake)
        assert f"shape=({rows}, {cols})" in repr(symbolic)
        assert "? bits per element" in repr(symbolic)


def test_module_prints_and_counts_as_usual():
    model = quantize_model(nn.Sequential(nn.Linear(96, 64)), "nvfp4")
    assert "Linear(in_features=96, out_features=64, bias=True, weight=NVFP4)" in repr(model)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert sum(p.numel() for p in model.parameters()) == 64 * 96 + 64


@every_quantizer
def test_data_ptr_is_real_and_distinct(quantizer, device):
    params = [new_param(quantizer, device=device) for _ in range(3)]
    addresses = {p.data_ptr() for p in params}
    assert len(addresses) == 3 and 0 not in addresses
    codes = params[0].rowwise_data if quantizer.rowwise else params[0].columnwise_data
    assert params[0].data_ptr() == codes.data_ptr() == params[0].data.data_ptr()


@every_quantizer
@pytest.mark.parametrize("shape", [(2, 64, 32), (2, 2, 32, 96)])
def test_leading_dimensions_are_flattened(quantizer, shape, device):
    x = randn(shape, device=device)
    tensor = quantizer.quantize(x)
    flat = quantizer.quantize(x.reshape(-1, shape[-1]))
    for name, inner in tensor.storage_tensors().items():
        assert torch.equal(inner, flat.storage_tensors()[name])
    assert tensor.shape == shape
    assert torch.equal(tensor.dequantize(torch.float32), flat.dequantize(torch.float32).view(shape))
    assert torch.equal(
        copy.deepcopy(tensor).dequantize(torch.float32), tensor.dequantize(torch.float32)
    )


@every_quantizer
def test_empty_tensors_hold_their_shape(quantizer, device):
    for shape in [(0, 32), (32, 0)]:
        tensor = quantizer.quantize(torch.zeros(shape, device=device))
        assert tensor.shape == tensor.dequantize(torch.float32).shape == shape


# What goes in


@pytest.mark.parametrize(
    ("quantizer", "shape", "match"),
    [
        (
            NVFP4,
            (64, 40),
            r"NVFP4 must be multiples of 16, got shape \(64, 40\), .* pad the weight",
        ),
        (
            NVFP4,
            (3, 4, 32),
            r"multiples of 16, got shape \(3, 4, 32\), that is a matrix \[12, 32\]",
        ),
        (MXFP8Quantizer(), (48, 64), r"MXFP8 must be multiples of 32, got shape \(48, 64\)"),
        (NVFP4, (64,), r"at least 2 dimensions for NVFP4Tensor, got \(64,\); keep vectors"),
        (Float8BlockQuantizer(), (), r"at least 2 dimensions for Float8BlockTensor, got \(\)"),
    ],
)
def test_shapes_that_a_format_cannot_hold_are_refused(quantizer, shape, match):
    with pytest.raises(ValueError, match=match):
        quantizer.quantize(torch.zeros(shape))
    with pytest.raises(ValueError, match=match):
        quantizer.make_empty(shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_dtypes_that_do_not_convert_are_refused(dtype):
    x = torch.zeros(SHAPE).to(dtype)
    for call in (NVFP4.quantize, new_param().quantize_):
        with pytest.raises(TypeError, match=f"float32, bfloat16 or float16, got {dtype}; convert"):
            call(x)
    with pytest.raises(TypeError, match=f"dtype must be .* got {dtype}"):
        new_param().dequantize(dtype)


def test_quantize_in_place_refuses_another_shape():
    with pytest.raises(ValueError, match=r"x must have the shape .*\(64, 96\), got \(96, 64\)"):
        new_param().quantize_(torch.zeros(96, 64))


@every_quantizer
def test_layout_dtype_and_device_of_the_input_do_not_matter(quantizer, device):
    value = randn(dtype=torch.bfloat16)
    expected = quantizer.quantize(value)
    views = {
        "transposed": value.t().contiguous().t(),
        "strided": value.repeat_interleave(2, dim=1)[:, ::2],
        "requires grad": value.clone().requires_grad_(),
        "float32": value.float(),
        "parameter": nn.Parameter(value),
    }
    for x in views.values():
        tensor = quantizer.quantize(x.to(device))
        assert tensor.dtype == x.dtype and tensor.requires_grad == x.requires_grad
        assert_identical(tensor.storage_tensors(), expected.storage_tensors())
        if quantizer.layout.tensor_scale == "delayed":
            continue  # an empty tensor has another one
        out = quantizer.make_empty(SHAPE, dtype=torch.float16, device=device)
        # From a CPU tensor, wherever the quantized one is.
        assert out.quantize_(x) is out
        assert out.dtype == torch.float16
        assert_identical(out.storage_tensors(), expected.storage_tensors())


def test_quantize_in_place_keeps_addresses_and_may_be_called_on_a_leaf():
    param = new_param()
    before = {name: t.data_ptr() for name, t in param.storage_tensors().items()}
    param.quantize_(randn(seed=1))
    assert {name: t.data_ptr() for name, t in param.storage_tensors().items()} == before
    assert param.is_leaf and param.grad_fn is None


def test_quantizing_a_quantized_tensor_of_the_same_format_copies_bytes():
    tensor = NVFP4.quantize(randn())
    # Not what its values would be quantized to.
    tensor._amax.mul_(1.5)
    assert_identical(NVFP4.quantize(tensor), tensor)
    assert_identical(NVFP4.make_empty(SHAPE).quantize_(tensor), tensor)
    other = MXFP8Quantizer()
    assert_identical(other.quantize(tensor), other.quantize(tensor.dequantize(torch.float32)))


def test_quantizer_without_any_direction_is_refused():
    with pytest.raises(ValueError, match="must not both be False.*keep one of them"):
        NVFP4Quantizer(rowwise=False, columnwise=False)


# Copies and files


@every_quantizer
def test_deepcopy_is_independent_and_complete(quantizer):
    param = new_param(quantizer)
    param.grad = torch.ones(SHAPE)
    param.tag = ["user's own"]
    twin, again = copy.deepcopy([param, param])
    assert twin is again and isinstance(twin, nn.Parameter) and twin.requires_grad
    assert_identical(twin, param)
    assert twin.data_ptr() != param.data_ptr()
    assert torch.equal(twin.grad, param.grad) and twin.grad is not param.grad
    assert twin.tag == param.tag and twin.tag is not param.tag
    frozen = copy.deepcopy(param.detach())
    assert not frozen.requires_grad and not isinstance(frozen, nn.Parameter)


@pytest.mark.parametrize("quantizer", [q for q in QUANTIZERS.values() if q.rowwise], ids=str)
@pytest.mark.parametrize("swizzles", [False, True])
def test_copies_keep_the_codes_of_the_directions_that_both_have(quantizer, swizzles):
    swizzles &= quantizer.layout.scale_type in ("e4m3", "e8m0")
    rowwise = dataclasses.replace(quantizer, columnwise=False, optimize_for_gemm=swizzles)
    source, one = quantizer.quantize(randn()), rowwise.quantize(randn(seed=1))
    one.copy_(source)
    kept = source.storage_tensors()
    for name, inner in one.storage_tensors().items():
        # Swizzled scales are made on access.
        assert torch.equal(inner, kept[name] if name in kept else getattr(source, name[1:])), name
    if rowwise.layout.rows_per_entry:
        shard = one.new_zeros(32, SHAPE[1])
        shard.copy_(source[:32])
        assert torch.equal(shard._rowwise_data[:32], source._rowwise_data[:32])
    if quantizer.layout.is_square:
        other = quantizer.quantize(randn(seed=2))
        other.copy_(one)
        assert_identical(other.storage_tensors(), kept)


def test_deepcopy_keeps_the_value_before_quantization():
    param = param_with_init_val()
    twin = copy.deepcopy(param)
    twin.clear_high_precision_init_val()
    assert torch.equal(param.get_high_precision_init_val(), randn())


def test_deepcopy_of_a_result_is_refused():
    with pytest.raises(RuntimeError, match="only leaf tensors.*detach"):
        copy.deepcopy(new_param().clone())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_everything(protocol):
    param = param_with_init_val(dtype=torch.bfloat16)
    param.tag = "user's own"
    loaded = pickle.loads(pickle.dumps(param, protocol))
    assert isinstance(loaded, nn.Parameter) and loaded.requires_grad
    assert (type(loaded), loaded.dtype, loaded.tag) == (NVFP4Tensor, torch.bfloat16, param.tag)
    assert_identical(loaded, param)
    init_val = loaded.get_high_precision_init_val()
    assert torch.equal(init_val, param.get_high_precision_init_val())


@every_quantizer
def test_torch_save_and_load_with_weights_only(quantizer, device):
    param = new_param(quantizer, dtype=torch.bfloat16, device=device)
    loaded = through_a_file({"a": param, "b": param, "c": param.detach()})
    assert loaded["a"] is loaded["b"] and isinstance(loaded["a"], nn.Parameter)
    assert not isinstance(loaded["c"], nn.Parameter) and not loaded["c"].requires_grad
    for tensor in loaded.values():
        assert (tensor.dtype, tensor.device.type) == (torch.bfloat16, device)
        assert_identical(tensor, param)
    # Loaded to another device, as a checkpoint of a larger machine is.
    assert through_a_file(param, map_location="meta").device.type == "meta"
    assert_identical(through_a_file(param, map_location="cpu"), param)


def test_whole_modules_are_saved_and_loaded():
    model = quantize_model(nn.Sequential(nn.Linear(96, 64)), "nvfp4")
    loaded = through_a_file(model, weights_only=False)
    assert_identical(loaded[0].weight, model[0].weight)
    assert loaded[0].weight._high_precision_init_val is not None


def test_checkpoints_hold_the_quantized_bytes_only():
    model = quantize_model(nn.Linear(256, 256, bias=False), "nvfp4")
    state_dict = model.state_dict()
    file = io.BytesIO()
    torch.save(state_dict, file)
    assert file.tell() < 1.1 * model.weight.nbytes_stored
    assert through_a_file(state_dict)["weight"]._high_precision_init_val is None
    # Nor does a state_dict in memory keep the value alive once the optimizer has taken it.
    model.weight.clear_high_precision_init_val()
    assert state_dict["weight"]._high_precision_init_val is None


def test_forking_pickler_shares_memory_with_other_processes():
    param = new_param()
    received = pickle.loads(ForkingPickler.dumps(param))
    assert_identical(received, param)
    param.quantize_(randn(seed=1))
    assert_identical(received, param)


def test_share_memory():
    model = quantize_model(nn.Linear(96, 64), "nvfp4")
    assert not model.weight.is_shared()
    model.share_memory()
    assert model.weight.is_shared()
    assert all(inner.is_shared() for inner in model.weight.storage_tensors().values())


# state_dict


FORMATS = ("nvfp4", "mxfp8", None)


def model_in(recipe: str | None, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    return quantize_model(model, recipe) if recipe else model


def plain(weight: Tensor) -> Tensor:
    return (
        weight.dequantize(torch.float32) if isinstance(weight, QuantizedTensor) else weight.detach()
    )


@pytest.mark.parametrize("swap", [False, True], ids=["copy", "swap"])
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_state_dict_is_converted_to_the_format_of_the_model(source, target, swap, monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    source, model = model_in(source, seed=1), model_in(target, seed=2)
    params = list(model.parameters())
    model[0].weight.requires_grad_(False)

    model.load_state_dict(through_a_file(source.state_dict()))

    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert not model[0].weight.requires_grad and model[2].weight.requires_grad
    for i in (0, 2):
        expected = plain(source[i].weight)
        if target is not None:
            quantizer = model[i].weight.quantizer
            expected = quantizer.quantize(source[i].weight.detach()).dequantize(torch.float32)
        assert torch.equal(plain(model[i].weight), expected)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_state_dict_is_taken_as_it_is_with_assign(source, target):
    source, model = model_in(source, seed=1), model_in(target, seed=2)
    model[0].weight.requires_grad_(False)
    loaded = through_a_file(source.state_dict())
    model.load_state_dict(loaded, assign=True)
    for i in (0, 2):
        weight = model[i].weight
        assert type(weight) is type(source[i].weight) and isinstance(weight, nn.Parameter)
        assert weight.data_ptr() == loaded[f"{i}.weight"].data_ptr()
        assert torch.equal(plain(weight), plain(source[i].weight))
    assert not model[0].weight.requires_grad and model[2].weight.requires_grad


def test_average_of_a_model_is_kept_by_copies():
    model = model_in("nvfp4", seed=1)
    average = copy.deepcopy(model)
    for _ in range(2):
        for param in model.parameters():
            param.data.normal_()
        average.load_state_dict(model.state_dict())
        assert_identical(average[0].weight, model[0].weight)
    assert average[0].weight.data_ptr() != model[0].weight.data_ptr()


# Conversions of modules


@pytest.mark.parametrize("swap", [False, True], ids=["default", "swap"])
@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda m, device: m.to(device), torch.float32),
        (lambda m, device: m.cpu(), torch.float32),
        (lambda m, device: m.float(), torch.float32),
        (lambda m, device: m.bfloat16(), torch.bfloat16),
        (lambda m, device: m.half(), torch.float16),
        (lambda m, device: m.to(device, torch.bfloat16), torch.bfloat16),
        (lambda m, device: m.to(torch.empty(0, dtype=torch.float16)), torch.float16),
    ],
)
def test_converted_module_keeps_its_parameters(convert, dtype, swap, monkeypatch, device):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    model = model_in("nvfp4", seed=1)
    before, init_val = copy.deepcopy(model), model[0].weight.get_high_precision_init_val()
    model[2].weight.requires_grad_(False)
    model(randn((2, 96))).sum().backward()
    weight = model[0].weight

    convert(model, device)

    assert model[0].weight is weight and isinstance(weight, nn.Parameter)
    assert weight.requires_grad and not model[2].weight.requires_grad
    assert weight.dtype == weight.grad.dtype == dtype and type(weight.grad) is Tensor
    assert weight.device == weight.grad.device == weight._rowwise_data.device
    # Bytes move, nothing is rounded; nor is what the master weights will start from.
    assert_identical(stored(weight), stored(before[0].weight))
    assert torch.equal(weight.get_high_precision_init_val().cpu(), init_val)
    assert weight.get_high_precision_init_val().device == weight.device


def test_tensor_converts_like_any_other(device):
    param = new_param(dtype=torch.bfloat16)
    moved = param.to(device)
    assert moved.device.type == device
    # Module.to(dtype) converts parameters; others are asked for their values, as p.data.float() is.
    values = param.dequantize(torch.float32)
    names = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "half"}
    for dtype, name in names.items():
        for converted in (param.to(dtype), getattr(param, name)()):
            assert isinstance(converted, NVFP4Tensor) and converted.dtype == dtype
            assert_identical(stored(converted), stored(param))
        plain = [getattr(param.detach(), name)(), getattr(param.data.clone(), name)()]
        if dtype != param.dtype:
            plain += [param.detach().to(dtype), param.data.to(device, dtype, copy=True)]
        for converted in plain:
            assert type(converted) is Tensor and torch.equal(converted.cpu(), values.to(dtype))
    for same in (moved.cpu(), param.detach().to(torch.bfloat16), moved.detach().to("cpu")):
        assert_identical(stored(same), stored(param))
    # What the format has no nominal dtype for becomes plain, and loses nothing on the way.
    assert torch.equal(param.double(), param.dequantize(torch.float32).double())
    assert torch.equal(param.to(torch.int32), param.dequantize(torch.float32).int())


def test_gradients_flow_through_conversions():
    param = new_param(dtype=torch.bfloat16)
    results = (param.float(), param.clone(), param.dequantize(torch.float32), param.double())
    sum((result * 2).sum() for result in results).backward()
    assert torch.equal(param.grad, torch.full(SHAPE, 8.0, dtype=torch.bfloat16))


def test_module_in_float64_is_refused():
    with pytest.raises(TypeError, match="must be float32, bfloat16 or float16, got torch.float64"):
        model_in("nvfp4", seed=1).double()


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "float8block", "float8"])
def test_meta_module_becomes_real_by_to_empty_and_load(recipe, device):
    source = model_in(recipe, seed=1)
    model = copy.deepcopy(source).to("meta")
    weight = model[0].weight
    assert weight.is_meta and all(t.is_meta for t in weight.storage_tensors().values())
    assert isinstance(weight, nn.Parameter) and weight._high_precision_init_val is None

    model.to_empty(device=device)

    assert model[0].weight is weight and weight.device.type == device and weight.data_ptr() != 0
    model.load_state_dict(source.state_dict())
    assert_identical(weight, source[0].weight)


def test_swap_tensors_exchanges_quantized_and_plain():
    param, other = param_with_init_val(), nn.Parameter(torch.zeros(SHAPE))
    address = param.data_ptr()
    torch.utils.swap_tensors(param, other)
    assert type(param) is nn.Parameter
    assert isinstance(other, NVFP4Tensor) and isinstance(other, nn.Parameter)
    assert other.data_ptr() == address and other._high_precision_init_val is not None


def test_pinned_memory():
    param = new_param()
    assert not param.is_pinned()
    if torch.cuda.is_available():
        pinned = param.pin_memory()
        assert pinned.is_pinned()
        assert_identical(pinned.to("cuda", non_blocking=True), param)


# Who may write


IN_PLACE = {
    "mul_": lambda p: p.mul_(2.0),
    "add_": lambda p: p.add_(torch.ones(SHAPE), alpha=0.1),
    "addcdiv_": lambda p: p.addcdiv_(torch.ones(SHAPE), torch.ones(SHAPE)),
    "lerp_": lambda p: p.lerp_(torch.ones(SHAPE), 0.5),
    "clamp_": lambda p: p.clamp_(-1, 1),
    "item assignment": lambda p: p.__setitem__(0, 1.0),
    "out=": lambda p: torch.mul(p, 2, out=p),
    "foreach_mul_": lambda p: torch._foreach_mul_([torch.ones(3), p], 2.0),
    "foreach_add_": lambda p: torch._foreach_add_([p], [torch.ones(SHAPE)]),
    "foreach_lerp_": lambda p: torch._foreach_lerp_([p], [torch.ones(SHAPE)], 0.5),
    "orthogonal_": lambda p: nn.init.orthogonal_(p),
}


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_operators_in_place_are_refused(write):
    param = new_param()
    before = copy.deepcopy(param)
    match = "must not write into a NVFP4Tensor.*FP4Adam.*quantized_init.*quantize_"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=match):
        write(param)
    assert_identical(param, before)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_that_would_round_every_step_are_refused(optimizer, options):
    param = new_param()
    before = copy.deepcopy(param)
    param.grad = torch.ones(SHAPE)
    with pytest.raises(NotImplementedError, match="Train with FP4Adam"):
        optimizer([param], lr=0.1, **options).step()
    assert_identical(param, before)


def test_collectives_in_place_are_refused(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        for collective in (dist.all_reduce, lambda t: dist.reduce(t, 0)):
            with pytest.raises(NotImplementedError, match="must not write into a NVFP4Tensor"):
                collective(new_param().detach())
        layer = quantize_model(nn.Linear(96, 64), "nvfp4")
        nn.parallel.DistributedDataParallel(layer)(randn((2, 96))).sum().backward()
        assert layer.weight.grad is not None
    finally:
        dist.destroy_process_group()


OVERWRITES = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(0.5),
    "fill_ tensor": lambda p: p.fill_(torch.tensor(0.5)),
    "normal_": lambda p: p.normal_(0, 0.02),
    "uniform_": lambda p: p.uniform_(-1, 1),
    "generator": lambda p: p.normal_(generator=torch.Generator().manual_seed(3)),
    "copy_": lambda p: p.copy_(randn(seed=1)),
    "copy_ broadcast": lambda p: p.copy_(torch.linspace(-1, 1, 96)),
    "copy_ float64": lambda p: p.copy_(randn(seed=1).double()),
    "copy_ integers": lambda p: p.copy_(torch.arange(96)),
    "copy_ quantized": lambda p: p.copy_(new_param(seed=1)),
    "copy_ other format": lambda p: p.copy_(new_param(MXFP8Quantizer(), seed=1)),
    "foreach_copy_": lambda p: torch._foreach_copy_([p], [randn(seed=1)]),
    "init.zeros_": nn.init.zeros_,
    "init.ones_": nn.init.ones_,
    "init.constant_": lambda p: nn.init.constant_(p, 0.1),
    "init.normal_": nn.init.normal_,
    "init.uniform_": nn.init.uniform_,
    "init.trunc_normal_": nn.init.trunc_normal_,
    "init.trunc_normal_ cut": lambda p: nn.init.trunc_normal_(p, std=0.02, a=-0.04, b=0.04),
    "init.trunc_normal_ tail": lambda p: nn.init.trunc_normal_(p, a=1.5, b=2.0),
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.xavier_normal_": nn.init.xavier_normal_,
    "init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "init.kaiming_normal_": nn.init.kaiming_normal_,
}


@pytest.mark.parametrize("through_data", [False, True], ids=["", "data"])
@pytest.mark.parametrize("write", OVERWRITES.values(), ids=OVERWRITES.keys())
def test_full_overwrites_are_rounded_once(write, through_data):
    param, expected = param_with_init_val(), torch.zeros(SHAPE)
    version = param._version
    with torch.no_grad():
        torch.manual_seed(7)
        write(expected)
        torch.manual_seed(7)
        write(param.data if through_data else param)
    assert_identical(param, NVFP4.quantize(expected))
    assert param._version > version
    # The master weights start from what was written, not from what was there before.
    value = param._high_precision_init_val
    assert value is None or torch.equal(value, expected.to(value.dtype))


def test_plain_tensors_take_values_unrounded():
    param = new_param(dtype=torch.bfloat16)
    assert torch.equal(torch.zeros(SHAPE).copy_(param.detach()), param.dequantize(torch.float32))
    double = torch.zeros(SHAPE, dtype=torch.float64).copy_(param.detach())
    assert torch.equal(double, param.dequantize(torch.float32).double())


def test_writing_a_leaf_needs_no_grad():
    for write in (lambda p: p.copy_(randn()), lambda p: p.fill_(1.0)):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            write(new_param())


def test_value_before_quantization_follows_every_write():
    for write, kept in [
        (lambda p: p.quantize_(randn(seed=1)), True),
        (lambda p: p.detach().copy_(randn(seed=1)), True),
        (lambda p: setattr(p, "data", randn(seed=1)), True),
        (lambda p: p.quantize_(new_param(seed=1).detach()), False),
        (lambda p: p.data.copy_(new_param(seed=1).detach()), False),
        (lambda p: setattr(p, "data", new_param(seed=1).detach()), False),
    ]:
        param = param_with_init_val()
        write(param)
        value = param._high_precision_init_val
        assert value is None if not kept else torch.equal(value, randn(seed=1))
        assert_identical(param, new_param(seed=1))


def test_value_before_quantization_is_not_kept_where_nobody_asked():
    param = new_param()
    with torch.no_grad():
        param.copy_(randn())
    assert param._high_precision_init_val is None


def test_assigning_data(device):
    param = new_param(device=device)
    other = new_param(seed=1)
    version = param._version
    # Another device than the parameter's: the bytes follow the parameter.
    param.data = other.data
    assert param._version > version
    assert param.device == param._rowwise_data.device and param.device.type == device
    assert_identical(param, other)
    address = param.data_ptr()
    with pytest.warns(UserWarning, match="are rounded .* make the weights plain first"):
        param.data = randn(seed=2)  # as merging DoRA adapters does
    assert param.data_ptr() == address
    assert_identical(param, NVFP4.quantize(randn(seed=2)))
    with pytest.raises(ValueError, match=r"data must have the shape .*\(64, 96\), got \(3, 3\)"):
        param.data = torch.zeros(3, 3)


def test_parameters_to_vector_and_back():
    params = [new_param(), nn.Parameter(torch.randn(5))]
    vector = nn.utils.parameters_to_vector(params)
    assert torch.equal(vector[: 64 * 96], params[0].dequantize(torch.float32).flatten())
    with pytest.warns(UserWarning, match="are rounded to its format"):
        nn.utils.vector_to_parameters(vector.detach() * 2, params)
    assert isinstance(params[0], NVFP4Tensor)
    assert torch.equal(nn.utils.parameters_to_vector(params), vector * 2)


def test_clip_grad_norm():
    params = [new_param(), nn.Parameter(torch.randn(5))]
    for foreach in (None, False):
        for param in params:
            param.grad = torch.ones(param.shape)
        norm = nn.utils.clip_grad_norm_(params, 1.0, foreach=foreach)
        assert norm.item() == pytest.approx((64 * 96 + 5) ** 0.5)
        assert torch.linalg.vector_norm(params[0].grad) < 1


def test_weight_changed_between_forward_and_backward_is_noticed():
    for write in (
        lambda p: p.quantize_(randn(seed=1)),
        lambda p: p.detach().zero_(),
        lambda p: FP4Adam([p], lr=0.1).step(),
    ):
        param = new_param()
        param.grad = torch.ones(SHAPE)
        y = F.linear(randn((2, 96)).requires_grad_(), param)
        write(param)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# Operators that do not know the format


@every_quantizer
def test_other_operators_see_the_dequantized_values(quantizer):
    param, twin = new_param(quantizer), new_param(quantizer)
    value = param.dequantize(torch.float32).detach()
    indices = torch.tensor([1, 1, 63])
    for fn in (
        lambda w: w[0],
        lambda w: w[1:3, ::2],
        lambda w: w.t() @ torch.ones(64, 2),
        lambda w: torch.ones(2, 64) @ w,
        lambda w: w.view(-1),
        lambda w: w.flatten(),
        lambda w: torch.cat([w, w]),
        lambda w: w.norm(),
        lambda w: F.embedding(indices, w),
        lambda w: torch.stack(list(w)),
        lambda w: w == w,
        lambda w: torch.where(w > 0, w, 0),
    ):
        result = fn(param)
        assert type(result) is Tensor and torch.equal(result, fn(value))
    assert torch.equal(param, twin) and torch.allclose(param, twin)
    assert param.sum().item() == value.sum().item()
    assert len(param) == 64 and hash(param) != hash(twin)


def test_embedding_lookup_has_plain_gradient():
    param = new_param()
    F.embedding(torch.tensor([1, 1]), param).sum().backward()
    assert type(param.grad) is Tensor and param.grad[1].eq(2).all() and param.grad.sum() == 2 * 96


def test_tensors_made_like_it_are_plain():
    param = new_param(dtype=torch.bfloat16)
    for fn in (torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like):
        assert type(fn(param)) is Tensor and fn(param).dtype == torch.bfloat16
        assert fn(param, dtype=torch.float32).dtype == torch.float32
    assert type(torch.empty_like(param, dtype=torch.float32)) is Tensor
    assert type(param.new_zeros(3)) is Tensor


@pytest.mark.parametrize(
    "quantizer", [NVFP4, MXFP8Quantizer(), Float8BlockQuantizer(), Float8Quantizer()]
)
def test_stacked_weights_work_by_their_values(quantizer):
    stack = new_param(quantizer, shape=(2, 32, 64))
    torch.bmm(randn((2, 3, 64)), stack.transpose(1, 2)).sum().backward()
    assert type(stack.grad) is Tensor and stack.grad.shape == stack.shape


def test_exports_of_the_memory_are_refused():
    tensor = new_param().detach()
    with pytest.raises(BufferError, match="must be plain .* got a NVFP4Tensor; .*dequantize"):
        torch.from_dlpack(tensor)
    for export in (tensor.numpy, tensor.tolist, lambda: np.asarray(tensor)):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            export()


def test_safetensors_does_not_write_the_codes_as_values():
    with pytest.raises(RuntimeError, match="weights must be plain tensors to be saved by memory"):
        safetensors.torch.save({"weight": new_param().detach()})


def test_inference_mode():
    model = model_in("nvfp4", seed=1)
    expected = model(randn((2, 96)))
    with torch.inference_mode():
        assert torch.equal(model(randn((2, 96))), expected)
        quantize_model(nn.Linear(96, 64), "nvfp4")(randn((2, 96)))
        model[0].weight.quantize_(randn(seed=1))
    assert not model[0].weight.is_inference()
    assert_identical(model[0].weight, model[0].weight.quantizer.quantize(randn(seed=1)))


def test_hooks_run_on_gradients():
    param, seen = new_param(), []
    param.register_hook(lambda grad: grad * 2)
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad[0, 0].item()))
    param.sum().backward()
    assert seen == [2.0]


def test_data_must_have_the_shape_of_the_tensor():
    tensor = NVFP4Quantizer().quantize(torch.ones(16, 32))
    before = tensor.dequantize()
    plain = torch.zeros(32, 16)
    for other in (plain, torch.zeros(32), NVFP4Quantizer().quantize(plain)):
        with pytest.raises(ValueError, match=r"data must have the shape of the tensor, \(16, 32\)"):
            tensor.data = other
    assert tensor.shape == (16, 32)
    assert torch.equal(tensor.dequantize(), before)


RECODED = [
    Float8BlockQuantizer(columnwise=False),
    Float8BlockQuantizer(two_dimensional=False),
    Float8BlockQuantizer(two_dimensional=False, rowwise=False),
    NVFP4Quantizer(two_dimensional=False, rowwise=False),
    MXFP8Quantizer(rowwise=False),
]


@pytest.mark.parametrize("quantizer", RECODED, ids=str)
@pytest.mark.parametrize("shape", [(300, 70), (70, 300), (130, 16), (64, 128)])
def test_codes_under_stored_scales_are_the_codes(quantizer, shape):
    if not isinstance(quantizer, Float8BlockQuantizer):
        shape = tuple(n // 32 * 32 or 32 for n in shape)
    x = randn(shape, seed=3)
    tensor = quantizer.quantize(x)
    codes = encoding.recode(quantizer, x, tensor.inner)
    stored = tensor.rowwise_data if quantizer.rowwise else tensor.columnwise_data
    assert torch.equal(codes, stored)
