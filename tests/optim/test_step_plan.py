"""What a step takes over from the one before, how little it launches, and who may watch it."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.runtime import _async_compile

import helpers
from fp4adam import Float8BlockQuantizer, Float8Quantizer, FP4Adam, FusedAdam, MasterWeightOptimizer
from fp4adam.kernels.launch import launch
from fp4adam.optim import launch_group, step_plan
from fp4adam.optim.adam import adam_scalars
from fp4adam.optim.update_bound import next_ratio, ratio_after
from fp4adam.tensors.fingerprint import Column, Fingerprint
from helpers import RECIPES, assert_identical, assert_same_training, launched_by, make_weight, randn

pytestmark = pytest.mark.usefixtures("through_the_kernels")


def make_params(device, quantizer=RECIPES["mxfp8"]):
    """Quantized matrices and plain vectors, in BF16."""
    values = [randn(32, 64, seed=i, device=device) * 0.02 for i in range(2)]
    params = [torch.nn.Parameter(quantizer.quantize(value.bfloat16())) for value in values]
    vectors = [randn(n, seed=n, device=device).bfloat16() for n in (40, 1024)]
    return params + [torch.nn.Parameter(value) for value in vectors]


def set_grads(params, seed, skip=()):
    helpers.set_grads(params, seed, scale=1e-2)
    for i in skip:
        params[i].grad = None


def assert_goes_on_as_operators(optimizer):
    """One more step, with kernels and, on a copy, with operators."""
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["fused"] = False
    for each in (optimizer, twin):
        params = each.param_groups[0]["params"]
        set_grads(params, seed=9)
        for param in params[1:2]:  # one of two that a launch steps
            param.grad = torch.stack((param.grad, param.grad), -1)[..., 0]
        each.step()
    assert_same_training(optimizer, twin)


@pytest.fixture
def trained(device):
    """An optimizer after two steps."""
    optimizer = FP4Adam(make_params(device), lr=1e-2, weight_decay=0.1)
    for seed in range(2):
        set_grads(optimizer.param_groups[0]["params"], seed)
        optimizer.step()
    return optimizer


# What stays


def test_plan_stays_while_only_gradients_and_scalars_change(trained, device):
    plan, params = trained._whole.plan, trained.param_groups[0]["params"]
    for seed in range(2, 6):
        trained.zero_grad(set_to_none=bool(seed % 2))
        set_grads(params, seed, skip=(seed % 4,))
        trained.param_groups[0]["lr"] = 1e-2 / seed
        trained.step()
    for overflow in (1.0, 0.0, 1.0):  # which the device skips, and then nobody counts
        trained.found_inf = torch.full((1,), overflow, device=params[0].device)
        trained.step()
    del trained.found_inf
    assert [trained.state[param]["step"].item() for param in params] == [6, 5, 6, 6]
    assert trained._whole.plan is plan
    for skip in ((0,), ()):
        set_grads(params, 6, skip)
        trained.step()
    bound = ratio_after(11, adam_scalars(trained.param_groups[0], 1))  # of any member
    assert plan.counter._ratio == pytest.approx(bound)
    trained.load_state_dict(trained.state_dict())
    for skipped in (1, 2):  # those without a gradient are planned as well
        set_grads(params, 6, skip=(skipped,))
        trained.step()
        plan = plan if skipped == 2 else trained._whole.plan
    assert trained._whole.plan is plan
    weak = [torch._C._WeakTensorRef(param.grad) for param in params if param.grad is not None]
    trained.zero_grad()
    assert all(ref.expired() for ref in weak)
    bound = ratio_after(10, adam_scalars(trained.param_groups[0], 1))  # of the one most stepped
    assert plan.counter._ratio == pytest.approx(bound)
    assert plan.counter.numbers()[10] == 1 - trained.param_groups[0]["lr"] * 0.1  # of weights
    assert_goes_on_as_operators(trained)
    before = ratio_after(11, adam_scalars(trained.param_groups[0], 1))
    trained.add_param_group({"params": make_params(device)[3:], "betas": (0.9, 0.9999)})
    helpers.take_steps(trained, [0])
    bound = next_ratio(before, adam_scalars(trained.param_groups[1], 1))  # of any group
    assert trained._whole.plan.counter._ratio == pytest.approx(bound)


def fails(*_):
    raise RuntimeError("out of registers")


def test_other_gradients_after_a_step_that_has_failed(trained, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of registers"):
        patch.setattr(step_plan, "ScaleWriteback", fails)
        set_grads(trained.param_groups[0]["params"], 2, skip=(0,))
        trained.step()
    set_grads(trained.param_groups[0]["params"], 2)
    trained.step()
    assert [state["step"].item() for state in trained.state.values()] == [3.0] * 4
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of registers"):
        patch.setattr(step_plan.Target, "write", fails)  # where a master has been stepped
        trained.param_groups[0]["fused"] = False
        trained.step()
    with pytest.warns(UserWarning, match="the masters of 1 weights restart"):
        trained.step()


@pytest.mark.parametrize("grouped", [False, True])
def test_unaligned_codes_take_the_slower_path(grouped, device):
    params = make_params(device, RECIPES["nvfp4"])
    options = dict(scale_groups=[params[:2]]) if grouped else dict(master_weight_dtype=torch.int8)
    optimizer = FP4Adam(params, lr=1e-2, **options)
    codes = params[0]._rowwise_data
    params[0]._rowwise_data = codes.new_empty(codes.numel() + 1)[1:].view(codes.shape).copy_(codes)
    set_grads(params, 2)
    optimizer.step()
    by_operators = [member.owner is params[0] for member in optimizer._whole.plan._by_operators]
    assert by_operators == [True] * (not grouped)  # a group is quantized after its step
    optimizer.state[params[1]]["exp_avg_sq"].mul_(2)
    assert optimizer._whole.plan.fits(True) == grouped  # int8 masters are previewed anew
    assert_goes_on_as_operators(optimizer)


def test_codes_in_memory_of_others_are_watched(trained):
    """They have versions of their own, which a step raises."""
    *weights, _, vector = trained.param_groups[0]["params"]
    for loose in (False, True, True):
        for weight in weights if loose else ():
            weight._rowwise_data = weight._rowwise_data.clone()
        before = [weight._rowwise_data._version for weight in weights]
        trained.step()
        assert all(w._rowwise_data._version > v for w, v in zip(weights, before, strict=True))
    for write in (weights[1]._rowwise_data.bitwise_not_, vector.detach().neg_):
        write()
        with pytest.warns(UserWarning, match="the masters of 1 weights restart"):
            trained.step()
    assert not trained._whole.plan._by_operators
    old = [weight._rowwise_data.data for weight in weights]
    for weight, data in zip(weights, old, strict=True):
        weight._rowwise_data.data = data.clone()  # which no version tells
    trained.step()
    helpers.assert_bytes_are_of_masters(trained)


def test_parameters_that_others_write_on_one_rank_of_two(device):
    """Its neighbour, in a fake process group, has nothing to say."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh(device, (2,))
        model = helpers.make_mlp(RECIPES["nvfp4"], device, torch.bfloat16)
        weight, bias = fully_shard(model, mesh=mesh)[2].parameters()
        plain = [torch.nn.Parameter(randn(8, device=device)) for _ in range(2)]
        params = [bias, make_params(device)[2], *plain]
        for param in (weight, *params):
            param.grad = torch.ones_like(param)
        for dtype, ratio in ((torch.bfloat16, math.inf), (torch.float32, 3600.0)):
            optimizer = FP4Adam([weight], exp_avg_dtype=dtype)
            optimizer.initialize_state(weight)
            for name, number in (("step", 1.0), ("exp_avg", 6e-3), ("exp_avg_sq", 1e-8)):
                optimizer.state[weight][name].fill_(number)
            optimizer.step()
            assert optimizer._whole.plan.counter._ratio == pytest.approx(ratio, rel=0.01)
        optimizer, written = FP4Adam(params), (bias, bias._local_tensor)
        for each in (MasterWeightOptimizer([weight, bias], torch.optim.SGD, lr=1e-3), optimizer):
            before = [tensor._version for tensor in written]
            each.step()
            assert all(x._version > v for x, v in zip(written, before, strict=True))
        for param in params[:2]:
            param.detach().zero_()
            with pytest.warns(UserWarning, match="the masters of 1 weights restart"):
                optimizer.step()
        for param in plain:
            before, param.data = param.detach().clone(), param.detach().clone()
            optimizer.step()
            assert (param < before).all()
        mesh = init_device_mesh(device, (2, 1))
        part = DTensor.from_local(randn(16, 64, device=device), mesh, (Partial(), Replicate()))
        part.grad = part.detach()
        with pytest.raises(NotImplementedError, match="must be replicated or sharded for FP4Adam"):
            FP4Adam([part]).step()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize("to", [lambda x: x.mT.contiguous().mT, lambda x: x.new_empty(129)[1:]])
