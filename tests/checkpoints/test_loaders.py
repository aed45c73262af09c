"""What is exported, against what the loaders of engines look for, as their sources have it.

Read in vLLM 0.32.0 (compressed_tensors_w4a4_nvfp4.py, compressed_tensors_w8a8_mxfp8.py,
modelopt.py, fp8.py), SGLang (compressed_tensors_w4a16_nvfp4.py at 1402ae4,
compressed_tensors_w8a8_mxfp8.py at 719a836, modelopt_quant.py at faeb968) and TensorRT-LLM
(linear.py at 00bbf71, model_config.py at 008e0af). Where an engine is missing from a case, its
source was not read for it.
"""

import json
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp4adam import export_checkpoint, quantize_model

ROWS, COLS = 256, 384
BYTE, E4M3, FP32 = torch.uint8, torch.float8_e4m3fn, torch.float32


class Loader(NamedTuple):
    """What an engine takes for a linear layer [ROWS, COLS].

    Attributes:
        engines: Those whose sources agree on it.
        tensors: By name the shapes and dtypes that its loader copies from. Of the scale of a tensor
            it takes one element, in whatever shape.
        config: What it reads of ``quantization_config``, nested keys joined by dots.
    """

    engines: tuple[str, ...]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    config: dict[str, Any]


LOADERS = {
    # W4A16: compressed-tensors' groups say whether activations are quantized, and they are not.
    ("nvfp4", "compressed-tensors"): Loader(
        ("vLLM", "SGLang"),
        {
            "weight_packed": ((ROWS, COLS // 2), BYTE),
            "weight_scale": ((ROWS, COLS // 16), E4M3),
            "weight_global_scale": ((1,), FP32),
        },
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups.group_0.weights.num_bits": 4,
            "config_groups.group_0.weights.type": "float",
            "config_groups.group_0.weights.strategy": "tensor_group",
            "config_groups.group_0.weights.group_size": 16,
            "config_groups.group_0.weights.symmetric": True,
            "config_groups.group_0.weights.dynamic": False,
            "config_groups.group_0.input_activations": None,
            "config_groups.group_0.targets": ["Linear"],
        },
    ),
    ("mxfp8", "compressed-tensors"): Loader(
        ("vLLM", "SGLang"),
        {"weight": ((ROWS, COLS), E4M3), "weight_scale": ((ROWS, COLS // 32), BYTE)},
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized",
            "config_groups.group_0.weights.num_bits": 8,
            "config_groups.group_0.weights.type": "float",
            "config_groups.group_0.weights.group_size": 32,
        },
    ),
    ("nvfp4", "modelopt"): Loader(
        ("vLLM", "SGLang", "TensorRT-LLM"),
        {
            "weight": ((ROWS, COLS // 2), BYTE),
            "weight_scale": ((ROWS, COLS // 16), E4M3),
            "weight_scale_2": ((), FP32),
        },
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
    ),
    ("mxfp8", "modelopt"): Loader(
        ("vLLM",),
        {"weight": ((ROWS, COLS), E4M3), "weight_scale": ((ROWS, COLS // 32), BYTE)},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    ),
    ("float8block", "fp8"): Loader(
        ("vLLM", "TensorRT-LLM"),
        {
            "weight": ((ROWS, COLS), E4M3),
            "weight_scale_inv": ((ROWS // 128, COLS // 128), FP32),
        },
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
}
# What engines read besides where activations are quantized as well (W4A4), and no export has.
OF_ACTIVATIONS = {"input_scale", "input_global_scale"}
# The keys of hf_quant_config.json that readers of ModelOpt's take for granted.
HF_QUANT_CONFIG = {"quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules"}


@pytest.mark.parametrize(("weight_format", "layout"), LOADERS)
def test_exports_have_what_loaders_look_for(weight_format, layout, tmp_path):
    loader = LOADERS[weight_format, layout]
    model = nn.Module()
    model.block = nn.Module()
    model.block.down_proj, model.lm_head = nn.Linear(COLS, ROWS, bias=False), nn.Linear(COLS, 10)
    quantize_model(model.bfloat16(), weight_format)
    export_checkpoint(model, tmp_path, layout)
    stored = {
        name.removeprefix("block.down_proj."): (tuple(value.shape), value.dtype)
        for name, value in load_file(tmp_path / "model.safetensors").items()
        if name.startswith("block.")
    }
    assert stored == loader.tensors
    assert stored.keys().isdisjoint(OF_ACTIVATIONS)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    for path, expected in loader.config.items():
        value = config
        for key in path.split("."):
            value = value[key]
        assert value == expected, path
    ignored = {"compressed-tensors": "ignore", "modelopt": "ignore"}
    assert config[ignored.get(layout, "modules_to_not_convert")] == ["lm_head"]
    if layout == "modelopt":
        content = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
        assert content.keys() >= HF_QUANT_CONFIG
        assert content["exclude_modules"] == ["lm_head"]
        assert content["quant_algo"] == config["quant_algo"]
