"""The example of torch alone; its parts are tested one by one with the core."""

import torch
from with_torch import Training, compute_loss, step_in_backward

from quantized_training import assert_bytes_are_of_masters, assert_identical, quantized


def test_compiled_fp16_training_with_an_average():
    training = Training(backend="aot_eager")
    losses = [training.step(index) for index in range(12)]
    assert losses[-1] < losses[0] - 1
    assert_bytes_are_of_masters(training.optimizer)
    assert not quantized(training.average.parameters())
    with torch.no_grad():
        assert compute_loss(training.average, 12) < losses[0]


def test_steps_in_backward_are_those_of_one_optimizer():
    training, expected = Training(), Training()
    step_in_backward(training.model.parameters(), lr=3e-3)
    for group in expected.optimizer.param_groups:
        group["weight_decay"] = 1e-2
    for index in range(3):
        compute_loss(training.model, index).backward()
        compute_loss(expected.model, index).backward()
        expected.optimizer.step()
        expected.optimizer.zero_grad()
    assert all(param.grad is None for param in training.model.parameters())
    pair = (training.model, expected.model)
    assert_identical(*([param.detach() for param in model.parameters()] for model in pair))
