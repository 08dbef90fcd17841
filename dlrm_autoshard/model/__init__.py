"""The dense part of DLRM: bottom MLP, interaction, top MLP; or a user's own module.

Maps dense features [B, F] and pooled vectors to logits [B]. Plain torch: no ranks, no fbgemm.
"""
