"""vLLM takes the weights of a model in training by its own interface; the transport is replaced.

    python refit_vllm.py dense|changes FORMAT FOLDER > answers.json

A model is exported to FOLDER and served. It is trained further, and the served one gets the new
weights: all of them through vLLM's dense NCCL engine, or changed bytes through this package's. What
NCCL would carry goes through a queue in this process, since there is no GPU, and products are
replaced as in serve_with_vllm.py. Factories, both sides' engines, the worker's lifecycle, loaders
and layerwise reloading are vLLM's.
"""

import json
import queue
import sys
from pathlib import Path
from typing import Any

# Sets vLLM's environment, before it is imported.
from serve_with_vllm import answer, replace_products, serve

import models  # isort: skip
import torch
from torch import Tensor
from vllm import LLM, __version__
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory, nccl_engine
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

import fp4adam

sys.path.insert(0, str(Path(fp4adam.__file__).resolve().parents[1] / "examples"))
import refit_with_vllm as vllm_transfer

LAYOUTS = {"nvfp4": "compressed-tensors", "mxfp8": "compressed-tensors", "float8block": "fp8"}
WIRE: "queue.Queue[Tensor]" = queue.Queue()


class Group:
    """One end of a broadcast within this process."""

    def __init__(self, sends: bool) -> None:
        self.sends = sends

    def broadcast(self, tensor: Tensor, src: int, stream: Any) -> None:
        if self.sends:
            WIRE.put(tensor.detach().clone())
        else:
            tensor.copy_(WIRE.get(timeout=60))

    def destroy(self) -> None:
        pass


class Client:
    """The trainer's view of an engine in the same process."""

    def __init__(self, engine: LLM) -> None:
        self.engine = engine

    def init_weight_transfer_engine(self, info: dict) -> None:
        self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, info: dict) -> None:
        self.engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()


def replace_transport() -> None:
    """Queues in place of NCCL, and no streams."""
    nccl_engine.worker_init_process_group = lambda *args: Group(sends=False)
    nccl_engine.open_trainer_endpoint = lambda *args: Group(sends=True)
    vllm_transfer.worker_init_process_group = lambda *args: Group(sends=False)
    vllm_transfer.trainer_init = lambda *args: Group(sends=True)
    torch.cuda.current_stream = lambda *args: None
    torch.accelerator.synchronize = lambda *args: None


def written(engine: LLM) -> list[list[int]]:
    prompts = models.text()[:, : models.PROMPT].tolist()
    return [list(one.token_ids) for one in answer(engine, prompts, models.WRITTEN)]


def has_weights_of(engine: LLM, model: Any) -> bool:
    """Whether all quantized layers of the engine have the values that were trained."""

    def decoded_in(module: torch.nn.Module) -> dict[str, Tensor]:
        found = {name: getattr(layer, "decoded", None) for name, layer in module.named_modules()}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    (decoded,) = engine.apply_model(decoded_in)
    expected: dict[str, list[Tensor]] = {}
    for name, value in models.quantized_weights(model).items():
        whole = fp4adam.hf_scale_groups(name) or name.removesuffix(".weight")
        expected.setdefault(whole, []).append(value)
    return decoded.keys() == expected.keys() and all(
        torch.equal(decoded[name], torch.cat(parts)) for name, parts in expected.items()
    )


def main() -> None:
    """Train, serve, train on, refit."""
    way, weight_format, folder = sys.argv[1:]
    out, sys.stdout = sys.stdout, sys.stderr
    replace_products()
    replace_transport()
    vllm_transfer.register()
    groups = dict(scale_groups=fp4adam.hf_scale_groups)
    model = fp4adam.quantize_model(models.build("Llama", weight_format), weight_format, **groups)
    optimizer = fp4adam.FP4Adam(model.named_parameters(), lr=3e-3, **groups)
    layout, lines = LAYOUTS[weight_format], models.text()
    models.train(model, optimizer, lines, 40)
    model.eval()
    fp4adam.export_checkpoint(model, folder, layout)
    result: dict[str, Any] = {"version": __version__, "trained": models.greedy(model)}
    place = dict(rank=0, master_address="127.0.0.1", master_port=1, world_size=2)
    backend, source = vllm_transfer.BACKEND, None
    info = vllm_transfer.TrainerInfo(**place)
    if way == "dense":
        backend, source = "nccl", vllm_transfer.TrainedSource(model, layout)
        info = nccl_engine.NCCLTrainerInitInfo(**place, packed=False)
    engine = serve(folder, weight_transfer_config=WeightTransferConfig(backend=backend))
    result["served"] = written(engine)
    result["is_equal"] = has_weights_of(engine, model)
    sender = fp4adam.WeightSender(model, layout)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(engine), source=source)
    result["steps"] = []
    for step in range(3):
        models.train(model, optimizer, lines.flip(1), 20 if step == 0 else 1)
        if step == 2:
            sender.export_changes()  # an update that is lost on its way
        update = trainer.send_weights(*([sender] if source is None else []))
        row = {"is_equal": has_weights_of(engine, model), "text": written(engine)}
        if update is not None:
            row |= {"is_full": update.is_full, "nbytes": update.nbytes}
        result["steps"].append(row)
    json.dump(result, out)


if __name__ == "__main__":
    main()
