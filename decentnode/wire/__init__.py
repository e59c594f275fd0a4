"""The wire protocol without I/O: the messages, their encoding, and which of them a node may send in which state.

- messages.py, bounds.py, codec.py, framing.py, doorbell.py: the messages, the bounds of their fields, their encoding
- stream.py: reliable delivery between two nodes: sequence numbers, acknowledgements, retransmission, duplicates
- session.py, session_states.py, session_events.py, control_tree.py: start, stop and failures of a run
- orders.py: how all nodes pause, resume or evaluate before the same round
- generation.py, membership/: how nodes agree on the members after some died or came back
- invitation.py, relay.py: admission of nodes outside the mapping, and streams to nodes that nobody can connect to
"""
