"""QuantizedTensor: parameter, copies, files, conversions, what may write to it, other names."""

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

from fp4adam import Float8BlockQuantizer, Float8Quantizer, MXFP8Quantizer, Quantizer, quantize_model
from fp4adam.formats.nvfp4 import NVFP4Tensor
from fp4adam.tensors import encoding
from fp4adam.tensors.quantizer import Operands
from fp4adam.tensors.rows import is_of
from helpers import assert_identical, stored, through_a_file, value_of
from quantizer_table import SHAPE, TABLE, every, randn

NVFP4 = TABLE["nvfp4"]
NAMES = ("nvfp4", "nvfp4-1d", "nvfp4-columnwise", "mxfp8", "mxfp8-2d", "mxfp8-swizzled")
NAMES += ("float8block", "float8block-1d", "float8", "float8-delayed")
every_quantizer = every(*NAMES)


def new_param(quantizer: Quantizer = NVFP4, **kwargs) -> nn.Parameter:
    return nn.Parameter(quantizer.quantize(randn(**kwargs)))


def param_with_init_val(**kwargs) -> nn.Parameter:
    """As quantize_model() makes it: the value before quantization is kept."""
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    layer.weight = nn.Parameter(randn(**kwargs))
    return quantize_model(layer, NVFP4).weight


def test_graphs_on_disk_are_told_apart_by_looks_alone():
    """torch.compile warns of tensors without this hash; values are not a part of it."""

    def key(quantizer=NVFP4, requires_grad=True, **kwargs):
        value = quantizer.quantize(randn(**kwargs))
        return nn.Parameter(value, requires_grad)._stable_hash_for_caching()

    fake = dataclasses.replace(NVFP4, operands=Operands(activations=True))
    others = [key(fake), key(MXFP8Quantizer()), key(shape=(96, 64)), key(requires_grad=False)]
    strided = new_param()
    strided._block_scale_inv = strided._block_scale_inv.t().contiguous().t()
    others.append(strided._stable_hash_for_caching())
    assert key(seed=1) == key() and len({key(), key(dtype=torch.bfloat16), *others}) == 7


@every_quantizer
def test_layout_dtype_and_device_of_the_input_do_not_matter(quantizer, device):
    value = randn(dtype=torch.bfloat16)
    expected = quantizer.quantize(value)
    views = [value.t().contiguous().t(), value.repeat_interleave(2, dim=1)[:, ::2]]
    views += [value.clone().requires_grad_(), value.float(), nn.Parameter(value)]
    x = value.float().requires_grad_()
    (quantizer.quantize(x * 2) * 3).sum().backward()  # gradients pass straight through
    assert torch.equal(x.grad, torch.full_like(x, 6.0))
    for x in views:
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


@pytest.mark.parametrize(
    "copies", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value, 0)), through_a_file]
)
@every_quantizer
def test_copies_are_independent_and_complete(quantizer, copies, device):
    param = new_param(quantizer, dtype=torch.bfloat16, device=device)
    param.tag = ["user's own"]
    twin, again, frozen = copies([param, param, param.detach()])
    assert twin is again and isinstance(twin, nn.Parameter) and twin.requires_grad
    assert twin._shared is frozen._shared is not param._shared
    assert not frozen.requires_grad and not isinstance(frozen, nn.Parameter)
    assert type(twin) is type(param) and twin.tag == param.tag and twin.tag is not param.tag
    for tensor in (twin, frozen):
        assert (tensor.dtype, tensor.device.type) == (torch.bfloat16, device)
        assert_identical(tensor, param)
        assert tensor.data_ptr() != param.data_ptr()
    twin.quantize_(randn(seed=1))
    assert_identical(twin.storage_tensors(), frozen.storage_tensors())


def test_gradients_are_deep_copied_and_files_are_loaded_elsewhere():
    param = param_with_init_val()
    param.grad = torch.ones(SHAPE)
    assert through_a_file(param, map_location="meta").device.type == "meta"
    assert torch.equal((read := through_a_file(param)).get_high_precision_init_val(), randn())
    read.detach().copy_(randn(seed=1))  # no copy of a model, whose averages one is warned of
    param.itself = param
    twin = copy.deepcopy(param)
    assert torch.equal(twin.grad, param.grad) and twin.grad is not param.grad
    twin.clear_high_precision_init_val()
    assert twin.itself is twin and torch.equal(param.get_high_precision_init_val(), randn())
    with pytest.raises(RuntimeError, match="only leaf tensors.*detach"):
        copy.deepcopy(param.clone())


