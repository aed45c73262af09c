"""Checkpoints and masters beside the step table: torch's, other counts, kinds of models, memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import Parameter
from torch.optim import Adam, AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp4adam import FP4Adam, FusedAdam, Quantizer, quantize_model, use_plain_state_dict
from fp4adam.distributed.dtensor import like, local
from fp4adam.distributed.tensor_parallel import gather_whole
from fp4adam.tensors import backend, rows
from helpers import (
    QUANTIZERS,
    RECIPES,
    all_params,
    assert_identical,
    make_mlp,
    make_params,
    make_weight,
    randn,
    random,
    snapshot,
    take_steps,
    through_a_file,
)

NVFP4 = RECIPES["nvfp4"]
every_recipe = pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES.keys())


# To and from torch.optim


@every_recipe
@pytest.mark.parametrize("torch_class", [AdamW, Adam])
def test_quantized_training_continues_from_adamw(quantizer: Quantizer, torch_class: type) -> None:
    """Moments as saved, masters from the parameters, modes of the new optimizer."""
    values = [random((64, 96), 1).bfloat16(), random((7,), 2).bfloat16()]
    theirs = torch_class([{"params": [Parameter(value)]} for value in values], foreach=True)
    take_steps(theirs, range(2))
    theirs.state["own"] = 7
    saved = through_a_file(theirs.state_dict())
    params = [Parameter(quantizer.quantize(values[0])), Parameter(values[1].clone())]
    params[0]._high_precision_init_val = values[0]
    ours = FP4Adam([{"params": [param]} for param in params])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of masters that nobody has saved
        ours.load_state_dict(saved)
    assert ours.state_dict()["state"]["own"] == 7
    for group in ours.param_groups:
        assert group["decoupled_weight_decay"] is (torch_class is AdamW)
        group["lr"] = 0.0
    for i, param in enumerate(params):
        assert_identical(ours.state[param]["exp_avg"], saved["state"][i]["exp_avg"].float())
        assert "master_param" not in ours.state[param]
    assert_identical(ours.state_dict()["state"][0]["master_param"], values[0].float())
    take_steps(ours, [2])
    for param, value in zip(params, values, strict=True):
        assert ours.state[param]["step"] == 3
        assert_identical(ours.state[param]["master_param"], value.float())
    assert params[0]._high_precision_init_val is None


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "float8block"])
def test_int8_masters_go_on_from_plain_values_of_fp32_weights(recipe: str) -> None:
    """They round a master, so the weight is not quantized from it again, but stays as it came."""
    models = [nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)) for _ in range(2)]
    ours, fresh = (
        FP4Adam(use_plain_state_dict(quantize_model(model, recipe)).parameters(), states="8bit")
        for model in models
    )
    for i in range(4):
        take_steps(ours, [i])
    models[1].load_state_dict(through_a_file(models[0].state_dict()))
    fresh.load_state_dict(through_a_file(ours.state_dict()))
    for theirs, own in zip(*map(all_params, (ours, fresh)), strict=True):
        # The amax of NVFP4 may be another one by an ulp.
        torch.testing.assert_close(own.dequantize(), theirs.dequantize(), rtol=2**-22, atol=0)


L2 = dict(decoupled_weight_decay=False)


@pytest.mark.parametrize("of_group", [{}, L2])
def test_decay_that_is_added_to_gradients_goes_on_in_adam(of_group) -> None:
    params, options = [Parameter(randn(6))], dict(lr=0.1, weight_decay=0.5)
    ours = FP4Adam([{"params": params, **of_group}], **options, **({} if of_group else L2))
    take_steps(ours, [0])
    theirs = Adam([Parameter(params[0].detach().clone())], **options)
    theirs.load_state_dict(through_a_file(ours.state_dict()))
    for optimizer in (ours, theirs):
        take_steps(optimizer, [1])
    torch.testing.assert_close(*(all_params(each)[0] for each in (ours, theirs)))


# Step counts of parameters, and of groups as Transformer Engine and Megatron save them


def stepped(steps: tuple[int, ...]) -> tuple[FP4Adam, list[Parameter]]:
    """An optimizer with an empty group, and parameters that took these numbers of steps."""
    params = [Parameter(randn(4, seed=i)) for i in range(len(steps))]
    optimizer = FP4Adam([{"params": params}, {"params": [], "lr": 0.5}])
    for step in range(max(steps)):
        for param, own in zip(params, steps, strict=True):
            param.grad = randn(4, seed=step) if step < own else None
        optimizer.step()
    return optimizer, params


@pytest.mark.parametrize(
    ("of_group", "lost", "counts"),
    [
        (5, (0, 1), [5, 5]),
        (None, (0, 1), [0, 0]),
        (9, (1,), [3, 9]),
        (9, (), [3, 1]),
        (None, (), [3, 1]),
    ],
)
def test_states_without_a_count_have_that_of_their_group(of_group, lost, counts) -> None:
    optimizer, (_, *params) = stepped((0, 3, 1))
    saved = optimizer.state_dict()
    assert all(type(state["step"]) is Tensor for state in saved["state"].values())
    assert not any("step" in group for group in saved["param_groups"])  # as torch.optim's
    for i in lost:
        del saved["state"][i + 1]["step"]
    for group in saved["param_groups"] if of_group else ():
        group["step"] = of_group
    optimizer.load_state_dict(saved)
    assert [optimizer.state[param]["step"] for param in params] == counts
    assert not any("step" in group for group in optimizer.param_groups)


@pytest.mark.parametrize("kind", [FP4Adam, FusedAdam])
def test_a_new_parameter_comes_back_from_adamw_with_its_own_count(kind: type[FusedAdam]) -> None:
    optimizer, params = stepped((2,))
    later = kind([{"params": [meta := Parameter(randn(4, device="meta"))]}, {"params": []}])
    later.load_state_dict(optimizer.state_dict())
    assert later.state[meta]["step"].device == params[0].device  # the host, as there is no graph
    new = Parameter(randn(4, seed=7))
    optimizer.add_param_group({"params": [new]})
    groups = [{"params": params}, {"params": []}, {"params": [new]}]
    adamw = AdamW([{**group} for group in groups])
    adamw.load_state_dict(optimizer.state_dict())
    adamw.param_groups[0]["lr"] = torch.tensor(1e-3)
    take_steps(adamw, [3])
    for capturable in (True, False):
        resumed = kind([{**group} for group in groups], capturable=capturable)
        resumed.load_state_dict(adamw.state_dict())
        assert (type(resumed.param_groups[0]["lr"]) is float) == capturable
    assert [resumed.state[param]["step"] for param in (*params, new)] == [3, 1]
    take_steps(resumed, [4])
    assert [resumed.state[param]["step"] for param in (*params, new)] == [4, 2]


# All or nothing


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that a call has allocated at a time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
def test_loading_takes_the_memory_of_the_states_and_of_one_weight() -> None:
    """To compare masters with their weights; not of all weights at a time."""
    numel, more = 128 * 256, []
    for count in (2, 12):
        values = [random((128, 256), seed=i) for i in range(count)]
        optimizer = FP4Adam([Parameter(QUANTIZERS["nvfp4"].quantize(v)) for v in values])
        take_steps(optimizer, range(2))
        saved = optimizer.state_dict()
        peak = peak_bytes(partial(optimizer.load_state_dict, saved))
        more.append(peak - 12 * numel * count)
    assert more[0] < 26 * numel  # a weight, decoded, with its gaps, and what that takes on a CPU
    assert more[1] - more[0] < numel, more  # a byte per element of one weight


def another_model(saved: dict, params: list[Parameter]) -> None:
    with torch.no_grad():
        for i, param in enumerate(params[:2]):
            param.copy_(random(tuple(param.shape), seed=50 + i))


# What happens before loading, and the warnings of loading and of the next two steps.
RESTARTS: dict[str, tuple[Callable, list[str]]] = {
    "none": (lambda saved, params: None, ["", "", ""]),
    "another model": (
        another_model,
        ["2 weights restart from the weights, which are not", "2 weights restart", ""],
    ),
    "a frozen layer": (
        lambda saved, params: saved["state"].pop(1),
        ["1 weights restart from the weights, which the loaded", "", ""],
    ),
}


@pytest.mark.parametrize("states", ["32bit", "8bit"])
@pytest.mark.parametrize(("change", "words"), RESTARTS.values(), ids=RESTARTS)
def test_masters_that_restart_are_counted_once(change, words, states) -> None:
    params = [make_weight(RECIPES["nvfp4"], "cpu", seed=seed) for seed in range(2)]
    params.append(Parameter(random((40,), seed=2).bfloat16()))
    optimizer = FP4Adam(params, lr=1e-3, states=states)
    take_steps(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][2]  # a plain parameter is no weight that lacks its master
    change(saved, params)
    resumed = FP4Adam(params, lr=1e-3, states=states)
    calls = [lambda: resumed.load_state_dict(saved)]
    calls += [partial(take_steps, resumed, [seed]) for seed in (2, 3)]
    for call, text in zip(calls, words, strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [text in str(each.message) for each in caught] == [True] * bool(text), caught


def test_values_that_another_optimizer_has_dropped_are_counted() -> None:
    """A learning-rate finder tries, and restores the codes that it has saved."""
    param = Parameter(QUANTIZERS["nvfp4"].quantize(random((32, 32), seed=0)))
    param._high_precision_init_val = random((32, 32), seed=0)
    saved = param.detach().clone()
    take_steps(FP4Adam([param], lr=1e-2), [0])
    with torch.no_grad():
        param.copy_(saved)
    with pytest.warns(UserWarning, match="masters of 1 weights restart .* another optimizer"):
        take_steps(FP4Adam([param], lr=1e-2), [0])


@pytest.mark.parametrize(("recipe", "part"), [("nvfp4", 6 / 11), ("float8", 448 / 528)])
def test_a_clipped_weight_is_not_its_master(recipe: str, part: float) -> None:
    """It has the master's codes under its own scales, as codes saturate, by up to 2.5 gaps."""
    param = Parameter(QUANTIZERS[recipe].quantize(random((128, 256), seed=0)))
    optimizer = FP4Adam([param])
    take_steps(optimizer, range(2))
    saved = optimizer.state_dict()
    master = saved["state"][0]["master_param"].clone()
    limit = master.abs().amax().item() * part
    param.data.quantize_(master.clamp(-limit, limit))
    assert rows.is_of(param.detach(), master)
    optimizer.load_state_dict(saved)
    restarted = optimizer.state_dict()["state"][0]["master_param"]
    assert torch.equal(restarted, master.clamp(-limit, limit))


