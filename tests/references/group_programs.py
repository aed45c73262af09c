"""Random programs on weights that share a scale, beside a model of what has to happen.

A weight's bytes are its rows of the joined masters, quantized as one, from each step on. Others may
write one member alone, and plain checkpoints quantize each member alone: neither changes a master
of another member.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor, nn
from torch.nn import Parameter

from fp4adam import FP4Adam, QuantizedTensor, quantize_model, use_plain_state_dict
from helpers import RECIPES, bits_equal, random, stored, through_a_file
from master_reference import Twin, same_bits, value_of

ROWS = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 16}
COLS = 32
MEMBERS = ("q_proj", "k_proj", "v_proj")
OPTIONS = dict(lr=1e-2, weight_decay=0.1)


# Full overwrites of a parameter by other code.


def _values(param: Tensor, seed: int) -> Tensor:
    return random(tuple(param.shape), 900 + seed, str(param.device), scale=0.2)


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
    "copy_ in inference mode": torch.inference_mode()(lambda p, seed: p.copy_(_values(p, seed))),
    "quantize_ or set_": _quantize_,
    "fill_": lambda p, seed: p.fill_(0.25 * (seed - 1)),
    "normal_": lambda p, seed: p.normal_(generator=torch.Generator(p.device).manual_seed(seed)),
    "nn.init": lambda p, seed: nn.init.uniform_(
        p, -0.1, 0.1, generator=torch.Generator(p.device).manual_seed(seed)
    ),
    "data = data + more, as merges do": lambda p, seed: setattr(
        p, "data", value_of(p).to(p.dtype) + _values(p, seed).to(p.dtype)
    ),
}


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


def _there_and_back(model: nn.Module) -> None:
    device = next(model.parameters()).device
    model.cpu().to(device)


class Attention(nn.Module):
    """Three weights in a group, the largest in k, and one by itself."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        for seed, (name, rows) in enumerate(ROWS.items()):
            layer = nn.Linear(COLS, rows, bias=False)
            scale = 0.3 if name == "k_proj" else 0.1
            layer.weight = Parameter(random((rows, COLS), seed, scale=scale))
            self.add_module(name, layer)
        names = [f"{name}.weight" for name in MEMBERS]
        quantize_model(self, recipe, scale_groups=[names])


names = st.sampled_from([*ROWS])
seeds = st.integers(0, 7)