@every(*(name for name in NAMES if TABLE[name].rowwise))
@pytest.mark.parametrize("swizzles", [False, True])
def test_copies_keep_the_codes_of_the_directions_that_both_have(quantizer, swizzles):
    swizzles &= quantizer.layout.scale_type in ("e4m3", "e8m0")
    rowwise = dataclasses.replace(quantizer, columnwise=False, optimize_for_gemm=swizzles)
    source, one = quantizer.quantize(randn()), rowwise.quantize(randn(seed=1))
    if source._amax is not None:
        source._amax.mul_(1.5)  # not what its values would be quantized to
    assert_identical(quantizer.quantize(source), source)
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


def test_checkpoints_hold_the_quantized_bytes_only():
    model = quantize_model(nn.Linear(256, 256, bias=False), "nvfp4")
    state_dict = model.state_dict()
    torch.save(state_dict, file := io.BytesIO())
    assert file.tell() < 1.1 * model.weight.nbytes_stored
    assert len(pickle.dumps(state_dict["weight"][:16])) < model.weight.nbytes_stored / 8
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


FORMATS = ("nvfp4", "mxfp8", None)


def model_in(recipe: str | None, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    return quantize_model(model, recipe) if recipe else model


@pytest.mark.parametrize("way", ["copy", "swap", "assign"])
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_state_dict_is_converted_to_the_format_of_the_model(source, target, way, monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", way == "swap")
    source, model = model_in(source, seed=1), model_in(target, seed=2)
    params = list(model.parameters())
    model[0].weight.requires_grad_(False)
    loaded = through_a_file(source.state_dict())
    model.load_state_dict(loaded, assign=way == "assign")
    kept = [a is b for a, b in zip(params, model.parameters(), strict=True)]
    assert all(kept) if way != "assign" else not any(kept)
    assert not model[0].weight.requires_grad and model[2].weight.requires_grad
    for i in (0, 2):
        weight, expected = model[i].weight, source[i].weight
        if way == "assign":  # taken as it is
            assert type(weight) is type(expected) and isinstance(weight, nn.Parameter)
            assert weight.data_ptr() == loaded[f"{i}.weight"].data_ptr()
        elif target is not None:
            expected = weight.quantizer.quantize(expected.detach())
        assert torch.equal(value_of(weight), value_of(expected))


@pytest.mark.parametrize("swap", [False, True], ids=["default", "swap"])
@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda m, device: m.to(device), torch.float32),
        (lambda m, device: m.float(), torch.float32),
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
    assert repr(param).startswith("NVFP4Tensor(shape=(64, 96), rowwise + columnwise")
    # Module.to(dtype) converts parameters; others are asked for their values, as p.data.float() is.
    values = param.dequantize(torch.float32)
    names = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "half"}
    for dtype, name in names.items():
        for converted in (param.to(dtype), getattr(param, name)()):
            assert isinstance(converted, NVFP4Tensor) and converted.dtype == dtype
            assert_identical(stored(converted), stored(param))
            assert (converted.data_ptr() == param.data_ptr()) == (dtype == param.dtype)
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


def test_gradients_flow_through_conversions_and_float64_is_refused():
    param = new_param(dtype=torch.bfloat16)
    results = (param.float(), param.clone(), param.dequantize(torch.float32), param.double())
    sum((result * 2).sum() for result in results).backward()
    assert torch.equal(param.grad, torch.full(SHAPE, 8.0, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="must be float32, bfloat16 or float16, got torch.float64"):
        model_in("nvfp4", seed=1).double()


def stepped_by_adamw(param, **options):
    param.grad = torch.ones(SHAPE)
    torch.optim.AdamW([param], lr=0.1, **options).step()


IN_PLACE = {
    "foreach_mul_": lambda p: torch._foreach_mul_([torch.ones(SHAPE), p], 2.0),
    "mul_": lambda p: p.mul_(2.0),
    "addcdiv_": lambda p: p.addcdiv_(torch.ones(SHAPE), torch.ones(SHAPE)),
    "item assignment": lambda p: p.__setitem__(0, 1.0),
    "out=": lambda p: torch.mul(p, 2, out=p),
    "orthogonal_": nn.init.orthogonal_,
    "AdamW": stepped_by_adamw,
    "AdamW foreach": lambda p: stepped_by_adamw(p, foreach=True),
    "AdamW fused": lambda p: stepped_by_adamw(p, fused=True),
}


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_operators_in_place_are_refused(write):
    param = new_param()
    before = copy.deepcopy(param)
    match = "must not write into a NVFP4Tensor.*FP4Adam.*quantized_init.*quantize_"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=match):
        write(param)
    assert_identical(param, before)


