"""How to train: `Recipe`, its rules, and the one table of what can run where (requirements.py). No torch.

May import records.
"""
