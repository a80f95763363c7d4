"""The one judge: force calls counted, sets of starts, runs of optimizers, statistics."""
