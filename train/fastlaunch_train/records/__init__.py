"""The JSONL contract between the two halves. No torch.

May import nothing of ours.
"""
