"""Training of any Draft on transformers.Trainer."""
