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


def nvfp4_layer(layer: Any) -> Tensor:
    return nvfp4(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)


def mxfp8_layer(layer: Any) -> Tensor:
    return mxfp8(layer.weight.data, layer.weight_scale.data)


def blocks_layer(layer: Any) -> Tensor:
    return blocks(layer.weight.data, layer.weight_scale_inv.data)


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
    """Have a method of vLLM for stacked experts decode its weights and multiply in BF16.

    Args:
        module: The module of the method.
        name: The class of the method.
        select: The function there that chooses a kernel.
        decode: Takes the layer and ``"w13"`` or ``"w2"``, and returns the stack.
    """

    class Experts:
        is_monolithic = staticmethod(lambda: False)

    def process(self: Any, layer: Any) -> None:
        layer.decoded = [decode(layer, which).bfloat16() for which in ("w13", "w2")]
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


def stand_in_for_experts() -> None:
    """All methods for stacked experts."""
    replace_experts(
        compressed_tensors_moe_w4a4_nvfp4,
        "CompressedTensorsW4A4Nvfp4MoEMethod",
        "select_nvfp4_moe_backend",
        lambda layer, w: nvfp4(
            getattr(layer, f"{w}_weight_packed").data,
            getattr(layer, f"{w}_weight_scale").data,
            1 / of_experts(getattr(layer, f"{w}_weight_global_scale")),
        ),
    )
    replace_experts(
        modelopt,
        "ModelOptNvFp4FusedMoE",
        "select_nvfp4_moe_backend",
        lambda layer, w: nvfp4(
            getattr(layer, f"{w}_weight").data,
            getattr(layer, f"{w}_weight_scale").data,
            of_experts(getattr(layer, f"{w}_weight_scale_2")),
        ),
    )
    for module, name in (
        (compressed_tensors_moe_w8a8_mxfp8, "CompressedTensorsW8A8Mxfp8MoEMethod"),
        (modelopt, "ModelOptMxFp8FusedMoE"),
    ):
        replace_experts(
            module,
            name,
            "select_mxfp8_moe_backend",
            lambda layer, w: mxfp8(
                getattr(layer, f"{w}_weight").data, getattr(layer, f"{w}_weight_scale").data
            ),
        )
    replace_experts(
        fp8,
        "Fp8MoEMethod",
        "select_fp8_moe_backend",
        lambda layer, w: blocks(
            getattr(layer, f"{w}_weight").data, getattr(layer, f"{w}_weight_scale_inv").data
        ),
    )


def replace_products() -> None:
    """Decode weights and multiply in BF16, wherever vLLM would choose a kernel."""
    for module in (modelopt, compressed_tensors_w4a4_nvfp4):
        module.init_nvfp4_linear_kernel = kernel(nvfp4_layer)
    for module in (modelopt, compressed_tensors_w8a8_mxfp8):
        module.init_mxfp8_linear_kernel = kernel(mxfp8_layer)
    fp8.init_fp8_linear_kernel = kernel(blocks_layer)
    stand_in_for_experts()


def main() -> None:
    """Answer the prompts."""
    replace_products()
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
