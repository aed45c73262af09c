"""Trained bytes for engines that are running: their own interfaces for new weights."""

from collections.abc import Iterable
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

    Args:
        engine: ``sglang.Engine``, or anything with its ``update_weights_from_tensor``.
        tensors: Names and tensors, those of :func:`fp4adam.export_tensors`, or those that a
            ``WeightReceiver`` has just written.
        bucket_bytes: The most that a call passes on, unless a single tensor is larger.

    Raises:
        RuntimeError: If the engine reports a failure; it may have taken some of the weights.
        ValueError: If ``bucket_bytes`` is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            _update_sglang(engine, bucket, is_last=False)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        _update_sglang(engine, bucket, is_last=True)


def _update_sglang(engine: Any, bucket: list[tuple[str, Tensor]], is_last: bool) -> None:
    answer = engine.update_weights_from_tensor(bucket, flush_cache=is_last)
    succeeded, message = (answer if isinstance(answer, tuple) else (answer, ""))[:2]
    if succeeded is False:
        raise RuntimeError(
            f"the engine must take {len(bucket)} tensors from {bucket[0][0]!r} on, got: {message}"
        )
