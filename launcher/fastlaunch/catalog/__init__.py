"""What exists and what it costs: instances, GPUs, prices, base images, published experiments.

May import core.
"""
