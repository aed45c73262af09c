"""A cache of dequantized weights, kept from one microbatch to the next."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fp4adam.tensors.fingerprint import Mark
from fp4adam.tensors.quantized_tensor import QuantizedTensor

# Per shared storage: the mark of the weight when something was derived from it, and the result.
# Keys are storages, as torch does not swap tensors with weak references, which Module.to() needs.
# A global rather than thread-local variable, because backward passes run in threads of autograd.
_kept: WeakKeyDictionary | None = None
# Open blocks, in all threads; the last one to end frees what is kept.
_open_blocks = 0
_lock = threading.Lock()


@contextlib.contextmanager
def kept_weights() -> Iterator[None]:
    """Decode each weight once for all microbatches of a step, rather than for every matmul.

    A context manager for the microbatches of a step, or for a whole training loop. What is kept is
    made again once the weight has changed, by the optimizer or any other write, and freed when the
    block ends. A dequantized weight takes 2 bytes per element in BF16 (4 in FP32) on top of the
    codes: as much as a BF16 model. Of weights with quantized operands only what they do not store
    is kept: transposed MXFP8 codes (1 byte per element), codes of NVFP4 stacks in the order of
    experts (1/2), scales of Float8Block (1/4096). Compiled graphs keep nothing, and neither do
    weights that FSDP2 gathers anew. Nested blocks, and blocks of several threads, share what they
    keep.

    A step that is replayed from a CUDA graph raises no version: end the block before it. A forward
    pass that is captured inside a block goes on reading what was kept then.
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
    """The cached result of ``make()`` for this weight and name, made anew if the weight changed."""
    # Once: another thread may end the last block.
    kept = None if torch.compiler.is_compiling() else _kept
    if kept is None:
        return make()
    shared = weight._shared  # else to make it would count as a write
    if any(map(torch.Tensor.is_inference, shared.tensors.present)):
        return make()  # they have no versions
    mark = Mark.of(weight)
    then, made = kept.get(shared, (None, {}))
    if not mark.is_same(then):
        made = {}
        kept[shared] = mark, made
    # Of a window on the rows of a weight as well, which shares its storage.
    key = name, weight._start, weight._start_col, tuple(weight.shape)
    if key not in made:
        made[key] = make()
    return made[key]
