"""Quantized copies of weights that are trained in high precision, written again after each step.

A copy is current while neither its weight nor itself has been written since. Versions tell, as they
do for master weights, so it does not matter who writes the weights.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.distributed.scale_exchange import ShardCast
from fp4adam.interop.adapter import count_writes, is_foreign, memory
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback, borrow
from fp4adam.interop.transformer_engine import Workspace, check_has_workspaces, workspaces_of
from fp4adam.optim.master_weights import can_be_cast
from fp4adam.optim.memory_note import data_ptr, version
from fp4adam.tensors import backend
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES
from fp4adam.tensors.storage import Storage


class WeightWorkspaces:
    """Keeps quantized copies of BF16, FP16 or FP32 weights up to date, in place.

    Transformer Engine's modules keep such copies, called workspaces, of weights that are not
    quantized themselves. They make them in the first forward pass with ``is_first_microbatch``, and
    again in every one with ``is_first_microbatch=True``, module by module. This object writes all
    of them at once, right after the step, so that every microbatch can pass False::

        workspaces = fp4adam.WeightWorkspaces(model)
        optimizer.register_step_post_hook(workspaces)

    The bytes are those of ``quantizer.quantize(weight)``, for Transformer Engine's copies those of
    its own quantizers, swizzled scales included. Addresses stay, nothing waits for the device but
    adaptive scales, and the number of launches does not depend on the number of weights, except for
    ``two_dimensional=False``. It works with any optimizer of torch's interface. A step that is
    skipped for infinite gradients leaves the weights, so it needs no flag: the copies get the same
    bytes again, with delayed scaling those of the present scale.

    Weights that other code writes (``load_state_dict``, weight averaging) are noticed by the next
    step, or by :meth:`update` before the next forward pass:
    ``model.register_forward_pre_hook(workspaces)`` calls it there. Writes through ``.data`` and
    replays of CUDA graphs go unnoticed; call :meth:`write` after them. Copies of the optimizer have
    no hooks.

    Block amaxes stay allocated between calls: 1/4 byte per element of MXFP8, 1/64 of NVFP4.

    Args:
        source: A model with Transformer Engine's modules, whose workspaces are looked up at every
            call, or a mapping from weights to :class:`QuantizedTensor` s, or to other packages'
            quantized tensors with a :class:`TensorAdapter`, of the same shape and device.

    Raises:
        TypeError: If ``source`` is neither, or a quantized tensor has no adapter.
        ValueError: If a weight is sharded, quantized itself, or not of a supported dtype; if a copy
            does not fit its weight; or if a model has no module that keeps workspaces.
    """

    def __init__(self, source: nn.Module | Mapping[Tensor, Tensor]) -> None:
        if isinstance(source, nn.Module):
            check_has_workspaces(source)
        elif not isinstance(source, Mapping):
            raise TypeError(
                "source must be a module or a mapping from weights to quantized tensors, got a "
                f"{type(source).__name__}; pass the model, or {{weight: quantized_copy}}"
            )
        self._forget(source if isinstance(source, nn.Module) else dict(source))
        for workspace in self._find():
            _check(workspace)

    def _forget(self, source: nn.Module | dict[Tensor, Tensor]) -> None:
        self._source = source
        self._notes: dict[int, tuple] = {}
        self._writer: _Writer | None = None

    # A copy of a model has its hooks too, which are then for the copy.
    def __getstate__(self) -> dict[str, Any]:
        return {"source": self._source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget(**state)

    def _find(self) -> list[Workspace]:
        """The copies that there are now."""
        if isinstance(self._source, nn.Module):
            return [*workspaces_of(self._source)]
        return [Workspace((weight,), tensor) for weight, tensor in self._source.items()]

    @torch._disable_dynamo
    def __call__(self, *args: Any) -> None:
        """:meth:`update`, with the arguments of any of torch's hooks."""
        self.update()

    def update(self) -> None:
        """Quantize the weights that have been written since the last call, or whose copy has.

        Raises:
            RuntimeError: In a CUDA graph's capture.
            TypeError, ValueError: As for the constructor; nothing is written then.
        """
        found = self._fitting()
        self._write([each for each in found if self._notes.get(id(each.tensor)) != _note(each)])
        self._notes = {id(each.tensor): _note(each) for each in found}

    def write(self) -> None:
        """Quantize all weights, also those whose versions are unchanged.

        Raises:
            RuntimeError, TypeError, ValueError: As for :meth:`update`.
        """
        found = self._fitting()
        self._write(found)
        self._notes = {id(each.tensor): _note(each) for each in found}

    def _fitting(self) -> list[Workspace]:
        """The copies that fit their weights; modules make the others again."""
        if backend.is_capturing():
            raise RuntimeError(
                "workspaces must not be written in the capture of a CUDA graph, got a call in one; "
                "call write() after each replay: graphs read workspaces at their addresses"
            )
        fitting = []
        for workspace in self._find():
            if workspace.drop is not None and not _fits(workspace):
                workspace.drop()
            else:
                _check(workspace)
                fitting.append(workspace)
        return fitting

    @torch.no_grad()
    def _write(self, workspaces: list[Workspace]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            targets = [_target(workspace.tensor) for workspace in workspaces]
            values = [_joined(workspace.weights) for workspace in workspaces]
            kinds = [
                (_storage(target), value.dtype)
                for target, value in zip(targets, values, strict=True)
            ]
            if self._writer is None or self._writer.kinds != kinds:
                self._writer = _Writer(targets, kinds)
            self._writer(values)


class _Writer:
    """Writes values to the same copies again and again.

    Args:
        targets: The copies.
        kinds: Their memory, and the dtypes of their values.
    """

    def __init__(
        self,
        targets: list[QuantizedTensor | BorrowedTensor],
        kinds: list[tuple[Storage, torch.dtype]],
    ) -> None:
        self.kinds = kinds
        self._sources = [one.source for one in targets if isinstance(one, BorrowedTensor)]
        self._scales_of_others = ScaleWriteback(
            [one for one in targets if isinstance(one, BorrowedTensor)]
        )
        tensors = [one.tensor if isinstance(one, BorrowedTensor) else one for one in targets]
        together: dict[torch.device, list[int]] = defaultdict(list)
        self._alone = []
        for i, tensor in enumerate(tensors):
            if can_be_cast(tensor):
                together[tensor.device].append(i)
            else:
                self._alone.append((i, tensor))
        self._casts = [
            (members, ShardCast([tensors[i] for i in members], [kinds[i][1] for i in members]))
            for members in together.values()
        ]
        self._tensors = tensors

    def __call__(self, values: list[Tensor]) -> None:
        self._scales_of_others.read()
        for members, cast in self._casts:
            own = [values[i] for i in members]
            cast.measure(own)
            if cast.is_adaptive:
                cast.choose(own)
            cast.write(own)
        for i, tensor in self._alone:
            tensor.quantize_(values[i])
        self._scales_of_others()
        torch.autograd.graph.increment_version([*self._tensors, *self._sources])


def _storage(target: QuantizedTensor | BorrowedTensor) -> Storage:
    tensor = target.tensor if isinstance(target, BorrowedTensor) else target
    return tensor.flush()._shared.tensors


def _target(tensor: Tensor) -> QuantizedTensor | BorrowedTensor:
    return borrow(tensor) if is_foreign(tensor) else tensor


def _joined(weights: tuple[Tensor, ...]) -> Tensor:
    """The rows of all weights as one tensor; a view if they follow each other in memory."""
    first, *others = (weight.detach().contiguous() for weight in weights)
    end = first
    for other in others:
        stop = end.data_ptr() + end.nbytes
        is_next = other.data_ptr() == stop
        if not is_next or other.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat([first, *others])
        end = other
    shape = (sum(len(weight) for weight in weights), *first.shape[1:])
    return first.as_strided(shape, first.stride())


def _shape(weights: tuple[Tensor, ...]) -> tuple[int, ...]:
    return (sum(len(weight) for weight in weights), *weights[0].shape[1:])


def _fits(workspace: Workspace) -> bool:
    """Whether a copy has the shape and device of its weight, which is whole."""
    weights, tensor = workspace.weights, workspace.tensor
    return (
        not any(map(is_dtensor, weights))
        and all(weight.device == tensor.device for weight in weights)
        and flat_shape(_shape(weights)) == flat_shape(tuple(tensor.shape))
    )


def _check(workspace: Workspace) -> None:
    """Raise unless the copy can be written from its weight."""
    weights, tensor = workspace.weights, workspace.tensor
    for weight in weights:
        kind = type(weight).__name__
        if is_dtensor(weight):
            raise ValueError(
                f"weights must be whole to have a quantized copy, got a {kind} of placements "
                f"{weight.placements}; under fully_shard, quantize the weights themselves: copies "
                "of gathered weights live for one forward pass"
            )
        is_plain = isinstance(weight, Tensor) and not isinstance(weight, QuantizedTensor)
        if not (is_plain and not is_foreign(weight) and weight.dtype in HIGH_PRECISION_DTYPES):
            dtype = f" of {weight.dtype}" if isinstance(weight, Tensor) else ""
            raise ValueError(
                "weights must be plain float32, bfloat16 or float16 tensors to have a quantized "
                f"copy, got a {kind}{dtype}; FP4Adam steps quantized weights themselves"
            )
    is_sharded = is_dtensor(tensor) or (
        isinstance(tensor, QuantizedTensor) and tensor._shared.global_spec is not None
    )
    if is_sharded or not (isinstance(tensor, QuantizedTensor) or is_foreign(tensor)):
        raise ValueError(
            f"copies must be whole quantized tensors, got a {type(tensor).__name__}"
            f"{' that is a shard' if is_sharded else ''}; make one with quantizer.quantize(weight)"
        )
    if not _fits(workspace):
        raise ValueError(
            f"copies must have the shape and device of their weight, {_shape(weights)} on "
            f"{weights[0].device}, got {tuple(tensor.shape)} on {tensor.device}; quantize the "
            "weight again after moving or replacing it"
        )
    _target(tensor)  # raises if its format is not supported


def _note(workspace: Workspace) -> tuple:
    """The memory and versions of a weight and its copy; equal while neither is written."""
    tensor = workspace.tensor
    if is_foreign(tensor):
        target = borrow(tensor)
        writes = count_writes(tensor, memory(tensor, target.adapter))
    else:
        target = tensor.flush()._shared.tensors
        writes = sum(map(version, target.versioned))
    # References keep addresses from being reused, but not the memory of weights.
    weights = [(StorageWeakRef(w.untyped_storage()), data_ptr(w), version(w)) for w in workspace[0]]
    return target, writes, weights
