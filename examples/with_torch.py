"""torch alone: a compiled model, FP16 with a GradScaler, clipping, and an average of the weights.

python examples/with_torch.py                 all of these
python examples/with_torch.py --in-backward   each gradient is used and freed in backward()
"""

import argparse

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from stdlib_text import cut_batch, load_text
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fp4adam import FP4Adam, quantize_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def compute_loss(model: nn.Module, index: int) -> Tensor:
    """Loss of the batch of this number."""
    inputs, targets = (part.to(DEVICE) for part in cut_batch(load_text()[0], 8, 64, seed=index))
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


class Training:
    """Everything around a step, in FP16.

    Args:
        backend: Of torch.compile.
    """

    def __init__(self, backend: str = "inductor") -> None:
        torch.manual_seed(0)
        self.model = GPT(GPTConfig(2, 2, 128, 64)).to(DEVICE)
        # Before quantization: an average changes by less than a step between 4-bit codes.
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
        quantize_model(self.model, "nvfp4")
        self.compiled = torch.compile(self.model, backend=backend)
        self.optimizer = FP4Adam(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)

    def step(self, index: int) -> float:
        """One optimizer step; its loss."""
        with torch.autocast(DEVICE, torch.float16):
            loss = compute_loss(self.compiled, index)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)
        return loss.item()


def main() -> None:
    """Trains for 100 steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-backward", action="store_true")
    in_backward = parser.parse_args().in_backward
    training = Training()
    if in_backward:
        training.optimizer.enable_gradient_release()
    for index in range(100):
        if in_backward:
            batch_loss = compute_loss(training.compiled, index)
            batch_loss.backward()
            training.optimizer.step()
            loss = batch_loss.item()
        else:
            loss = training.step(index)
        if index % 20 == 19:
            print(f"step {index + 1}: loss {loss:.4f}")
    if not in_backward:
        with torch.no_grad():
            print(f"averaged weights: loss {compute_loss(training.average, 100):.4f}")


if __name__ == "__main__":
    main()
