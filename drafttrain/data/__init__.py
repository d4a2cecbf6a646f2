"""From conversations to token ids, loss masks and features."""
