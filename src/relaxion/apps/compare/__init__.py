"""Comparisons of optimizers, as commands show them."""
