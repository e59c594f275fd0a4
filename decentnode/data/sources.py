"""Sources of datasets: downloads with digests, and instructions for data that cannot be downloaded."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import re
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from decentnode.errors import DataError, EnvironmentFault

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0
"""A connection that delivers no byte for this long is closed, and the download resumed."""
ATTEMPTS = 5
"""The number of consecutive connections without data, per address of the file, after which a download fails."""
BLOCK = 1 << 20
MAX_UNPACKED = 8 << 30
"""The maximum number of bytes that an archive may unpack to."""

Progress = Callable[[str, int, int], None]
"""A function of the file's name, the number of bytes received so far, and its size."""


@dataclass(frozen=True)
class Remote:
    """One file to download. Its digest is the one published by its authors, or used by widespread libraries."""

    urls: tuple[str, ...]
    size: int
    md5: str

    @property
    def name(self) -> str:
        return self.urls[0].rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """The files of a dataset."""

    files: tuple[Remote, ...] = ()
    folder: str = "."
    """The value of the section's `folder`, relative to the folder that the files were downloaded to."""
    unpack: bool = False
    dataset: str = ""
    """The name of the dataset in YAML, if it differs."""
    keys: dict[str, str] = field(default_factory=dict)
    """Further keys of the section."""
    manual: str = ""
    """How to get the files, if they cannot simply be downloaded."""
    prepare_verb: str = "checks and converts"
    """What `decentnode data prepare` does with the files, as a verb."""


def _cifar(name: str, size: int, md5: str) -> tuple[Remote, ...]:
    urls = (f"https://www.cs.toronto.edu/~kriz/{name}", f"https://cave.cs.toronto.edu/kriz/{name}")
    return (Remote(urls, size, md5),)


def _idx(base: str, files: dict[str, tuple[int, str]]) -> tuple[Remote, ...]:
    return tuple(Remote((f"{base}{name}.gz",), size, md5) for name, (size, md5) in files.items())


