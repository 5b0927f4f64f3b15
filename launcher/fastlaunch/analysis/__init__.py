"""What measurements mean: statistics, cost, verdicts, convergence, finish, target. Pure: no I/O, no clock.

May import core, catalog and measure.
"""
