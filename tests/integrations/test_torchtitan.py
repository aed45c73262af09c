"""torchtitan's containers: groups, schedule and flat checkpoints; its trainer needs a GPU."""

import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

if sys.version_info < (3, 11):
    pytest.skip("torchtitan needs Python 3.11", allow_module_level=True)

from torchtitan.models.llama3 import llama3_configs
from with_torchtitan import Training, optimizer_config

from fp4adam import FP4Adam, quantize_model
from helpers import assert_bytes_are_of_masters, assert_identical, quantized, set_grads, snapshot

STEPS = 12


def test_training():
    training = Training(STEPS)
    losses = [training.step(index) for index in range(STEPS)]
    assert losses[-1] < losses[0] - 1
    (optimizer,) = training.optimizers
    assert type(optimizer) is FP4Adam
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert_bytes_are_of_masters(optimizer)


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:To get the last learning rate"
)
def test_checkpoint_resumes_with_the_same_bits(tmp_path):
    training, resumed = Training(STEPS), Training(STEPS)
    for index in range(3):
        training.step(index)
    dcp.save(parts(training), checkpoint_id=tmp_path)
    state = parts(resumed)
    dcp.load(state, checkpoint_id=tmp_path)
    for name in ("optimizers", "schedulers"):
        getattr(resumed, name).load_state_dict(state[name])
    losses = [[run.step(index) for index in range(3, 6)] for run in (training, resumed)]
    assert losses[0] == losses[1]
    (optimizer,), (again,) = training.optimizers, resumed.optimizers
    assert_identical(snapshot(again), snapshot(optimizer))


def parts(training):
    return {
        "model": get_model_state_dict(training.model),
        "optimizers": training.optimizers.state_dict(),
        "schedulers": training.schedulers.state_dict(),
    }


def test_state_dict_before_the_first_step_leaves_weights_alone():
    """The state is made by a step with lr = 0 and gradients of zeros_like()."""
    training = Training(STEPS)
    before = [param.detach().clone() for param in training.model.parameters()]
    weights = quantized(training.model.parameters())
    values = [weight.get_high_precision_init_val().clone() for weight in weights]
    flat = training.optimizers.state_dict()
    assert_identical([param.detach() for param in training.model.parameters()], before)
    (optimizer,) = training.optimizers
    assert_identical([optimizer.state[weight]["master_param"] for weight in weights], values)
    assert "state.blocks.0.mlp.up.weight.master_param" in flat


def test_llama3_of_torchtitan():
    """Its attention is compiled for GPUs; gradients stand in for it."""
    with torch.device("meta"):
        model = llama3_configs["debugmodel"](attn_backend="flex").build()
    quantize_model(model, "nvfp4").to_empty(device="cpu")
    model.init_weights()
    optimizers = optimizer_config().build(model_parts=[model])
    assert len(quantized(model.parameters())) == 6 * 5
    set_grads(model.parameters(), seed=0)
    optimizers.step()
    assert_bytes_are_of_masters(optimizers.optimizers[0])
