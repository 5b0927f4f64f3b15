"""What to run: `Options` as typed -> jobs; variants, data, scripts; what travels: code, wheels, images.

May import core, catalog and aws.
"""
