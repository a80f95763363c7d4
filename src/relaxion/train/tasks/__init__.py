"""What is trained: an agent on vectors or on structures, a stiffness model."""