class GroupTraining(RuleBasedStateMachine):
    """A model with a scale group, its optimizer, and what must be true of them."""

    counts = {"programs": 0, "steps": 0}

    def __init__(self) -> None:
        super().__init__()
        self.counts["programs"] += 1
        self.model: Any = None

    @initialize(recipe=st.sampled_from(["nvfp4", "float8"]))
    def start(self, recipe: str) -> None:
        self.recipe = recipe
        self.model = Attention(recipe)
        self.optimizer = FP4Adam(self.model.parameters(), **OPTIONS)
        self.twins = {name: Twin(torch.empty(0), {}, 0) for name in ROWS}
        self.written: set[str] = set()
        self.expect(self.params)

    @property
    def params(self) -> dict[str, Any]:
        return {name: getattr(self.model, name).weight for name in ROWS}

    def master(self, name: str) -> Tensor:
        """What the next step continues from: what others have written, or the last master."""
        param = self.params[name]
        if name not in self.written and self.optimizer.state.get(param):
            return self.twins[name].value
        # Before the first step, weights keep what is written unrounded, until they are moved.
        kept = param._high_precision_init_val
        return value_of(param) if kept is None else kept.float()

    def expect(self, names: Iterable[str]) -> None:
        """Weights have the values of their rows of the joined masters, and keep their bytes."""
        for group in (MEMBERS, ("o_proj",)):
            parts = [self.master(name) for name in group]
            joined = RECIPES[self.recipe].quantize(torch.cat(parts))
            rows = value_of(joined).split([len(part) for part in parts])
            for name, value in zip(group, rows, strict=True):
                if name in names:
                    param = self.params[name]
                    assert bits_equal(value_of(param), value), f"{name} is not its rounded master"
                    assert param._amax is None or bits_equal(param._amax, joined._amax)
        self.note_bytes()

    def note_bytes(self) -> None:
        params = self.params.items()
        self.bytes = {name: {n: t.clone() for n, t in stored(p).items()} for name, p in params}

    @rule(seed=seeds, absent=st.sets(names, max_size=3))
    def step(self, seed: int, absent: set[str]) -> None:
        group = self.optimizer.param_groups[0]
        stepped = []
        for i, (name, param) in enumerate(self.params.items()):
            param.grad = None
            if name not in absent:
                scale = 10.0 ** (seed % 3 - 1)
                param.grad = random(tuple(param.shape), 100 * seed + i, scale=scale)
                stepped.append(name)
        alone = set(stepped) & {"o_proj"}
        moved = {*MEMBERS, *alone} if set(stepped) & set(MEMBERS) else alone
        for name in moved:
            self.twins[name].value = self.master(name).clone()
        for name in stepped:
            self.twins[name].update(self.params[name].grad, group)
        self.written -= moved
        self.optimizer.step()
        self.counts["steps"] += 1
        for name in moved:
            state, twin = self.optimizer.state[self.params[name]], self.twins[name]
            assert bits_equal(state["master_param"], twin.value), f"master of {name} is wrong"
            for moment, value in twin.moments.items():
                assert bits_equal(state[moment], value), f"{moment} of {name} is wrong"
        self.expect(moved)

    step_again = step_once_more = step

    @rule(name=names, how=st.sampled_from([*OVERWRITES]), seed=seeds)
    def overwrite(self, name: str, how: str, seed: int) -> None:
        with torch.no_grad():
            OVERWRITES[how](self.params[name], seed)
        now, before = stored(self.params[name]), self.bytes[name]
        if not same_bits(now, before):
            self.written.add(name)
        self.bytes[name] = {n: t.clone() for n, t in now.items()}

    @rule(how=st.sampled_from([*MOVES]))
    def move(self, how: str) -> None:
        MOVES[how](self.model)

    @rule()
    def ask(self) -> None:
        self.asked(self.optimizer.state_dict())

    def asked(self, saved: dict[str, Any]) -> None:
        for i, name in enumerate(self.params):
            master = saved["state"].get(i, {}).get("master_param")
            if master is not None:
                assert bits_equal(master, self.master(name)), f"state_dict(): master of {name}"
            else:
                assert not self.twins[name].step or name in self.written, f"no master of {name}"

    @rule(model_first=st.booleans(), plain=st.booleans())
    def resume(self, model_first: bool, plain: bool) -> None:
        """In a new process, from a checkpoint of the model and one of the optimizer."""
        if (
            plain
            and self.written
            or not all(self.optimizer.state.get(p) for p in self.params.values())
        ):
            return  # values that one member alone was written in have another amax
        state = self.optimizer.state_dict()
        self.asked(state)
        source = use_plain_state_dict(copy.deepcopy(self.model)) if plain else self.model
        saved, state = through_a_file((source.state_dict(), state))
        self.twins = {
            name: Twin(self.master(name).clone(), twin.moments, twin.step)
            for name, twin in self.twins.items()
        }
        model = Attention(self.recipe)
        self.optimizer = FP4Adam(model.parameters(), lr=0.5)
        self.model = model
        loads = [
            lambda: model.load_state_dict(saved),
            lambda: self.optimizer.load_state_dict(state),
        ]
        for load in loads if model_first else reversed(loads):
            load()
        self.written = set()
        if plain:
            self.expect(self.params)
        self.holds()

    @rule()
    def load_own_plain_model_state(self) -> None:
        """Each member is quantized alone, and its master holds."""
        plain = use_plain_state_dict(copy.deepcopy(self.model)).state_dict()
        self.model.load_state_dict(plain)
        self.written |= {
            n for n, p in self.params.items() if p._high_precision_init_val is not None
        }
        self.note_bytes()

    @rule()
    def duplicate(self) -> None:
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))

    @invariant()
    def holds(self) -> None:
        if self.model is None:
            return
        for name, param in self.params.items():
            assert same_bits(stored(param), self.bytes[name]), f"{name} was written silently"
