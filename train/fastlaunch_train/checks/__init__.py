"""Checks before and during training: equivalence, finiteness, a batch that fits.

May import the rooms from records to steppers.
"""
