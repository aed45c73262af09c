"""Quantized copies of weights that are trained in high precision, written again after each step.

A copy is current while neither its weight nor itself has been written since. Versions tell, as they
do for master weights, so it does not matter who writes the weights.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp4adam.distributed import whole_cast
from fp4adam.distributed.cast import LocalCast
from fp4adam.distributed.dtensor import is_dtensor
from fp4adam.distributed.whole_cast import WholeCast
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback, borrow
from fp4adam.interop.transformer_engine import Workspace, check_has_workspaces, workspaces_of
from fp4adam.optim.workspace_watch import WorkspaceWatch
from fp4adam.tensors import backend, rows
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import HIGH_PRECISION_DTYPES


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

    Each value is read once, or twice for Float8 with current scaling, and codes of both directions
    are written in the same pass. NVFP4 takes three passes, and so do tensors whose addresses, rows
    or columns are not multiples of 16. Their block amaxes stay allocated between calls: 1/64 byte
    per element of NVFP4.

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
        self._watch: WorkspaceWatch | None = None
        self._known: tuple = ()  # what the writer is for
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
        found, watch = self._watched()
        self._write(found, watch, watch.written())

    def write(self) -> None:
        """Quantize all weights, also those whose versions are unchanged.

        Raises:
            RuntimeError, TypeError, ValueError: As for :meth:`update`.
        """
        found, watch = self._watched()
        self._write(found, watch, [*range(len(found))])

    def _watched(self) -> tuple[list[Workspace], WorkspaceWatch]:
        """The copies that there are now, and a watch on them."""
        if backend.is_capturing():
            raise RuntimeError(
                "workspaces must not be written in the capture of a CUDA graph, got a call in one; "
                "call write() after each replay: graphs read workspaces at their addresses"
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = self._find()
            if self._watch is None or not self._watch.is_on(found):
                found = self._fitting(found)
                self._watch = WorkspaceWatch(found, self._watch)
            return found, self._watch

    def _fitting(self, found: list[Workspace]) -> list[Workspace]:
        """The copies that fit their weights; modules make the others again."""
        fitting = []
        for workspace in found:
            if workspace.drop is not None and not _fits(workspace):
                workspace.drop()
            else:
                _check(workspace)
                fitting.append(workspace)
        return fitting

    @torch.no_grad()
    def _write(self, found: list[Workspace], watch: WorkspaceWatch, chosen: list[int]) -> None:
        if chosen:
            with torch._C.DisableTorchFunctionSubclass():
                # Launches read tables that were uploaded on these streams.
                known = watch, chosen, [torch.cuda.current_stream(each) for each in watch.gpus]
                if self._writer is None or self._known != known:
                    weights = [found[i].weights[0] for i in chosen]
                    targets = [watch.targets[i] for i in chosen]
                    self._writer = _Writer(targets, [weight.dtype for weight in weights])
                    self._known = known
                self._writer([found[i].weights for i in chosen])
        watch.record()


class _Writer:
    """Writes values to the same copies again and again, on the same streams.

    Kernels that read weights where they are get launched again; all else is done anew.

    Args:
        targets: The copies.
        dtypes: The dtypes of their values.
    """

    def __init__(
        self, targets: list[QuantizedTensor | BorrowedTensor], dtypes: list[torch.dtype]
    ) -> None:
        borrowed = [one for one in targets if isinstance(one, BorrowedTensor)]
        self._scales_of_others = ScaleWriteback(borrowed)
        tensors = [one.tensor if isinstance(one, BorrowedTensor) else one for one in targets]
        self._written = [*tensors, *(one.source for one in borrowed)]
        together: dict[torch.device, list[int]] = defaultdict(list)
        self._alone = []
        for i, tensor in enumerate(tensors):
            if _can_be_cast(tensor):
                together[tensor.device].append(i)
            else:
                self._alone.append((i, tensor))
        self._casts = [
            (members, _Cast([tensors[i] for i in members], [dtypes[i] for i in members]))
            for members in together.values()
        ]

    def __call__(self, weights: list[tuple[Tensor, ...]]) -> None:
        """Write the values of the weights, which are in the same memory at every call."""
        casts = [
            (cast, None if cast.repeats else [_joined(weights[i]) for i in members])
            for members, cast in self._casts
        ]
        alone = [(tensor, _joined(weights[i])) for i, tensor in self._alone]
        self._scales_of_others.read()
        for (cast, values), (members, _) in zip(casts, self._casts, strict=True):
            if values is None:
                cast.repeat()
            else:
                cast(values, [weights[i] for i in members])
        for tensor, value in alone:
            tensor.quantize_(value)
        self._scales_of_others()
        torch.autograd.graph.increment_version(self._written)


class _Cast:
    """A cast of tensors on one device.

    Those that :func:`whole_cast.fits` accepts are written in as few passes as possible, all others
    as shards that are whole.

    Attributes:
        repeats: Whether :meth:`repeat` can replace a call.
    """

    def __init__(self, tensors: list[QuantizedTensor], dtypes: list[torch.dtype]) -> None:
        self._tensors, self._dtypes = tensors, dtypes
        self._in_shards: list[int] | None = None  # decided by the addresses of the first values
        self._whole: WholeCast | None = None
        self.repeats = False

    def _split(self, values: list[Tensor]) -> None:
        fit = [*map(whole_cast.fits, self._tensors, values)]
        self._in_one = [i for i, each in enumerate(fit) if each]
        self._in_shards = [i for i, each in enumerate(fit) if not each]
        if self._in_shards:
            tensors = [self._tensors[i] for i in self._in_shards]
            self._cast = LocalCast(tensors, [self._dtypes[i] for i in self._in_shards])

    def __call__(self, values: list[Tensor], weights: list[tuple[Tensor, ...]]) -> None:
        """Write these values of the weights."""
        if self._in_shards is None:
            self._split(values)
        if self._in_one:
            tensors = [self._tensors[i] for i in self._in_one]
            self._whole = WholeCast(tensors, [values[i] for i in self._in_one])
            self._whole()
        if self._in_shards:
            chosen = [values[i] for i in self._in_shards]
            self._cast.measure(chosen)
            self._cast.write(chosen)
        # A joined value that is no view is new memory each time.
        views = [
            value.untyped_storage().data_ptr() == own[0].untyped_storage().data_ptr()
            for value, own in zip(values, weights, strict=True)
        ]
        self.repeats = all(views) and not self._in_shards

    def repeat(self) -> None:
        """Write what the same memory holds now."""
        if self._whole is not None:
            self._whole()


def _can_be_cast(tensor: QuantizedTensor) -> bool:
    """Whether a tensor can be quantized in one launch with others."""
    return bool(tensor.numel() and tensor.quantizer.layout.casts_in_parts) and (
        rows.is_all(tensor) and tensor._shared.rows is None
    )


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
