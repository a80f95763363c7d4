"""A whole run: from a recipe through its task and the loop into its folder, and from there to a policy file."""
