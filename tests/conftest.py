import os

import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter, chosen before triton is first imported.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang

    def patch_language_once(function):
        """Without what is done again for each function that a kernel calls: half of the time."""
        modules = [m for m in function.__globals__.values() if m is tl or m is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules):
            return patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_language_once

# The tensors are small, and parallel tests share the cores.
torch.set_num_threads(1)


@pytest.fixture
def device() -> str:
    return DEVICE
