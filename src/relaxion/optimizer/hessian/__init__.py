"""Models of the Hessian."""