SOURCES: dict[str, Source] = {
    "cifar10": Source(_cifar("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
                      "cifar-10-batches-bin", unpack=True),
    "cifar100": Source(_cifar("cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"),
                       "cifar-100-binary", unpack=True),
    "mnist": Source(_idx("https://ossci-datasets.s3.amazonaws.com/mnist/", {
        "train-images-idx3-ubyte": (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        "train-labels-idx1-ubyte": (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        "t10k-images-idx3-ubyte": (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        "t10k-labels-idx1-ubyte": (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    })),
    "fashion_mnist": Source(_idx("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", {
        "train-images-idx3-ubyte": (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        "train-labels-idx1-ubyte": (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        "t10k-images-idx3-ubyte": (4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        "t10k-labels-idx1-ubyte": (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    }), dataset="idx", keys={"mean": "0.2860", "std": "0.3530"}),
    "tiny_imagenet": Source((Remote(("http://cs231n.stanford.edu/tiny-imagenet-200.zip",), 248_100_043,
                                    "90528d7ca1a48142e341f4ef8d21d0de"),), "tiny-imagenet-200", unpack=True),
    "image_folder": Source(manual="of ImageNet its authors (https://image-net.org/download) give out "
                                   "ILSVRC2012_img_train.tar, which holds an archive for each class, and "
                                   "ILSVRC2012_img_val.tar, whose images have to be moved into folders of their "
                                   "classes", prepare_verb="reads"),
    "femnist": Source(manual="LEAF's data/femnist/preprocess.sh (https://github.com/TalwalkarLab/leaf) makes the "
                              "files from NIST's images; its folder data/femnist/data is the one to name"),
    "celeba": Source(manual="the images img_align_celeba and the lists of identities and attributes are given out by "
                             "their authors (https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html); LEAF's "
                             "data/celeba/preprocess.sh (https://github.com/TalwalkarLab/leaf) makes the files"),
    "shakespeare": Source(manual="LEAF's data/shakespeare/preprocess.sh (https://github.com/TalwalkarLab/leaf) makes "
                                  "the files; its folder data/shakespeare/data is the one to name"),
    "reddit": Source(manual="LEAF's data/reddit (https://github.com/TalwalkarLab/leaf) says where its authors keep "
                             "the files, and its preprocess.sh makes those of users and the vocabulary; its folder "
                             "data/reddit/data is the one to name"),
    "movielens": Source(manual="https://files.grouplens.org/datasets/movielens/ml-latest-small.zip holds ratings.csv; "
                                "its authors change it without a digest"),
    "amazon_reviews": Source(manual="its authors give out reviews as lines of JSON "
                                     "(https://amazon-reviews-2023.github.io), FedScale as a CSV for each user"),
}  # fmt: skip
"""The sources of datasets that are not part of the package."""


def remedy(name: str) -> str:
    """Returns instructions for getting the files of a dataset, or ""."""
    source = SOURCES.get(name)
    if source is None:
        return ""
    prepare = f"decentnode data prepare {name} --from DIR {source.prepare_verb} what you have"
    if source.files:
        return f"decentnode data get {name} downloads it; {prepare}"
    return f"{source.manual}; {prepare}"


def get(name: str, target: Path, mirror: str | None = None, progress: Progress = lambda *_: None) -> Path:
    """Downloads, checks and unpacks a dataset (blocking). Returns the folder that its section must name.

    Complete files are not downloaded again, and partial ones are resumed. mirror: the address of a folder with the
    files, instead of the usual addresses. Raises DataError for a wrong digest, a mirror that is not an address, or a
    name that has no download, and EnvironmentFault if no address answers.
    """
    source = SOURCES.get(name)
    if source is None or not source.files:
        have = ", ".join(each for each, found in SOURCES.items() if found.files)
        raise DataError(f"{name} cannot be downloaded; one of {have} can" + (f". {remedy(name)}" if source else ""))
    if mirror is not None:
        _check_address(mirror)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for remote in source.files:
            path = fetch(remote, target, mirror, progress)
            if source.unpack:
                unpack(path, target)
    except OSError as error:
        raise EnvironmentFault(f"{target}: cannot be written: {error}") from error
    return target / source.folder


def _check_address(mirror: str) -> None:
    """Raises DataError unless `mirror` is the address of a folder on a web server."""
    try:
        parts = urllib.parse.urlsplit(mirror)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        right = False
    if not right or not re.fullmatch(r"[!-~]+", mirror):
        raise DataError(f"mirror must be the address of a folder, such as http://host/folder, got {mirror!r}")


def fetch(remote: Remote, target: Path, mirror: str | None = None, progress: Progress = lambda *_: None) -> Path:
    """Downloads and checks the file if needed (blocking). Returns its path. Raises DataError, EnvironmentFault."""
    path, part = target / remote.name, target / f"{remote.name}.part"
    if path.is_file() and path.stat().st_size == remote.size and md5_of(path) == remote.md5:
        return path
    urls = [f"{mirror.rstrip('/')}/{remote.name}"] if mirror else list(remote.urls)
    last_error, failures = "", 0
    while (have := _size(part)) < remote.size:
        if failures == ATTEMPTS * len(urls):
            raise EnvironmentFault(f"{remote.name}: {last_error}; {have} of {remote.size} bytes are in {part}; the "
                                   "next attempt resumes from there")  # fmt: skip
        url = urls[failures % len(urls)]
        try:
            _download(url, part, remote, progress)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            last_error = f"{url}: {getattr(error, 'reason', None) or error}"
            logger.info("%s", last_error)
        failures = failures + 1 if _size(part) <= have else 0
    if (found := md5_of(part)) != remote.md5 or _size(part) != remote.size:
        part.unlink()
        raise DataError(f"{urls[0]}: the digest (MD5) must be {remote.md5}, got {found}; the file has been removed")
    part.replace(path)
    return path


def _download(url: str, part: Path, remote: Remote, progress: Progress) -> None:
    """Appends the bytes that are missing from `part`, or starts again if the server does not support resuming."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        with open(part, "ab" if resumed else "wb") as file:
            have = have if resumed else 0
            while have < remote.size and (block := answer.read(min(BLOCK, remote.size - have))):
                file.write(block)
                have += len(block)
                progress(remote.name, have, remote.size)


def unpack(archive: Path, target: Path) -> None:
    """Unpacks a .tar.gz or .zip below `target`. Raises DataError for members outside of it, or that are no files."""
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                _check([(each.filename, each.file_size, True) for each in packed.infolist()], archive)
                packed.extractall(target)
            return
        with tarfile.open(archive, "r:gz") as rolled:
            members = rolled.getmembers()
            _check([(each.name, each.size, each.isreg() or each.isdir()) for each in members], archive)
            for member in members:
                _write_member(rolled, member, target / member.name)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{archive}: cannot be unpacked: {error}") from error


def _write_member(rolled: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    """Writes a plain file or folder, without the owner, mode and time in the archive."""
    if member.isdir():
        place.mkdir(parents=True, exist_ok=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    content = rolled.extractfile(member)
    assert content is not None
    with content, open(place, "wb") as file:
        while block := content.read(BLOCK):
            file.write(block)


def _check(members: list[tuple[str, int, bool]], archive: Path) -> None:
    for name, _, plain in members:
        path = PurePosixPath(name)
        if not plain or path.is_absolute() or ".." in path.parts or "\\" in name:
            raise DataError(f"{archive}: holds {name!r:.80}, which is not a file or folder below the archive's")
    if (total := sum(size for _, size, _ in members)) > MAX_UNPACKED:
        raise DataError(f"{archive}: unpacks to {total} bytes, more than {MAX_UNPACKED}")


def md5_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
