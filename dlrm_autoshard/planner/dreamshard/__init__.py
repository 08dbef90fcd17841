"""The published algorithm: the estimated MDP, its policy, and their training."""
