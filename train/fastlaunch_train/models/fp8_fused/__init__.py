"""Transformer blocks whose pointwise passes are fused with the casts: what recipe `fp8-fused` trains."""
