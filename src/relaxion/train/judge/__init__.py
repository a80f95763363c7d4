"""Force calls of optimizers on the same starts, judged in one way."""
