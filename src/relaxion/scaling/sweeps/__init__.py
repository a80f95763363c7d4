"""Sweeps: many short runs of one recipe, each with other settings that Optuna proposes."""
