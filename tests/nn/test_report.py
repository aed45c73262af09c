"""What is said of a model: log line, warning, table, print, and numbers of quantized weights."""

import copy
import logging
import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp4adam
import helpers
from fp4adam import (
    FP4Adam,
    FusedAdam,
    MasterWeightOptimizer,
    QuantizationMonitor,
    Recipe,
    quantize_model,
    summary,
)
from fp4adam.nn import report
from fp4adam.optim.te_layout import stored_state
from helpers import randn
from ranks import home, run_ranks

# A Conv1D and a stack of nobody knows what are most of the model.
pytestmark = pytest.mark.filterwarnings("ignore:only .* of the elements of matrices:UserWarning")


class Conv1D(nn.Module):
    """As transformers has it in GPT-2: a weight [in, out] that is no nn.Linear's."""


class Experts(nn.Module):
    """One stacked weight, which is not known to be of experts."""


def make_model() -> nn.Sequential:
    layers = [nn.Linear(64, 64), nn.Linear(64, 64, bias=False), Conv1D(), Experts()]
    layers[2].weight = nn.Parameter(torch.zeros(64, 128))
    layers[3].gate_up_proj = nn.Parameter(torch.zeros(4, 64, 64))
    norms = [nn.LayerNorm(64) for _ in range(3)] + [nn.RMSNorm(64) for _ in range(2)]
    return nn.Sequential(*layers, nn.Sequential(*norms))


@pytest.fixture
def lines(monkeypatch):
    """Messages of the logger "fp4adam" (pytest's own plugin is off)."""
    messages, logger = [], logging.getLogger("fp4adam")
    monkeypatch.setattr(logger, "info", lambda text, *args: messages.append(text % args))
    return messages


LEFT = (
    "left in high precision: 3.gate_up_proj (Experts: its module has no num_experts that is its "
    "first size), 2.weight (Conv1D: its weight is [in, out]), 4 biases, "
    "3 of LayerNorm (4.0.weight, ...), 4.3.weight (RMSNorm), 4.4.weight (RMSNorm)"
)


def test_log_says_what_is_quantized_and_what_is_left(lines):
    model = make_model()
    quantize_model(model, "nvfp4")
    share = 100 * 2 * 64**2 / sum(p.numel() for p in model.parameters())
    expected = f"2 of 9 weights are quantized, {share:.1f} % of the parameters; {LEFT}"
    assert lines == [f"Sequential, NVFP4: {expected}"]
    # The same recipe again changes nothing, and is no reason to warn.
    quantize_model(model, "nvfp4")
    assert lines[1:] == lines[:1]
    with fp4adam.quantized_init("mxfp8"):
        layer = nn.Linear(32, 32)
    assert str(layer).endswith("weight=MXFP8)")
    assert lines[2].startswith("Linear, MXFP8: 1 of 1 weights are quantized")
    with pytest.warns(UserWarning, match=r"no weight was .* \(Conv1D: its .*\)\. Only") as caught:
        quantize_model(make_model()[2], "nvfp4")
    assert caught[0].filename == __file__


def test_table_has_every_parameter_and_totals():
    model = quantize_model(make_model(), "nvfp4")
    model[1].weight.clear_high_precision_init_val()
    result = summary(model)
    table = str(result).splitlines()
    assert table[0].split() == ["name", "layer", "shape", "format", "bytes"]
    # Codes, scales of 16 blocks, amax.
    assert table[1].split() == ["0.weight", "Linear", "64x64", "NVFP4", "2,068"]
    assert table[2].split() == ["0.bias", "Linear", "64", "float32", "256"]
    assert table[5].split() == ["3.gate_up_proj", "Experts", "4x64x64", "float32", "65,536"]
    assert len(table) == 1 + len(list(model.parameters())) + 4
    assert table[-3] == result.describe() and LEFT in table[-3]
    numel = sum(p.numel() for p in model.parameters())
    nbytes = 2 * model[0].weight.nbytes_stored + 4 * (numel - 2 * 64**2)
    assert table[-2].startswith(f"{numel:,} parameters in {nbytes:,} bytes, ")
    assert table[-1].startswith(f"{4 * 64**2:,} bytes more of values before quantization")
    assert [p.name for p in result.quantized] == ["0.weight", "1.weight"]
    with torch.device("meta"):
        model = quantize_model(nn.Sequential(nn.Linear(32, 32, bias=False)), "mxfp8")
    (weight,) = summary(model).parameters
    assert (weight.format, weight.nbytes) == ("MXFP8", model[0].weight.nbytes_stored)
    assert [p.shape for p in summary(nn.LazyLinear(4)).parameters] == [(), ()]
    assert str(summary(nn.ReLU())).count("0 of 0 weights")


