"""Opens the data section of an experiment: which node trains on which samples, and is tested on which."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decentnode import rng
from decentnode.config.component import Config, load_class
from decentnode.data.base import Dataset
from decentnode.data.partition import PARTITIONS
from decentnode.data.partition.checks import checked_parts
from decentnode.errors import DataError
from decentnode.samples import AnySamples, DataSpec, NodeSamples

PLACEHOLDERS = ("{uid}", "{machine}")
"""Placeholders in paths of private data."""
MAX_LISTED_PROBLEMS = 5
"""How many problems with private files are described; further ones are only counted."""
MAX_CACHED_DEALS = 3
"""How many epochs' shares are kept, the most recently dealt ones: enough for the first epoch and for the epochs that
different nodes are in."""


class OpenedData:
    """Opens datasets on first use and computes the nodes' shares, which are the same on every node.

    If a path of the section contains {uid} or {machine}, data is private: each node reads its own files. Nodes that
    read the same files (those of one machine) divide them by the partition. No node needs the files of others.
    """

    def __init__(
        self, config: Any, table: Mapping[str, str], base_dir: Path, machines: Sequence[int], seed: int,
        *, servers: Collection[int] = (), attackers: Collection[int] = (), newcomer_like: int | None = None,
    ) -> None:
        """machines: the machine of every uid; their number is the number of nodes. servers: nodes that get no training
        samples; these are divided among the others. attackers: nodes that evaluate nothing; with `shard_test`, the
        others divide all test samples. newcomer_like: the node whose training samples a newcomer, which is not in the
        mapping, uses; it has none when None."""
        self.config, self._table, self._base_dir = config, table, base_dir
        self._machines, self._seed, self._servers = machines, seed, frozenset(servers)
        self._attackers = frozenset(attackers).intersection(range(len(machines)))
        self._newcomer_like = newcomer_like
        self._opened: dict[tuple[str, ...], Dataset] = {}
        self._dealt: dict[tuple[tuple[str, ...], int], dict[int, np.ndarray]] = {}
        """By group of nodes and epoch: the shares of the nodes, for the most recently dealt epochs."""
        self._shares_among_members: dict[tuple[int, ...], dict[int, np.ndarray]] = {}
        """By members: their shares including those of absent nodes, for the sets of members that were computed last."""
        self._test: AnySamples | None = None
        self._own_parts: dict[tuple[str, ...], dict[int, np.ndarray]] = {}
        self._paths = [name for name, value in config if isinstance(value, Path) and _has_placeholder(value)]

    @property
    def num_nodes(self) -> int:
        return len(self._machines)

    @property
    def private(self) -> bool:
        return bool(self._paths)

    @property
    def deals(self) -> bool:
        """Whether some nodes read the same files and divide them by the partition."""
        return any(len(uids) > 1 for uids in self._groups())

    @property
    def sharded(self) -> bool:
        """Whether every node tests its own model only on its part of the test set."""
        return bool(getattr(self.config, "shard_test", False)) and self.test != "own"

    @property
    def test(self) -> str:
        """The value of `data.test`, or its default: global, own or both."""
        chosen: str | None = getattr(self.config, "test", None)
        return chosen or ("own" if self.private else "global")

    def check(self) -> None:
        """Raises DataError if keys contradict each other."""
        if self.private and self.test != "own":
            raise DataError(f"data.test must be own where each node has private files, got {self.test}")
        wanted = getattr(self.config, "sample_test", None)
        if wanted is not None and self.test == "own":
            raise DataError("data.sample_test draws from the global test set, which is not used with data.test: own")
        if wanted is not None and wanted > (available := self.dataset().num_test()):
            raise DataError(f"data.sample_test must be at most the {available} test samples, got {wanted}")
        if self.private:
            self.dataset().check_private()

    def private_problems(self, uids: Collection[int]) -> list[str]:
        """Returns the problems with the private files of these nodes: at most MAX_LISTED_PROBLEMS sentences, and how
        many more there are. Files of other nodes are not opened."""
        found = []
        for group in self._groups() if self.private else ():
            if not (mine := sorted(set(uids).intersection(group))):
                continue
            try:
                self._shares_of(group)
            except DataError as error:
                found.append(f"node{'s' if len(mine) > 1 else ''} {', '.join(map(str, mine))}: {error}")
        if len(found) > MAX_LISTED_PROBLEMS:
            found[MAX_LISTED_PROBLEMS:] = [f"and {len(found) - MAX_LISTED_PROBLEMS} more of this kind"]
        return found

    def check_private_files(self, uids: Collection[int]) -> None:
        """Raises DataError with the `private_problems`, if there are any."""
        if found := self.private_problems(uids):
            raise DataError("data: " + "\n  ".join(found))

    def dataset(self, uid: int | None = None) -> Dataset:
        """Returns the dataset that a node reads; None: any dataset that is readable here. Raises DataError."""
        if uid is None:
            return self._first_readable() if self.private else self._open(self._group(0), self.config)
        return self._open(self._group(uid), self._config_of(uid))

    def _first_readable(self) -> Dataset:
        first: DataError | None = None
        for uid in range(len(self._machines)):
            try:
                return self.dataset(uid)
            except DataError as error:
                first = first or error
        assert first is not None
        raise first

    def _open(self, group: tuple[str, ...], config: Config) -> Dataset:
        if group not in self._opened:
            self._opened[group] = load_class(config.name, self._table, "data")(config, self._base_dir)
        return self._opened[group]

    def _config_of(self, uid: int) -> Config:
        paths = dict(zip(self._paths, map(Path, self._group(uid)), strict=True))
        copied: Config = self.config.model_copy(update=paths)
        return copied

    def _group(self, uid: int) -> tuple[str, ...]:
        """Returns the paths of a node's private files; nodes with equal paths read the same files."""
        values = (str(getattr(self.config, name)) for name in self._paths)
        return tuple(each.replace("{uid}", str(uid)).replace("{machine}", str(self._machines[uid])) for each in values)

    @property
    def spec(self) -> DataSpec:
        """The description of the data, which is the same for all nodes."""
        return self.dataset().spec

    # -- shares of nodes --------------------------------------------------------------------------------------

    def shares(self) -> dict[int, np.ndarray]:
        """Returns by uid the sorted indices of the training samples, for all nodes whose files are on this machine.

        Raises DataError.
        """
        found: dict[int, np.ndarray] = {}
        failed: DataError | None = None
        for uids in self._groups():
            try:
                found |= self._shares_of(uids)
            except DataError as error:
                if not self.private:
                    raise
                failed = failed or error
        if not found and failed is not None:
            raise failed
        return found

    def _groups(self) -> Iterator[list[int]]:
        yield from self._by_group.values()

    @functools.cached_property
    def _by_group(self) -> dict[tuple[str, ...], list[int]]:
        groups: dict[tuple[str, ...], list[int]] = {}
        for uid in range(len(self._machines)):
            groups.setdefault(self._group(uid), []).append(uid)
        return groups

    def _shares_of(self, uids: Sequence[int], epoch: int = 0) -> dict[int, np.ndarray]:
        """Returns the shares of nodes that read the same files. epoch: from 1 on, all samples are dealt again for it.

        The shares of the last MAX_CACHED_DEALS epochs are kept, because every node of a process asks for them.
        """
        key = self._group(uids[0]), epoch
        if key not in self._dealt:
            while len(self._dealt) >= MAX_CACHED_DEALS * len(self._by_group):
                del self._dealt[next(iter(self._dealt))]
            self._dealt[key] = self._deal(uids, epoch)
        return self._dealt[key]

    def _deal(self, uids: Sequence[int], epoch: int) -> dict[int, np.ndarray]:
        dataset = self.dataset(uids[0])
        chosen, servers = self.config.partition, self._servers.intersection(uids)
        nothing = dict.fromkeys(servers, np.empty(0, np.int64))
        uids = [uid for uid in uids if uid not in servers]
        if not uids:
            return nothing
        partition = load_class(chosen.name, PARTITIONS, "partition")(chosen)
        if partition.needs_machines:
            partition.set_machines(self._by_machine(uids))
        labels = dataset.train_targets()
        keys = dataset.train_keys()
        if labels is None and partition.needs_labels:
            within = getattr(chosen, "within", chosen)
            would = "iid, fractions or ordered" if keys is None else "iid, fractions, ordered or by_key"
            raise DataError(f"partition {within.name} deals by classes, but this data has none; use {would}")
        if labels is None:
            labels = np.broadcast_to(np.int64(0), (dataset.num_train(),))
        owner = rng.GLOBAL if not self.private else uids[0]
        generator = rng.stream(self._seed, owner, "partition", epoch if epoch else -1)
        parts = checked_parts(partition.split(labels, len(uids), generator, keys), chosen.name, len(uids), len(labels))
        return dict(sorted({**nothing, **dict(zip(uids, parts, strict=True))}.items()))

    def shares_among(self, members: Collection[int]) -> dict[int, np.ndarray]:
        """Returns the members' shares when all other nodes are absent. A pure function of the members.

        Each member keeps its own share, and the partition deals the samples of absent nodes to the members that train.
        If the partition cannot deal so few samples, or to so many nodes, they are dealt evenly at random. Raises
        DataError.
        """
        key = tuple(sorted(members))
        if key not in self._shares_among_members:
            while len(self._shares_among_members) >= MAX_CACHED_DEALS:
                del self._shares_among_members[next(iter(self._shares_among_members))]
            self._shares_among_members[key] = self._deal_among(key)
        return self._shares_among_members[key]

    def _deal_among(self, members: Sequence[int]) -> dict[int, np.ndarray]:
        shares = self._shares_of(range(self.num_nodes))
        orphans = np.sort(np.concatenate([np.empty(0, np.int64), *(mine for uid, mine in shares.items()
                                                                  if uid not in members)]))  # fmt: skip
        receivers = [uid for uid in members if uid not in self._servers]
        if not receivers or not len(orphans):
            return {uid: shares[uid] for uid in members}
        dataset, chosen = self.dataset(), self.config.partition
        labels, keys = dataset.train_targets(), dataset.train_keys()
        labels = np.zeros(len(orphans), np.int64) if labels is None else labels[orphans]
        draw = rng.stream(self._seed, rng.GLOBAL, "orphans")
        try:
            partition = load_class(chosen.name, PARTITIONS, "partition")(chosen)
            parts = partition.split(labels, len(receivers), draw, None if keys is None else keys[orphans])
            parts = checked_parts(parts, chosen.name, len(receivers), len(orphans))
            if sum(map(len, parts)) < len(orphans):
                raise DataError(f"partition {chosen.name} assigns some samples to no node")
        except DataError:
            draw = rng.stream(self._seed, rng.GLOBAL, "orphans")
            parts = np.array_split(draw.permutation(len(orphans)), len(receivers))
        dealt = dict(zip(receivers, parts, strict=True))
        return {uid: np.sort(np.concatenate([shares[uid], orphans[dealt[uid]]])) if uid in dealt else shares[uid]
                for uid in members}  # fmt: skip

    def _by_machine(self, uids: Sequence[int]) -> list[list[int]]:
        """Returns for each machine the positions in `uids` of its nodes."""
        found: dict[int, list[int]] = {}
        for place, uid in enumerate(uids):
            found.setdefault(self._machines[uid], []).append(place)
        return list(found.values())

    def of(self, uid: int) -> NodeSamples:
        """Returns the samples that one node trains and is tested on. Raises DataError."""
        self.check()
        if uid >= len(self._machines):
            return self._newcomer_samples(uid)
        group = self._by_group[self._group(uid)]
        dataset, shares = self.dataset(uid), self._shares_of(group)
        train = dataset.train(shares[uid])

        def deal_again(epoch: int) -> AnySamples:
            return dataset.train(self._shares_of(group, epoch)[uid])

        def among(members: tuple[int, ...]) -> tuple[AnySamples, int]:
            mine = self.shares_among(members)[uid]
            return dataset.train(mine), len(mine) - len(shares[uid])

        deal_among = None if self.private else among
        if self.test == "own":
            return NodeSamples(train, self._own_test(dataset, shares, uid), shared_test=False, deal_again=deal_again,
                               deal_among=deal_among, trains=uid not in self._servers)  # fmt: skip
        if self.sharded:
            test, shared = dataset.test_part(self._test_shard(uid)), False
        else:
            test, shared = self.global_test(dataset), True
        own = self._own_test(dataset, shares, uid) if self.test == "both" else None
        return NodeSamples(train, test, own, shared_test=shared, pooled=self.sharded, deal_again=deal_again,
                           deal_among=deal_among, trains=uid not in self._servers)  # fmt: skip

    def num_test(self, uid: int) -> int:
        """Returns how many test samples a node has. Raises DataError."""
        if self.test == "own":
            return len(self._own_test(self.dataset(uid), self._shares_of(self._by_group[self._group(uid)]), uid))
        sampled = self._test_shard(uid) if self.sharded else self.tested()
        return self.dataset().num_test() if sampled is None else len(sampled)

    def _test_shard(self, uid: int) -> np.ndarray:
        """Returns the indices of a node's part of the global test samples, with `shard_test`."""
        sampled, index = self.tested(), uid - sum(each < uid for each in self._attackers)
        every = sampled if sampled is not None else np.arange(self.dataset().num_test())
        return every[index :: max(1, len(self._machines) - len(self._attackers))]

    def label_shares(self, uid: int) -> np.ndarray | None:
        """Returns the fraction of a node's training samples with each label, [num_classes] float32; None without
        classes. Raises DataError."""
        labels, classes = self.dataset(uid).train_targets(), self.spec.num_classes
        if labels is None or classes is None:
            return None
        counts = np.bincount(labels[self.shares()[uid]], minlength=classes).astype(np.float32)
        found: np.ndarray = counts / np.float32(max(1.0, counts.sum()))
        return found

    def _newcomer_samples(self, uid: int) -> NodeSamples:
        """Returns the samples of a node that is not in the mapping: those in its own files if data is private, else
        those of another node, or nothing to train on."""
        if self.private:
            beyond = range(len(self._machines), uid + 1)  # each newcomer counts as on a machine of its own
            machines = [*self._machines, *(max(self._machines) + 1 + each - len(self._machines) for each in beyond)]
            among = OpenedData(self.config, self._table, self._base_dir, machines, self._seed, servers=self._servers)
            return among.of(uid)
        if self._newcomer_like is not None:
            return self.of(self._newcomer_like)
        dataset, nothing = self.dataset(), np.empty(0, np.int64)
        test = dataset.test_part(nothing) if self.test == "own" else self.global_test(dataset)
        own = dataset.test_part(nothing) if self.test == "both" else None
        return NodeSamples(dataset.train(nothing), test, own, shared_test=self.test != "own", trains=False)

    def global_test(self, dataset: Dataset) -> AnySamples:
        """Returns the samples that all nodes are tested on; all nodes of a process share the same object."""
        if self._test is None:
            sampled = self.tested()
            self._test = dataset.test() if sampled is None else dataset.test_part(sampled)
        return self._test

    def tested(self) -> np.ndarray | None:
        """Returns the sorted indices of the global test samples that are used; None if all are."""
        wanted: int | None = getattr(self.config, "sample_test", None)
        if wanted is None:
            return None
        draw = rng.stream(0, rng.GLOBAL, "sampled test")  # not the run's seed: runs with different seeds are comparable
        return np.sort(draw.choice(self.dataset().num_test(), wanted, replace=False))

    def _own_test(self, dataset: Dataset, shares: Mapping[int, np.ndarray], uid: int) -> Any:
        if len(shares) == 1:
            return dataset.test()
        group = self._group(uid)
        if group not in self._own_parts:
            self._own_parts[group] = own_parts(dataset, shares, self._seed)
        return dataset.test_part(self._own_parts[group][uid])


