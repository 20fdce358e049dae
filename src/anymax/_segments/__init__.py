"""Ragged rows below the verbs: which entries belong together, and segments as padded rows."""
