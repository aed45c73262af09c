"""Exports appear as a whole or not at all, and nothing that lies there is touched."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_export import build, bytes_of
from torch import nn

from fp4adam import export_checkpoint, import_checkpoint, quantize_model
from fp4adam.checkpoints import folder as checkpoint_folder
from fp4adam.checkpoints import new_files
from fp4adam.checkpoints.folder import Entry
from fp4adam.checkpoints.new_files import NewFiles
from helpers import assert_identical


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(params=["unnamed files", "hidden files"])
def kind_of_files(request, monkeypatch):
    """The second is what NFS has."""
    if request.param == "hidden files":
        monkeypatch.setattr(NewFiles, "_open_unnamed", lambda self: None)
    return request.param


def test_safetensors_files(tmp_path):
    tensors = {
        name: torch.arange(6).to(dtype).reshape(shape)
        for dtype in checkpoint_folder.DTYPES.values()
        for name, shape in ((f"{dtype}", (2, 3)), (f"{dtype}.flat", (6,)))
        if dtype != torch.float8_e8m0fnu
    }
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    tensors["ä"] = torch.ones(3).to(torch.float8_e8m0fnu)
    checkpoint_folder.write(tmp_path, [Entry(tensors, {"a": "ü"})], {"config.json": {}}, 10**9)
    stored = load_file(tmp_path / "model.safetensors")
    scale = stored.pop("ä")
    assert scale.dtype == torch.float8_e8m0fnu and torch.equal(scale.float(), torch.ones(3))
    assert_identical(stored, {name: x for name, x in tensors.items() if name != "ä"})
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt", "a": "ü"}
    for name, entry in header.items():
        start = 8 + int.from_bytes(data[:8], "little") + entry["data_offsets"][0]
        assert start % tensors[name].element_size() == 0, name


def test_what_files_cannot_hold(tmp_path):
    wrapper = build("nvfp4").up.weight.detach()
    sparse = torch.eye(3).to_sparse()
    for entries, error, match in (
        ([Entry({"a": wrapper}, {})], TypeError, "'a' must be a plain tensor .* NVFP4Tensor"),
        ([Entry({"a": sparse}, {})], TypeError, "'a' must be a plain tensor"),
        ([Entry({"a": torch.ones(4, 4).t()[1:]}, {})], TypeError, "'a' must be a plain tensor"),
        ([Entry({"a": torch.ones(4, device="meta")}, {})], TypeError, "'a' must be a plain"),
        ([Entry({"a": torch.ones(1, dtype=torch.complex128)}, {})], TypeError, "complex128"),
        ([Entry({"a": torch.ones(1)}, {})] * 2, ValueError, "different names, got two 'a'"),
    ):
        with pytest.raises(error, match=match):
            checkpoint_folder.write(tmp_path / "out", entries, {"config.json": {}}, 10**9)
    assert not list(tmp_path.iterdir())


def test_folders_with_a_checkpoint_are_left_alone(tmp_path):
    model = build("nvfp4")
    export_checkpoint(model, tmp_path)
    before = content_of(tmp_path)
    with pytest.raises(FileExistsError, match="must not hold a checkpoint yet, got .*safetensors'"):
        export_checkpoint(model, tmp_path)
    with pytest.raises(FileExistsError, match="got the file"):
        export_checkpoint(model, tmp_path / "config.json")
    assert content_of(tmp_path) == before


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_files_of_others_are_not_overwritten(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"must not hold a {name} yet, .* remove it"):
        export_checkpoint(build("nvfp4"), tmp_path, "modelopt")
    assert content_of(tmp_path) == {name: b"mine"}


def test_other_files_stay(tmp_path, kind_of_files):
    (tmp_path / "tokenizer.json").write_text("mine")
    export_checkpoint(build("nvfp4"), tmp_path)
    assert sorted(content_of(tmp_path)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


def test_links_mount_points_and_parents(tmp_path, monkeypatch, kind_of_files):
    model = build("nvfp4")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "later").symlink_to(tmp_path / "disk/new")
    export_checkpoint(model, tmp_path / "link")
    export_checkpoint(model, tmp_path / "later")  # a link to nothing yet
    export_checkpoint(model, tmp_path / "some/more/folders")
    (tmp_path / "mount").mkdir()
    opened = []

    def note(change: Callable[..., Any]) -> Callable[..., Any]:
        def noted(path: Any, *args: Any, **options: Any) -> Any:
            if not options.get("dir_fd") and not str(path).startswith("/proc"):
                opened.append(path)
            return change(path, *args, **options)

        return noted

    # Nothing is made outside of a mount point, nor in a parent, which may be read-only.
    for name in ("open", "mkdir", "link", "rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, note(getattr(os, name)))
    export_checkpoint(model, tmp_path / "mount")
    assert opened and all(Path(path).is_relative_to(tmp_path / "mount") for path in opened)
    expected = content_of(tmp_path / "mount")
    for name in ("link", "disk/new", "some/more/folders"):
        files = {n: (tmp_path / name / n).read_bytes() for n in expected}
        assert files == expected
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["disk", "later", "link", "mount", "some"]


@pytest.mark.parametrize("folder", ["new", "old"])
def test_file_systems_without_links(folder, tmp_path, monkeypatch):
    """Such as FAT, which has no files without names either."""

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    (tmp_path / "old").mkdir()
    monkeypatch.setattr(NewFiles, "_open_unnamed", lambda self: None)
    monkeypatch.setattr(os, "link", refuse)
    export_checkpoint(model := build("nvfp4"), tmp_path / folder, max_shard_bytes=1)
    assert_identical(
        bytes_of(import_checkpoint(build(None, 1), tmp_path / folder)), bytes_of(model)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"old", folder})
    assert len([*(tmp_path / folder).iterdir()]) == 7


@pytest.mark.parametrize("folder", ["new", "old"])
def test_sandboxes_that_forbid_links_to_descriptors(folder, tmp_path, monkeypatch):
    link = os.link

    def refuse(source: Any, *args: Any, **options: Any) -> None:
        if str(source).startswith("/proc"):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        link(source, *args, **options)

    (tmp_path / "old").mkdir()
    monkeypatch.setattr(os, "link", refuse)
    export_checkpoint(model := build("nvfp4"), tmp_path / folder)
    assert_identical(
        bytes_of(import_checkpoint(build(None, 1), tmp_path / folder)), bytes_of(model)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"old", folder})


def test_file_systems_without_unnamed_files(tmp_path, monkeypatch):
    open_file = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return open_file(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    export_checkpoint(model := build("nvfp4"), tmp_path / "out")
    assert_identical(bytes_of(import_checkpoint(build(None, 1), tmp_path / "out")), bytes_of(model))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_long_names_and_files_that_look_like_hidden_ones(tmp_path, kind_of_files):
    name = "x" * 240
    similar = [f".{name[:50]}-mine.partial", f".{name[:50]}-0123456789abcdef.partial.txt"]
    for other in similar:
        (tmp_path / other).write_text("mine")
    abandoned = tmp_path / f".{name[:50]}-0123456789abcdef.partial"
    abandoned.write_text("what a killed process has left")
    export_checkpoint(build("nvfp4"), tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {name, *similar}


def test_permissions_are_those_of_other_files(tmp_path, kind_of_files):
    (tmp_path / "other").write_text("")
    (tmp_path / "folder").mkdir()
    export_checkpoint(build("nvfp4"), tmp_path / "out")
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "folder").stat().st_mode


# Failures


def fail_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full after ``count`` bytes: the write that hits the limit is cut."""
    left = [count]

    class Full(io.FileIO):
        def write(self, data: memoryview) -> int:
            if not left[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = super().write(data[: left[0]])
            left[0] -= written
            return written

    monkeypatch.setattr("fp4adam.checkpoints.new_files.io.FileIO", Full)


@pytest.mark.parametrize("folder", ["new", "parents/new", "old"])
@pytest.mark.parametrize("count", [0, 7, 100, 5000, -1])
def test_a_full_disk(count, folder, tmp_path, monkeypatch, kind_of_files):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/tokenizer.json").write_text("mine")
    export_checkpoint(model := build("nvfp4"), tmp_path / "before", max_shard_bytes=1)
    before = content_of(tmp_path / "before")
    size = sum(map(len, before.values()))
    with monkeypatch.context() as patch:
        fail_after(count if count >= 0 else size + count, patch)
        with pytest.raises(OSError, match="must be written whole, got 'No space left") as error:
            export_checkpoint(model, tmp_path / folder, max_shard_bytes=1)
    assert error.value.errno == errno.ENOSPC and folder in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "old"]
    assert content_of(tmp_path / "old") == {"tokenizer.json": b"mine"}
    assert content_of(tmp_path / "before") == before
    export_checkpoint(model, tmp_path / folder)
    assert_identical(
        bytes_of(import_checkpoint(build(None, 1), tmp_path / folder)), bytes_of(model)
    )