def test_any_tensor_of_another_layout_takes_the_slower_path(to, remainders, device):
    for name in ("", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"):
        param = torch.nn.Parameter(randn(16, 8, device=device).bfloat16())
        optimizer = FusedAdam([param], amsgrad=True, store_param_remainders=remainders)
        set_grads([param], 0)
        optimizer.step()
        tensor = optimizer.state[param][name] if name else param
        value = tensor.detach()
        tensor.data = to(value).view(16, 8).copy_(value)
        assert_goes_on_as_operators(optimizer)
        assert len(optimizer._whole.plan._by_operators) == 1


# What fails


@pytest.mark.slow
@pytest.mark.parametrize("states", ["32bit", "8bit"])
def test_a_first_step_whose_kernels_cannot_be_compiled_is_repeated(states, device, monkeypatch):
    params = [make_weight(RECIPES["mxfp8"], device, keeps_value=True), *make_params(device)]
    both = [FP4Adam(some, lr=1e-2, states=states) for some in (params, copy.deepcopy(params))]
    before = copy.deepcopy([param.detach() for param in params])
    with monkeypatch.context() as patch:
        patch.setattr(launch_group, "DeviceTables", fails)
        set_grads(params, 0)
        with pytest.raises(RuntimeError, match="out of registers"):
            both[0].step()
    assert_identical([param.detach() for param in params], before)
    for seed in range(2):
        for optimizer in both:
            set_grads(optimizer.param_groups[0]["params"], seed)
            optimizer.step()
    assert_same_training(*both)


def test_a_kernel_that_cannot_be_compiled_leaves_no_mode_of_triton_behind():
    def compiles():
        _async_compile.active_mode.get().submit("key", lambda: 1 / 0, print)

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            launch.compile_together([compiles])


# Launches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantizer", "shape", "kernels"),
    [
        (RECIPES["nvfp4"], (80, 64), 4),
        (RECIPES["mxfp8"], (32, 288), 2),
        (Float8BlockQuantizer(), (128, 144), 2),
        (Float8Quantizer(scaling="delayed"), (80, 64), 3),
        (None, (600,), 1),
    ],
    ids=["nvfp4", "mxfp8", "float8block", "delayed", "plain"],
)
def test_launches_do_not_depend_on_the_number_of_tensors(quantizer, shape, kernels, device):
    """With tails in every matrix, and groups that differ in their hyper-parameters."""
    for count in (1, 3):
        values = [randn(*shape, seed=i, device=device).bfloat16() for i in range(count)]
        values = values if quantizer is None else map(quantizer.quantize, values)
        params = [*map(torch.nn.Parameter, values)]
        groups = [{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(params)]
        optimizer = FP4Adam(groups)
        set_grads(params, 0)
        optimizer.step()
        set_grads(params, 1)
        assert len(launched_by(optimizer)) == kernels


@pytest.mark.parametrize("i", range(2))
def test_memory_that_another_tensor_had_is_not_taken_for_the_old_one(i):
    tensors = [torch.zeros(1000), torch.zeros(1000)]
    found = Fingerprint([Column(tensors, placed=True, versioned=True)])
    tensors[i].data = torch.empty(0)
    tensors[i].data = torch.zeros(1000)  # mostly at the same address
    assert not found.unchanged()
    tensors[i] = None
    assert not found.unchanged()
