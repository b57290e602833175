"""Files that the package can prove to be its own. It replaces and removes no others.

A folder that the package writes holds `.flash-tf.json`: for each writer the SHA-256 of its files. A file is the
writer's own while it has this content. `replacing` writes a folder as a whole, `write` some files among others.
Needs the standard library alone, and TensorFlow for gs://.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

MANIFEST, FORMAT = ".flash-tf.json", 1
TOKENIZERS = "tokenizer.model", "tokenizer.json"  # of SentencePiece, and of Hugging Face's `tokenizers`
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux
Older = Callable[[str], Collection[str]]  # a folder without a manifest -> the files in it that are the writer's own


@contextlib.contextmanager
def replacing(out: str, writer: str, older: Older) -> Iterator[Path]:
    """A new folder to fill. It takes the place of `out` at once when the body ends, and not after an error.

    A process that is killed at any moment leaves the old folder or the new one, both whole.

    Args:
      out: See `check_folder`.
      writer: The command or function that writes, for example "flash-tf export".
      older: Names the files of a folder from before there were manifests.

    Raises:
      ValueError: See `check_folder`, or another process is writing this folder.
    """
    folder = check_folder(out, writer, older)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _beside(folder) as scratch:
        new, old = scratch / "new", scratch / "old"
        if old.exists() and not folder.exists():
            old.rename(folder)  # a process was killed between two renames
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir()
        yield new
        hashes = {name: [_sha256(f"{new}/{name}")] for name in _names(new)}
        _store(str(new / MANIFEST), _text({writer: hashes}))
        _sync(new)
        check_folder(out, writer, older)  # a user may have put a file there meanwhile
        _swap(new, folder, old)


def is_local(path: str) -> bool:
    """Whether a path is on a disk, and not in a bucket."""
    return "://" not in path


def local(out: str, writer: str) -> Path:
    """The path of a local folder to write, which need not be there; ValueError for a bucket and for a file."""
    if not is_local(out):
        raise ValueError(f"{writer} needs a local folder, from which you can copy it, got {out}")
    return Path(place(os.path.expanduser(out)))


def place(path: str) -> str:
    """The path of a folder, local or in a bucket, which need not be there.

    Raises:
      ValueError: It or a folder above it is a file, or its bucket does not answer.
    """
    if not path:
        raise ValueError("a folder needs a name, got none")
    for above in (Path(path), *Path(path).parents) if is_local(path) else ():
        if above.is_dir():
            break
        if os.path.lexists(above):
            raise ValueError(f"{path} needs to be a folder, and {above} is a file")
    return reachable(path)


def reachable(path: str) -> str:
    """The path of a file or folder; ValueError if it is in a bucket that does not answer."""
    if is_local(path):
        return path
    errors = importlib.import_module("tensorflow").errors
    try:
        _gfile().exists(path)
    except errors.UnimplementedError:
        raise ValueError(f"{path} cannot be used: a path is on a disk or at gs://") from None
    except errors.OpError as error:
        reason = error.message.splitlines()[0].rpartition("error details: ")[2]
        raise ValueError(f"{path} cannot be reached: {reason}") from None
    return path


def check_folder(out: str, writer: str, older: Older) -> Path:
    """The path of a folder to replace; ValueError unless it is new, empty, or holds the writer's own files alone."""
    folder = local(out, writer).resolve()
    if not folder.exists():
        return folder
    known = dict.fromkeys(older(str(folder)))
    if (manifest := _manifest(str(folder))) is not None:
        known = {MANIFEST: None, **manifest.get(writer, {})}
    _prove(str(folder), _names(folder), known, writer)
    if Path.cwd().is_relative_to(folder) or folder.is_mount():
        raise ValueError(
            f"{writer} replaces a folder as a whole and needs one that is neither the working directory nor a mount "
            f"point, got {out}: give a folder inside it"
        )
    return folder


def write(folder: str, files: Mapping[str, bytes], writer: str, older: Older = lambda folder: ()) -> None:
    """Writes files into a folder, local or gs://, which may hold others. All are checked before one is written.

    Args:
      folder: The folder; it is made if it is not there.
      files: Name -> content.
      writer: The command that writes.
      older: Names the writer's files in a folder from before there were manifests.

    Raises:
      ValueError: A file of such a name is not the writer's own.
    """
    if not is_local(folder):
        _gfile().makedirs(folder)
    else:
        os.makedirs(folder, exist_ok=True)
    with _locked(folder):
        manifest, known = _known(folder, writer, older)
        there = {name: _sha256(f"{folder}/{name}") for name in files}
        new = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        changed = [name for name in files if there[name] != new[name]]
        _prove(folder, changed, known, writer)
        # The manifest names the new content beside the old one first: a process may be killed between two files.
        hashes = {name: sorted({there[name] or new[name], new[name]}) for name in files}
        if (all_known := {**known, **hashes}) != known or changed:
            _store(f"{folder}/{MANIFEST}", _text({**manifest, writer: all_known}))
        for name in changed:
            _store(f"{folder}/{name}", files[name])


