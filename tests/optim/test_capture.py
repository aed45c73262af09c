"""Steps of capturable optimizers: counted on the device, and replayed from CUDA graphs.

Without a GPU a stand-in records what a graph would: launches, and copies to the device. A replay
runs these again, with what the host had at the time of the capture.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from fp4adam import FP4Adam, FusedAdam, NVFP4Quantizer, quantize_model
from fp4adam.kernels.launch.launch import Launch
from fp4adam.optim.adam import adam_scalars
from fp4adam.tensors import backend
from helpers import all_params, assert_identical, assert_same_training, randn, take_steps, written

pytestmark = pytest.mark.usefixtures("through_the_kernels")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
SHAPES = [(48, 16), (600,), (7,), (3, 5, 4)]
# Options of the optimizer, and the dtype of its parameters.
VARIANTS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "fp32": ({}, torch.float32),
    "bf16 with masters": ({}, torch.bfloat16),
    "fp16 without masters": (dict(master_weights=False), torch.float16),
    "bf16 moments, fp16 masters": (dict(states="16bit"), torch.bfloat16),
    "fp8 moments, remainders": (dict(states="8bit"), torch.bfloat16),
    "amsgrad": (dict(amsgrad=True), torch.float32),
    "L2, maximize": (dict(adam_w_mode=False, maximize=True), torch.float32),
    "no bias correction": (dict(bias_correction=False), torch.float32),
    "betas on the device": (
        dict(betas=tuple(torch.tensor(x, device=DEVICE) for x in (0.5, 0.75))),
        torch.float32,
    ),
}
every_variant = pytest.mark.parametrize(("options", "dtype"), VARIANTS.values(), ids=VARIANTS)


class StandIn:
    """Records launches and asynchronous copies instead of running them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.work: list[Callable[[], Any]] = []
        launch, copy_ = Launch.__call__, torch.Tensor.copy_

        def record_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False):
            if not non_blocking:
                return copy_(target, source)
            self.work.append(lambda: copy_(target, source))
            return target

        def record_launch(each: Launch, *leading: torch.Tensor) -> None:
            self.work.append(lambda: launch(each, *leading))

        patch.setattr(torch.Tensor, "copy_", record_copy)
        patch.setattr(Launch, "__call__", record_launch)
        patch.setattr(backend, "is_capturing", lambda: True)

    def replay(self) -> None:
        for each in self.work:
            each()


def capture(work: Callable[[], Any], **options: Any) -> Callable[[], None]:
    """Capture ``work`` in a graph; returns its replay. ``options`` are those of a real graph."""
    if HAS_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **options):
            work()
        return graph.replay
    with pytest.MonkeyPatch.context() as patch:
        stand_in = StandIn(patch)
        work()
    return stand_in.replay


def make_params(device: str, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(randn(*s, seed=i).to(device, dtype)) for i, s in enumerate(SHAPES)]


def make_pair(
    device: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[FusedAdam, FusedAdam]:
    """A capturable optimizer and one that is not, with gradients at fixed addresses."""
    pair = []
    for capturable in (True, False):
        params = make_params(device, dtype)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 3e-3, "weight_decay": 0.0}]
        pair.append(FusedAdam(groups, lr=1e-2, capturable=capturable, **options))
        reserve_grads(pair[-1])
    return pair[0], pair[1]


def reserve_grads(optimizer: FusedAdam) -> None:
    for param in all_params(optimizer):
        param.grad = torch.zeros_like(param)


def fill_grads(optimizer: FusedAdam, seed: int) -> None:
    """New gradients at the same addresses."""
    for i, param in enumerate(all_params(optimizer)):
        if param.grad is not None:
            param.grad.copy_(randn(*param.shape, seed=100 * seed + i) * 1e-2)


def step_both(pair: Iterable[FusedAdam], seed: int) -> None:
    for optimizer in pair:
        fill_grads(optimizer, seed)
        optimizer.step()


