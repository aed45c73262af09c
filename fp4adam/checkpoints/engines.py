"""Trained bytes for engines that are running: their own interfaces for new weights."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

VLLM_BACKEND = "fp4adam_changes"
_VLLM_MODULE = "fp4adam.checkpoints.vllm_transfer"


def register_with_vllm() -> None:
    """Make ``WeightTransferConfig(backend="fp4adam_changes")`` known to vLLM, in this process.

    vLLM calls it in each of its processes where this package is installed, as one of its plugins.

    Raises:
        ImportError: If vLLM is not installed, or is older than its weight transfer.
    """
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    for factory, name in (
        (WeightTransferEngineFactory, "ChangesEngine"),
        (WeightTransferTrainerFactory, "ChangesTrainerEngine"),
    ):
        if VLLM_BACKEND not in factory._registry:
            factory.register_engine(VLLM_BACKEND, _VLLM_MODULE, name)


def update_sglang(
    engine: Any, tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = 512 * 2**20
) -> None:
    """Give an SGLang engine new weights; its cache is flushed once, after the last of them.

    SGLang 0.5.23 takes them between ``begin_weight_update`` and ``end_weight_update``, which undo
    and redo what its kernels make of the weights; engines without these methods are older.

    Args:
        engine: ``sglang.Engine``, or anything with its ``update_weights_from_tensor``.
        tensors: Names and tensors, all of them: those of :func:`fp4adam.export_tensors`, or
            ``receiver.tensors.items()`` of a ``WeightReceiver``.
        bucket_bytes: The most that a call passes on, unless a single tensor is larger.

    Raises:
        RuntimeError: If the engine reports a failure; it may have taken some of the weights.
        ValueError: If ``bucket_bytes`` is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    has_sessions = hasattr(engine, "begin_weight_update")
    if has_sessions:
        _check("begin an update", engine.begin_weight_update())
    try:
        for bucket, is_last in _buckets(tensors, bucket_bytes):
            answer = engine.update_weights_from_tensor(bucket, flush_cache=is_last)
            _check(f"take {len(bucket)} tensors from {bucket[0][0]!r} on", answer)
    finally:
        if has_sessions:
            _check("end the update", engine.end_weight_update())


def _buckets(
    tensors: Iterable[tuple[str, Tensor]], most: int
) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Tensors in buckets of at most so many bytes, and whether it is the last one."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > most:
            yield bucket, False
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket, True


def _check(what: str, answer: Any) -> None:
    succeeded, message = (answer if isinstance(answer, tuple) else (answer, ""))[:2]
    if succeeded is False:
        raise RuntimeError(f"the engine must {what}, got: {message}")
