"""The dense part of DLRM: bottom MLP, interaction, top MLP; or a module of the user's own.

In: dense features [B, F] and pooled vectors. Out: logits [B]. Plain torch: no ranks, no fbgemm.
"""
