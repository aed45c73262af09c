"""What quantize_model says it has done: log line, warning, table, print, and stale optimizers."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import fp4adam
from fp4adam import FP4Adam, Recipe, quantize_model, summary

# A Conv1D and a stack of nobody knows what are most of the model.
pytestmark = pytest.mark.filterwarnings("ignore:only .* of the elements of matrices:UserWarning")


class Conv1D(nn.Module):
    """As transformers has it in GPT-2: a weight [in, out] that is no nn.Linear's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 128))


class Experts(nn.Module):
    """One stacked weight, which is not known to be of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 64))


def make_model() -> nn.Sequential:
    layers = [nn.Linear(64, 64), nn.Linear(64, 64, bias=False), Conv1D(), Experts()]
    norms = [nn.LayerNorm(64) for _ in range(3)]
    return nn.Sequential(*layers, nn.Sequential(*norms))


@pytest.fixture
def lines():
    """Messages of the logger "fp4adam" (pytest's own plugin is off)."""
    messages = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append((record.levelname, record.getMessage()))

    logger, listener = logging.getLogger("fp4adam"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel("INFO")
    yield messages
    logger.removeHandler(listener)
    logger.setLevel(level)


LEFT = (
    "left in high precision: 3.gate_up_proj (Experts: its module has no num_experts that is its "
    "first size), 2.weight (Conv1D: its weight is [in, out]), 4 biases, "
    "3 of LayerNorm (4.0.weight, ...)"
)


def test_log_says_what_is_quantized_and_what_is_left(lines):
    model = make_model()
    assert quantize_model(model, "nvfp4") is model
    share = 100 * 2 * 64**2 / sum(p.numel() for p in model.parameters())
    expected = f"2 of 7 weights are quantized, {share:.1f} % of the parameters; {LEFT}"
    assert lines == [("INFO", f"Sequential, NVFP4: {expected}")]
    # The same recipe again changes nothing, and is no reason to warn.
    weight = model[0].weight
    quantize_model(model, "nvfp4")
    assert lines[1:] == lines[:1] and model[0].weight is weight
    with fp4adam.quantized_init("mxfp8"):
        layer = nn.Linear(32, 32)
    assert str(layer).endswith("weight=MXFP8)")
    assert lines[2][1].startswith("Linear, MXFP8: 1 of 1 weights are quantized")


def test_a_model_without_linear_layers_is_warned_of():
    with pytest.warns(
        UserWarning, match=r"no weight was .* weight \(Conv1D: its .*\)\. Only"
    ) as caught:
        quantize_model(Conv1D(), "nvfp4")
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
    with pytest.raises(TypeError, match="model must be an nn.Module, got list"):
        summary([model])


def test_table_of_meta_and_lazy_models():
    with torch.device("meta"):
        model = quantize_model(nn.Sequential(nn.Linear(32, 32, bias=False)), "mxfp8")
    (weight,) = summary(model).parameters
    assert (weight.format, weight.nbytes) == ("MXFP8", model[0].weight.nbytes_stored)
    assert [p.shape for p in summary(nn.LazyLinear(4)).parameters] == [(), ()]
    assert str(summary(nn.ReLU())).count("0 of 0 weights")


def test_print_shows_the_format_of_each_layer():
    model = quantize_model(make_model(), "nvfp4", lambda module, name: name == "0")
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        quantized, plain = str(copied[0]), str(copied[1])
        assert quantized == "Linear(in_features=64, out_features=64, bias=True, weight=NVFP4)"
        assert plain == "Linear(in_features=64, out_features=64, bias=False)"
        copied[0].weight = nn.Parameter(torch.zeros(64, 64))
        assert "NVFP4" not in str(copied)
    recipe = Recipe("float8block", activations=True, gradients=True)
    layer = quantize_model(nn.Linear(128, 128), recipe)
    assert str(layer).endswith("weight=Float8Block, quantizes=activations+gradients)")


def test_saving_by_address_names_the_cure(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    model = quantize_model(nn.Linear(64, 64), "nvfp4")
    with pytest.raises(RuntimeError, match="got NVFP4Tensor of shape .* call fp4adam.use_plain_"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    fp4adam.use_plain_state_dict(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")


def test_bytes_of_the_optimizer_state():
    model = quantize_model(make_model(), "nvfp4")
    optimizer = FP4Adam(model.parameters(), exp_avg_dtype=torch.bfloat16)
    assert str(summary(model, optimizer)).endswith(
        "no optimizer state yet: the first step creates it"
    )
    for param in model.parameters():
        param.grad = torch.zeros(param.shape)
    optimizer.step()
    result = summary(model, optimizer)
    table = str(result).splitlines()
    assert table[0].endswith("  state bytes")
    # BF16 first moments, FP32 second moments; masters of quantized weights.
    assert table[1].split()[-2:] == ["2,068", f"{10 * 64**2:,}"]
    assert table[2].split()[-2:] == ["256", f"{6 * 64:,}"]
    numel = sum(p.numel() for p in model.parameters())
    nbytes = 10 * 2 * 64**2 + 6 * (numel - 2 * 64**2)
    assert result.total("state_nbytes") == nbytes
    assert table[-1] == (
        f"{nbytes:,} bytes of the optimizer's state, {nbytes / numel:.2f} bytes per parameter"
    )
    with pytest.raises(
        TypeError, match=r"optimizer must be a torch.optim.Optimizer or None, got list"
    ):
        summary(model, [optimizer])
