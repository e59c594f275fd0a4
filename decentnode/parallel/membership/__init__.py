"""Ranks come and go: the wrappers of a job that goes on when some of its processes die, and lets new ones in.

Who is a member is agreed on as among the nodes of a run (wire/membership/): generations with a name, at most one in
force. The rest is here:

- control.py: a thread that carries the messages of that protocol over ZeroMQ, and what the training asks it
- addresses.py: where ranks listen, and how a process finds a job that runs
- keys.py, group.py: the secret that keeps strangers out, and process groups over sockets that it closes
- beginning.py, founding.py: how a process founds a job with others, joins it, or comes back to it
- generation_groups.py: the process group of each generation
- job.py: the process's place in the job

What is done with exchanges that a generation leaves unfinished, so that no edge is mixed at one end alone, is in
transports/regrouping.py; exchanges that can be broken off are pairs.py and sockets.py beside it. What
DecentralizedDataParallel and CommOptimizer do meanwhile is in participants/.
"""
