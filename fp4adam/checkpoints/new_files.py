"""Files that appear in a folder together, once all of them are complete."""

import contextlib
import errno
import glob
import io
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType

# What file systems without unnamed files, such as NFS, answer to O_TMPFILE.
NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


class NewFiles:
    """Files without names until :meth:`publish`; a context manager.

    A process that is killed leaves nothing behind: the kernel frees files without names. Where the
    file system has no such files, they are hidden ones, ``.<folder>-*.partial``. Those of a killed
    process are removed by the next one that writes to the folder.

    The files are made in the folder, or in the closest parent that exists: on one file system with
    the folder, also if that is a mount point, or in a parent that cannot be written to.

    Args:
        folder: The folder to write to, without links in its path. It need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._place = next(path for path in (folder, *folder.parents) if path.exists())
        self._prefix = f".{folder.name[:50]}-"  # names have limits, and what follows has its place
        self._hidden: dict[io.FileIO, Path] = {}
        self._files = contextlib.ExitStack()

    def __enter__(self) -> "NewFiles":
        self._remove_abandoned()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for path in self._hidden.values():
            path.unlink(missing_ok=True)
        self._files.close()

    def open(self) -> io.FileIO:
        """A new file to write to, unbuffered; it is closed with the others."""
        file = self._open_unnamed() or self._open_hidden()
        return self._files.enter_context(file)

    def path_of(self, file: io.FileIO) -> Path:
        """A path by which a library can open a new file once more, to write to it."""
        return self._hidden.get(file) or Path(f"/proc/self/fd/{file.fileno()}")

    def _open_unnamed(self) -> io.FileIO | None:
        if not (hasattr(os, "O_TMPFILE") and os.path.exists("/proc/self/fd")):
            return None
        try:
            descriptor = os.open(self._place, os.O_TMPFILE | os.O_WRONLY, 0o666)
        except OSError as error:
            if error.errno in NO_UNNAMED_FILES:
                return None
            raise
        return io.FileIO(descriptor, "wb")

    def _open_hidden(self) -> io.FileIO:
        while True:
            path = self._hidden_path(self._place)
            file = io.FileIO(path, "xb")
            _lock(file.fileno(), waits=True)  # as long as this process lives
            if path.exists():  # nobody has removed it before it was locked
                self._hidden[file] = path
                return file
            file.close()

    def _remove_abandoned(self) -> None:
        """Remove what processes that were killed have left."""
        for path in self._place.glob(glob.escape(self._prefix) + "[0-9a-f]" * 16 + ".partial"):
            is_folder = path.is_dir()
            flags = os.O_NOFOLLOW | (os.O_DIRECTORY if is_folder else os.O_RDWR)
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                descriptor = os.open(path, flags)
                stack.callback(os.close, descriptor)
                if _lock(descriptor):
                    self._remove_collected(path) if is_folder else path.unlink()

    def _remove_collected(self, place: Path) -> None:
        """Remove a hidden folder, and the names that some of its files have got already."""
        named = [self.folder / path.name for path in place.iterdir()]
        named = [path for path in named if _is_same(path, place / path.name)]
        if len(named) < len([*place.iterdir()]):  # else all have got them
            for path in named:
                path.unlink()
        shutil.rmtree(place)

    def publish(self, files: dict[str, io.FileIO]) -> None:
        """Give files their names in the folder.

        They are collected in a hidden folder first. It becomes the folder if that does not exist
        yet; otherwise the files get names in it, in order, so that the last one marks it as
        complete. Nothing is overwritten: of several processes, one gets a name. If this raises, no
        name remains; if the process is killed meanwhile, the next one removes them.

        Args:
            files: By name.

        Raises:
            FileExistsError: If the folder has got such a file, or another process has made it.
        """
        for file in files.values():
            os.fsync(file.fileno())
        is_new = not self.folder.exists()
        with contextlib.ExitStack() as undo:
            place = self._make_hidden_folder(self.folder.parent if is_new else self.folder, undo)
            for name, file in files.items():
                self._give_name(file, place / name)
            try:
                if is_new:
                    os.rename(place, self.folder)  # if it exists by now, only if it is empty
                else:
                    for name in files:
                        _link(place / name, self.folder / name)
                        undo.callback((self.folder / name).unlink, missing_ok=True)
                    shutil.rmtree(place)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                raise FileExistsError(
                    f"folder must not hold a checkpoint yet, got {str(self.folder)!r}, to which "
                    "another process has written meanwhile; nothing was added to it, choose "
                    "another one"
                ) from None
            undo.pop_all()

    def _make_hidden_folder(self, parent: Path, undo: contextlib.ExitStack) -> Path:
        """A folder that is locked like a hidden file; parents that do not exist are made."""
        for path in reversed([path for path in (parent, *parent.parents) if not path.exists()]):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                undo.callback(_remove_empty, path)
        while True:
            place = self._hidden_path(parent)
            place.mkdir()
            undo.callback(shutil.rmtree, place, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(place, os.O_DIRECTORY)
                self._files.callback(os.close, descriptor)
                _lock(descriptor, waits=True)
                if place.exists():
                    return place

    def _hidden_path(self, place: Path) -> Path:
        return place / f"{self._prefix}{secrets.token_hex(8)}.partial"

    def _give_name(self, file: io.FileIO, path: Path) -> None:
        if file in self._hidden:
            os.rename(self._hidden[file], path)
            del self._hidden[file]
        else:
            source = f"/proc/self/fd/{file.fileno()}"
            try:
                # Python follows the link in /proc only if it is given a src_dir_fd.
                os.link(source, path, src_dir_fd=file.fileno())
            except OSError:  # sandboxes forbid it
                shutil.copyfile(source, path)


def _link(source: Path, target: Path) -> None:
    """Give a file another name, which it alone has got; where there are no links, move it."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        target.touch(exist_ok=False)
        os.replace(source, target)


def _is_same(path: Path, other: Path) -> bool:
    return path.exists() and path.samefile(other)


def _lock(descriptor: int, waits: bool = False) -> bool:
    """Whether this process has got the lock of an open file, which it keeps until it closes it.

    Nobody has to wait for long: others take the lock of a file only to remove it.
    """
    import fcntl  # not on Windows

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