OVERWRITES = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(0.5),
    "normal_": lambda p: p.normal_(0, 0.02),
    "generator": lambda p: p.normal_(generator=torch.Generator().manual_seed(3)),
    "copy_": lambda p: p.copy_(randn(seed=1)),
    "quantize_": lambda p: getattr(p, "quantize_", p.copy_)(randn(seed=1)),
    "copy_ broadcast": lambda p: p.copy_(torch.linspace(-1, 1, 96)),
    "copy_ float64": lambda p: p.copy_(randn(seed=1).double()),
    "copy_ quantized": lambda p: p.copy_(new_param(seed=1)),
    "copy_ other format": lambda p: p.copy_(new_param(MXFP8Quantizer(), seed=1)),
    "foreach_copy_": lambda p: torch._foreach_copy_([p], [randn(seed=1)]),
    "init.trunc_normal_ cut": lambda p: nn.init.trunc_normal_(p, std=0.02, a=-0.04, b=0.04),
    "init.trunc_normal_ tail": lambda p: nn.init.trunc_normal_(p, a=1.5, b=2.0),
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
    if write in (OVERWRITES["copy_ quantized"], OVERWRITES["copy_ other format"]):
        assert value is None
    else:
        assert torch.equal(value, expected)


def test_plain_tensors_take_values_unrounded_and_are_made_like_it():
    param = new_param(dtype=torch.bfloat16)
    assert torch.equal(torch.zeros(SHAPE).copy_(param.detach()), param.dequantize(torch.float32))
    double = torch.zeros(SHAPE, dtype=torch.float64).copy_(param.detach())
    assert torch.equal(double, param.dequantize(torch.float32).double())
    kinds = Float8Quantizer(), Float8Quantizer(force_pow_2_scales=True)  # of one layout
    source, target = (kind.quantize(randn()) for kind in kinds)
    assert_identical(target.copy_(source), kinds[1].quantize(source.dequantize(torch.float32)))
    for fn in (torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like):
        assert type(fn(param)) is Tensor and fn(param).dtype == torch.bfloat16
        assert fn(param, dtype=torch.float32).dtype == torch.float32
    assert type(torch.empty_like(param, dtype=torch.float32)) is Tensor
    plain = torch.zeros(3)
    torch._foreach_copy_([param.detach(), plain], [randn(), torch.ones(3)])
    assert torch.equal(plain, torch.ones(3)) and plain._version
    with pytest.raises(AttributeError, match="a NVFP4Tensor keeps no value"):
        param.get_high_precision_init_val()  # none is kept unasked


def test_assigning_data(device):
    param, other = param_with_init_val(device=device), new_param(seed=1)
    address = param.data_ptr()
    with pytest.warns(UserWarning, match="are rounded .* make the weights plain first"):
        param.data = randn(seed=2)  # as merging DoRA adapters does
    assert param.data_ptr() == address
    assert_identical(stored(param), stored(NVFP4.quantize(randn(seed=2))))
    param.data = NVFP4.quantize(randn(seed=2))  # the same bytes
    assert torch.equal(param.get_high_precision_init_val().cpu(), randn(seed=2))
    version = param._version
    # Another device than the parameter's: the bytes follow the parameter.
    param.data = other.data
    assert param._version > version and param._high_precision_init_val is None
    assert param.device == param._rowwise_data.device and param.device.type == device
    assert_identical(param, other)
    with pytest.raises(ValueError, match=r"data must have the shape .*\(64, 96\), got \(3, 3\)"):
        param.data = torch.zeros(3, 3)


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
        lambda w: w.as_strided((64,), (1,)),
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


def test_exports_of_the_memory_are_refused():
    tensor = new_param().detach()
    with pytest.raises(BufferError, match="must be plain, got a NVFP4Tensor; .*dequantize"):
        torch.from_dlpack(tensor)
    for export in (tensor.numpy, tensor.tolist, lambda: np.asarray(tensor)):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            export()
    with pytest.raises(RuntimeError, match="weights must be plain tensors to be saved by memory"):
        safetensors.torch.save({"weight": tensor})


