"""Checks before and during training: equivalence, gradients, finiteness, clocks under load.

May import the rooms from records to steppers.
"""