def set_rates(optimizer: FusedAdam, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


# The scalars


# Each example takes a step, so failures are not shrunk.
@settings(deadline=None, max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(
    lr=st.one_of(st.sampled_from([0.0, -1e-3, 1e-50, 1e30]), st.floats(1e-9, 10)),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    eps=st.floats(0, 1),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    steps=st.lists(st.integers(0, 2**24), min_size=4, max_size=4),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_device_computes_the_scalars_of_the_host(lr, betas, eps, weight_decay, steps, flags):
    device = DEVICE
    options = dict(zip(("maximize", "bias_correction", "adam_w_mode"), flags, strict=True))
    options |= dict(betas=betas, eps=eps, weight_decay=weight_decay)
    params = make_params(device)
    optimizer = FusedAdam(params, lr=0.1, capturable=True, **options)
    optimizer.param_groups[0]["lr"] = lr
    for param, step in zip(params, steps, strict=True):
        param.grad = torch.zeros_like(param)
        state = dict(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        optimizer.state[param] = state | {"step": torch.tensor(float(step), device=device)}
    optimizer.step()
    group = {**optimizer.param_groups[0], "lr": lr}
    counts = [min(step + 1, 2**24) for step in steps]
    expected = [adam_scalars(group, count)[:8] for count in counts]
    rows = optimizer._whole.plan._parts[0][0].scalars.view(-1, 12)[: len(params), :8]
    assert torch.equal(rows.cpu(), torch.tensor(expected, dtype=torch.float64).float())
    assert [optimizer.state[param]["step"].item() for param in params] == counts


# Steps outside a graph


def test_parameters_without_elements_are_counted(device: str) -> None:
    params = [Parameter(torch.ones(n, 4, device=device)) for n in (0, 1, 0)]
    optimizer = FusedAdam(params, capturable=True)
    for overflow in (0.0, 1.0, 0.0):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.found_inf = torch.full((1,), overflow, device=device)
        optimizer.step()
    step = optimizer.param_groups[0]["step"]
    before, step.data = step.data, torch.full_like(step, 7.0)  # others may move what they see
    optimizer.step()
    counts = {optimizer.state[param]["step"].item() for param in params}
    assert counts == {3.0, 8.0} and before == 2


# Replays


@every_variant
def test_replays_give_the_bits_of_steps(options, dtype, device):
    """Also with other learning rates, overflows, scaled gradients, and steps in between."""
    pair = make_pair(device, dtype, **options)
    signals = [(torch.ones(1, device=device), torch.zeros(1, device=device)) for _ in pair]

    def step(optimizer: FusedAdam, index: int) -> None:
        optimizer.grad_scale, optimizer.found_inf = signals[index]
        optimizer.step()

    for seed in (7, 0):
        pair = copy.deepcopy(pair[0]), pair[1]  # copies stay capturable
        reserve_grads(pair[0])
        for i, optimizer in enumerate(pair):
            fill_grads(optimizer, seed)
            step(optimizer, i)
    before = written(pair[0])
    replay = capture(lambda: step(pair[0], 0))
    assert_identical(written(pair[0]), before)
    for seed in range(1, 7):
        for i, optimizer in enumerate(pair):
            set_rates(optimizer, 1e-2 / seed)
            fill_grads(optimizer, seed)
            scale, found_inf = signals[i]
            scale.fill_(2.0**seed)
            found_inf.fill_(float(seed == 3))
            if i == 0 and seed != 4:
                replay()
            else:
                step(optimizer, i)
    assert_same_training(*pair)
    for group in pair[0].param_groups:
        assert group["step"] is pair[0].state[group["params"][0]]["step"] and group["step"] == 7


def test_replays_outlive_the_plan(device: str) -> None:
    """Graphs keep what their plan has, once, and each reads its own gradients.

    A step with other dictionaries of the same tensors makes a new plan; the graphs go on.
    """
    pair = optimizer, twin = make_pair(device)
    step_both(pair, 0)
    replays = []
    for _ in range(3):
        reserve_grads(optimizer)
        replays.append((capture(optimizer.step), [p.grad for p in all_params(optimizer)]))
    plan = optimizer._whole.plan
    assert len(optimizer._captured) == 1
    for each in pair:
        param = all_params(each)[0]
        each.state[param] = dict(each.state[param])
    reserve_grads(optimizer)
    step_both(pair, 1)
    assert optimizer._whole.plan is not plan
    # Nothing that is pinned afterwards takes the place of what a replay copies from the host.
    others = [torch.empty(2**size, dtype=torch.uint8, pin_memory=HAS_GPU) for size in range(8, 16)]
    others = [other.fill_(0xA5).to(device, non_blocking=True) for other in others]
    for seed, which in enumerate((0, 1, 2, 1, 0, 0), 2):
        replay, grads = replays[which]
        for param, grad in zip(all_params(optimizer), grads, strict=True):
            param.grad = grad
        for each in pair:
            fill_grads(each, seed)
        replay()
        twin.step()
    assert_same_training(optimizer, twin)
    capture(optimizer.step)
    assert len(optimizer._captured) == 2


# States


@pytest.mark.parametrize("source", [True, False, "adamw"])
@pytest.mark.parametrize("target", [True, False])
def test_states_go_both_ways(source, target, device):
    first: Any = make_pair(device)[0 if source is True else 1]
    if source == "adamw":
        groups = [{"params": g["params"], "lr": g["lr"]} for g in first.param_groups]
        first = torch.optim.AdamW(groups, fused=True)
    step_both([first], 0)
    saved = copy.deepcopy(first.state_dict())
    assert {type(group["lr"]) for group in saved["param_groups"]} == {float}
    loaded = []
    for capturable in (target, False):
        params = [Parameter(param.detach().clone()) for param in all_params(first)]
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        loaded.append(FusedAdam(groups, lr=1.0, capturable=capturable))
        loaded[-1].load_state_dict(copy.deepcopy(saved))
        assert {group["capturable"] for group in loaded[-1].param_groups} == {capturable}
        reserve_grads(loaded[-1])
    for seed in (1, 2):
        step_both(loaded, seed)
    assert_same_training(*loaded)


# What is refused


# What happens before a step is captured; returns what is called then.
def exchanged(optimizer: FusedAdam) -> Callable[[], Any]:
    state = optimizer.state[all_params(optimizer)[0]]
    state["exp_avg"] = state["exp_avg"].clone()
    return optimizer.step


def with_clipping(optimizer: FusedAdam) -> Callable[[], Any]:
    optimizer.clip_grad_norm_(1.0)
    return optimizer.step


def of_the_first(optimizer: FusedAdam) -> Callable[[], Any]:
    optimizer.state.clear()
    set_rates(optimizer, 0.1)
    return optimizer.step


def of_others(param: torch.Tensor) -> Callable[[FusedAdam], Callable[[], Any]]:
    """Of an optimizer without the option."""

    def prepare(optimizer: FusedAdam) -> Callable[[], Any]:
        other = FP4Adam([Parameter(param.to(DEVICE))])
        take_steps(other, [0])
        return other.step

    return prepare


QUANTIZED = NVFP4Quantizer().quantize(torch.ones(32, 32))


@pytest.mark.table
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (of_others(torch.ones(3)), r"capturable must be True.*FP4Adam\(capturable=True\)"),
        (of_others(QUANTIZED), "capture forward and backward, and call step"),
        (of_the_first, "one step outside the graph right before"),
        (exchanged, "other parameters, states or gradients"),
        (
            lambda o: o.param_groups[1].update(lr=0.5) or o.step,
            "lr must be a tensor .*got 0.5.*fill_",
        ),
        (lambda optimizer: lambda: optimizer.clip_grad_norm_(1.0), "torch.nn.utils.clip_grad_norm"),
        (with_clipping, "clipping must not be pending"),
    ],
)
def test_what_cannot_be_captured_changes_nothing(prepare, words, device, monkeypatch):
    optimizer, _ = pair = make_pair(device)
    step_both(pair, 0)
    step = prepare(optimizer)
    before = [param.detach().clone() for param in all_params(optimizer)]
    with monkeypatch.context() as patch:
        patch.setattr(backend, "is_capturing", lambda: True)
        with pytest.raises(RuntimeError, match=words):
            step()
    assert_identical([param.detach() for param in all_params(optimizer)], before)
    optimizer.step()


def test_unsupported_combinations_are_refused(device: str) -> None:
    params = make_params(device)
    for options, error, words in (
        (dict(fused=False), ValueError, "fused must not be set.* and False"),
        (dict(offload_states=True), ValueError, "offload_states .*got True"),
    ):
        with pytest.raises(error, match=words):
            FusedAdam(params, capturable=True, **options)
    with pytest.raises(ValueError, match="same for all groups, got False"):
        FusedAdam([{"params": params, "capturable": False}], capturable=True)
    with pytest.raises(NotImplementedError, match="capture forward and backward"):
        FP4Adam([Parameter(QUANTIZED)], capturable=True)
    optimizer = FusedAdam(params, capturable=True)
    with pytest.raises(NotImplementedError, match="capturable must be False.*got False and True"):
        optimizer.enable_gradient_release()
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        take_steps(optimizer, [0])
    assert optimizer.param_groups[0]["lr"] is math.nan  # and no tensor, which nobody reads
    if HAS_GPU:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        with pytest.raises(ValueError, match="tensor on the GPU.*got a tensor on cpu"):
            take_steps(optimizer, [0])
    for grad in (torch.ones(4, 8).t(), torch.ones(8, 4).double()):
        param = Parameter(torch.ones(8, 4, device=device, dtype=grad.dtype))
        param.grad = grad.to(device)
        optimizer = FusedAdam([param], capturable=True)
        with pytest.raises(RuntimeError, match=r"capturable=True needs.* \(8, 4\).* strides \("):
            optimizer.step()
        assert not any(state["step"] for state in optimizer.state.values())


# On a GPU


@pytest.mark.skipif(not HAS_GPU, reason="captures a backward pass")
@pytest.mark.parametrize("steps_inside", [True, False])
def test_iterations_are_captured(steps_inside: bool) -> None:
    """Forward, backward, unscaling and clipping by torch, and the step, in one graph.

    Or the step of quantized weights outside, which writes where the graph reads them. All is on one
    stream other than the default one, as backward passes that are captured need.
    """

    def train(captured: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).cuda()
        x = torch.zeros(8, 64, device="cuda")
        if steps_inside:
            optimizer = FusedAdam(model.parameters(), lr=1e-2, capturable=captured)
        else:
            model, x = quantize_model(model.bfloat16(), NVFP4Quantizer()), x.bfloat16()
            optimizer = FP4Adam(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=steps_inside)
        loss, losses, graph = torch.zeros((), device="cuda"), [], None

        def iteration() -> None:
            found = (model(x) - x).float().square().mean()
            loss.copy_(found.detach())
            scaler.scale(found).backward()
            if steps_inside:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for seed in range(8):
                x.copy_(randn(*x.shape, seed=seed))
                if graph is None:
                    optimizer.zero_grad()
                if captured and seed == 3:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream):
                        iteration()
                graph.replay() if graph else iteration()
                if not steps_inside:
                    optimizer.step()
                losses.append(loss.item())
        return losses + [param.double().sum().item() for param in model.parameters()]

    # Within a capture cuBLAS may choose another algorithm.
    assert train(True) == pytest.approx(train(False), rel=1e-4)
