"""A comparison as text, JSON and CSV; runs for experiment trackers.

May import core, catalog, measure and analysis.
"""
