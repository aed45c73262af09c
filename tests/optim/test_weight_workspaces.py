"""Quantized copies of BF16 weights, kept up to date after each step."""

import copy
import gc
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from triton.runtime.interpreter import GridExecutor

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MasterWeightOptimizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    WeightWorkspaces,
)
from fp4adam.formats import minifloat
from fp4adam.optim import weight_workspaces
from fp4adam.tensors import backend
from helpers import random
from te_stand_ins import Wrapper, assert_bytes, stand_in, te_bytes

SHAPE = (32, 96)
QUANTIZERS = {
    "nvfp4": NVFP4Quantizer(),
    "nvfp4-swizzled": NVFP4Quantizer(optimize_for_gemm=True),
    "nvfp4-1d": NVFP4Quantizer(two_dimensional=False),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8-swizzled": MXFP8Quantizer(optimize_for_gemm=True),
    "float8block": Float8BlockQuantizer(),
    "float8block-1d": Float8BlockQuantizer(two_dimensional=False),
    "float8": Float8Quantizer(),
    "float8-rowwise": Float8Quantizer(columnwise=False),
}
DELAYED = Float8Quantizer(scaling="delayed", amax_history_len=2, amax_compute_algo="most_recent")
every_format = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
OPTIMIZERS = {
    "FP4Adam": lambda params: FP4Adam(params, lr=1e-2),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "remainders": lambda params: FusedAdam(params, lr=1e-2, store_param_remainders=True),
    "MasterWeightOptimizer": lambda p: MasterWeightOptimizer(p, torch.optim.SGD, lr=1e-2),
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


class TELinear(nn.Module):
    """A layer with the attributes of Transformer Engine's that hold workspaces."""

    def __init__(self, weight: Tensor, quantizer: Quantizer, parts: int = 1) -> None:
        super().__init__()
        self.quantizer, self._fp8_workspaces = quantizer, {}
        self.primary_weights_in_fp8 = False
        self.weight_names = ["weight"] if parts == 1 else [f"part{i}_weight" for i in range(parts)]
        buffer = weight.clone()
        for name, part in zip(self.weight_names, buffer.chunk(parts), strict=True):
            self.register_parameter(name, Parameter(part))

    @property
    def fused(self) -> Tensor:
        return torch.cat([getattr(self, name).detach() for name in self.weight_names])

    def forward(self, x: Tensor) -> Tensor:
        if "weight" not in self._fp8_workspaces:
            self._fp8_workspaces["weight"] = stand_in(self.quantizer.quantize(self.fused))
        return x @ self.fused.float().t()


def value(seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return random(SHAPE, seed, device, scale=0.1).to(dtype)


def te_model(quantizer: Quantizer, parts: int = 1, device: str = "cpu") -> nn.Sequential:
    model = nn.Sequential(*(TELinear(value(i, device), quantizer, parts) for i in range(2)))
    for layer in model:
        layer(torch.ones(1, SHAPE[1], device=device))
    return model


def step(optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = random(tuple(param.shape), seed, param.device).to(param.dtype)
    optimizer.step()


def assert_current(tensor: Tensor, weight: Tensor, quantizer: Quantizer) -> None:
    """The copy has the bytes of its weight, quantized."""
    wanted = quantizer.quantize(weight.detach())
    if isinstance(tensor, Wrapper):
        assert_bytes(tensor, stand_in(wanted))
    else:
        assert tensor.has_bytes_of(wanted)


def is_current(tensor: Tensor, weight: Tensor, quantizer: Quantizer) -> bool:
    try:
        assert_current(tensor, weight, quantizer)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("kind", ["own", "te"])
@every_format
def test_copies_are_the_quantized_weights_after_each_step(quantizer, kind, path_device):
    weights = [Parameter(value(i, path_device)) for i in range(2)]
    copies = [quantizer.quantize(weight.detach()) for weight in weights]
    if kind == "te":
        copies = [*map(stand_in, copies)]
    parts = [te_bytes(each) if kind == "te" else each.storage_tensors() for each in copies]
    addresses = [[x.data_ptr() for x in each.values()] for each in parts if kind == "own"]
    optimizer = FP4Adam(weights, lr=1e-2)
    optimizer.register_step_post_hook(WeightWorkspaces(dict(zip(weights, copies, strict=True))))
    for seed in range(2):
        step(optimizer, seed)
        for weight, tensor in zip(weights, copies, strict=True):
            assert_current(tensor, weight, quantizer)
    if kind == "own":
        after = [[x.data_ptr() for x in each.storage_tensors().values()] for each in copies]
        assert after == addresses


def launches(n_weights: int, quantizer: Quantizer, device: str) -> int:
    """Kernels of a write that repeats an earlier one."""
    weights = [Parameter(value(i, device)) for i in range(n_weights)]
    copies = [stand_in(quantizer.quantize(weight.detach())) for weight in weights]
    workspaces = WeightWorkspaces(dict(zip(weights, copies, strict=True)))
    workspaces.write()
    run = GridExecutor.__call__
    with mock.patch.object(GridExecutor, "__call__", autospec=True, side_effect=run) as calls:
        workspaces.write()
    return calls.call_count


LAUNCHED = {n: QUANTIZERS[n] for n in ("nvfp4-swizzled", "mxfp8-swizzled", "float8block", "float8")}
LAUNCHED["float8-delayed"] = DELAYED


@pytest.mark.parametrize("name", LAUNCHED)
@pytest.mark.parametrize("path_device", ["kernel"], indirect=True)
def test_launches_do_not_depend_on_the_number_of_weights(name, path_device):
    if path_device == "cuda":
        pytest.skip("counts in the interpreter")
    few, many = (launches(n, LAUNCHED[name], path_device) for n in (1, 3))
    assert 0 < few == many <= 8


def test_delayed_scales_of_other_packages(path_device):
    weights = [Parameter(value(i, path_device)) for i in range(2)]
    copies = [stand_in(DELAYED.quantize(weight.detach())) for weight in weights]
    workspaces = WeightWorkspaces(dict(zip(weights, copies, strict=True)))
    for i in range(3):
        for j, (weight, tensor) in enumerate(zip(weights, copies, strict=True)):
            with torch.no_grad():
                weight.mul_(-0.75 if i == 1 else 1.5)
            # As the package does it: in place, or by a new tensor. 448 / 2^n has an exact amax.
            scale = torch.full((1,), 2.0 ** (8 + i + j), device=path_device)
            if i < 2:
                tensor._quantizer.scale.copy_(scale)
                tensor._quantizer.amax.zero_()
            else:
                tensor._quantizer.scale, tensor._quantizer.amax = scale, torch.zeros_like(scale)
        workspaces.write()
        for weight, tensor in zip(weights, copies, strict=True):
            scale = tensor._quantizer.scale
            codes = minifloat.e4m3_code(weight.detach().float() * scale)
            assert torch.equal(tensor._data, codes)
            assert torch.equal(tensor._transpose, codes.t())
            assert torch.equal(tensor._scale_inv, 1 / scale)
            assert tensor._quantizer.amax.item() == weight.abs().max().item()


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_histories_of_several_copies(algo, path_device):
    quantizer = Float8Quantizer(scaling="delayed", amax_history_len=3, amax_compute_algo=algo)
    weights = [Parameter(value(i, path_device)) for i in range(2)]
    copies, alone = ([quantizer.quantize(w.detach()) for w in weights] for _ in range(2))
    workspaces = WeightWorkspaces(dict(zip(weights, copies, strict=True)))
    for factor in (4.0, 0.5, 0.0, float("inf"), 1.0):
        with torch.no_grad():
            weights[0].fill_(factor)
            weights[1].copy_(value(1, path_device) * min(factor, 3.0))
        workspaces.write()
        for weight, tensor, other in zip(weights, copies, alone, strict=True):
            other.quantize_(weight.detach())
            for name, inner in tensor.storage_tensors().items():
                assert torch.equal(inner, other.storage_tensors()[name]), name


def test_weights_that_take_different_passes_are_written_together(path_device):
    quantizers = [Float8BlockQuantizer()] * 3 + [NVFP4Quantizer(), Float8Quantizer(), DELAYED]
    shapes = [SHAPE, (33, 130), (160, 144)] + [SHAPE] * 3
    weights = [
        random(shape, i, path_device, scale=0.1).to(torch.bfloat16)
        for i, shape in enumerate(shapes)
    ]
    weights[0] = weights[0].cpu()  # on another device than the others, if they are on a GPU
    buffer = torch.zeros(SHAPE[0] * SHAPE[1] + 1, dtype=torch.bfloat16, device=path_device)
    weights[4] = buffer[1:].view(SHAPE)  # at an address that is not aligned
    pairs = [*zip(quantizers, weights, strict=True)]
    copies, alone = ([q.quantize(weight) for q, weight in pairs] for _ in range(2))
    workspaces = WeightWorkspaces(dict(zip(weights, copies, strict=True)))
    for _ in range(3):
        for weight, tensor in zip(weights, alone, strict=True):
            weight.mul_(-1.5).add_(0.01)
            tensor.quantize_(weight)
        workspaces.update()
        for tensor, wanted in zip(copies, alone, strict=True):
            assert tensor.has_bytes_of(wanted)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("path_device", ["kernel"], indirect=True)
def test_a_repeated_write_sees_what_has_moved(parts, path_device):
    quantizer = Float8BlockQuantizer()
    model = te_model(quantizer, parts, path_device)
    workspaces = WeightWorkspaces(model)
    name = model[0].weight_names[-1]

    def moved(x: Tensor) -> Tensor:
        return x.detach().mul(2).clone()

    def replace_parameter() -> None:
        setattr(model[0], name, Parameter(moved(getattr(model[0], name))))

    def replace_data() -> None:
        param = getattr(model[0], name)
        param.data = moved(param)

    def make_strided() -> None:
        param = getattr(model[0], name)
        param.data = moved(param).t().contiguous().t()

    def read_across() -> None:
        param = getattr(model[0], name)
        rows, cols = param.shape
        strides = (1, rows) if param.is_contiguous() else (cols, 1)
        param.data = param.data.as_strided(param.shape, strides)

    def replace_copy() -> None:
        model[0]._fp8_workspaces["weight"] = stand_in(quantizer.quantize(value(9, path_device)))

    def replace_codes() -> None:
        tensor = model[0]._fp8_workspaces["weight"]
        tensor._rowwise_data = torch.zeros_like(tensor._rowwise_data)

    def exchange_layers() -> None:
        a, b = (layer._fp8_workspaces for layer in model)
        model[0]._fp8_workspaces, model[1]._fp8_workspaces = b, a

    def write_values() -> None:
        with torch.no_grad():
            getattr(model[1], name).neg_()

    for change in (
        write_values,
        replace_parameter,
        replace_data,
        replace_copy,
        replace_codes,
        exchange_layers,
        read_across,
        make_strided,
        write_values,
    ):
        for write in (workspaces.write, workspaces.write, workspaces.update):
            change()
            write()
            for layer in model:
                assert_current(layer._fp8_workspaces["weight"], layer.fused, quantizer)


def test_nothing_is_prepared_again_between_equal_writes():
    quantizer = NVFP4Quantizer()
    workspaces = WeightWorkspaces(te_model(quantizer))
    workspaces.write()
    made = mock.Mock(side_effect=AssertionError)
    with mock.patch.multiple(weight_workspaces, _Writer=made, WorkspaceWatch=made):
        workspaces.update()
        workspaces.write()


def test_memory_of_weights_is_not_kept(path_device):
    weight = Parameter(value(0, path_device))
    workspaces = WeightWorkspaces({weight: Float8Quantizer().quantize(weight.detach())})
    for _ in range(2):
        workspaces.write()
    gc.collect()  # the interpreter leaves cycles with the arguments of its kernels
    before = StorageWeakRef(weight.untyped_storage())
    weight.data = value(1, path_device)
    assert before.expired()


def test_a_copy_that_comes_later_leaves_the_others():
    quantizer = MXFP8Quantizer()
    model = te_model(quantizer)
    later = model[1]._fp8_workspaces.pop("weight")
    workspaces = WeightWorkspaces(model)
    workspaces.update()
    tensor = model[0]._fp8_workspaces["weight"]
    versions = tensor._version, tensor._rowwise_data._version
    model[1]._fp8_workspaces["weight"] = later
    with torch.no_grad():
        model[1].weight.mul_(2)
    workspaces.update()
    assert (tensor._version, tensor._rowwise_data._version) == versions
    assert_current(later, model[1].weight, quantizer)
    # Nor does one that goes hide a write to another.
    model[1]._fp8_workspaces.pop("weight")
    with torch.no_grad():
        tensor._rowwise_data.zero_()
    workspaces.update()
    assert_current(tensor, model[0].weight, quantizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_other_dtypes(dtype, path_device):
    weight, quantizer = Parameter(value(0, path_device, dtype)), Float8BlockQuantizer()
    tensor = stand_in(quantizer.quantize(weight.detach().bfloat16()))
    optimizer = FusedAdam([weight], lr=1e-2)
    optimizer.register_step_post_hook(WeightWorkspaces({weight: tensor}))
    step(optimizer)
    wanted = stand_in(quantizer.quantize(weight.detach()))
    for name, bytes_ in te_bytes(tensor).items():
        assert torch.equal(bytes_, getattr(wanted, name))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("parts", [1, 2])
def test_the_workspaces_of_a_model_follow_any_optimizer(make, parts):
    quantizer = MXFP8Quantizer(optimize_for_gemm=True)
    model = te_model(quantizer, parts)
    optimizer = make(model.parameters())
    optimizer.register_step_post_hook(WeightWorkspaces(model))
    before = [layer._fp8_workspaces["weight"] for layer in model]
    for seed in range(2):
        step(optimizer, seed)
        for layer, tensor in zip(model, before, strict=True):
            assert layer._fp8_workspaces["weight"] is tensor
            assert_current(tensor, layer.fused, quantizer)


def test_parts_that_do_not_follow_each_other_are_joined():
    quantizer = NVFP4Quantizer()
    model = te_model(quantizer, parts=2)
    layer = model[0]
    layer.part0_weight = Parameter(layer.part0_weight.detach().clone())
    WeightWorkspaces(model).update()
    assert_current(layer._fp8_workspaces["weight"], layer.fused, quantizer)
    with torch.no_grad():
        layer.part0_weight.mul_(2)
    WeightWorkspaces(model).write()
    assert_current(layer._fp8_workspaces["weight"], layer.fused, quantizer)


def test_workspaces_that_are_made_later_are_found():
    quantizer = Float8Quantizer()
    model = nn.Sequential(TELinear(value(), quantizer))
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(WeightWorkspaces(model))
    step(optimizer)
    assert not model[0]._fp8_workspaces
    model(torch.ones(1, SHAPE[1]))
    step(optimizer)
    assert_current(model[0]._fp8_workspaces["weight"], model[0].weight, quantizer)


@pytest.mark.parametrize("kind", ["own", "te"])
def test_only_what_has_changed_is_written(kind):
    quantizer = MXFP8Quantizer()
    weights = [Parameter(value(i)) for i in range(2)]
    copies = [quantizer.quantize(weight.detach()) for weight in weights]
    if kind == "te":
        copies = [*map(stand_in, copies)]
    workspaces = WeightWorkspaces(dict(zip(weights, copies, strict=True)))
    workspaces.update()
    versions = [tensor._version for tensor in copies]
    workspaces.update()
    assert [tensor._version for tensor in copies] == versions
    with torch.no_grad():
        weights[1].mul_(2)
    workspaces.update()
    assert copies[0]._version == versions[0] and copies[1]._version > versions[1]
    assert_current(copies[1], weights[1], quantizer)
    for tensor, weight in zip(copies, weights, strict=True):
        tensor._rowwise_data.zero_()
        workspaces.update()
        assert_current(tensor, weight, quantizer)
    workspaces.write()
    assert copies[0]._version > versions[0]


def test_a_hook_of_the_model_notices_what_other_code_writes():
    quantizer = NVFP4Quantizer()
    model, other = te_model(quantizer), te_model(quantizer)
    with torch.no_grad():
        other[0].weight.mul_(3)
    workspaces = WeightWorkspaces(model)
    workspaces.update()
    model.register_forward_pre_hook(workspaces)
    model.load_state_dict(other.state_dict())
    tensor = model[0]._fp8_workspaces["weight"]
    assert not is_current(tensor, model[0].weight, quantizer)
    model[0].forward, x = lambda x: x, torch.ones(1, SHAPE[1])
    model(x)
    assert_current(tensor, model[0].weight, quantizer)
    # Replaced parameters, memory and copies are noticed too.
    model[0].weight = Parameter(value(7))
    model(x)
    assert_current(tensor, model[0].weight, quantizer)
    model[0].weight.data = value(8)
    model(x)
    assert_current(tensor, model[0].weight, quantizer)
    with torch.no_grad():
        tensor._rowwise_data.zero_()
    model(x)
    assert_current(tensor, model[0].weight, quantizer)


def test_writes_that_raise_no_version_need_a_write():
    quantizer = Float8Quantizer()
    weight = Parameter(value())
    tensor = quantizer.quantize(weight.detach())
    workspaces = WeightWorkspaces({weight: tensor})
    workspaces.update()
    weight.data.mul_(2)
    workspaces.update()
    assert not is_current(tensor, weight, quantizer)
    workspaces.write()
    assert_current(tensor, weight, quantizer)


@pytest.mark.parametrize("path_device", ["torch", "kernel"], indirect=True)
def test_a_skipped_step_leaves_weights_and_copies(path_device):
    quantizer = NVFP4Quantizer()
    weight = Parameter(value(0, path_device))
    tensor = quantizer.quantize(weight.detach())
    optimizer = FusedAdam([weight], lr=1e-2)
    optimizer.register_step_post_hook(WeightWorkspaces({weight: tensor}))
    before = weight.detach().clone()
    optimizer.found_inf = torch.ones((), device=path_device)
    step(optimizer)
    assert torch.equal(weight, before)
    assert_current(tensor, weight, quantizer)
    optimizer.found_inf.zero_()
    step(optimizer)
    assert not torch.equal(weight, before)
    assert_current(tensor, weight, quantizer)


@pytest.mark.parametrize("path_device", ["torch", "kernel"], indirect=True)
def test_skipped_steps_of_a_scaler(path_device):
    quantizer = Float8Quantizer()
    weight = Parameter(value(0, path_device).float())  # torch unscales no BF16 gradients on CUDA
    tensor = stand_in(quantizer.quantize(weight.detach()))
    optimizer = FusedAdam([weight], lr=1e-2)
    optimizer.register_step_post_hook(WeightWorkspaces({weight: tensor}))
    scaler = torch.amp.GradScaler(torch.device(path_device).type, init_scale=4.0)
    for factor in (float("inf"), 1.0):
        scaler.scale((weight.float() * factor).sum()).backward()
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) == (factor != 1.0)
        assert_current(tensor, weight, quantizer)
        optimizer.zero_grad()


def test_gradient_release():
    quantizer = NVFP4Quantizer()
    weight = Parameter(value())
    tensor = quantizer.quantize(weight.detach())
    optimizer = FusedAdam([weight], lr=1e-2)
    optimizer.register_step_post_hook(WeightWorkspaces({weight: tensor}))
    optimizer.enable_gradient_release()
    before = weight.detach().clone()
    weight.float().square().sum().backward()
    assert not torch.equal(weight, before)
    optimizer.step()
    assert_current(tensor, weight, quantizer)


def test_a_forward_pass_in_inference_mode_updates():
    quantizer = Float8BlockQuantizer()
    model = te_model(quantizer)
    model.register_forward_pre_hook(WeightWorkspaces(model))
    model[1].forward = lambda x: x
    with torch.no_grad():
        model[0].weight.mul_(2)
    with torch.inference_mode():
        model(torch.ones(1, SHAPE[1]))
    assert_current(model[0]._fp8_workspaces["weight"], model[0].weight, quantizer)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(WeightWorkspaces(model))
    step(optimizer)
    assert_current(model[0]._fp8_workspaces["weight"], model[0].weight, quantizer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_hooks_of_a_copied_model_are_for_the_copy(copied):
    quantizer = NVFP4Quantizer()
    model = te_model(quantizer)
    for layer in model:
        layer._fp8_workspaces["weight"] = quantizer.quantize(layer.weight.detach())
    model.register_forward_pre_hook(WeightWorkspaces(model))
    x = torch.ones(1, SHAPE[1])
    other = copied(model)
    with torch.no_grad():
        other[0].weight.mul_(2)
    for hook in other._forward_pre_hooks.values():
        hook(other, x)
    for each in (model, other):
        assert_current(each[0]._fp8_workspaces["weight"], each[0].weight, quantizer)


def test_compiled_models_are_updated_too():
    quantizer = MXFP8Quantizer()
    model = te_model(quantizer)
    workspaces = WeightWorkspaces(model)
    plain = nn.Linear(4, 4)
    plain.register_forward_pre_hook(workspaces)
    compiled = torch.compile(plain, backend="eager")
    for factor in (2, 3):
        with torch.no_grad():
            model[0].weight.mul_(factor)
        compiled(torch.ones(1, 4))
        assert_current(model[0]._fp8_workspaces["weight"], model[0].weight, quantizer)


def test_frozen_weights_keep_their_copies():
    quantizer = NVFP4Quantizer()
    weights = [Parameter(value(i)) for i in range(2)]
    copies = [quantizer.quantize(weight.detach()) for weight in weights]
    optimizer = FusedAdam(weights, lr=1e-2)
    optimizer.register_step_post_hook(WeightWorkspaces(dict(zip(weights, copies, strict=True))))
    step(optimizer)
    version = copies[1]._version
    weights[0].grad, weights[1].grad = torch.ones_like(weights[0]), None
    optimizer.step()
    assert copies[1]._version == version
    for weight, tensor in zip(weights, copies, strict=True):
        assert_current(tensor, weight, quantizer)


def test_copies_of_optimizers_write_nothing():
    quantizer = NVFP4Quantizer()
    model = te_model(quantizer)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(WeightWorkspaces(model))
    step(optimizer)
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not made._optimizer_step_post_hooks
        step(made)
        assert_current(model[0]._fp8_workspaces["weight"], model[0].weight, quantizer)


def test_workspaces_that_no_longer_fit_are_made_again():
    quantizer = Float8BlockQuantizer()
    model = te_model(quantizer)
    workspaces = WeightWorkspaces(model)
    model[0].weight = Parameter(value()[:16].clone())
    model[1].to("meta")
    workspaces.update()
    assert not model[0]._fp8_workspaces and not model[1]._fp8_workspaces


def test_capture_is_refused(monkeypatch):
    weight = Parameter(value())
    workspaces = WeightWorkspaces({weight: NVFP4Quantizer().quantize(weight.detach())})
    monkeypatch.setattr(backend, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="got a call in one; call write"):
        workspaces.update()


def quantized(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return NVFP4Quantizer().quantize(torch.zeros(shape))


class Other(Wrapper):
    """A class without an adapter."""


BAD = {
    "list": (lambda w: [w], TypeError, "got a list; pass the model"),
    "no module": (lambda w: nn.Linear(2, 2), ValueError, "modules of Transformer Engine .* Linear"),
    "double": (lambda w: {w.double(): quantized()}, ValueError, "got a Tensor of torch.float64"),
    "quantized weight": (lambda w: {quantized(): quantized()}, ValueError, "got a NVFP4Tensor"),
    "plain copy": (lambda w: {w: w.clone()}, ValueError, "must be whole quantized .* got a Tensor"),
    "shape": (lambda w: {w: quantized((16, 96))}, ValueError, r"\(32, 96\) on cpu, got \(16, 96\)"),
    "device": (lambda w: {w.to("meta"): quantized()}, ValueError, "on meta, got .* on cpu"),
    "class": (
        lambda w: {w: Other(SHAPE, w.dtype, data=w.detach())},
        TypeError,
        "have an adapter, got .*Other",
    ),
    "format": (
        lambda w: {w: stand_in(MXFP8Quantizer().quantize(w), _fp8_dtype="E5M2")},
        ValueError,
        "_fp8_dtype of a MXFP8Tensor must be kFloat8E4M3",
    ),
}


@pytest.mark.parametrize(("source", "error", "words"), BAD.values(), ids=BAD)
def test_bad_sources_are_refused_at_once(source, error, words):
    with pytest.raises(error, match=words):
        WeightWorkspaces(source(value()))


def test_every_part_of_a_weight_is_checked():
    model = te_model(NVFP4Quantizer(), parts=2)
    model[1].part1_weight = Parameter(model[1].part1_weight.double())
    with pytest.raises(ValueError, match="got a Parameter of torch.float64"):
        WeightWorkspaces(model)


def test_sharded_weights_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(value(), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match="must be whole .* got a DTensor of placements"):
            WeightWorkspaces({weight: quantized()})
        layer = nn.Linear(96, 32, bias=False)
        layer.weight = Parameter(quantized())
        fully_shard(layer)
        for shard in (layer.weight, layer.weight.to_local()):
            with pytest.raises(ValueError, match="must be whole .* that is a shard"):
                WeightWorkspaces({value(): shard})
        # A module that was sharded after its first forward pass does not read its copy again.
        model = te_model(NVFP4Quantizer())
        workspaces = WeightWorkspaces(model)
        model[0].weight = Parameter(weight)
        workspaces.update()
        assert not model[0]._fp8_workspaces and model[1]._fp8_workspaces
    finally:
        dist.destroy_process_group()


def test_modules_with_quantized_weights_have_no_workspaces():
    model = te_model(NVFP4Quantizer())
    for layer in model:
        layer.primary_weights_in_fp8 = True
    with pytest.raises(ValueError, match="whose weights are not quantized"):
        WeightWorkspaces(model)


def test_nothing_is_written_if_one_copy_is_bad():
    quantizer = NVFP4Quantizer()
    weights = [Parameter(value(i)) for i in range(2)]
    copies = [stand_in(quantizer.quantize(torch.zeros(SHAPE))) for _ in weights]
    workspaces = WeightWorkspaces(dict(zip(weights, copies, strict=True)))
    copies[1]._row_scaled_nvfp4 = True
    copies[1]._rowwise_data = copies[1]._rowwise_data.clone()
    before = te_bytes(copies[0])
    with pytest.raises(ValueError, match="_row_scaled_nvfp4 of a NVFP4Tensor"):
        workspaces.update()
    assert all(torch.equal(x, before[name]) for name, x in te_bytes(copies[0]).items())
