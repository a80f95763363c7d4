"""What needs no learning: the classical optimizer that relaxes alone, teaches as expert and catches a policy's falls."""
