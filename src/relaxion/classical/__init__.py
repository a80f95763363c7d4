"""What needs no learning: the optimizer that relaxes alone, teaches as expert and catches the falls of a policy."""
