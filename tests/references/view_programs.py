"""Random programs on views of one quantized weight, beside a model of what has to happen.

Views of rows or columns are parameters of their own on one storage. Whatever has a gradient, the
bytes of that are all masters side by side, quantized as one. Only other code that writes one view
may quantize its neighbours again, whose masters then restart if their values change.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from torch.nn import Parameter

from fp4adam import FP4Adam, QuantizedTensor
from helpers import RECIPES, bits_equal, random
from master_reference import Twin, value_of
from training_programs import GROUPS, MOVES, OVERWRITES

SIZE = 64
# Where rows are cut into three: on any row, also within blocks. Columns are cut between blocks.
CUTS = {0: [(0, 32, 48, SIZE), (0, 5, 40, SIZE)], 1: [(0, 32, SIZE)]}
# Float8Block has one block in so few columns.
BY_COLUMNS = ("nvfp4", "mxfp8", "float8")
WRITES = ("copy_", "copy_ through detach()", "fill_", "normal_", "copy_ of some rows")
VIEWS = range(3)


class Views(torch.nn.Module):
    """Views of one weight."""

    def __init__(self, whole: QuantizedTensor, dim: int, cuts: tuple[int, ...]) -> None:
        super().__init__()
        for i, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
            view = whole.detach().narrow(dim, start, stop - start)
            self.register_parameter(f"view{i}", Parameter(view))


class ViewTraining(RuleBasedStateMachine):
    """Views, their optimizer, and what must be true of them."""

    counts = {"programs": 0, "steps": 0}

    def __init__(self) -> None:
        super().__init__()
        self.counts["programs"] += 1
        self.model: Any = None

    @initialize(recipe=st.sampled_from([*RECIPES]), dim=st.integers(0, 1), which=st.integers(0, 1))
    def start(self, recipe: str, dim: int, which: int) -> None:
        self.dim = dim if recipe in BY_COLUMNS else 0
        cuts = CUTS[self.dim][which % len(CUTS[self.dim])]
        self.quantizer = RECIPES[recipe]
        self.model = Views(
            self.quantizer.quantize(random((SIZE, SIZE), 0, scale=0.1)), self.dim, cuts
        )
        assert all(isinstance(param, QuantizedTensor) for param in self.params)
        self.optimizer = FP4Adam(self.model.parameters(), **GROUPS[0])
        self.twins = [Twin(torch.empty(0), {}, 0) for _ in self.params]
        self.possible = [[value] for value in self.values()]

    @property
    def params(self) -> list[Any]:
        return [*self.model.parameters()]

    def values(self) -> list[Tensor]:
        return [value_of(param) for param in self.params]

    @rule(seed=st.integers(0, 7), absent=st.sets(st.sampled_from(VIEWS), max_size=3))
    def step(self, seed: int, absent: set[int]) -> None:
        before = self.values()
        for i, param in enumerate(self.params):
            param.grad = None
            if i not in absent:
                scale = 10.0 ** (seed % 3 - 1)
                param.grad = random(tuple(param.shape), 100 * seed + i, scale=scale)
        self.optimizer.step()
        self.counts["steps"] += 1
        if all(param.grad is None for param in self.params):
            assert all(map(bits_equal, self.values(), before))
            return
        for i in range(len(self.params)):
            self.check_master(i)
        joined = torch.cat([possible[0] for possible in self.possible], self.dim)
        sizes = [param.shape[self.dim] for param in self.params]
        expected = value_of(self.quantizer.quantize(joined)).split(sizes, self.dim)
        for i, (param, value) in enumerate(zip(self.params, expected, strict=True)):
            assert bits_equal(value_of(param), value), f"view {i} is not its master"

    step_again = step_once_more = step

    def check_master(self, i: int) -> None:
        """The master of a view is one that its last master, or its value, can have become."""
        param, twin, master = self.params[i], self.twins[i], None
        state = self.optimizer.state[param]
        for start in self.possible[i]:
            moments = {name: moment.clone() for name, moment in twin.moments.items()}
            new = Twin(start.clone(), moments, twin.step)
            if param.grad is not None:
                new.update(param.grad, self.optimizer.param_groups[0])
            if bits_equal(new.value, state["master_param"]):
                master = new.value
                break
        assert master is not None, f"master of view {i} is wrong"
        for name, moment in new.moments.items():
            assert bits_equal(state[name], moment), f"{name} of view {i} is wrong"
        self.twins[i], self.possible[i] = new, [master]

    @rule(which=st.sampled_from(VIEWS), how=st.sampled_from(WRITES), seed=st.integers(0, 7))
    def overwrite(self, which: int, how: str, seed: int) -> None:
        which %= len(self.params)
        before = self.values()
        with torch.no_grad():
            OVERWRITES[how](self.params[which], seed)
        for i, (old, new) in enumerate(zip(before, self.values(), strict=True)):
            if bits_equal(old, new):
                continue
            # Under new scales, a neighbour's codes may be those of its master nevertheless.
            self.possible[i] = [new] if i == which else [*self.possible[i], new]

    @rule()
    def read(self) -> None:
        """Quantizes what is pending."""
        self.values()

    @rule(how=st.sampled_from([None, *MOVES]))
    def copied(self, how: str | None) -> None:
        """A whole copy has views as before; new memory for each view has copies, without scales."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        if how is not None:
            MOVES[how](model)
        if len({param._shared for param in model.parameters()}) == 1:
            self.model, self.optimizer = model, optimizer
            return
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        before = [value_of(param) for param in model.parameters()]
        with pytest.raises(NotImplementedError, match="got a copy of a slice, .* quantize its"):
            optimizer.step()
        assert all(map(bits_equal, before, map(value_of, model.parameters())))

    @rule()
    def ask(self) -> None:
        state = self.optimizer.state_dict()["state"]
        for i, possible in enumerate(self.possible):
            if i in state:
                found = state[i].get("master_param", value_of(self.params[i]))
                assert any(bits_equal(found, value) for value in possible), f"master of view {i}"

    @rule()
    def load_own_state(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    @invariant()
    def holds(self) -> None:
        if self.model is not None:
            assert all(bool(value.isfinite().all()) for value in self.values())
