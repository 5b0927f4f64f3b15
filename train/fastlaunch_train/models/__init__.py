"""What recipes do to a model: blocks, precision, Transformer Engine, float8, compile, attention, fusion.

May import the rooms from records to distributed, and the contract and the registry of workloads.
"""
