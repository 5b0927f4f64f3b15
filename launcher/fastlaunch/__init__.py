"""fastlaunch: which AWS instance and which training recipe give the most training per dollar."""

__version__ = "0.1.0"
