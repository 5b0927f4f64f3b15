"""Transformer blocks whose pointwise passes are fused with the casts: what `fp8-fused` trains.

May import records, recipes and models.te_blocks; an old torch, without FP8, imports `context` alone.
"""
