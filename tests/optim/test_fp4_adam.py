"""FP4Adam: masters, bytes, refusals and overwrites, for every format beside plain parameters."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import Parameter
from torch.testing import assert_close

from fp4adam import FP4Adam, Quantizer
from helpers import (
    QUANTIZERS,
    RECIPES,
    all_params,
    assert_bytes_are_of_masters,
    assert_identical,
    make_mlp,
    make_weight,
    random,
    set_grads,
    snapshot,
    take_steps,
)

every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS.keys())
every_recipe = pytest.mark.parametrize("quantizer", RECIPES.values(), ids=RECIPES.keys())
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# Construction


@needs_cuda
def test_state_follows_a_moved_model_when_it_is_loaded_again() -> None:
    model = make_mlp(RECIPES["nvfp4"], "cpu")
    optimizer = FP4Adam(model.parameters())
    take_steps(optimizer, range(2))
    twin = copy.deepcopy(optimizer)
    model.cuda()
    set_grads(model.parameters(), 2)
    with pytest.raises(RuntimeError, match="load_state_dict.*moves it"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for each in (optimizer, twin):
        take_steps(each, [2])
    assert_identical(snapshot(optimizer)["params"], snapshot(twin)["params"])


# Masters


# Arithmetic


# Bytes


# Overwritten from outside


def test_nominal_dtype_may_change_under_the_optimizer(device: str) -> None:
    model = make_mlp(RECIPES["nvfp4"], device)
    optimizer = FP4Adam([model[0].weight], weight_decay=0.0)
    take_steps(optimizer, range(2))
    before = optimizer.state[model[0].weight]["master_param"].clone()
    model.bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, [2])
    assert_identical(optimizer.state[model[0].weight]["master_param"], before)


# Odd shapes and groups


@every_quantizer
def test_empty_parameters_and_groups_are_harmless(quantizer: Quantizer, device: str) -> None:
    empties = [make_weight(quantizer, device, shape) for shape in ((0, 32), (32, 0))]
    empties.append(Parameter(torch.empty(0, 3, dtype=torch.bfloat16, device=device)))
    scalar = Parameter(torch.tensor(1.5, device=device))
    weight = make_weight(quantizer, device)
    optimizer = FP4Adam([empties[0], weight, *empties[1:], scalar])
    optimizer.add_param_group({"params": []})
    alone = FP4Adam([copy.deepcopy(weight)])
    for seed in range(2):
        set_grads(all_params(optimizer), seed)
        all_params(alone)[0].grad = weight.grad
        optimizer.step()
        alone.step()
    assert_identical(weight.detach(), all_params(alone)[0].detach())
    assert scalar.item() != 1.5
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(optimizer, [2])
    assert_bytes_are_of_masters(optimizer)


def test_weights_with_more_than_two_dimensions_are_stepped(device: str) -> None:
    """Expert weights [experts, out, in]."""
    for quantizer in RECIPES.values():
        stack = make_weight(quantizer, device, (3, 32, 64))
        flat = make_weight(quantizer, device, (96, 64))
        flat.quantize_(stack.detach().dequantize(torch.float32).view(96, 64))
        for seed in range(2):
            for param in (stack, flat):
                param.grad = random((3, 32, 64), seed, device).bfloat16().view(param.shape)
        optimizers = [FP4Adam([stack]), FP4Adam([flat])]
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(stack.rowwise_data, flat.rowwise_data)
        assert_bytes_are_of_masters(optimizers[0])


# Plain parameters, as Transformer Engine tests its FusedAdam


# On a GPU


def _large_problem(quantizer: Quantizer | None, device: str) -> FP4Adam:
    """64 Mi elements, whose gradients would take 256 MiB in FP32."""
    shapes = [(2048, 2048)] * 12 + [(4096, 4096)]
    if quantizer is None:
        params = [Parameter(torch.zeros(s, dtype=torch.bfloat16, device=device)) for s in shapes]
    else:
        params = [Parameter(quantizer.make_empty(s, torch.bfloat16, device)) for s in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, dtype=torch.bfloat16, device=device)
    return FP4Adam(params, lr=1e-2)


every_kind = pytest.mark.parametrize(
    "quantizer", [None, *QUANTIZERS.values()], ids=["plain", *QUANTIZERS.keys()]
)


@needs_cuda
@every_kind
def test_step_allocates_next_to_nothing(quantizer: Quantizer | None, device: str) -> None:
    optimizer = _large_problem(quantizer, device)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 2**20
    assert torch.cuda.memory_allocated() - before <= 2**16


@needs_cuda
@every_kind
def test_step_has_a_constant_number_of_launches(quantizer: Quantizer | None, device: str) -> None:
    optimizer = _large_problem(quantizer, device)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if not e.is_user_annotation]
    on_device = [e.name for e in events if e.device_type.name == "CUDA"]
    kernels = [name for name in on_device if not name.startswith(("Memcpy", "Memset"))]
    assert 1 <= len(kernels) <= 4, kernels


@needs_cuda
@every_recipe
def test_elements_beyond_32_bit_indices_are_updated(quantizer: Quantizer, device: str) -> None:
    shape = (2**16 + 128, 2**15)
    needed = 20 * math.prod(shape)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    param = Parameter(quantizer.make_empty(shape, torch.bfloat16, device))
    param._high_precision_init_val = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    param.grad = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    # In the last tile, so that only an index without overflow finds it.
    edge = random((128, 128), 0, device).sign()
    param.grad[-128:, -128:] = edge
    optimizer = FP4Adam([param], lr=1.0)
    optimizer.step()
    master = optimizer.state[param]["master_param"]
    expected = torch.zeros(256, 256, device=device)
    expected[-128:, -128:] = -edge
    assert_close(master[-256:, -256:], expected, rtol=1e-5, atol=0)
    assert not master[: 2**15].any()
    decoded = quantizer.quantize(master[-256:, -256:])
    rows = param.rowwise_data[-256:, -decoded.rowwise_data.shape[1] :]
    assert torch.equal(rows, decoded.rowwise_data)
