"""What is exported, against what the loaders of engines look for, as their sources have it.

Read in vLLM 0.32.0 (compressed_tensors_w4a4_nvfp4.py, compressed_tensors_w8a8_mxfp8.py,
modelopt.py, fp8.py), SGLang (compressed_tensors_w4a16_nvfp4.py at 1402ae4,
compressed_tensors_w8a8_mxfp8.py at 719a836, modelopt_quant.py at faeb968) and TensorRT-LLM
(linear.py at 00bbf71, model_config.py at 008e0af). Where an engine is missing from a case, its
source was not read for it.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp4adam import export_checkpoint, quantize_model

ROWS, COLS = 256, 384
BYTE, E4M3, FP32 = torch.uint8, torch.float8_e4m3fn, torch.float32
PACKED, CODES = ((ROWS, COLS // 2), BYTE), ((ROWS, COLS), E4M3)
SCALES_OF_16, SCALES_OF_32 = ((ROWS, COLS // 16), E4M3), ((ROWS, COLS // 32), BYTE)
WEIGHTS = "config_groups.group_0.weights."
# For each export: the tensors that loaders of the named engines copy from, of a linear layer
# [ROWS, COLS], and what they read of ``quantization_config``, nested keys joined by dots. Of the
# scale of a tensor they take one element, in whatever shape. With activations that are quantized
# (W4A4) they read an input_scale or input_global_scale as well, which no export has.
LOADERS = {
    # vLLM, SGLang. W4A16: the groups say whether activations are quantized, and they are not.
    ("nvfp4", "compressed-tensors"): (
        {
            "weight_packed": PACKED,
            "weight_scale": SCALES_OF_16,
            "weight_global_scale": ((1,), FP32),
        },
        {
            "format": "nvfp4-pack-quantized",
            WEIGHTS + "num_bits": 4,
            WEIGHTS + "type": "float",
            WEIGHTS + "strategy": "tensor_group",
            WEIGHTS + "group_size": 16,
            WEIGHTS + "symmetric": True,
            WEIGHTS + "dynamic": False,
            "config_groups.group_0.input_activations": None,
            "config_groups.group_0.targets": ["Linear"],
        },
    ),
    ("mxfp8", "compressed-tensors"): (  # vLLM, SGLang
        {"weight": CODES, "weight_scale": SCALES_OF_32},
        {
            "format": "mxfp8-quantized",
            WEIGHTS + "num_bits": 8,
            WEIGHTS + "type": "float",
            WEIGHTS + "group_size": 32,
        },
    ),
    ("nvfp4", "modelopt"): (  # vLLM, SGLang, TensorRT-LLM
        {"weight": PACKED, "weight_scale": SCALES_OF_16, "weight_scale_2": ((), FP32)},
        {"quant_algo": "W4A16_NVFP4", WEIGHTS + "dynamic": False},
    ),
    ("mxfp8", "modelopt"): (  # vLLM
        {"weight": CODES, "weight_scale": SCALES_OF_32},
        {"quant_algo": "MXFP8"},
    ),
    ("float8block", "fp8"): (  # vLLM, TensorRT-LLM
        {"weight": CODES, "weight_scale_inv": ((ROWS // 128, COLS // 128), FP32)},
        {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
}
# The keys of hf_quant_config.json that readers of ModelOpt's take for granted.
HF_QUANT_CONFIG = {"quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules"}


@pytest.mark.parametrize(("weight_format", "layout"), LOADERS)
def test_exports_have_what_loaders_look_for(weight_format, layout, tmp_path):
    tensors, fields = LOADERS[weight_format, layout]
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
    assert stored == tensors
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    for path, expected in {"quant_method": layout, **fields}.items():
        value = config
        for key in path.split("."):
            value = value[key]
        assert value == expected, path
    assert config["modules_to_not_convert" if layout == "fp8" else "ignore"] == ["lm_head"]
    if layout == "modelopt":
        content = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
        assert content.keys() >= HF_QUANT_CONFIG
        assert content["exclude_modules"] == ["lm_head"]
        assert content["quant_algo"] == config["quant_algo"]
