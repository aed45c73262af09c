"""vLLM serves a checkpoint on the CPU; products of quantized weights are replaced.

    python serve_with_vllm.py FOLDER < prompts.json > answers.json

Its CPU build has no kernels for NVFP4, MXFP8 and FP8 blocks. So these weights are decoded after
vLLM has loaded and fused them, and multiplied in BF16, experts as well. Its reading of config.json,
its names, shapes and dtypes, the fusing of weights and scales, routers, attention, sampling and the
rest are vLLM's.
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
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4,
    compressed_tensors_moe_w8a8_mxfp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4,
    compressed_tensors_w8a8_mxfp8,
)

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
DECODED: list[tuple[int, ...]] = []


def nvfp4(packed: Tensor, scale: Tensor, tensor_scale: Tensor) -> Tensor:
    """Values of matrices, or of stacks of them; a scale for each matrix."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    return E2M1[codes] * (scale.float() * tensor_scale).repeat_interleave(16, -1)


def mxfp8(codes: Tensor, scale: Tensor) -> Tensor:
    """As of :func:`nvfp4`."""
    return codes.float() * (2.0 ** (scale.float() - 127)).repeat_interleave(32, -1)


def blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """As of :func:`nvfp4`."""
    scale = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.float() * scale[..., : codes.shape[-2], : codes.shape[-1]]


def encoded(layer: Any, prefix: str, scale: str) -> tuple[Tensor, Tensor]:
    """The codes and the scales of a layer, or of its experts with ``prefix``, "w13_" or "w2_"."""
    names = f"{prefix}weight", f"{prefix}weight_packed"
    codes = next(getattr(layer, name) for name in names if hasattr(layer, name))
    return codes.data, getattr(layer, prefix + scale).data


def decode_nvfp4(layer: Any, prefix: str = "") -> Tensor:
    if not prefix:
        return nvfp4(*encoded(layer, "", "weight_scale"), layer.weight_global_scale.data)
    if hasattr(layer, f"{prefix}weight_scale_2"):  # ModelOpt's
        tensor_scale = of_experts(getattr(layer, f"{prefix}weight_scale_2"))
    else:
        tensor_scale = 1 / of_experts(getattr(layer, f"{prefix}weight_global_scale"))
    return nvfp4(*encoded(layer, prefix, "weight_scale"), tensor_scale)


def decode_mxfp8(layer: Any, prefix: str = "") -> Tensor:
    return mxfp8(*encoded(layer, prefix, "weight_scale"))


def decode_blocks(layer: Any, prefix: str = "") -> Tensor:
    return blocks(*encoded(layer, prefix, "weight_scale_inv"))


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


def replace_experts(module: Any, name: str, select: str, decode: Any) -> None:
    """Have ``module.name``, a method of vLLM for stacked experts, decode weights, multiply in BF16.

    ``select`` is the function there that chooses a kernel.
    """

    class Experts:
        is_monolithic = staticmethod(lambda: False)

    def process(self: Any, layer: Any) -> None:
        layer.decoded = [decode(layer, which).bfloat16() for which in ("w13_", "w2_")]
        DECODED.extend(tuple(stack.shape) for stack in layer.decoded)

    def apply(
        self: Any, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **others: Any
    ) -> Tensor:
        first, second = layer.decoded
        out = torch.zeros_like(x)
        for number in topk_ids.unique().tolist():
            rows, place = (topk_ids == number).nonzero(as_tuple=True)
            gate, up = torch.nn.functional.linear(x[rows], first[number]).chunk(2, -1)
            y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, second[number])
            out.index_add_(0, rows, (y * topk_weights[rows, place, None]).to(x.dtype))
        return out

    setattr(module, select, lambda **given: (None, Experts))
    method = getattr(module, name)
    method.process_weights_after_loading = process
    method.apply = apply
    method.get_fused_moe_quant_config = lambda self, layer: None


def of_experts(scale: Any) -> Tensor:
    """A tensor scale for each expert, of two that are the same where gate and up are one."""
    scale = scale.data.view(len(scale), -1)
    assert torch.equal(scale[:, 0], scale[:, -1])
    return scale[:, :1, None]


def replace_products() -> None:
    """Decode weights and multiply in BF16, wherever vLLM would choose a kernel."""
    for module in (modelopt, compressed_tensors_w4a4_nvfp4):
        module.init_nvfp4_linear_kernel = kernel(decode_nvfp4)
    for module in (modelopt, compressed_tensors_w8a8_mxfp8):
        module.init_mxfp8_linear_kernel = kernel(decode_mxfp8)
    fp8.init_fp8_linear_kernel = kernel(decode_blocks)
    of_nvfp4, of_mxfp8 = compressed_tensors_moe_w4a4_nvfp4, compressed_tensors_moe_w8a8_mxfp8
    for module, name, weight_format, decode in (
        (of_nvfp4, "CompressedTensorsW4A4Nvfp4MoEMethod", "nvfp4", decode_nvfp4),
        (modelopt, "ModelOptNvFp4FusedMoE", "nvfp4", decode_nvfp4),
        (of_mxfp8, "CompressedTensorsW8A8Mxfp8MoEMethod", "mxfp8", decode_mxfp8),
        (modelopt, "ModelOptMxFp8FusedMoE", "mxfp8", decode_mxfp8),
        (fp8, "Fp8MoEMethod", "fp8", decode_blocks),
    ):
        replace_experts(module, name, f"select_{weight_format}_moe_backend", decode)


def serve(folder: str, **options: Any) -> LLM:
    return LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        **options,
    )


def answer(engine: LLM, prompts: list[list[int]], written: int, **options: Any) -> list[Any]:
    """How the engine goes on after each prompt, greedily."""
    sampling = SamplingParams(
        temperature=0, max_tokens=written, ignore_eos=True, detokenize=False, **options
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [one.outputs[0] for one in engine.generate(given, sampling, use_tqdm=False)]


def main() -> None:
    """Answer the prompts."""
    replace_products()
    request = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    size = request["vocabulary"]
    engine = serve(sys.argv[1], max_logprobs=size)
    answers = answer(engine, request["prompts"], request["written"], logprobs=size)
    result = {
        "version": __version__,
        "decoded": DECODED,
        "texts": [list(one.token_ids) for one in answers],
        "logs": [[one.logprobs[0][i].logprob for i in range(size)] for one in answers],
    }
    json.dump(result, out)


if __name__ == "__main__":
    main()
