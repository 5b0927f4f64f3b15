"""What to train: the registry (no torch), the contract of a workload, and a file for each.

May import the rooms from records to models, and data.
"""
