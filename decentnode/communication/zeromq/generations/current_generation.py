"""The parts of a node's transport for the generation of members in force, and their replacement by the next one's."""

from __future__ import annotations

from decentnode import clock
from decentnode.communication.zeromq.generations.generation_paths import GenerationParts, GenerationPaths
from decentnode.communication.zeromq.generations.generations import Generations
from decentnode.communication.zeromq.generations.tree_collectives import TreeCollectives
from decentnode.communication.zeromq.protocol.collective_state import CollectiveState
from decentnode.communication.zeromq.protocol.node_protocol import NodeProtocol
from decentnode.communication.zeromq.run_parts import RunParts
from decentnode.errors import AssemblyError, PeerLost, Regrouping
from decentnode.wire.generation import Generation


class CurrentGeneration:
    """The generation in force on one node: its collectives and paths.

    Used by the training thread, or by the thread that changes to the next generation on its behalf.
    """

    def __init__(self, run: RunParts, protocol: NodeProtocol, generations: Generations | None) -> None:
        """generations: None if the run has only one generation."""
        self._run, self._protocol, self._generations = run, protocol, generations
        self._make()

    def _make(self) -> None:
        """Creates the parts that a generation needs before its paths are open; `GenerationPaths.open` creates the
        rest."""
        run = self._run
        state = CollectiveState(run.session, run.config.chunk_bytes, run.state, self._protocol)
        self.collectives = TreeCollectives(state, run.driver, run.state)
        self._paths = GenerationPaths(run, self.collectives)
        self._protocol.collectives, self._protocol.take_slot = state, self._paths.take
        self._parts: GenerationParts | None = None

    @property
    def parts(self) -> GenerationParts:
        """The open paths and what belongs to them."""
        assert self._parts is not None, "no generation is in force: start comes first"
        return self._parts

    def open(self, partners: frozenset[int] | None, timeout_seconds: float) -> None:
        """Opens the paths of the generation or, if it ends meanwhile, of the next one. Blocks until they are open.

        partners: as in `GenerationPaths.open`. Raises what every wait raises once the run has failed, and PeerLost or
        AssemblyError if no generation is possible.
        """
        run = self._run
        while True:
            try:
                self._parts = self._paths.open(partners, timeout_seconds)
                if run.process is None:
                    run.state.doorbell = run.state.doorbell or run.driver.io.doorbell
                return
            except (PeerLost, AssemblyError) as error:
                generations = self._generations
                if generations is None:
                    raise
                lost = set(error.missing) - {run.uid}
                if lost and not isinstance(error, Regrouping):
                    generations.suspect(lost, str(error))
                if not generations.over(error, run.config.suspect_seconds):
                    raise
                self._install_next(generations)

    def replace(self, partners: frozenset[int] | None) -> Generation:
        """Releases the parts of the old generation, waits for the next one, opens its paths, and returns it. Raises
        what `PendingGeneration.wait` raises."""
        assert self._generations is not None
        self._install_next(self._generations)
        self.open(partners, self._run.config.start_timeout_seconds)
        return self._generations.reconfiguration.generation

    def close(self, *, leaving_chunks: bool) -> None:
        """Closes paths as `GenerationPaths.close` does, for a generation that has not failed."""
        self._paths.close(broken=False, leaving_chunks=leaving_chunks)

    def _install_next(self, generations: Generations) -> None:
        # without the links' lock: aborting may take seconds, during which the node still has to answer pings
        self._paths.close(broken=True, leaving_chunks=False)
        config = self._run.config
        alone = config.start_timeout_seconds
        generations.wait(alone, alone + config.timeout_seconds, self._install)

    def _install(self, generation: Generation) -> None:
        """Replaces the parts of the old generation by those of `generation`. Called with `LinkDriver.lock` held."""
        self._paths.close(broken=True, leaving_chunks=True)
        self._protocol.install(generation, self._run.driver.restart, self._make, clock.now())
