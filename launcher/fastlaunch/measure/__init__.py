"""Measurements: step records -> `RunSummary`, and published figures.

May import core, catalog and jobs.
"""
