"""The protocol without I/O: messages, their bytes, and which of them a node may send when.

- messages.py, bounds.py, codec.py, framing.py, doorbell.py: the messages, the bounds of their fields, their bytes
- stream.py: numbered messages between two nodes, so that none is lost or comes twice
- session.py, session_states.py, control_tree.py: start, stop and failures of a run
- generation.py, membership/: how nodes agree on who takes part when some died or came back
"""