def test_a_weight_whose_codes_saturate_has_its_master() -> None:
    """Under scales of earlier values, or in FP16: nothing tells how large it was."""
    delayed = Parameter(QUANTIZERS["float8-delayed"].quantize(random((32, 64), seed=0)))
    params = [delayed, Parameter(random((8,), seed=1).half())]
    optimizer = FP4Adam(params)
    take_steps(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for param, state in zip(params, saved["state"].values(), strict=True):
        param.data.copy_(state["master_param"].mul_(1e5))
    delayed.clear_high_precision_init_val()
    optimizer.load_state_dict(saved)
    assert_identical(optimizer.state_dict()["state"], saved["state"])
    for state in saved["state"].values():
        state["master_param"].mul_(1e-5)
    with pytest.warns(UserWarning, match="the masters of 2 weights restart"):
        optimizer.load_state_dict(saved)


# Who wrote last


def test_only_a_step_and_a_reset_free_the_value_before_quantization() -> None:
    weight = make_params(NVFP4, "cpu")[1]
    optimizer = FP4Adam([weight], lr=1e-30)
    optimizer.reset_master_weights()
    assert weight.get_high_precision_init_val() is not None  # there is no master yet
    take_steps(optimizer, [0])
    for free in (lambda: take_steps(optimizer, [1]), optimizer.reset_master_weights):
        value = random(tuple(weight.shape), 1)
        with torch.no_grad():
            weight.copy_(value)
        weight.requires_grad_(False).requires_grad_()
        assert_identical(kept := weight.get_high_precision_init_val(), value)
        free()
        assert not hasattr(weight, "get_high_precision_init_val")
        assert optimizer.state[weight]["master_param"].data_ptr() != kept.data_ptr()
        assert_identical(optimizer.state[weight]["master_param"], value)
    small = FP4Adam([weight], lr=1e-30, states="8bit")
    take_steps(small, [2])
    with torch.no_grad():
        weight.copy_(-value)
    assert_identical(small.state_dict()["state"][0]["master_param"], -value)
    small.reset_master_weights()
    take_steps(small, [3])  # which goes on from there
    master = small.get_unscaled_state(weight, "master_param")
    torch.testing.assert_close(master, -value, rtol=0, atol=0.002 * value.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_fp32_model_takes_the_masters_of_a_checkpoint(dtype: torch.dtype) -> None:
    """Where it has the values of a BF16 model; those of a quantized one are no masters."""
    model = make_mlp(None, "cpu", torch.bfloat16)
    optimizer = FP4Adam(model.parameters(), lr=1e-2, master_weight_dtype=dtype)
    take_steps(optimizer, range(2))
    saved = optimizer.state_dict()["state"]
    for save in (FP4Adam.state_dict, FP4Adam.compact_state_dict):
        plain = make_mlp(None, "cpu")
        resumed = FP4Adam(plain.parameters(), master_weight_dtype=dtype)
        plain.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(save(optimizer)))
        for i, param in enumerate(plain.parameters()):
            assert_identical(param.detach(), saved[i]["master_param"])
            assert sorted(resumed.state[param]) == ["exp_avg", "exp_avg_sq", "step"]
    with torch.no_grad():
        param.mul_(3)
    with pytest.warns(UserWarning, match="the masters of 1 weights restart"):
        resumed.load_state_dict(optimizer.state_dict())


def test_reset_forgets_a_loaded_master_of_a_remainder() -> None:
    param = Parameter(random((8, 8), 0).bfloat16())
    exact, split = (FP4Adam([param], lr=1e-2, store_param_remainders=n) for n in (False, True))
    take_steps(exact, [0, 1])
    # Between two numbers of BF16: rounded to even, or away from zero where remainders complete it.
    exact.state[param]["master_param"][0], param.data[0] = 1 + 2.0**-8, 1.0
    split.load_state_dict(saved := exact.state_dict())
    assert_identical(split.state_dict()["state"][0], saved["state"][0])
    param.data[1] = torch.inf
    split.reset_master_weights()
    value = param.detach().float()
    assert torch.equal(split.state_dict()["state"][0].get("master_param", value), value)
    saved = split.compact_state_dict()
    saved["state"][0]["param_remainder"].add_(5)  # with which that would be NaN
    split.load_state_dict(saved)
    take_steps(split, [3])
    assert param[1].isinf().all()


# Around the state


def test_states_are_whole_or_those_of_shards() -> None:
    """A sharded state of a plain parameter changes nothing; a whole one is cut, if compact, too."""
    optimizer = FP4Adam(make_params(NVFP4, "cpu"))
    take_steps(optimizer, [0])
    before = snapshot(optimizer)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][1][name] = distribute_tensor(saved["state"][1][name], mesh, [Shard(0)])
            saved["param_groups"][0]["lr"] = 7.0
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                optimizer.load_state_dict(saved)
            assert_identical(snapshot(optimizer), before)
        sharded = Parameter(distribute_tensor(random((64, 32), seed=0), mesh, [Shard(0)]))
        whole = Parameter(sharded.detach().full_tensor())
        both = [FP4Adam([param], states="8bit") for param in (whole, sharded)]
        take_steps(both[0], [0])
        both[0].state[whole]["note"] = "no tensor"
        both[1].load_state_dict(both[0].compact_state_dict())
        found = [one.state_dict()["state"][0] for one in both]
        assert found[1]["note"] == "no tensor"
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[0][name], found[1][name].to_local())
        models = [make_mlp("mxfp8", "cpu") for _ in range(2)]
        fully_shard(models[1], mesh=mesh)
        options = dict(states="factored", master_weights=False)
        both = [FP4Adam(model.parameters(), **options) for model in models]
        take_steps(both[0], [0])
        both[1].load_state_dict(both[0].compact_state_dict())
        found = [one.state_dict()["state"][0] for one in both]
        assert torch.equal(found[0]["exp_avg_sq"], found[1]["exp_avg_sq"].to_local())
        weight = Parameter(like(sharded, make_weight(NVFP4, "cpu", (64, 32)).detach()))
        optimizer = FP4Adam([Parameter(torch.ones(3)), weight])  # that no fully_shard has made
        with pytest.raises(NotImplementedError, match="must be replicated, or sharded by fully_s"):
            take_steps(optimizer, [0])
        assert not optimizer.state
        norm = torch.cat([param.grad.flatten() for param in all_params(optimizer)]).norm()
        torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), norm, rtol=0.01, atol=0)
        optimizer.state[sharded] = {"master_param": torch.zeros(64, 32, dtype=torch.int8)}
        with pytest.raises(NotImplementedError, match="got int8 masters, which fit"):
            optimizer.compact_state_dict()
    finally:
        dist.destroy_process_group()


