"""Megatron-LM's own distributed optimizer, driven on CPUs with the names of this package in it.

It is found where ``megatron-core`` is installed, or in a clone on ``PYTHONPATH``. What it asks of a
GPU is answered by the CPU: devices, streams, and the names of tensor types.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp4adam import FusedAdam, fp4_utils, fp8_utils, quantized_init

SIZE = 32


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def _one_by_one(*args: Any, **options: Any) -> Iterator[SimpleNamespace]:
    """In place of coalescing, with which gloo casts tensors of several dtypes to one."""
    yield SimpleNamespace(wait=lambda: None)


def _named_as_on_a_gpu(named: Any) -> Any:
    def type_of(tensor: Tensor, *args: Any, **options: Any) -> Any:
        found = named(tensor, *args, **options)
        is_name = isinstance(found, str) and "cuda" not in found
        return found.replace("torch.", "torch.cuda.") if is_name else found

    return type_of


def prepare(adam: type[FusedAdam]) -> None:
    """Put this package into Megatron, and the CPU in the place of a GPU, for this process."""
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: "cpu"
    stream = SimpleNamespace(wait_stream=lambda *_: None, wait_event=lambda *_: None)
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *args, **options: tensor
    torch.Tensor.type = _named_as_on_a_gpu(torch.Tensor.type)
    _OnCpu().__enter__()

    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.fp4_utils as their_fp4_utils
    import megatron.core.fp8_utils as their_fp8_utils
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    buffers._coalescing_manager = _one_by_one
    for own, theirs in ((fp8_utils, their_fp8_utils), (fp4_utils, their_fp4_utils)):
        for module in (theirs, buffers, distrib_optimizer):
            _replace_names(module, own)
    for module in (optimizers, distrib_optimizer):
        module.Adam = adam
        module.HAVE_APEX_OR_TE = module.USING_TE_OPTIMIZER = True
        module.USING_PYTORCH_OPTIMIZER = module.USING_APEX_OPTIMIZER = False


def _replace_names(module: ModuleType, own: ModuleType) -> None:
    for name, value in vars(own).items():
        is_own = getattr(value, "__module__", "").startswith("fp4adam") or name.startswith("HAVE")
        if hasattr(module, name) and is_own:
            setattr(module, name, value)


class Trainer:
    """A model of two layers and FP32 gains under Megatron's DDP and distributed optimizer.

    Args:
        recipe: "nvfp4", a recipe of Megatron's FP8, or None for BF16 weights.
        options: Of Megatron's ``OptimizerConfig``.
    """

    def __init__(self, recipe: str | None, **options: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import MegatronModule

        config = TransformerConfig(
            num_layers=1, hidden_size=SIZE, num_attention_heads=1, params_dtype=torch.bfloat16
        )

        class Model(MegatronModule):
            def __init__(self) -> None:
                super().__init__(config)
                torch.manual_seed(0)
                with quantized_init(_quantizer(recipe), enabled=recipe is not None):
                    layers = [nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)]
                    self.layers = nn.Sequential(*layers).bfloat16()
                self.gains = nn.Parameter(torch.ones(8, SIZE))  # some on every rank

            def forward(self, x: Tensor) -> Tensor:
                return self.layers(x) * self.gains

        is_fp8, shares_buffer = recipe not in (None, "nvfp4"), recipe == "mxfp8"
        ddp = dict(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        ddp |= dict(fp8_param_gather=is_fp8, reuse_grad_buf_for_mxfp8_param_ag=shares_buffer)
        ddp |= dict(fp4_param_gather=True) if recipe == "nvfp4" else {}
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), Model())
        if options.get("use_precision_aware_optimizer"):
            # The configuration asks the optimizer of this module for its arguments.
            module = ModuleType("transformer_engine.pytorch.optimizers")
            module.FusedAdam, module.__version__ = FusedAdam, "2.20.0"
            for name in ("transformer_engine", "transformer_engine.pytorch", module.__name__):
                sys.modules[name] = module
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            fp8_recipe=recipe if is_fp8 else None,
            reuse_grad_buf_for_mxfp8_param_ag=shares_buffer,
            **options,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        # Reshardable checkpoints have FP32 numbers, which no optimizer takes for remainders.
        has_remainders = settings.use_precision_aware_optimizer and settings.store_param_remainders
        self._sharding = "dp_reshardable" if has_remainders else "fully_reshardable"
        self.steps = 0

    def train(self, steps: int) -> list[float]:
        """Losses of some steps, on the same data on every rank."""
        losses = []
        for _ in range(steps):
            x = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(self.steps))
            x = x.bfloat16()
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = (self.model(x) - x).float().square().mean()
            loss.backward()
            self.model.finish_grad_sync()
            self.optimizer.step()
            losses.append(loss.item())
            self.steps += 1
        return losses

    def weights(self) -> dict[str, Tensor]:
        """The values of the model, and the codes of quantized weights."""
        found = {}
        for name, param in self.model.module.named_parameters():
            found[name] = param.detach().float().clone()
            for inner, value in getattr(param, "storage_tensors", dict)().items():
                found[name + inner] = value.clone()
        return found

    def _sharded(self, is_loading: bool) -> dict[str, Any]:
        model = self.model.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": self._sharding}
        state = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": state}

    def save(self, folder: Path) -> None:
        """Save a checkpoint; any number of ranks can load it unless it has remainders."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save({**self._sharded(False), "steps": self.steps}, str(folder))

    def load(self, folder: Path) -> None:
        """Load such a checkpoint, as Megatron's ``load_checkpoint`` does."""
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._sharded(True), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.steps = loaded["steps"]


def _quantizer(recipe: str | None) -> Any:
    if recipe == "nvfp4":
        return fp4_utils.get_fp4_recipe(SimpleNamespace(fp4_recipe=recipe))
    history = dict(fp8_amax_history_len=4, fp8_amax_compute_algo="max", fp8_margin=0)
    config = SimpleNamespace(fp8_recipe=recipe, **history)
    return None if recipe is None else fp8_utils.get_fp8_recipe(config)
