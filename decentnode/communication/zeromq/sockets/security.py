"""Authentication of nodes: one CURVE key pair per node, an allow-list of public keys, and the ZAP authenticator.

A folder of keys has `public.keys`, with a line "uid key" per node, and `node-UID.secret` for every node of this
machine. Only its owner may read a secret, and no other user may be able to change any of the files. Keys are 32 bytes
in Z85, 40 characters (RFC 32/Z85, CurveCP, ZeroMQ RFC 26).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from decentnode import clock, entropy
from decentnode.communication.zeromq.protocol.credentials import BulkCredential
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.system import replacing
from decentnode.wire.invitation import SECRET_BYTES, Invitation, opened

logger = logging.getLogger(__name__)

PUBLIC_FILE = "public.keys"
AUTHORIZED_FILE = "authorized.keys"
"""File with the public keys of nodes outside the mapping that may be admitted, one per line."""
NEWCOMER_SECRET = "newcomer.secret"
LOOK_SECONDS = 1.0
"""Shortest time between two reads of AUTHORIZED_FILE."""


@dataclass
class Keyring:
    """One node's secret key, and the public keys of all nodes (Z85, 40 bytes)."""

    uid: int
    secret: bytes = field(repr=False)
    public: dict[int, bytes]
    """uid -> public key; the I/O thread adds those of newcomers as they are admitted."""
    invited: Callable[[bytes], bool] = lambda _key: False
    """Returns whether the owner of an unknown key may ask to be admitted."""

    @property
    def uid_of(self) -> dict[bytes, int]:
        return {key: uid for uid, key in self.public.items()}


class AuthorizedKeys:
    """The keys of AUTHORIZED_FILE, to which keys may be added during the run."""

    def __init__(self, folder: Path) -> None:
        self._path, self._keys, self._last_read = folder / AUTHORIZED_FILE, frozenset[bytes](), -math.inf

    def __call__(self, key: bytes) -> bool:
        """Returns whether the file contains a key. The file is read again for an unknown key. A file that others may
        change, or that is no list of keys, counts as empty, which is logged."""
        if key not in self._keys and clock.now() - self._last_read >= LOOK_SECONDS:
            self._last_read = clock.now()
            self._keys = self._read_keys()
        return key in self._keys

    def _read_keys(self) -> frozenset[bytes]:
        if not self._path.exists():
            return frozenset()
        try:
            lines = read_trusted(self._path, 0o022).decode("utf-8").splitlines()
            words = [line.partition(" ")[0] for line in lines if line.strip() and not line.startswith("# ")]
            wrong = [word for word in words if not _is_key(word)]
            if wrong:
                raise EnvironmentFault(f"{self._path}: must have a key per line, got {wrong[0][:80]!r}")
            return frozenset(word.encode() for word in words)
        except (EnvironmentFault, UnicodeDecodeError) as error:
            logger.warning("no node is admitted: %s", error)
            return frozenset()


def secret_path(folder: Path, uid: int) -> Path:
    return folder / f"node-{uid}.secret"


def write_keys(folder: Path, uids: Iterable[int]) -> list[Path]:
    """Creates key pairs for `uids`, adds their public keys to the folder's list, and returns the secret files.

    Raises UsageError, before anything is written, if one of the nodes already has a key.
    """
    uids = list(uids)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = read_public(folder) if (folder / PUBLIC_FILE).exists() else {}
    for uid in uids:
        if uid in known or secret_path(folder, uid).exists():
            raise UsageError(f"{folder} has a key of node {uid} already; remove it first, or choose another folder")
    made = []
    try:
        for uid in uids:
            public, secret = zmq.curve_keypair()
            path = secret_path(folder, uid)
            _write_private(path, secret + b"\n")
            known[uid] = public
            made.append(path)
        text = "".join(f"{uid} {known[uid].decode()}\n" for uid in sorted(known))
        with replacing(folder / PUBLIC_FILE) as temporary:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with open(handle, "w", encoding="utf-8") as file:
                os.fchmod(handle, 0o644)  # the umask may be wider or narrower
                file.write(text)
    except OSError:
        for path in made:  # a secret without its public key would make the next call fail
            path.unlink(missing_ok=True)
        raise
    return made


