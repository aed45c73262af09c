"""Folders that are damaged, or made to do harm: a clear error, and a model as it was."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_export import FILE, LAYOUT_OF, build, bytes_of, rewrite
from torch import Tensor

from fp4adam import QuantizedTensor, export_checkpoint, import_checkpoint
from fp4adam.checkpoints import reader
from helpers import assert_identical

INDEX = "model.safetensors.index.json"
MAPS = Path("/proc/self/maps")
OTHERS = [recipe for recipe in LAYOUT_OF if recipe != "nvfp4"]


@pytest.fixture(
    scope="module",
    params=["nvfp4", *(pytest.param(r, marks=pytest.mark.exhaustive) for r in OTHERS)],
)
def sound(request, tmp_path_factory) -> Path:
    """A sound checkpoint of each format; tests copy it."""
    folder = tmp_path_factory.mktemp("sound")
    export_checkpoint(build(request.param), folder, LAYOUT_OF[request.param])
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    export_checkpoint(build("nvfp4"), tmp_path / "folder")
    return tmp_path / "folder"


@pytest.fixture
def shards(tmp_path) -> Path:
    export_checkpoint(build("nvfp4"), tmp_path / "shards", max_shard_bytes=1)
    return tmp_path / "shards"


def refused(
    folder: Path, match: str, errors: tuple[type[Exception], ...] = (ValueError,), may: bool = False
) -> None:
    """The import raises, and changes nothing; or it ``may`` import the model as a whole."""
    model = build(None, seed=1)
    before, params = bytes_of(model), [*model.parameters()]
    try:
        import_checkpoint(model, folder)
    except errors as error:
        assert type(error) in errors and len(str(error)) < 2000
        assert re.search(match, str(error)), error
        assert_identical(bytes_of(model), before)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        if MAPS.exists():  # files are closed, though the error still refers to their reader
            with open(MAPS) as maps:
                assert str(folder) not in maps.read()
    else:
        assert may, f"must raise {match}"
        assert all(isinstance(x.weight, QuantizedTensor) for x in (model.up, model.down))


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def header_of(folder: Path) -> dict[str, Any]:
    data = (folder / FILE).read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def put_header(folder: Path, header: dict[str, Any] | bytes) -> None:
    data = (folder / FILE).read_bytes()
    rest = data[8 + struct.unpack("<Q", data[:8])[0] :]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + rest)


# Files


def cut_to(left: int) -> Callable[[Path], object]:
    return lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:left])


def add_bytes(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes() + b"more")


def announce_more(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2**20, 2**22], "data_offsets": [0, 2**44]}
    put_header(folder, {"up.weight_packed": entry})


FILES = [*map(cut_to, (0, 1, 7, 8, 9, 100, -1000, -1)), add_bytes, announce_more]


@pytest.mark.parametrize("harm", FILES, ids=range(len(FILES)))
def test_damaged_files(harm, folder):
    harm(folder)
    refused(folder, "model.safetensors' must be a whole safetensors file, got .* copy it")


JSON = {
    "[1]": "must hold an object, got a list",
    '{"a": ' + "[" * 100_000: "must be JSON, got maximum recursion",
    '{"a": ' + "9" * 10_000 + "}": "must be JSON, got Exceeds the limit",
    "{": "must be JSON, got Expecting property name",
    "": "must be JSON",
}
every_file = pytest.mark.parametrize("name", ["config.json", INDEX, FILE, "hf_quant_config.json"])


@every_file
def test_json_that_is_none(name, folder):
    for text, match in JSON.items():
        if name == FILE:
            put_header(folder, text.encode("latin-1"))
            match = "must be a whole safetensors file, got Error while deserializing"
        else:
            (folder / name).write_bytes(text.encode("latin-1"))
        refused(folder, f"{name}' {match}")


@every_file
def test_what_is_no_file_of_the_folder(name, folder, tmp_path):
    path, outside = folder / name, tmp_path / "outside"
    content = path.read_bytes() if path.exists() else b"{}"
    outside.mkdir()
    (outside / "secret").write_bytes(content)
    lies_outside = "must lie in .* got a link to .*outside/secret'; copy the file"
    missing = "must (be a file|be a regular file|exist), got"
    for make, match in (
        (os.mkfifo, "must be a regular file, got a folder, a pipe or a device"),  # opens for ever
        (lambda path: path.symlink_to(outside / "secret"), lies_outside),
        (lambda path: path.symlink_to("../outside/secret"), lies_outside),
        (lambda path: path.symlink_to("nothing"), missing),
        (lambda path: path.symlink_to(name), missing),
        (Path.mkdir, "must be a regular file"),
    ):
        path.unlink(missing_ok=True)
        make(path)
        if match is not missing or name == FILE:
            refused(folder, f"{name}' (in .* )?{match}", (ValueError, FileNotFoundError))


PATHS = ["../outside/model.safetensors", "{}/outside/model.safetensors", "..", "", ".", "a\0b",
         "sub/model.safetensors", "\ud800.safetensors", "x" * 300 + ".safetensors", "config.json",
         "..\\outside\\model.safetensors", 3, None, ["model.safetensors"], {"a": 1}]  # fmt: skip


def test_paths_in_an_index(shards, tmp_path, monkeypatch):
    shutil.copytree(shards, tmp_path / "outside")
    opened, open_path = [], Path.open

    def watched(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path)
        return open_path(path, *args, **options)

    for path in PATHS:
        path = path.format(tmp_path) if isinstance(path, str) else path
        change_json(shards / INDEX, lambda index: index["weight_map"].update({"up.bias": path}))  # noqa: B023
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", watched)
            match = "must (be a|have a weight_map|lie in|exist)"
            refused(shards, match, (ValueError, FileNotFoundError))
    assert all(path.parent == shards for path in opened)


def test_the_cache_of_the_hub(folder, tmp_path):
    """Its snapshots are links to blobs, which lie beside them; the folder may be a link, too."""
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots/0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, cache / f"blobs/{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    (tmp_path / "link").symlink_to(snapshot)
    for place in (snapshot, tmp_path / "link"):
        import_checkpoint(build(None, seed=1), place)
    (snapshot / FILE).unlink()
    (snapshot / FILE).symlink_to(folder / FILE)
    refused(snapshot, "must lie in")


def test_an_index_and_files_that_disagree(shards):
    whole = (shards / INDEX).read_text()
    weight_map = json.loads(whole)["weight_map"]
    steps = weight_map["steps"]
    for value in (None, [], "a", 3):
        change_json(shards / INDEX, lambda index: index.update(weight_map=value))  # noqa: B023
        refused(shards, "must have a weight_map, an object of names")
    more = {**weight_map, "up.bias": steps, "more": steps}
    change_json(shards / INDEX, lambda index: index.update(weight_map=more))
    refused(shards, "must list what its files hold, got another list, for instance without 'more'")
    (shards / INDEX).write_text(whole)
    other = shards / weight_map["up.weight_scale"]
    save_file({**load_file(other), "up.bias": torch.ones(96).bfloat16()}, other)
    refused(shards, "'up.bias' must be in one file, got it in .* and another one")
    (shards / steps).unlink()
    refused(shards, "must exist, got no such file", (FileNotFoundError,))


# Values


def one_is(value: float) -> Callable[[Tensor], Tensor]:
    """All but one are sound."""
    return lambda x: x.double().view(-1).index_fill(0, torch.tensor(0), value).to(x).view_as(x)


BAD = {
    "nvfp4": [
        ("up.weight_scale", lambda x: x.float().neg().to(x.dtype), "weight_scale must hold scales"),
        ("up.weight_scale", one_is(torch.nan), "not negative, got nan"),
        ("up.weight_global_scale", lambda x: x * torch.nan, "weight_global_scale must hold scales"),
        ("up.weight_global_scale", lambda x: x * 0, "weight_global_scale must hold scales"),
        ("up.weight_global_scale", lambda x: -x, "weight_global_scale must hold scales"),
    ],
    "mxfp8": [("up.weight_scale", one_is(255), "weight_scale must hold scales")],
    "float8block": [
        ("up.weight_scale_inv", lambda x: -x, "weight_scale_inv must hold scales .* got -"),
        ("up.weight_scale_inv", one_is(torch.nan), "not negative, got nan"),
        ("up.weight_scale_inv", one_is(torch.inf), "not negative, got inf"),
    ],
}
OF_ALL = [
    ("up.bias", lambda x: x[1:].clone(), "'up.bias' must have shape"),
    ("up.bias", lambda x: x.to(torch.float8_e4m3fn), "'up.bias' must be torch.bfloat16, got"),
    ("up.bias", lambda x: x.long(), "'up.bias' must be torch.bfloat16, got torch.int64"),
    ("steps", lambda x: x.double(), "'steps' must be torch.int64, got torch.float64"),
]


@pytest.mark.parametrize("recipe", BAD)
def test_bad_values(recipe, tmp_path):
    export_checkpoint(build(recipe), tmp_path / "sound", LAYOUT_OF[recipe])
    for i, (name, change, match) in enumerate(BAD[recipe] + OF_ALL):
        shutil.copytree(tmp_path / "sound", tmp_path / f"{i}")
        rewrite(tmp_path / f"{i}", lambda x: x.update({name: change(x[name])}))  # noqa: B023
        refused(tmp_path / f"{i}", match, (ValueError, TypeError))


def test_amaxes_of_a_header_that_cannot_be(folder):
    """Zeros and other values than the scale says are not taken, others are none."""
    expected = build("nvfp4").up.weight.dequantize(torch.float32)
    for amax in ("0x0p+0", "-0x1p+0", "0x1p+3", "inf", "nan", "0x1p+2000", "rubbish", ""):
        header = header_of(folder)
        header["__metadata__"]["up.weight.amax"] = amax
        put_header(folder, header)
        model = import_checkpoint(build(None, seed=1), folder)
        assert torch.equal(model.up.weight.dequantize(torch.float32), expected), amax


@pytest.mark.parametrize("dtype", ["U8", "F64"])
def test_nothing_is_read_before_shapes_and_dtypes_fit(dtype, folder, monkeypatch):
    """A file may be sparse: 2 GiB that it says it holds takes no space on the disk."""
    header, size = header_of(folder), 2**31
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_")
    # The bytes of the old one go to a tensor that is left out.
    header["down.input_scale"] = header["down.weight_scale"]
    header["down.weight_scale"] = {
        "dtype": dtype,
        "shape": [size // (8 if dtype == "F64" else 1)],
        "data_offsets": [end, end + size],
    }
    put_header(folder, header)
    with (folder / FILE).open("ab") as file:
        file.truncate(file.tell() + size)
    monkeypatch.setattr(reader.CheckpointReader, "read", None)
    refused(folder, "'down.weight_scale' must have shape")


# Configurations


CONFIGS = [
    *((nothing, "quant_method must be one of .* got None") for nothing in (None, [], {})),
    ({"quant_method": ["fp8"]}, "quant_method must be one of .* got "),
    ({"quant_method": {}}, "quant_method must be one of .* got {}"),
    ({"quant_method": "x" * 10**6}, "quant_method must be .*x; load"),
]


def test_configurations_of_odd_types(folder):
    for content, match in CONFIGS:
        (folder / "config.json").write_text(json.dumps({"quantization_config": content}))
        refused(folder, match)
        # From now on there is one of ModelOpt's, which counts where the other names nothing.
        (folder / "hf_quant_config.json").write_text('{"quantization": {}}')


# Anything


@settings(
    max_examples=150,  # of each format
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_mutations(sound, data, tmp_path_factory):
    """Whatever bytes of a sound file are changed: it is refused, or imported as a whole."""
    names = sorted(path.name for path in sound.iterdir())
    name = data.draw(st.sampled_from(names))
    content = bytearray((sound / name).read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0] if name == FILE else len(content)
    places = st.integers(0, header - 1) | st.integers(0, len(content) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["set", "cut", "insert"]))
        place = data.draw(places) % max(1, len(content))
        piece = data.draw(st.binary(min_size=1, max_size=9))
        if kind == "set":
            content[place : place + len(piece)] = piece
        elif kind == "cut":
            del content[place : place + data.draw(st.integers(1, 50))]
        else:
            content[place:place] = piece
    folder = tmp_path_factory.mktemp("mutated")
    for other in names:
        shutil.copy(sound / other, folder / other)
    (folder / name).write_bytes(content)
    refused(folder, "", (ValueError, TypeError, FileNotFoundError), may=True)
    shutil.rmtree(folder)
