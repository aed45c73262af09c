"""vLLM serves a checkpoint on the CPU; products of quantized weights are replaced.

    python serve_with_vllm.py FOLDER < prompts.json > answers.json

Its CPU build has no kernels for NVFP4, MXFP8 and FP8 blocks. So these weights are decoded after
vLLM has loaded and fused them, and multiplied in BF16. Its reading of config.json, its names,
shapes and dtypes, the fusing of weights and scales, attention, sampling and the rest are vLLM's.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import torch
from torch import Tensor
from vllm import LLM, SamplingParams, __version__
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4,
    compressed_tensors_w8a8_mxfp8,
)

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
DECODED: list[tuple[int, ...]] = []


def nvfp4(layer: Any) -> Tensor:
    packed, scale = layer.weight.data, layer.weight_scale.data.float()
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).int()
    return E2M1[codes] * (scale * layer.weight_global_scale.data).repeat_interleave(16, 1)


def mxfp8(layer: Any) -> Tensor:
    scale = 2.0 ** (layer.weight_scale.data.float() - 127)
    return layer.weight.data.float() * scale.repeat_interleave(32, 1)


def blocks(layer: Any) -> Tensor:
    rows, cols = layer.weight.shape
    scale = layer.weight_scale_inv.data.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return layer.weight.data.float() * scale[:rows, :cols]


def kernel(decode: Any) -> Any:
    """What stands in for a kernel of vLLM that takes codes and scales."""

    def process(layer: Any) -> None:
        layer.decoded = decode(layer).bfloat16()
        DECODED.append(tuple(layer.decoded.shape))

    def apply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, layer.decoded, bias)

    stand_in = SimpleNamespace(
        process_weights_after_loading=process,
        apply_weights=apply,
        input_quant_key=lambda: None,
        config=None,
    )
    return lambda *args, **kwargs: stand_in


def main() -> None:
    """Answer the prompts."""
    for module in (modelopt, compressed_tensors_w4a4_nvfp4):
        module.init_nvfp4_linear_kernel = kernel(nvfp4)
    for module in (modelopt, compressed_tensors_w8a8_mxfp8):
        module.init_mxfp8_linear_kernel = kernel(mxfp8)
    fp8.init_fp8_linear_kernel = kernel(blocks)
    request = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    engine = LLM(
        sys.argv[1],
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_logprobs=request["vocabulary"],
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=request["written"],
        logprobs=request["vocabulary"],
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    answers = [answer.outputs[0] for answer in engine.generate(prompts, sampling, use_tqdm=False)]
    logs = [answer.logprobs[0] for answer in answers]
    result = {
        "version": __version__,
        "decoded": DECODED,
        "texts": [list(answer.token_ids) for answer in answers],
        "logs": [[row[i].logprob for i in range(request["vocabulary"])] for row in logs],
    }
    json.dump(result, out)


if __name__ == "__main__":
    main()
