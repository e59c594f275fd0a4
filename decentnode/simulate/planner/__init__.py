"""The planner: predicts what graphs, rules, codecs, local steps and batch sizes would cost on given links, without
training."""
