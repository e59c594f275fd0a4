"""How nodes agree on the next generation of members after some died, froze or came back. No sockets, no threads.

A node that misses a member reports it to the lowest uid among the other members, which leads. The leader prepares a
generation: every member promises to begin no further round and reports how many rounds it has finished (`Promise`).
Once all have promised, the leader commits: every member releases the resources of the old generation and answers
`Ready`. Once all are ready, the generation is in force (`Go`). A node repeats its message at every tick until it is
answered, so that nothing depends on a single message. A node that is silent for `Limits.suspect_seconds` is left out of
the next attempt, even if it is the leader. A node follows only the highest generation name that it has promised.
wire/generation.py and docs/explanation/membership.rst explain why this is safe.

`Membership` is one node's side: it takes messages and ticks and returns messages and events. Its parts:

- stages.py: the stages of a node and the table of transitions between them
- state.py: the state of a node, shared by the parts below
- leader.py, follower.py: a node's part in one attempt to agree, as the leader and as one of the others
- succession.py: which node leads to the next generation, and when
- joining.py: the requests to join of a node that is in no generation
- newcomers.py, seats.py: admission of nodes that are not in the mapping, and the uids that they get
- sides.py, merging.py: sides of a network partition that all continue, find each other again, and merge
- proposal.py: the state of the leader's attempt; generations that other nodes report
- watch.py: which of the awaited nodes answer pings, and how long an answer may take
- member.py: `Membership`, which passes every message and tick to these parts
"""

from decentnode.wire.membership.member import Membership

__all__ = ["Membership"]
