"""Elastic membership: the wrappers of a job continue when some of its processes die, and let new processes in.

The membership is agreed on with the protocol of the nodes of a run (wire/membership/): generations with a name, at most
one in force at a time. This package adds the following:

- control.py: a thread that exchanges the messages of that protocol over ZeroMQ, and answers the training's questions
- addresses.py: where ranks listen, and how a process finds a running job
- keys.py, socket_group.py: the secret that keeps strangers out, and process groups over sockets that it secures
- startup.py, founding.py: how a process founds a job with others, joins one, or rejoins the one that it belonged to
- generation_groups.py: the process group of each generation
- job.py: the process's part in the job

transports/regrouping.py settles the exchanges that a generation leaves unfinished, so that no edge is mixed at one end
alone; point_to_point.py and sockets.py beside it are exchanges whose waits can be interrupted. participants/ has what
DecentralizedDataParallel and CommOptimizer do meanwhile.
"""
