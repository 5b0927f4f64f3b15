"""What one optimizer step is: torch, DeepSpeed, forward only; and the optimizers.

May import the rooms from records to workloads.
"""
