"""Plans: what graphs, rules, codecs, local steps and batches would cost on given links, before anything is trained."""
