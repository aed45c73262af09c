"""Random programs of what users do around an optimizer, beside a model of what has to happen.

``Training`` is a hypothesis state machine: each rule is something that a training script does.
``test_sequences.py`` runs a few programs, ``benchmarks/sequences.py`` thousands.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from fp4adam import FP4Adam, QuantizedTensor, quantize_model, use_plain_state_dict
from fp4adam.optim.options import STATES
from fp4adam.optim.remainder import belongs_to, complete, split_off
from fp4adam.optim.state_codec import CODES, dither_bits, join_master, split_master
from fp4adam.tensors import backend
from helpers import RECIPES, WithGradient, bits_equal, random, stored, through_a_file
from interrupts import InterruptLaunches, InterruptOperators
from late_link import LateLink, offload_to
from master_reference import Twin, is_rounded, rounded, rounded_tensor, same_bits, value_of

SHAPES = {"nvfp4": (32, 16), "mxfp8": (32, 32), "float8block": (16, 16)}
DTYPES = {"nvfp4": torch.float32, "mxfp8": torch.bfloat16, "float8block": torch.bfloat16}
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "amsgrad": dict(amsgrad=True),
    "remainders": dict(store_param_remainders=True),
    "through the parameter's dtype": dict(quantize_from="param_dtype"),
    "narrow moments": dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.float8_e4m3fn),
    "int8 masters": dict(master_weight_dtype=torch.int8),
    "8bit": dict(states="8bit"),
    "int8 masters through the parameter's dtype": dict(
        master_weight_dtype=torch.int8, quantize_from="param_dtype"
    ),
    "no masters": dict(master_weights=False),
}
GROUPS: tuple[dict[str, Any], ...] = (
    dict(lr=1e-2, weight_decay=0.1),
    dict(lr=2e-3, betas=(0.4, 0.99), weight_decay=0.01, adam_w_mode=False),
)


class Net(nn.Module):
    """A weight of each format, a BF16 and an FP32 parameter; more can be added.

    Without masters, all weights are in 8 bits.
    """

    def __init__(self, device: str, has_masters: bool = True) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            layer = nn.Linear(*reversed(shape), bias=False, device=device)
            value = random(shape, i, device, scale=0.1)
            layer.weight = Parameter(value.to(DTYPES[name]))
            setattr(self, name, layer)
            recipe = RECIPES[name if has_masters or name != "nvfp4" else "float8block"]
            quantize_model(self, recipe, lambda _, at, name=name: at == name)
        self.narrow = Parameter(random((9,), 7, device).bfloat16())
        self.wide = Parameter(random((5,), 8, device))

    def groups(self) -> list[dict[str, Any]]:
        first = [self.nvfp4.weight, self.narrow]
        second = [self.mxfp8.weight, self.float8block.weight, self.wide]
        return [{"params": first, **GROUPS[0]}, {"params": second, **GROUPS[1]}]


class Record:
    """What has to be true of one parameter.

    Attributes:
        twin: Its moments and step count.
        possible: The masters that the optimizer may hold, None for none. There are several where it
            is free to look at a parameter, or not: at a step that leaves the parameter alone.
        origin: A value before quantization that a master may have started from, and the bytes that
            the parameter had then. Cast since, it may round to other bytes; it stays the master
            while nobody writes.
        is_touched: Whether others may have written or moved the parameter since its last step.
    """

    origin: tuple[Tensor, dict[str, Tensor]] | None = None
    is_touched = True

    def __init__(self, twin: Twin | None = None, possible: list[Tensor | None] | None = None):
        self.twin = Twin(torch.empty(0), {}, 0) if twin is None else twin
        self.possible: list[Tensor | None] = [None] if possible is None else possible

    def allow(self, masters: list[Tensor | None]) -> None:
        """Add masters that the optimizer may hold from now on."""
        for master in masters:
            if not _is_among(master, self.possible):
                self.possible.append(master)


def _is_among(value: Tensor | None, values: list[Tensor | None]) -> bool:
    if value is None:
        return any(other is None for other in values)
    return any(other is not None and bits_equal(value, other) for other in values)


def tensors_of(optimizer: Any) -> list[Tensor]:
    """All tensors that a step may write."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            found += stored(param).values()
            state = optimizer.state.get(param, {})
            found += [x for x in state.values() if isinstance(x, Tensor)]
    return found


# Full overwrites of a parameter by other code.


def _values(param: Tensor, seed: int) -> Tensor:
    return random(tuple(param.shape), 900 + seed, str(param.device), scale=0.2)


def _exchange_data(param: Tensor, seed: int) -> None:
    values = _values(param, seed).to(param.dtype)
    if isinstance(param, QuantizedTensor):
        values = param.quantizer.quantize(values)
    param.data = values


def _copy_same_format(param: Tensor, seed: int) -> None:
    values = _values(param, seed)
    quantized = isinstance(param, QuantizedTensor)
    param.copy_(param.quantizer.quantize(values) if quantized else values)


