"""GGUF, the files of llama.cpp: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

NVFP4 weights are written as the type of that name: in 36 bytes the 4 block scales and the codes of
64 weights, and a tensor ``.scale`` for the scale of the tensor; MXFP4 ones in 17 bytes per 32. GGUF
has no type for MXFP8 and Float8Block. All of their values are BF16 numbers where scales are powers
of two: as these they are written then, in 16 bits.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.checkpoints.folder import new_files
from fp4adam.checkpoints.layouts import Encoding, Layout, MXFP4Encoding, NVFP4Encoding
from fp4adam.checkpoints.trained import Trained, gathered
from fp4adam.formats import nvfp4
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.tensors.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "model.gguf"
BYTES = "bytes"
_GROUP = 64  # weights in a block of type NVFP4
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclasses.dataclass(frozen=True)
class NVFP4Blocks(NVFP4Encoding):
    """The type NVFP4: of 64 weights the 4 scales, then their codes, 16 by 16.

    Of each 16, the first 8 are in the low nibbles, the others in the high ones.
    """

    def encode(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        rows, cols = weight.shape
        scale = weight.rowwise_scale_inv[:rows, : cols // nvfp4.BLOCK]
        pairs = weight.rowwise_data.view(rows, cols // nvfp4.BLOCK, nvfp4.BLOCK // 2)
        codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(2)
        first, second = codes.chunk(2, -1)
        groups = (rows, cols // _GROUP, -1)
        blocks = (scale.reshape(groups), (first | second << 4).view(groups))
        return {
            self.codes: torch.cat(blocks, -1).flatten(1),
            self.tensor_scale: self._scale_of(weight).to(weight.device),
        }

    def _read(self, codes: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
        return (codes * scale) * factor


@dataclasses.dataclass(frozen=True)
class MXFP4Blocks(MXFP4Encoding):
    """The type MXFP4: of 32 weights the scale, then the codes, the first 16 in the low nibbles."""

    def encode(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        stored = super().encode(weight)
        pairs = stored[self.codes].unflatten(1, (-1, 16))
        first, second = torch.stack((pairs & 15, pairs >> 4), -1).flatten(2).chunk(2, -1)
        blocks = (stored[self.scale][:, :, None], first | second << 4)
        return {self.codes: torch.cat(blocks, -1).flatten(1)}


class _InBF16(Encoding):
    """The values themselves."""

    bits, block = 16, (1, 1)

    def encode(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        value = weight.dequantize(torch.bfloat16)
        if not torch.equal(value.float(), weight.dequantize(torch.float32)):
            raise ValueError(
                "values must be BF16 numbers for GGUF, which has no type for "
                f"{type(weight).__name__}, got others, which would be rounded; train with scales "
                "that are powers of two, or use another layout"
            )
        return {self.codes: value}


class MXFP8InBF16(_InBF16):
    """MXFP8, decoded."""

    quantizer_class = MXFP8Quantizer


class Float8BlockInBF16(_InBF16):
    """Float8Block, decoded."""

    quantizer_class = Float8BlockQuantizer


class GGUF(Layout):
    """Files of llama.cpp, to be written alone."""

    name = "gguf"


LAYOUT = GGUF(
    (
        NVFP4Blocks("NVFP4", tensor_scale="scale"),
        MXFP4Blocks("MXFP4", codes="weight"),
        MXFP8InBF16("BF16"),
        Float8BlockInBF16("BF16"),
    )
)


class _Architecture(NamedTuple):
    """An architecture that llama.cpp computes as transformers does, if its configuration fits.

    Attributes:
        name: llama.cpp's name for it.
        pairs_neighbors: Whether rotary positions turn neighboring rows of q and k, where
            transformers turns the halves of a head.
        required: Values of the configuration that llama.cpp takes for granted.
        keys: What its configuration must have, besides that of all.
    """

    name: str
    pairs_neighbors: bool = False
    required: dict[str, Any] = {}
    keys: tuple[str, ...] = ()


# What a configuration must have, and the kinds of rotary positions.
_KEYS = (
    "num_hidden_layers",
    "max_position_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
    "vocab_size",
)
_ROPE_TYPES = ("default", "linear", "llama3")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")

# By the class of transformers.
_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture("llama", pairs_neighbors=True),
    "Qwen3ForCausalLM": _Architecture("qwen3"),
    "Qwen3MoeForCausalLM": _Architecture(
        "qwen3moe",
        required={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        keys=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    ),
}


class _Tensor(NamedTuple):
    """A tensor of the file.

    Attributes:
        name: Its name.
        type: Its type, by GGUF's name for it.
        shape: Its shape, in values.
        members: The weights that it consists of: several only where experts are modules of their
            own, which are stacked.
        piece: Which piece of how many it is, of the last dimension but one.
        heads: The attention heads whose rows are paired, or 0.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    members: tuple[str, ...]
    piece: tuple[int, int] = (0, 1)
    heads: int = 0

    @property
    def n_scales(self) -> int:
        """The number of scales of tensors: of experts each has its own."""
        return self.shape[0] if len(self.shape) == 3 else 1


