"""The evaluator's core: draft, verify in one target forward, accept by rejection sampling, roll back, repeat."""
