"""One run from its options to its end.

May import every room but node.
"""
