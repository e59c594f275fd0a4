#!/usr/bin/env bash
# bash eval/bench.sh rounds [CASE...]    time per round, start and memory, beside the compute floor of the same run
# bash eval/bench.sh processes [NODES]   several nodes per process: CPU time beside bare steps, memory, threads, start
# bash eval/bench.sh pairs --before CHECKOUT [CASE...]  rounds of this commit and another one in turn: ratio, its interval
# bash eval/bench.sh start [CASE...]     whole commands, from start to exit: seconds and CPU, beside the local steps alone and,
#                                        with --before CHECKOUT, beside other commits
# bash eval/bench.sh asynchronous        one slow node among eight: rounds of the others and loss after equal time, by schedule
#                                        and with PyTorch DDP
# bash eval/bench.sh link                one edge: throughput and latency, beside raw sockets and memory copies
# bash eval/bench.sh digits_table [ARM...]  accuracies of configs/compare/digits_*, beside a NumPy simulation's
# bash eval/bench.sh overlap             two machines on a slow link: exposed communication by schedule (needs root)
# bash eval/bench.sh virtual [--collective]  predicted rounds beside real ones on links of 0.1 to 2.5 Gbit/s (needs root);
#                                        with --collective for gloo's batches and all_reduce
# bash eval/bench.sh calls               fixed costs of gloo's batches and all_reduce
# bash eval/bench.sh sharing [PARAMETERS [RULE...]]  rules and codecs in multiples of one memory copy of the model
# bash eval/bench.sh secure_aggregation  CPU time of a node's rule in one round, beside that of full
# bash eval/bench.sh ddp [CASE...]       steps of data parallel training: alone, PyTorch DDP, DecentralizedDataParallel with
#                                        and without regroup; AccumAdam, slow links, stragglers
# bash eval/bench.sh slow_links          four machines on cables of 100 Mbit/s and 1 Gbit/s: time to learn, beside PyTorch DDP
#                                        with fp16, PowerSGD and model averaging; --latency MS (needs root)
# bash eval/bench.sh outer_steps         loss of a small GPT by bytes: rules that exchange every few steps, beside SparseLoCo
# bash eval/bench.sh collective          torch.distributed's gloo through decentnode, beside gloo alone and other transports
# bash eval/bench.sh simulate [CASE...]  node-updates per second of simulated runs, beside bare loops; --gossipy PATH
# bash eval/bench.sh scale [CONFIG...]   memory and speed of simulations of 1,000 and 10,000 nodes
# bash eval/bench.sh graph_bytes [--seeds N] [--rounds N]  accuracy by graph, and the bytes until 85 %: table of
#                                        docs/howto/graphs.rst
# bash eval/bench.sh training_rounds [--seeds N] [--rounds N]  accuracy by the rounds with local steps: table of
#                                        docs/howto/training.rst
# bash eval/bench.sh effect_of_n [GRAPH...]  consensus and accuracy with 16 to 4,096 nodes, by graph: table and picture
set -euo pipefail
. "$(dirname "$0")/_env.sh"
what=${1:-rounds}
[ $# -gt 0 ] && shift
script=$root/eval/benchmarks/$what.py
if [ ! -f "$script" ] || [ "$what" = common ] || [ "$what" = floor ] || [ "$what" = delayed ] || [ "$what" = paced ] ||
  [ "$what" = ddp_paced ] || [ "$what" = sweep_tables ] ||
  [ "$what" = digits_reference ] || [ "$what" = beside_gossipy ]; then
  echo "unknown benchmark '$what'; there is: asynchronous, calls, collective, ddp, digits_table, effect_of_n, graph_bytes, link, outer_steps, overlap, pairs, processes, rounds, scale, secure_aggregation, sharing, simulate, slow_links, start, training_rounds, virtual" >&2
  exit 2
fi
exec "$venv/bin/python" "$script" "$@"