def check(folder: str, names: Iterable[str], writer: str, older: Older = lambda folder: ()) -> None:
    """Raises a ValueError if a file of such a name is in the folder and is not the writer's own."""
    _prove(place(folder), names, _known(folder, writer, older)[1], writer)


def own(folder: str, writer: str, older: Older = lambda folder: ()) -> set[str]:
    """The names of the writer's own files in a folder."""
    known = _known(folder, writer, older)[1]
    return {name for name, hashes in known.items() if _sha256(f"{folder}/{name}") in hashes}


def remove(folder: str, names: Iterable[str], writer: str, older: Older = lambda folder: ()) -> None:
    """Removes files that are the writer's own, and leaves others."""
    for name in own(folder, writer, older) & set(names):
        _gfile().remove(f"{folder}/{name}") if not is_local(folder) else os.remove(f"{folder}/{name}")


def _prove(folder, names, known, writer):
    for name in names:
        path, hashes = f"{folder}/{name}", known.get(name, [])
        if not _there(path) or hashes is None or (found := _sha256(path)) in hashes:
            continue
        said = f"has changed since {writer} wrote it" if hashes and found else f"{writer} did not write"
        raise ValueError(f"{folder} holds {name}, which {said}: give another folder, or move that file away")


def _known(folder, writer, older):
    """The whole manifest, and the hashes of the writer's files. What is older is taken over as it is."""
    manifest = _manifest(folder)
    if manifest is None:
        _prove(folder, [MANIFEST], {}, writer)
        manifest = {}
    if writer not in manifest:
        found = {name: _sha256(f"{folder}/{name}") for name in older(folder)}
        manifest = {**manifest, writer: {name: [sha256] for name, sha256 in found.items() if sha256}}
    return manifest, manifest[writer]


def _manifest(folder):
    """Writer -> name -> hashes; None if there is no manifest."""
    found = json_of(f"{folder}/{MANIFEST}")
    files = found.get("files") if found.get("format") == FORMAT else None
    whole = isinstance(files, dict) and all(isinstance(of_one, dict) for of_one in files.values())
    return files if whole else None


def json_of(path: str) -> dict:
    """The JSON object in a file; empty if there is none, which proves nothing."""
    if not _plain(path):
        return {}
    with _gfile().GFile(path) if not is_local(path) else open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError:
            return {}
    return found if isinstance(found, dict) else {}


def _text(files):
    return (json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n").encode()


def _gfile():
    return importlib.import_module("tensorflow").io.gfile  # by name: presets need no TensorFlow


def _there(path):
    return _gfile().exists(path) if not is_local(path) else os.path.lexists(path)


def _plain(path):
    """Whether there is a file, and no folder, link, pipe or device."""
    if not is_local(path):
        return _gfile().exists(path) and not _gfile().isdir(path)
    return os.path.isfile(path) and not os.path.islink(path)


def _sha256(path):
    """The SHA-256 of a plain file; None if there is none."""
    if not _plain(path):
        return None
    with _gfile().GFile(path, "rb") if not is_local(path) else open(path, "rb") as file:
        found = hashlib.sha256()
        while data := file.read(2**20):
            found.update(data)
    return found.hexdigest()


def _store(path, data):
    """Writes a file; a reader finds the old content or the new one, both whole."""
    if not is_local(path):
        with _gfile().GFile(f"{path}.partial", "wb") as file:
            file.write(data)
        _gfile().rename(f"{path}.partial", path, overwrite=True)
        return
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.flash-tf")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(partial, flags, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _names(folder):
    """Paths of all files and links below a folder, from it on, in a fixed order."""
    for root, folders, files in os.walk(folder, onerror=_raise):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        yield from (os.path.relpath(os.path.join(root, name), folder) for name in sorted([*files, *links]))


def _raise(error):
    raise error


@contextlib.contextmanager
def _locked(folder):
    """One process at a time changes a manifest. A bucket has no locks; only a run writes there, which has one owner."""
    if not is_local(folder):
        yield
        return
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _beside(folder):
    """A folder of the same file system, for one process at a time. What a killed process left in it goes."""
    scratch = folder.with_name(f".{folder.name}.flash-tf")
    scratch.mkdir(exist_ok=True)
    lock = os.open(scratch, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} needs one writer at a time, and another process is writing it") from None
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        os.close(lock)


def _sync(folder):
    """Waits until a folder and all that is below it are on the disk."""
    for root, _, files in os.walk(folder):
        for path in (root, *(os.path.join(root, name) for name in files)):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)


def _swap(new, folder, old):
    """Gives `folder` the content of `new`; where a file system cannot exchange two names, in two renames."""
    if not folder.exists() or not any(folder.iterdir()):
        new.rename(folder)
    elif not _exchanged(new, folder):
        try:
            folder.rename(old)
            new.rename(folder)
        except BaseException:  # an interrupt too, because what is left beside the folder is removed
            if not folder.exists():
                old.rename(folder)
            raise
    parent = os.open(folder.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


def _exchanged(one, other):
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0
