"""Drafts: what proposes tokens. `load_draft` reads any checkpoint this package knows."""

from drafttrain.drafts.base import Batch, Draft, DraftError, DraftLoss, Proposal, Proposer
from drafttrain.drafts.loading import load_draft

__all__ = ["Batch", "Draft", "DraftError", "DraftLoss", "Proposal", "Proposer", "load_draft"]
