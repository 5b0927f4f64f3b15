"""A comparison as text, Markdown, JSON, CSV and a page; runs for experiment trackers.

May import core, catalog, measure and analysis.
"""
