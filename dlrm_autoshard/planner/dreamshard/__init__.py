"""Our DreamShard: the estimated MDP, its policy, and their training. The reference algorithm is in `baselines`."""