def _has_placeholder(path: Path) -> bool:
    return any(place in str(path) for place in PLACEHOLDERS)


def own_parts(dataset: Dataset, shares: Mapping[int, np.ndarray], seed: int) -> dict[int, np.ndarray]:
    """Returns for each node the sorted indices of test samples with the distribution of its training samples. They are
    disjoint if training samples with the same key are all on one node, and always without keys.

    If test samples have keys, a node gets those of the keys of its training samples. Otherwise each class is divided in
    proportion to how many training samples of it the nodes have; without classes, all samples are divided like one
    class. A node may get none.
    """
    keys, of_train = dataset.test_keys(), dataset.train_keys()
    if keys is not None and of_train is not None:
        return {uid: np.flatnonzero(np.isin(keys, of_train[mine])) for uid, mine in shares.items()}
    labels, of_train = dataset.test_labels(), dataset.train_targets()
    if labels is None or of_train is None:
        labels = np.zeros(dataset.num_test(), np.int64)
        of_train = np.broadcast_to(np.int64(0), (dataset.num_train(),))
    draw = rng.stream(seed, rng.GLOBAL, "own test samples")
    found: dict[int, list[np.ndarray]] = {uid: [] for uid in shares}
    for label in np.unique(labels):
        members = draw.permutation(np.flatnonzero(labels == label))
        num_train = np.array([np.count_nonzero(of_train[mine] == label) for mine in shares.values()], dtype=np.float64)
        if num_train.sum():
            stops = np.round(np.cumsum(num_train) / num_train.sum() * len(members)).astype(np.int64)
            for uid, part in zip(shares, np.split(members, stops[:-1]), strict=True):
                found[uid].append(part)
    return {uid: np.sort(np.concatenate([np.empty(0, np.int64), *parts])) for uid, parts in found.items()}
