"""vLLM's weight transfer with trained bytes: a source for its own engines, and one of changes.

Imports vLLM, whose interface it implements as 0.32 and 0.33 have it:
https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    trainer_init,
    worker_init_payload,
    worker_init_process_group,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fp4adam.checkpoints.engines import VLLM_BACKEND
from fp4adam.checkpoints.tensors import export_tensors
from fp4adam.checkpoints.updates import WeightReceiver, WeightSender, WeightUpdate


class _Metadata(list[ParamMeta]):
    """What vLLM 0.33 reads as a property; 0.32 calls it."""

    def __call__(self) -> list[ParamMeta]:
        return self


class TrainedSource(WeightSource):
    """The weights of a model for vLLM's trainer engines that send everything, such as ``nccl``.

    They are the tensors of :func:`fp4adam.export_tensors`, by the names of a checkpoint, which
    vLLM's loaders take. Sharded models are gathered; every rank iterates.

    Args:
        model: As for ``export_tensors``, as are ``layout`` and ``names``.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: str = "compressed-tensors",
        *,
        names: Callable[[str], str] | None = None,
    ) -> None:
        self._export = lambda: export_tensors(model, layout, names=names)
        self.metadata  # every rank gathers for it  # noqa: B018

    @cached_property
    def metadata(self) -> _Metadata:  # type: ignore[override]
        """Names, dtypes and shapes, which training does not change."""
        return _Metadata(ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self._export())

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors; vLLM 0.32 iterates over the source itself."""
        return self._export()

    __iter__ = iter_full


@dataclass
class ChangesTrainerInitInfo(TrainerInitInfo):
    """Where trainer and workers meet, as for vLLM's ``sparse_nccl``."""

    backend: ClassVar[str] = VLLM_BACKEND

    master_address: str
    master_port: int
    world_size: int


@dataclass
class ChangesUpdateInfo(WeightTransferUpdateInfo):
    """What a worker knows before an update: the size of the packed one."""

    nbytes: int


class ChangesEngine(WeightTransferEngine[NCCLWeightTransferInitInfo, ChangesUpdateInfo]):
    """The worker's side: receives a packed ``WeightUpdate``, and loads the weights.

    The worker keeps the weights as a checkpoint stores them, on the CPU, since its kernels have
    them in other orders. An update is applied to these; then vLLM's own loader loads all of them,
    and its layers process them again.
    """

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = ChangesUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_update_group: Any = None
        self._receiver = WeightReceiver(device="cpu")

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Meet the trainer."""
        self.model_update_group = worker_init_process_group(init_info, self.parallel_config)

    def start_weight_update(self) -> None:
        """Nothing: weights are loaded once an update has been found to be right."""

    def finish_weight_update(self) -> None:
        """Nothing, likewise."""

    def receive_weights(self, update_info: ChangesUpdateInfo) -> None:
        """Receive an update and load it; raises ``UpdateLost`` before anything has changed."""
        if self.model_update_group is None:
            raise RuntimeError("init_transfer_engine() must be called before weights are received")
        packed = torch.empty(update_info.nbytes, dtype=torch.uint8, device=self.device)
        _broadcast(self.model_update_group, packed)
        if not self._receiver.apply(WeightUpdate.unpack(packed.cpu())):
            return
        initialize_layerwise_reload(self.model)
        self.model.load_weights(
            (name, tensor.to(self.device)) for name, tensor in self._receiver.tensors.items()
        )
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the trainer."""
        if self.model_update_group is not None:
            self.model_update_group.destroy()
            self.model_update_group = None


class ChangesTrainerEngine(TrainerWeightTransferEngine[ChangesTrainerInitInfo]):
    """The trainer's side: ``send_weights(sender)`` sends what has changed since the last call.

    It takes no source. If a worker has missed an update, or has been started anew, everything is
    sent.
    """

    init_info_cls = ChangesTrainerInitInfo

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.source is not None:
            raise ValueError("source must be None; pass a WeightSender to send_weights instead")
        self.model_update_group: Any = None

    @classmethod
    def trainer_init(
        cls, init_info: ChangesTrainerInitInfo, *, client: Any, source: WeightSource | None = None
    ) -> "ChangesTrainerEngine":
        """Meet the workers."""
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if not engine.is_sender:
            return engine
        place = dict(master_address=init_info.master_address, master_port=init_info.master_port)
        worker = NCCLWeightTransferInitInfo(**place, world_size=init_info.world_size, rank_offset=1)
        # Workers wait for the trainer inside the call.
        with ThreadPoolExecutor(1) as thread:
            ready = thread.submit(client.init_weight_transfer_engine, worker_init_payload(worker))
            engine.model_update_group = trainer_init(init_info)
            ready.result()
        return engine

    def send_weights(self, sender: WeightSender) -> WeightUpdate:  # type: ignore[override]
        """Send an update, and load it on all workers; returns it."""
        update = sender.export_changes()
        if not self.is_sender:
            return update
        try:
            self._send(update)
        except Exception as error:
            if "UpdateLost" not in repr(error) and "must follow the last" not in str(error):
                raise
            update = sender.export_changes(full=True)
            self._send(update)
        return update

    def _send(self, update: WeightUpdate) -> None:
        packed = update.pack()
        self.client.start_weight_update()
        thread = ThreadPoolExecutor(1)
        try:
            info = asdict(ChangesUpdateInfo(packed.numel()))
            applied = thread.submit(self.client.update_weights, info)
            if applied.done():  # it has failed before it could receive
                applied.result()
            _broadcast(self.model_update_group, packed)
            applied.result()
        finally:
            # A worker that waits for a broadcast which has failed would never return.
            thread.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the workers."""
        if self.model_update_group is not None:
            self.model_update_group.destroy()
            self.model_update_group = None


def _broadcast(group: Any, packed: Tensor) -> None:
    stream = torch.cuda.current_stream() if packed.is_cuda else None
    group.broadcast(packed, src=0, stream=stream)
