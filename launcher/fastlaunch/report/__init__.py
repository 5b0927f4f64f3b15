"""A comparison as text, JSON and CSV.

May import core, catalog, measure and analysis.
"""
