"""Axolotl with quantized weights: a plug-in that it loads by its path.

    plugins:
      - with_axolotl.FP4AdamPlugin   # this file, on PYTHONPATH
    fp4adam_format: nvfp4            # or mxfp8, float8block
    fp4adam_states: 8bit             # or 16bit, 32bit

``learning_rate``, ``weight_decay``, ``adam_beta1``, ``adam_beta2``, ``adam_epsilon``, groups with
other rates, accumulation, clipping and schedules stay where they are in the configuration;
``optimizer`` is not used. For full fine-tuning: an ``adapter`` is refused.
"""

from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from fp4adam import FP4Adam, quantize_model, use_plain_state_dict


class FP4AdamArgs(BaseModel):
    """What the configuration may hold."""

    fp4adam_format: Literal["nvfp4", "mxfp8", "float8block"] = "nvfp4"
    fp4adam_states: Literal["8bit", "16bit", "32bit"] = "8bit"


class FP4AdamPlugin(BasePlugin):
    """Quantizes the model that Axolotl has loaded, and trains it with FP4Adam."""

    def get_input_args(self) -> str:
        """Where Axolotl finds the options."""
        return f"{__name__}.{FP4AdamArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Quantize the linear weights; Axolotl saves with safetensors, so plain values."""
        if cfg.adapter:
            raise ValueError(
                f"the weights of adapters are not quantized, got adapter={cfg.adapter!r}; leave "
                "adapter out for full fine-tuning, or leave this plug-in out"
            )
        use_plain_state_dict(quantize_model(model, cfg.fp4adam_format))

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Name the optimizer that the trainer makes of its parameter groups."""
        args = trainer.args
        trainer.optimizer_cls_and_kwargs = (
            FP4Adam,
            {
                "lr": args.learning_rate,
                "betas": (args.adam_beta1, args.adam_beta2),
                "eps": args.adam_epsilon,
                "states": cfg.fp4adam_states,
            },
        )
