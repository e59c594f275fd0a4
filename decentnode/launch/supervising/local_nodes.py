"""Starts, restarts and ends the processes of this machine's nodes, and keeps their endpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from decentnode import clock, entropy
from decentnode.errors import EnvironmentFault
from decentnode.launch.children.messages import ChildMessage, Facts, Request, Task
from decentnode.launch.children.sockets import SocketDir
from decentnode.launch.files.provenance import usable_cores
from decentnode.launch.supervising.workers import Context, Worker, end_all, start_deferred, start_node
from decentnode.system import raise_open_files_limit, remove_temporaries


class LocalNodes:
    """The processes of one run's nodes on this machine, from their start until they are reaped."""

    def __init__(self, request: Request, facts: Facts, directory: Path | None) -> None:
        """directory: the run's folder; None if nothing is written."""
        self.workers: list[Worker] = []
        self.endpoints: dict[str, list[str]] = {}
        """Endpoints [control, bulk] of the nodes that have reported them, by uid as a decimal string."""
        self.enter("starting")
        self._request, self._facts, self._directory = request, facts, directory
        self._sockets = SocketDir()

    def enter(self, phase: str) -> None:
        """Enters another phase of the run: starting (fork, load), joining (connect) or running."""
        self.phase = phase
        self.phase_since = clock.now()

    def start(self, context: Context) -> None:
        """Forks the processes of all nodes. Returns before they are ready. Raises EnvironmentFault if the system does
        not start that many."""
        self._context = context
        self._run_id = entropy.word(8) if 0 in self._facts.local and not self._request.join else ""
        raise_open_files_limit()
        for uids in self._facts.processes:
            try:
                self.workers.append(start_node(context, self._task(uids, self._request.join, None)))
            except (OSError, EOFError) as error:  # EOFError: the fork server could not fork, and has ended
                raise EnvironmentFault(
                    f"only {len(self.workers)} of {len(self._facts.processes)} processes for nodes could be started: "
                    f"{error}; raise the limits (ulimit -n, ulimit -u) or set mapping.nodes_per_process: auto"
                ) from error
        self.enter("joining" if self._facts.in_process else "starting")

    def restart(self, uids: list[int], began: float | None) -> Worker:
        """Restarts nodes that have died, in one process, which asks the other nodes for readmission. Returns at once;
        the process is not in `workers` yet. began: when the run began (`clock.now()`), for its faults."""
        return start_deferred(self._context, self._task(uids, True, began))

    def worker_of(self, uid: int) -> Worker | None:
        """Returns the process of a node; None if it has ended."""
        return next((each for each in self.workers if each.alive and uid in each.unfinished), None)

    def replace(self, worker: Worker, by: Worker) -> None:
        """Replaces a process that has ended by the one that now runs its nodes."""
        self.workers[self.workers.index(worker)] = by

    def add_separate(self, uid: int, worker: Worker) -> None:
        """Adds a process for node `uid` alone, which was in a process that continues without it."""
        for each in self.workers:
            each.uids = tuple(other for other in each.uids if other != uid)
        self.workers.append(worker)

    def send_to_all(self, message: ChildMessage) -> None:
        """Sends a message to all processes that still have unfinished nodes."""
        for worker in self.workers:
            if worker.alive and not worker.is_done:
                worker.send(message)

    def remove_temporaries_of(self, *workers: Worker) -> None:
        """Removes the temporary files that ended processes left when they were killed during a write."""
        if self._directory is not None:
            pids = [pid for each in workers if each.exit_code and (pid := each.process.pid)]
            remove_temporaries(self._directory, pids)

    def close(self) -> None:
        """Kills and reaps every process, and removes the socket folder. Idempotent."""
        alive = [worker for worker in self.workers if worker.alive]
        end_all(alive)
        self.remove_temporaries_of(*alive)
        self._sockets.remove()

    def _task(self, uids: list[int], join: bool, began: float | None) -> Task:
        facts, local = self._facts, self._facts.local
        share = max(1, usable_cores() // max(1, len(facts.processes)))
        return Task(
            request=replace(self._request, found=facts.found, optima=facts.optima), uids=uids, machine=facts.machine,
            run_dir=str(self._directory) if self._directory else None, threads=facts.threads.get(str(uids[0]), share),
            run_id=self._run_id, in_process=facts.in_process, progress_seconds=max(0.25, len(local) / 50),
            socket_dir=self._sockets.path, join=join,
            endpoints={str(uid): self.endpoints[str(uid)] for uid in uids if str(uid) in self.endpoints},
            resume=None if join else facts.resume, resume_runs=facts.resume_runs, began=began,
        )  # fmt: skip
