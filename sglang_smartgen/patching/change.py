"""Changing several files of an installed package: all of them, or none.

Each new content is written to a file of its own beside the old one and then renamed over it, so a
file that shares its inode with a package cache (pip, uv and conda link what they install) or that
is a symbolic link is never written through. The old file is kept under a second name until all are
renamed; after any exception, KeyboardInterrupt included, it goes back, the same inode. A process
that is killed in between leaves some files renamed and its own files lying: the next run finds the
first by their hashes and removes the second. A lock on the package's folder keeps two runs apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sglang_smartgen.patching.series import PatchError

PREFIX = ".smartgen-patch-"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """No other run changes `folder` meanwhile, where its file system knows locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_all(target: Path, contents: Mapping[str, bytes]) -> None:
    """Give every file of `contents` (by its path below `target`) its new content, or change none.

    Raises PatchError when a file cannot be written or when its folder is a link to elsewhere.
    """
    paths = {target / path: content for path, content in contents.items()}
    _refuse_links(target, paths)
    folders = {path.parent for path in paths}
    kept: list[Path] = []
    try:
        try:
            for path, content in paths.items():
                _write(_new(path), content, path)
                _keep(path)
                kept.append(path)
            for path in paths:
                os.replace(_new(path), path)
            for folder in folders:
                _sync(folder)
        except BaseException:
            for path in kept:  # one that was not replaced yet goes back over itself
                os.replace(_old(path), path)
            raise
        finally:
            clean(folders)
    except OSError as error:
        raise PatchError(
            f"{error.filename or target} cannot be written, so nothing was changed: "
            f"{error.strerror or error}"
        ) from None


def _refuse_links(target: Path, paths: Iterable[Path]) -> None:
    for path in paths:
        for folder in path.parents:
            if folder.is_symlink():
                raise PatchError(
                    f"{folder} is a link to {folder.resolve()}, which others may use; "
                    "name the real folder with --target to change it"
                )
            if folder == target:
                break


def _new(path: Path) -> Path:
    return path.with_name(f"{PREFIX}new-{path.name}")


def _old(path: Path) -> Path:
    return path.with_name(f"{PREFIX}old-{path.name}")


def _write(file: Path, content: bytes, like: Path) -> None:
    """A new file with the mode and, where we may, the owner of `like`."""
    status = like.stat()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        with contextlib.suppress(PermissionError):
            os.fchown(stream.fileno(), status.st_uid, status.st_gid)
        os.fchmod(stream.fileno(), stat.S_IMODE(status.st_mode))
        stream.flush()
        os.fsync(stream.fileno())


def _keep(path: Path) -> None:
    """A second name for the old file; a copy where the file system has no hard links."""
    try:
        os.link(path, _old(path), follow_symlinks=False)
    except OSError:
        shutil.copy2(path, _old(path), follow_symlinks=False)


def clean(folders: Iterable[Path]) -> None:
    """Remove what a killed run has left in `folders`; call it only under the lock."""
    for folder in folders:
        for left in folder.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # then writing will fail too, and say why
                left.unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
