"""The Trainer of Hugging Face with NVFP4 weights: a small Llama learns to write Python.

    pip install '.[integrations]'
    python examples/with_transformers.py

Checkpoints are what the Trainer makes of any model: plain weights, which ``from_pretrained`` takes,
and beside them the optimizer's masters and moments, from which training resumes with every bit.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from stdlib_text import load_text
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fp4adam import FP4Adam, quantize_model, use_plain_state_dict

CONTEXT = 64


def build_model(format: str | None = "nvfp4") -> LlamaForCausalLM:
    """A Llama of bytes with quantized linear layers; ``format`` None: plain ones."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    model = LlamaForCausalLM(config)
    if format is None:
        return model
    return quantize_model(model, format)


class TrainerOptimizer:
    """What a Trainer makes its optimizer of, so that all of its arguments are obeyed.

    To a class in ``optimizer_cls_and_kwargs`` it hands weight_decay alone of its arguments; what is
    no class of optimizers it calls with the model.
    """

    def __call__(
        self, model: nn.Module, args: TrainingArguments, release: bool = False, **options: Any
    ) -> FP4Adam:
        """The optimizer of a model, which can be saved from now on.

        Args:
            model: The quantized model.
            args: Of the Trainer.
            release: Free each gradient in the backward pass.
            options: Others of FP4Adam, such as ``states``.
        """
        if release and (args.max_grad_norm or args.gradient_accumulation_steps > 1):
            raise ValueError(
                "a Trainer must not clip or accumulate gradients that are released, got "
                f"max_grad_norm={args.max_grad_norm} and gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}; set them to 0 and 1"
            )
        use_plain_state_dict(model)  # the Trainer saves with safetensors
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in trained if param.ndim > 1]},
            {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = FP4Adam(
            groups,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
            **options,
        )
        if release:
            optimizer.enable_gradient_release()
        return optimizer


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """A batch as the model takes it; it shifts the labels itself."""
    tokens = torch.stack(rows).long()
    return {"input_ids": tokens, "labels": tokens}


def build_trainer(out: str | Path, release: bool = False, **arguments: Any) -> Trainer:
    """A Trainer of a new model, that reads the text in its order.

    Args:
        out: Folder of the checkpoints.
        release: As TrainerOptimizer takes it.
        arguments: Of TrainingArguments.
    """
    text, _ = load_text()
    args = TrainingArguments(str(out), **{"learning_rate": 3e-3, "adam_beta2": 0.95} | arguments)
    return Trainer(
        build_model(),
        args,
        train_dataset=text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT),
        data_collator=collate,
        optimizer_cls_and_kwargs=(TrainerOptimizer, {"args": args, "release": release}),
    )


def main() -> None:
    """Trains, in the middle of which it could be stopped and resumed."""
    trainer = build_trainer(
        "runs/transformers",
        max_steps=200,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.1,
        save_steps=100,
        logging_steps=20,
        report_to=[],
    )
    trainer.train()  # or trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
