"""Accelerate: prepare(), checkpoints, clipping, its GradScaler path, and FSDP2."""

import os

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from with_accelerate import Training, text_rows

from fp4adam import FP4Adam, QuantizedTensor
from helpers import (
    RECIPES,
    all_params,
    assert_bytes_are_of_masters,
    assert_identical,
    make_params,
    set_grads,
    snapshot,
    take_steps,
)
from ranks import RankError, run_ranks

BATCHES = list(text_rows()[:48].split(4))  # 12 batches of 4 rows


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    """Each test may choose another precision, and is a program of its own to Accelerate."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_training_and_checkpoints(precision, tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    training = Training(accelerator, warmup=4)
    losses = [training.step(batch) for batch in BATCHES[:6]]
    assert losses[-1] < losses[0] - 0.5
    accelerator.save_state(tmp_path)
    expected = [training.step(batch) for batch in BATCHES[6:]]
    optimizer = training.optimizer.optimizer
    assert_bytes_are_of_masters(optimizer)
    assert {state["step"].item() for state in optimizer.state.values()} == {6}
    after = snapshot(optimizer)
    accelerator.load_state(tmp_path)
    assert [training.step(batch) for batch in BATCHES[6:]] == expected
    assert_identical(snapshot(optimizer), after)


def test_scaled_steps_go_through_the_patched_step():
    """The signature of the patch says nothing of a scaler; its attributes reach FP4Adam."""
    Accelerator(cpu=True)
    optimizer = FP4Adam(make_params(RECIPES["nvfp4"], "cpu", torch.float32))
    expected = FP4Adam(make_params(RECIPES["nvfp4"], "cpu", torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))
    prepared = AcceleratedOptimizer(optimizer, scaler=scaler)
    for seed in range(3):
        set_grads(all_params(optimizer), seed)
        for param in all_params(optimizer):
            param.grad *= 2.0**10
        prepared.step()
        take_steps(expected, [seed])
    assert_identical(snapshot(optimizer), snapshot(expected))
    all_params(optimizer)[1].grad.fill_(torch.inf)
    prepared.step()
    assert_identical(snapshot(optimizer), snapshot(expected))
    assert scaler.get_scale() == 2.0**9
    assert not prepared.step_was_skipped  # what it says of all optimizers that unscale themselves


def accelerator_of_rank(**options):
    """FSDP2, which Accelerate knows on accelerators only; it is told that these ranks have some."""
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **{"cpu_ram_efficient_loading": False, **options},
    )
    return Accelerator(fsdp_plugin=plugin)


def train_shards(rank, folder, state_dict_type):
    accelerator = accelerator_of_rank(state_dict_type=state_dict_type)
    training = Training(accelerator, warmup=4)
    params = all_params(training.optimizer)
    assert {*params} == {*training.model.parameters()}
    shards = [param for param in params if isinstance(param._local_tensor, QuantizedTensor)]
    losses = [training.step(batch) for batch in BATCHES[:4]]
    accelerator.save_state(folder)
    expected = [training.step(batch) for batch in BATCHES[4:8]]
    accelerator.load_state(folder)
    assert [training.step(batch) for batch in BATCHES[4:8]] == expected
    return losses + expected, len(shards)


@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_fsdp2(state_dict_type, tmp_path):
    """Parameters that Accelerate finds again by their address; losses are those of one process."""
    results = run_ranks(train_shards, 2, str(tmp_path), state_dict_type)
    training = Training(Accelerator(cpu=True), warmup=4)
    expected = [training.step(batch) for batch in BATCHES[:8]]
    for losses, shards in results:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert shards == 2 * 5


def load_efficiently(rank):
    Training(accelerator_of_rank(cpu_ram_efficient_loading=True))


def test_loading_that_would_replace_quantized_weights_is_refused():
    with pytest.raises(RankError, match="set cpu_ram_efficient_loading=False"):
        run_ranks(load_efficiently, 2)