def test_folders_that_cannot_be_written_to_are_found_out_first(tmp_path, monkeypatch):
    def refuse(self: NewFiles) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(NewFiles, "open", refuse)
    with pytest.raises(PermissionError):
        checkpoint_folder.write(tmp_path / "out", iter(lambda: 1 / 0, 1), {"config.json": {}}, 1)


@pytest.mark.parametrize("name", ["config.json", "model-00003-of-00005.safetensors"])
@pytest.mark.parametrize(("folder", "stage"), [("new", 1), ("old", 1), ("old", 2)])
def test_a_failure_while_files_get_their_names(
    folder, stage, name, tmp_path, monkeypatch, kind_of_files
):
    """First they are collected in a hidden folder, then they get names in one that exists."""
    (tmp_path / "old").mkdir()
    owner, function = (NewFiles, "_give_name") if stage == 1 else (new_files, "_link")
    change = getattr(owner, function)

    def interrupt(*args: Any) -> None:
        if args[-1].name == name:
            raise KeyboardInterrupt
        change(*args)

    monkeypatch.setattr(owner, function, interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(build("nvfp4"), tmp_path / folder, max_shard_bytes=1)
    assert [*tmp_path.iterdir()] == [tmp_path / "old"] and not content_of(tmp_path / "old")


@pytest.mark.parametrize("folder", ["new", "old"])
def test_of_two_exports_at_once_one_is_refused(folder, tmp_path, monkeypatch, kind_of_files):
    """The other one runs, from its start to its end, when the files of the first get names."""
    (tmp_path / "old").mkdir()
    first, second = build("nvfp4"), build("nvfp4", seed=1)
    give_name, raced = NewFiles._give_name, []

    def give(self: NewFiles, file: io.FileIO, path: Path) -> None:
        if not raced:
            raced.append(path)
            export_checkpoint(second, tmp_path / folder, max_shard_bytes=1)
        give_name(self, file, path)

    monkeypatch.setattr(NewFiles, "_give_name", give)
    with pytest.raises(FileExistsError, match="to which another process has written meanwhile"):
        export_checkpoint(first, tmp_path / folder)
    assert_identical(bytes_of(import_checkpoint(build(None), tmp_path / folder)), bytes_of(second))
    names = {path.name for path in (tmp_path / folder).iterdir()}
    assert "model.safetensors" not in names and not any(n.startswith(".") for n in names)
    assert not [*tmp_path.glob(".*")]


# Processes

PROGRAM = """
import os, random, signal, sys, time
import torch
from fp4adam import export_checkpoint, quantize_model
from fp4adam.checkpoints.new_files import NewFiles

mode, root = sys.argv[1:]
if mode.endswith("hidden"):
    NewFiles._open_unnamed = lambda self: None
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)))
quantize_model(model, "float8block")

def stop_after(count):
    calls = []

    def watch(change):
        def watched(*args, **options):
            calls.append(change)
            if len(calls) > count:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **options)
        return watched

    for name in ("link", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, watch(getattr(os, name)))

def export(name, shard_bytes=1_100_000, stop=None):
    pid = os.fork()
    if pid == 0:
        if stop is not None:
            stop_after(stop)
        try:
            export_checkpoint(model, f"{root}/{name}", "fp8", max_shard_bytes=shard_bytes)
            os._exit(0)
        except FileExistsError:
            os._exit(3)
        except OSError as error:
            os._exit(4 if "must be written whole" in str(error) else 5)
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

if mode.startswith("kill"):
    random.seed(0)
    assert ended(export("old")) == 0
    start = time.perf_counter()
    assert ended(export("done")) == 0
    took = time.perf_counter() - start
    os.mkdir(f"{root}/made")
    i = killed = 0
    while killed < 20 and i < 100:
        i += 1
        name = "made" if i % 2 else "new"
        pid = export(name)
        time.sleep(random.uniform(0, took))
        os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        killed += code == -9
        if code != -9:
            took *= 0.8  # the machine is less busy than it was
        files = os.listdir(f"{root}/{name}") if os.path.exists(f"{root}/{name}") else []
        hidden = [file for file in (*files, *os.listdir(root)) if file.startswith(".")]
        print(name, code, len(files), "config.json" in files, len(hidden), flush=True)
        if "config.json" in files:
            os.rename(f"{root}/{name}", f"{root}/done{i}")
            os.makedirs(f"{root}/made", exist_ok=True)
    print("last", ended(export("new")), ended(export("made")))
elif mode.startswith("stop"):
    import shutil
    for name in ("new", "made"):
        for count in range(100):
            if name == "made":
                os.mkdir(f"{root}/made")
            code = ended(export(name, 4_400_000, stop=count))
            config = os.path.exists(f"{root}/{name}/config.json")
            if code == 0:
                break
            then = ended(export(name, 4_400_000))
            print(name, code, config, then, len(os.listdir(f"{root}/{name}")))
            shutil.rmtree(f"{root}/{name}")
elif mode.startswith("race"):
    for i in range(3):
        pids = [export(f"race{i}", size) for size in (1_100_000, 10**9)]
        print(*sorted(map(ended, pids)))
else:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
    print(ended(export("new")))
"""


def run(mode: str, root: Path) -> list[str]:
    """Exports in processes of their own, of a model whose checkpoint has 8 files and two more."""
    command = [sys.executable, "-c", PROGRAM, mode, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def whole(folder: Path) -> bool:
    """Whether the folder holds a checkpoint of that model and nothing else.

    But for a hidden folder, of a process that was killed when all files had their names.
    """
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    import_checkpoint(model, folder)
    torch.manual_seed(0)
    same = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    quantize_model(same, "float8block")
    assert_identical(bytes_of(model), bytes_of(same))
    return len([path for path in folder.iterdir() if path.name[0] != "."]) in (2, 4, 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["kill", "kill hidden"])
def test_processes_that_are_killed_at_random_moments(mode, tmp_path):
    *lines, last = run(mode, tmp_path)
    killed = [line for line in lines if line.split()[1] == "-9"]
    assert last == "last 0 0" and len(killed) == 20
    if mode == "kill":  # but for the moment in which files get names, longer on a busy machine
        nothing = {"new -9 0 False 0", "made -9 0 False 0"}
        assert sum(line not in nothing for line in killed if "True" not in line) <= 5
    # The last exports have removed what was left, and all others are complete.
    assert {path.name for path in tmp_path.iterdir()} >= {"old", "new", "made"}
    assert not [*tmp_path.glob(".*")]
    assert all(map(whole, tmp_path.iterdir()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["stop", "stop hidden"])
def test_processes_that_are_killed_while_files_get_their_names(mode, tmp_path):
    """Before each change of a folder: it is complete then, or the next export removes the rest."""
    lines = run(mode, tmp_path)
    assert len(lines) > 15
    assert {*lines} == {"new -9 False 0 4", "made -9 False 0 4", "made -9 True 3 4"}
    assert {path.name for path in tmp_path.iterdir()} == {"new", "made"}
    assert all(map(whole, tmp_path.iterdir()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["race", "race hidden"])
def test_two_processes_that_export_to_one_folder(mode, tmp_path):
    assert run(mode, tmp_path) == ["0 3"] * 3
    assert len([*tmp_path.iterdir()]) == 3
    assert all(map(whole, tmp_path.iterdir()))


@pytest.mark.exhaustive
def test_a_limit_of_the_system(tmp_path):
    assert run("limit", tmp_path) == ["4"]
    assert not [*tmp_path.iterdir()]
