"""Code that runs on ranks: exchange, sharded embeddings, the training step, its clock, moves between ranks.

Takes tables, a plan and batches; trains steps, measures stages and moves tables. The only home of torch.distributed and
fbgemm. Knows no planner, no records and no trainer.
"""
