"""A comparison as one HTML page that needs no network, with charts by Vega-Lite.

May import core, catalog, measure, analysis and the rest of report.
"""