class GGUFExport:
    """A model as a GGUF file. The constructor checks all that is known without gathering weights.

    Args:
        trained: The model.
        config: The content of its ``config.json``.
        tokenizer: As for :func:`fp4adam.export_checkpoint`.

    Raises:
        ImportError: Without the package gguf.
        ValueError: If llama.cpp does not know the architecture, its configuration or a tensor.
    """

    def __init__(
        self, trained: Trained, config: dict[str, Any], tokenizer: str | Path | None
    ) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ImportError(
                "layout 'gguf' needs the package gguf, which is not installed; pip install gguf"
            ) from error
        self._gguf = gguf
        self._trained = trained
        # transformers 5 writes the one, its configuration takes both.
        self._config = {"num_experts": config.get("num_local_experts"), **config}
        self._architecture = self._known_architecture()
        self._tensors = [*self._plan()]
        self._frequencies = self._frequency_factors()
        self._vocabulary = self._vocabulary_of(tokenizer)

    def arrays(self) -> Iterator[Any]:
        """The tensors as numpy arrays of bytes, in the order of the file; gathers as it goes."""
        if self._frequencies is not None:
            yield _bytes_of(self._frequencies)
        members, stored = (), []
        for tensor in self._tensors:
            if tensor.members != members:  # the pieces of a weight follow each other
                members, stored = tensor.members, [self._stored(n) for n in tensor.members]
            values = [each[0] for each in stored]
            value = torch.stack(values) if len(values) > 1 else values[0]
            n, count = tensor.piece
            if count > 1:
                value = value.chunk(count, -2)[n]
            if tensor.heads:
                value = _pair_neighbors(value, tensor.heads)
            yield _bytes_of(value.float() if tensor.type == "F32" else value)
            if tensor.type == "NVFP4":
                # One for each expert, also where a stack of them has one.
                yield _bytes_of(torch.cat([each[1] for each in stored]).expand(tensor.n_scales))

    def _stored(self, name: str) -> list[Tensor]:
        """A weight as it is stored, and its scale if it has one."""
        whole = gathered(self._trained.weights[name])
        if not isinstance(whole, QuantizedTensor):
            return [whole]
        codes, *scales = self._trained.encode(name, whole).values()
        return [codes.view(*whole.shape[:-1], -1), *scales]

    def write(self, folder: Path, arrays: Iterator[Any]) -> None:
        """Write ``model.gguf``, which appears once it is complete.

        Args:
            folder: The folder to write to, made if it does not exist.
            arrays: See :meth:`arrays`.

        Raises:
            FileExistsError: If the folder holds a checkpoint or such a file.
            OSError: If the file cannot be written.
        """
        with new_files(folder, [FILE]) as place:
            writer = self._gguf.GGUFWriter(place / FILE, self._architecture.name)
            try:
                self._describe(writer)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                for array in arrays:
                    writer.write_tensor_data(array)
            finally:
                writer.close()

    def _known_architecture(self) -> _Architecture:
        """The architecture; raises ValueError if llama.cpp would compute something else."""
        name = (self._config.get("architectures") or [None])[0]
        if name not in _ARCHITECTURES:
            raise ValueError(
                f"architectures must be one of {', '.join(_ARCHITECTURES)} for layout 'gguf', got "
                f"{name!r}; {self._advice()}, or pass config={{'architectures': [...], ...}}"
            )
        architecture = _ARCHITECTURES[name]
        required = {
            "hidden_act": "silu",
            "use_sliding_window": False,
            "partial_rotary_factor": 1.0,
            **architecture.required,
        }
        keys = (*_KEYS, *architecture.keys)
        missing = [key for key in keys if self._config.get(key) is None]
        wrong = {
            k: self._config[k] for k in required if self._config.get(k) not in (None, required[k])
        }
        # Without them nobody knows: transformers has other defaults, and writes them always.
        absent = [key for key in architecture.required if key not in self._config]
        if missing or absent:
            raise ValueError(
                f"config must have {(missing + absent)[0]!r} for layout 'gguf', got none; pass the "
                "configuration that the model was made from: config=..."
            )
        if wrong:
            key, value = wrong.popitem()
            raise ValueError(
                f"{key} must be {required[key]!r} for layout 'gguf', got {value!r}: llama.cpp "
                f"computes {architecture.name} with the former; use another layout"
            )
        if self._rope_type() not in _ROPE_TYPES:
            raise ValueError(
                f"rope_type must be one of {', '.join(_ROPE_TYPES)} for layout 'gguf', got "
                f"{self._rope_type()!r}; {self._advice()}"
            )
        return architecture

    def _advice(self) -> str:
        """What llama.cpp's own converter can do instead, by format."""
        return {
            # In other architectures its graphs leave the tensor scale out, and answer NaN.
            "NVFP4": "llama.cpp computes with NVFP4 in llama, qwen3, qwen3moe, deepseek2, granite "
            "and mistral3 alone: for these use its converter on layout 'compressed-tensors', else "
            "on the folder that export_masters writes",
            "MXFP4": "use its converter on layout 'mxfp4' for gpt-oss, else on the folder that "
            "export_masters writes",
        }.get(
            self._trained.encoding.format,
            "use its converter on the folder that export_masters writes, or for Float8Block on "
            "layout 'fp8'",
        )

    @property
    def _rope(self) -> dict[str, Any]:
        return self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}

    def _rope_type(self) -> str:
        return self._rope.get("rope_type", self._rope.get("type", "default"))

    @property
    def _rope_theta(self) -> float:
        return self._rope.get("rope_theta", self._config.get("rope_theta", 10000.0))

    @property
    def _heads(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values."""
        heads = self._config["num_attention_heads"]
        return heads, self._config.get("num_key_value_heads") or heads

    @property
    def _head_dim(self) -> int:
        config = self._config
        return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def _plan(self) -> Iterator[_Tensor]:
        """All tensors in the order of the file, without scales of tensors."""
        arch = {name: key for key, name in self._gguf.MODEL_ARCH_NAMES.items()}
        known = self._gguf.get_tensor_name_map(
            arch[self._architecture.name], self._config["num_hidden_layers"]
        )
        for name, members, piece in self._sources():
            stored_as = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if stored_as is None:
                raise ValueError(
                    f"tensors must be those of {self._architecture.name} for layout 'gguf', got "
                    f"{members[0]!r}, for which llama.cpp has no name; remove it"
                )
            yield self._tensor(stored_as, name, members, piece)

    def _sources(self) -> Iterator[tuple[str, tuple[str, ...], tuple[int, int]]]:
        """Names with experts stacked, the weights behind each, and which piece of them it is."""
        stacks: dict[str, dict[int, str]] = {}
        for name in self._trained.weights:
            if expert := _EXPERT.fullmatch(name):
                stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = name
        for name in self._trained.weights:
            if expert := _EXPERT.fullmatch(name):
                whole = f"{expert[1]}.{expert[3]}"
                if int(expert[2]) == 0:
                    if sorted(stacks[whole]) != [*range(len(stacks[whole]))]:
                        raise ValueError(
                            f"experts must be numbered from 0 on, got {sorted(stacks[whole])} for "
                            f"{whole!r}; load all of them"
                        )
                    yield whole, tuple(stacks[whole][i] for i in sorted(stacks[whole])), (0, 1)
            elif name.endswith(".experts.gate_up_proj"):
                layer = name.removesuffix("gate_up_proj")
                yield f"{layer}gate_proj.weight", (name,), (0, 2)
                yield f"{layer}up_proj.weight", (name,), (1, 2)
            elif name.endswith(".experts.down_proj"):
                yield f"{name}.weight", (name,), (0, 1)
            else:
                yield name, (name,), (0, 1)

    def _tensor(
        self, stored_as: str, name: str, members: tuple[str, ...], piece: tuple[int, int]
    ) -> _Tensor:
        weight = self._trained.weights[members[0]]
        shape = [*weight.shape]
        kinds = {member in self._trained.quantized for member in members}
        shapes = {self._trained.weights[member].shape for member in members}
        if len(kinds) > 1 or len(shapes) > 1:
            raise ValueError(
                f"experts must be alike to be stacked, got others among {members[0]!r} and its "
                "siblings; quantize all of them or none"
            )
        if kinds == {True}:
            kind = self._trained.encoding.format
        elif weight.ndim < 2 or "ffn_gate_inp" in stored_as:  # what llama.cpp adds or sorts by
            kind = "F32"
        else:
            kind = _PLAIN.get(weight.dtype)
        if kind is None or not weight.is_floating_point() or weight.dtype == torch.float64:
            raise ValueError(
                f"{members[0]!r} must be in one of {', '.join(map(str, _PLAIN))} for layout "
                f"'gguf', got {weight.dtype}; convert it"
            )
        if kind == "NVFP4":
            self._check_nvfp4(stored_as, members[0])
        shape[-2:-1] = [n // piece[1] for n in shape[-2:-1]]
        if len(members) > 1:
            shape.insert(0, len(members))
        layer = name.rpartition(".")[0].rpartition(".")[2]
        n_heads = dict(zip(("q_proj", "k_proj"), self._heads, strict=True)).get(layer, 0)
        rows = n_heads * self._head_dim
        if layer == "embed_tokens":
            rows = self._config["vocab_size"]
        if rows and weight.shape[0] != rows:
            raise ValueError(
                f"config must be that of the model, got one with {rows} rows of {members[0]!r}, "
                f"which has {weight.shape[0]}; correct vocab_size, head_dim or the numbers of heads"
            )
        paired = n_heads if self._architecture.pairs_neighbors else 0
        return _Tensor(stored_as, kind, tuple(shape), members, piece, paired)

    def _check_nvfp4(self, stored_as: str, name: str) -> None:
        cols = self._trained.weights[name].shape[-1]
        if cols % _GROUP:
            raise ValueError(
                f"NVFP4 weights must have multiples of {_GROUP} columns for layout 'gguf', got "
                f"{cols} for {name!r}; leave it in high precision (filter=...), or use another "
                "layout"
            )
        bias = name.removesuffix("weight") + "bias"
        if ".ffn_" in stored_as and bias in self._trained.weights:
            raise ValueError(
                f"NVFP4 layers of an MLP must have no bias for layout 'gguf', got {bias!r}, to "
                "which llama.cpp would apply the scale of the weight; use another layout"
            )

    def _frequency_factors(self) -> Tensor | None:
        """By what the frequencies of rotary positions are divided, as Llama 3.1 does."""
        if self._rope_type() != "llama3":
            return None
        rope = self._rope
        exponent = torch.arange(0, self._head_dim, 2, dtype=torch.float64) / self._head_dim
        turns = (
            rope["original_max_position_embeddings"] * self._rope_theta**-exponent / (2 * math.pi)
        )
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)  # of the frequency as it was
        return (1 / (share + (1 - share) / rope["factor"])).float()

    def _describe(self, writer: "GGUFWriter") -> None:
        """Add the metadata and the table of tensors."""
        config, rope = self._config, self._rope
        heads, kv_heads = self._heads
        types = self._gguf.GGMLQuantizationType
        files = self._gguf.LlamaFileType
        writer.add_name(str(config.get("_name_or_path") or self._architecture.name))
        kinds = {"NVFP4": files.MOSTLY_NVFP4, "MXFP4": files.MOSTLY_MXFP4_MOE}
        writer.add_file_type(kinds.get(self._trained.encoding.format, files.MOSTLY_BF16))
        writer.add_quantization_version(self._gguf.GGML_QUANT_VERSION)
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(self._head_dim)
        writer.add_value_length(self._head_dim)
        writer.add_rope_dimension_count(self._head_dim)
        writer.add_rope_freq_base(self._rope_theta)
        if self._rope_type() == "linear":
            writer.add_rope_scaling_type(self._gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])
        if self._architecture.keys:
            writer.add_expert_count(config["num_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        for key, value in self._vocabulary.items():
            writer.add_key_value(key, *value)
        nvfp4_names = sorted(t.name for t in self._tensors if t.type == "NVFP4")
        # Training has not quantized activations: engines that can, to 4 bits, should not either.
        writer.add_array("general.tensor_extra.name", nvfp4_names)
        writer.add_array("general.tensor_extra.prec_a4", [False] * len(nvfp4_names))

        def add(name: str, shape: tuple[int, ...], kind: str) -> None:
            block, nbytes = self._gguf.GGML_QUANT_SIZES[types[kind]]
            size = math.prod(shape) // block * nbytes
            # The dtype is asked for bytes alone: the shape is that of values here.
            writer.add_tensor_info(name, shape, None, size, types[kind])

        if self._frequencies is not None:
            add("rope_freqs.weight", tuple(self._frequencies.shape), "F32")
        for tensor in self._tensors:
            add(tensor.name, tensor.shape, tensor.type)
            if tensor.type == "NVFP4":
                name = tensor.name.removesuffix("weight") + "scale"
                add(name, (tensor.n_scales,), "F32")

    def _vocabulary_of(self, tokenizer: str | Path | None) -> dict[str, tuple[Any, ...]]:
        """Metadata about tokens: values with their types, by key."""
        keys, types = self._gguf.Keys.Tokenizer, self._gguf.GGUFValueType
        size = self._config["vocab_size"]
        if tokenizer is None:
            return {keys.MODEL: ("none", types.STRING)}
        if tokenizer == BYTES:
            entries = self._byte_vocabulary()
        else:
            fields = self._gguf.GGUFReader(tokenizer).fields.values()
            entries = {
                field.name: (field.contents(), *field.types)
                for field in fields
                if field.name.startswith("tokenizer.")
            }
        tokens, *kind = entries.get(keys.LIST, ([],))
        if not 0 < len(tokens) <= size:
            raise ValueError(
                f"tokenizer must have at most {size} tokens, as the model has embeddings, and at "
                f"least one, got {len(tokens)} in {str(tokenizer)!r}; pass that of this model"
            )
        rest = range(len(tokens), size)
        entries[keys.LIST] = ([*tokens, *(f"[PAD{i}]" for i in rest)], *kind)
        for key, unused in (
            (keys.TOKEN_TYPE, self._gguf.TokenType.UNUSED.value),
            (keys.SCORES, -10000.0),
        ):
            if key in entries:
                values, *kind = entries[key]
                entries[key] = ([*values, *(unused for _ in rest)], *kind)
        return entries

    def _byte_vocabulary(self) -> dict[str, tuple[Any, ...]]:
        """A token for every byte, which is its number."""
        keys, types = self._gguf.Keys.Tokenizer, self._gguf.GGUFValueType
        # BPE of bytes writes those that are no printable character as the next free characters.
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        spare = itertools.count(256)
        tokens = [chr(byte if byte in printable else next(spare)) for byte in range(256)]
        normal = [self._gguf.TokenType.NORMAL.value] * len(tokens)
        special = {}
        for key, name in ((keys.BOS_ID, "bos_token_id"), (keys.EOS_ID, "eos_token_id")):
            value = self._config.get(name)
            value = value[0] if isinstance(value, list) else value
            # Without one, llama.cpp would take a control character that text has.
            special[key] = (0 if value is None else value, types.UINT32)
        return {
            keys.MODEL: ("gpt2", types.STRING),
            keys.PRE: ("default", types.STRING),
            keys.LIST: (tokens, types.ARRAY, types.STRING),
            keys.TOKEN_TYPE: (normal, types.ARRAY, types.INT32),
            # llama.cpp wants merges; these tokens do not exist.
            keys.MERGES: (["[PAD] [PAD]"], types.ARRAY, types.STRING),
            keys.ADD_BOS: (False, types.BOOL),
            keys.ADD_PREFIX: (False, types.BOOL),
            **special,
        }


def _pair_neighbors(value: Tensor, heads: int) -> Tensor:
    """Rows i and i + n / 2 of each head of n rows next to each other."""
    return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)


def _bytes_of(value: Tensor) -> Any:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
