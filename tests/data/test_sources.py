"""Downloads, from an HTTP server on this machine."""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.data import DATASETS, sources
from decentnode.data.sources import SOURCES, Remote, Source, fetch, get, remedy, unpack
from decentnode.errors import DataError, EnvironmentFault

from .files import idx_bytes, make_samples, open_dataset, write_cifar10

CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8).tobytes()


class Server:
    """An HTTP server of `files` that can cut connections and ignore ranges."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"a.bin": CONTENT}
        self.ranges: list[str] = []
        self.cut_after: int | None = None
        """Number of bytes after which a connection ends; None for no limit."""
        self.resumes = True
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.serve(self)

            def log_message(self, *_: Any) -> None:
                return

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def serve(self, request: http.server.BaseHTTPRequestHandler) -> None:
        content = self.files.get(request.path.lstrip("/"))
        range_header = request.headers.get("Range", "")
        self.ranges.append(range_header)
        if content is None:
            request.send_error(404)
            return
        start = int(range_header.removeprefix("bytes=").rstrip("-")) if range_header and self.resumes else 0
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(content) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        stop = len(content) if self.cut_after is None else min(start + self.cut_after, len(content))
        request.wfile.write(content[start:stop])
        request.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.server.shutdown()
    server.server.server_close()
    server.thread.join()


def remote(content: bytes = CONTENT, name: str = "a.bin", **changes: Any) -> Remote:
    facts = {"urls": (f"http://nowhere.invalid/{name}",), "size": len(content), "md5": hashlib.md5(content).hexdigest()}
    return Remote(**{**facts, **changes})


def test_a_file_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    for _ in range(2):
        path = fetch(remote(), tmp_path, server.url, lambda *facts: seen.append(facts))
    assert path.read_bytes() == CONTENT and server.ranges == [""]
    assert seen[-1] == ("a.bin", 300_000, 300_000) and not path.with_name("a.bin.part").exists()


def test_an_interrupted_download_resumes(server: Server, tmp_path: Path) -> None:
    server.cut_after = 100_000
    assert fetch(remote(), tmp_path, server.url).read_bytes() == CONTENT
    assert server.ranges == ["", "bytes=100000-", "bytes=200000-"]


def test_a_partial_file_of_an_earlier_process_is_resumed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:299_999])
    assert fetch(remote(), tmp_path, server.url).read_bytes() == CONTENT
    assert server.ranges == ["bytes=299999-"]


def test_a_server_without_ranges_sends_the_whole_file(server: Server, tmp_path: Path) -> None:
    server.resumes = False
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    assert fetch(remote(), tmp_path, server.url).read_bytes() == CONTENT


@pytest.mark.parametrize("change", [{"md5": "0" * 32}, {"size": 1000}])
def test_a_file_with_a_wrong_digest_is_removed(server: Server, tmp_path: Path, change: dict[str, Any]) -> None:
    problem = r"a\.bin: the digest \(MD5\) must be \w{32}, got \w{32}; the file has been removed"
    with pytest.raises(DataError, match=problem):
        fetch(remote(**change), tmp_path, server.url)
    assert not list(tmp_path.iterdir())


def test_a_damaged_partial_file_is_removed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match="the digest"):
        fetch(remote(), tmp_path, server.url)
    assert fetch(remote(), tmp_path, server.url).read_bytes() == CONTENT


def test_a_server_without_the_file_is_an_error_after_all_attempts(server: Server, tmp_path: Path) -> None:
    del server.files["a.bin"]
    with pytest.raises(EnvironmentFault, match=r"a\.bin: http.*: Not Found; 0 of 300000 bytes are in .*a\.bin\.part"):
        fetch(remote(), tmp_path, server.url)
    assert len(server.ranges) == sources.ATTEMPTS


def test_the_second_url_is_tried(server: Server, tmp_path: Path) -> None:
    urls = (f"{server.url}/elsewhere/a.bin", f"{server.url}/a.bin")
    assert fetch(remote(urls=urls), tmp_path).read_bytes() == CONTENT


def tar_of(files: dict[str, bytes], **changes: Any) -> bytes:
    server = io.BytesIO()
    with tarfile.open(fileobj=server, mode="w:gz") as rolled:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in changes.items():
                setattr(member, key, value)
            rolled.addfile(member, io.BytesIO(content))
    return server.getvalue()


def test_a_dataset_is_downloaded_unpacked_and_prepared(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs `data get` and `data prepare` on a small archive in place of CIFAR-10's."""
    write_cifar10(tmp_path / "made", files=5)
    packed = tar_of({f"cifar-10-batches-bin/{path.name}": path.read_bytes()
                     for path in sorted((tmp_path / "made").iterdir())})  # fmt: skip
    server.files["cifar-10-binary.tar.gz"] = packed
    monkeypatch.setitem(SOURCES, "cifar10", Source((remote(packed, "cifar-10-binary.tar.gz"),), "cifar-10-batches-bin",
                                                   unpack=True))  # fmt: skip
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, ["data", "get", "cifar10", "--mirror", server.url])
    assert found.exit_code == 0, found.output
    assert "data: {name: cifar10, folder: data/cifar10/cifar-10-batches-bin}" in found.output
    prepared = CliRunner().invoke(main, ["data", "prepare", "cifar10", "--from", "data/cifar10/cifar-10-batches-bin"])
    assert "35 training samples, 5 test samples, all readable" in prepared.output


