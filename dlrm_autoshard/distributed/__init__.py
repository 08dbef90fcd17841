"""Code that runs on ranks: exchange, sharded embeddings, the training step, its clock, moves between ranks.

In: tables, a plan, batches. Out: a trained step, measured stages, moved tables.
The home of torch.distributed and fbgemm. Knows no planner, no records and no trainer.
"""
