"""Numbers of quantized weights: those of plain torch, for any format and number of ranks."""

import math

import pytest
import torch
from torch import nn

from fp4adam import FP4Adam, MasterWeightOptimizer, QuantizationMonitor, quantize_model
from fp4adam.nn import report
from ranks import run_ranks

# Magnitude bits of a code, and the largest magnitude.
CODES = {"nvfp4": (0x7, 0x7), "mxfp8": (0x7F, 0x7E), "float8block": (0x7F, 0x7E)}


def make_model(width: int = 96) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, width), nn.Linear(width, 256, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for i in range(steps):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(i))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def codes_of(weight: torch.Tensor) -> torch.Tensor:
    """One code per entry."""
    data = weight.rowwise_data
    return torch.stack((data & 15, data >> 4), -1) if data.shape != weight.shape else data


@pytest.mark.parametrize("name", CODES)
def test_numbers_are_those_of_plain_torch(name):
    model = quantize_model(make_model(), name)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    monitor = QuantizationMonitor(model, optimizer)
    weight = model[0].weight
    with torch.no_grad():  # some codes are 0 where the master is not, and some masters are 0
        weight.copy_(make_model()[0].weight * torch.logspace(-8, 0, 96)[:, None])
    train(model, optimizer)
    monitor.measure()
    before = codes_of(weight).clone()
    train(model, optimizer)
    found = monitor.measure()
    state, decoded = optimizer.state[weight], weight.dequantize()
    master, codes = state["master_param"], codes_of(weight)
    magnitude, largest = CODES[name]
    expected = {
        "relative_error": ((decoded - master).norm() / master.norm()).item(),
        "underflow_share": ((decoded == 0) & (master != 0)).double().mean().item(),
        "zero_share": (decoded == 0).double().mean().item(),
        "saturated_share": ((codes & magnitude) == largest).double().mean().item(),
        "changed_share": (codes != before).double().mean().item(),
        "amax": decoded.abs().max().item(),
        "nonfinite_share": 0.0,
        "exp_avg_zero_share": (state["exp_avg"] == 0).double().mean().item(),
        "exp_avg_sq_zero_share": (state["exp_avg_sq"] == 0).double().mean().item(),
    }
    for key, value in expected.items():
        assert found[f"{key}/0.weight"] == pytest.approx(value, rel=1e-5), key
    assert 0 < expected["changed_share"] < 1
    if name == "nvfp4":
        assert 0 < expected["underflow_share"] < 1 and 0 < expected["saturated_share"] < 1
    names = {"0.weight", "1.weight", "all"}
    assert {key.partition("/")[2] for key in found} == names
    assert all(type(value) is float for value in found.values())
    both = [found[f"changed_share/{each}"] for each in ("0.weight", "1.weight")]
    assert found["changed_share/all"] == pytest.approx(sum(both) / 2)  # of one size
    assert found["amax/all"] == max(found["amax/0.weight"], found["amax/1.weight"])


def test_a_sample_of_codes_meets_all_columns(monkeypatch):
    monkeypatch.setattr(report, "_SAMPLE", 96 * 64)
    model = quantize_model(nn.Sequential(nn.Linear(256, 96)), "mxfp8")
    measures = QuantizationMonitor(model)
    measures.measure()
    model[0].weight.rowwise_data[:, 1::2] ^= 1
    # A stride of 5, where 4 would meet even columns alone.
    assert measures.measure()["changed_share/0.weight"] == pytest.approx(0.5, abs=1e-3)


def test_without_a_state_errors_are_those_against_the_initial_value():
    model = make_model()
    plain = model[1].weight.detach().clone()
    quantize_model(model, "nvfp4")
    found = QuantizationMonitor(model).measure()
    decoded = model[1].weight.dequantize()
    error = ((decoded - plain).norm() / plain.norm()).item()
    assert found["relative_error/1.weight"] == pytest.approx(error, rel=1e-5)
    assert "changed_share/all" not in found and "exp_avg_zero_share/all" not in found
    model[1].weight.clear_high_precision_init_val()
    assert "relative_error/1.weight" not in QuantizationMonitor(model).measure()
    assert QuantizationMonitor(nn.Linear(2, 2)).measure() == {}
    with pytest.raises(
        TypeError, match="optimizer must be a torch.optim.Optimizer or None, got str"
    ):
        QuantizationMonitor(model, "Adam").measure()


def test_narrow_states_and_nan():
    model = quantize_model(make_model(), "mxfp8")
    narrow = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn}
    optimizer = FP4Adam(model.parameters(), master_weight_dtype=torch.float16, **narrow)
    (model(torch.eye(256)[:4]).sum()).backward()  # gradients of 0 in most columns
    optimizer.step()
    found = QuantizationMonitor(model, optimizer).measure()
    assert found["exp_avg_zero_share/0.weight"] == 252 / 256
    assert 0 < found["relative_error/all"] < 0.05
    with torch.no_grad():
        model[0].weight.grad = torch.full((96, 256), math.nan)
    optimizer.step()
    assert QuantizationMonitor(model, optimizer).measure()["nonfinite_share/all"] == 0.5


def test_masters_of_one_byte_are_decoded():
    """Half a step between codes is what a weight may be off; its bare codes would say 0."""
    model = quantize_model(make_model(), "nvfp4")
    optimizer = FP4Adam(model.parameters(), lr=1e-3, states="8bit")
    train(model, optimizer)
    found = QuantizationMonitor(model, optimizer).measure()
    assert 0.08 < found["relative_error/0.weight"] < 0.15
    assert found["nonfinite_share/all"] == 0 < found["underflow_share/all"]


def test_any_optimizer_with_masters():
    model = quantize_model(make_model(), "float8block")
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(model, optimizer)
    weight = model[0].weight
    master = optimizer.state[weight]["master_param"]
    error = ((weight.dequantize() - master).norm() / master.norm()).item()
    found = QuantizationMonitor(model, optimizer).measure()
    assert found["relative_error/0.weight"] == pytest.approx(error, rel=1e-5)


def measure_sharded(rank: int, name: str, world_size: int) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = quantize_model(make_model(80), name)
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    monitor = QuantizationMonitor(model, optimizer)
    train(model, optimizer)
    monitor.measure()
    train(model, optimizer)
    return monitor.measure()


@pytest.mark.parametrize("name", ["nvfp4", "float8block"])
def test_ranks_have_the_numbers_of_one_process(name):
    """The shards of 20 rows cut blocks; the mean of 4 equal gradients is exact."""
    (alone,) = run_ranks(measure_sharded, 1, name, 1)
    for found in run_ranks(measure_sharded, 4, name, 4):
        assert found == pytest.approx(alone, rel=1e-9)


def measure_one(rank: int, world_size: int) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = quantize_model(make_model()[:1], "mxfp8")
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return QuantizationMonitor(model).measure()


def test_the_amax_of_one_weight_is_no_sum():
    (alone,) = run_ranks(measure_one, 1, 1)
    assert run_ranks(measure_one, 2, 2) == [alone, alone]
