"""Fine-tunes all weights on chats with TRL's SFTTrainer: 4-bit weights, 8-bit states.

    pip install '.[integrations]' trl
    python examples/sft.py                                    # a small Llama, on a CPU
    python examples/sft.py --model Qwen/Qwen3-0.6B            # of the hub, on a GPU

The chats ask for the documentation of functions of Python's standard library. What differs from a
program with AdamW is three lines: quantize_model, use_plain_state_dict (TRL saves with safetensors)
and optimizer_cls_and_kwargs, which takes the learning rate along: the Trainer hands weight_decay of
its arguments on, and nothing else. Accumulation, clipping and schedules are the Trainer's own.
Do not call enable_gradient_release() under a Trainer, which accumulates and clips gradients.
"""

import argparse
import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from fp4adam import FP4Adam, quantize_model, summary, use_plain_state_dict

MODULES = ("argparse", "collections", "inspect", "json", "os", "random", "shutil", "statistics")
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Chat = dict[str, list[dict[str, str]]]


def chats() -> list[Chat]:
    """Questions for functions of the standard library; answers are their first paragraphs."""

    def each() -> Iterator[Chat]:
        for module in map(importlib.import_module, MODULES):
            for name, function in inspect.getmembers(module, callable):
                text = inspect.getdoc(function)
                if text and not name.startswith("_"):
                    question = f"What does {module.__name__}.{name} do?"
                    yield {
                        "messages": [
                            {"role": "user", "content": question},
                            {"role": "assistant", "content": text.split("\n\n")[0]},
                        ]
                    }

    return list(each())


def small_model(rows: list[Chat]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Llama of 0.5 M parameters and a tokenizer of these chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for r in rows for m in r["messages"]), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16), fast


def build_trainer(
    model: str | None = None,
    format: str = "nvfp4",
    states: str = "8bit",
    **arguments: Any,
) -> SFTTrainer:
    """A trainer of a model of the hub, or of a small one.

    Args:
        model: What from_pretrained takes.
        format: Of the linear weights.
        states: As FP4Adam takes it.
        arguments: Of SFTConfig.
    """
    rows = chats()
    if model is None:
        network, tokenizer = small_model(rows)
    else:
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(model)
    network = use_plain_state_dict(quantize_model(network, format))
    args = SFTConfig(report_to=[], use_cpu=not torch.cuda.is_available(), **arguments)
    return SFTTrainer(
        network,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=(FP4Adam, {"lr": args.learning_rate, "states": states}),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print what weights and states take."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="a folder or a name on the hub; default: a small Llama")
    add("--format", choices=("nvfp4", "mxfp8", "float8block"), default="nvfp4")
    add("--states", choices=("8bit", "16bit", "32bit"), default="8bit")
    add("--lr", type=float, help="default: 2e-5, for the small model 3e-3")
    add("--steps", type=int, default=60)
    add("--out", default="runs/sft")
    args = parser.parse_args(argv)
    trainer = build_trainer(
        args.model,
        args.format,
        args.states,
        learning_rate=args.lr or (2e-5 if args.model else 3e-3),
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 10),
        weight_decay=0.1,
        logging_steps=10,
    )
    trainer.train()
    print(summary(trainer.model, trainer.optimizer))


if __name__ == "__main__":
    main()
