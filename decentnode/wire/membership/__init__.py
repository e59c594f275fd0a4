"""How nodes agree on the next generation of members when some died, froze or came back. No sockets, no threads.

A node that misses a member reports it to the lowest uid among the other members, which leads. The leader prepares a
generation: every member promises to begin no further round and says how many rounds it has finished (`Promise`). Once
all have promised, the leader commits: every member releases what belonged to the old generation and answers `Ready`.
Once all are ready, the generation is in force (`Go`). A node repeats its message at every tick until it is answered, so
that nothing depends on a single message. Whoever is silent for `Limits.suspect_seconds` is left out of the next
attempt, the leader included. A node follows only the highest generation name that it promised. Why that is safe:
wire/generation.py and docs/explanation/membership.rst.

`Membership` is one node's side: messages and ticks in, messages and events out. Its parts:

- stages.py: the stages of a node and the table of changes between them
- state.py: what a node knows, shared by the parts below
- leader.py, follower.py: a node's part in one attempt to agree, as the leader and as one of the others
- succession.py: who leads to the next generation, and when
- joining.py: requests to join, of a node that is in no generation
- sides.py, merging.py: sides of a broken network that all go on, find each other again, and become one
- proposal.py: what the leader knows of its attempt; generations reported by others; who answers pings
- member.py: `Membership`, which hands every message and tick to these parts
"""

from decentnode.wire.membership.member import Membership

__all__ = ["Membership"]
