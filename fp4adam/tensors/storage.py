"""The storage of quantized tensors: inner tensors, and the state that all aliases share.

``detach()``, ``state_dict()``, ``.data`` and slices give other tensor objects on the same memory.
They all point to one :class:`SharedStorage`, whose ``tensors`` is an immutable :class:`Storage`.
Exchanging an inner tensor puts another ``Storage`` there, so the identity of ``tensors`` and the
``_version`` of each inner tensor tell whether anything has been exchanged or written.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4adam.tensors.blocks import flat_shape

if TYPE_CHECKING:
    from fp4adam.tensors.quantizer import Quantizer


@dataclasses.dataclass(frozen=True, eq=False)
class Storage:
    """The inner tensors of a quantized tensor; None for those that its format does not have.

    Named as in Transformer Engine. Scales of square blocks are the same for both directions and are
    kept once, one per block, in ``block_scale_inv``. The last two repeat the scales for GEMMs, and
    are derived from the ones that everything else reads. A storage never changes, so its identity
    tells which tensors these are, also through a weak reference.

    ``counter`` has no elements, and the version of all of them, which a step reads once in place of
    up to six times; None if each counts for itself, as after one has been exchanged.
    """

    rowwise_data: Tensor | None = None
    rowwise_scale_inv: Tensor | None = None
    columnwise_data: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None
    block_scale_inv: Tensor | None = None
    amax: Tensor | None = None
    rowwise_gemm_scale_inv: Tensor | None = None
    columnwise_gemm_scale_inv: Tensor | None = None
    counter: Tensor | None = None

    @classmethod
    def of(cls, inner: Mapping[str, Tensor]) -> "Storage":
        """A storage on the memory of tensors that are nobody else's; they get one version."""
        with _aliases_share_versions():
            counter = torch.empty(0, device=next(iter(inner.values())).device)
            counted = {name: counter.detach() for name in inner}
        for name, tensor in inner.items():
            counted[name].data = tensor  # which exchanges all but the version
        return cls(**counted, counter=counter)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Storage":
        """A storage of what ``function`` makes of each inner tensor."""
        return Storage.of({name: function(x) for name, x in self.existing().items()})

    def exchange(self, **inner: Tensor | None) -> "Storage":
        """A storage with other inner tensors in place of some."""
        return dataclasses.replace(self, counter=None, **inner)

    def existing(self) -> dict[str, Tensor]:
        """The inner tensors that are not None, by name."""
        inner = ((name, getattr(self, name)) for name in STORAGE_NAMES)
        return {name: tensor for name, tensor in inner if tensor is not None}

    @functools.cached_property
    def present(self) -> tuple[Tensor, ...]:
        """The inner tensors that are not None."""
        return tuple(self.existing().values())

    @functools.cached_property
    def versioned(self) -> tuple[Tensor, ...]:
        """The tensors whose versions tell those of all inner tensors."""
        return self.present if self.counter is None else (self.counter,)


STORAGE_NAMES = tuple(field.name for field in dataclasses.fields(Storage))[:-1]


def _aliases_share_versions() -> Any:
    """Makes aliases as a user's code does: with the version of what they are aliases of.

    Operators on quantized tensors run below the part of torch that sees to it.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(),
        excluded.remove(torch._C.DispatchKey.ADInplaceOrView),
    )


@dataclasses.dataclass(frozen=True)
class GlobalSpec:
    """The whole tensor that a shard is a part of.

    Attributes:
        shape: Its shape.
        quantizer: Its quantizer; that of a shard may leave out what can be derived.
        chunk: Size of each shard along the first dimension; the last ones may be smaller.
    """

    shape: tuple[int, ...]
    quantizer: "Quantizer"
    chunk: int

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the matrix that it is quantized as."""
        return flat_shape(self.shape)[0]

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Rows of one shard."""
        return self.chunk * (self.rows // self.shape[0]) if self.shape[0] else 0

    @functools.cached_property
    def is_divided(self) -> bool:
        """Whether there are several shards; assumed for one index or none: others are empty."""
        return self.chunk < self.shape[0] or self.shape[0] <= 1

    @functools.cached_property
    def is_cut(self) -> bool:
        """Whether shards end within blocks, on whose scales they have to agree."""
        return self.chunk_rows < self.rows and self.chunk_rows % self.quantizer.block_rows != 0

    @functools.cached_property
    def shares_scales(self) -> bool:
        """Whether quantizing a shard takes amaxes of the others."""
        return self.chunk_rows < self.rows and (self.is_cut or self.quantizer.scales_tensor)


@dataclasses.dataclass(eq=False)
class SharedStorage:
    """The state that all tensors on the same inner tensors share.

    Attributes:
        tensors: The inner tensors; replaced as a whole when one of them is exchanged.
        global_spec: The tensor that this is a shard of, or None.
        rows: Number of rows of values in the stored matrix; None for all of them.
        first_row: Index of the first of them; None for a shard that has not been written yet.
        pending: Rows that have been written but not quantized yet, because that takes all rows of
            the tensor; plain, [rows, cols].
        init_val: The value before quantization, if it was kept for the optimizer.
        keeps_init_val: Whether the next value that is written becomes ``init_val``.
        unsettled: Whether a shard may have been written since the ranks last agreed on its scales.
        rounded_master: What a loaded master weight rounds to, a tensor of these rows: plain values
            that read as it does are its bytes. Until the next step.
        is_gathered: Whether FSDP2 has gathered it; writes go to the shards then.
        name: The name of the parameter in its model, for errors.
        scale_group: The ``ScaleGroup`` of weights that share its amax, or None.
    """

    tensors: Storage
    global_spec: GlobalSpec | None = None
    rows: int | None = None
    first_row: int | None = 0
    pending: Tensor | None = None
    init_val: Tensor | None = None
    keeps_init_val: bool = False
    unsettled: bool = False
    rounded_master: Any = None
    is_gathered: bool = False
    name: str | None = None
    scale_group: Any = None

    # pickle, copy.deepcopy and asynchronous checkpoints copy by these two; the last of them moves
    # tensors in containers to the CPU, which __deepcopy__ could not. Checkpoints hold no values
    # before quantization: the tensor adds them to copies that need them.
    def __getstate__(self) -> dict[str, Any]:
        kept = {"init_val": None, "keeps_init_val": False, "rounded_master": None}
        kept |= {"is_gathered": False}
        inner = self.tensors.existing()
        if len({x.untyped_storage()._cdata for x in inner.values()}) < len(inner):
            # torch.save writes a block of memory once, as one dtype.
            inner = {name: x.clone() for name, x in inner.items()}
        return {**vars(self), **kept, "tensors": inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**{**state, "tensors": Storage.of(state["tensors"])})

    @property
    def rows_share_scales(self) -> bool:
        """Whether quantizing takes more rows than this storage has."""
        if self.global_spec is not None:
            return self.global_spec.shares_scales
        return self.rows is not None  # a copy of a slice

    def mark_written(self) -> None:
        """Raise the version of every inner tensor; kernels do not do so."""
        torch.autograd.graph.increment_version(self.tensors.versioned)


torch.serialization.add_safe_globals([SharedStorage, GlobalSpec])
