"""Ranks come and go: the wrappers of a job that goes on when some of its processes die, and lets new ones in.

Who is a member is agreed on as among the nodes of a run (wire/membership/): generations with a name, at most one in
force. The rest is here:

- control.py: a thread that carries the messages of that protocol over ZeroMQ, and what the training asks it
- addresses.py: where ranks listen, and how a process finds a job that runs
- keys.py, group.py: the secret that keeps strangers out, and process groups over sockets that it closes
- beginning.py, founding.py: how a process founds a job with others, joins it, or comes back to it
- job.py: the process's place in the job, and the process group of each generation
- exchange.py: what is done with exchanges that a generation leaves unfinished, so that no edge is mixed at one end
  alone
- pairs.py, sockets.py: exchanges from rank to rank that can be broken off, over gloo and over ZeroMQ
- wrapper.py, meetings.py: DecentralizedDataParallel's side, and CommOptimizer's
"""
