"""What a relaxation costs: calls counted inside the calculator, optimizers side by side on the same starts."""
