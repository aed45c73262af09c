"""Masters and parameters, beside the step table: memory that is shared, other kinds of models."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import Parameter
from torch.optim import AdamW

from fp4adam import FP4Adam, FusedAdam, QuantizedTensor
from helpers import (
    RECIPES,
    all_params,
    assert_identical,
    make_mlp,
    make_params,
    random,
    snapshot,
    take_steps,
    value_of,
)

NVFP4 = RECIPES["nvfp4"]
SHAPE = (32, 32)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def masters(optimizer: FP4Adam) -> list[torch.Tensor]:
    """What training continues from, in FP32."""
    return [
        optimizer.state.get(param, {}).get("master_param", param).detach().clone()
        for param in all_params(optimizer)
    ]


# Memory


def test_other_memory_at_an_old_address_counts_as_written() -> None:
    """As an allocator gives it, between two steps, to a parameter that was somewhere else."""
    memory = bytearray(2 * 32 * 32)

    def values_in_memory() -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.bfloat16).view(SHAPE)

    param = Parameter(values_in_memory())
    with torch.no_grad():
        param.copy_(random(SHAPE, 0))
    optimizer = FP4Adam([param], lr=1e-9)
    take_steps(optimizer, range(2))
    address, number = param.data_ptr(), param._version
    param.data = param.data.clone()
    values_in_memory().copy_(random(SHAPE, 1))
    param.data = values_in_memory()
    assert (param.data_ptr(), param._version) == (address, number)
    take_steps(optimizer, [2])
    torch.testing.assert_close(masters(optimizer)[0], random(SHAPE, 1).bfloat16().float())


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
        assert_identical(weight.get_high_precision_init_val(), value)
        free()
        assert not hasattr(weight, "get_high_precision_init_val")
        assert_identical(masters(optimizer), [value])


def test_training_by_adamw_in_between_is_kept() -> None:
    """AdamW carries master_param along, and saves it again, while it trains the parameters."""
    model = make_mlp(NVFP4, "cpu", torch.bfloat16)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    take_steps(optimizer, range(2))
    middle = make_mlp(None, "cpu", torch.bfloat16)
    adamw = AdamW(middle.parameters(), lr=1e-2)
    plain = {
        name: value.dequantize(torch.bfloat16) if isinstance(value, QuantizedTensor) else value
        for name, value in model.state_dict().items()
    }
    middle.load_state_dict(plain)
    adamw.load_state_dict(optimizer.state_dict())
    take_steps(adamw, range(2, 4))
    trained = [param.detach().float() for param in middle.parameters()]
    resumed = FP4Adam(model.parameters(), lr=1e-2)
    model.load_state_dict(middle.state_dict())
    values = [value_of(param) for param in model.parameters()]
    resumed.load_state_dict(adamw.state_dict())
    assert_identical([value_of(param) for param in model.parameters()], values)
    resumed.param_groups[0]["lr"] = 1e-30
    take_steps(resumed, [4])
    assert_identical(masters(resumed), trained)


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


@pytest.mark.parametrize("remainders", [False, True])
def test_an_fp32_parameter_saves_no_master_of_before(remainders: bool) -> None:
    """An FP32 model that loads it would take a master that its parameter has left."""
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = FP4Adam(model.parameters(), store_param_remainders=remainders)
    take_steps(optimizer, [0])
    model.float()
    for saved in (optimizer.state_dict(), optimizer.compact_state_dict()):
        assert sorted(saved["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]


def test_reset_forgets_a_loaded_master_of_a_remainder() -> None:
    models = [nn.Linear(8, 8, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    exact = FP4Adam(models[0].parameters(), lr=1e-2)
    split = FP4Adam(models[1].parameters(), lr=1e-2, store_param_remainders=True)
    take_steps(exact, [0, 1])
    models[1].load_state_dict(models[0].state_dict())
    split.load_state_dict(exact.state_dict())
    split.reset_master_weights()
    saved = split.state_dict()["state"][0]
    value = models[1].weight.detach().float()
    assert torch.equal(saved.get("master_param", value), value)


# Around the state


def test_sharded_state_of_a_plain_parameter_changes_nothing() -> None:
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


def test_global_state_travels_in_a_compact_state_dict() -> None:
    params = [Parameter(random((5, 7), i).bfloat16()) for i in range(2)]
    optimizer = FusedAdam(params, exp_avg_dtype=torch.bfloat16)
    take_steps(optimizer, range(2))
    optimizer.state["seen"] = 17
    for saved in (optimizer.state_dict(), optimizer.compact_state_dict()):
        assert saved["state"]["seen"] == 17
        resumed = FusedAdam(copy.deepcopy(params), exp_avg_dtype=torch.bfloat16)
        resumed.load_state_dict(copy.deepcopy(saved))
        assert resumed.state["seen"] == 17


@needs_cuda
def test_deferred_masters_are_decoded_a_piece_at_a_time() -> None:
    """Those of FP16 that share an amax, and so are written in a second pass."""
    shape, n = (2048, 2048), 8
    params = []
    for seed in range(n):
        param = Parameter(NVFP4.quantize(random(shape, seed, "cuda").bfloat16()))
        param.grad = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        params.append(param)
    optimizer = FP4Adam(params, master_weight_dtype=torch.float16, scale_groups=[params])
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    # One in FP32 is 16 MiB.
    assert torch.cuda.max_memory_allocated() - before < n // 2 * 4 * math.prod(shape)
