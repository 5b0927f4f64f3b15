"""What to run: options as typed -> `CloudRequest` -> `JobSpec`s, their variants and data.

May import core and catalog.
"""