def test_writes_to_shards_are_settled_by_every_call(monkeypatch) -> None:
    """Of a rank whose neighbours have nothing to say; all exchange the block that is cut."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    sent, reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, *a: sent.append(x.numel()) or reduce(x, *a))
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "parts"))
        model = quantize_model(nn.Sequential(nn.Linear(32, 96), nn.Linear(96, 48)), NVFP4)
        parallelize_module(model, mesh["parts"], {"0": ColwiseParallel()})
        weight, other = (layer.weight for layer in fully_shard(model, mesh=mesh["data"]))
        optimizer, value = FP4Adam([weight, other], weight_decay=0.0), random((24, 32), 1)
        shard, idle = local(weight), local(other)
        calls = optimizer.step, optimizer.reset_master_weights, partial(gather_whole, weight)
        for settle in calls:
            for part, new in zip(shard.split(9), value.split(9), strict=True):
                part.copy_(new)
            version, sent[:] = shard._version, []
            settle()
            assert sent[:4] == [1, 1, 3, 1] and shard._version > version
            assert not (torch.equal(shard.dequantize(), value) or shard._shared.unsettled)
        weight.grad, other.grad = torch.zeros_like(weight), torch.zeros_like(other)
        optimizer.step()
        assert torch.equal(local(optimizer.state[weight]["master_param"]), value)
        other.grad, version = None, idle._version
        optimizer.step()
        assert idle._version == version
        shard.copy_(-value)
        assert shard._shared.unsettled
        optimizer.load_state_dict(optimizer.state_dict())
        assert not (torch.equal(shard.dequantize(), -value) or shard._shared.unsettled)
    finally:
        dist.destroy_process_group()


def test_amaxes_of_two_process_groups(monkeypatch, device) -> None:
    """On a rank whose neighbour has nothing to say at first, and then twice each amax."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        other = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("other",))
        amaxes = []
        for fused, larger in ((False, 0), (False, 1 << 23), (None, 1 << 23)):
            model = make_mlp(NVFP4, "cpu")
            for layer, mesh in zip(model[::2], (init_device_mesh("cpu", (2,)), other), strict=True):
                fully_shard(layer, mesh=mesh)
            for param in model.parameters():
                param.grad = like(param, random(local(param).shape, 0))
            optimizer = FP4Adam(model.parameters(), states="8bit", fused=fused)
            with monkeypatch.context() as patch:
                patch.setattr(dist, "all_reduce", lambda bits, *_, by=larger: bits.add_(by))
                patch.setattr(backend, "uses_kernels", lambda d: d.type == device)
                optimizer.step()
            amaxes.append([local(layer.weight)._amax.item() for layer in model[::2]])
        assert amaxes[1] == amaxes[2] == [2 * amax for amax in amaxes[0]]
    finally:
        dist.destroy_process_group()


