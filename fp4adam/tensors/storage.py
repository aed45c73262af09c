"""The storage of quantized tensors: inner tensors, and the state that all aliases share.

All aliases of a tensor, such as from ``detach()``, ``state_dict()`` and ``.data``, and slices point
to one :class:`SharedStorage`, whose ``tensors`` is an immutable :class:`Storage`. So its identity
shows exchanges of inner tensors, and their ``_version`` shows writes.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4adam.tensors.blocks import flat_shape

if TYPE_CHECKING:
    from fp4adam.tensors.quantizer import Quantizer


class Storage:
    """The inner tensors of a quantized tensor, immutable; None for those that its format lacks.

    Names are those of Transformer Engine. Scales of square blocks are kept once, one per block, in
    ``block_scale_inv``. The two ``*_gemm_scale_inv`` are swizzled copies of the scales.
    ``counter`` is an empty tensor that shares one version with all inner tensors, so that a step
    reads one version instead of up to six; None after an exchange.
    """

    rowwise_data: Tensor | None = None
    rowwise_scale_inv: Tensor | None = None
    columnwise_data: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None
    block_scale_inv: Tensor | None = None
    amax: Tensor | None = None
    rowwise_gemm_scale_inv: Tensor | None = None
    columnwise_gemm_scale_inv: Tensor | None = None
    amax_history: Tensor | None = None

    def __init__(self, counter: Tensor | None = None, **inner: Tensor | None) -> None:
        for name, tensor in inner.items():
            setattr(self, name, tensor)
        self.counter = counter
        # The direction that is decoded, rowwise if it is stored.
        self.usage = "columnwise" if self.rowwise_data is None else "rowwise"
        self.codes = self.columnwise_data if self.rowwise_data is None else self.rowwise_data
        self.present = tuple(self.existing().values())
        # What has versions that cover writes to all of them.
        self.versioned = self.present if counter is None else (counter,)

    @classmethod
    def of(cls, inner: Mapping[str, Tensor]) -> Storage:
        """A storage on the memory of ``inner``, which it takes over, with one shared version."""
        # As in user code: operators on quantized tensors run below the key that shares versions.
        excluded = torch._C._dispatch_tls_local_exclude_set()
        excluded = excluded.remove(torch._C.DispatchKey.ADInplaceOrView)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            counter = torch.empty(0, device=next(iter(inner.values())).device)
            counted = {name: counter.detach() for name in inner}
        for name, tensor in inner.items():
            counted[name].data = tensor  # replaces everything but the version
        return cls(counter, **counted)

    def map(self, function: Callable[[Tensor], Tensor]) -> Storage:
        return Storage.of({name: function(x) for name, x in self.existing().items()})

    def exchange(self, **inner: Tensor | None) -> Storage:
        return Storage(**{**self.existing(), **inner})

    def existing(self) -> dict[str, Tensor]:
        """The inner tensors that are not None, by name."""
        inner = ((name, getattr(self, name)) for name in STORAGE_NAMES)
        return {name: tensor for name, tensor in inner if tensor is not None}

    def addresses(self) -> dict[str, int]:
        """The addresses of the inner tensors, by the columns of the tables that kernels read."""
        found = {}
        for name, inner in self.existing().items():
            column = "rowwise_scale" if name == "block_scale_inv" else name.removesuffix("_inv")
            found[column] = inner.data_ptr()
        return found


STORAGE_NAMES = tuple(Storage.__annotations__)


@dataclasses.dataclass(frozen=True)
class GlobalSpec:
    """The whole tensor that a shard is a part of."""

    shape: tuple[int, ...]
    quantizer: Quantizer  # the shard's own one may leave out what can be derived
    chunk: int  # size of each shard along the first dimension; the last ones may be smaller
    # Whether it is one rank's part of a weight under tensor parallelism, which share an amax.
    is_parallel: bool = False

    @functools.cached_property
    def rows(self) -> int:
        """Rows of its matrix."""
        return flat_shape(self.shape)[0]

    @functools.cached_property
    def chunk_rows(self) -> int:
        """Rows of one shard."""
        return self.chunk * (self.rows // self.shape[0]) if self.shape[0] else 0

    @functools.cached_property
    def is_cut(self) -> bool:
        """Whether shard boundaries cut blocks, so that ranks have to agree on their scales."""
        return self.chunk_rows < self.rows and self.chunk_rows % self.quantizer.layout.block != 0

    @functools.cached_property
    def shares_scales(self) -> bool:
        """Whether quantizing a shard needs the amaxes of other shards."""
        is_divided = self.is_parallel or self.chunk_rows < self.rows
        return self.is_cut or is_divided and self.quantizer.layout.tensor_scale is not None


@dataclasses.dataclass(eq=False)
class SharedStorage:
    """The state shared by all tensor objects on the same inner tensors."""

    tensors: Storage  # replaced as a whole when an inner tensor is exchanged
    global_spec: GlobalSpec | None = None  # the tensor that this is a shard of
    # Rows of the stored matrix that hold values; None for all, except in copies of slices.
    rows: int | None = None
    first_row: int | None = 0  # the first such row; None for a shard that nobody has written yet
    pending: Tensor | None = None  # plain values that wait for rows that share scales with them
    # The value before quantization, kept until an optimizer's step uses it; a tensor on the meta
    # device if the next value that is written is to be kept.
    init_val: Tensor | None = None
    unsettled: bool = False  # whether a shard may have been written since ranks agreed on scales
    # What the last step has left once other code has written, or the rounded master that was loaded
    # before the weight, until the next step. Equal plain values bring its bytes and master back.
    left: Any = None
    # What lives as long as the optimizers that keep masters of the weight. While one does, values
    # that other code writes are kept as ``init_val``.
    stepped_by: weakref.WeakSet | None = None
    is_gathered: bool = False  # whether FSDP2 has gathered it; write to the shards then
    name: str | None = None  # that of the parameter in its model, for error messages
    scale_group: Any = None  # the ``ScaleGroup`` of the weights that share its amax
    is_copy: bool = False  # whether it is of a parameter that ``copy.deepcopy`` has made
    was_stepped: bool = False  # whether a step has dropped a value before quantization
    parallel: Any = None  # the ``ShardInfo`` of tensor parallelism; copies to files have none

    # pickle, copy.deepcopy and asynchronous checkpoints, which move tensors in containers to the
    # CPU, copy with these two methods. QuantizedTensor adds init_val to copies that need it.
    def __getstate__(self) -> dict[str, Any]:
        kept = {"pending": self.pending, "parallel": None, "is_copy": False}
        inner = self.tensors.existing()
        if len({x.untyped_storage()._cdata for x in inner.values()}) < len(inner):
            # torch.save writes each untyped storage once, with a single dtype.
            inner = {name: x.clone() for name, x in inner.items()}
        return {**vars(self.on(self.tensors, **kept)), "tensors": inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**{**state, "tensors": Storage.of(state["tensors"])})

    def on(self, tensors: Storage, **changes: Any) -> SharedStorage:
        """The same state on other inner tensors, but for what belongs to an optimizer."""
        own = dict.fromkeys(("init_val", "pending", "left", "stepped_by"))
        own |= {"is_gathered": False, **changes}
        return dataclasses.replace(self, tensors=tensors, **own)

    @property
    def rows_share_scales(self) -> bool:
        """Whether quantization needs rows that this storage does not hold."""
        spec = self.global_spec
        return spec.shares_scales if spec is not None else self.rows is not None


torch.serialization.add_safe_globals([SharedStorage, GlobalSpec])
