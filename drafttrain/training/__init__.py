"""Training of any Draft on transformers.Trainer."""

BUCKET = 50_000_000
"""Elements of DeepSpeed's buffers, in fp32, where its configuration does not say: its own 500 million are of another
size than drafts. (Here, where reading it imports no trainer: plans count with it.)
"""
