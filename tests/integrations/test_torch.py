"""The example of torch alone; its parts are tested one by one with the core."""

import torch
from with_torch import Training, compute_loss

from helpers import assert_bytes_are_of_masters, quantized


def test_compiled_fp16_training_with_an_average():
    training = Training(backend="aot_eager")
    losses = [training.step(index) for index in range(12)]
    assert losses[-1] < losses[0] - 1
    assert_bytes_are_of_masters(training.optimizer)
    assert not quantized(training.average.parameters())
    with torch.no_grad():
        assert compute_loss(training.average, 12) < losses[0]