def _quantize_(param: Tensor, seed: int) -> None:
    if isinstance(param, QuantizedTensor):
        param.quantize_(_values(param, seed))
    else:
        param.set_(_values(param, seed).to(param.dtype))


OVERWRITES: dict[str, Callable[[Tensor, int], object]] = {
    "copy_": lambda p, seed: p.copy_(_values(p, seed)),
    "copy_ of its own format": _copy_same_format,
    "copy_ through detach()": lambda p, seed: p.detach().copy_(_values(p, seed)),
    "copy_ of itself": lambda p, seed: p.copy_(p.detach().clone()),
    "copy_ in inference mode": torch.inference_mode()(lambda p, seed: p.copy_(_values(p, seed))),
    "quantize_ or set_": _quantize_,
    "fill_": lambda p, seed: p.fill_(0.25 * (seed - 1)),
    "normal_": lambda p, seed: p.normal_(generator=torch.Generator(p.device).manual_seed(seed)),
    "nn.init": lambda p, seed: nn.init.uniform_(
        p, -0.1, 0.1, generator=torch.Generator(p.device).manual_seed(seed)
    ),
    "data =": _exchange_data,
    "data = data + more, as merges do": lambda p, seed: setattr(
        p, "data", value_of(p).to(p.dtype) + _values(p, seed).to(p.dtype)
    ),
    "swap_tensors": lambda p, seed: torch.utils.swap_tensors(
        p, Parameter(_replaced(p, seed), p.requires_grad)
    ),
}


def _replaced(param: Tensor, seed: int) -> Tensor:
    other = param.detach().clone()
    other.copy_(_values(param, seed))
    return other


# Moves that leave the values alone.
MOVES: dict[str, Callable[[nn.Module], object]] = {
    "new memory": lambda model: model._apply(torch.clone),
    "cpu() and back": lambda model: _there_and_back(model),
    "share_memory()": lambda model: model.share_memory(),
    "swap_tensors": lambda model: [
        torch.utils.swap_tensors(p, Parameter(p.detach().clone(), p.requires_grad))
        for p in model.parameters()
    ],
    "data = data": lambda model: [
        setattr(p, "data", p.detach().clone()) for p in model.parameters()
    ],
}
CASTS: dict[str, Callable[[nn.Module], object]] = {
    "half(), bfloat16()": lambda model: model.half().bfloat16(),
    "float(), bfloat16()": lambda model: model.float().bfloat16(),
    "bfloat16()": lambda model: model.bfloat16(),
    "half()": lambda model: model.half(),
    "float()": lambda model: model.float(),
}


def _there_and_back(model: nn.Module) -> None:
    device = next(model.parameters()).device
    model.cpu().to(device)


seeds = st.integers(0, 7)
indices = st.integers(0, 5)
# Which parameters have no gradient; most have one.
absences = st.sets(indices, max_size=3)