def test_bytes_of_the_optimizer_state():
    model = quantize_model(make_model(), "nvfp4")
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.SGD)
    assert str(summary(model, optimizer)).endswith("state yet: the first step creates it")
    optimizer = FP4Adam(model.parameters(), exp_avg_dtype=torch.bfloat16)
    table = str(summary(model, optimizer)).splitlines()
    assert table[0].endswith("  state bytes")
    # BF16 first moments, FP32 second moments; masters of quantized weights.
    assert table[1].split()[-2:] == ["2,068", f"{10 * 64**2:,}"]
    numel = sum(p.numel() for p in model.parameters())
    nbytes = 10 * 2 * 64**2 + 6 * (numel - 2 * 64**2)
    assert table[-1] == (
        f"{nbytes:,} bytes of the optimizer's state from its first step on, "
        f"{nbytes / numel:.2f} bytes per parameter"
    )
    layer = nn.Linear(4, 4)
    layer(torch.ones(4)).sum().backward()
    (other := torch.optim.Adam(layer.parameters())).step()
    assert summary(layer, other).total("state_nbytes") == 2 * 4 * 20
    for call in (summary, QuantizationMonitor):
        with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer or None"):
            call(model, [optimizer])
        with pytest.raises(TypeError, match="model must be an nn.Module, got list"):
            call([model])


LEAN = {"states": "8bit", "master_weights": False, "store_param_remainders": False}


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"states": "16bit"}, {"states": "8bit"}, LEAN], ids=str
)
@pytest.mark.parametrize("optimizer_class", [FP4Adam, FusedAdam])
def test_bytes_of_the_state_are_told_before_the_first_step(options, optimizer_class):
    model = quantize_model(make_model().bfloat16(), "mxfp8")
    model[0].bias.requires_grad_(False)
    optimizer = optimizer_class([{"params": [p]} for p in model.parameters()], **options)
    told = [(p.name, p.state_nbytes) for p in summary(model, optimizer).parameters]
    helpers.set_grads([param for param in model.parameters() if param.requires_grad], seed=0)
    optimizer.step()
    for (name, nbytes), param in zip(told, model.parameters(), strict=True):
        state = stored_state(optimizer.state.get(param, {}))
        assert nbytes == sum(x.nbytes for x in state.values() if x.dim()), name


def test_print_shows_the_format_of_each_layer():
    model = quantize_model(make_model(), "nvfp4", lambda module, name: name == "0")
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        quantized, plain = str(copied[0]), str(copied[1])
        assert quantized == "Linear(in_features=64, out_features=64, bias=True, weight=NVFP4)"
        assert plain == "Linear(in_features=64, out_features=64, bias=False)"
        copied[0].weight = nn.Parameter(torch.zeros(64, 64))
        assert "NVFP4" not in str(copied)
    for recipe, printed in (
        (Recipe("float8", True, True), "weight=Float8, quantizes=activations+gradients)"),
        (Recipe("float8", "fake"), "weight=Float8, fake-quantizes=activations)"),
    ):
        layers = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        assert str(quantize_model(layers, recipe)).count(printed) == 2


NARROW = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn}
# Magnitude bits of a code, the largest magnitude, and how states are stored.
CODES = {
    "nvfp4": (0x7, 0x7, {}),
    "mxfp8": (0x7F, 0x7E, {"master_weight_dtype": torch.float16} | NARROW),
    "float8block": (0x7F, 0x7E, {"states": "8bit"}),
}


