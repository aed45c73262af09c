"""Saving and loading: state dicts in FP32, as ``torch.optim.AdamW`` has them, or as stored."""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.optim import checks
from fp4adam.optim import state_dict as saving
from fp4adam.optim.hyper_parameters import check_numbers
from fp4adam.optim.offload import chunks
from fp4adam.optim.param_view import ParamView


class SavedStates:
    """The state dicts, as a part of ``FusedAdam``; the attributes that it uses are its own."""

    def state_dict(self) -> dict[str, Any]:
        """The state in FP32 under the names of ``torch.optim.AdamW``, whatever the storage dtypes.

        As in ``torch.optim``, tensors that are FP32 already are the optimizer's own, not copies. If
        other code has written to a parameter, its value replaces the outdated master.
        """
        return self._saved(compact=False)

    def compact_state_dict(self) -> dict[str, Any]:
        """The state as it is stored; :meth:`load_state_dict` restores it bit for bit.

        Moments have the dtypes ``exp_avg_dtype`` and ``exp_avg_sq_dtype``, with ``exp_avg_scale``
        and ``exp_avg_sq_scale`` if blocks of 32 elements share a scale. Two float8_e4m3fn moments
        take 2 + 2/32 bytes per element instead of 8. ``param_remainder`` takes 2 bytes instead of
        the 4 of ``master_param``; it is valid only with the parameters of the same step, which must
        be loaded first. Any optimizer of this class can load the result, whatever its own storage
        dtypes; ``torch.optim.AdamW`` cannot. The tensors are the optimizer's own, not copies.

        Raises:
            NotImplementedError: For sharded parameters with scaled states: the blocks of 32
                elements follow each rank's memory and would not fit other shards.
        """
        for param, state in self.state.items():
            scaled = (
                [name for name in state if name.endswith("_scale")]
                if isinstance(state, dict)
                else []
            )
            if scaled and is_dtensor(param):
                raise NotImplementedError(
                    f"states of sharded parameters must have no scales to be saved as they are, "
                    f"got {', '.join(scaled)}, which fit the shards of this number of ranks only; "
                    "save state_dict(), or store moments in bfloat16"
                )
        return self._saved(compact=True)

    def _saved(self, compact: bool) -> dict[str, Any]:
        def encode(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            states = state_dict["state"]
            keys = dict(saving.saved_keys(self.param_groups, state_dict))
            keys = {param: key for param, key in keys.items() if isinstance(states[key], dict)}
            views = {param: self._view(param) for param in keys}
            left = self._left(views.values())
            for param, key in keys.items():
                view = views[param]
                states[key] = saving.saved_state(view, states[key], view in left, compact)
            if self._is_capturable:
                # As a number, which optimizers with and without capturable load.
                for group in state_dict["param_groups"]:
                    group["lr"] = float(group["lr"])

        with self._saving, self._hook(self.register_state_dict_post_hook, encode):
            return super().state_dict()

    @torch.no_grad()
    def _left(self, views: Iterable[ParamView]) -> Container[ParamView]:
        """The parameters that no longer equal their rounded masters; changes neither."""
        with torch._C.DisableTorchFunctionSubclass():
            self._take_notes()
            states, found = self.__dict__["state"], {}
            for some in self._together([*views]):
                found |= self._masters.left(some, states)[0]
            return found

    def _together(self, views: Sequence[ParamView]) -> list[list[ParamView]]:
        """The views whose masters may be on the GPU at the same time; not all if offloaded."""
        if self._offload is None:
            return [[*views]]
        of = {view.owner: view for view in views}
        parts = chunks([*of], [*map(self._scales_of, of)])
        return [[of[owner] for owner in part] for part in parts]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class, compact or not, by ``torch.optim.AdamW``, or by
        Transformer Engine's ``FusedAdam``.

        Moments and masters are not rounded to the dtype of their parameters; they are converted to
        the storage dtypes of this optimizer. Nothing is shared with ``state_dict``.

        Model and optimizer may be loaded in any order: the next step compares each parameter with
        its rounded master, and restarts the master where they differ. Masters that ``state_dict``
        lacks start from the parameters as well. Parameters keep their values, with two exceptions.
        A quantized parameter that was restored from plain values of the rounded master gets the
        master's exact bytes. A parameter without a master of its own, such as a float32 one, takes
        over a stored master that rounds to its value.

        With sharded parameters, call it on every rank, with states of its shards or of whole
        parameters.

        Raises:
            ValueError: If groups, shapes, dtypes, placements or numbers do not fit; nothing has
                changed then.
            TypeError: If a hyper-parameter is not a number.
        """
        new: dict[Tensor, dict[str, Any]] = {}

        def check(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            state_dict = saving.with_steps(state_dict)
            if not saving.has_groups_of(self.param_groups, state_dict):
                return state_dict  # torch.optim raises its own error
            saving.check_state_dict(self.param_groups, state_dict)
            for group in state_dict["param_groups"]:
                check_numbers({**self.defaults, **group})
                checks.check_storing(self._storing, group.get("amsgrad", False))
            states = dict(state_dict["state"])
            for owner, key in saving.saved_keys(self.param_groups, state_dict):
                state = saving.new_state(self._view(owner), states[key])
                new[owner] = self._offloaded(owner, state)
                states[key] = saving.others(states[key])
            return {**state_dict, "state": states}

        def restore(optimizer: Optimizer) -> None:
            for owner, state in new.items():
                self.state[owner].update(state)
            self._adopt_masters([*new])

        with (
            self._saving,
            torch.no_grad(),
            self._hook(self.register_load_state_dict_pre_hook, check, prepend=False),
            self._hook(self.register_load_state_dict_post_hook, restore),
        ):
            super().load_state_dict(state_dict)

    def _adopt_masters(self, owners: Sequence[Tensor]) -> None:
        """Give parameters with the values of their rounded loaded masters the exact bytes of these.

        All others keep their bytes; the next step compares them again, in case the model is loaded
        after the optimizer.
        """
        with torch._C.DisableTorchFunctionSubclass():
            views = [self._view(owner) for owner in owners if not owner.is_meta]
            states = self.__dict__["state"]
            for view in views:
                if not view.has_master and "master_param" in states[view.owner]:
                    saving.adopt_master(view, states[view.owner])
            for some in self._together([view for view in views if view.has_master]):
                self._masters.adopt(some, states)

    @contextlib.contextmanager
    def _hook(
        self, register: Callable[..., Any], hook: Callable[..., Any], prepend: bool = True
    ) -> Iterator[None]:
        """Register a hook of torch.optim for the duration of a ``with`` block."""
        handle = register(hook, prepend=prepend)
        try:
            yield
        finally:
            handle.remove()
