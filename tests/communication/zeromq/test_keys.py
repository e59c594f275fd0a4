"""Files of keys: their owner and access rights, and the errors for missing, broken and readable ones."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.sockets.security import (
    PUBLIC_FILE,
    load_keyring,
    read_public,
    secret_path,
    write_keys,
)
from decentnode.errors import EnvironmentFault, UsageError


def test_keys_are_private_and_complete(tmp_path: Path) -> None:
    paths = write_keys(tmp_path / "keys", range(3))
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600] * 3
    ring = load_keyring(tmp_path / "keys", 1, 3)
    assert zmq.curve_public(ring.secret) == ring.public[1] and len(set(ring.public.values())) == 3
    assert ring.secret.decode() not in repr(ring)
    write_keys(tmp_path / "keys", [7])
    assert sorted(read_public(tmp_path / "keys")) == [0, 1, 2, 7]
    before = paths[0].read_bytes()
    with pytest.raises(UsageError, match="key of node 2 already"):
        write_keys(tmp_path / "keys", [9, 2])
    assert paths[0].read_bytes() == before and not secret_path(tmp_path / "keys", 9).exists()


def test_missing_and_broken_keys_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    with pytest.raises(EnvironmentFault, match="make keys with keygen"):
        load_keyring(folder, 0, 2)
    write_keys(folder, range(2))
    with pytest.raises(EnvironmentFault, match="no key of node 2, 3"):
        load_keyring(folder, 0, 4)
    secret = secret_path(folder, 0)
    secret.chmod(0o644)
    with pytest.raises(EnvironmentFault, match=r"can be read by others \(mode 644\)"):
        load_keyring(folder, 0, 2)
    secret.chmod(0o600)
    original = secret.read_bytes()
    secret.write_bytes(secret_path(folder, 1).read_bytes())
    with pytest.raises(EnvironmentFault, match="does not belong to the key of node 0"):
        load_keyring(folder, 0, 2)
    secret.write_bytes(b"nonsense")
    with pytest.raises(EnvironmentFault, match="not a secret key"):
        load_keyring(folder, 0, 2)
    secret.write_bytes(original)
    public = folder / PUBLIC_FILE
    lines = public.read_text().splitlines()
    for invalid in (f"{lines[0]}\n{lines[0]}", "0 short", "x " + "a" * 40, f"0 {lines[0].split()[1]} more"):
        public.write_text(invalid + "\n")
        with pytest.raises(EnvironmentFault, match=f"{PUBLIC_FILE}:[12]"):
            read_public(folder)


@pytest.mark.parametrize(("which", "mode", "reason"), [
    *(("secret", mode, rf"can be read by others \(mode {mode:o}\); run chmod 600 on it")
      for mode in (0o640, 0o604, 0o660, 0o620, 0o601)),
    ("public", 0o664, r"can be changed by others \(mode 664\); run chmod go-w"),
    ("public", 0o646, r"can be changed by others \(mode 646\)"),
    ("folder", 0o770, r"can be changed by others \(mode 770\), and the keys in it replaced"),
    ("folder", 0o707, r"can be changed by others \(mode 707\)"),
])  # fmt: skip
def test_keys_that_others_can_read_or_change_are_refused(which: str, mode: int, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    write_keys(folder, range(2))
    path = {"secret": secret_path(folder, 0), "public": folder / PUBLIC_FILE, "folder": folder}[which]
    path.chmod(mode)
    with pytest.raises(EnvironmentFault, match=f"{path.name} {reason}"):
        load_keyring(folder, 0, 2)
    path.chmod(mode & (0o700 if which != "public" else 0o644) | (0o1777 if which == "folder" else 0))
    assert load_keyring(folder, 0, 2).uid == 0, "refused, though no other user can change the keys"


@pytest.mark.parametrize("umask", [0, 0o077])
def test_new_keys_are_accepted_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_keys(tmp_path / "keys", range(2))
        write_keys(tmp_path / "keys", [2])
    finally:
        os.umask(before)
    assert load_keyring(tmp_path / "keys", 1, 3).uid == 1
    assert stat.S_IMODE((tmp_path / "keys" / PUBLIC_FILE).stat().st_mode) == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["node-0.secret", PUBLIC_FILE, "."])
def test_keys_of_another_user_are_refused(which: str, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    write_keys(folder, range(2))
    os.chown(folder / which, 12345, 12345)
    with pytest.raises(EnvironmentFault, match=r"belongs to another user \(uid 12345\), who could change the keys"):
        load_keyring(folder, 0, 2)


@pytest.mark.parametrize("config", [
    {"security": True}, {"security": "required"}, {"security": "required", "keys": "k", "bulk_security": "none"},
])  # fmt: skip
def test_security_without_keys_or_bulk_security_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"security: (on|required)"):
        ZeroMQConfig.model_validate(config)


def test_security_is_on_with_keys_unless_the_config_turns_it_off() -> None:
    assert ZeroMQConfig.model_validate({"keys": "k"}).secure
    assert not ZeroMQConfig.model_validate({"keys": "k", "security": False}).secure
    assert ZeroMQConfig.model_validate({"keys": "k", "security": True}).security == "on"
