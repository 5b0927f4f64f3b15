"""What must hold before and while training: equivalence, finiteness, a batch that fits.

May import the rooms from records to steppers.
"""
