"""vLLM's weight transfer (0.32, 0.33) with trained bytes; a module to copy and to change.

https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/

Everything, by vLLM's own engine over NCCL:

    info = NCCLTrainerInitInfo(rank=0, master_address=..., master_port=..., world_size=1 + workers)
    trainer = WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=refit_with_vllm.TrainedSource(model)
    )
    trainer.send_weights()  # after each step

Only what has changed, by a backend of its own, WeightTransferConfig(backend="fp4adam_changes") in
vLLM, whose processes have to call register(): declare it in your package, under
[project.entry-points."vllm.general_plugins"].

    refit_with_vllm.register()
    info = refit_with_vllm.TrainerInfo(rank=0, master_address=..., master_port=..., world_size=...)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client)
    trainer.send_weights(fp4adam.WeightSender(model))
"""

from collections.abc import Iterator
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
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
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

import fp4adam

BACKEND = "fp4adam_changes"


def register() -> None:
    """Make the backend known to vLLM, in this process."""
    for factory, name in (
        (WeightTransferEngineFactory, "WorkerEngine"),
        (WeightTransferTrainerFactory, "TrainerEngine"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, __name__, name)


class _Metadata(list[ParamMeta]):
    """What vLLM 0.33 reads as a property; 0.32 calls it."""

    def __call__(self) -> list[ParamMeta]:
        return self


class TrainedSource(WeightSource):
    """The tensors of ``fp4adam.export_tensors``; of a sharded model every rank makes a source."""

    def __init__(self, model: nn.Module, layout: str = "compressed-tensors") -> None:
        self._export = lambda: fp4adam.export_tensors(model, layout)
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
class TrainerInfo(TrainerInitInfo):
    """Where trainer and workers meet, as for vLLM's ``sparse_nccl``."""

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int
    world_size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What a worker knows before an update: the size of the packed one."""

    nbytes: int


class WorkerEngine(WeightTransferEngine[NCCLWeightTransferInitInfo, UpdateInfo]):
    """Receives updates. Its kernels have weights in other orders than a checkpoint, which is kept
    on the CPU; vLLM's own loader loads all of it after an update."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiver = fp4adam.WeightReceiver(device="cpu")

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Meet the trainer."""
        self.model_update_group = worker_init_process_group(init_info, self.parallel_config)

    def start_weight_update(self) -> None:
        """Nothing: weights are loaded once an update has been found to be right."""

    def finish_weight_update(self) -> None:
        """Nothing, likewise."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive an update and load it; raises ``UpdateLost`` before anything has changed."""
        packed = torch.empty(update_info.nbytes, dtype=torch.uint8, device=self.device)
        broadcast(self.model_update_group, packed)
        if not self._receiver.apply(fp4adam.WeightUpdate.unpack(packed.cpu())):
            return
        initialize_layerwise_reload(self.model)
        self.model.load_weights(
            (name, tensor.to(self.device)) for name, tensor in self._receiver.tensors.items()
        )
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the trainer."""
        self.model_update_group.destroy()


class TrainerEngine(TrainerWeightTransferEngine[TrainerInfo]):
    """Sends what has changed since the last call; everything if a worker has missed an update."""

    init_info_cls = TrainerInfo

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInfo, *, client: Any, source: WeightSource | None = None
    ) -> "TrainerEngine":
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

    def send_weights(  # type: ignore[override]
        self, sender: fp4adam.WeightSender
    ) -> fp4adam.WeightUpdate | None:
        """Send an update, and load it on all workers; returns it. Every rank calls it."""
        update = sender.export_changes()
        is_lost = [False]
        if self.is_sender:
            try:
                self._send(update)
            except Exception as error:
                if "update must follow the last one" not in str(error):
                    raise
                is_lost = [True]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(is_lost)
        if is_lost[0]:
            update = sender.export_changes(full=True)
            if self.is_sender:
                self._send(update)
        return update

    def _send(self, update: fp4adam.WeightUpdate) -> None:
        packed = update.pack()
        self.client.start_weight_update()
        thread = ThreadPoolExecutor(1)
        try:
            applied = thread.submit(self.client.update_weights, asdict(UpdateInfo(packed.numel())))
            if applied.done():  # it has failed before it could receive
                applied.result()
            broadcast(self.model_update_group, packed)
            applied.result()
        finally:
            # A worker that waits for a broadcast which has failed would never return.
            thread.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the workers."""
        if self.is_sender:
            self.model_update_group.destroy()


def broadcast(group: Any, packed: Tensor) -> None:
    """From the trainer to all workers."""
    stream = torch.cuda.current_stream() if packed.is_cuda else None
    group.broadcast(packed, src=0, stream=stream)
