"""NaN in a master is seen, also where codes have none, and without a wait for the device."""

import math
import warnings
import weakref

import pytest
import torch
from torch import nn

from fp4adam import FP4Adam, MasterWeightOptimizer, NVFP4Quantizer, quantize_model
from fp4adam.optim import nan_watch
from fp4adam.optim.nan_watch import NanWatch
from fp4adam.optim.state_codec import PLAIN
from fp4adam.optim.state_tensor import StateTensor
from helpers import randn

SEES = "the master of weight '2.weight' has become NaN, which the codes of a NVFP4Tensor cannot"
OPTIONS = [
    {},
    dict(fused=False),
    dict(master_weight_dtype=torch.int8),
    dict(master_weight_dtype=torch.float16),
]


def build(recipe="nvfp4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 64))
    return quantize_model(model, recipe)


def set_grads(model, nan_at=None):
    for i, param in enumerate(model.parameters()):
        param.grad = randn(*param.shape, seed=i, device="cpu")
    if nan_at is not None:
        model[2].weight.grad[nan_at] = math.nan


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_nan_that_codes_hide_is_warned_of_once(options):
    model = build()
    optimizer = FP4Adam(model.parameters(), **options)
    set_grads(model)
    optimizer.step()
    set_grads(model, nan_at=(3, 5))
    with pytest.warns(UserWarning, match=SEES):
        optimizer.step()
    assert model[2].weight.dequantize().isfinite().all()
    set_grads(model)
    optimizer.step()


def test_codes_of_nan_are_those_that_the_quantizer_writes():
    model = build()
    optimizer = FP4Adam(model.parameters())
    set_grads(model, nan_at=slice(None))
    with pytest.warns(UserWarning, match=SEES):
        optimizer.step()
    weight = model[2].weight
    master = optimizer.state[weight]["master_param"]
    assert master.isnan().all()
    assert weight.has_bytes_of(weight.quantizer.quantize(master))
    assert not weight.dequantize().any()


def test_with_gradient_release():
    model = build()
    optimizer = FP4Adam(model.parameters())
    optimizer.enable_gradient_release()
    x = torch.ones(4, 32)
    with pytest.warns(UserWarning, match="has become NaN"):
        (model(x).sum() * math.nan).backward()
    optimizer.step()


def test_with_any_optimizer():
    model = build()
    optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    set_grads(model, nan_at=(3, 5))
    with pytest.warns(UserWarning, match=SEES):
        optimizer.step()
    set_grads(model)
    optimizer.step()


@pytest.mark.parametrize("recipe", ["mxfp8", "float8block"])
def test_other_codes_show_it_themselves(recipe):
    model = build(recipe)
    optimizer = FP4Adam(model.parameters())
    set_grads(model, nan_at=(3, 5))
    optimizer.step()
    assert model[2].weight.dequantize().isnan().any()


class LateAnswer:
    """An answer of a GPU, for a machine that has none."""

    is_late = False

    def __init__(self, value):
        self.value = value

    def is_here(self):
        return not self.is_late


@pytest.mark.parametrize("n_parts", [1, 2, 3, 7, 10])
def test_on_a_gpu_the_turn_comes_to_every_weight(n_parts, monkeypatch):
    """One weight per step is looked at, and its answer is read once it is there."""
    monkeypatch.setattr(nan_watch, "Answer", LateAnswer)
    weights = [NVFP4Quantizer().quantize(torch.ones(16, 16)).to("meta") for _ in range(3 * n_parts)]
    looked = [0] * len(weights)

    def value(i):
        looked[i] += 1
        return StateTensor(PLAIN, torch.ones(2, 2), None)

    masters = [(weight, lambda i=i: value(i)) for i, weight in enumerate(weights)]
    watch = NanWatch()
    n_steps = 12 * n_parts
    for _ in range(n_steps):
        for part in range(n_parts):
            watch.look(masters[3 * part : 3 * part + 3], n_parts)
    assert min(looked) > 0
    assert 0.9 * n_steps - 2 <= sum(looked) <= 1.1 * n_steps + 2


def test_an_answer_is_read_once_it_is_there(monkeypatch):
    monkeypatch.setattr(nan_watch, "Answer", LateAnswer)
    weight = NVFP4Quantizer().quantize(torch.ones(16, 16)).to("meta")
    master = StateTensor(PLAIN, torch.full((2,), math.nan), None)
    masters, watch = [(weight, lambda: master)], NanWatch()
    LateAnswer.is_late = True
    try:
        for _ in range(3):
            watch.look(masters)
    finally:
        LateAnswer.is_late = False
    with pytest.warns(UserWarning, match="the master of a weight has become NaN"):
        watch.look(masters)


def test_a_question_keeps_no_weight_alive(monkeypatch):
    monkeypatch.setattr(nan_watch, "Answer", LateAnswer)
    weight = NVFP4Quantizer().quantize(torch.ones(16, 16)).to("meta")
    master = StateTensor(PLAIN, torch.ones(2), None)
    watch, alive = NanWatch(), weakref.ref(weight)
    watch.look([(weight, lambda: master)])
    del weight
    assert watch._answer is not None
    assert alive() is None


@pytest.mark.parametrize("value", [255.0, -128.0])
def test_no_number_is_taken_for_a_code_of_nan(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = NVFP4Quantizer().quantize(torch.full((16, 16), value))
        NanWatch().look([(weight, lambda: StateTensor(PLAIN, torch.full((2,), value), None))])


def test_a_loss_of_another_kind_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build()
        optimizer = FP4Adam(model.parameters())
        set_grads(model)
        model[2].weight.grad.fill_(3e38)
        optimizer.step()
