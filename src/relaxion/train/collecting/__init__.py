"""Kinds of starts to train on, made from seed, kind and number."""
