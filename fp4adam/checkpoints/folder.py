"""Folders of safetensors files and JSON, as Hugging Face lays them out: how they are written."""

import contextlib
import ctypes
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4adam.checkpoints.new_files import NewFiles

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The dtypes of safetensors files by the names that headers have for them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 2**30  # bytes; Linux writes no more than 2 GiB at once


class Entry(NamedTuple):
    """Tensors that belong together, with their metadata.

    Attributes:
        tensors: By name, contiguous and on the CPU.
        metadata: For the header of the file.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def check_vacant(folder: Path, names: Iterable[str]) -> None:
    """Raise FileExistsError if a checkpoint cannot be added to ``folder``.

    That is if it is a file, holds safetensors files, with which the new ones might mix, or a file
    with one of ``names``: nothing is overwritten.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"folder must be one, got the file {str(folder)!r}; choose another")
    present = sorted(folder.glob("*.safetensors*"))
    if present:
        raise FileExistsError(
            f"folder must not hold a checkpoint yet, got {str(present[0])!r}; choose another one, "
            "or remove its safetensors files"
        )
    for name in names:
        if (folder / name).exists():
            raise FileExistsError(
                f"folder must not hold a {name} yet, got {str(folder / name)!r}, which would be "
                "overwritten; choose another folder, or remove it"
            )


def write(
    folder: Path,
    entries: Iterable[Entry],
    documents: dict[str, dict[str, Any]],
    max_shard_bytes: int,
) -> None:
    """Write a checkpoint: all files of it appear at the end, or none does.

    Args:
        folder: The folder to write to, made if it does not exist.
        entries: All tensors, one shard of them in memory at a time.
        documents: JSON files by name, ``config.json`` among them: the last file to appear.
        max_shard_bytes: The most bytes of tensors in one file, unless a single entry is larger.

    Raises:
        FileExistsError: If something in the folder would be mixed with the checkpoint, or
            overwritten.
        ValueError: If two entries have a tensor of one name.
        OSError: If the files cannot be written.
    """
    folder = folder.resolve()
    with NewFiles(folder) as new:
        check_vacant(folder, documents)
        first = new.open()  # where nothing can be written, it fails before tensors are gathered
        shards: list[io.FileIO] = []
        file_of: dict[str, int] = {}
        total = 0
        for shard in _shards(entries, max_shard_bytes):
            tensors = [item for entry in shard for item in entry.tensors.items()]
            metadata = {name: text for entry in shard for name, text in entry.metadata.items()}
            for name, _ in tensors:
                if name in file_of:
                    raise ValueError(
                        f"tensors of a checkpoint must have different names, got two {name!r}; "
                        "rename the buffer or parameter that is called like a scale of a weight"
                    )
                file_of[name] = len(shards)
            shards.append(new.open() if shards else first)
            _write_tensors(shards[-1], dict(tensors), {"format": "pt", **metadata}, folder)
            total += sum(entry.nbytes for entry in shard)
        names = [ONE_FILE]
        if len(shards) != 1:
            n = len(shards)
            names = [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
            weight_map = {name: names[i] for name, i in file_of.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            documents = {INDEX: index, **documents}
        files = dict(zip(names, shards, strict=True))
        for name in sorted(documents, key=lambda name: name == CONFIG):
            files[name] = new.open()
            text = json.dumps(documents[name], indent=2, sort_keys=True) + "\n"
            _write_bytes(files[name], text.encode(), folder)
        new.publish(files)


def _shards(entries: Iterable[Entry], max_shard_bytes: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.nbytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.nbytes
    yield shard


def _write_tensors(
    file: io.FileIO, tensors: dict[str, Tensor], metadata: dict[str, str], folder: Path
) -> None:
    """Write a safetensors file: the length of the header, the header, the bytes of the tensors.

    The package writes to paths alone, by way of a file that a killed process leaves behind.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    # The largest elements first: all are aligned then.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    memory = [_memory_of(name, tensors[name]) for name in names]
    end = 0
    for name, content in zip(names, memory, strict=True):
        start, end = end, end + len(content)
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": [*tensors[name].shape],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _write_bytes(file, len(text).to_bytes(8, "little") + text, folder)
    for content in memory:
        _write_bytes(file, content, folder)


def _memory_of(name: str, value: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a tensor, as its memory has them."""
    if value.dtype not in _NAMES:
        raise TypeError(
            f"{name!r} must have a dtype that safetensors files hold, got {value.dtype}; convert it"
        )
    is_plain = value.layout == torch.strided and value.device.type == "cpu"
    # Wrappers have no storage, whatever their size.
    if not (
        is_plain and value.is_contiguous() and value.untyped_storage().nbytes() >= value.nbytes
    ):
        raise TypeError(
            f"{name!r} must be a plain tensor to be written, got a {type(value).__name__}; convert "
            "it, or leave it out of the state dict"
        )
    return (ctypes.c_char * value.nbytes).from_address(value.data_ptr())


def _write_bytes(file: io.FileIO, content: Any, folder: Path) -> None:
    rest = memoryview(content).cast("B")
    with whole_or_nothing(folder):
        while rest:
            rest = rest[file.write(rest[:_CHUNK]) :]


@contextlib.contextmanager
def whole_or_nothing(folder: Path) -> Iterator[None]:
    """Say of errors in writing what is left in ``folder``, a block of :class:`NewFiles`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"the checkpoint must be written whole, got {reason!r}; nothing of it is left, "
        message += "make room or choose another folder"
        raise OSError(error.errno, message, str(folder)) from error
