"""The YAML keys of the networked transport, and the path that they choose for every edge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from decentnode.communication.parts import CommunicationConfig
from decentnode.communication.routing import Routing
from decentnode.config.component import ADDED


class ZeroMQConfig(CommunicationConfig):
    networked: ClassVar[bool] = True
    has_generations: ClassVar[bool] = True
    has_mailboxes: ClassVar[bool] = True

    same_host: Literal["shared_memory", "ipc", "tcp"] | None = None
    """How payloads travel between nodes of one host. Default: shared_memory with communication auto (ipc if /dev/shm is
    too small) and with shared_memory (an error if it is too small); ipc with zeromq."""
    chunk_bytes: int = Field(1 << 22, ge=1 << 16, le=1 << 26)
    """Size in bytes of the pieces in which a payload is sent; rounded down to whole blocks of 262,144 elements. Larger
    pieces overlap less with mixing."""
    window_bytes: int = Field(64 << 20, ge=1 << 20)
    """Largest number of bytes that one neighbor may have sent to this node before this node has mixed them. Limits the
    memory of a receiver."""
    checksum: Literal["auto", "none", "crc32", "xxh3"] = "auto"
    """Checksum of every message. auto: xxh3 over tcp; none on one host, or if encryption already authenticates."""
    security: Literal["auto", "off", "on", "required"] = "auto"
    """Whether nodes authenticate each other and encrypt (CURVE on every socket). auto: on if `keys` is given. required:
    like on, and a run that would send anything unencrypted to another machine is refused."""
    keys: Path | None = None
    """Folder of the keys that `decentnode keygen` made, relative to the YAML."""
    invitations: Annotated[Path | None, ADDED] = None
    """File with the secret with which `decentnode invite` makes invitations, relative to the YAML; the same on every
    machine of the mapping. With it, a node that is not in the mapping (`node.newcomers`) is admitted only with an
    invitation, or with a key that is listed in authorized.keys; if the run has keys, a node with an invitation need not
    be listed there."""
    bulk_security: Literal["curve", "aes-gcm", "none"] = "curve"
    """With security on: how models are protected on the wire. curve: like everything else. aes-gcm: equally strong and
    several times faster (extra `security`). none: only known nodes are admitted, but anyone on the network path can
    read and change what is sent."""
    non_finite: Literal["pass", "reject"] = "pass"
    """What to do with a neighbor's payload that contains NaN or infinity. pass: mix it. reject: treat it as missing."""

    @field_validator("security", mode="before")
    @classmethod
    def _yaml_booleans(cls, value: object) -> object:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _keys_where_needed(self) -> Self:
        if self.security in ("on", "required") and self.keys is None:
            raise ValueError(f"security: {self.security} needs keys: a folder made by decentnode keygen")
        if self.security == "required" and self.bulk_security == "none":
            raise ValueError("security: required cannot be combined with bulk_security: none")
        return self

    @property
    def steps_nodes(self) -> bool:
        return True

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
        """Returns the path of every edge as far as it is known before the nodes have exchanged their GPUs;
        `Routing.problems` lists contradictions with the mapping."""
        return Routing(machine_of, self.shared_memory is not False)

    def looks_for_gpus(self, routing: Routing) -> bool:  # noqa: ARG002
        """Returns whether nodes exchange at the start on which GPU their models are, because the routing uses it."""
        return False
