"""Exports appear as a whole or not at all, and nothing that lies there is touched."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_export import build, bytes_of
from torch import nn

from fp4adam import export_checkpoint, import_checkpoint
from fp4adam.checkpoints import folder as checkpoint_folder
from helpers import assert_identical


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_holds(folder: Path, model: nn.Module) -> None:
    assert_identical(bytes_of(import_checkpoint(build(None, 1), folder)), bytes_of(model))


def test_files(tmp_path):
    tensors = {
        f"{dtype}": torch.arange(6).to(dtype).reshape(2, 3)
        for dtype in checkpoint_folder.DTYPES.values()
        if dtype != torch.float8_e8m0fnu
    }
    parts = torch.arange(12.0).chunk(3)  # of one storage
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "ä": parts[0]}
    tensors["turned"] = torch.arange(6).reshape(2, 3).t()
    entries = [tensors, {"b": parts[1]}, {"c": parts[2]}]
    size = sum(x.nbytes for entry in entries for x in entry.values())
    checkpoint_folder.write(tmp_path / "one", entries, {"config.json": {"x": 1}}, size, {"a": "ü"})
    stored = load_file(tmp_path / "one/model.safetensors")
    assert_identical(stored, {**tensors, "b": parts[1], "c": parts[2]})
    with safe_open(tmp_path / "one/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "a": "ü"}
    assert json.loads((tmp_path / "one/config.json").read_text()) == {"x": 1}
    checkpoint_folder.write(tmp_path / "two", entries, {"config.json": {}}, 32, {})
    index = json.loads((tmp_path / "two/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    for name in ("b", "c"):  # which fill it to the last byte
        assert index["weight_map"][name] == "model-00002-of-00002.safetensors"
    for name, file in index["weight_map"].items():
        assert_identical({name: load_file(tmp_path / "two" / file)[name]}, {name: stored[name]})


@pytest.mark.parametrize(
    ("entries", "error", "match"),
    [
        ([{"a": torch.eye(3).to_sparse()}], RuntimeError, "sparse|storage|pointer|memory format"),
        ([{"a": torch.ones(1)}] * 2, ValueError, "different names, got two 'a'"),
    ],
)
def test_what_files_cannot_hold(entries, error, match, tmp_path):
    with pytest.raises(error, match=match):
        checkpoint_folder.write(tmp_path / "out", entries, {"config.json": {}}, 10**9, {})
    assert not list(tmp_path.iterdir())


def test_what_lies_there_stays(tmp_path, monkeypatch):
    model = build("nvfp4")
    (tmp_path / "tokenizer.json").write_text("mine")
    export_checkpoint(model, tmp_path)
    monkeypatch.setattr(checkpoint_folder, "_shards", None)  # it is refused before tensors are read
    before = content_of(tmp_path)
    assert sorted(before) == ["config.json", "model.safetensors", "tokenizer.json"]
    with pytest.raises(FileExistsError, match="must not hold a checkpoint yet, got .*safetensors'"):
        export_checkpoint(model, tmp_path)
    with pytest.raises(FileExistsError, match="got the file"):
        export_checkpoint(model, tmp_path / "config.json")
    assert content_of(tmp_path) == before
    (tmp_path / "model.safetensors").unlink()
    for name in ("config.json", "hf_quant_config.json"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(FileExistsError, match=f"must not hold a {name} yet, .* remove it"):
            export_checkpoint(model, tmp_path, "modelopt")
        (tmp_path / name).unlink()
    assert content_of(tmp_path) == {"tokenizer.json": b"mine"}


def test_links_mount_points_and_parents(tmp_path):
    model = build("nvfp4")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "later").symlink_to(tmp_path / "disk/new")
    for name in ("link", "later", "some/more/folders", "x" * 240):
        export_checkpoint(model, tmp_path / name)
    (tmp_path / "mount").mkdir()
    with mock.patch.object(Path, "mkdir", autospec=True, side_effect=Path.mkdir) as mkdir:
        export_checkpoint(model, tmp_path / "mount")
    made = [call.args[0] for call in mkdir.call_args_list]
    # Another file system than its parent, which may be read-only.
    assert made and all(path.is_relative_to(tmp_path / "mount") for path in made)
    for name in ("mount", "disk/new", "some/more/folders", "x" * 240):
        assert sorted(content_of(tmp_path / name)) == ["config.json", "model.safetensors"]
        assert_holds(tmp_path / name, model)
    assert (tmp_path / "disk/new").stat().st_mode == (tmp_path / "disk").stat().st_mode
    assert not [*tmp_path.rglob(".*")]


@pytest.mark.parametrize("folder", ["new", "old"])
@pytest.mark.parametrize("failing", ["save_file", "write_text", "rename"])
def test_failures(failing, folder, tmp_path, monkeypatch):
    """A full disk, and Ctrl-C while files are given their names."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old/tokenizer.json").write_text("mine")
    owner = checkpoint_folder.safetensors().torch if failing == "save_file" else Path
    change, rename, calls = getattr(owner, failing), os.rename, []
    full, stopped = (OSError, "must be written whole, got .*No space"), (KeyboardInterrupt, None)
    error, message = stopped if failing == "rename" else full

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if args[1] in (tmp_path / "new", tmp_path / "old/config.json"):
            raise KeyboardInterrupt
        if failing != "rename" and len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return change(*args, **options)

    model = build("nvfp4")
    with monkeypatch.context() as patch:
        patch.setattr(owner, failing, fail)
        if failing == "rename":
            # Which the method of Path calls as well.
            patch.setattr(os, "rename", lambda *x: (rename, fail)[x[1] == tmp_path / "new"](*x))
        with pytest.raises(error, match=message) as caught:
            export_checkpoint(model, tmp_path / folder, max_shard_bytes=1)
    if error is OSError:
        assert caught.value.errno == errno.ENOSPC and caught.value.filename.endswith(folder)
    if (failing, folder) == ("rename", "old"):  # config.json is the last one to appear
        assert calls[-2][1].parent == tmp_path / "old"
    assert [*tmp_path.iterdir()] == [tmp_path / "old"]
    assert content_of(tmp_path / "old") == {"tokenizer.json": b"mine"}
    export_checkpoint(model, tmp_path / folder)
    assert_holds(tmp_path / folder, model)


