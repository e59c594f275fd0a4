"""PATH CASE NODES BATCH SECONDS: prints node-updates of the package gossipy in the folder PATH per second and per
second of CPU.

It uses one process, as gossipy has no more. Every node sends its model once per round to a random peer, which merges it
and makes one step (`MERGE_UPDATE`); nothing is evaluated in the timed rounds.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from typing import Any


def main() -> None:
    path, case, *numbers = sys.argv[1:]
    nodes, batch, seconds = int(numbers[0]), int(numbers[1]), float(numbers[2])
    sys.path[:0] = path.split(":")
    if importlib.util.find_spec("torchvision") is None:  # imported only for its downloads
        sys.modules["torchvision"] = types.ModuleType("torchvision")
    import torch
    from gossipy import LOG
    from gossipy.core import AntiEntropyProtocol, CreateModelMode, StaticP2PNetwork
    from gossipy.data import DataDispatcher
    from gossipy.data.handler import ClassificationDataHandler
    from gossipy.model.handler import TorchModelHandler
    from gossipy.model.nn import LogisticRegression, TorchMLP
    from gossipy.node import GossipNode
    from gossipy.simul import GossipSimulator

    LOG.setLevel("ERROR")
    torch.set_num_threads(1)
    data = DataDispatcher(
        ClassificationDataHandler(torch.randn(40 * nodes, 64), torch.randint(10, (40 * nodes,)), test_size=0.1),
        n=nodes, eval_on_user=False, auto_assign=True,
    )  # fmt: skip
    model: Any = LogisticRegression(64, 10) if case == "logistic" else TorchMLP(64, 10, (100,))
    handler = TorchModelHandler(
        net=model, optimizer=torch.optim.SGD, optimizer_params={"lr": 0.05}, criterion=torch.nn.CrossEntropyLoss(),
        local_epochs=0, batch_size=batch, create_model_mode=CreateModelMode.MERGE_UPDATE,
    )  # fmt: skip
    nodes_by_id = GossipNode.generate(data_dispatcher=data, p2p_net=StaticP2PNetwork(nodes), model_proto=handler,
                                      round_len=nodes, sync=True)  # fmt: skip
    simulator = GossipSimulator(nodes=nodes_by_id, data_dispatcher=data, delta=nodes,
                                protocol=AntiEntropyProtocol.PUSH, sampling_eval=0.0)  # fmt: skip
    for node in nodes_by_id.values():
        node.has_test, node.evaluate = lambda: False, lambda *_: {}
    simulator.notify_evaluation = lambda *_: None
    simulator.init_nodes(seed=1)
    simulator.start(n_rounds=1)
    rounds, started, before = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - started) < seconds:
        simulator.start(n_rounds=1)
        rounds += 1
    used = time.process_time() - before
    sys.stdout.write(f"\n{rounds * nodes / elapsed} {rounds * nodes / used}\n")


if __name__ == "__main__":
    main()
