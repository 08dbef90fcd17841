"""Our variant of DreamShard: estimated MDP, policy, training. The reference algorithm is in `baselines`."""
