"""Keys of the networked transport, and the path that they give to every edge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from decentnode.communication.parts import CommunicationConfig
from decentnode.communication.routing import Routing


class ZeroMQConfig(CommunicationConfig):
    networked: ClassVar[bool] = True
    has_generations: ClassVar[bool] = True

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

    @property
    def key_folder(self) -> Path | None:
        return self.keys if self.secure else None

    @property
    def unix_sockets(self) -> bool:
        return self.same_host != "tcp"

    @property
    def shared_memory(self) -> bool | None:
        if self.name == "zeromq" and self.same_host != "shared_memory":
            return False
        if self.same_host not in (None, "shared_memory"):
            return False
        return True if "shared_memory" in (self.name, self.same_host) else None

    def routing(self, machine_of: Mapping[int, int]) -> Routing:
        """Which path every edge takes, before anybody knows who has a GPU; `Routing.problems` has what contradicts the
        mapping."""
        return Routing(machine_of, self.shared_memory is not False)

    def looks_for_gpus(self, routing: Routing) -> bool:  # noqa: ARG002
        """Whether nodes tell each other at the start on which GPU their models lie, so that the routing may ask it."""
        return False