def test_inference_mode():
    model = model_in("nvfp4", seed=1)
    expected = model(randn((2, 96)))
    with torch.inference_mode():
        assert torch.equal(model(randn((2, 96))), expected)
        quantize_model(nn.Linear(96, 64), "nvfp4")(randn((2, 96)))
        model[0].weight.quantize_(randn(seed=1))
    assert not model[0].weight.is_inference()
    assert_identical(model[0].weight, model[0].weight.quantizer.quantize(randn(seed=1)))


def test_values_are_known_by_their_codes_but_for_the_last_bit_of_a_scale():
    between = [(2 * k + 1) * 2.0**e for e in range(-3, 4) for k in range(8, 16)]
    x = torch.tensor([[448.0, *between]]) / 448
    tensor = Float8BlockQuantizer(force_pow_2_scales=False).quantize(x)
    assert (encoding.recode(tensor.quantizer, x, tensor.inner) != tensor.rowwise_data).any()
    assert is_of(tensor, x) and not is_of(tensor, 0.86 * x)


def test_names_of_float8_are_its_memory():
    tensor = Float8Quantizer()(randn(dtype=torch.bfloat16))
    assert torch.equal(tensor._data, tensor.rowwise_data) and not tensor._transpose_invalid
    assert torch.equal(tensor._transpose, tensor.columnwise_data)
    assert torch.equal(tensor._scale_inv, tensor.rowwise_scale_inv)
    stack = Float8Quantizer()(randn(dtype=torch.bfloat16).view(4, 16, 96))
    assert torch.equal(stack._data, tensor._data.view(4, 16, 96))
    assert torch.equal(stack._transpose, tensor._data.t().reshape(96, 4, 16))
    stack._data = moved = stack._data.clone()
    assert stack.data_ptr() == moved.data_ptr()
    assert torch.equal(stack.dequantize(), tensor.dequantize().view(4, 16, 96))


@every("nvfp4", "nvfp4-1d", "nvfp4-swizzled", "mxfp8", "mxfp8-2d-swizzled", "float8block", "float8")
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
def test_a_direction_that_is_dropped_comes_back_where_it_can(quantizer, usage):
    param = nn.Parameter(quantizer(value := randn(dtype=torch.bfloat16)))
    assert param._quantizer is param._get_quantizer() is quantizer
    assert param.get_usages() == {"rowwise": True, "columnwise": True}
    whole = {name: inner.clone() for name, inner in param.storage_tensors().items()}
    if usage == "rowwise" and quantizer.layout.shares_codes:
        with pytest.raises(ValueError, match="rowwise must be True with two_dimensional=True"):
            param.update_usage(rowwise_usage=False)
        return
    expected = dataclasses.replace(quantizer, **{usage: False})(value).storage_tensors()

    param.update_usage(**{f"{usage}_usage": False})

    assert param.get_usages() == {"rowwise": usage != "rowwise", "columnwise": usage == "rowwise"}
    assert_identical(param.storage_tensors(), expected)
    if usage == "columnwise" and quantizer.layout.is_square:
        param.update_usage(columnwise_usage=True)
        assert param.quantizer == quantizer
        assert_identical(param.storage_tensors(), whole)
    else:
        with pytest.raises(RuntimeError, match=f"{usage} codes of a .* must be stored already"):
            param.update_usage(rowwise_usage=True, columnwise_usage=True)
    with pytest.raises(ValueError, match="must not both be False"):
        param.update_usage(False, False)


def test_quantizers_are_shared_and_stay_as_they_are():
    quantizer = MXFP8Quantizer(columnwise=False)
    assert quantizer.rowwise_usage and not quantizer.columnwise_usage and not quantizer.internal
    assert quantizer.copy() is quantizer
    quantizer.set_usage(rowwise=True)
    assert type("Own", (MXFP8Quantizer,), {})().has_kernels  # those of its base
    with pytest.raises(TypeError, match=r"columnwise of a quantizer must not change, got True"):
        quantizer.set_usage(columnwise=True)


def test_values_are_of_three_dtypes():
    tensor = NVFP4.quantize(randn())
    makes = tensor.quantizer.quantize, lambda x: tensor.quantizer.make_empty(x.shape, x.dtype)
    for call in (tensor.quantize_, lambda x: tensor.dequantize(x.dtype), *makes):
        with pytest.raises(TypeError, match=r"must be float32.*got torch\.float64; convert"):
            call(torch.zeros(SHAPE, dtype=torch.float64))
    with pytest.raises(TypeError, match="x must be a dense tensor, got a list"):
        NVFP4.quantize([1.0])
