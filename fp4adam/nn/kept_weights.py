"""What matmuls make of quantized weights, kept from one microbatch to the next."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fp4adam.tensors.quantized_tensor import QuantizedTensor

# By shared storage, because torch does not swap tensors that have weak references, as Module.to()
# does: what the weight was when something was made of it, and what that is. A module's own variable
# rather than a thread's, because backward passes run in threads of autograd.
_kept: WeakKeyDictionary | None = None
# Blocks that are open, in all threads; the last one to end frees what is kept.
_open_blocks = 0
_lock = threading.Lock()


@contextlib.contextmanager
def kept_weights() -> Iterator[None]:
    """Decode each weight once for all microbatches of a step, rather than for every matmul.

    Around the microbatches of a step, or a whole training loop: what is kept is made again once
    the weight has changed, by the optimizer or any other write to it, and freed at the end. A
    dequantized weight takes 2 bytes per element in BF16 (4 in FP32), for as long as it is kept, on
    top of the codes: as much as a BF16 model. Of weights that are multiplied natively, only what
    they do not store is kept: transposed MXFP8 codes (1 byte per element), those of NVFP4 stacks in
    the order of experts (1/2), scales of Float8Block (1/4096). Compiled graphs keep nothing, and
    neither do weights that FSDP2 gathers anew. Blocks inside one another, or of several threads,
    share what they keep.

    A step that is replayed from a CUDA graph tells nobody that it has changed weights: end the
    block before it. A forward pass that is captured inside goes on to read what was kept then.
    """
    global _kept, _open_blocks
    with _lock:
        _open_blocks += 1
        if _kept is None:
            _kept = WeakKeyDictionary()
    try:
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            if not _open_blocks:
                _kept = None


def keep(weight: QuantizedTensor, name: object, make: Callable[[], Any]) -> Any:
    """``make()``, or what it gave for this weight and name, if it is kept and still right."""
    # Once: another thread may end the last block.
    kept = None if torch.compiler.is_compiling() else _kept
    if kept is None:
        return make()
    shared = weight.flush()._shared  # else to make it would count as a write
    inner = [*shared.tensors.existing().values()]
    if any(map(torch.Tensor.is_inference, inner)):
        return make()  # they have no versions
    state = shared.tensors, [tensor._version for tensor in inner]
    then, made = kept.get(shared, (None, {}))
    if then != state:
        made = {}
        kept[shared] = state, made
    # Of a window on the rows of a weight as well, which shares its storage.
    key = name, weight._start, tuple(weight.shape)
    if key not in made:
        made[key] = make()
    return made[key]
