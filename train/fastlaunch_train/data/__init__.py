"""Batches: images, text and reviews, made up or from files.

May import the rooms from records to models, and of workloads the contract and the registry.
"""
