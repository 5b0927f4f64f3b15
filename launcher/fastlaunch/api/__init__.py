"""The Python API: typed functions over the rooms, which the command line calls too.

May import every room but cli.
"""
