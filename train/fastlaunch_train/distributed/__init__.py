"""Ranks together: DDP, FSDP2, the all-reduce check, the fabric.

May import records, recipes, process, and of workloads the contract and the registry.
"""
