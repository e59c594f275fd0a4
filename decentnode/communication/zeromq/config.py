"""Keys of the networked transport, and where a node listens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from decentnode.communication.base import CommunicationConfig


class ZeroMQConfig(CommunicationConfig):
    same_host: Literal["shared_memory", "ipc", "tcp"] | None = None
    """How payloads travel between nodes of one host. When not given: shared_memory for communication auto (ipc where
    /dev/shm is too small) and shared_memory (an error there), ipc for zeromq."""
    chunk_bytes: int = Field(1 << 22, ge=1 << 16, le=1 << 26)
    """Size of one chunk of a payload, in bytes; rounded down to whole blocks of 262,144 elements."""
    window_bytes: int = Field(64 << 20, ge=1 << 20)
    """Most bytes that one neighbor may have under way to this node and not mixed yet."""
    checksum: Literal["auto", "none", "crc32", "xxh3"] = "auto"
    """Checksum of every message; auto: xxh3 on tcp, none elsewhere and where encryption authenticates already."""
    security: Literal["auto", "off", "on", "required"] = "auto"
    """Whether nodes prove who they are and encrypt (CURVE on every socket): auto, if `keys` are given; required, a run
    that would send anything readable to another machine is refused."""
    keys: Path | None = None
    """Folder of keys made by `decentnode keygen`, relative to the file."""
    bulk_security: Literal["curve", "aes-gcm", "none"] = "curve"
    """How models are protected when security is on: curve; aes-gcm, several times faster (extra `security`); none:
    readable on the wire and not protected against whoever sits on the way, but let in only from known nodes."""
    non_finite: Literal["pass", "reject"] = "pass"
    """What becomes of a neighbor's payload with NaN or infinity: reject treats it as missing from there on."""

    @field_validator("security", mode="before")
    @classmethod
    def _yaml_booleans(cls, value: object) -> object:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _keys_where_needed(self) -> Self:
        if self.security in ("on", "required") and self.keys is None:
            raise ValueError(f"security: {self.security} needs keys: a folder made by decentnode keygen")
        if self.security == "required" and self.bulk_security == "none":
            raise ValueError("security: required does not go with bulk_security: none")
        return self

    @property
    def secure(self) -> bool:
        return self.security != "off" and self.keys is not None


@dataclasses.dataclass(frozen=True)
class BindPlan:
    """Where a node listens."""

    ipc_dir: Path | None = None
    """Private folder for Unix sockets, or None for tcp only."""
    host: str = "127.0.0.1"
    """Address of the interface for tcp."""
    port: int | None = None
    """Control port (bulk is port + 1); None: free ones, and no tcp at all beside `ipc_dir`."""
    again: tuple[str, ...] = ()
    """Instead of free ports: the endpoints that the node had before it was started again."""