def test_gzip_files_are_read_without_unpacking(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = make_samples()
    import gzip

    parts = {name: gzip.compress(idx_bytes(array)) for kind in ("train", "t10k") for name, array in
             ((f"{kind}-images-idx3-ubyte.gz", images), (f"{kind}-labels-idx1-ubyte.gz", labels))}  # fmt: skip
    server.files |= parts
    monkeypatch.setitem(SOURCES, "mnist", Source(tuple(remote(content, name) for name, content in parts.items())))
    folder = get("mnist", tmp_path / "m", server.url)
    assert len(open_dataset({"name": "mnist", "folder": str(folder)}).train_targets()) == 11


@pytest.mark.parametrize("name, changes", [
    ("../out", {}), ("/etc/out", {}), ("a/../../out", {}), ("link", {"type": tarfile.SYMTYPE, "linkname": "/etc"}),
    ("pipe", {"type": tarfile.FIFOTYPE}), ("hard", {"type": tarfile.LNKTYPE, "linkname": "x"}),
])
def test_archives_with_members_outside_the_target_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(tar_of({name: b""}, **changes))
    with pytest.raises(DataError, match="which is not a file or folder below the archive's"):
        unpack(archive, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_zip_archives_are_unpacked_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("folder/file", "hello")
    unpack(archive, tmp_path / "to")
    assert (tmp_path / "to" / "folder" / "file").read_text() == "hello"
    monkeypatch.setattr(sources, "MAX_UNPACKED", 4)
    with pytest.raises(DataError, match="unpacks to 5 bytes, more than 4"):
        unpack(archive, tmp_path / "to")
    for suffix in ("zip", "tar.gz"):
        (tmp_path / f"b.{suffix}").write_bytes(b"nothing of the kind")
        with pytest.raises(DataError, match="cannot be unpacked"):
            unpack(tmp_path / f"b.{suffix}", tmp_path / "to")


def test_datasets_without_a_download_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"femnist cannot be downloaded; one of cifar10, .* can\. LEAF's .*\.sh"):
        get("femnist", tmp_path)
    with pytest.raises(DataError, match="cifar11 cannot be downloaded; one of cifar10"):
        get("cifar11", tmp_path)


def test_sources_name_datasets_with_digests_or_instructions() -> None:
    for name, source in SOURCES.items():
        assert (source.dataset or name) in DATASETS
        assert bool(source.files) != bool(source.manual)
        for each in source.files:
            assert len(each.md5) == 32 and each.size > 1000 and all(url.endswith(each.name) for url in each.urls)


@pytest.mark.parametrize("section", [
    {"name": "cifar10", "folder": "no"}, {"name": "cifar100", "folder": "no"}, {"name": "mnist", "folder": "no"},
    {"name": "femnist", "folder": "no"}, {"name": "celeba", "folder": "no", "images": "no"},
    {"name": "tiny_imagenet", "folder": "no"}, {"name": "image_folder", "folder": "no"},
])
def test_missing_datasets_are_errors_that_say_how_to_get_them(section: dict[str, Any], tmp_path: Path) -> None:
    name = section["name"]
    with pytest.raises(DataError) as caught:
        open_dataset(section, tmp_path)
    assert str(caught.value).endswith(remedy(name))
    assert f"decentnode data prepare {name} --from DIR" in str(caught.value)
    if SOURCES[name].files:
        assert f"decentnode data get {name} downloads it" in str(caught.value)