def test_ranks_save_the_same_weights_where_one_has_no_rows() -> None:
    for n in (4, 7):  # 16 rows: 4 each, or 3 each and none for the last one
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
        try:
            model = quantize_model(nn.Sequential(nn.Linear(32, 16), nn.Linear(32, 16)), NVFP4)
            params = [layer.weight for layer in fully_shard(model)]
            params[0].grad, optimizer = torch.zeros_like(params[0]), FP4Adam(params)
            optimizer.step()
            assert [*optimizer.state_dict()["state"]] == ([0, 1] if n == 4 else [0])
        finally:
            dist.destroy_process_group()


def test_narrow_states_resume_above_steps_that_fp32_counts() -> None:
    params = [Parameter(random((3, 32), 0))]
    optimizer = FusedAdam(params, states="8bit")
    take_steps(optimizer, [0])
    optimizer.state[params[0]]["step"].fill_(2**24 - 1)
    optimizer.load_state_dict(optimizer.compact_state_dict())
    take_steps(optimizer, range(1, 4))
    resumed = FusedAdam(copy.deepcopy(params), states="8bit")
    resumed.load_state_dict(copy.deepcopy(optimizer.compact_state_dict()))
    for each in (optimizer, resumed):
        take_steps(each, range(4, 7))
    assert_identical(snapshot(resumed), snapshot(optimizer))
