"""The parameters that one launch steps, and their rows of the tensor table."""

from collections.abc import Callable
from functools import partial, reduce
from itertools import chain, compress
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor

from fp4adam.kernels.launch.device_tables import DeviceTables
from fp4adam.optim.target import ALIGNMENT, LaunchKey, ReadGrad, Target, together
from fp4adam.tensors.fingerprint import are_laid_out_as, data_ptr
from fp4adam.tensors.rows import matrix_shape

_shape_and_device = attrgetter("shape", "device")


class LaunchGroup:
    """The parameters of one launch, all with the same ``launch_key``."""

    tensors: tuple  # of a StepLaunch; set once the tables exist
    launch: Any
    _have_known_layouts: Callable[..., bool]  # whether gradients do, as those before

    def __init__(self, key: LaunchKey, members: list[Target], read_grad: ReadGrad) -> None:
        self.key = key
        self.members = members
        # Plain tensors are read flat.
        is_plain = key.quantizer is None
        self.shapes = [
            (m.stepped.numel(), 1) if is_plain else matrix_shape(m.param) for m in members
        ]
        peers = together(range(len(members)), lambda i: members[i].scales)
        # Of the amaxes: members that share one share a slot.
        slots = {i: slot for slot, own in enumerate(peers) for i in own}
        self.slots = [slots[i] for i in range(len(members))]
        # Members that share an amax: the launch steps all of them or none.
        self._peers = [p for p in peers if len(p) > 1 and not is_plain]
        self.grads: list[int] = []  # addresses at the last call of takes_grads; 0 for none
        self.present: list[bool] = []
        self._read_grad = read_grad
        self._owners = [m.owner for m in members]
        self._values = [m.stepped for m in members]

    def takes_grads(self) -> bool:
        """Whether the launch can read the current gradients; records their addresses."""
        grads = list(map(self._read_grad, self._owners))
        present = [grad is not None for grad in grads]
        grads = [*compress(grads, present)]
        if not (present == self.present and self._have_known_layouts(*grads)):
            if not self._takes_layouts_of(grads, present):
                return False
            self.present, self._have_known_layouts = present, are_laid_out_as(grads)
        try:
            addresses = list(map(data_ptr, grads))
        except RuntimeError:  # one has no address
            return False
        if reduce(or_, addresses, 0) % ALIGNMENT or 0 in addresses:
            return False
        if not all(present):
            found = iter(addresses)
            addresses = [next(found) if has_grad else 0 for has_grad in present]
        self.grads = addresses
        return True

    def _takes_layouts_of(self, grads: list[Tensor], present: list[bool]) -> bool:
        is_flat = self.key.is_contiguous
        return all(len({present[i] for i in peers}) == 1 for peers in self._peers) and all(
            grad.dtype is self.key.grad_dtype
            and _shape_and_device(grad) == _shape_and_device(value)
            and (grad.is_contiguous() if is_flat else grad.stride() == value.stride())
            for grad, value in zip(grads, compress(self._values, present), strict=True)
        )

    def row(self, member: Target, shape: tuple[int, int]) -> list[int]:
        """A row of the tensor table; the columns for gradient and scalars are 0."""
        state, param = member.tensors, member.param
        moments = (state["exp_avg"], state["exp_avg_sq"], member.max_exp_avg_sq)
        written: tuple[Tensor | None, ...] = (None,) * 5
        others: tuple[Tensor | None, ...] = (None,) * 3
        if self.key.quantizer is not None:
            square, rowwise = param._block_scale_inv, param._rowwise_scale_inv
            scale = rowwise if square is None else square
            columnwise = (param._columnwise_data, param._columnwise_scale_inv)
            written = (param._rowwise_data, scale, *columnwise, param._amax)
            gemm_scales = (param._rowwise_gemm_scale_inv, param._columnwise_gemm_scale_inv)
            others = (*gemm_scales, param._amax_history)
        elif self.key.write_dtype is not None:
            written = (param, None, None, None, None)
        first = map(_address, (member.stepped, *moments, *written))
        rest = map(_address, (*member.state_scales, *others))
        return [0, 0, *first, *shape, *rest, member.dither_start]


def make_launches(
    device: torch.device, groups: list[LaunchGroup], n_members: int, n_hyper: int = 0
) -> DeviceTables:
    """Build one table for all groups on a device, and each group's launch on its part of it.

    ``n_members``, ``n_hyper``: as in ``DeviceTables``.
    """
    from fp4adam.kernels import plain_step, step
    from fp4adam.kernels.launch.launch import compile_together

    rows = [[*map(group.row, group.members, group.shapes)] for group in groups]
    tables = DeviceTables(device, [*chain.from_iterable(rows)], n_members, n_hyper)
    parts = tables.table.split([len(part) for part in rows])
    for group, part in zip(groups, parts, strict=True):
        module = plain_step if group.key.quantizer is None else step
        group.tensors = group.shapes, group.slots, part, tables.scalars
        group.launch = module.StepLaunch(group.key, group.tensors)
    if device.type == "cuda":
        signals = tables.signals(None, None, None)
        with torch.cuda.device(device):
            compile_together(partial(group.launch.compile, *signals) for group in groups)
    return tables


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