def _write_private(path: Path, content: bytes) -> None:
    """Creates a file that only its user may read; if writing fails, no file is left. Raises OSError, such as
    FileExistsError."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise EnvironmentFault(
            f"{path} belongs to another user (uid {status.st_uid}), who could change the keys; run chown "
            f"{os.geteuid()} on it"
        )


def read_trusted(path: Path, forbidden: int, hint: str = "make keys with keygen") -> bytes:
    """Returns the content of a file of keys, which only this user and root may be able to change.

    forbidden: permission bits that the file must not have. hint: what to do if it is missing. Raises EnvironmentFault,
    with the command that helps.
    """
    try:
        _check_owner(path.parent, folder := os.stat(path.parent))
        if folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:  # a sticky bit prevents replacing
            raise EnvironmentFault(
                f"{path.parent} can be changed by others (mode {stat.S_IMODE(folder.st_mode):o}), and the keys in it "
                f"replaced; run chmod go-w on it"
            )
        with open(path, "rb") as file:
            found, content = os.fstat(file.fileno()), file.read()  # of the file that is read, not of its name
    except OSError as error:
        raise EnvironmentFault(f"{path}: {error.strerror}; {hint}") from error
    _check_owner(path, found)
    mode = stat.S_IMODE(found.st_mode)
    if mode & forbidden:
        what, cure = ("read", "600") if forbidden & 0o044 else ("changed", "go-w")
        raise EnvironmentFault(f"{path} can be {what} by others (mode {mode:o}); run chmod {cure} on it")
    return content


def read_public(folder: Path) -> dict[int, bytes]:
    """Returns the allow-list of a folder, uid -> key. Raises EnvironmentFault with file and line, or if others could
    have changed it."""
    path = folder / PUBLIC_FILE
    try:
        lines = read_trusted(path, 0o022).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise EnvironmentFault(f"{path}: {error}; make keys with keygen") from error
    found: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not words[0].isdigit() or not _is_key(words[1]):
            raise EnvironmentFault(f'{path}:{number}: must be "uid key", got {line[:80]!r}')
        uid, key = int(words[0]), words[1].encode()
        if uid in found or key in found.values():
            raise EnvironmentFault(f"{path}:{number}: node {uid} or its key is listed twice")
        found[uid] = key
    return found


def _is_key(text: str) -> bool:
    with contextlib.suppress(ValueError, KeyError, UnicodeEncodeError):
        return len(text) == 40 and len(z85.decode(text.encode("ascii"))) == 32
    return False


def load_keyring(folder: Path, uid: int, num_nodes: int) -> Keyring:
    """Returns the keys for node `uid`. Raises EnvironmentFault if one is missing or invalid, or if others could read
    the secret key or change any key."""
    public = read_public(folder)
    missing = [other for other in range(num_nodes) if other not in public]
    if missing:
        few = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise EnvironmentFault(f"{folder / PUBLIC_FILE} has no key of node {few}; make keys with keygen")
    path = secret_path(folder, uid)
    secret = read_trusted(path, 0o077).strip()
    try:
        derived = zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError):
        raise EnvironmentFault(f"{path}: not a secret key") from None
    if derived != public[uid]:
        raise EnvironmentFault(f"{path} does not belong to the key of node {uid} in {PUBLIC_FILE}")
    return Keyring(uid, secret, {other: public[other] for other in range(num_nodes)}, AuthorizedKeys(folder))


class Admission:
    """Decides, by its invitation or key, whether a newcomer with an accepted connection may be granted a uid."""

    def __init__(self, secret: bytes, security: Security | None) -> None:
        """secret: the secret of invitations; empty if every newcomer whose connection is accepted is admitted."""
        self._secret = secret
        self._authorized = None if security is None else security.keyring.invited
        if secret and security is not None:  # accept any key, only to ask for admission
            security.keyring.invited = lambda _key: True

    def __call__(self, text: str, key: str) -> Invitation | None:
        """Returns the verified invitation in `text`; None if the newcomer needs none. Raises PeerFault
        ("uninvited")."""
        if not self._secret or (key and self._authorized is not None and self._authorized(key.encode())):
            return None
        return opened(self._secret, text, clock.wall())


def read_secret(path: Path, maker: str = "decentnode invite") -> bytes:
    """Returns the secret in a file: of invitations, or of a script's ranks. maker: the command that makes such files.
    Raises EnvironmentFault if there is none, or if others could read or change it."""
    text = read_trusted(path, 0o077, f"make it with {maker}").strip()
    with contextlib.suppress(ValueError):
        if len(found := bytes.fromhex(text.decode("ascii"))) == SECRET_BYTES:
            return found
    raise EnvironmentFault(f"{path}: not a secret of {maker}")


def write_secret(path: Path) -> None:
    """Writes a new secret to a file that `read_secret` reads. Raises OSError, such as FileExistsError."""
    _write_private(path, entropy.draw(SECRET_BYTES).hex().encode() + b"\n")


def write_newcomer(folder: Path) -> bytes:
    """Creates the key pair of a node outside the mapping, and returns the public key, for AUTHORIZED_FILE of every
    member. Raises UsageError if there already is one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / NEWCOMER_SECRET
    if path.exists():
        raise UsageError(f"{path} already exists; remove it first, or choose another folder")
    public, secret = zmq.curve_keypair()
    _write_private(path, secret + b"\n")
    return public