def action(**strategies: Any) -> Callable[[Callable], Callable]:
    """A rule that can be left out, and is written down before it runs."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(training: Training, **arguments: Any) -> None:
            if function.__name__ in training.without:
                return
            training.counts["rules"] += 1
            if training.trace is not None:
                given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
                training.trace.append(f"state.{function.__name__}({given})")
            function(training, **arguments)

        return rule(**strategies)(run)

    return decorate


class Training(RuleBasedStateMachine):
    """A model, its optimizer, and what must be true of them.

    Subclasses say where: ``device`` and ``kernels``.
    """

    device = "cpu"
    kernels = False
    # Further options of the optimizer.
    extra: dict[str, Any] = {}
    # Rules that do nothing, to see what else there is.
    without: frozenset[str] = frozenset()
    # Where the lines of the program that runs are written before they run, or None.
    trace: Any = None
    counts = {"programs": 0, "rules": 0, "steps": 0}

    def __init__(self) -> None:
        super().__init__()
        self.uses_kernels = backend.uses_kernels
        backend.uses_kernels = lambda device: self.kernels and device.type == self.device
        self.counts["programs"] += 1
        if self.trace is not None:
            self.trace.start()
        self.model: Any = None

    def teardown(self) -> None:
        backend.uses_kernels = self.uses_kernels

    @initialize(options=st.sampled_from([*OPTIONS]))
    def start(self, options: str) -> None:
        self.options = {**OPTIONS[options], **self.extra}
        stored = {**STATES[self.options.get("states", "32bit")], **self.options}
        self.keeps_remainders = stored["store_param_remainders"]
        self.has_small_masters = stored["master_weight_dtype"] == torch.int8
        self.has_exact_moments = stored["exp_avg_dtype"] == torch.float32
        self.has_masters = self.options.get("master_weights", True)
        self.model = Net(self.device, self.has_masters)
        self.optimizer: Any = FP4Adam(self.model.groups(), **self.options)
        self.records = [Record() for _ in self.params]
        self.model_states: list[dict[str, Tensor]] = []
        self.original: tuple[Any, list[Tensor], list[Tensor]] | None = None
        self.replaced: list[weakref.ref] = []
        self.note_bytes()

    # What is there

    @property
    def params(self) -> list[Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def members(self) -> Iterator[tuple[dict[str, Any], Parameter, Record]]:
        """Group, parameter and record of each parameter."""
        groups = [group for group in self.optimizer.param_groups for _ in group["params"]]
        yield from zip(groups, self.params, self.records, strict=True)

    def note_bytes(self) -> None:
        """After something that may write or move parameters."""
        self.touch()
        self.bytes = [{n: t.clone() for n, t in stored(param).items()} for param in self.params]

    def touch(self, is_touched: bool = True) -> None:
        """Others may have written or moved parameters; False after their masters were loaded."""
        for record in self.records:
            record.is_touched = is_touched

    def keeps_remainder(self, param: Tensor) -> bool:
        narrow = param.dtype == torch.bfloat16 and not isinstance(param, QuantizedTensor)
        return narrow and self.keeps_remainders

    def is_own_value(self, param: Tensor) -> bool:
        """Whether nothing but the parameter itself has its value."""
        is_plain = not isinstance(param, QuantizedTensor)
        return not self.has_masters or is_plain and param.dtype == torch.float32

    def is_completed(self, param: Tensor) -> bool:
        """Whether the master is the weight with an int8 remainder."""
        return isinstance(param, QuantizedTensor) and self.has_small_masters

    def completed(self, param: QuantizedTensor, value: Tensor, step: int | None = None) -> Tensor:
        """What int8 remainders keep of a value whose codes are in ``param``."""
        dither = None
        if step is not None:
            bits = dither_bits(0, value.numel(), step, value.device)
            dither = bits.master.view(value.shape)
        return complete(param, split_off(param, value, dither))

    def round_off(self, param: Tensor, twin: Twin) -> None:
        """Round a new value as updates of weights without masters do."""
        if isinstance(param, QuantizedTensor):
            dither = dither_bits(0, param.numel(), int(twin.step), param.device)
            CODES.round_(twin.value, dither.master.view(param.shape))

    def kept(self, param: Tensor, value: Tensor) -> Tensor:
        """What a parameter keeps of a value."""
        if isinstance(param, QuantizedTensor):
            return value_of(rounded_tensor(param, value, self.quantize_from))
        return value.to(param.dtype).float()

    @property
    def quantize_from(self) -> str:
        return self.options.get("quantize_from", "master")

    def master(self, param: Tensor) -> Tensor:
        """What training of a parameter continues from."""
        state = self.optimizer.state.get(param, {})
        if self.keeps_remainder(param) and "param_remainder" in state:
            return join_master(param.detach(), state["param_remainder"])
        if self.is_own_value(param):
            return value_of(param)
        master = state.get("master_param")
        if master is None:
            return value_of(param)
        if master.dtype == torch.int8:
            return complete(param, master)
        return master.detach().clone()

    def starts(self, param: Tensor, record: Record) -> list[Tensor]:
        """Which masters the next step may start from: the rule about who wrote last."""
        if self.is_own_value(param):
            return [value_of(param)]
        if self.keeps_remainder(param):
            return self.remainder_starts(param, record)
        value = value_of(param)
        if isinstance(param, QuantizedTensor):
            kept = param._high_precision_init_val
            value = value if kept is None else kept.to(torch.float32, copy=True)
        if self.is_completed(param):
            return self.completed_starts(param, record, value)
        found: list[Tensor | None] = []
        for master in record.possible:
            holds = master is not None and is_rounded(param, master, self.quantize_from)
            starts = [master if holds else value]
            if master is not None and (
                # Values that differ in signs of zeros alone count as equal, or not, and so do those
                # that were decoded and quantized once more, which moves their last bits.
                torch.allclose(master, value, rtol=2.0**-21, atol=0.0)
                or self.is_origin(param, record, master)
            ):
                starts.append(master)
            found += [start for start in starts if not _is_among(start, found)]
        return found

    def is_origin(self, param: Tensor, record: Record, master: Tensor) -> bool:
        """Whether a master is the value before quantization of bytes that nobody has changed."""
        if record.origin is None or not bits_equal(master, record.origin[0]):
            return False
        now, then = stored(param), record.origin[1]
        return all(torch.equal(now[name], then[name]) for name in then)

    def completed_starts(self, param: Tensor, record: Record, value: Tensor) -> list[Tensor]:
        """A remainder is added to the codes that it was made of, or dropped."""
        found: list[Tensor] = []
        for master in record.possible:
            holds = master is not None and belongs_to(param, master)
            # FP32 masters that were loaded are handed out as they are until a step.
            starts = [master, self.completed(param, master)] if holds else []
            if not holds or record.is_touched:
                starts.append(self.completed(param, value))
            found += [start for start in starts if not _is_among(start, found)]
        return found

    def remainder_starts(self, param: Tensor, record: Record) -> list[Tensor]:
        """A BF16 parameter is a part of its master: others can write that part alone."""
        masters = [master for master in record.possible if master is not None]
        now = param.detach()
        hold = [m for m in masters if bits_equal(split_master(m)[0], now)]
        found = [*hold]
        if len(hold) < len(record.possible):
            found.append(value_of(param))
            remainder = self.optimizer.state.get(param, {}).get("param_remainder")
            if remainder is not None:
                for rest in (remainder, remainder.clone()):
                    joined = join_master(now, rest)
                    changed = split_master(joined)[0].view(torch.int16) != now.view(torch.int16)
                    found.append(join_master(now, rest.masked_fill(changed, 0)))
        return found

    def may_look(self, which: Callable[[Tensor], bool] = lambda param: True) -> None:
        """Before something at which the optimizer may look at parameters, and need not."""
        for _, param, record in self.members():
            if which(param):
                kept = isinstance(param, QuantizedTensor) and param._high_precision_init_val
                if isinstance(kept, Tensor):
                    held = {name: inner.clone() for name, inner in stored(param).items()}
                    record.origin = kept.to(torch.float32, copy=True), held
                record.allow([*self.starts(param, record)])
                if self.is_own_value(param):
                    record.allow([None])

    def grads(self, seed: int, absent: set[int]) -> None:
        for i, param in enumerate(self.params):
            param.grad = None
            if i not in absent and param.requires_grad:
                scale = 10.0 ** (seed % 3 - 1)
                grad = random(tuple(param.shape), 100 * seed + i, self.device, scale)
                param.grad = grad.to(param.dtype)

    # Steps

    def expected(
        self, grad_scale: Tensor | None = None, clip: Tensor | None = None
    ) -> list[list[Twin] | None]:
        """What each parameter may become in the next step."""
        if not self.has_exact_moments:
            self.asked(self.optimizer.state_dict())
        found: list[list[Twin] | None] = []
        for group, param, record in self.members():
            if param.grad is None:
                found.append(None)
                continue
            twins: list[Twin] = []
            for start in self.starts(param, record):
                moments = {name: x.clone() for name, x in record.twin.moments.items()}
                twin = Twin(start.clone(), moments, record.twin.step)
                twin.update(param.grad, group, grad_scale, clip)
                if not self.has_masters:
                    self.round_off(param, twin)
                twin.rounded = rounded(param, twin.value, self.quantize_from)
                if not self.has_masters and float(group["lr"]) > 0:
                    twin.value = self.kept(param, twin.value)
                if self.is_completed(param) and float(group["lr"]) > 0:
                    new = rounded_tensor(param, twin.value, self.quantize_from)
                    twin.value = self.completed(new, twin.value, int(twin.step))
                twins.append(twin)
            found.append(twins)
        self.may_look(lambda param: param.grad is None)
        return found

    def check_step(self, expected: list[list[Twin] | None]) -> None:
        """The step has been one of those expected, and nothing else was written."""
        self.counts["steps"] += 1
        touched = [record.is_touched for record in self.records]
        for i, (group, param, record) in enumerate(self.members()):
            twins, name = expected[i], f"parameter {i}, {type(param).__name__} {param.dtype}"
            if twins is None:
                assert same_bits(stored(param), self.bytes[i]), f"{name} has no gradient, but moved"
                continue
            state, master = self.optimizer.state[param], self.master(param)
            twin = next((twin for twin in twins if bits_equal(twin.value, master)), None)
            assert twin is not None, (
                f"master of {name} is wrong by up to "
                f"{(twins[0].value - master).abs().max().item():.3g}"
            )
            assert state["step"].item() == twin.step, f"step of {name}: {state['step']}"
            if self.has_exact_moments:
                for moment, value in twin.moments.items():
                    assert bits_equal(state[moment], value), f"{moment} of {name} is wrong"
            if self.keeps_remainder(param):
                assert bits_equal(param.detach(), split_master(master)[0])
            elif float(group["lr"]) > 0:
                assert same_bits(stored(param), twin.rounded), (
                    f"{name} is not what its master rounds to"
                )
            else:
                assert same_bits(stored(param), self.bytes[i]), f"{name} moved with lr = 0"
            record.twin = twin
            record.possible = [None if self.is_own_value(param) else master]
            touched[i] = False
        self.note_bytes()
        for record, is_touched in zip(self.records, touched, strict=True):
            record.is_touched = is_touched
        self.check_copies()

    def check_copies(self) -> None:
        """Steps of a copy have left the original alone; what was replaced is gone."""
        original, self.original = self.original, None
        if original is not None:
            pairs = zip(*original[1:], strict=True)
            assert all(bits_equal(a, b) for a, b in pairs), "the original of a copy was written"
        del original
        if self.replaced:
            gc.collect()
            assert not any(ref() is not None for ref in self.replaced), "replaced, but not freed"
            self.replaced = []

    @action(seed=seeds, absent=absences)
    def step(self, seed: int, absent: set[int]) -> None:
        self.grads(seed, absent)
        expected = self.expected()
        self.optimizer.step()
        self.check_step(expected)

    # Rules are drawn alike, and most of what users do is stepping.
    step_again = step_once_more = step_on = step

    @action(seed=seeds, absent=absences, max_norm=st.sampled_from([0.1, 1e3]))
    def clipped_step(self, seed: int, absent: set[int], max_norm: float) -> None:
        self.grads(seed, absent)
        clip = self.clip(max_norm)
        expected = self.expected(clip=clip)
        self.optimizer.step()
        self.check_step(expected)

    def clip(self, max_norm: float) -> Tensor | None:
        norm = self.optimizer.clip_grad_norm_(max_norm).float()
        if not any(param.grad is not None for param in self.params):
            return None
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)

    @action(seed=seeds, absent=absences)
    def step_after_dropped_gradients(self, seed: int, absent: set[int]) -> None:
        """Gradients that have been clipped are gone; the next ones are as they are."""
        self.grads(seed, set())
        self.clip(0.1)
        self.optimizer.zero_grad()
        self.step(seed=seed + 1, absent=absent)

    @precondition(lambda self: self.model is not None and self.has_exact_moments)
    @action(seed=seeds, absent=absences, failing=st.none() | indices)
    def released_step(self, seed: int, absent: set[int], failing: int | None) -> None:
        """Parameters are stepped in the backward pass; where it fails, the rest is as it was."""
        release = self.optimizer.enable_gradient_release()
        for fails_at in (failing, None):
            self.grads(seed, absent)
            expected = self.expected()
            self.may_look()
            grads = [param.grad for param in self.params]
            self.optimizer.zero_grad()
            try:
                for i, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
                    if grad is not None:
                        WithGradient.apply(param, None if i == fails_at else grad).backward()
                self.optimizer.step()
            except RuntimeError as error:
                assert str(error) == "out of memory"
                self.optimizer.zero_grad()
                for i, (_, param, record) in enumerate(self.members()):
                    if self.optimizer.state.get(param, {}).get("step", 0) == record.twin.step:
                        expected[i] = None
            self.check_step(expected)
        release.remove()

    @action(seed=seeds, index=indices)
    def step_after_a_changed_gradient(self, seed: int, index: int) -> None:
        """Some gradients are others than were clipped: the step refuses; once more is fine."""
        self.grads(seed, set())
        grads = [param.grad for param in self.params if param.grad is not None]
        if len(grads) < 2 or self.clip(0.1) is None:
            return
        grads[index % len(grads)].mul_(0.5)
        try:
            self.optimizer.step()
        except RuntimeError as error:
            assert "gradients must not change between clip_grad_norm_() and step()" in str(error)
        else:
            raise AssertionError("a coefficient of other gradients was taken")
        self.holds()
        self.optimizer.zero_grad()
        self.grads(seed, set())
        expected = self.expected()
        self.optimizer.step()
        self.check_step(expected)

    @action(seed=seeds)
    def average(self, seed: int) -> None:
        """An average of the model is in high precision, and leaves the training alone."""
        averaged = AveragedModel(self.model, avg_fn=get_ema_avg_fn(0.5))
        averaged.update_parameters(self.model)
        self.may_look()
        self.grads(seed, set())
        expected = self.expected()
        first = [value_of(param) for param in self.params]
        self.optimizer.step()
        self.check_step(expected)
        averaged.update_parameters(self.model)
        kept = dict(averaged.module.named_parameters())
        of_model = {param: name for name, param in self.model.named_parameters()}
        for param, before in zip(self.params, first, strict=True):
            if param not in of_model:
                continue
            mean = kept[of_model[param]].detach()
            assert type(mean) is Tensor
            wide = value_of(param) * 0.5 + before * 0.5
            step = 2**-7 if mean.dtype == torch.bfloat16 else 2**-10
            wide, mean = wide.nan_to_num(0, 0, 0), mean.float().nan_to_num(0, 0, 0)
            assert torch.allclose(mean, wide, rtol=step, atol=1e-3)

    @action(seed=seeds, index=indices)
    def refused_step(self, seed: int, index: int) -> None:
        """A clipped step with a bad gradient, and again with a good one."""
        self.grads(seed, set())
        param = self.params[index % len(self.params)]
        if param.grad is None:
            return
        clip = self.clip(0.5)
        expected = self.expected(clip=clip)
        good, param.grad = param.grad, param.grad.to_sparse()
        try:
            self.optimizer.step()
        except RuntimeError as error:
            assert "sparse" in str(error)
        else:
            raise AssertionError("a sparse gradient was accepted")
        param.grad = good
        self.holds()
        self.optimizer.step()
        self.check_step(expected)

    @action(seed=seeds, absent=absences, overflow=st.booleans())
    def scaled_step(self, seed: int, absent: set[int], overflow: bool) -> None:
        self.grads(seed, absent)
        scale = torch.full((), 4.0, device=self.device)
        expected = self.expected(grad_scale=scale)
        if overflow:
            self.may_look()
        self.optimizer.grad_scale = scale
        self.optimizer.found_inf = torch.full((), float(overflow), device=self.device)
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.grad_scale, self.optimizer.found_inf
        if overflow:
            for _, param, record in self.members():
                state = self.optimizer.state.get(param, {})
                assert float(state.get("step", 0)) == record.twin.step, "an overflow was counted"
        else:
            self.check_step(expected)

    @action(seed=seeds, at=st.integers(0, 250))
    def interrupted_step(self, seed: int, at: int) -> None:
        """Ctrl-C: what is there now is what training continues from."""
        self.grads(seed, set())
        expected = self.expected()
        interrupt = InterruptLaunches(at % 8) if self.kernels else InterruptOperators(at)
        try:
            with interrupt:
                self.optimizer.step()
        except KeyboardInterrupt:
            self.begin_from_what_is_there()
        else:
            self.check_step(expected)

    def begin_from_what_is_there(self) -> None:
        """After Ctrl-C in a step: a new start, from the states and weights of now."""
        self.optimizer.zero_grad()
        self.note_bytes()
        for i, (_, param, _) in enumerate(self.members()):
            twin = Twin.of(self.optimizer, param)
            state = self.optimizer.state.get(param, {})
            has_master = "master_param" in state
            if self.keeps_remainder(param):
                # Loaded states on the host keep the master until the next step.
                has_master = has_master or "param_remainder" in state
            self.records[i] = record = Record(twin, [self.master(param) if has_master else None])
            if self.is_own_value(param) and "master_param" in state:
                # Of before a cast to FP32; a cast back takes it up again.
                record.allow([state["master_param"].detach().clone()])
        if not self.has_exact_moments:
            self.asked(self.optimizer.state_dict())

    @action(seed=seeds)
    def step_of_another_optimizer(self, seed: int) -> None:
        self.grads(seed, set())
        FP4Adam(self.params, lr=0.05).step()
        self.note_bytes()

    # Writes by others

    @action(how=st.sampled_from([*OVERWRITES]), index=indices, seed=seeds)
    def overwrite(self, how: str, index: int, seed: int) -> None:
        with torch.no_grad():
            OVERWRITES[how](self.params[index % len(self.params)], seed)
        self.note_bytes()

    @action(seed=seeds)
    def overwrite_all_by_foreach_copy(self, seed: int) -> None:
        with torch.no_grad():
            sources = [_values(param, seed).to(param.dtype) for param in self.params]
            torch._foreach_copy_(self.params, sources)
        self.note_bytes()

    @action(plain=st.booleans())
    def save_model(self, plain: bool) -> None:
        model = use_plain_state_dict(copy.deepcopy(self.model)) if plain else self.model
        self.model_states = [*self.model_states[-1:], copy.deepcopy(model.state_dict())]

    @precondition(lambda self: self.model is not None and self.model_states)
    @action(index=st.integers(0, 1))
    def load_model(self, index: int) -> None:
        saved = self.model_states[index % len(self.model_states)]
        self.model.load_state_dict(saved, strict=False)
        self.note_bytes()

    @action()
    def load_own_plain_model_state(self) -> None:
        plain = use_plain_state_dict(copy.deepcopy(self.model)).state_dict()
        self.model.load_state_dict(plain)
        self.note_bytes()

    # Moves

    @action(how=st.sampled_from([*MOVES]))
    def move(self, how: str) -> None:
        MOVES[how](self.model)
        self.touch()

    @action(how=st.sampled_from([*CASTS]))
    def cast(self, how: str) -> None:
        completed = [self.keeps_remainder(param) for param in self.params]
        for param in self.params:
            param.grad = None
        CASTS[how](self.model)
        for param, record, was_completed in zip(self.params, self.records, completed, strict=True):
            if was_completed and not self.keeps_remainder(param):
                record.possible = [None]  # nothing is left for the remainder to complete
        self.note_bytes()

    # Copies, checkpoints

    @action()
    def ask(self) -> None:
        """state_dict() hands out the masters that parameters have, or their values."""
        self.asked(self.optimizer.state_dict())

    def asked(self, saved: dict[str, Any]) -> None:
        for i, (_, param, record) in enumerate(self.members()):
            state, name = saved["state"].get(i, {}), f"parameter {i}, {type(param).__name__}"
            assert float(state.get("step", 0)) == record.twin.step
            starts = self.starts(param, record)
            handed_out = state.get("master_param")
            is_wide = self.is_own_value(param)
            if handed_out is not None:
                assert _is_among(handed_out.detach(), [*starts]), (
                    f"state_dict() hands out a master that {name} has left"
                )
            elif not is_wide:
                # Without one, the master starts from the parameter when the state is loaded.
                may_lack = any(m is None for m in record.possible) or not state
                assert may_lack or _is_among(value_of(param), [*starts]), (
                    f"state_dict() hands out no master of {name}"
                )
            if is_wide:
                record.allow([None, value_of(param)])
            elif handed_out is not None:
                record.possible = [handed_out.detach().clone()]
                if "master_param" in self.optimizer.state.get(param, {}):
                    # One that rounds to other bytes in this dtype may do so no more after a cast.
                    record.allow([self.master(param)])
            names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            moments = {n: state[n].detach().clone() for n in names if n in state}
            if self.has_exact_moments:
                for moment, value in record.twin.moments.items():
                    assert bits_equal(moments[moment], value), f"{moment} of {name} is wrong"
            else:
                record.twin.moments = moments

    def become(self, model: Any, optimizer: Any) -> None:
        """Go on with a copy; the original must not change."""
        old, new = tensors_of(self.optimizer), tensors_of(optimizer)
        shared = {t.data_ptr() for t in old if t.numel()} & {t.data_ptr() for t in new if t.numel()}
        assert not shared, "a copy shares memory with its original"
        self.original = (self.model, self.optimizer), old, [t.clone() for t in old]
        self.model, self.optimizer = model, optimizer

    @action(pickled=st.booleans())
    def duplicate(self, pickled: bool) -> None:
        pair = self.model, self.optimizer
        self.become(*(through_a_file(pair, weights_only=False) if pickled else copy.deepcopy(pair)))

    def fresh(self, groups: list[dict[str, Any]]) -> Any:
        return FP4Adam(groups, lr=0.5, **self.options)

    def groups_of(self, model: nn.Module) -> list[dict[str, Any]]:
        """The parameters of a copied model in groups like those here."""
        names = {param: name for name, param in self.model.named_parameters()}
        params = dict(model.named_parameters())
        return [
            {"params": [params[names[param]] for param in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def checked_load(self, load: Callable[[], object]) -> None:
        """load_state_dict() leaves values alone; what came back through plain ones is completed."""
        self.note_bytes()
        load()
        for i, (_, param, record) in enumerate(self.members()):
            before, now = self.bytes[i], stored(param)
            masters = [master for master in record.possible if master is not None]
            completed = any(
                same_bits(now, rounded(param, master, self.quantize_from)) for master in masters
            )
            assert same_bits(now, before) or completed, f"load_state_dict() wrote parameter {i}"
        self.note_bytes()

    @action(model_first=st.booleans(), plain=st.booleans())
    def resume(self, model_first: bool, plain: bool) -> None:
        """In a new process: other weights first, then a checkpoint, in either order."""
        state = self.optimizer.state_dict()
        self.asked(state)
        source = use_plain_state_dict(copy.deepcopy(self.model)) if plain else self.model
        saved = through_a_file((source.state_dict(), state))
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for param in model.parameters():
                param.grad = None
                param.normal_()
        optimizer = self.fresh(self.groups_of(model))
        self.become(model, optimizer)
        self.original = None
        if model_first:
            model.load_state_dict(saved[0])
        self.checked_load(lambda: optimizer.load_state_dict(saved[1]))
        if not model_first:
            model.load_state_dict(saved[0])
        self.note_bytes()
        self.touch(plain)
        if not self.has_exact_moments:
            self.asked(self.optimizer.state_dict())

    @action(compact=st.booleans())
    def load_own_state(self, compact: bool) -> None:
        if compact:
            self.may_look()
            saved = self.optimizer.compact_state_dict()
        else:
            saved = self.optimizer.state_dict()
            self.asked(saved)
        self.checked_load(lambda: self.optimizer.load_state_dict(copy.deepcopy(saved)))
        self.touch(False)

    @action(seed=seeds, steps=st.integers(1, 2), model_first=st.booleans())
    def train_by_adamw(self, seed: int, steps: int, model_first: bool) -> None:
        """The weights in high precision for a while, with torch's optimizer, and back."""
        if any(param.dtype == torch.float16 for param in self.params):
            return  # torch's moments are FP16 then, in which eps is zero, and divide by it
        for param in self.params:
            param.grad = None
        plain = {p: Parameter(p.detach().dequantize(p.dtype)) if isinstance(p, QuantizedTensor)
                 else Parameter(p.detach().clone()) for p in self.params}  # fmt: skip
        groups = [{"params": [plain[p] for p in g["params"]]} for g in self.optimizer.param_groups]
        adamw = AdamW(groups, foreach=False)
        saved = self.optimizer.state_dict()
        self.asked(saved)
        adamw.load_state_dict(copy.deepcopy(saved))
        for group in adamw.param_groups:
            group["fused"] = None
        for i in range(steps):
            for j, param in enumerate(plain.values()):
                grad = random(tuple(param.shape), 100 * seed + 10 * i + j, self.device)
                param.grad = grad.to(param.dtype)
            adamw.step()
        state = through_a_file(adamw.state_dict())

        def load_model() -> None:
            with torch.no_grad():
                for param in self.params:
                    param.copy_(plain[param].detach())

        optimizer = self.fresh(self.groups_of(self.model))
        self.optimizer = optimizer
        if model_first:
            load_model()
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        for i, record in enumerate(self.records):
            own = state["state"].get(i, {})
            moments = {n: own[n].detach().to(torch.float32, copy=True) for n in names if n in own}
            carried = own.get("master_param")
            possible = [None] if carried is None else [carried.detach().float(), None]
            if carried is not None and self.keeps_remainder(self.params[i]):
                # It is split, and only what the parameter lacks is kept.
                possible = [None]
            record.twin = Twin(torch.empty(0), moments, float(own.get("step", 0)))
            record.possible = possible
        self.checked_load(lambda: optimizer.load_state_dict(state))
        if not model_first:
            load_model()
        self.note_bytes()
        if not self.has_exact_moments:
            self.asked(self.optimizer.state_dict())

    # The optimizer itself

    @precondition(lambda self: hasattr(FP4Adam, "reset_master_weights"))
    @action(index=st.none() | indices)
    def reset_master_weights(self, index: int | None) -> None:
        params = self.params
        chosen = params if index is None else [params[index % len(params)]]
        values = {}
        for param in chosen:
            kept = param._high_precision_init_val if isinstance(param, QuantizedTensor) else None
            values[param] = value_of(param) if kept is None else kept.float().clone()
        self.optimizer.reset_master_weights(None if index is None else chosen)
        for _, param, record in self.members():
            if any(param is other for other in chosen):
                record.possible = [None, values[param]]

    @action(index=indices)
    def freeze_or_thaw(self, index: int) -> None:
        param = self.params[index % len(self.params)]
        param.requires_grad_(not param.requires_grad)

    @precondition(lambda self: self.model is not None and len(self.params) < 7)
    @action(kind=st.sampled_from(["narrow", "nvfp4"]))
    def add_group(self, kind: str) -> None:
        n = len(self.params)
        value = random((16, 16), n, self.device)
        recipe = RECIPES["nvfp4" if self.has_masters else "float8block"]
        new = value.bfloat16() if kind == "narrow" else recipe.quantize(value)
        self.model.register_parameter(f"extra{n}", Parameter(new))
        self.optimizer.add_param_group({"params": [self.params_of_model()[f"extra{n}"]], "lr": 0.1})
        self.records.append(Record())
        self.note_bytes()

    def params_of_model(self) -> dict[str, Parameter]:
        return dict(self.model.named_parameters())

    @action(index=indices)
    def replace_parameter(self, index: int) -> None:
        at = index % len(self.params)
        old = self.params[at]
        new = Parameter(old.detach().clone(), old.requires_grad)
        for module in self.model.modules():
            for name, param in [*module._parameters.items()]:
                if param is old:
                    setattr(module, name, new)
        for group in self.optimizer.param_groups:
            group["params"] = [new if param is old else param for param in group["params"]]
        self.optimizer.state.pop(old, None)
        self.records[at] = Record()
        self.replaced.append(weakref.ref(old))

    @action(lr=st.sampled_from([0.0, 1e-3, 3e-2]), group=st.integers(0, 1))
    def set_lr(self, lr: float, group: int) -> None:
        self.optimizer.param_groups[group]["lr"] = lr

    @action(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)

    @precondition(lambda self: self.model is not None and self.has_exact_moments)
    @action(index=indices, name=st.sampled_from(["exp_avg", "exp_avg_sq"]))
    def replace_state(self, index: int, name: str) -> None:
        at = index % len(self.params)
        state = self.optimizer.state.get(self.params[at], {})
        if name in state:
            state[name] = state[name] * 0.5
            self.records[at].twin.moments[name] = state[name].detach().clone()

    # What is always true

    @invariant()
    def holds(self) -> None:
        if self.model is None:
            return
        for i, param in enumerate(self.params):
            assert same_bits(stored(param), self.bytes[i]), f"parameter {i} was written silently"
            largest = value_of(param).abs().max().item()
            assert math.isfinite(largest), f"parameter {i} is not finite"


class OperatorTraining(Training):
    """On the CPU, by plain operators."""


class KernelTraining(Training):
    """By kernels: on a GPU, or in Triton's interpreter."""

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = True


class OffloadedTraining(Training):
    """With states on the host, which come in several chunks."""

    device = "cuda" if torch.cuda.is_available() else "cpu"
    extra = {"offload_states": True}

    def __init__(self) -> None:
        super().__init__()
        self.offload = offload_to(LateLink(), chunk_bytes=12 * 32 * 32)

    def teardown(self) -> None:
        self.offload.close()
        super().teardown()
