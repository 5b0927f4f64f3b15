"""Batches of images, text and reviews, synthetic or from files.

May import the rooms from records to models, and the contract and the registry of workloads.
"""