def load_newcomer(folder: Path, uid: int = -1) -> Keyring:
    """Returns the keys for a node outside the mapping, whose folder has PUBLIC_FILE and its own secret. Raises
    EnvironmentFault like `load_keyring`."""
    path = folder / NEWCOMER_SECRET
    secret = read_trusted(path, 0o077).strip()
    try:
        own = zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError):
        raise EnvironmentFault(f"{path}: not a secret key") from None
    return Keyring(uid, secret, {**read_public(folder), uid: own}, AuthorizedKeys(folder))


@dataclass(frozen=True)
class Security:
    """How a node's sockets authenticate peers: CURVE on the control plane, and on the bulk plane either CURVE or a
    credential that is sent over the control plane."""

    keyring: Keyring
    bulk: Literal["curve", "aes-gcm", "none"]

    @property
    def bulk_needs_credential(self) -> bool:
        return self.bulk != "curve"


GUEST_PREFIX = b"guest "
"""Prefix of the user id that ZAP gives to connections that may only ask for admission; the public key follows. The user
id of other connections is the uid."""


class Authenticator:
    """Answers ZeroMQ's authentication requests (RFC 27/ZAP); accepted connections are identified by the peer's uid.

    Used by the thread that owns the sockets.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring, credentials: Mapping[int, BulkCredential],
        refused: Callable[[str, str, str], None],
    ) -> None:
        """credentials: uid -> credential that this node gave; added as peers ask. refused(reason, address, detail):
        called for every connection that is refused."""
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._keyring, self._credentials, self._refused = keyring, credentials, refused

    def answer(self) -> None:
        """Answers all pending requests; not blocking."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request, _, address, _, mechanism, *credentials = frames
            uid, reason, detail = self._authenticate(mechanism, credentials)
            key = z85.encode(credentials[0]) if uid < 0 and not reason else b""
            if reason:
                self._refused(reason, address.decode(errors="replace"), detail)
            found = GUEST_PREFIX + key if key else b"%d" % uid
            status, text, who = (b"400", b"unknown", b"") if reason else (b"200", b"", found)
            self.socket.send_multipart([version, request, status, text, who, b""])

    def _authenticate(self, mechanism: bytes, credentials: list[bytes]) -> tuple[int, str, str]:
        """Returns (uid, reason, detail): uid -1 for a connection that may only ask for admission; reason "" if the
        connection is accepted."""
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            key = z85.encode(credentials[0])
            uid = self._keyring.uid_of.get(key, -1)
            known = uid >= 0 or self._keyring.invited(key)
            return (uid, "", "") if known else (-1, "stranger", f"key {key.decode()}")
        if mechanism == b"PLAIN" and len(credentials) == 2 and credentials[0].isdigit() and len(credentials[0]) < 8:
            uid = int(credentials[0])
            given = self._credentials.get(uid)
            reason = "stranger" if given is None else given.refusal(credentials[1])
            return uid, reason or "", f"bulk login as node {uid}"
        return -1, "stranger", mechanism.decode(errors="replace")
