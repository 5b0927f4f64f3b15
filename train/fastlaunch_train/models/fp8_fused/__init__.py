"""Transformer blocks whose pointwise passes are fused with the casts, as `fp8-fused` trains them.

May import records, recipes and models.te_blocks; an old torch, without FP8, can import `context` alone.
"""
