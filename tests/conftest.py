import importlib.util
import os

import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter, chosen before triton is first imported.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        import interpreter

        interpreter.install()

# The tensors are small, and parallel tests share the cores.
torch.set_num_threads(1)


@pytest.fixture
def device() -> str:
    return DEVICE
