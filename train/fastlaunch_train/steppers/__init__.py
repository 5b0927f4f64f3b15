"""The parts of an optimizer step: by torch, by DeepSpeed, forward only; and the optimizers.

May import the rooms from records to workloads.
"""
