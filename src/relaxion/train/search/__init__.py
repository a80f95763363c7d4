"""Learning to search: clusters to learn on, hops collected from walks, the hop environment of Gymnasium."""
