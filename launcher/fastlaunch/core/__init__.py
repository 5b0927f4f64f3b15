"""Errors, settings, units, paths, locks, and the types that every room passes on.

May import nothing of ours.
"""