@pytest.mark.parametrize("folder", ["new", "old"])
def test_of_two_exports_at_once_one_is_refused(folder, tmp_path):
    """The other one runs, from its start to its end, while the first one writes."""
    (tmp_path / "old").mkdir()
    second = build("nvfp4", seed=1)

    def entries():
        yield {"a": torch.ones(1)}
        export_checkpoint(second, tmp_path / folder, max_shard_bytes=1)

    with pytest.raises(FileExistsError, match="must not hold a checkpoint"):
        checkpoint_folder.write(tmp_path / folder, entries(), {"config.json": {}}, 10**9, {})
    assert_holds(tmp_path / folder, second)
    assert not [*tmp_path.rglob(".*")]


@pytest.mark.parametrize("folder", ["new", "old"])
def test_a_process_that_is_killed_leaves_a_hidden_folder(folder, tmp_path):
    (tmp_path / "old").mkdir()
    if not (pid := os.fork()):

        def entries():
            yield {"a": torch.ones(4)}
            yield {"b": torch.ones(4)}
            os.kill(os.getpid(), signal.SIGKILL)

        checkpoint_folder.write(tmp_path / folder, entries(), {"config.json": {}}, 1, {})
    os.waitpid(pid, 0)
    [left] = tmp_path.rglob(".*")
    assert left.name.startswith(f".{folder}-") and left.suffix == ".partial"
    export_checkpoint(model := build("nvfp4"), tmp_path / folder)
    assert_holds(tmp_path / folder, model)