def make_pair(width: int = 96) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, width), nn.Linear(width, 256, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = randn(4, 256)
    helpers.train(optimizer, [(model(x) - x).square().mean()])


def relative_error(weight: torch.Tensor, value: torch.Tensor) -> float:
    return ((weight.dequantize() - value).norm() / value.norm()).item()


def codes_of(weight: torch.Tensor) -> torch.Tensor:
    """One code per entry."""
    data = weight.rowwise_data
    return torch.stack((data & 15, data >> 4), -1) if data.shape != weight.shape else data


@pytest.mark.parametrize("name", CODES)
def test_numbers_are_those_of_plain_torch(name):
    magnitude, largest, options = CODES[name]
    model = quantize_model(make_pair(), name)
    optimizer = FP4Adam(model.parameters(), lr=1e-2, **options)
    monitor = QuantizationMonitor(model, optimizer)
    weight = model[0].weight
    with torch.no_grad():  # some codes are 0 where the master is not, and some masters are 0
        weight.copy_(make_pair()[0].weight * torch.logspace(-8, 0, 96)[:, None])
    train(model, optimizer)
    monitor.measure()
    before = codes_of(weight).clone()
    train(model, optimizer)
    found = monitor.measure()
    moments = [optimizer.get_unscaled_state(weight, key) for key in ("exp_avg", "exp_avg_sq")]
    master = optimizer.get_unscaled_state(weight, "master_param").float()
    decoded, codes = weight.dequantize(), codes_of(weight)
    shares = {
        "underflow_share": (decoded == 0) & (master != 0),
        "zero_share": decoded == 0,
        "saturated_share": (codes & magnitude) == largest,
        "changed_share": codes != before,
        "nonfinite_share": ~decoded.isfinite(),
        "exp_avg_zero_share": moments[0] == 0,
        "exp_avg_sq_zero_share": moments[1] == 0,
    }
    expected = {key: share.double().mean().item() for key, share in shares.items()}
    expected["relative_error"] = relative_error(weight, master)
    expected["amax"] = decoded.abs().max().item()
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
    model = make_pair()
    model[1].weight.data[:8] = 0
    plain = model[1].weight.detach().clone()
    quantize_model(model, "nvfp4")
    found = QuantizationMonitor(model).measure()
    error = relative_error(model[1].weight, plain)
    assert found["relative_error/1.weight"] == pytest.approx(error, rel=1e-5)
    underflow = (model[1].weight.dequantize() == 0) & (plain != 0)
    assert found["underflow_share/1.weight"] == pytest.approx(underflow.double().mean().item())
    assert "changed_share/all" not in found and "exp_avg_zero_share/all" not in found
    model[1].weight.clear_high_precision_init_val()
    assert "relative_error/1.weight" not in QuantizationMonitor(model).measure()
    assert QuantizationMonitor(nn.Linear(2, 2)).measure() == {}


def test_masters_of_other_optimizers_and_nan():
    model = quantize_model(make_pair(), "float8block")
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(model, optimizer)
    weight, monitor = model[0].weight, QuantizationMonitor(model, optimizer)
    error = relative_error(weight, optimizer.state[weight]["master_param"])
    assert monitor.measure()["relative_error/0.weight"] == pytest.approx(error, rel=1e-5)
    weight.grad = torch.full((96, 256), math.nan)
    optimizer.step()
    assert monitor.measure()["nonfinite_share/all"] == 0.5


def measure_sharded(rank: int, name: str, width: int, n_layers: int, sizes: tuple) -> dict:
    model = make_pair(width)[:n_layers]
    model[0].weight.data[0] *= 2  # so that ranks have other amaxes
    quantize_model(model, name)
    if sizes:
        mesh = init_device_mesh(home().type, sizes, mesh_dim_names=("dp", "tp"))
        if n_layers == 1:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh["dp"])
    monitor = QuantizationMonitor(model)
    if n_layers == 2:
        monitor.optimizer = FP4Adam(model.parameters(), lr=1e-2)
        train(model, monitor.optimizer)
        monitor.measure()
        train(model, monitor.optimizer)
    return monitor.measure()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "n_layers", "sizes"),
    # Shards of 20 rows cut blocks; the mean of 4 equal gradients is exact. One amax is no sum.
    [("nvfp4", 80, 2, (4, 1)), ("float8block", 80, 2, (4, 1)), ("mxfp8", 128, 1, (2, 2))],
)
def test_ranks_have_the_numbers_of_one_process(name, width, n_layers, sizes):
    (alone,) = run_ranks(measure_sharded, 1, name, width, n_layers, ())
    for found in run_ranks(measure_sharded, 4, name, width, n_layers, sizes):
        assert found == pytest.approx(alone, rel=1e-9)
