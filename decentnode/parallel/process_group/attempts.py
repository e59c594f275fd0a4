"""Gives the ranks of one attempt of torchrun a store of their own.

torchrun restarts ranks with the store of the attempt before, in which torch finds the addresses of processes that are
gone (https://github.com/pytorch/pytorch/issues/135712). The environment does not tell the attempts apart: each machine
counts only the restarts that its own ranks have caused.
"""

from __future__ import annotations

import torch.distributed as dist

from decentnode import clock, entropy
from decentnode.parallel.process_group.rank_status import store_outlives_ranks

KEY = "decentnode/attempt"
POLL_SECONDS = 0.01


def attempt_store(store: dist.Store, rank: int, world_size: int, seconds: float) -> dist.Store:
    """Returns a part of the store that no earlier attempt has used; the store itself if it is new. Blocking, on all
    ranks. Raises RuntimeError after so many seconds.

    Every rank asks rank 0 with a new word, and rank 0 answers with it and the name of the attempt until all ranks have
    that name: it may have answered a process that is gone.
    """
    if world_size == 1 or not store_outlives_ranks():
        return store
    until, name = clock.now() + seconds, entropy.word(8)
    if rank == 0:
        answered = dict.fromkeys(range(1, world_size), "")
        while answered:
            for other, before in list(answered.items()):
                word = _read(store, f"{KEY}/{other}/word")
                if word != before:
                    store.set(f"{KEY}/{other}/answer", f"{word} {name}")
                    answered[other] = word
                elif _read(store, f"{KEY}/{other}/taken") == name:
                    del answered[other]
            _pause(until, "not all ranks have asked rank 0 for the attempt")
    else:
        own, word = entropy.word(8), ""
        store.set(f"{KEY}/{rank}/word", own)
        while word != own:
            _pause(until, "rank 0 has not answered")
            word, _, name = _read(store, f"{KEY}/{rank}/answer").partition(" ")
        store.set(f"{KEY}/{rank}/taken", name)
    return dist.PrefixStore(f"{KEY}/{name}", store)


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _pause(until: float, what: str) -> None:
    if clock.now() > until:
        raise RuntimeError(f"timed out: {what}")
    clock.sleep(POLL_SECONDS)
